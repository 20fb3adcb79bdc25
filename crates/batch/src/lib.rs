//! Batches: thousands of reads, submitted together and awaited together.
//!
//! ```text
//!   pieces (fd, offset, length, address)
//!     │ sort.rs       whose file, whose memory, how many bytes; what is refused
//!     │ held.rs       of a held file: gathered straight out of its pages
//!     │ residency.rs  cached or absent
//!     │ lay.rs        crowded or scattered
//!     ▼
//!   items ── cached, from the front ──> register.rs   registered for this batch, gathered ───────┐
//!         ├─ cached, from the back ───> copies.rs     read into pages of staging, ─────────────┤
//!         │                             readers.rs    if there are many by many threads        │
//!         └─ absent ──────────────────> storage.rs    O_DIRECT, 128 reads in flight ───────────┤
//!                                                                                              ▼
//!                          outlet.rs    a page and a list: one launch takes each piece to its place
//!     ▲
//!     └─ what a route could not bring is read through the page cache
//! ```
//!
//! One read of 4 KiB at a time costs the program a system call, the driver a copy of 8 us and everybody a wait. Together
//! they cost the processor what it takes to find the bytes, and the device one launch for some hundred pieces.
//!
//! Passes over very many pieces are shared among threads (`spinio_host::parallel`).
//!
//! Each piece ends as the `pread` that it stands for: bytes, short at the end of the file or of the buffer, or an errno;
//! one that fails does not touch the others. Order on the device is that of one large read: the batch begins behind all
//! work that the program had queued before, and returns when every byte has arrived. Two pieces of a batch that go to the
//! same bytes arrive in any order.
//!
//! Nothing of a batch goes on when the call has ended, also when it ends by a panic (`spinio_host::panic_relay`).
//!
//! Known flaws:
//! - The sizes of files are asked once, when the batch begins: what is appended meanwhile is not seen.
//! - Pieces of 4 MiB and more, streams, and descriptors opened with O_DIRECT are read one after another.

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
