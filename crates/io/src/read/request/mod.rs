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

mod dispatch;
mod queue;

use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use spinio_device::{Device, FenceGuard};
use spinio_plan::geometry::Stripe;
use spinio_plan::{Reason, Route, Segment};
use spinio_sys::linux::{self, Fd};

use crate::ctx::Reader;
use crate::read::prefault::Prefault;
use crate::read::work::{LONG_REQUEST, Piece, Role, WorkQueues};
use spinio_device::Target;
use spinio_files::FileState;
use spinio_files::cost::CostEntry;
use spinio_files::is_shadow;
use spinio_host::is_cancelled;
use spinio_host::lock;
use spinio_host::task_scope::TaskScope;
use spinio_stats::RequestSpan;
use spinio_transfer::Error;
use spinio_transfer::Mapping;
use spinio_transfer::bounce::{BUFFER_SIZE, BouncePool};

/// Bytes that are surveyed and planned together; a multiple of [`BLOCK`].
pub(crate) const PLAN_RANGE: u64 = 128 << 20;

/// Bytes of the first window of a request that has several.
const FIRST_RANGE: u64 = 16 << 20;

/// Blocks that helpers without a device have of one job at most.
const MAX_LENT: usize = 16;

struct Completion {
    /// End of the unbroken prefix, as far as is known.
    prefix_end: u64,
    error: Option<Error>,
    finished: bool,
    /// The caller sleeps. Who wakes nobody need not call the kernel.
    caller_sleeps: bool,
}

/// What a large read is about.
pub(crate) struct ReadParams {
    pub(crate) ctx: Arc<Reader>,
    pub(crate) span: RequestSpan,
    pub(crate) file: Arc<FileState>,
    pub(crate) staging: Arc<BouncePool>,
    pub(crate) dest: Target,
    /// The program's descriptor, for those who see it.
    pub(crate) fd: Fd,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// What every copy of this request waits for.
    pub(crate) order: Option<FenceGuard>,
    /// Whether P2P may be planned.
    pub(crate) p2p: Result<(), Reason>,
    /// Whether pages may be registered.
    pub(crate) dma: Result<(), Reason>,
    /// It is part of a stream whose requests up to this length the kernel's read-ahead serves best, and no longer; else 0.
    pub(crate) readahead_limit: u64,
    /// What each route costs.
    pub(crate) costs: Arc<CostEntry>,
}

/// A request and how far it has got.
pub(crate) struct ReadRequest {
    params: ReadParams,
    /// Anything that storage served, or a presumption that failed.
    pub(crate) missed_cache: AtomicBool,
    /// What the page cache has to fetch for this request alone.
    pub(crate) readahead_pages: Mutex<Vec<Range<u64>>>,
    /// Some piece did not go the way it was planned.
    pub(crate) rerouted: AtomicBool,
    copy_piece: u64,
    direct_piece: u64,
    /// Of the array under the file.
    stripe: Option<Stripe>,
    queues: Mutex<WorkQueues>,
    bytes_left: AtomicU64,
    completion: Mutex<Completion>,
    changed: Condvar,
    /// Something may have come up for the caller.
    wake_flag: AtomicBool,
    registered: AtomicU64,
    /// Whether the descriptor means to mates what it means to the caller: a thread of the program may have left the table
    /// that it had when they were made.
    workers_share_fd: bool,
    pub(crate) prefault: Prefault,
    /// The helpers that are at work.
    scope: TaskScope,
}

impl Deref for ReadRequest {
    type Target = ReadParams;

    fn deref(&self) -> &ReadParams {
        &self.params
    }
}

