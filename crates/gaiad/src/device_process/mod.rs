//! The device process: it copies bytes of device memory into memory files, for the server.
//!
//! ```text
//!   GPU program ── descriptor of a chunk ──> server
//!                                              │ chunk, memory file (once each), ranges of bytes      requests.rs
//!                                              v
//!                                           device process                                            process.rs
//!        device memory ── copy engine ──> pinned buffers ── pwrite ──> memory file (slots, or a buffer of the server)
//! ```
//!
//! The server calls no device: a context takes half a GiB of device memory, and a driver may hang or crash. So a process of its
//! own does, a child of the server with its program and another role. It is started by the first request, ends after
//! [`IDLE`] without one, and is started again when it has died; what it had imported it imports again then. So an idle
//! daemon has no context.
//!
//! **Who copies**: a device process of a killed server may still be copying when that of the next server begins. Each takes
//! a lock of the memory file for its life, so that the second one waits until the first has ended.
//!
//! It trusts the server, not the chunk: its bytes may change while they are copied, and an import that fails is an answer.
//!
//! Known flaw: a copy that a device never completes keeps its lock, and with it later copies to that file, until the
//! driver gives up. The process is killed after [`WITHIN`], and the server's requests fail once it has ended. Whether it was
//! the device, or the process just did not run, cannot be told: arrivals.rs tries it again.

mod messages;
mod process;
mod requests;

use std::time::Duration;

pub(crate) use messages::CopyRange;
pub(crate) use process::run;
pub(crate) use requests::{DeviceChunk, DeviceProcess, Target};

/// It ends after so long without a request.
const IDLE: Duration = Duration::from_secs(10);
/// A request that is not answered in this time has failed, and the process is killed.
const WITHIN: Duration = Duration::from_secs(30);

#[cfg(test)]
pub(crate) mod tests;
