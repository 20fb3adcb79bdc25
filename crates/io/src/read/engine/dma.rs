//! `dma`: the device reads the page cache itself.
//!
//! ```text
//!   mapping ──prefault──> page tables ──pin──> device reads the pages ──> transfer/src/unpin.rs
//!      several pieces in flight: one is pinned while others are read; by the caller, because the driver pins one range at
//!      a time. Copy workers fill page tables ahead of it where that takes long.
//! ```
//!
//! A pin covers the pages that are in the page cache now. It serves this request alone, and is released soon after it:
//! used again, it would show pages that a direct write or a truncation has since replaced. The CPU never touches the
//! mapping, so a file that shrinks meanwhile raises no signal: pinning fails, and the piece is copied.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use spinio_device::{ErrorKind, FenceGuard, WaitMode};
use spinio_plan::{Reason, Route};
use spinio_sys::linux::PAGE;

use super::{Engine, PinnedDma};
use crate::read::work::{Chunk, LONG_REQUEST, Outcome, Piece};
use spinio_transfer::Mapping;

/// Pieces in flight: enough that the caller rarely waits for one before the last is registered.
const MAX_IN_FLIGHT: usize = 16;

impl Engine<'_> {
    pub(super) fn dma(&mut self, piece: Piece, started: Instant) {
        let fall_back = |engine: &mut Self| engine.reroute(piece, 0, Route::Copy, Reason::PinRefused);
        let from = self.request.offset + piece.offset;
        let first = from / PAGE as u64 * PAGE as u64;
        let len = ((from + piece.len - first) as usize).next_multiple_of(PAGE);
        let Some(mapping) = self.request.mapping(self.role) else { return fall_back(self) };
        if self.request.file.pin_refused.load(Relaxed) || first + len as u64 > mapping.len as u64 {
            return fall_back(self);
        }
        let ptr = mapping.ptr.wrapping_add(first as usize);
        let device = self.request.device();
        self.prefault_missing(&mapping, piece);
        let pins = &self.request.ctx.files.unpin();
        pins.unpin_overlapping(ptr, len, || self.request.wait_for_program());
        // SAFETY: the mapping lives until the pin is released: `PinnedDma` and then `DeferredUnpin` own it.
        let pin = || unsafe { device.pin(ptr, len) };
        let pin = match pin() {
            // Pins that only wait to be released may use up the driver's limit.
            Err(e) if e.kind == ErrorKind::PinRefused && !pins.is_empty() => {
                pins.unpin_all();
                pin()
            }
            first => first,
        };
        let pin = match pin {
            Ok(pin) => pin,
            Err(e) => {
                if e.kind == ErrorKind::Unsupported {
                    self.request.file.pin_refused.store(true, Relaxed);
                }
                return fall_back(self);
            }
        };
        let copied = self.stream(0).and_then(|stream| {
            // SAFETY: the pin lives in `self.pinned` until its fence is done.
            unsafe {
                device.copy_pinned(
                    stream,
                    self.request.address(piece.offset),
                    &pin,
                    (from - first) as usize,
                    piece.len as usize,
                )
            }?;
            FenceGuard::new(device, stream).inspect_err(|_| {
                let _ = device.synchronize(stream, WaitMode::Block);
            })
        });
        match copied {
            Ok(fence) => {
                self.pinned.push_back(PinnedDma { pin, mapping, fence, piece, started });
                while self.pinned.len() >= MAX_IN_FLIGHT {
                    self.finish_oldest_pin();
                }
                if self.request.ctx.files.unpin().is_full() {
                    while !self.pinned.is_empty() {
                        self.finish_oldest_pin();
                    }
                    self.request.ctx.files.unpin().unpin_all();
                }
            }
            Err(_) => {
                device.unpin(pin);
                fall_back(self);
            }
        }
    }

    /// Fills what copy workers have not filled of the page tables of a piece.
    fn prefault_missing(&mut self, mapping: &Mapping, piece: Piece) {
        let (started, mut bytes) = (Instant::now(), 0);
        let tables = &self.request.file.prefault;
        for range in self.prefault.missing(piece.offset..piece.offset + piece.len) {
            let range = self.request.offset + range.start..self.request.offset + range.end;
            if !tables.covers(mapping, &range) {
                bytes += range.end - range.start;
                mapping.prefault(range);
            }
        }
        if tables.record(bytes, started.elapsed()) && self.prefault.mark_slow() {
            self.outcomes.push(Outcome::WakeWorkers);
        }
    }

    /// Fills a chunk of page tables ahead of the caller.
    pub(crate) fn prefault_chunk(&mut self, chunk: &Chunk) {
        if let Some(mapping) = self.request.mapping(self.role) {
            let (from, to) = (chunk.range.start, chunk.range.end);
            mapping.prefault(self.request.offset + from..self.request.offset + to);
        }
        self.prefault.mark_done(chunk);
    }

    /// Waits for the oldest pin in flight, and leaves it to be released later.
    pub(super) fn finish_oldest_pin(&mut self) {
        let Some(oldest) = self.pinned.front() else { return };
        // A short transfer ends sooner than a sleeper wakes.
        let wait = if self.request.len <= LONG_REQUEST { WaitMode::Context } else { WaitMode::Block };
        let waited = oldest.fence.wait(wait);
        let Some(PinnedDma { pin, mapping, piece, started, .. }) = self.pinned.pop_front() else { return };
        self.request.ctx.files.unpin().defer(self.request.device(), pin, mapping);
        match waited {
            Ok(()) => {
                self.record(piece, Route::Dma, piece.reason, piece.len, started);
                self.done(piece.offset, piece.len, piece.len, None);
            }
            Err(e) => {
                let error = self.device_error(e, piece);
                self.done(piece.offset, piece.len, 0, Some(error));
            }
        }
    }
}