impl ReadRequest {
    pub(crate) fn new(params: ReadParams) -> ReadRequest {
        let threads = params.ctx.files.workers().copy_threads() as u64;
        let len = params.len;
        // What storage is asked for must begin and end with a page, wherever a partition begins.
        let page_aligned = |s: &Stripe| (s.chunk | s.phase.unwrap_or(0)).is_multiple_of(linux::PAGE as u64);
        let stripe = params.file.block_stack().stripe().filter(page_aligned);
        let share_fds =
            || params.ctx.files.workers().copy().is_some_and(|mates| mates.shares_fd_table() != Some(false));
        let workers_share_fd = is_shadow(params.fd) || share_fds();
        let prefault = Prefault::new(params.offset, len, LONG_REQUEST);
        ReadRequest {
            stripe,
            workers_share_fd,
            params,
            missed_cache: AtomicBool::new(false),
            readahead_pages: Mutex::default(),
            rerouted: AtomicBool::new(false),
            copy_piece: (len / (2 * threads)).next_multiple_of(64 << 10).clamp(256 << 10, BUFFER_SIZE as u64),
            direct_piece: (len / 4).next_multiple_of(64 << 10).clamp(256 << 10, BUFFER_SIZE as u64),
            queues: Mutex::default(),
            bytes_left: AtomicU64::new(len),
            completion: Mutex::new(Completion { prefix_end: len, error: None, finished: false, caller_sleeps: false }),
            changed: Condvar::new(),
            wake_flag: AtomicBool::new(false),
            registered: AtomicU64::new(0),
            prefault,
            scope: TaskScope::new(),
        }
    }

