//! The loop of a worker, from its start until the pool is shut down.
//!
//! ```text
//!   spin on the queue for some microseconds, if a thread waited for the last work
//!        │
//!        ▼
//!   run the idle task, if a thread waits for it
//!        │
//!        ▼
//!   pick an entry whose share has room: deferred closes first ──> run it, and repeat
//!        │ there is none
//!        ▼
//!   sleep until there is one, or until the idle task is due
//! ```
//!
//! A worker without work spins on the queue for a few microseconds, because the next request of a stream of reads
//! arrives soon and waking a sleeping thread costs more than reading 64 KiB; then it sleeps. On machines with few
//! processors it sleeps at once. No thread waits for detached work, so a worker does not spin after it: a stream
//! through the page cache detaches work every few hundred microseconds, and would keep one processor busy with spinning
//! alone.

use std::collections::VecDeque;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use spinio_sys::linux::gettid;

use crate::lock::lock;
use crate::shadow_fd::{Closer, PendingClose};
use crate::shares::{ShareKey, Shares};
use crate::syscalls::Syscalls;

/// A task that several workers can work on at once.
pub trait Task: Send + Sync {
    /// Works until there is nothing left to take.
    fn execute(&self);
}

/// How many times longer than the others one worker spins.
const LONG_SPIN_FACTOR: u32 = 8;

type BoxedFn = Box<dyn FnOnce() + Send>;

/// An entry of the queue.
pub(super) enum QueueEntry {
    /// For this many workers.
    Task(Arc<dyn Task>, usize),
    /// Once; more may follow soon.
    Run(BoxedFn),
    /// Once; no thread waits for it.
    Detached(BoxedFn),
}

#[derive(Default)]
pub(super) struct State {
    /// In order, each with the share that it takes.
    pub(super) entries: VecDeque<(ShareKey, QueueEntry)>,
    pub(super) pending_closes: Vec<PendingClose>,
    /// Descriptors being closed outside the lock.
    pub(super) closing: Shares,
    /// Detached work that has not ended.
    pub(super) detached: Shares,
    /// Workers that are not polling the queue.
    pub(super) busy: Shares,
    pub(super) wake_seq: u64,
    pub(super) sleeping: usize,
    pub(super) running: usize,
    pub(super) shutdown: bool,
}

impl State {
    /// Whether no worker polls the queue.
    pub(super) fn is_all_busy(&self) -> bool {
        self.sleeping == 0 && self.busy.total() >= self.running
    }
}

/// The next step of a worker.
enum Next {
    Close(ShareKey, Vec<PendingClose>),
    Run(ShareKey, QueueEntry),
}

/// State that the workers share with the threads that submit work.
pub(super) struct Shared {
    pub(super) sys: &'static dyn Syscalls,
    pub(super) state: Mutex<State>,
    pub(super) wake: Condvar,
    /// Entries and closes in the queue; read without the lock by spinning workers.
    pub(super) pending: AtomicUsize,
    /// A thread waits for the idle task.
    pub(super) idle_due: AtomicBool,
    /// Workers among which shares are kept; `None`: any key may have all.
    pub(super) shared_workers: Option<usize>,
    spin_time: Duration,
    long_spinner: AtomicBool,
    /// TID of one worker; 0 before the first one runs.
    pub(super) member_tid: AtomicU32,
    idle_task: Box<dyn IdleTask>,
}

/// The task of idle workers.
pub trait IdleTask: Send + Sync {
    /// How long a worker may sleep before it checks again; `None`: forever.
    fn sleep_timeout(&self) -> Option<Duration>;
    /// Releases what is no longer needed.
    fn reap_idle(&self);
}

/// The idle task of a pool that has none.
pub struct NoIdleTask;

impl IdleTask for NoIdleTask {
    fn sleep_timeout(&self) -> Option<Duration> {
        None
    }

    fn reap_idle(&self) {}
}

