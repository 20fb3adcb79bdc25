//! A large request while several threads work on it: its queues, and what has arrived.
//!
//! ```text
//!            ranges (not surveyed yet)
//!               │ survey + plan                                        plan_range.rs
//!               ▼
//!   cache: copy, store     dma      storage: direct, p2p              queue.rs: pieces
//!       │                   │          │
//!   caller, copy workers  caller    shadow workers: they have the shadow descriptors
//!       │                   │          │  direct: a filled buffer
//!       │                   │          └────────> caller, copy workers: queue its copy
//!       └───── outcomes ────┘
//!               ▼
//!   bytes left ── 0 ──> the caller wakes, returns the prefix that arrived
//! ```
//!
//! This file holds the state and applies outcomes; it calls no engine and wakes no worker. dispatch.rs runs the loops.
//!
//! A piece that fails on its route goes back as a segment of a safer one, so the caller gets the result of a plain
//! `pread`. The count returned is the unbroken prefix: bytes after a gap are not reported.
//!
//! After a panic of the caller or a worker no thread begins anything more, and the call ends when the workers have
//! left.
//!
//! Known flaw: when the file is truncated while it is read, bytes past the new end may have reached the device already;
//! a host read, which goes front to back, would have stopped before them. docs/semantics.md says so. A buffer that a
//! thread had when it panicked is lost to the pool.

mod dispatch;
mod queue;

use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};

use spinio_plan::Segment;
use spinio_plan::geometry::Stripe;
use spinio_sys::linux::PAGE;

use self::queue::{PieceSizes, WorkQueues};
use crate::read::engine::RingPath;
use crate::read::params::ReadParams;
use crate::read::plan_range::{PlannedRange, plan_ranges};
use crate::read::prefault::Prefault;
use crate::read::work::{LONG_REQUEST, Outcome, Piece, PlanRange, pieces_of};
use spinio_files::is_shadow;
use spinio_host::lock;
use spinio_host::task_scope::TaskScope;
use spinio_transfer::Error;

struct Completion {
    /// End of the unbroken prefix, as far as is known.
    prefix_end: u64,
    error: Option<Error>,
    finished: bool,
    /// The caller sleeps. A thread that need not wake it saves the system call.
    caller_sleeps: bool,
}

/// A request and how far it has got.
pub(crate) struct ReadRequest {
    /// Some bytes came from storage, or an assumption that they are cached was wrong.
    pub(crate) missed_cache: AtomicBool,
    /// What the page cache fetches for this request alone.
    pub(crate) readahead_pages: Mutex<Vec<Range<u64>>>,
    /// Some piece did not take the route that was planned.
    pub(crate) rerouted: AtomicBool,
    queues: Mutex<WorkQueues>,
    bytes_left: AtomicU64,
    completion: Mutex<Completion>,
    changed: Condvar,
    /// There may be something for the caller to do.
    wake_flag: AtomicBool,
    /// Whether the descriptor means the same to the copy workers: a thread of the program may have left the descriptor
    /// table that it had when they were started.
    workers_share_fd: bool,
    prefault: Prefault,
    /// How the caller reads storage, once there is something to read; `None`: shadow workers do.
    ring: OnceLock<Option<RingPath>>,
    /// The workers that are in the request.
    scope: TaskScope,
    /// The last field: it has the runtime.
    params: ReadParams,
}

impl Deref for ReadRequest {
    type Target = ReadParams;

    fn deref(&self) -> &ReadParams {
        &self.params
    }
}

impl ReadRequest {
    pub(crate) fn new(params: ReadParams) -> ReadRequest {
        let (offset, len) = (params.offset, params.len);
        // Reads of storage must begin and end with a page, wherever a partition begins.
        let page_aligned = |s: &Stripe| (s.chunk | s.phase.unwrap_or(0)).is_multiple_of(PAGE as u64);
        let stripe = params.file.block_stack().stripe().filter(page_aligned);
        let threads = params.copy_threads as u64;
        let sizes = PieceSizes::new(offset, len, threads, params.device().capabilities().max_pin, stripe);
        let share_fds =
            || params.ctx.files.workers().copy().is_some_and(|workers| workers.shares_fd_table() != Some(false));
        let workers_share_fd = is_shadow(params.fd) || share_fds();
        ReadRequest {
            workers_share_fd,
            params,
            missed_cache: AtomicBool::new(false),
            readahead_pages: Mutex::default(),
            rerouted: AtomicBool::new(false),
            queues: Mutex::new(WorkQueues::new(sizes)),
            bytes_left: AtomicU64::new(len),
            completion: Mutex::new(Completion { prefix_end: len, error: None, finished: false, caller_sleeps: false }),
            changed: Condvar::new(),
            wake_flag: AtomicBool::new(false),
            prefault: Prefault::new(offset, len, LONG_REQUEST),
            ring: OnceLock::new(),
            scope: TaskScope::new(),
        }
    }

