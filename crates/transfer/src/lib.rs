//! Host memory for transfers to and from a device.
//!
//! ```text
//!   bounce/        pinned buffers between the page cache or storage and the device, per device
//!   bounce_pools   those pools, for requests that are waited for and for those in the order of a stream
//!   unpin          page-cache pages that were registered for a request, unregistered soon after it
//!   mapping        shared read-only mappings of files, and their page tables
//!   host_memory    ordinary memory for requests that may use no bounce buffer
//!   kernel_cache   compiled device code in the user's cache directory
//!   error          errors of requests
//! ```

mod aligned_buf;
pub mod bounce;
mod bounce_pools;
mod error;
mod host_memory;
mod kernel_cache;
mod mapping;
mod unpin;

pub use aligned_buf::AlignedBuf;
pub use bounce_pools::BouncePools;
pub use error::{Error, ErrorKind};
pub use host_memory::HostMemory;
pub use kernel_cache::KernelCache;
pub use mapping::Mapping;
pub use unpin::{DeferredUnpin, InFlightGuard};
