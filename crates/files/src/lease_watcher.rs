//! The thread that releases broken write leases.
//!
//! It has the shadow table, where the leases are, and all signals blocked: it fetches the signal that reports a break,
//! so no handler of the program runs. It exists while there are leases.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use spinio_host::lock;
use spinio_host::syscalls::Syscalls;
use spinio_sys::linux::{self, Fd};

use crate::ctx::FilesCtx;

/// The longest validity of a lease that is never broken by force: it is verified again after an hour.
const MAX_LEASE_SECONDS: u64 = 3600;

/// Until when a lease that exists now excludes writers, in nanoseconds since boot: computed before the lease is
/// checked, with a margin of a fifth.
pub fn lease_valid_until(break_time: Option<u64>) -> u64 {
    let seconds = break_time.unwrap_or(MAX_LEASE_SECONDS).min(MAX_LEASE_SECONDS);
    linux::boottime_ns() + seconds * 800_000_000
}

/// One lease; `active` is locked while a request relies on the lease.
pub struct LeaseState {
    pub sys: &'static dyn Syscalls,
    pub fd: Fd,
    pub active: Mutex<bool>,
    /// Until when it cannot have been broken by force, as of the last check; nanoseconds since boot.
    pub valid_until: AtomicU64,
}

impl LeaseState {
    /// Whether the lease exists and no break is pending.
    pub fn is_intact(&self) -> bool {
        let valid_until = lease_valid_until(self.sys.lease_break_time());
        let intact = self.sys.has_write_lease(self.fd);
        if intact {
            self.valid_until.store(valid_until, Relaxed);
        }
        intact
    }

    /// Releases the lease if a break is pending.
    pub fn release_if_broken(&self) {
        let mut active = lock(&self.active);
        if *active && !self.is_intact() {
            *active = false;
            let _ = linux::release_lease(self.fd);
        }
    }
}

/// The leases of a runtime.
#[derive(Default)]
pub struct WriteLeases {
    state: Mutex<State>,
    started: Condvar,
    /// The watcher's thread, 0 for none.
    watcher_tid: AtomicU32,
}

#[derive(Default)]
struct State {
    leases: Vec<Arc<LeaseState>>,
    /// Leases that are being taken: the watcher must not end before.
    pending: usize,
    watcher_running: bool,
}

/// How often the watcher checks whether it is still needed, in milliseconds; breaks wake it at once.
const IDLE_CHECK_MS: u64 = 1000;

impl WriteLeases {
    /// The thread that breaks are reported to. It runs at least until [`WriteLeases::finish_pending`].
    pub fn ensure_watcher(leases: &Arc<WriteLeases>, ctx: &FilesCtx) -> Option<u32> {
        let mut state = lock(&leases.state);
        state.pending += 1;
        if !state.watcher_running {
            state.watcher_running = true;
            let shared = Arc::clone(leases);
            let spawned =
                ctx.workers.shadow().is_some_and(|k| k.spawn_dedicated("spinio-lease", move || shared.watch()));
            if !spawned {
                state.watcher_running = false;
                state.pending -= 1;
                return None;
            }
        }
        while leases.watcher_tid.load(SeqCst) == 0 {
            state = leases.started.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Some(leases.watcher_tid.load(SeqCst))
    }

    pub fn finish_pending(&self, lease: Option<&Arc<LeaseState>>) {
        let mut state = lock(&self.state);
        state.pending -= 1;
        state.leases.extend(lease.map(Arc::clone));
        drop(state);
        // For leases that were broken before the watcher knew of them.
        linux::wake_thread(self.watcher_tid.load(SeqCst));
    }

    pub fn forget(&self, lease: &Arc<LeaseState>) {
        lock(&self.state).leases.retain(|l| !Arc::ptr_eq(l, lease));
    }

    fn watch(&self) {
        let state = lock(&self.state);
        self.watcher_tid.store(linux::gettid(), SeqCst);
        drop(state);
        self.started.notify_all();
        loop {
            linux::wait_lease_break(Some(IDLE_CHECK_MS));
            let mut state = lock(&self.state);
            if state.leases.is_empty() && state.pending == 0 {
                state.watcher_running = false;
                self.watcher_tid.store(0, SeqCst);
                return;
            }
            let leases = state.leases.clone();
            drop(state);
            leases.iter().for_each(|lease| lease.release_if_broken());
        }
    }
}
