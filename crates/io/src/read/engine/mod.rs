//! Engines: one a route, each moving one piece.
//!
//! [`Hands`] is what a thread holds while it works on a job: its queue on the device,
//! and what it has under way. An engine puts bytes under way and returns; `settle` waits
//! for the device and tells the job what arrived. Nothing is told before it arrived.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

mod cache;
mod dma;
mod storage;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use spinio_device::{DeviceAddr, DeviceError, FenceGuard, Pin, StreamId, StreamOrder, WaitMode};
use spinio_plan::{Reason, Route};
use spinio_sys::linux::Fd;

use crate::read::plan_range;
use crate::read::request::ReadRequest;
use crate::read::work::{LONG_REQUEST, Piece, Role, Work};
use spinio_transfer::Error;
use spinio_transfer::Mapping;
use spinio_transfer::bounce::BounceBuffer;

/// A DMA out of the page cache that is under way.
struct PinnedDma {
    pin: Pin,
    mapping: Arc<Mapping>,
    fence: FenceGuard,
    piece: Piece,
    started: Instant,
}

/// A thread at work on a job.
pub(crate) struct EngineCtx<'a> {
    request: &'a Arc<ReadRequest>,
    role: Role,
    /// The second one is for blocks while pages are under way: a block is empty sooner if it does not wait behind many.
    streams: [Option<StreamOrder>; 2],
    /// Copies queued, to be told when the queue is drained: offset, length, arrived, error.
    pending: Vec<(u64, u64, u64, Option<Error>)>,
    pinned: VecDeque<PinnedDma>,
}

impl<'a> EngineCtx<'a> {
    pub(crate) fn new(request: &'a Arc<ReadRequest>, role: Role) -> EngineCtx<'a> {
        EngineCtx { request, role, streams: [None, None], pending: Vec::new(), pinned: VecDeque::new() }
    }

    /// Does one thing.
    pub(crate) fn run_work(&mut self, work: Work) {
        match work {
            Work::Piece(piece) => match piece.route {
                Route::Copy | Route::Gather => self.copy(piece),
                Route::Store => self.store(piece),
                Route::Dma => self.dma(piece),
                // Keepers get it with a block; nobody else is given one.
                Route::Direct => self.request.reroute(piece, 0, Route::Copy, Reason::Fallback),
                Route::P2p => self.p2p(piece),
            },
            Work::PlanRange(offset, len, recheck) => {
                plan_range::plan_range(self.request, self.role, offset, len, recheck);
                self.request.wake_workers();
            }
            Work::FillBuffer(piece, block) => self.direct(piece, block),
            Work::CopyToDevice(filled) => self.copy_filled(filled),
            Work::Prefault(chunk) => self.prefault_chunk(&chunk),
        }
    }

    /// Waits for everything under way and tells the job.
    pub(crate) fn drain(&mut self) {
        if !self.pinned.is_empty() && self.request.len <= LONG_REQUEST {
            // While the last DMA runs there is nothing better to do than to give back what earlier requests pinned.
            self.request.ctx.files.unpin().unpin_all();
        }
        while !self.pinned.is_empty() {
            self.finish_oldest_pin();
        }
        if self.streams.iter().any(Option::is_some) {
            let mut drained = Ok(());
            for stream in std::mem::take(&mut self.streams).into_iter().flatten() {
                drained = drained.and(stream.synchronize(WaitMode::Context));
            }
            for (offset, len, got, error) in self.pending.drain(..) {
                match drained {
                    Ok(()) => self.request.complete(offset, len, got, error),
                    Err(e) => {
                        let error = Error::device(e, "copy", self.request.offset + offset, len);
                        self.request.complete(offset, len, 0, Some(error));
                    }
                }
            }
        }
        for (offset, len, got, error) in self.pending.drain(..) {
            self.request.complete(offset, len, got, error);
        }
    }

    /// A queue of this thread's, ordered behind what the program had queued when the request began.
    fn stream(&mut self, which: usize) -> Result<StreamId, DeviceError> {
        if let Some(stream) = &self.streams[which] {
            return Ok(stream.id());
        }
        let stream = StreamOrder::after(self.request.device(), self.request.order.as_ref())?;
        Ok(self.streams[which].insert(stream).id())
    }

    /// A block to fill. While none is free this thread does what frees one: it may be that its own job holds them.
    fn acquire_buffer(&mut self) -> Result<BounceBuffer, DeviceError> {
        loop {
            if let Some(block) = self.request.staging.try_acquire()? {
                return Ok(block);
            }
            if let Some(block) = self.request.take_back() {
                return Ok(block);
            }
            match self.request.take_filled() {
                Some(filled) => self.copy_filled(filled),
                None => self.request.staging.wait_for_release(),
            }
        }
    }

    /// Queues `len` bytes of a filled block, from `skip` on, for the start of a piece; gives the block up either way.
    fn copy_to_device(&mut self, piece: Piece, block: BounceBuffer, skip: usize, len: usize) -> Result<(), Error> {
        let staging = &self.request.staging;
        if len == 0 {
            staging.release(block);
            return Ok(());
        }
        let copied = self.stream(usize::from(!self.pinned.is_empty())).and_then(|stream| {
            // SAFETY: the block is retired behind the copy and not lent before it is done; the request's bytes lie
            // inside the allocation.
            let copied = unsafe {
                let from = block.ptr().wrapping_add(skip);
                self.request.device().copy_in(stream, self.address(piece.offset), from, len)
            };
            copied.map(|()| stream)
        });
        match copied {
            Ok(stream) => {
                staging.release_after(block, stream);
                Ok(())
            }
            Err(e) => {
                staging.release(block);
                Err(self.device_error(e, piece))
            }
        }
    }

    /// The descriptor to read through the page cache with.
    fn cached_fd(&self) -> Fd {
        match self.role {
            Role::Caller | Role::CopyWorker => self.request.fd,
            Role::ShadowWorker => self.request.file.cached.get(),
        }
    }

    fn address(&self, offset: u64) -> DeviceAddr {
        self.request.dest.addr.offset(offset)
    }

    /// Ends a piece that could not be moved by any route.
    fn fail_piece(&mut self, piece: Piece, got: u64, error: Error) {
        self.pending.push((piece.offset, piece.len, got, Some(error)));
    }

    /// The first `bytes` of a piece have moved.
    fn record(&self, piece: Piece, route: Route, reason: Reason, bytes: u64, begun: Instant) {
        self.request.ctx.files.stats().record_piece(&self.request.span, route, reason, piece.offset, bytes, begun);
    }

    fn device_error(&self, source: DeviceError, piece: Piece) -> Error {
        Error::device(source, "copy", self.request.offset + piece.offset, piece.len)
    }
}

impl Drop for EngineCtx<'_> {
    fn drop(&mut self) {
        // Only after a panic there is anything: copies that may still be stored, pages that may still be read.
        let _ = catch_unwind(AssertUnwindSafe(|| self.drain()));
    }
}
