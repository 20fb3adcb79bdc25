//! Crews: helper threads that work on large requests.
//!
//! ```text
//!   caller ── post(job, 3) ──> queue ──> helper: job.help() until nothing is left
//!          ── call(f) ───────> queue ──> helper: f(), answer back
//!   any thread drops a twin ─> graveyard ──> keeper closes it, in the table it lives in
//! ```
//!
//! There are three kinds, because a thread sees one descriptor table:
//!
//! - **keepers** have a table of their own and hold SPIN's descriptors in it. They must not call a
//!   device: its driver finds its own descriptors by number, in the table of the caller (seen: CUDA
//!   fails to register memory there, or aborts).
//! - **mates** share the program's table, so they can call the driver, and read files through the
//!   program's descriptor while the program's thread waits in its call.
//! - **readers** have one each, so that they share no word with anybody when they read (batch/readers.rs). They open what
//!   they need for the time of a task; like keepers, they call no device.
//!
//! What a helper does between two tasks: `worker.rs`.
//!
//! Known flaw: helpers do not know NUMA; the kernel's scheduler places them.

mod worker;
mod workers;

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use spinio_sys::linux::{FdTableRoot, close_range_unshare, gettid, spawn_signals_blocked};

pub use self::worker::{IdleTask, NoIdleTask, Task};
use self::worker::{QueueEntry, Shared};
pub use self::workers::{SHADOW_WORKERS, Workers};
use crate::lock::lock;
use crate::shadow_fd::CloseQueue;
use crate::syscalls::Syscalls;

/// Helper threads of a runtime.
pub struct WorkerPool {
    shared: Arc<Shared>,
    /// Keepers and readers have it.
    fd_table_root: Option<FdTableRoot>,
    /// Each thread leaves the table that it was made with for one of its own.
    per_thread_table: bool,
    max_threads: usize,
}

/// Bytes of a mate's stack: it calls the driver.
pub const STACK_SIZE: usize = 1 << 20;

impl WorkerPool {
    /// Up to `size` keepers, started as work comes.
    /// `look`: how long an idle one looks for work before it sleeps.
    pub fn shadow_workers(
        sys: &'static dyn Syscalls,
        max_threads: usize,
        spin_time: Duration,
        idle_task: impl IdleTask + 'static,
    ) -> Option<WorkerPool> {
        let root = sys.new_shadow_table().ok()?;
        WorkerPool::new(sys, Some(root), false, max_threads, spin_time, idle_task)
    }

    /// `size` mates. A thread has the descriptor table of the one that makes it, so all are made now, and this must be
    /// called on a thread of the program.
    pub fn copy_workers(
        sys: &'static dyn Syscalls,
        max_threads: usize,
        spin_time: Duration,
        idle_task: impl IdleTask + 'static,
    ) -> Option<WorkerPool> {
        WorkerPool::new(sys, None, false, max_threads, spin_time, idle_task)
    }

    /// Up to `size` readers, started as work comes.
    pub fn batch_readers(sys: &'static dyn Syscalls, max_threads: usize, spin_time: Duration) -> Option<WorkerPool> {
        let root = sys.new_shadow_table().ok()?;
        WorkerPool::new(sys, Some(root), true, max_threads, spin_time, NoIdleTask)
    }

    fn new(
        sys: &'static dyn Syscalls,
        root: Option<FdTableRoot>,
        per_thread_table: bool,
        max_threads: usize,
        spin_time: Duration,
        idle_task: impl IdleTask + 'static,
    ) -> Option<WorkerPool> {
        let shared = Arc::new(Shared::new(sys, spin_time, idle_task));
        let pool = WorkerPool { shared, fd_table_root: root, per_thread_table, max_threads: max_threads.max(1) };
        let initial = if pool.fd_table_root.is_some() { 1 } else { pool.max_threads };
        pool.start_threads(initial).then_some(pool)
    }

    /// Lets up to `helpers` threads work on a task. Does not wait.
    pub fn submit(&self, task: Arc<dyn Task>, workers: usize) {
        let helpers = workers.min(self.max_threads);
        if helpers > 0 {
            self.ensure_threads(helpers);
            self.enqueue(QueueEntry::Task(task, helpers), helpers);
        }
    }

    /// Runs `f` on a helper, some time.
    pub fn spawn_detached(&self, f: impl FnOnce() + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        shared.detached.fetch_add(1, Relaxed);
        let guarded = move || {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
            shared.detached.fetch_sub(1, Release);
            debug_assert!(done.is_ok(), "what is sent must not panic");
        };
        self.enqueue(QueueEntry::Detached(Box::new(guarded)), 1);
    }

    /// Runs `f` on a helper and waits for its answer.
    pub fn run_blocking<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let busy = {
            let state = lock(&self.shared.state);
            (state.entries.len() >= state.sleeping).then_some(state.running)
        };
        if let Some(started) = busy {
            self.ensure_threads(started + 1);
        }
        let answer = Arc::new((Mutex::new(None), Condvar::new()));
        let worker_answer = Arc::clone(&answer);
        self.enqueue(
            QueueEntry::Run(Box::new(move || {
                let value = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
                *lock(&worker_answer.0) = Some(value.ok());
                worker_answer.1.notify_one();
            })),
            1,
        );
        let mut slot = lock(&answer.0);
        loop {
            match slot.take() {
                Some(value) => return value,
                None => slot = answer.1.wait(slot).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Runs `f` on a helper some time; nobody waits. A panic in it is lost.
    pub fn spawn(&self, f: impl FnOnce() + Send + 'static) {
        let started = lock(&self.shared.state).running;
        self.ensure_threads(started + 1);
        let caught = || drop(std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)));
        self.enqueue(QueueEntry::Run(Box::new(caught)), 1);
    }

