//! Devices: accelerators whose memory can be an I/O buffer.
//!
//! ```text
//!   registry: whose is address A?   (nanoseconds for host memory)
//!       │
//!       ├── emulated   a software GPU: tested everywhere
//!       ├── cuda       whatever the CUDA driver calls device memory
//!       └── p2pmem     PCI memory that the kernel publishes for peer-to-peer
//! ```
//!
//! A device does four things for `io`: it tells what an address is, lends pinned
//! staging memory, copies on queues that keep order, and pins page-cache pages so
//! that it can read them itself. It knows nothing of files.

mod arenas;
pub mod cuda;
pub mod emulated;
mod error;
mod host_memory;
pub mod p2pmem;
pub mod registry;
mod target;
mod thread_queue;
mod traits;

pub use error::{DeviceError, ErrorKind};
pub use target::Target;
pub use thread_queue::{set_thread_stream, thread_stream};
pub use traits::{
    Allocation, Capabilities, Device, DeviceAddr, DeviceId, DeviceKind, Fence, GatherEntry, KernelStore, Pin,
    PinnedBuffer, StreamId, WaitMode,
};