    /// Queues all of the request to be planned.
    fn queue_ranges(&self) {
        lock(&self.queues).ranges.extend(plan_ranges(self.offset, self.len));
    }

    /// Queues segments as they are: a trial reads by a plan of its own.
    pub(crate) fn queue_segments(&self, segments: &[Segment]) {
        self.queue_pieces(pieces_of(segments).into_iter());
    }

    fn queue_pieces(&self, pieces: impl Iterator<Item = Piece>) {
        let mut queues = lock(&self.queues);
        pieces.for_each(|piece| queues.for_route(piece.route).push_back(piece));
        drop(queues);
        self.notify_caller();
    }

    /// A range was planned, or is left to a shadow worker.
    fn apply_plan(&self, range: PlanRange, planned: Option<PlannedRange>) {
        let Some(planned) = planned else {
            lock(&self.queues).ranges.push_back(range);
            return;
        };
        if planned.absent {
            self.missed_cache.store(true, Relaxed);
        }
        if !planned.readahead_pages.is_empty() {
            lock(&self.readahead_pages).extend(planned.readahead_pages);
        }
        self.queue_pieces(planned.pieces.into_iter());
    }

    /// What an engine did. Waking workers is left to the dispatcher.
    fn apply(&self, outcome: Outcome) {
        match outcome {
            Outcome::Done { offset, len, got, error } => self.complete(offset, len, got, error),
            Outcome::Reroute { piece, done, route, reason } => {
                self.rerouted.store(true, Relaxed);
                let (offset, len) = (piece.offset + done, piece.len - done);
                let rest = Piece { offset, len, route, reason, assumed_cached: false };
                lock(&self.queues).for_route(route).push_front(rest);
                self.notify_caller();
            }
            Outcome::Resurvey { offset, len } => {
                self.missed_cache.store(true, Relaxed);
                self.rerouted.store(true, Relaxed);
                lock(&self.queues).ranges.push_back(PlanRange { offset, len, recheck: true });
                self.notify_caller();
            }
            Outcome::Filled(filled) => {
                let mut queues = lock(&self.queues);
                queues.filled.push_back(filled);
                let waiting_for_share = queues.waiting_for_share > 0;
                drop(queues);
                if waiting_for_share {
                    self.staging.wake_share_waiters();
                }
                self.notify_caller();
            }
            Outcome::BufferReturned => self.end_lending(lock(&self.queues)),
            Outcome::WakeWorkers => {}
        }
    }

    /// A buffer is no longer lent. If it was the last one, the caller has to lend another.
    fn end_lending(&self, queues: MutexGuard<'_, WorkQueues>) {
        self.count_returned(queues);
        self.staging.end_lending(self.file.storage, 1);
    }

    /// A buffer has left those that are lent, and is still one of the share.
    fn count_returned(&self, mut queues: MutexGuard<'_, WorkQueues>) {
        queues.lent_out -= 1;
        let starved = queues.is_starved();
        drop(queues);
        if starved {
            self.notify_caller();
        }
    }

    /// `got` bytes of a piece arrived, and then `error` or the end of the file came.
    fn complete(&self, offset: u64, len: u64, got: u64, error: Option<Error>) {
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

    /// Completes with an error what no thread has begun.
    fn fail(&self, pending: Vec<(u64, u64)>, error: &Error) {
        for (offset, len) in pending {
            self.complete(offset, len, 0, Some(error.clone()));
        }
    }

    /// Wakes a caller that waits although there is work for it.
    fn notify_caller(&self) {
        self.wake_flag.store(true, Release);
        let caller_sleeps = lock(&self.completion).caller_sleeps;
        if caller_sleeps {
            self.changed.notify_all();
        }
    }
}