    /// Runs something on a thread of its own that has the keepers' table; `false` if there is none.
    pub fn spawn_dedicated(&self, name: &str, body: impl FnOnce() + Send + 'static) -> bool {
        self.fd_table_root.as_ref().is_some_and(|root| root.spawn(name, body))
    }

    /// Whether descriptors mean to mates what they mean to this thread; `None`: nobody tells.
    pub fn shares_fd_table(&self) -> Option<bool> {
        match self.shared.member_tid.load(Relaxed) {
            0 => None,
            member => self.shared.sys.same_fd_table(member, gettid()).ok(),
        }
    }

    /// Lets a sleeping helper look again how long it may sleep.
    pub fn wake(&self) {
        let mut state = lock(&self.shared.state);
        state.wake_seq += 1;
        let has_sleeper = state.sleeping > 0;
        drop(state);
        if has_sleeper {
            self.shared.wake.notify_one();
        }
    }

    /// Waits until every buried descriptor is closed, but not for ever: a server may be slow, or this very thread.
    pub fn wait_closed(&self, timeout: Duration) {
        let begun = Instant::now();
        loop {
            let state = lock(&self.shared.state);
            // What was sent may hold the last twin.
            if state.pending_closes.is_empty() && state.closing == 0 && self.shared.detached.load(Acquire) == 0 {
                return;
            }
            drop(state);
            if begun.elapsed() > timeout {
                return;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// A way to have descriptors closed where they live.
    pub fn close_queue(&self) -> CloseQueue {
        CloseQueue(Arc::clone(&self.shared) as _)
    }

    fn enqueue(&self, entry: QueueEntry, workers: usize) {
        let shared = &self.shared;
        let mut state = lock(&shared.state);
        state.entries.push_back(entry);
        shared.pending.fetch_add(1, Release);
        let wake = state.sleeping.min(workers);
        drop(state);
        for _ in 0..wake {
            shared.wake.notify_one();
        }
    }

    /// Makes sure `wanted` keepers or readers run; mates are all there from the beginning.
    fn ensure_threads(&self, count: usize) {
        if self.fd_table_root.is_some() {
            self.start_threads(count);
        }
    }

    /// Makes sure `wanted` threads run; false if there is none at all.
    fn start_threads(&self, count: usize) -> bool {
        let mut state = lock(&self.shared.state);
        while state.running < count.min(self.max_threads) {
            state.running += 1;
            let shared = Arc::clone(&self.shared);
            drop(state);
            let started = match &self.fd_table_root {
                Some(root) if self.per_thread_table => root.spawn("spinio-batchrd", move || {
                    // Else it shares the table with the other readers: that is slower, not wrong.
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

impl Drop for WorkerPool {
    fn drop(&mut self) {
        // The private table goes with the last helper, and every descriptor with the table.
        lock(&self.shared.state).shutdown = true;
        self.shared.wake.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shadow_fd::ShadowFd;
    use crate::syscalls::LinuxSyscalls;
    use std::sync::atomic::{AtomicU64, Ordering::AcqRel};

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
    fn each_work_item_runs_once() {
        let pool = WorkerPool::shadow_workers(&LinuxSyscalls, 3, Duration::ZERO, NoIdleTask).expect("helpers");
        let tasks: Vec<_> =
            (0..50).map(|_| Arc::new(Count { remaining: AtomicU64::new(100), done: AtomicU64::new(0) })).collect();
        for task in &tasks {
            pool.submit(task.clone(), 3);
        }
        let begun = Instant::now();
        while tasks.iter().any(|t| t.done.load(Acquire) < 100) {
            assert!(begun.elapsed() < Duration::from_secs(60), "helpers never finished");
            std::thread::yield_now();
        }
        assert!(tasks.iter().all(|t| t.done.load(Acquire) == 100));
    }

    #[test]
    fn shadow_fd_is_hidden_and_closed_on_drop() {
        let pool = WorkerPool::shadow_workers(&LinuxSyscalls, 2, Duration::ZERO, NoIdleTask).expect("helpers");
        let tid = spinio_sys::linux::gettid();
        let file = tempfile::tempfile().unwrap();
        let app_fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        let fd = pool.run_blocking(move || LinuxSyscalls.reopen(tid, app_fd, 0)).unwrap().expect("opened again");
        let here = spinio_sys::linux::fstat(fd);
        let there = pool.run_blocking(move || LinuxSyscalls.fstat(fd)).unwrap().unwrap();
        assert_eq!(there.ino, spinio_sys::linux::fstat(app_fd).unwrap().ino);
        assert!(here.is_err() || here.unwrap().ino != there.ino || fd == app_fd, "the twin is in the program's table");
        drop(ShadowFd::new(fd, pool.close_queue()));
        pool.wait_closed(Duration::from_secs(60));
        assert!(pool.run_blocking(move || LinuxSyscalls.fstat(fd)).unwrap().is_err());
    }

    #[test]
    fn panic_in_run_blocking_keeps_pool_alive() {
        let pool = WorkerPool::shadow_workers(&LinuxSyscalls, 1, Duration::ZERO, NoIdleTask).expect("helpers");
        assert_eq!(pool.run_blocking(|| -> u32 { std::panic::resume_unwind(Box::new("planned")) }), None);
        assert_eq!(pool.run_blocking(|| 7), Some(7));
    }
}
