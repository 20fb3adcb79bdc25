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
//! - Files are named, and stay open between moves, in a descriptor table that the program does not see.
//! - The output is named before the kernel runs, so its storage can be prepared meanwhile. On an array with parity a
//!   download then writes whole stripes and reads nothing. `output/` has the picture and the promises.
//! - Small downloads that follow each other are gathered to stripes; they are in the file when the session ends, is
//!   flushed, or the file is uploaded again.
//!
//! A move is no POSIX call: it may reach the file in pieces, in any order. Who needs the atomicity of `pwrite`, or
//! descriptors, uses `pread` and `pwrite` on device memory; docs/nvmmu.md says when which.
//!
//! Known flaws: a session belongs to one thread at a time; a file that two sessions download into at once has the bytes
//! of both, but stripes that both write in part are not gathered (neither is then alone with the file).

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
