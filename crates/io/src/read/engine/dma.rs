//! `dma`: the device reads the page cache itself.
//!
//! ```text
//!   mapping ──populate──> page tables ──pin──> device reads the pages ──> pins.rs
//!      several pieces under way: one is pinned while the others are read; by the caller, the driver pins one at a time.
//!      Page tables that take long are filled by mates, ahead of him
//! ```
//!
//! A pin holds the pages that are in the page cache now. It serves this request alone
//! (pins.rs gives it back soon after): used again, it would show pages that a direct write
//! or a truncation has since replaced. Nobody touches the mapping with the CPU, so a file
//! that shrinks meanwhile raises no signal: pinning fails, and the piece is copied.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use spinio_device::{ErrorKind, Wait};
use spinio_plan::{Reason, Route};
use spinio_sys::linux::PAGE;

use super::{Hands, LONG, Pinned};
use spinio_transfer::Mapping;
use crate::read::populate::Chunk;
use crate::read::work::Piece;

/// Pieces under way: enough that nobody waits for one before the last is registered, or nearly.
const UNDER_WAY: usize = 16;

impl Hands<'_> {
    pub(super) fn dma(&mut self, piece: Piece) {
        let begun = Instant::now();
        let fall_back = |hands: &Self| hands.job.reroute(piece, 0, Route::Copy, Reason::PinRefused);
        let from = self.job.offset + piece.offset;
        let first = from / PAGE as u64 * PAGE as u64;
        let len = ((from + piece.len - first) as usize).next_multiple_of(PAGE);
        let Some(mapping) = self.job.mapping(self.who) else { return fall_back(self) };
        if self.job.file.pins_refused.load(Relaxed) || first + len as u64 > mapping.len as u64 {
            return fall_back(self);
        }
        let ptr = mapping.ptr.wrapping_add(first as usize);
        let device = self.job.device();
        self.fill_tables(&mapping, piece);
        let pins = &self.job.ctx.files.unpin();
        pins.give_back_overlap(ptr, len);
        // SAFETY: the mapping lives until the pin is given back: `Pinned` and then `Pins` hold it.
        let pin = || unsafe { device.pin(ptr, len) };
        let pin = match pin() {
            // Pins that only wait to be given back may be what is in the way.
            Err(e) if e.kind == ErrorKind::PinRefused && !pins.is_empty() => {
                pins.give_back_all();
                pin()
            }
            first => first,
        };
        let pin = match pin {
            Ok(pin) => pin,
            Err(e) => {
                if e.kind == ErrorKind::Unsupported {
                    self.job.file.pins_refused.store(true, Relaxed);
                }
                return fall_back(self);
            }
        };
        let queued = self.queue(0).and_then(|queue| {
            // SAFETY: the pin lives in `self.pinned` until its fence is done.
            unsafe {
                device.copy_pinned(queue, self.address(piece.offset), &pin, (from - first) as usize, piece.len as usize)
            }?;
            device.fence(queue).inspect_err(|_| {
                let _ = device.drain(queue, Wait::Sleep);
            })
        });
        match queued {
            Ok(fence) => {
                self.pinned.push_back(Pinned { pin, mapping, fence, piece, begun });
                while self.pinned.len() >= UNDER_WAY {
                    self.settle_pin();
                }
                if self.job.ctx.files.unpin().is_full() {
                    while !self.pinned.is_empty() {
                        self.settle_pin();
                    }
                    self.job.ctx.files.unpin().give_back_all();
                }
            }
            Err(_) => {
                device.unpin(pin);
                fall_back(self);
            }
        }
    }

    /// What mates have not filled of a piece.
    fn fill_tables(&self, mapping: &Mapping, piece: Piece) {
        let (begun, mut bytes) = (Instant::now(), 0);
        let tables = &self.job.file.tables;
        for range in self.job.populate.missing(piece.offset..piece.offset + piece.len) {
            let range = self.job.offset + range.start..self.job.offset + range.end;
            if !tables.has(mapping, &range) {
                bytes += range.end - range.start;
                mapping.populate(range);
            }
        }
        if tables.took(bytes, begun.elapsed()) && self.job.populate.find_slow() {
            self.job.fill_tables_ahead();
        }
    }

    /// What a mate does ahead of that.
    pub(super) fn populate(&mut self, chunk: &Chunk) {
        if let Some(mapping) = self.job.mapping(self.who) {
            let (from, to) = (chunk.range.start, chunk.range.end);
            mapping.populate(self.job.offset + from..self.job.offset + to);
        }
        self.job.populate.filled(chunk);
    }

    /// Waits for the oldest pin, leaves it to be given back and tells the job.
    pub(super) fn settle_pin(&mut self) {
        let Some(oldest) = self.pinned.front() else { return };
        let device = self.job.device();
        // A short transfer ends sooner than a sleeper wakes.
        let how = if self.job.len <= LONG { Wait::Context } else { Wait::Sleep };
        let waited = device.wait(&oldest.fence, how);
        let Some(Pinned { pin, mapping, fence, piece, begun }) = self.pinned.pop_front() else { return };
        device.release_fence(fence);
        self.job.ctx.files.unpin().retire(device, pin, mapping);
        match waited {
            Ok(()) => {
                self.count(piece, Route::Dma, piece.reason, piece.len, begun);
                self.job.arrived(piece.offset, piece.len, piece.len, None);
            }
            Err(e) => {
                let error = self.device_error(e, piece);
                self.job.arrived(piece.offset, piece.len, 0, Some(error));
            }
        }
    }
}
