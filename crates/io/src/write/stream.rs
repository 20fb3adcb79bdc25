//! Writes to what has no offsets: pipes, sockets, terminals, devices.
//!
//! The kernel may keep such a writer waiting as long as it likes, so nothing that others need is held meanwhile: the
//! bytes are gathered in memory of this write's own. A message is one call, whatever its length, up to the staging
//! bound; a pipe, which gives no promise above 4 KiB, is fed in pieces.

use std::time::Instant;

use spinio_plan::{Reason, Route};

use super::gather::{Gathered, Into, Order};
use super::whole::Hand;
use super::{Result, Write, bound};
use spinio_transfer::Error;

/// Bytes for a pipe at once.
const PIPE: usize = 1 << 20;

const KIND: u32 = 0o170_000;
const FIFO: u32 = 0o010_000;

impl Write<'_> {
    /// Piece by piece, until one is taken short.
    pub(super) fn stream(&self) -> Result<usize> {
        let most = if self.stat.mode & KIND == FIFO { PIPE } else { bound(self.ctx) as usize };
        let order = Order::leased(self.parts).map_err(|e| Error::device(e, "write", 0, self.len as u64))?;
        let mut done = 0;
        loop {
            match self.piece(&order, done, most) {
                Ok((wrote, asked)) => {
                    done += wrote;
                    if wrote < asked || done == self.len {
                        return Ok(done);
                    }
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => return Ok(done),
            }
        }
    }

    /// One call of the kernel; bytes written, and bytes that were to be.
    fn piece(&self, order: &Order, done: usize, most: usize) -> Result<(usize, usize)> {
        let begun = Instant::now();
        let at = self.at.map(|at| at + done as u64);
        let parts = self.portion(done, most);
        let mut gathered = Gathered::begin(self.ctx, order, &parts, Into::Own, at.unwrap_or(0))?.fenced()?;
        gathered.wait()?;
        let hand = Hand { twin: None, route: Route::Copy, reason: Reason::Stream };
        let wrote = self.call(hand, &gathered.vectors, at).map_err(|e| self.kernel_error(e, done))?;
        self.ctx.files.stats().piece(&self.watch, Route::Copy, Reason::Stream, done as u64, wrote as u64, begun);
        Ok((wrote, gathered.len))
    }
}
