//! What a helper does, from its start until the crew is dismissed.
//!
//! ```text
//!   look at the queue for some microseconds, if somebody waited for what was done last
//!        │
//!        ▼
//!   close what is buried ── take an entry ──> do it, and look again
//!        │ there is none
//!        ▼
//!   sleep until there is, or until it is time to tidy up
//! ```
//!
//! A helper that ran out of work looks at the queue for a few microseconds, because the
//! next request of a stream of reads comes soon and waking a sleeper costs more than
//! the read of 64 KiB; then it sleeps. On machines with few processors it sleeps at once.
//! What is sent has nobody waiting for it, so the next of its kind is not looked for: a stream
//! through the page cache sends something every few hundred microseconds, and would keep one
//! processor busy with nothing but looking.

use std::collections::VecDeque;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use spinio_sys::linux::gettid;

use crate::lock::lock;
use crate::shadow_fd::{Closer, PendingClose};
use crate::syscalls::Syscalls;

/// Something that several helpers can work on at once.
pub trait Task: Send + Sync {
    /// Works until there is nothing left to take.
    fn execute(&self);
}

/// How many times as long as the others one helper looks for work.
const LONG_SPIN_FACTOR: u32 = 8;

type BoxedFn = Box<dyn FnOnce() + Send>;

/// What waits in the queue.
pub(super) enum QueueEntry {
    /// For as many helpers.
    Task(Arc<dyn Task>, usize),
    /// Once; more may follow soon.
    Run(BoxedFn),
    /// Once; nobody waits for it.
    Detached(BoxedFn),
}

#[derive(Default)]
pub(super) struct State {
    pub(super) entries: VecDeque<QueueEntry>,
    pub(super) pending_closes: Vec<PendingClose>,
    /// Descriptors being closed outside the lock.
    pub(super) closing: usize,
    pub(super) wake_seq: u64,
    pub(super) sleeping: usize,
    pub(super) running: usize,
    pub(super) shutdown: bool,
}

/// What the helpers share with who gives them work.
pub(super) struct Shared {
    pub(super) sys: &'static dyn Syscalls,
    pub(super) state: Mutex<State>,
    pub(super) wake: Condvar,
    /// Entries and graves that wait; read without the lock by helpers that still look.
    pub(super) pending: AtomicUsize,
    /// What was sent and is not over.
    pub(super) detached: AtomicUsize,
    spin_time: Duration,
    long_spinner: AtomicBool,
    /// Number of a thread of it; 0 before the first one runs.
    pub(super) member_tid: AtomicU32,
    idle_task: Box<dyn IdleTask>,
}

/// What idle helpers look after.
pub trait IdleTask: Send + Sync {
    /// How long a helper may sleep before it looks again; for ever if there is nothing to look after.
    fn sleep_timeout(&self) -> Option<Duration>;
    /// Lets go of what is no longer needed.
    fn reap_idle(&self);
}

/// What the readers of batches do while there is no batch: nothing.
pub struct NoIdleTask;

impl IdleTask for NoIdleTask {
    fn sleep_timeout(&self) -> Option<Duration> {
        None
    }

    fn reap_idle(&self) {}
}

impl Closer for Shared {
    fn defer_close(&self, grave: PendingClose) {
        let mut state = lock(&self.state);
        state.pending_closes.push(grave);
        self.pending.fetch_add(1, Release);
        drop(state);
        self.wake.notify_one();
    }
}

impl Shared {
    pub(super) fn new(sys: &'static dyn Syscalls, spin_time: Duration, idle_task: impl IdleTask + 'static) -> Shared {
        Shared {
            sys,
            state: Mutex::default(),
            wake: Condvar::new(),
            pending: AtomicUsize::new(0),
            detached: AtomicUsize::new(0),
            spin_time,
            long_spinner: AtomicBool::new(false),
            member_tid: AtomicU32::new(0),
            idle_task: Box::new(idle_task),
        }
    }

    /// All that a helper does, until the crew is dismissed.
    pub(super) fn run_worker(&self) {
        let _ = self.member_tid.compare_exchange(0, gettid(), Relaxed, Relaxed);
        let mut last_waited_work = None;
        while let Some(entry) = self.next_entry(last_waited_work) {
            match entry {
                QueueEntry::Task(task, _) => {
                    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| task.execute()));
                    debug_assert!(result.is_ok(), "a task must not panic");
                }
                QueueEntry::Run(call) => call(),
                QueueEntry::Detached(call) => {
                    call();
                    continue;
                }
            }
            last_waited_work = Some(Instant::now());
        }
    }

    /// Waits for something to do; `None` when the crew is dismissed. `waited_for`: when this helper last did something
    /// that somebody waited for.
    fn next_entry(&self, last_waited_work: Option<Instant>) -> Option<QueueEntry> {
        let (mut spin_time, mut long_spin) = (self.spin_time, false);
        while let Some(begun) = last_waited_work
            && self.pending.load(Acquire) == 0
        {
            if begun.elapsed() >= spin_time {
                // One of them looks longer: where requests follow each other, the next finds somebody awake.
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
            let closes = std::mem::take(&mut state.pending_closes);
            if !closes.is_empty() {
                // Closing can wait for a server; nobody else shall wait for that.
                state.closing += closes.len();
                drop(state);
                let count = closes.len();
                for PendingClose { fd, pre_close: hook } in closes {
                    if let Some(hook) = hook {
                        hook(fd);
                    }
                    self.sys.close(fd);
                }
                self.pending.fetch_sub(count, Relaxed);
                state = lock(&self.state);
                state.closing -= count;
            }
            if let Some(QueueEntry::Task(task, more)) = state.entries.front_mut()
                && *more > 1
            {
                *more -= 1;
                return Some(QueueEntry::Task(Arc::clone(task), 1));
            }
            if let Some(entry) = state.entries.pop_front() {
                self.pending.fetch_sub(1, Relaxed);
                return Some(entry);
            }
            if state.shutdown {
                return None;
            }
            // Asked without the lock: what it looks at may end with this look, and end here.
            let wake_seq = state.wake_seq;
            drop(state);
            let timeout = self.idle_task.sleep_timeout();
            state = lock(&self.state);
            let has_work = !state.entries.is_empty() || !state.pending_closes.is_empty() || state.shutdown;
            if has_work || state.wake_seq != wake_seq {
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
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::AcqRel};

    use super::*;
    use crate::pool::WorkerPool;
    use crate::syscalls::LinuxSyscalls;

    #[test]
    fn detached_task_leaves_worker_asleep() {
        // Who looks, looks for longer than this test may take.
        let pool =
            WorkerPool::shadow_workers(&LinuxSyscalls, 1, Duration::from_secs(600), NoIdleTask).expect("helpers");
        let done = Arc::new(AtomicU64::new(0));
        let begun = Instant::now();
        for turn in 1..=3 {
            let counter = Arc::clone(&done);
            pool.spawn_detached(move || {
                counter.fetch_add(1, AcqRel);
            });
            while done.load(Acquire) < turn || lock(&pool.shared.state).sleeping == 0 {
                assert!(begun.elapsed() < Duration::from_secs(60), "it looks for more");
                std::thread::yield_now();
            }
        }
    }
}
