//! Reads of a pinned file: DMA straight out of its pages, which are registered already.

use std::sync::Arc;
use std::time::Instant;

use spinio_device::{Fence, Target, WaitMode};
use spinio_files::Files;
use spinio_plan::{Reason, Route};
use spinio_stats::RequestSpan;
use spinio_sys::linux::Fd;
use spinio_transfer::Error;

use crate::pinned_file::PinGuard;

/// Bytes from which the caller sleeps while it waits.
const SLEEP_MIN: u64 = 64 << 20;

impl PinGuard {
    /// Reads `len` bytes at `offset`, a range of the file, after the event `after`. False: the bytes are not reliable,
    /// and have to be read on another route.
    #[expect(clippy::too_many_arguments, reason = "the request, as it came")]
    pub fn read(
        &self,
        files: &Arc<Files>,
        span: &RequestSpan,
        fd: Fd,
        to: Target,
        offset: u64,
        len: u64,
        after: Option<&Fence>,
    ) -> Result<bool, Error> {
        let started = Instant::now();
        let device = self.pages.device;
        let stream = device.acquire_stream().map_err(|e| Error::device(e, "read", offset, len))?;
        let ordered = match after {
            Some(after) => device.wait_event(stream, after),
            None => Ok(()),
        };
        let queued = ordered.and_then(|()| self.pages.queue_copy(stream, to.addr, offset, len));
        // After an error too: some copies may be in flight, and the pins must outlive them.
        let drained = device.synchronize(stream, if len > SLEEP_MIN { WaitMode::Block } else { WaitMode::Context });
        device.release_stream(stream);
        if queued.and(drained).is_err() || !self.is_still_valid(files, fd) {
            return Ok(false);
        }
        files.stats().record_piece(span, Route::Dma, Reason::Pinned, 0, len, started);
        Ok(true)
    }
}
