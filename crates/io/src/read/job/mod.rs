//! A large request while several threads work on it.
//!
//! ```text
//!            windows (not looked at yet)
//!               │ survey + plan
//!               ▼
//!   cache: copy, store     dma      storage: direct, p2p        queues of segments
//!       │                   │          │
//!   caller, mates        caller     keepers: their table holds the twins
//!       │                   │          │  direct: a filled block, handed in
//!       │                   │          └────────> caller, mates: queue its copy
//!       └── tell the outcome┘
//!               ▼
//!   outstanding bytes ── 0 ──> caller wakes, returns the prefix that arrived
//! ```
//!
//! A piece that fails on its route goes back as a segment of a safer one, so what the
//! caller hears in the end is what a plain `pread` would have said. The count returned
//! is the unbroken prefix: bytes behind a gap are not reported.
//!
//! Where the caller or a helper panics nobody begins anything any more, and the call ends when the helpers are out.
//!
//! Known flaw: when the file is truncated while it is read, bytes behind the new end may
//! have reached the device already; a host read, which goes front to back, would have
//! stopped before them. docs/semantics.md says so. A block that somebody who panicked had in hand is lost to the ring.

mod helpers;
mod pieces;

use std::ops::{Deref, Range};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use spinio_device::{Device, Fence};
use spinio_plan::geometry::Stripe;
use spinio_plan::{Extent, Reason, Route, Segment};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use spinio_host::task_scope::Gate;
use crate::ctx::Reader;
use spinio_files::File;
use spinio_transfer::Mapping;
use spinio_host::is_interrupted;
use spinio_host::lock;
use spinio_files::cost::{Expected, Known, TEACHES};
use spinio_files::is_own;
use crate::read::engine::{Hands, LONG};
use crate::read::populate::Populate;
use crate::read::work::{Piece, Queues, Who};
use spinio_transfer::bounce::{BLOCK, Staging};
use spinio_stats::Watch;
use spinio_device::Target;
use spinio_transfer::Error;

/// Bytes that are surveyed and planned together; a multiple of [`BLOCK`].
pub(crate) const WINDOW: u64 = 128 << 20;

/// Bytes of the first window of a request that has several.
const FIRST: u64 = 16 << 20;

/// Blocks that helpers without a device have of one job at most.
const LENT: usize = 16;

struct Outcome {
    /// End of the unbroken prefix, as far as is known.
    end: u64,
    error: Option<Error>,
    finished: bool,
    /// The caller sleeps. Who wakes nobody need not call the kernel.
    sleeps: bool,
}

/// What a large read is about.
pub(crate) struct Request {
    pub(crate) ctx: Arc<Reader>,
    pub(crate) watch: Watch,
    pub(crate) file: Arc<File>,
    pub(crate) staging: Arc<Staging>,
    pub(crate) to: Target,
    /// The program's descriptor, for those who see it.
    pub(crate) fd: Fd,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// What every copy of this request waits for.
    pub(crate) order: Option<Fence>,
    /// Whether P2P may be planned.
    pub(crate) p2p: Result<(), Reason>,
    /// Whether pages may be registered.
    pub(crate) dma: Result<(), Reason>,
    /// It is part of a stream whose requests up to this length the kernel's read-ahead serves best, and no longer; else 0.
    pub(crate) ahead: u64,
    /// What each route costs.
    pub(crate) known: Arc<Known>,
}

