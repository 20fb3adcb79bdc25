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

use std::collections::VecDeque;
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

use crate::batch::gate::Gate;
use crate::core::{Core, KEEPERS};
use crate::crew::Task;
use crate::file::{File, Mapping};
use crate::interrupt::{interrupted, is_interrupted};
use crate::lock::lock;
use crate::model::{Expected, Known, TEACHES};
use crate::own::is_own;
use crate::read::beside;
use crate::read::engine::{Hands, LONG};
use crate::read::populate::Populate;
use crate::read::work::{Filled, P2P_PIECE, Piece, Queues, Who, Work};
use crate::staging::{BLOCK, Block, Staging};
use crate::stats::Watch;
use crate::{Error, Target};

/// Bytes that are surveyed and planned together; a multiple of [`BLOCK`].
pub(crate) const WINDOW: u64 = 128 << 20;

/// Bytes of the first window of a request that has several.
const FIRST: u64 = 16 << 20;

/// Bytes that are registered with the driver at once, at most. Half of this costs a twentieth of the speed.
const DMA_PIECE: u64 = 128 << 20;

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
    pub(crate) core: Arc<Core>,
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
        let threads = request.core.threads() as u64;
        let len = request.len;
        // What storage is asked for must begin and end with a page, wherever a partition begins.
        let whole = |s: &Stripe| (s.chunk | s.phase.unwrap_or(0)).is_multiple_of(linux::PAGE as u64);
        let stripe = request.file.geometry().stripe().filter(whole);
        let shared = || request.core.mates().is_some_and(|mates| mates.shares_my_table() != Some(false));
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
        self.core.pins.give_back_overlap(start, self.len as usize)
    }

    /// The whole request is planned: what it should take is looked at again when it has ended. Only where nothing but
    /// the route can be to blame for the time: nobody else reads, and nothing that the program queued is in the way.
    pub(crate) fn expect(&self, extents: &[Extent], plan: &[Segment]) {
        let quiet = || match &self.order {
            Some(fence) => self.device().is_done(fence).unwrap_or(false),
            None => false,
        };
        if self.len >= TEACHES && self.core.requests() == 1 && quiet() {
            *lock(&self.expected) = self.known.expect(&self.core, &self.file, extents, plan);
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

    /// How many mates would find something to copy, to look at or to make ready, beside the caller.
    fn mates_wanted(&self) -> usize {
        let queues = lock(&self.queues);
        let windows = if self.may_survey() { queues.windows.iter().map(|w| w.1).sum() } else { 0 };
        let bytes = queues.cache.iter().map(|p| p.len).sum::<u64>() + windows;
        (bytes.div_ceil(self.copy_piece) as usize).saturating_sub(1).max(self.populate.mates(&queues.dma))
    }

    /// The next thing for `who` to do.
    pub(crate) fn take(&self, who: Who) -> Option<Work> {
        let mut queues = lock(&self.queues);
        if queues.closed {
            return None;
        }
        if who == Who::Beside {
            // He never waits for a block: when there is one he is called again.
            if self.beside.load(Relaxed)
                && let Some(block) = queues.empty.pop()
            {
                if let Some(piece) = beside::cut(&mut queues.dma, self.offset) {
                    self.registered.fetch_add(piece.len, Relaxed);
                    return Some(Work::Fill(piece, block));
                }
                queues.empty.push(block);
            }
            // He goes, and with the lock in hand, so that who finds something for him from now on calls him again.
            queues.beside = false;
            return None;
        }
        if who == Who::Keeper {
            // A keeper never waits for a block: it may be wanted elsewhere, and is called again when there is one.
            match queues.storage.front().map(|p| p.route) {
                Some(Route::Direct) => {
                    if let Some(block) = queues.empty.pop()
                        && let Some(piece) = self.cut(&mut queues.storage)
                    {
                        return Some(Work::Fill(piece, block));
                    }
                }
                Some(_) => return self.cut(&mut queues.storage).map(Work::Piece),
                None => {}
            }
        } else {
            // Who registers gets at the device, and nobody else does until he has done.
            if (who == Who::Caller || queues.dma.is_empty())
                && let Some(filled) = queues.filled.pop_front()
            {
                return Some(Work::Deliver(filled));
            }
            // The driver registers one range at a time, so one thread does it: the caller, who waits anyway.
            if who == Who::Caller
                && let Some(piece) = self.cut(&mut queues.dma)
            {
                return Some(Work::Piece(piece));
            }
            if let Some(piece) = self.cut(&mut queues.cache) {
                return Some(Work::Piece(piece));
            }
        }
        if (who == Who::Keeper || self.may_survey())
            && let Some((offset, len, again)) = queues.windows.pop_front()
        {
            return Some(Work::Window(offset, len, again));
        }
        if who == Who::Mate
            && let Some(chunk) = self.populate.take(&queues.dma)
        {
            return Some(Work::Populate(chunk));
        }
        if who == Who::Keeper {
            // It goes, and with the lock in hand, so that who finds something for it from now on calls it again.
            queues.keepers -= 1;
        }
        None
    }

    /// Lends blocks to helpers without a device, as long as there is something to fill them with, and calls them. The first
    /// for storage is waited for.
    fn provide(self: &Arc<Self>) -> Result<(), Error> {
        loop {
            let (lent, direct, beside) = {
                let queues = lock(&self.queues);
                let left = LENT - queues.lent.min(LENT);
                let direct = queues.empty.len() < queues.direct_pieces(self.direct_piece).min(left);
                (queues.lent, direct, queues.lent < beside::blocks(self.len) && self.is_beside(&queues))
            };
            let block = match (direct, beside) {
                (true, _) if lent == 0 => Some(self.staging.take()),
                (true, _) => self.staging.try_take_warm().transpose(),
                // A helper that gets none is missed by nobody.
                (false, true) => self.staging.try_take_within(beside::RING).unwrap_or(None).map(Ok),
                (false, false) => None,
            };
            let Some(block) = block else { break };
            let block = block.map_err(|e| Error::device(e, "read", self.offset, self.len))?;
            let mut queues = lock(&self.queues);
            queues.lent += 1;
            queues.empty.push(block);
        }
        self.call_keepers();
        self.call_beside();
        Ok(())
    }

    /// Filling page tables takes long: that is more worth to the caller than what is copied beside him.
    pub(crate) fn fill_tables_ahead(self: &Arc<Self>) {
        if self.core.threads() < 4 {
            self.beside.store(false, Relaxed);
        }
        self.call_helpers();
    }

    /// Whether somebody may copy beside the caller now. Callers that work side by side keep the processors busy by themselves.
    fn is_beside(&self, queues: &Queues) -> bool {
        self.beside.load(Relaxed) && beside::is_worth(&queues.dma) && self.core.requests() <= 1
    }

    fn call_beside(self: &Arc<Self>) {
        let wanted = {
            let mut queues = lock(&self.queues);
            let wanted = !queues.beside && !queues.empty.is_empty() && self.is_beside(&queues);
            queues.beside |= wanted;
            wanted
        };
        if wanted && let Some(crew) = self.core.mates() {
            crew.post(Arc::new(Helping { job: Arc::clone(self), who: Who::Beside }), 1);
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
            self.arrived(offset, len, 0, Some(interrupted("read", self.offset, self.len)));
        }
    }

    /// The request cannot go on: what waits for storage has failed.
    fn give_up(&self, error: &Error) {
        let pieces: Vec<Piece> = lock(&self.queues).storage.drain(..).collect();
        for piece in pieces {
            self.arrived(piece.offset, piece.len, 0, Some(error.clone()));
        }
    }

    /// Takes an empty block back from the keepers.
    pub(crate) fn reclaim(&self) -> Option<Block> {
        let mut queues = lock(&self.queues);
        let block = queues.empty.pop()?;
        queues.lent -= 1;
        Some(block)
    }

    /// A block that a keeper filled.
    pub(crate) fn filled(&self) -> Option<Filled> {
        lock(&self.queues).filled.pop_front()
    }

    /// A keeper filled a block.
    pub(crate) fn hand_in(&self, filled: Filled) {
        lock(&self.queues).filled.push_back(filled);
        self.stir();
    }

    /// A lent block has left for the ring.
    pub(crate) fn block_gone(&self) {
        let mut queues = lock(&self.queues);
        queues.lent -= 1;
        let starved = queues.is_starved();
        drop(queues);
        if starved {
            self.stir();
        }
    }

    /// Whether callers and mates can ask the residency: a stranger's question needs a twin.
    fn may_survey(&self) -> bool {
        self.file.rights != crate::file::Rights::Stranger
    }

    fn cut(&self, queue: &mut VecDeque<Piece>) -> Option<Piece> {
        let front = queue.front_mut()?;
        let at = self.offset + front.offset;
        let to_boundary = |unit: u64| (at / unit + 1) * unit - at;
        let most = match front.route {
            // Short requests are cut finer: several commands in flight hide each other's latency.
            Route::Direct => self.whole_chunks(at, self.direct_piece.min(to_boundary(BLOCK as u64))),
            Route::P2p => self.whole_chunks(at, to_boundary(P2P_PIECE)),
            Route::Dma => self.dma_piece(front.len, at),
            Route::Copy | Route::Store | Route::Gather => self.copy_piece.min(to_boundary(BLOCK as u64)),
        };
        if front.len <= most {
            return queue.pop_front();
        }
        let piece = Piece { len: most, ..*front };
        front.offset += most;
        front.len -= most;
        Some(piece)
    }

    /// A command of an array ends with a chunk.
    fn whole_chunks(&self, at: u64, most: u64) -> u64 {
        self.stripe.map_or(most, |stripe| stripe.whole_chunks(at, most) - at)
    }

    /// Bytes of the next DMA: short ones at both ends of the request, because the first DMA waits for the first
    /// registration and the caller waits for the last DMA.
    fn dma_piece(&self, left: u64, at: u64) -> u64 {
        let begun = self.registered.load(Relaxed);
        let to_come = self.len.saturating_sub(begun);
        let most = if self.beside.load(Relaxed) { beside::REGISTERED } else { DMA_PIECE };
        let most = most.min(self.device().abilities().max_pin);
        let piece = match to_come {
            short if short <= 16 << 20 => (short / 2).max(4 << 20),
            _ => begun.min(to_come / 2).max(8 << 20),
        };
        // Whole pages of the file, so that no page is registered twice.
        let end = ((at + piece.min(most)) / (64 << 10) * (64 << 10)).max(at + (64 << 10));
        let piece = (end - at).min(left);
        self.registered.fetch_add(piece, Relaxed);
        piece
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
        let look = if self.len <= 4 << 20 { self.core.look() * 20 } else { self.core.look() };
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
        self.core.settings.staging >= 2 * (LENT * BLOCK) as u64 && is_interrupted()
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
        let kernel = self.core.kernel;
        if who == Who::Keeper {
            return self.file.mapping(kernel, end);
        }
        self.file.kept_mapping(end).or_else(|| {
            let file = Arc::clone(&self.file);
            self.core.keepers()?.call(move || file.mapping(kernel, end))?
        })
    }

    /// Calls the helpers that can be of use now.
    pub(crate) fn call_helpers(self: &Arc<Self>) {
        self.call_keepers();
        // Callers that work side by side keep the processors busy by themselves.
        let crowded = self.core.requests() > self.core.threads();
        let free = if crowded || !self.seen { 0 } else { self.core.threads() - 1 };
        let mates = self.mates_wanted().min(free);
        if mates > 0
            && let Some(crew) = self.core.mates()
        {
            crew.post(Arc::new(Helping { job: Arc::clone(self), who: Who::Mate }), mates);
        }
    }

    fn call_keepers(self: &Arc<Self>) {
        let more = {
            let mut queues = lock(&self.queues);
            let wanted = queues.keepers_wanted(self.direct_piece, !self.may_survey()).min(KEEPERS);
            let more = wanted.saturating_sub(queues.keepers);
            queues.keepers += more;
            more
        };
        if more > 0
            && let Some(crew) = self.core.keepers()
        {
            crew.post(Arc::new(Helping { job: Arc::clone(self), who: Who::Keeper }), more);
        }
    }
}

/// A helper's part in a job.
struct Helping {
    job: Arc<Job>,
    who: Who,
}

impl Task for Helping {
    fn help(&self) {
        let Some(_inside) = self.job.gate.enter() else { return };
        let mut hands = Hands::new(&self.job, self.who);
        while let Some(work) = self.job.take(self.who) {
            hands.work(work);
        }
        hands.settle();
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(fence) = self.request.order.take() {
            self.device().release_fence(fence);
        }
    }
}
