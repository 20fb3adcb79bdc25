//! The handle of a stream-ordered move.

use std::path::PathBuf;

use spinio_io::AsyncResult;
use spinio_sys::Errno;

use crate::{Direction, Error, ErrorKind};

/// A stream-ordered move. If the ticket is dropped, the end of the session waits for the move.
#[derive(Clone, Debug)]
pub struct Ticket {
    pub(crate) result: AsyncResult,
    pub(crate) direction: Direction,
    pub(crate) path: PathBuf,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// The process that queued it.
    pub(crate) process: u32,
}

impl Ticket {
    /// Whether the move is complete.
    pub fn is_done(&self) -> bool {
        self.result.result().is_some()
    }

    /// Waits until it is; returns the bytes moved. A forked child has no thread that would complete it.
    pub fn wait(&self) -> Result<u64, Error> {
        if !self.is_done() && self.process != std::process::id() {
            let why = "a process that was forked meanwhile cannot wait for it: its parent can";
            return Err(Error::new(ErrorKind::NoSession, "wait for a move", why));
        }
        let fail = |errno: Errno| {
            Error::new(ErrorKind::Failed(errno), self.direction.verb(), errno.to_string())
                .with_path(&self.path)
                .with_range(self.offset, self.len)
        };
        Ok(self.result.wait().map_err(fail)? as u64)
    }
}
