//! Writes to descriptors without offsets: pipes, sockets, terminals, devices.
//!
//! The kernel may block such a writer without limit, so it must not hold resources that other requests need: the bytes
//! are gathered in private memory of this write. A message is a single call, whatever its length, up to the staging
//! limit. A pipe, which guarantees no atomicity above 4 KiB, is written in pieces.

use std::time::Instant;

use spinio_device::StreamOrder;
use spinio_plan::{Reason, Route};

use super::gather::{BufferSource, StagedWrite, streams_after_app};
use super::write_once::WriteVia;
use super::{Result, WriteRequest, staging_limit};
use spinio_transfer::Error;

/// Largest write to a pipe in bytes.
const PIPE_CHUNK: usize = 1 << 20;

const S_IFMT: u32 = 0o170_000;
const S_IFIFO: u32 = 0o010_000;

impl WriteRequest<'_> {
    /// Writes piece by piece, until the kernel takes a piece short.
    pub(super) fn write_unseekable(&self) -> Result<usize> {
        let max = if self.stat.mode & S_IFMT == S_IFIFO { PIPE_CHUNK } else { staging_limit(self.ctx) as usize };
        let streams = streams_after_app(self.parts).map_err(|e| Error::device(e, "write", 0, self.len as u64))?;
        let mut done = 0;
        loop {
            match self.write_piece(&streams, done, max) {
                Ok((wrote, requested)) => {
                    done += wrote;
                    if wrote < requested || done == self.len {
                        return Ok(done);
                    }
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => return Ok(done),
            }
        }
    }

    /// A single system call; the bytes written, and the bytes requested.
    fn write_piece(&self, streams: &[StreamOrder], done: usize, max: usize) -> Result<(usize, usize)> {
        let started = Instant::now();
        let at = self.at.map(|at| at + done as u64);
        let parts = self.slice_parts(done, max);
        let mut staged =
            StagedWrite::start(self.ctx, streams, &parts, BufferSource::Private, at.unwrap_or(0))?.with_fences()?;
        staged.wait()?;
        let via = WriteVia { shadow_fd: None, route: Route::Copy, reason: Reason::Stream };
        let wrote = self.write_vectors(via, &staged.vectors, at).map_err(|e| self.kernel_error(e, done))?;
        self.ctx.files.stats().record_piece(
            &self.span,
            Route::Copy,
            Reason::Stream,
            done as u64,
            wrote as u64,
            started,
        );
        Ok((wrote, staged.len))
    }
}
