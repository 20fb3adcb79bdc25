//! Reads of a pinned file: DMA straight out of its pages, which are registered already.

use std::sync::Arc;
use std::time::Instant;

use spinio_device::{FenceGuard, StreamOrder, Target, WaitMode};
use spinio_files::Files;
use spinio_plan::{Reason, Route};
use spinio_stats::RequestSpan;
use spinio_sys::linux::Fd;

use crate::pinned_file::PinGuard;

/// Bytes from which the caller sleeps while it waits.
const SLEEP_MIN: u64 = 64 << 20;

impl PinGuard {
    /// Reads `len` bytes at `offset`, a range of the file, after the event `after`. False: they are not reliable, and
    /// have to be read on another route.
    #[expect(clippy::too_many_arguments, reason = "the request, as it came")]
    pub fn read(
        &self,
        files: &Arc<Files>,
        span: &RequestSpan,
        fd: Fd,
        to: Target,
        offset: u64,
        len: u64,
        after: Option<&FenceGuard>,
    ) -> bool {
        let started = Instant::now();
        let Ok(stream) = StreamOrder::after(self.pages.device, after) else { return false };
        let queued = self.pages.queue_copy(stream.id(), to.addr, offset, len);
        // After an error too: some copies may be in flight, and the pins must outlive them.
        let drained = stream.synchronize(if len > SLEEP_MIN { WaitMode::Block } else { WaitMode::Context });
        if queued.and(drained).is_err() || !self.is_still_valid(files, fd) {
            return false;
        }
        files.stats().record_piece(span, Route::Dma, Reason::Pinned, 0, len, started);
        true
    }
}
