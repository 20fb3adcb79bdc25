//! NVMMU: a file range moved to or from a device in one call.
//!
//! ```text
//!   begin(output) ──> session of this thread           preparation of the output begins (output/)
//!   upload(file, device, offset, length)  ──┐
//!   kernel                                  ├── spinio_io: the fastest correct route, no memory of the application
//!   download(file, device, offset, length) ─┘
//!   end() ──────────> everything is in the files
//! ```
//!
//! What it adds to reads and writes of SPIN:
//!
//! - Files are given by path, and stay open between moves, in an fd table that the program does not see.
//! - The output is known before the GPU kernel runs, so its storage can be prepared meanwhile. On an array with parity
//!   a download then writes full stripes and reads nothing. `output/` has the diagram and the guarantees.
//! - Small consecutive downloads are gathered to stripes; they are in the file when the session ends, is flushed, or
//!   the file is uploaded again.
//!
//! A move is not a POSIX call: it may reach the file in chunks, in any order. A program that needs the atomicity of
//! `pwrite`, or descriptors, uses `pread` and `pwrite` on device memory; docs/nvmmu.md compares them.
//!
//! Known flaws: a session belongs to one thread at a time. A file that two sessions download into concurrently has the
//! bytes of both, but stripes that both write in part are not gathered (neither session then has the file to itself).

mod error;
mod files;
mod moves;
mod output;
mod pipeline;
mod report;
mod session;
mod sessions;
mod ticket;

pub use error::{Error, ErrorKind};
pub use moves::Direction;
pub use pipeline::{PipelineSpec, Slot, Step};
pub use report::{OutputMode, Report};
pub use session::Session;
pub use sessions::{begin, current, end};
pub use ticket::Ticket;
