//! Worker pools: threads that work on large requests.
//!
//! ```text
//!   caller ── submit(task, 3) ──> queue ──> worker: task.execute() until nothing is left
//!          ── run_blocking(f) ──> queue ──> worker: f(), result returned
//!   any thread drops a ShadowFd ─> pending closes ──> shadow worker closes it, in its own table
//! ```
//!
//! There are three kinds, because a thread uses one fd table:
//!
//! - **shadow workers** share a table apart from the program's, with SPIN's descriptors in it. They must not call a
//!   device: its driver finds its own descriptors by number, in the table of the caller (seen: CUDA fails to register
//!   memory there, or aborts).
//! - **copy workers** share the program's table, so they can call the driver, and read files through the program's
//!   descriptor while the program's thread waits in its call.
//! - **batch readers** have one table each, so that their reads share no reference count with other threads
//!   (batch/readers.rs). They open the files of a task for its duration; like shadow workers, they call no device.
//!
//! What a worker does between two tasks: `worker.rs`.
//!
//! Shadow workers wait for storage, and a file server (NFS, FUSE) may never answer. So their work takes a share of the
//! pool, by the file system's device number (shares.rs); entries of a full share wait in the queue and others overtake
//! them. Of 16 workers one file system has 8, which was the whole pool before; threads are started as work arrives.
//!
//! Known flaw: workers ignore NUMA; the kernel's scheduler places them.

mod worker;
mod workers;

use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use spinio_sys::linux::{FdTableRoot, close_range_unshare, gettid, in_shadow_table, spawn_signals_blocked};

pub use self::worker::{IdleTask, NoIdleTask, Task};
use self::worker::{QueueEntry, Shared, State};
pub use self::workers::{SHADOW_WORKERS, Workers};
use crate::lock::{lock, try_lock};
use crate::shadow_fd::CloseQueue;
use crate::shares::{NO_SERVER, ShareKey, Shares};
use crate::syscalls::Syscalls;

/// Worker threads of a runtime.
pub struct WorkerPool {
    shared: Arc<Shared>,
    /// For shadow workers and batch readers.
    fd_table_root: Option<FdTableRoot>,
    /// Each thread leaves the table that it started with for its own one.
    per_thread_table: bool,
    max_threads: usize,
}

/// A pool's workers for work that may wait for one file server, and so takes its share.
#[derive(Clone, Copy)]
pub struct PoolShare<'a> {
    pool: &'a WorkerPool,
    key: ShareKey,
}

/// How long all workers must have been busy before a thread that waits for one starts another.
const BUSY_WAIT: Duration = Duration::from_millis(2);

/// Bytes of a copy worker's stack: it calls the driver.
pub const STACK_SIZE: usize = 1 << 20;

impl WorkerPool {
    /// Up to `max_threads` shadow workers, started as work arrives. `spin_time`: how long an idle one polls the queue
    /// before it sleeps.
    pub fn shadow_workers(
        sys: &'static dyn Syscalls,
        max_threads: usize,
        spin_time: Duration,
        idle_task: impl IdleTask + 'static,
    ) -> Option<WorkerPool> {
        let root = sys.new_shadow_table().ok()?;
        WorkerPool::new(sys, Some(root), false, (1, max_threads), spin_time, idle_task)
    }

    /// `threads` copy workers. A thread has the fd table of the one that starts it, so all are started now, and this
    /// must be called on a thread of the program; up to `max_threads` by [`WorkerPool::ensure_copy_workers`].
    pub fn copy_workers(
        sys: &'static dyn Syscalls,
        threads: usize,
        max_threads: usize,
        spin_time: Duration,
        idle_task: impl IdleTask + 'static,
    ) -> Option<WorkerPool> {
        WorkerPool::new(sys, None, false, (threads, max_threads), spin_time, idle_task)
    }

    /// Starts copy workers until there are `threads`, with the fd table of the calling thread: not where that is known to
    /// be another than theirs.
    pub fn ensure_copy_workers(&self, threads: usize) {
        let missing = lock(&self.shared.state).running < threads;
        if missing && !in_shadow_table() && self.shares_fd_table() != Some(false) {
            self.start_threads(threads);
        }
    }