    pub(crate) fn device(&self) -> &'static dyn Device {
        self.staging.device()
    }

    /// Bytes not looked at yet, cut at window boundaries of the file.
    fn queue_ranges(&self) {
        let mut queues = lock(&self.queues);
        let mut at = 0;
        while at < self.len {
            // A short one first: nothing moves before it is surveyed.
            let range_len = if at == 0 { FIRST_RANGE } else { PLAN_RANGE };
            let end = self.len.min((self.offset + at) / range_len * range_len + range_len - self.offset);
            queues.ranges.push_back((at, end - at, false));
            at = end;
        }
    }

    /// Gives back what earlier requests registered of this range.
    pub(crate) fn unpin_range(&self) {
        let Some(mapping) = self.file.cached_mapping(self.offset + self.len) else { return };
        // Before anything moves: giving back waits for what moves.
        let start = mapping.ptr.wrapping_add(self.offset as usize);
        self.ctx.files.unpin().unpin_overlapping(start, self.len as usize);
    }

    /// A window that only a keeper can survey.
    pub(crate) fn defer_survey(&self, offset: u64, len: u64, recheck: bool) {
        lock(&self.queues).ranges.push_back((offset, len, recheck));
    }

    /// Bytes to be looked at properly, because a presumption failed.
    pub(crate) fn resurvey(&self, offset: u64, len: u64) {
        self.missed_cache.store(true, Relaxed);
        self.rerouted.store(true, Relaxed);
        lock(&self.queues).ranges.push_back((offset, len, true));
        self.notify_caller();
    }

    /// Segments to be worked on; `base` is where their offsets count from.
    pub(crate) fn queue_segments(&self, base: u64, segments: &[Segment], assumed_cached: bool) {
        let mut queues = lock(&self.queues);
        for s in segments {
            let piece = Piece { offset: base + s.offset, len: s.len, route: s.route, reason: s.reason, assumed_cached };
            queues.for_route(s.route).push_back(piece);
        }
        drop(queues);
        self.notify_caller();
    }

    /// A piece that could not go its way takes another one.
    pub(crate) fn reroute(&self, piece: Piece, done: u64, route: Route, reason: Reason) {
        self.rerouted.store(true, Relaxed);
        let rest = Piece { offset: piece.offset + done, len: piece.len - done, route, reason, assumed_cached: false };
        lock(&self.queues).for_route(route).push_front(rest);
        self.notify_caller();
    }

    /// Wakes a caller that waits although there is work for it.
    fn notify_caller(&self) {
        self.wake_flag.store(true, Release);
        let caller_sleeps = lock(&self.completion).caller_sleeps;
        if caller_sleeps {
            self.changed.notify_all();
        }
    }

    /// The request shall end early: what nobody has begun is left out.
    fn cancel_pending(&self) {
        let mut queues = lock(&self.queues);
        let mut pending: Vec<(u64, u64)> = queues.ranges.drain(..).map(|(offset, len, _)| (offset, len)).collect();
        let WorkQueues { cache, dma, storage, .. } = &mut *queues;
        pending.extend([cache, dma, storage].into_iter().flat_map(|queue| queue.drain(..)).map(|p| (p.offset, p.len)));
        drop(queues);
        for (offset, len) in pending {
            self.complete(offset, len, 0, Some(Error::cancelled_error("read", self.offset, self.len)));
        }
    }

    /// The request cannot go on: what waits for storage has failed.
    fn fail_pending(&self, error: &Error) {
        let pieces: Vec<Piece> = lock(&self.queues).storage.drain(..).collect();
        for piece in pieces {
            self.complete(piece.offset, piece.len, 0, Some(error.clone()));
        }
    }

    /// `got` bytes of a piece arrived, and then `error` or the end of the file came.
    pub(crate) fn complete(&self, offset: u64, len: u64, got: u64, error: Option<Error>) {
        if got < len || error.is_some() {
            let mut completion = lock(&self.completion);
            if offset + got < completion.prefix_end
                || (offset + got == completion.prefix_end && completion.error.is_none())
            {
                completion.prefix_end = offset + got;
                completion.error = error;
            }
        }
        if self.bytes_left.fetch_sub(len, AcqRel) == len {
            let mut completion = lock(&self.completion);
            completion.finished = true;
            let caller_sleeps = completion.caller_sleeps;
            drop(completion);
            if caller_sleeps {
                self.changed.notify_all();
            }
        }
    }

    /// Waits; true when everything arrived or a helper panicked, false when there is something the caller could do.
    fn wait_for_work(&self) -> bool {
        // A short read from storage is over in less time than it takes to fall asleep and wake twice.
        let spin_time =
            if self.len <= 4 << 20 { self.ctx.files.workers().spin() * 20 } else { self.ctx.files.workers().spin() };
        let started = Instant::now();
        while started.elapsed() < spin_time {
            if self.bytes_left.load(Acquire) == 0 {
                return true;
            }
            if self.wake_flag.swap(false, Acquire) && self.has_work() {
                return false;
            }
            std::hint::spin_loop();
        }
        let mut completion = lock(&self.completion);
        loop {
            if completion.finished || self.scope.is_poisoned() {
                return true;
            }
            if self.has_work() {
                return false;
            }
            // Who is asked may do anything, and those who work must not wait for that. What came up meanwhile is found by
            // the next look at the queues.
            drop(completion);
            if self.is_cancelled() && self.has_pending() {
                return false;
            }
            completion = lock(&self.completion);
            if completion.finished || self.has_work() {
                continue;
            }
            completion.caller_sleeps = true;
            // The time limit only guards against a wake-up lost to a helper that died.
            completion = self
                .changed
                .wait_timeout(completion, Duration::from_millis(200))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            completion.caller_sleeps = false;
        }
    }

    /// Whether it shall end early. Who is asked may want to read too, and must find blocks that are not lent to this job.
    fn is_cancelled(&self) -> bool {
        self.ctx.bounce.limit() >= 2 * (MAX_LENT * BUFFER_SIZE) as u64 && is_cancelled()
    }

    /// Whether there is anything that nobody has begun.
    fn has_pending(&self) -> bool {
        let queues = lock(&self.queues);
        !(queues.ranges.is_empty() && queues.cache.is_empty() && queues.dma.is_empty() && queues.storage.is_empty())
    }

    /// Whether there is something that the caller could do.
    fn has_work(&self) -> bool {
        let queues = lock(&self.queues);
        !queues.filled.is_empty()
            || !queues.dma.is_empty()
            || !queues.cache.is_empty()
            || queues.is_starved()
            || (!queues.ranges.is_empty() && self.can_survey())
    }

    /// A mapping of the file.
    pub(crate) fn mapping(&self, role: Role) -> Option<Arc<Mapping>> {
        let end = self.offset + self.len;
        let kernel = self.ctx.files.sys();
        if role == Role::ShadowWorker {
            return self.file.mapping(kernel, end);
        }
        self.file.cached_mapping(end).or_else(|| {
            let file = Arc::clone(&self.file);
            self.ctx
                .files
                .shadow_workers()?
                .for_key(self.file.storage)
                .run_blocking(move || file.mapping(kernel, end))?
        })
    }
}
