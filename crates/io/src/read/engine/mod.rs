//! Engines: each moves pieces by one route, and returns what came of it.
//!
//! ```text
//!   piece ──> copy, store   cache.rs      ┐
//!             dma           dma.rs        ├──> Outcome, applied by the request
//!             direct, p2p   storage.rs    │ by shadow workers
//!                           ring.rs       ┘ by the caller, through the ring
//! ```
//!
//! [`Engine`] is what a thread has while it works on a request: its streams on the device, and what is in flight there.
//! An engine starts a transfer and returns; `drain` waits for the device. A byte is reported only after it has arrived.
//!
//! Engines know the request's parameters and nothing of its queues. To add one: a file here, its route in `move_piece`,
//! and its conditions in `decide.rs`.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

mod cache;
mod dma;
mod ring;
mod storage;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use spinio_device::{DeviceError, FenceGuard, Pin, StreamId, StreamOrder, WaitMode};
use spinio_host::copy_threads::CopySample;
use spinio_host::storage_ring::{RingRead, StorageRing};
use spinio_plan::{Reason, Route};

use super::params::ReadParams;
use super::prefault::Prefault;
use super::work::{LONG_REQUEST, Outcome, Piece, Role};
use spinio_transfer::Error;
use spinio_transfer::Mapping;
use spinio_transfer::bounce::BounceBuffer;

/// A DMA out of the page cache in flight.
struct PinnedDma {
    pin: Pin,
    mapping: Arc<Mapping>,
    fence: FenceGuard,
    piece: Piece,
    started: Instant,
}

/// The ring, and the slot of a request's file in it.
pub(crate) struct RingPath {
    pub(crate) ring: Arc<StorageRing>,
    pub(crate) slot: u32,
}

/// A piece that the ring reads. Dropped in this order: the read is over before its buffer is anything else's.
struct RingPiece {
    read: RingRead,
    piece: Piece,
    /// `None`: into device memory.
    buffer: Option<BounceBuffer>,
    started: Instant,
}

/// The engines of one thread at work on a request.
pub(crate) struct Engine<'a> {
    request: &'a ReadParams,
    prefault: &'a Prefault,
    role: Role,
    /// The second one is for buffers while pages are in flight: a buffer is free sooner if it does not wait for many.
    streams: [Option<StreamOrder>; 2],
    /// Copies in flight, reported when their stream is drained: offset, length, arrived, error.
    pending: Vec<(u64, u64, u64, Option<Error>)>,
    pinned: VecDeque<PinnedDma>,
    /// The ends of copies out of bounce buffers, where their number is limited.
    queued_copies: VecDeque<FenceGuard>,
    in_ring: Vec<RingPiece>,
    /// Where many threads copy: time in which this one copied cached bytes, and how much of it it was on a processor.
    copied: (Duration, Duration),
    /// What it did since its last report.
    sample: CopySample,
    outcomes: Vec<Outcome>,
}

