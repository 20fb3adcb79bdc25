//! Devices: accelerators whose memory can be an I/O buffer.
//!
//! ```text
//!   registry: which device owns address A?   (nanoseconds for host memory)
//!       │
//!       ├── emulated   a software GPU: tested everywhere
//!       ├── cuda       all memory that the CUDA driver reports as device memory
//!       └── p2pmem     PCI memory that the Linux kernel publishes for peer-to-peer
//! ```
//!
//! A device does four things for `io`: it identifies an address, provides pinned
//! bounce buffers, copies on streams that keep order, and pins page-cache pages so
//! that it can read them itself. It has no knowledge of files. [`ReplicaMemory`],
//! [`SharedMemory`] and [`PeerMemory`] are further interfaces, for GAIA.

pub mod cuda;
pub mod emulated;
mod error;
mod fingerprint;
mod host_memory;
pub mod p2pmem;
mod pageable;
mod peer_memory;
mod range_table;
pub mod registry;
mod replica_memory;
mod shared_memory;
mod stream;
mod stream_stop;
mod target;
mod thread_stream;
mod traits;
mod wait;

pub use error::{DeviceError, ErrorKind};
pub use fingerprint::{Fingerprint, PAGE_BYTES};
pub use pageable::PageableAccess;
pub use peer_memory::{PeerError, PeerGroup, PeerMemory, PeerPiece};
pub use replica_memory::{KernelCopy, Piece, ReplicaMemory};
pub use shared_memory::{Chunk, SharedMemory};
pub use stream::{AppStream, FenceGuard, StreamOrder};
pub use stream_stop::StreamStop;
pub use target::Target;
pub use thread_stream::{set_thread_stream, thread_stream};
pub use traits::{
    Allocation, Capabilities, Device, DeviceAddr, DeviceId, DeviceKind, Fence, GatherEntry, KernelStore, Pin,
    PinnedBuffer, StreamId, WaitMode,
};
