//! Batches: thousands of reads, submitted together and awaited together.
//!
//! ```text
//!   operations (fd, offset, length, address)
//!     │ resolve.rs        which file, which memory, how many bytes; what is refused
//!     │ pinned_gather.rs  of a pinned file: gathered straight out of its pages
//!     │ residency.rs      cached or absent
//!     │ partition.rs      dense or sparse
//!     ▼
//!   fragments ── cached, from the front ──> register_engine.rs  registered for this batch, gathered ───┐
//!             ├─ cached, from the back ───> copy_engine.rs      read into bounce buffers,              ┤
//!             │                             batch_readers.rs    by many threads if there are many      │
//!             └─ absent ──────────────────> storage_reader/     O_DIRECT, 128 reads in flight ─────────┤
//!                                                                                                      ▼
//!                          device_sink.rs    a buffer and a list: one launch copies each fragment to its place
//!     ▲
//!     └─ what a route could not deliver is read through the page cache
//! ```
//!
//! One read of 4 KiB at a time costs the program a system call, the driver a copy of 8 us and the caller a wait.
//! Together they cost the processor the lookup of the bytes, and the device one launch per some hundred operations.
//!
//! Passes over very many operations are shared among threads (`spinio_host::parallel`).
//!
//! Each operation has the result of the `pread` that it replaces: bytes, short at the end of the file or of the buffer,
//! or an errno; an operation that fails does not affect the others. Order on the device is that of one large read: the
//! batch begins after all work that the program had queued before, and returns when every byte has arrived. Two
//! operations of a batch with the same destination arrive in any order.
//!
//! No work of a batch continues after the call has returned, also when it ends by a panic (`spinio_host::panic_relay`).
//!
//! Known flaws:
//! - The sizes of files are read once, when the batch begins: bytes appended meanwhile are not seen.
//! - Operations of 4 MiB and more, streams, and descriptors opened with O_DIRECT are read one after another.

mod api;
mod batch_readers;
mod buffer_exchange;
mod copy_engine;
mod ctx;
mod device_sink;
mod handle;
mod op_list;
mod partition;
mod pinned_gather;
mod register_engine;
mod residency;
mod resolve;
mod run;
mod split_range;
mod state;
mod storage_reader;

pub use api::Batches;
pub use handle::BatchHandle;
pub use op_list::{Arg, ReadArrays, ReadOp};
pub use run::BatchResult;