    /// Up to `max_threads` batch readers, started as work arrives.
    pub fn batch_readers(sys: &'static dyn Syscalls, max_threads: usize, spin_time: Duration) -> Option<WorkerPool> {
        let root = sys.new_shadow_table().ok()?;
        WorkerPool::new(sys, Some(root), true, (1, max_threads), spin_time, NoIdleTask)
    }

    fn new(
        sys: &'static dyn Syscalls,
        root: Option<FdTableRoot>,
        per_thread_table: bool,
        (initial, max_threads): (usize, usize),
        spin_time: Duration,
        idle_task: impl IdleTask + 'static,
    ) -> Option<WorkerPool> {
        let max_threads = max_threads.max(1);
        // With one worker there is nothing to share.
        let shared_workers = (root.is_some() && !per_thread_table && max_threads > 1).then_some(max_threads);
        let shared = Arc::new(Shared::new(sys, shared_workers, spin_time, idle_task));
        let pool = WorkerPool { shared, fd_table_root: root, per_thread_table, max_threads };
        pool.start_threads(initial.max(1)).then_some(pool)
    }

    /// The workers for work that may wait for one file server: `key` is its device number.
    pub fn for_key(&self, key: ShareKey) -> PoolShare<'_> {
        PoolShare { pool: self, key }
    }

    /// [`PoolShare::submit`] of work that waits for no file server.
    pub fn submit(&self, task: Arc<dyn Task>, workers: usize) {
        self.for_key(NO_SERVER).submit(task, workers);
    }

    /// [`PoolShare::spawn_detached`] of work that waits for no file server.
    pub fn spawn_detached(&self, f: impl FnOnce() + Send + 'static) {
        self.for_key(NO_SERVER).spawn_detached(f);
    }

    /// [`PoolShare::run_blocking`] of work that waits for no file server.
    pub fn run_blocking<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        self.for_key(NO_SERVER).run_blocking(f)
    }

    /// [`PoolShare::close_queue`] of descriptors that belong to no file server.
    pub fn close_queue(&self) -> CloseQueue {
        self.for_key(NO_SERVER).close_queue()
    }

    /// Runs a closure on a new thread that has the pool's table; `false` if there is none.
    pub fn spawn_dedicated(&self, name: &str, body: impl FnOnce() + Send + 'static) -> bool {
        self.fd_table_root.as_ref().is_some_and(|root| root.spawn(name, body))
    }

    /// Whether descriptors refer to the same files on the workers as on this thread; `None`: unknown.
    pub fn shares_fd_table(&self) -> Option<bool> {
        match self.shared.member_tid.load(Relaxed) {
            0 => None,
            member => self.shared.sys.same_fd_table(member, gettid()).ok(),
        }
    }

    /// Makes a sleeping worker recompute how long it may sleep.
    pub fn wake(&self) {
        self.wake_with(lock(&self.shared.state));
    }

    fn wake_with(&self, mut state: MutexGuard<'_, State>) {
        state.wake_seq += 1;
        let has_sleeper = state.sleeping > 0;
        drop(state);
        if has_sleeper {
            self.shared.wake.notify_one();
        }
    }

    /// As [`WorkerPool::wake`], for signal handlers too: one may have interrupted `malloc`, for which the thread that has
    /// the lock waits. `false`: the lock was not to be had for this long, and no worker was woken.
    pub fn try_wake(&self, timeout: Duration) -> bool {
        self.lock_within(timeout).map(|state| self.wake_with(state)).is_some()
    }

    fn lock_within(&self, timeout: Duration) -> Option<MutexGuard<'_, State>> {
        let begun = Instant::now();
        loop {
            match try_lock(&self.shared.state) {
                None if begun.elapsed() < timeout => std::thread::sleep(Duration::from_micros(20)),
                state => return state,
            }
        }
    }

    /// Has an idle worker run the idle task, whose sleep has become short. For signal handlers too, as
    /// [`WorkerPool::try_wake`].
    pub fn wake_idle(&self, timeout: Duration) {
        self.shared.idle_due.store(true, Release);
        self.try_wake(timeout);
    }

    /// After that, waits until `is_done`, up to `timeout`. For signal handlers too, as [`WorkerPool::wait_closed`].
    pub fn wait_idle_until(&self, is_done: impl Fn() -> bool, timeout: Duration) {
        let begun = Instant::now();
        while !is_done() && begun.elapsed() < timeout {
            // Each of those that run may wait for a server.
            let state = if begun.elapsed() > BUSY_WAIT { self.lock_within(BUSY_WAIT) } else { None };
            let wanted = state.filter(|state| state.is_all_busy()).map(|state| state.running + 1);
            if let Some(wanted) = wanted {
                self.ensure_threads(wanted);
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Waits until every deferred close is done, of one key or of all, up to `timeout`: a server may be slow, or be
    /// this very thread. For signal handlers too: it takes memory only where all workers are busy and a new one has to
    /// be started.
    pub fn wait_closed(&self, key: Option<ShareKey>, timeout: Duration) {
        let begun = Instant::now();
        let count = |shares: &Shares| key.map_or_else(|| shares.total(), |key| shares.of(key));
        while let Some(state) = self.lock_within(timeout.saturating_sub(begun.elapsed())) {
            let pending = state.pending_closes.iter().any(|close| key.is_none_or(|key| close.key == key));
            // Detached work may have the last reference to a shadow descriptor.
            if !pending && count(&state.closing) == 0 && count(&state.detached) == 0 {
                return;
            }
            let is_late = begun.elapsed() > BUSY_WAIT;
            let wanted =
                if pending && is_late && state.is_all_busy() { self.shared.wanted_workers(&state) } else { None };
            drop(state);
            if let Some(wanted) = wanted {
                // All of those that run may wait for another server.
                self.ensure_threads(wanted);
            }
            if begun.elapsed() > timeout {
                return;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn enqueue(&self, key: ShareKey, entry: QueueEntry, workers: usize) {
        let shared = &self.shared;
        let mut state = lock(&shared.state);
        if matches!(entry, QueueEntry::Detached(_)) {
            state.detached.add(key, 1);
        }
        state.entries.push_back((key, entry));
        shared.pending.fetch_add(1, Release);
        let (wake, wanted) = (state.sleeping.min(workers), shared.wanted_workers(&state));
        drop(state);
        for _ in 0..wake {
            shared.wake.notify_one();
        }
        if let Some(wanted) = wanted {
            self.ensure_threads(wanted);
        }
    }

    /// Ensures that `wanted` shadow workers or batch readers run; copy workers all run from the beginning.
    fn ensure_threads(&self, wanted: usize) {
        if self.fd_table_root.is_some() {
            self.start_threads(wanted);
        }
    }

    /// Starts one more thread, unless one is asleep that the entries in the queue do not need.
    fn ensure_free_thread(&self) {
        let wanted = {
            let state = lock(&self.shared.state);
            (state.entries.len() >= state.sleeping).then_some(state.running + 1)
        };
        if let Some(wanted) = wanted {
            self.ensure_threads(wanted);
        }
    }

    /// Ensures that `wanted` threads run; false if there is none at all.
    fn start_threads(&self, wanted: usize) -> bool {
        let mut state = lock(&self.shared.state);
        while state.running < wanted.min(self.max_threads) {
            state.running += 1;
            let shared = Arc::clone(&self.shared);
            drop(state);
            let started = match &self.fd_table_root {
                Some(root) if self.per_thread_table => root.spawn("spinio-batchrd", move || {
                    // Without one it shares the table with the other readers, which is slower, not wrong.
                    let _ = close_range_unshare(0);
                    shared.run_worker();
                }),
                Some(root) => root.spawn("spinio-shadow", move || shared.run_worker()),
                None => spawn_signals_blocked("spinio-copy", STACK_SIZE, move || shared.run_worker()).is_ok(),
            };
            state = lock(&self.shared.state);
            if !started {
                state.running -= 1;
                break;
            }
        }
        state.running > 0
    }
}

impl PoolShare<'_> {
    /// Lets up to `workers` threads work on a task. Does not wait.
    pub fn submit(&self, task: Arc<dyn Task>, workers: usize) {
        let workers = workers.min(self.pool.max_threads);
        if workers > 0 {
            if self.pool.shared.shared_workers.is_none() {
                self.pool.ensure_threads(workers);
            }
            self.pool.enqueue(self.key, QueueEntry::Task(task, workers), workers);
        }
    }

    /// Runs `f` on a worker, at some later time. It must not panic.
    pub fn spawn_detached(&self, f: impl FnOnce() + Send + 'static) {
        self.pool.ensure_free_thread();
        let caught = || {
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
            debug_assert!(result.is_ok(), "detached work must not panic");
        };
        self.pool.enqueue(self.key, QueueEntry::Detached(Box::new(caught)), 1);
    }

    /// Runs `f` on a worker and waits for its result.
    pub fn run_blocking<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        self.pool.ensure_free_thread();
        let answer = Arc::new((Mutex::new(None), Condvar::new()));
        let worker_answer = Arc::clone(&answer);
        let call = move || {
            let value = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
            *lock(&worker_answer.0) = Some(value.ok());
            worker_answer.1.notify_one();
        };
        self.pool.enqueue(self.key, QueueEntry::Run(Box::new(call)), 1);
        let mut slot = lock(&answer.0);
        loop {
            match slot.take() {
                Some(value) => return value,
                None => slot = answer.1.wait(slot).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Runs `f` on a worker at some later time; no thread waits. A panic in it is lost.
    pub fn spawn(&self, f: impl FnOnce() + Send + 'static) {
        self.pool.ensure_free_thread();
        let caught = || drop(std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)));
        self.pool.enqueue(self.key, QueueEntry::Run(Box::new(caught)), 1);
    }

    /// Closes descriptors in the table of the pool.
    pub fn close_queue(&self) -> CloseQueue {
        CloseQueue { closer: Arc::clone(&self.pool.shared) as _, key: self.key }
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        // The private table is freed with the last worker, and every descriptor with the table.
        lock(&self.shared.state).shutdown = true;
        self.shared.wake.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shadow_fd::ShadowFd;
    use crate::syscalls::LinuxSyscalls;
    use std::sync::atomic::{
        AtomicU64,
        Ordering::{AcqRel, Acquire},
    };

    struct Count {
        remaining: AtomicU64,
        done: AtomicU64,
    }

    impl Task for Count {
        fn execute(&self) {
            while self.remaining.fetch_update(AcqRel, Acquire, |n| n.checked_sub(1)).is_ok() {
                self.done.fetch_add(1, AcqRel);
            }
        }
    }

    #[test]
    fn more_copy_workers_start_only_with_the_same_fd_table() {
        let pool = WorkerPool::copy_workers(&LinuxSyscalls, 1, 3, Duration::ZERO, NoIdleTask).expect("workers");
        let running = || lock(&pool.shared.state).running;
        pool.run_blocking(|| ());
        if pool.shares_fd_table() != Some(true) {
            return eprintln!("skipped: descriptor tables cannot be compared here");
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                close_range_unshare(0).expect("Linux 5.11");
                pool.ensure_copy_workers(3);
            });
        });
        assert_eq!(running(), 1);
        pool.ensure_copy_workers(3);
        assert_eq!(running(), 3);
    }

    #[test]
    fn each_work_item_runs_once() {
        let pool = WorkerPool::shadow_workers(&LinuxSyscalls, 3, Duration::ZERO, NoIdleTask).expect("workers");
        let tasks: Vec<_> =
            (0..50).map(|_| Arc::new(Count { remaining: AtomicU64::new(100), done: AtomicU64::new(0) })).collect();
        for task in &tasks {
            pool.submit(task.clone(), 3);
        }
        let begun = Instant::now();
        while tasks.iter().any(|t| t.done.load(Acquire) < 100) {
            assert!(begun.elapsed() < Duration::from_secs(300), "workers never finished");
            std::thread::yield_now();
        }
        assert!(tasks.iter().all(|t| t.done.load(Acquire) == 100));
    }

    #[test]
    fn shadow_fd_is_hidden_and_closed_on_drop() {
        let pool = WorkerPool::shadow_workers(&LinuxSyscalls, 2, Duration::ZERO, NoIdleTask).expect("workers");
        let tid = spinio_sys::linux::gettid();
        let file = tempfile::tempfile().unwrap();
        let app_fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        let fd = pool.run_blocking(move || LinuxSyscalls.reopen(tid, app_fd, 0)).unwrap().expect("opened again");
        let here = spinio_sys::linux::fstat(fd);
        let there = pool.run_blocking(move || LinuxSyscalls.fstat(fd)).unwrap().unwrap();
        assert_eq!(there.ino, spinio_sys::linux::fstat(app_fd).unwrap().ino);
        assert!(
            here.is_err() || here.unwrap().ino != there.ino || fd == app_fd,
            "the shadow descriptor is in the program's table"
        );
        drop(ShadowFd::new(fd, pool.close_queue()));
        pool.wait_closed(None, Duration::from_secs(300));
        assert!(pool.run_blocking(move || LinuxSyscalls.fstat(fd)).unwrap().is_err());
    }

    #[test]
    fn panic_in_run_blocking_keeps_pool_alive() {
        let pool = WorkerPool::shadow_workers(&LinuxSyscalls, 1, Duration::ZERO, NoIdleTask).expect("workers");
        assert_eq!(pool.run_blocking(|| -> u32 { std::panic::resume_unwind(Box::new("planned")) }), None);
        assert_eq!(pool.run_blocking(|| 7), Some(7));
    }

    /// Holds workers until it is opened.
    #[derive(Default)]
    struct Barrier {
        waiting: AtomicU64,
        open: AtomicU64,
    }

    impl Task for Barrier {
        fn execute(&self) {
            self.waiting.fetch_add(1, AcqRel);
            while self.open.load(Acquire) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// The workers that are asleep when both are submitted may all be taken by the first.
    #[test]
    fn task_behind_one_that_hangs_gets_a_worker() {
        for _ in 0..100 {
            let pool = WorkerPool::shadow_workers(&LinuxSyscalls, 16, Duration::ZERO, NoIdleTask).expect("workers");
            let warm_up = Arc::new(Barrier::default());
            pool.for_key(1).submit(warm_up.clone(), 2);
            let begun = Instant::now();
            while warm_up.waiting.load(Acquire) < 2 {
                std::thread::yield_now();
            }
            warm_up.open.store(1, Release);
            while lock(&pool.shared.state).sleeping < 2 {
                std::thread::yield_now();
            }
            let hung = Arc::new(Barrier::default());
            let count = Arc::new(Count { remaining: AtomicU64::new(1), done: AtomicU64::new(0) });
            pool.for_key(7).submit(hung.clone(), 2);
            pool.for_key(8).submit(count.clone(), 2);
            while count.done.load(Acquire) < 1 {
                assert!(begun.elapsed() < Duration::from_secs(300), "no worker is left");
                std::thread::yield_now();
            }
            assert_eq!(pool.for_key(9).run_blocking(|| 7), Some(7));
            hung.open.store(1, Release);
        }
    }

    #[test]
    fn hung_key_leaves_workers_and_closes_to_other_keys() {
        const HUNG: ShareKey = 7;
        let pool = WorkerPool::shadow_workers(&LinuxSyscalls, 4, Duration::ZERO, NoIdleTask).expect("workers");
        let hung = Arc::new(Barrier::default());
        for _ in 0..3 {
            pool.for_key(HUNG).submit(hung.clone(), 4);
        }
        let begun = Instant::now();
        while hung.waiting.load(Acquire) < 2 {
            assert!(begun.elapsed() < Duration::from_secs(300), "the share is not used");
            std::thread::yield_now();
        }
        let after = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&after);
        pool.for_key(HUNG).spawn_detached(move || counter.store(1, Release));
        // Other keys are served: calls, tasks, closes.
        assert_eq!(pool.run_blocking(|| 7), Some(7));
        let count = Arc::new(Count { remaining: AtomicU64::new(100), done: AtomicU64::new(0) });
        pool.for_key(8).submit(count.clone(), 4);
        while count.done.load(Acquire) < 100 {
            assert!(begun.elapsed() < Duration::from_secs(300), "no worker is left");
            std::thread::yield_now();
        }
        let fd = pool.run_blocking(|| spinio_sys::linux::open(c"/dev/null", 0, 0)).unwrap().unwrap();
        drop(ShadowFd::new(fd, pool.for_key(8).close_queue()));
        pool.wait_closed(Some(8), Duration::from_secs(300));
        assert!(pool.run_blocking(move || LinuxSyscalls.fstat(fd)).unwrap().is_err());
        assert_eq!((hung.waiting.load(Acquire), after.load(Acquire)), (2, 0), "more than its share");
        hung.open.store(1, Release);
        while after.load(Acquire) == 0 || hung.waiting.load(Acquire) < 12 {
            assert!(begun.elapsed() < Duration::from_secs(300), "entries of the key stay in the queue");
            std::thread::yield_now();
        }
    }
}