impl Closer for Shared {
    fn defer_close(&self, pending: PendingClose) {
        let mut state = lock(&self.state);
        state.pending_closes.push(pending);
        self.pending.fetch_add(1, Release);
        drop(state);
        self.wake.notify_one();
    }
}

impl Shared {
    pub(super) fn new(
        sys: &'static dyn Syscalls,
        shared_workers: Option<usize>,
        spin_time: Duration,
        idle_task: impl IdleTask + 'static,
    ) -> Shared {
        Shared {
            sys,
            state: Mutex::default(),
            wake: Condvar::new(),
            pending: AtomicUsize::new(0),
            idle_due: AtomicBool::new(false),
            shared_workers,
            spin_time,
            long_spinner: AtomicBool::new(false),
            member_tid: AtomicU32::new(0),
            idle_task: Box::new(idle_task),
        }
    }

    /// The main function of a worker, until the pool is shut down.
    pub(super) fn run_worker(&self) {
        let _ = self.member_tid.compare_exchange(0, gettid(), Relaxed, Relaxed);
        let mut last_waited_work = None;
        while let Some((key, entry)) = self.next_entry(last_waited_work) {
            let detached = matches!(entry, QueueEntry::Detached(_));
            match entry {
                QueueEntry::Task(task, _) => {
                    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| task.execute()));
                    debug_assert!(result.is_ok(), "a task must not panic");
                }
                QueueEntry::Run(call) | QueueEntry::Detached(call) => call(),
            }
            let mut state = lock(&self.state);
            state.busy.remove(key, 1);
            if detached {
                state.detached.remove(key, 1);
            }
            drop(state);
            last_waited_work = (!detached).then(Instant::now);
        }
    }

    /// Waits for work; `None` after a shutdown. `last_waited_work`: when this worker last completed work that a thread
    /// waited for, if that was its last work.
    fn next_entry(&self, last_waited_work: Option<Instant>) -> Option<(ShareKey, QueueEntry)> {
        let (mut spin_time, mut long_spin) = (self.spin_time, false);
        while let Some(begun) = last_waited_work
            && self.pending.load(Acquire) == 0
            && !self.idle_due.load(Acquire)
        {
            if begun.elapsed() >= spin_time {
                // One worker spins longer: in a stream of requests, the next one finds a thread awake.
                if long_spin || self.long_spinner.swap(true, Acquire) {
                    break;
                }
                (spin_time, long_spin) = (self.spin_time * LONG_SPIN_FACTOR, true);
            }
            std::hint::spin_loop();
        }
        if long_spin {
            self.long_spinner.store(false, Release);
        }
        let mut state = lock(&self.state);
        loop {
            if self.idle_due.load(Acquire) {
                drop(state);
                self.run_due_idle_task();
                state = lock(&self.state);
            }
            match self.pick(&mut state) {
                Some(Next::Run(key, entry)) => return Some((key, entry)),
                Some(Next::Close(key, closes)) => {
                    drop(state);
                    let count = closes.len();
                    for PendingClose { fd, pre_close, .. } in closes {
                        if let Some(hook) = pre_close {
                            hook(fd);
                        }
                        self.sys.close(fd);
                    }
                    state = lock(&self.state);
                    state.busy.remove(key, 1);
                    state.closing.remove(key, count);
                    continue;
                }
                None => {}
            }
            if state.shutdown {
                return None;
            }
            // Called without the lock: it may drop the last reference to an object whose drop calls this pool.
            let wake_seq = state.wake_seq;
            drop(state);
            self.idle_due.store(false, Release);
            let timeout = self.idle_task.sleep_timeout();
            state = lock(&self.state);
            if self.has_work(&state) || state.shutdown || state.wake_seq != wake_seq {
                // The worker may be busy for long, and the thread that waits for the idle task has been here already.
                if timeout == Some(Duration::ZERO) {
                    self.idle_due.store(true, Release);
                }
                continue;
            }
            if timeout == Some(Duration::ZERO) {
                drop(state);
                self.idle_task.reap_idle();
                state = lock(&self.state);
                continue;
            }
            state.sleeping += 1;
            let timed_out;
            (state, timed_out) = match timeout {
                Some(timeout) => {
                    let (state, slept) = self.wake.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner);
                    (state, slept.timed_out())
                }
                None => (self.wake.wait(state).unwrap_or_else(PoisonError::into_inner), false),
            };
            state.sleeping -= 1;
            if timed_out {
                drop(state);
                self.idle_task.reap_idle();
                state = lock(&self.state);
            }
        }
    }

    /// Runs the idle task if a thread waits for it: the queue may never be empty, and then no worker is ever idle.
    fn run_due_idle_task(&self) {
        let is_due = self.idle_due.swap(false, AcqRel);
        if is_due && self.idle_task.sleep_timeout() == Some(Duration::ZERO) {
            self.idle_task.reap_idle();
        }
    }

    /// Whether the share of a key has room for one more worker.
    fn may_run(&self, state: &State, key: ShareKey) -> bool {
        self.shared_workers.is_none_or(|size| state.busy.available(key, size) > 0)
    }

    /// The threads that work in hand and in the queue needs, as far as shares let it; `None` without shares. An entry
    /// may wait for ever, so none may count on the thread of another.
    pub(super) fn wanted_workers(&self, state: &State) -> Option<usize> {
        let size = self.shared_workers?;
        let mut wanted = Shares::default();
        // Those of one share are closed together.
        for close in &state.pending_closes {
            if wanted.of(close.key) == 0 && state.busy.available(close.key, size) > 0 {
                wanted.add(close.key, 1);
            }
        }
        for (key, entry) in &state.entries {
            let workers = if let QueueEntry::Task(_, workers) = entry { *workers } else { 1 };
            let room = state.busy.available(*key, size).saturating_sub(wanted.of(*key));
            wanted.add(*key, workers.min(room));
        }
        Some(state.busy.total() + wanted.total())
    }

    fn has_work(&self, state: &State) -> bool {
        state.pending_closes.iter().any(|close| self.may_run(state, close.key))
            || state.entries.iter().any(|entry| self.may_run(state, entry.0))
    }

    /// The oldest entry whose share has room, deferred closes first; its worker is counted. A close can wait for a
    /// server, so those of one share are taken together, and other workers take the others.
    fn pick(&self, state: &mut State) -> Option<Next> {
        let close_key = state.pending_closes.iter().map(|close| close.key).find(|&key| self.may_run(state, key));
        let next = if let Some(key) = close_key {
            let closes: Vec<_> = state.pending_closes.extract_if(.., |close| close.key == key).collect();
            self.pending.fetch_sub(closes.len(), Relaxed);
            state.closing.add(key, closes.len());
            state.busy.add(key, 1);
            Next::Close(key, closes)
        } else {
            let at = state.entries.iter().position(|entry| self.may_run(state, entry.0))?;
            let key = state.entries[at].0;
            state.busy.add(key, 1);
            match &mut state.entries[at].1 {
                QueueEntry::Task(task, more) if *more > 1 => {
                    *more -= 1;
                    Next::Run(key, QueueEntry::Task(Arc::clone(task), 1))
                }
                _ => {
                    self.pending.fetch_sub(1, Relaxed);
                    Next::Run(key, state.entries.remove(at)?.1)
                }
            }
        };
        // The work that ended before this may have made room in more than one share.
        if self.shared_workers.is_some() && state.sleeping > 0 && self.has_work(state) {
            self.wake.notify_one();
        }
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::pool::WorkerPool;
    use crate::syscalls::LinuxSyscalls;

    #[test]
    fn detached_task_leaves_worker_asleep() {
        // A worker that spins does so for longer than this test may take.
        let pool =
            WorkerPool::shadow_workers(&LinuxSyscalls, 1, Duration::from_secs(600), NoIdleTask).expect("workers");
        let done = Arc::new(AtomicU64::new(0));
        let begun = Instant::now();
        for turn in 1..=3 {
            let counter = Arc::clone(&done);
            pool.spawn_detached(move || {
                counter.fetch_add(1, AcqRel);
            });
            while done.load(Acquire) < turn || lock(&pool.shared.state).sleeping == 0 {
                assert!(begun.elapsed() < Duration::from_secs(300), "it spins");
                std::thread::yield_now();
            }
        }
    }

    /// Is due until it has run.
    #[derive(Default)]
    struct Reaper {
        due: AtomicBool,
        runs: AtomicU64,
    }

    struct SharedReaper(Arc<Reaper>);

    impl IdleTask for SharedReaper {
        fn sleep_timeout(&self) -> Option<Duration> {
            self.0.due.load(Acquire).then_some(Duration::ZERO)
        }

        fn reap_idle(&self) {
            self.0.due.store(false, Release);
            self.0.runs.fetch_add(1, AcqRel);
        }
    }

    #[test]
    fn due_idle_task_runs_before_more_work() {
        let reaper = Arc::new(Reaper::default());
        let task = SharedReaper(Arc::clone(&reaper));
        let pool = WorkerPool::shadow_workers(&LinuxSyscalls, 1, Duration::ZERO, task).expect("workers");
        let (begun, open) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (begun_there, open_there) = (Arc::clone(&begun), Arc::clone(&open));
        pool.spawn_detached(move || {
            begun_there.store(true, Release);
            while !open_there.load(Acquire) {
                std::thread::yield_now();
            }
        });
        let started = Instant::now();
        while !begun.load(Acquire) {
            assert!(started.elapsed() < Duration::from_secs(300), "no worker");
            std::thread::yield_now();
        }
        // From here on the queue has work whenever the worker looks at it.
        let seen = Arc::clone(&reaper);
        let (sender, receiver) = std::sync::mpsc::channel();
        pool.spawn_detached(move || {
            let _ = sender.send(seen.runs.load(Acquire));
        });
        reaper.due.store(true, Release);
        pool.wake_idle(Duration::from_secs(300));
        open.store(true, Release);
        assert_eq!(receiver.recv(), Ok(1), "the idle task waits until the queue is empty");
    }

    /// Submits work when the worker has found the queue empty; due from then on until it has run.
    #[derive(Default)]
    struct Submitter {
        pool: std::sync::OnceLock<Arc<WorkerPool>>,
        work: Mutex<Vec<Box<dyn FnOnce() + Send>>>,
        has_run: AtomicBool,
    }

    struct SharedSubmitter(Arc<Submitter>);

    impl IdleTask for SharedSubmitter {
        fn sleep_timeout(&self) -> Option<Duration> {
            let pool = self.0.pool.get()?;
            for work in std::mem::take(&mut *lock(&self.0.work)) {
                pool.spawn_detached(work);
            }
            (!self.0.has_run.load(Acquire)).then_some(Duration::ZERO)
        }

        fn reap_idle(&self) {
            self.0.has_run.store(true, Release);
        }
    }

    #[test]
    fn due_idle_task_is_not_lost_when_work_comes_as_the_queue_is_empty() {
        let idle = Arc::new(Submitter::default());
        let (sender, receiver) = std::sync::mpsc::channel();
        for _ in 0..2 {
            let (sender, seen) = (sender.clone(), Arc::clone(&idle));
            let report = move || {
                let _ = sender.send(seen.has_run.load(Acquire));
            };
            lock(&idle.work).push(Box::new(report));
        }
        let pool = WorkerPool::shadow_workers(&LinuxSyscalls, 1, Duration::ZERO, SharedSubmitter(Arc::clone(&idle)));
        let pool = Arc::new(pool.expect("workers"));
        let _ = idle.pool.set(Arc::clone(&pool));
        pool.spawn_detached(|| ());
        let reports = [(); 2].map(|()| receiver.recv_timeout(Duration::from_secs(300)));
        assert_eq!(reports[1], Ok(true), "the idle task waits until the queue is empty again");
    }
}