/// A request and how far it has got.
pub(crate) struct Job {
    request: Request,
    /// Anything that storage served, or a presumption that failed.
    pub(crate) cold: AtomicBool,
    /// What the page cache has to fetch for this request alone.
    pub(crate) brought: Mutex<Vec<Range<u64>>>,
    /// Some piece did not go the way it was planned.
    pub(crate) strayed: AtomicBool,
    /// What it should take, if that can be told of one route.
    pub(crate) expected: Mutex<Option<Expected>>,
    copy_piece: u64,
    direct_piece: u64,
    /// Of the array under the file.
    stripe: Option<Stripe>,
    queues: Mutex<Queues>,
    outstanding: AtomicU64,
    outcome: Mutex<Outcome>,
    changed: Condvar,
    /// Something may have come up for the caller.
    news: AtomicBool,
    registered: AtomicU64,
    /// Whether the descriptor means to mates what it means to the caller: a thread of the program may have left the table
    /// that it had when they were made.
    seen: bool,
    pub(crate) populate: Populate,
    /// Whether somebody may copy beside the caller while he registers.
    beside: AtomicBool,
    /// The helpers that are at work.
    gate: Gate,
}

impl Deref for Job {
    type Target = Request;

    fn deref(&self) -> &Request {
        &self.request
    }
}

impl Job {
    pub(crate) fn new(request: Request) -> Job {
        let threads = request.ctx.files.workers().threads() as u64;
        let len = request.len;
        // What storage is asked for must begin and end with a page, wherever a partition begins.
        let whole = |s: &Stripe| (s.chunk | s.phase.unwrap_or(0)).is_multiple_of(linux::PAGE as u64);
        let stripe = request.file.geometry().stripe().filter(whole);
        let shared = || request.ctx.files.workers().copy().is_some_and(|mates| mates.shares_my_table() != Some(false));
        let seen = is_own(request.fd) || shared();
        let populate = Populate::new(request.offset, len, LONG);
        let beside = seen && len > LONG && threads > 1 && request.staging.device().abilities().copies;
        Job {
            stripe,
            seen,
            request,
            cold: AtomicBool::new(false),
            brought: Mutex::default(),
            strayed: AtomicBool::new(false),
            expected: Mutex::new(None),
            copy_piece: (len / (2 * threads)).next_multiple_of(64 << 10).clamp(256 << 10, BLOCK as u64),
            direct_piece: (len / 4).next_multiple_of(64 << 10).clamp(256 << 10, BLOCK as u64),
            queues: Mutex::default(),
            outstanding: AtomicU64::new(len),
            outcome: Mutex::new(Outcome { end: len, error: None, finished: false, sleeps: false }),
            changed: Condvar::new(),
            news: AtomicBool::new(false),
            registered: AtomicU64::new(0),
            populate,
            beside: AtomicBool::new(beside),
            gate: Gate::new(),
        }
    }

