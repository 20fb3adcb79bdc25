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
//! **Locks**: a call that waits does so for the thread's stream, with the map's lock held, and a job needs that lock. So
//! it first waits for the calls of its map that are queued, and none is queued until it ends ([`Turn`]).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use spinio_device::StreamId;
use spinio_host::lock;
use spinio_pagecache::messages::Access;
use spinio_sys::Errno;

use crate::lane::Lane;
use crate::map::Map;
use crate::{Error, Result};

/// Between looks whether the device still works.
const LOOK: Duration = Duration::from_millis(100);

/// The calls of a map that are queued.
#[derive(Default)]
pub(crate) struct Queue {
    /// Held while a call is queued, and during one that waits.
    turn: Mutex<()>,
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    /// Calls so far.
    queued: u64,
    ended: u64,
    /// Of the first call that failed, until it is reported.
    failure: Option<Error>,
    /// Calls up to this number do not run: a failure was reported after they were queued.
    dropped: u64,
    reported: Option<Error>,
}

/// While it lives, no call is queued on the map, and none runs.
pub(crate) struct Turn<'a>(#[expect(dead_code, reason = "held")] Option<MutexGuard<'a, ()>>);

/// A call that is queued; it has ended when this is dropped.
struct Ticket {
    queue: Arc<Queue>,
    number: u64,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        lock(&self.queue.state).ended += 1;
        self.queue.changed.notify_all();
    }
}

impl Queue {
    /// The failure that no call has reported.
    fn take_failure(&self) -> Result<()> {
        let mut state = lock(&self.state);
        match state.failure.take() {
            Some(failure) => {
                state.dropped = state.queued;
                state.reported = Some(failure.clone());
                Err(failure)
            }
            None => Ok(()),
        }
    }

    fn enter(self: &Arc<Queue>) -> Ticket {
        let mut state = lock(&self.state);
        state.queued += 1;
        Ticket { queue: Arc::clone(self), number: state.queued }
    }

    /// Why a call does not run.
    fn reason_to_drop(&self, number: u64) -> Option<Error> {
        let state = lock(&self.state);
        let earlier = state.reported.as_ref().filter(|_| number <= state.dropped);
        state.failure.as_ref().or(earlier).cloned()
    }

    fn fail(&self, error: &Error, what: &str) {
        let sentence = format!("An earlier {what} in stream order failed: {error}");
        lock(&self.state).failure.get_or_insert_with(|| Error::new(error.errno, sentence));
    }
}

impl Map {
    /// The turn of a call that waits.
    pub(crate) fn turn(&self) -> Result<Turn<'_>> {
        if Lane::current().is_some() {
            return Ok(Turn(None));
        }
        let turn = lock(&self.queue.turn);
        self.wait_for_queued();
        self.queue.take_failure().map(|()| Turn(Some(turn)))
    }

    /// Waits until the calls that are queued now have ended, or the device runs none any more.
    pub(crate) fn wait_for_queued(&self) {
        let mut state = lock(&self.queue.state);
        let last = state.queued;
        while state.ended < last {
            let waited = self.queue.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
            if waited.1.timed_out() {
                drop(waited.0);
                if self.replica.is_lost() {
                    return;
                }
                state = lock(&self.queue.state);
            } else {
                state = waited.0;
            }
        }
    }

    /// [`Map::acquire`] in the order of a stream.
    pub fn acquire_async(self: &Arc<Map>, offset: u64, len: u64, access: Access, stream: StreamId) -> Result<()> {
        self.pages_of(offset, len)?;
        if access == Access::Write && self.spec.access == Access::Read {
            return Err(Error::new(Errno::ACCESS, "The map is read-only"));
        }
        let acquire = move |map: &Map| map.acquire(offset, len, access);
        self.enqueue(stream, "acquire", acquire, |_| ())
    }

    /// [`Map::overwrite`] in the order of a stream.
    pub fn overwrite_async(self: &Arc<Map>, offset: u64, len: u64, stream: StreamId) -> Result<()> {
        self.pages_of(offset, len)?;
        if self.spec.access == Access::Read {
            return Err(Error::new(Errno::ACCESS, "The map is read-only"));
        }
        self.enqueue(stream, "acquire", move |map: &Map| map.overwrite(offset, len), |_| ())
    }

    /// [`Map::release`], or with `discard` [`Map::discard`], in the order of a stream. `published` gets the result before
    /// the stream goes on; not if this call fails.
    pub fn release_async(
        self: &Arc<Map>,
        offset: u64,
        len: u64,
        discard: bool,
        stream: StreamId,
        published: impl FnOnce(&Result<u64>) + Send + 'static,
    ) -> Result<()> {
        self.pages_of(offset, len)?;
        if self.spec.access == Access::Read {
            return Err(Error::new(Errno::INVAL, "The map is read-only: there is nothing to release"));
        }
        let release = move |map: &Map| {
            if discard { map.discard(offset, len).map(|()| 0) } else { map.release(offset, len) }
        };
        self.enqueue(stream, "release", release, published)
    }

    fn enqueue(
        self: &Arc<Map>,
        stream: StreamId,
        what: &'static str,
        call: impl FnOnce(&Map) -> Result<u64> + Send + 'static,
        report: impl FnOnce(&Result<u64>) + Send + 'static,
    ) -> Result<()> {
        let _turn = lock(&self.queue.turn);
        self.queue.take_failure()?;
        let device = self.replica.device();
        if device.is_capturing(stream) {
            return Err(Error::new(Errno::BUSY, "The stream is being captured into a graph"));
        }
        let lane = Lane::of(device)?;
        let (pending, ticket) = (lane.announce(), self.queue.enter());
        // Weak: if the device fails, the driver drops no call that it has taken.
        let map = Arc::downgrade(self);
        let reached = move |stop| {
            lane.send(Box::new(move || {
                let map: Option<Arc<Map>> = Weak::upgrade(&map);
                lane.beside(stop, || run(map.as_deref(), &ticket, what, call, report));
                drop_elsewhere(map);
                drop((ticket, pending));
            }));
        };
        device.stop_stream(stream, Box::new(reached)).map_err(|e| Error::device(e, "stop the stream"))
    }
}

fn run(
    map: Option<&Map>,
    ticket: &Ticket,
    what: &'static str,
    call: impl FnOnce(&Map) -> Result<u64>,
    report: impl FnOnce(&Result<u64>),
) {
    let done = match (ticket.queue.reason_to_drop(ticket.number), map) {
        (Some(failure), _) => Err(failure),
        (None, None) => Err(Error::new(Errno::INVAL, "The map was unmapped before")),
        (None, Some(map)) => {
            let panicked = |_| Err(Error::new(Errno::IO, "Internal error"));
            let done = catch_unwind(AssertUnwindSafe(|| call(map))).unwrap_or_else(panicked);
            done.inspect_err(|e| ticket.queue.fail(e, what))
        }
    };
    report(&done);
}

/// If this is the last reference, unmapping waits for the device, which the lane must not.
fn drop_elsewhere(map: Option<Arc<Map>>) {
    if let Some(last) = map.and_then(Arc::into_inner) {
        let dropped = spinio_sys::linux::spawn_signals_blocked("spinio-gaia-end", 256 << 10, move || drop(last));
        debug_assert!(dropped.is_ok(), "no thread");
    }
}
