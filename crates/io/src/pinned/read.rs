//! Reads of a held file: DMA straight out of its pages, which are registered already.

use std::sync::Arc;
use std::time::Instant;

use spinio_device::{Fence, Wait};
use spinio_plan::{Reason, Route};
use spinio_sys::linux::Fd;

use spinio_files::FileTable;
use crate::pinned::Using;
use spinio_stats::Watch;
use spinio_device::Target;
use spinio_transfer::Error;

/// Bytes from which the caller sleeps while it waits.
const LONG: u64 = 64 << 20;

impl Using {
    /// Reads `len` bytes at `offset`, which lie in the file, behind `order`; whether they can be relied on. If not, they
    /// have to be read on another route.
    #[expect(clippy::too_many_arguments, reason = "the request, as it came")]
    pub fn read(
        &self,
        files: &Arc<FileTable>,
        watch: &Watch,
        fd: Fd,
        to: Target,
        offset: u64,
        len: u64,
        order: Option<&Fence>,
    ) -> Result<bool, Error> {
        let begun = Instant::now();
        let device = self.on.device;
        let queue = device.lease_queue().map_err(|e| Error::device(e, "read", offset, len))?;
        let queued = match order {
            Some(order) => device.follow(queue, order),
            None => Ok(()),
        };
        let queued = queued.and_then(|()| self.on.copy(queue, to.addr, offset, len));
        // Behind an error too: a part may be under way, and the pins must not go before it.
        let drained = device.drain(queue, if len > LONG { Wait::Sleep } else { Wait::Context });
        device.return_queue(queue);
        if queued.and(drained).is_err() || !self.is_good(files, fd) {
            return Ok(false);
        }
        files.stats().piece(watch, Route::Dma, Reason::Held, 0, len, begun);
        Ok(true)
    }
}