    pub(crate) fn device(&self) -> &'static dyn Device {
        self.staging.device()
    }

    /// Bytes not looked at yet, cut at window boundaries of the file.
    fn add_windows(&self) {
        let mut queues = lock(&self.queues);
        let mut at = 0;
        while at < self.len {
            // A short one first: nothing moves before it is surveyed.
            let window = if at == 0 { FIRST } else { WINDOW };
            let end = self.len.min((self.offset + at) / window * window + window - self.offset);
            queues.windows.push_back((at, end - at, false));
            at = end;
        }
    }

    /// Plans what is small enough to plan at once, so that helpers find segments; leaves the rest as windows.
    pub(crate) fn plan_first(self: &Arc<Self>) {
        if self.forget_pins() {
            self.beside.store(false, Relaxed);
        }
        if self.len <= WINDOW {
            super::window::window(self, Who::Caller, 0, self.len, false);
        } else {
            self.add_windows();
        }
    }

    /// Gives back what earlier requests registered of this range; whether there was anything.
    pub(crate) fn forget_pins(&self) -> bool {
        let Some(mapping) = self.file.kept_mapping(self.offset + self.len) else { return false };
        // Before anything moves: giving back waits for what moves.
        let start = mapping.ptr.wrapping_add(self.offset as usize);
        self.ctx.files.unpin().give_back_overlap(start, self.len as usize)
    }

    /// The whole request is planned: what it should take is looked at again when it has ended. Only where nothing but
    /// the route can be to blame for the time: nobody else reads, and nothing that the program queued is in the way.
    pub(crate) fn expect(&self, extents: &[Extent], plan: &[Segment]) {
        let quiet = || match &self.order {
            Some(fence) => self.device().is_done(fence).unwrap_or(false),
            None => false,
        };
        if self.len >= TEACHES && self.ctx.files.unpin().requests() == 1 && quiet() {
            *lock(&self.expected) = self.known.expect(&self.ctx.files.ctx, &self.file, extents, plan);
        }
    }

    /// A window that only a keeper can survey.
    pub(crate) fn hand_over(&self, offset: u64, len: u64, again: bool) {
        lock(&self.queues).windows.push_back((offset, len, again));
    }

    /// Bytes to be looked at properly, because a presumption failed.
    pub(crate) fn look_again(&self, offset: u64, len: u64) {
        self.cold.store(true, Relaxed);
        self.strayed.store(true, Relaxed);
        lock(&self.queues).windows.push_back((offset, len, true));
        self.stir();
    }

    /// Segments to be worked on; `base` is where their offsets count from.
    pub(crate) fn add(&self, base: u64, segments: &[Segment], presumed: bool) {
        let mut queues = lock(&self.queues);
        for s in segments {
            let piece = Piece { offset: base + s.offset, len: s.len, route: s.route, reason: s.reason, presumed };
            queues.of(s.route).push_back(piece);
        }
        drop(queues);
        self.stir();
    }

    /// A piece that could not go its way takes another one.
    pub(crate) fn reroute(&self, piece: Piece, done: u64, route: Route, reason: Reason) {
        self.strayed.store(true, Relaxed);
        let rest = Piece { offset: piece.offset + done, len: piece.len - done, route, reason, presumed: false };
        lock(&self.queues).of(route).push_front(rest);
        self.stir();
    }

    /// Wakes a caller that waits although there is work for it.
    fn stir(&self) {
        self.news.store(true, Release);
        let sleeps = lock(&self.outcome).sleeps;
        if sleeps {
            self.changed.notify_all();
        }
    }

    /// The request shall end early: what nobody has begun is left out.
    fn leave_out(&self) {
        let mut queues = lock(&self.queues);
        let mut left: Vec<(u64, u64)> = queues.windows.drain(..).map(|(offset, len, _)| (offset, len)).collect();
        let Queues { cache, dma, storage, .. } = &mut *queues;
        left.extend([cache, dma, storage].into_iter().flat_map(|queue| queue.drain(..)).map(|p| (p.offset, p.len)));
        drop(queues);
        for (offset, len) in left {
            self.arrived(offset, len, 0, Some(Error::interrupted("read", self.offset, self.len)));
        }
    }

    /// The request cannot go on: what waits for storage has failed.
    fn give_up(&self, error: &Error) {
        let pieces: Vec<Piece> = lock(&self.queues).storage.drain(..).collect();
        for piece in pieces {
            self.arrived(piece.offset, piece.len, 0, Some(error.clone()));
        }
    }

    /// `got` bytes of a piece arrived, and then `error` or the end of the file came.
    pub(crate) fn arrived(&self, offset: u64, len: u64, got: u64, error: Option<Error>) {
        if got < len || error.is_some() {
            let mut outcome = lock(&self.outcome);
            if offset + got < outcome.end || (offset + got == outcome.end && outcome.error.is_none()) {
                outcome.end = offset + got;
                outcome.error = error;
            }
        }
        if self.outstanding.fetch_sub(len, AcqRel) == len {
            let mut outcome = lock(&self.outcome);
            outcome.finished = true;
            let sleeps = outcome.sleeps;
            drop(outcome);
            if sleeps {
                self.changed.notify_all();
            }
        }
    }

    /// Works as the program's thread until everything has arrived; the bytes of the unbroken prefix. Where that panics, the
    /// panic leaves when the helpers have: they write into memory of the program, through its descriptors.
    pub(crate) fn finish(self: &Arc<Self>) -> Result<u64, Error> {
        let worked = catch_unwind(AssertUnwindSafe(|| self.work()));
        let broken = self.outstanding.load(Acquire) > 0;
        if broken {
            lock(&self.queues).closed = true;
            self.gate.shut();
        }
        let mut queues = lock(&self.queues);
        let Queues { empty, filled, .. } = &mut *queues;
        // Filled ones only of a request that did not come to its end.
        for block in empty.drain(..).chain(filled.drain(..).map(|filled| filled.block)) {
            self.staging.give_back(block);
        }
        drop(queues);
        if let Err(panic) = worked {
            resume_unwind(panic);
        }
        let mut outcome = lock(&self.outcome);
        match outcome.error.take() {
            _ if broken => Err(Error::kernel(Errno::IO, "read", self.offset, self.len)),
            Some(error) if outcome.end == 0 => Err(error),
            _ => Ok(outcome.end),
        }
    }

    fn work(self: &Arc<Self>) {
        loop {
            let mut hands = Hands::new(self, Who::Caller);
            loop {
                if self.is_interrupted() {
                    self.leave_out();
                }
                if let Err(error) = self.provide() {
                    self.give_up(&error);
                }
                let Some(work) = self.take(Who::Caller) else { break };
                hands.work(work);
            }
            hands.settle();
            if self.await_work() {
                break;
            }
        }
    }

    /// Waits; true when everything arrived or a helper panicked, false when there is something the caller could do.
    fn await_work(&self) -> bool {
        // A short read from storage is over in less time than it takes to fall asleep and wake twice.
        let look = if self.len <= 4 << 20 { self.ctx.files.workers().spin() * 20 } else { self.ctx.files.workers().spin() };
        let begun = Instant::now();
        while begun.elapsed() < look {
            if self.outstanding.load(Acquire) == 0 {
                return true;
            }
            if self.news.swap(false, Acquire) && self.has_work() {
                return false;
            }
            std::hint::spin_loop();
        }
        let mut outcome = lock(&self.outcome);
        loop {
            if outcome.finished || self.gate.is_broken() {
                return true;
            }
            if self.has_work() {
                return false;
            }
            // Who is asked may do anything, and those who work must not wait for that. What came up meanwhile is found by
            // the next look at the queues.
            drop(outcome);
            if self.is_interrupted() && self.can_leave_out() {
                return false;
            }
            outcome = lock(&self.outcome);
            if outcome.finished || self.has_work() {
                continue;
            }
            outcome.sleeps = true;
            // The time limit only guards against a wake-up lost to a helper that died.
            outcome = self
                .changed
                .wait_timeout(outcome, Duration::from_millis(200))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            outcome.sleeps = false;
        }
    }

    /// Whether it shall end early. Who is asked may want to read too, and must find blocks that are not lent to this job.
    fn is_interrupted(&self) -> bool {
        self.ctx.bounce.limit() >= 2 * (LENT * BLOCK) as u64 && is_interrupted()
    }

    /// Whether there is anything that nobody has begun.
    fn can_leave_out(&self) -> bool {
        let queues = lock(&self.queues);
        !(queues.windows.is_empty() && queues.cache.is_empty() && queues.dma.is_empty() && queues.storage.is_empty())
    }

    /// Whether there is something that the caller could do.
    fn has_work(&self) -> bool {
        let queues = lock(&self.queues);
        !queues.filled.is_empty()
            || !queues.dma.is_empty()
            || !queues.cache.is_empty()
            || queues.is_starved()
            || (!queues.windows.is_empty() && self.may_survey())
    }

    /// A mapping of the file.
    pub(crate) fn mapping(&self, who: Who) -> Option<Arc<Mapping>> {
        let end = self.offset + self.len;
        let kernel = self.ctx.files.sys();
        if who == Who::Keeper {
            return self.file.mapping(kernel, end);
        }
        self.file.kept_mapping(end).or_else(|| {
            let file = Arc::clone(&self.file);
            self.ctx.files.shadow_workers()?.call(move || file.mapping(kernel, end))?
        })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(fence) = self.request.order.take() {
            self.device().release_fence(fence);
        }
    }
}