impl<'a> Engine<'a> {
    pub(crate) fn new(request: &'a ReadParams, prefault: &'a Prefault, role: Role) -> Engine<'a> {
        Engine {
            request,
            prefault,
            role,
            streams: [None, None],
            pending: Vec::new(),
            pinned: VecDeque::new(),
            queued_copies: VecDeque::new(),
            in_ring: Vec::new(),
            copied: (Duration::ZERO, Duration::ZERO),
            sample: CopySample::default(),
            outcomes: Vec::new(),
        }
    }

    /// Moves a piece that needs no bounce buffer.
    pub(crate) fn move_piece(&mut self, piece: Piece, started: Instant) {
        match piece.route {
            Route::Store => self.store(piece, started),
            Route::Dma => self.dma(piece, started),
            Route::P2p => self.p2p(piece, started),
            // Shadow workers get direct pieces together with a buffer, and no other thread gets one.
            Route::Copy | Route::Gather | Route::Direct => self.reroute(piece, 0, Route::Copy, Reason::Fallback),
        }
    }

    /// What came of the work so far. Empties the list.
    pub(crate) fn outcomes(&mut self) -> impl Iterator<Item = Outcome> + '_ {
        self.outcomes.drain(..)
    }

    /// Waits for everything in flight.
    pub(crate) fn drain(&mut self) {
        self.drain_ring();
        let (wall, processor) = std::mem::take(&mut self.copied);
        self.request.ctx.files.workers().copy_threads().processors().record(wall, processor);
        // The last DMA takes as long as unregistering what earlier requests registered; which waits for the program's work
        // in the driver, where no signal ends it.
        let program_is_done = || self.request.order.as_ref().is_none_or(FenceGuard::is_done);
        if !self.pinned.is_empty() && self.request.len <= LONG_REQUEST && program_is_done() {
            self.request.ctx.files.unpin().unpin_all();
        }
        while !self.pinned.is_empty() {
            self.finish_oldest_pin();
        }
        self.request.staging.queued_copies.fetch_sub(self.queued_copies.len(), Relaxed);
        self.queued_copies.clear();
        let mut drained = Ok(());
        for stream in std::mem::take(&mut self.streams).into_iter().flatten() {
            drained = drained.and(stream.synchronize(WaitMode::Context));
        }
        for (offset, len, got, error) in std::mem::take(&mut self.pending) {
            match drained {
                Ok(()) => self.done(offset, len, got, error),
                Err(e) => {
                    self.done(offset, len, 0, Some(Error::device(e, "copy", self.request.offset + offset, len)));
                }
            }
        }
    }

    /// A stream of this thread, ordered after what the program had queued when the request began.
    fn stream(&mut self, which: usize) -> Result<StreamId, DeviceError> {
        if let Some(stream) = &self.streams[which] {
            return Ok(stream.id());
        }
        let stream = StreamOrder::after(self.request.device(), self.request.order.as_ref())?;
        Ok(self.streams[which].insert(stream).id())
    }

    /// Queues the copy of `len` bytes of a filled buffer, from `skip` on, to the start of a piece. Releases the buffer
    /// in any case.
    fn copy_to_device(&mut self, piece: Piece, buffer: BounceBuffer, skip: usize, len: usize) -> Result<(), Error> {
        let staging = &self.request.staging;
        if len == 0 {
            staging.release(buffer);
            return Ok(());
        }
        let copied = self.stream(usize::from(!self.pinned.is_empty())).and_then(|stream| {
            // SAFETY: the buffer is released after the copy; the request's bytes lie inside the allocation.
            let copied = unsafe {
                let from = buffer.ptr().wrapping_add(skip);
                self.request.device().copy_in(stream, self.request.address(piece.offset), from, len)
            };
            copied.map(|()| stream)
        });
        match copied {
            Ok(stream) => {
                staging.release_after(buffer, stream);
                Ok(())
            }
            Err(e) => {
                staging.release(buffer);
                Err(self.device_error(e, piece))
            }
        }
    }

    fn done(&mut self, offset: u64, len: u64, got: u64, error: Option<Error>) {
        self.outcomes.push(Outcome::Done { offset, len, got, error });
    }

    fn reroute(&mut self, piece: Piece, done: u64, route: Route, reason: Reason) {
        self.outcomes.push(Outcome::Reroute { piece, done, route, reason });
    }

    /// Ends a piece that could not be moved by any route.
    fn fail_piece(&mut self, piece: Piece, error: Error) {
        self.pending.push((piece.offset, piece.len, 0, Some(error)));
    }

    /// As [`Engine::fail_piece`], with an error of the device.
    pub(crate) fn fail_on_device(&mut self, piece: Piece, source: DeviceError) {
        self.fail_piece(piece, self.device_error(source, piece));
    }

    /// The first `bytes` of a piece have moved.
    fn record(&self, piece: Piece, route: Route, reason: Reason, bytes: u64, started: Instant) {
        self.request.ctx.files.stats().record_piece(&self.request.span, route, reason, piece.offset, bytes, started);
    }

    fn device_error(&self, source: DeviceError, piece: Piece) -> Error {
        Error::device(source, "copy", self.request.offset + piece.offset, piece.len)
    }
}
