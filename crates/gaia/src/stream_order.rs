//! Calls in stream order: they return at once, begin when the stream has come to them, and the stream waits for their
//! end.
//!
//! ```text
//!   stream     kernel │ stopped ................... │ kernel │ stopped ............... │
//!   lane              └ acquire: server, copies ────┘        └ release: scan, commit ──┘
//! ```
//!
//! **Failures** come after the call has returned. The first one is kept until the next call on the map, which fails with
//! it and does nothing. Until then no call that is queued runs, nor one that was queued before the failure was reported:
//! kernels have run without what they should have acquired, so what they stored is not published.
//!
//! **Where nothing runs beside a stopped stream** (CUDA with few channels) the call itself waits for the stream, and does
//! the work before it returns; failures are reported in the same way.
//!
//! **Locks**: a call that waits does so for the thread's stream, with the map's lock held, and a job needs that lock. So
//! it first waits for the calls of its map that are queued, and none is queued until it ends (queued_calls.rs).

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use spinio_device::{StreamId, WaitMode};
use spinio_host::lock;
use spinio_pagecache::messages::Access;
use spinio_sys::{Errno, injection_point};

use crate::call_checks::captured;
use crate::lane::Lane;
use crate::map::Map;
use crate::queued_calls::{Ticket, Turn};
use crate::{Error, Result};

/// A release in the order of a stream.
pub struct StreamRelease {
    pub(crate) stream: StreamId,
    /// Without publishing the stores.
    pub(crate) discard: bool,
    pub(crate) published: Box<OnPublished>,
}

/// Gets the result of a release.
type OnPublished = dyn FnOnce(&Result<u64>) + Send;

impl StreamRelease {
    /// `published` gets the result: bytes, or why there are none.
    pub fn new(stream: StreamId, published: impl FnOnce(&Result<u64>) + Send + 'static) -> StreamRelease {
        StreamRelease { stream, discard: false, published: Box::new(published) }
    }

    /// The same, without publishing the stores.
    #[must_use]
    pub fn discarding(self) -> StreamRelease {
        StreamRelease { discard: true, ..self }
    }
}

impl Map {
    /// The turn of a call that waits.
    pub(crate) fn turn(&self) -> Result<Turn<'_>> {
        if Lane::current().is_some() { Ok(Turn::of_lane()) } else { self.queue.turn(|| self.replica.is_lost()) }
    }

    /// Waits until the calls that are queued have ended, or the device runs none any more.
    pub(crate) fn wait_for_queued(&self) {
        drop(self.queue.last_turn(|| self.replica.is_lost()));
    }

    /// [`Map::acquire`] in the order of a stream.
    pub fn acquire_async(self: &Arc<Map>, offset: u64, len: u64, access: Access, stream: StreamId) -> Result<()> {
        let pages = self.pages_of(offset, len)?;
        if self.spec.is_in_place() {
            // Unregistering waits for kernels, and the stream for this call.
            let sentence = "A map that is read in place is not acquired in stream order: use spinio_gaia_acquire";
            return Err(Error::new(Errno::NOTSUP, sentence));
        }
        if access == Access::Write && self.spec.access == Access::Read {
            return Err(Error::new(Errno::ACCESS, "The map is read-only"));
        }
        let acquire = move |map: &Map| map.acquire(offset, len, access);
        self.enqueue(stream, "acquire", pages, acquire, |_| ())
    }

    /// [`Map::overwrite`] in the order of a stream.
    pub fn overwrite_async(self: &Arc<Map>, offset: u64, len: u64, stream: StreamId) -> Result<()> {
        let pages = self.pages_of(offset, len)?;
        if self.spec.access == Access::Read {
            return Err(Error::new(Errno::ACCESS, "The map is read-only"));
        }
        self.enqueue(stream, "acquire", pages, move |map: &Map| map.overwrite(offset, len), |_| ())
    }

    /// [`Map::release`], or [`Map::discard`], in the order of a stream. The result is told before the stream goes on; not if
    /// this call fails.
    pub fn release_async(self: &Arc<Map>, offset: u64, len: u64, release: StreamRelease) -> Result<()> {
        let StreamRelease { stream, discard, published } = release;
        self.pages_of(offset, len)?;
        let release = move |map: &Map| {
            if discard { map.discard(offset, len).map(|()| 0) } else { map.release(offset, len) }
        };
        self.enqueue(stream, "release", 0..0, release, published)
    }

    /// `pages`: those for which the call needs memory. It is made now, and accessible, since it cannot be beside a stop.
    fn enqueue(
        self: &Arc<Map>,
        stream: StreamId,
        what: &'static str,
        pages: Range<usize>,
        call: impl FnOnce(&Map) -> Result<u64> + Send + 'static,
        report: impl FnOnce(&Result<u64>) + Send + 'static,
    ) -> Result<()> {
        let turn = self.queue.turn_to_queue()?;
        let device = self.replica.device();
        if device.is_capturing(stream) {
            return Err(captured());
        }
        let held = self.replica.hold(&pages)?;
        self.replica.grant_access(&pages)?;
        if !device.runs_beside_stops() {
            drop(turn);
            device.synchronize(stream, WaitMode::Context).map_err(|e| Error::device(e, "wait for the stream"))?;
            let done = call(self).inspect_err(|e| self.queue.fail(e, what));
            report(&done);
            return Ok(());
        }
        let lane = Lane::of(device)?;
        let (pending, ticket) = (lane.announce(), self.queue.ticket());
        // Weak: if the device fails, the driver drops no call that it has taken.
        let map = Arc::downgrade(self);
        let reached = move |stop| {
            lane.send(Box::new(move || {
                let map: Option<Arc<Map>> = Weak::upgrade(&map);
                injection_point!("client: call reached in the stream");
                lane.beside(stop, || {
                    let done = run(map.as_deref(), &ticket, what, call, report);
                    // The program does not know yet, and its kernels follow: their memory stays until it gives it up.
                    if let (false, Some(map)) = (done, &map) {
                        lock(&map.state).pages.begin_reading(pages);
                    }
                });
                drop_elsewhere(map);
                drop((held, ticket, pending));
            }));
        };
        device.stop_stream(stream, Box::new(reached)).map_err(|e| Error::device(e, "stop the stream"))
    }
}

/// Whether it has done its work.
fn run(
    map: Option<&Map>,
    ticket: &Ticket,
    what: &'static str,
    call: impl FnOnce(&Map) -> Result<u64>,
    report: impl FnOnce(&Result<u64>),
) -> bool {
    let done = match (ticket.reason_to_drop(), map) {
        (Some(failure), _) => Err(failure),
        (None, None) => Err(Error::new(Errno::INVAL, "The map was unmapped before")),
        (None, Some(map)) => {
            let panicked = |_| Err(Error::new(Errno::IO, "Internal error"));
            let done = catch_unwind(AssertUnwindSafe(|| call(map))).unwrap_or_else(panicked);
            done.inspect_err(|e| ticket.fail(e, what))
        }
    };
    report(&done);
    done.is_ok()
}

/// If this is the last reference, unmapping waits for the device, which the lane must not.
fn drop_elsewhere(map: Option<Arc<Map>>) {
    if let Some(last) = map.and_then(Arc::into_inner) {
        let dropped = spinio_sys::linux::spawn_signals_blocked("spinio-gaia-end", 256 << 10, move || drop(last));
        debug_assert!(dropped.is_ok(), "no thread");
    }
}
