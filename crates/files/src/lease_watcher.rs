//! A thread that leases report their breaks to.
//!
//! It has the shadow table, where the leases are, and all signals blocked: it fetches the signal that reports a break,
//! so no handler of the program runs. It exists while there is a [`LeaseWatch`].
//!
//! Write leases and pinned files have a watcher each. That of write leases waits for writes that rely on a lease; a
//! process that opens a pinned file must not wait for those.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};

use spinio_host::lock;
use spinio_host::pool::WorkerPool;
use spinio_sys::linux;

/// The longest validity of a lease that is never broken by force: it is verified again after an hour.
const MAX_LEASE_SECONDS: u64 = 3600;

/// Milliseconds after which the watcher polls: a seccomp filter may refuse the signal that wakes it, and may be
/// installed at any time, also while the watcher waits.
const POLL_MS: u64 = 1000;

/// The same once the signal was refused.
const POLL_MS_NO_SIGNAL: u64 = 10;

/// Until when a lease that exists now excludes writers, in nanoseconds since boot: computed before the lease is
/// checked, with a margin of a fifth.
pub fn lease_valid_until(break_time: Option<u64>) -> u64 {
    let seconds = break_time.unwrap_or(MAX_LEASE_SECONDS).min(MAX_LEASE_SECONDS);
    linux::boottime_ns() + seconds * 800_000_000
}

/// Releases leases that were broken.
type Poll = dyn Fn() + Send + Sync;

/// The thread, if it runs.
#[derive(Default)]
pub struct LeaseWatcher {
    state: Mutex<State>,
    /// The signal that wakes the thread was refused.
    signal_refused: AtomicBool,
}

#[derive(Default)]
struct State {
    polls: Vec<Arc<Poll>>,
    /// The thread's id; 0 while there is none.
    tid: u32,
}

/// Keeps the thread. To be made before a lease is taken, and dropped after the lease is released.
pub struct LeaseWatch {
    watcher: Arc<LeaseWatcher>,
    poll: Arc<Poll>,
    /// The thread that breaks are to be signalled to.
    pub tid: u32,
}

impl LeaseWatcher {
    /// Calls `poll` on the thread after each break and each [`LeaseWatcher::wake`].
    pub fn watch(
        self: &Arc<Self>,
        workers: &WorkerPool,
        poll: impl Fn() + Send + Sync + 'static,
    ) -> Option<LeaseWatch> {
        let mut state = lock(&self.state);
        if state.tid == 0 {
            let (tid_sender, tid_receiver) = mpsc::channel();
            let watcher = Arc::clone(self);
            let spawned = workers.spawn_dedicated("spinio-lease", move || {
                // Whether it can be woken at all. The signal that this leaves pending causes one superfluous poll.
                watcher.signal_refused.store(!linux::wake_thread(linux::gettid()), Relaxed);
                let _ = tid_sender.send(linux::gettid());
                watcher.run();
            });
            state.tid = spawned.then(|| tid_receiver.recv().ok())??;
        }
        let (watcher, poll, tid) = (Arc::clone(self), Arc::new(poll), state.tid);
        state.polls.push(Arc::clone(&poll) as _);
        Some(LeaseWatch { watcher, poll, tid })
    }

    fn run(&self) {
        loop {
            let mut state = lock(&self.state);
            if state.polls.is_empty() {
                state.tid = 0;
                return;
            }
            let polls = state.polls.clone();
            drop(state);
            polls.iter().for_each(|poll| poll());
            drop(polls);
            linux::wait_lease_break(match self.signal_refused.load(Relaxed) {
                true => Some(POLL_MS_NO_SIGNAL),
                false => Some(POLL_MS),
            });
        }
    }

    /// Makes the thread poll now, or soon.
    pub fn wake(&self) {
        // Under the lock, so that the thread exists.
        let state = lock(&self.state);
        if state.tid != 0 && !linux::wake_thread(state.tid) {
            self.signal_refused.store(true, Relaxed);
        }
    }
}

impl Drop for LeaseWatch {
    fn drop(&mut self) {
        lock(&self.watcher.state).polls.retain(|poll| !Arc::ptr_eq(poll, &self.poll));
    }
}
