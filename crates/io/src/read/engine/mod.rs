//! Engines: one a route, each moving one piece.
//!
//! [`Hands`] is what a thread holds while it works on a job: its queue on the device,
//! and what it has under way. An engine puts bytes under way and returns; `settle` waits
//! for the device and tells the job what arrived. Nothing is told before it arrived.

mod cache;
mod dma;
mod storage;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use spinio_device::{DeviceAddr, DeviceError, Fence, Pin, QueueId, Wait};
use spinio_plan::{Reason, Route};
use spinio_sys::linux::Fd;

use spinio_transfer::Error;
use spinio_transfer::Mapping;
use crate::read::job::Job;
use crate::read::window;
use crate::read::work::{Piece, Who, Work};
use spinio_transfer::bounce::Block;

/// Bytes of a request above which its caller sleeps while it waits, and leaves giving back pins to others.
pub(crate) const LONG: u64 = 64 << 20;

/// A DMA out of the page cache that is under way.
struct Pinned {
    pin: Pin,
    mapping: Arc<Mapping>,
    fence: Fence,
    piece: Piece,
    begun: Instant,
}

/// A thread at work on a job.
pub(crate) struct Hands<'a> {
    job: &'a Arc<Job>,
    who: Who,
    /// The second one is for blocks while pages are under way: a block is empty sooner if it does not wait behind many.
    queues: [Option<QueueId>; 2],
    /// Copies queued, to be told when the queue is drained: offset, length, arrived, error.
    queued: Vec<(u64, u64, u64, Option<Error>)>,
    pinned: VecDeque<Pinned>,
}

impl<'a> Hands<'a> {
    pub(crate) fn new(job: &'a Arc<Job>, who: Who) -> Hands<'a> {
        Hands { job, who, queues: [None; 2], queued: Vec::new(), pinned: VecDeque::new() }
    }

    /// Does one thing.
    pub(crate) fn work(&mut self, work: Work) {
        match work {
            Work::Piece(piece) => match piece.route {
                Route::Copy | Route::Gather => self.copy(piece),
                Route::Store => self.store(piece),
                Route::Dma => self.dma(piece),
                // Keepers get it with a block; nobody else is given one.
                Route::Direct => self.job.reroute(piece, 0, Route::Copy, Reason::FellBack),
                Route::P2p => self.p2p(piece),
            },
            Work::Window(offset, len, again) => {
                window::window(self.job, self.who, offset, len, again);
                self.job.call_helpers();
            }
            Work::Fill(piece, block) => match piece.route {
                Route::Direct => self.direct(piece, block),
                _ => self.copy_beside(piece, block),
            },
            Work::Deliver(filled) => self.deliver_filled(filled),
            Work::Populate(chunk) => self.populate(&chunk),
        }
    }

    /// Waits for everything under way and tells the job.
    pub(crate) fn settle(&mut self) {
        if !self.pinned.is_empty() && self.job.len <= LONG {
            // While the last DMA runs there is nothing better to do than to give back what earlier requests pinned.
            self.job.ctx.files.unpin().give_back_all();
        }
        while !self.pinned.is_empty() {
            self.settle_pin();
        }
        if self.queues != [None; 2] {
            let mut drained = Ok(());
            for queue in std::mem::take(&mut self.queues).into_iter().flatten() {
                drained = drained.and(self.job.device().drain(queue, Wait::Context));
                self.job.device().return_queue(queue);
            }
            for (offset, len, got, error) in self.queued.drain(..) {
                match drained {
                    Ok(()) => self.job.arrived(offset, len, got, error),
                    Err(e) => {
                        let error = Error::device(e, "copy", self.job.offset + offset, len);
                        self.job.arrived(offset, len, 0, Some(error));
                    }
                }
            }
        }
        for (offset, len, got, error) in self.queued.drain(..) {
            self.job.arrived(offset, len, got, error);
        }
    }

    /// A queue of this thread's, ordered behind what the program had queued when the request began.
    fn queue(&mut self, which: usize) -> Result<QueueId, DeviceError> {
        if let Some(queue) = self.queues[which] {
            return Ok(queue);
        }
        let device = self.job.device();
        let queue = device.lease_queue()?;
        if let Some(order) = &self.job.order
            && let Err(e) = device.follow(queue, order)
        {
            device.return_queue(queue);
            return Err(e);
        }
        self.queues[which] = Some(queue);
        Ok(queue)
    }

    /// A block to fill. While none is free this thread does what frees one: it may be that its own job holds them.
    fn block(&mut self) -> Result<Block, DeviceError> {
        loop {
            if let Some(block) = self.job.staging.try_take()? {
                return Ok(block);
            }
            if let Some(block) = self.job.reclaim() {
                return Ok(block);
            }
            match self.job.filled() {
                Some(filled) => self.deliver_filled(filled),
                None => self.job.staging.wait(),
            }
        }
    }

    /// Queues `len` bytes of a filled block, from `skip` on, for the start of a piece; gives the block up either way.
    fn deliver(&mut self, piece: Piece, block: Block, skip: usize, len: usize) -> Result<(), Error> {
        let staging = &self.job.staging;
        if len == 0 {
            staging.give_back(block);
            return Ok(());
        }
        let queued = self.queue(usize::from(!self.pinned.is_empty())).and_then(|queue| {
            // SAFETY: the block is retired behind the copy and not lent before it is done; the request's bytes lie
            // inside the allocation.
            let copied = unsafe {
                let from = block.ptr().wrapping_add(skip);
                self.job.device().copy_in(queue, self.address(piece.offset), from, len)
            };
            copied.map(|()| queue)
        });
        match queued {
            Ok(queue) => {
                staging.retire(block, queue);
                Ok(())
            }
            Err(e) => {
                staging.give_back(block);
                Err(self.device_error(e, piece))
            }
        }
    }

    /// The descriptor to read through the page cache with.
    fn cached_fd(&self) -> Fd {
        match self.who {
            Who::Caller | Who::Mate | Who::Beside => self.job.fd,
            Who::Keeper => self.job.file.cached.get(),
        }
    }

    fn address(&self, offset: u64) -> DeviceAddr {
        self.job.to.addr.offset(offset)
    }

    /// Ends a piece that could not be moved by any route.
    fn fail(&mut self, piece: Piece, got: u64, error: Error) {
        self.queued.push((piece.offset, piece.len, got, Some(error)));
    }

    /// The first `bytes` of a piece have moved.
    fn count(&self, piece: Piece, route: Route, reason: Reason, bytes: u64, begun: Instant) {
        self.job.ctx.files.stats().piece(&self.job.watch, route, reason, piece.offset, bytes, begun);
    }

    fn device_error(&self, source: DeviceError, piece: Piece) -> Error {
        Error::device(source, "copy", self.job.offset + piece.offset, piece.len)
    }
}

impl Drop for Hands<'_> {
    fn drop(&mut self) {
        // Only after a panic there is anything: copies that may still be stored, pages that may still be read.
        let _ = catch_unwind(AssertUnwindSafe(|| self.settle()));
    }
}
