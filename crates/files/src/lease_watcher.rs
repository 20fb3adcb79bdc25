//! The thread that gives broken write leases back.
//!
//! It has the shadow table, where the leases are, and all signals blocked: it fetches the one that reports a break, so
//! no handler of the program runs. It exists while there are leases.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use spinio_host::lock;
use spinio_host::syscalls::Kernel;
use spinio_sys::linux::{self, Fd};

use crate::ctx::FilesCtx;

/// The last word of a lease that is never broken by force: asked again after an hour all the same.
const HOUR: u64 = 3600;

/// Until when a lease that is there now keeps writers away, in nanoseconds since boot: asked before it is looked at, and
/// with a fifth to spare.
pub fn word(break_time: Option<u64>) -> u64 {
    let seconds = break_time.unwrap_or(HOUR).min(HOUR);
    linux::since_boot() + seconds * 800_000_000
}

/// One lease; the lock is held while something relies on it.
pub struct Held {
    pub kernel: &'static dyn Kernel,
    pub fd: Fd,
    pub held: Mutex<bool>,
    /// Until when nobody can have taken it away, as it was last seen; nanoseconds since boot.
    pub good: AtomicU64,
}

impl Held {
    /// Whether the lease is there and nobody wants it broken.
    pub fn is_there(&self) -> bool {
        let good = word(self.kernel.lease_break_time());
        let there = self.kernel.has_write_lease(self.fd);
        if there {
            self.good.store(good, Relaxed);
        }
        there
    }

    /// Gives the lease back if somebody waits for that.
    pub fn yield_if_wanted(&self) {
        let mut held = lock(&self.held);
        if *held && !self.is_there() {
            *held = false;
            let _ = linux::drop_lease(self.fd);
        }
    }
}

/// The leases of a runtime.
#[derive(Default)]
pub struct Leases {
    state: Mutex<State>,
    started: Condvar,
    /// The watcher's thread, 0 for none.
    watcher: AtomicU32,
}

#[derive(Default)]
struct State {
    leases: Vec<Arc<Held>>,
    /// Leases that are being taken: the watcher stays for them.
    coming: usize,
    watched: bool,
}

/// How often the watcher looks whether it is wanted, in milliseconds; breaks wake it at once.
const LOOK: u64 = 1000;

impl Leases {
    /// The thread that breaks are told to. It stays until [`Leases::settle`].
    pub fn watcher(leases: &Arc<Leases>, ctx: &FilesCtx) -> Option<u32> {
        let mut state = lock(&leases.state);
        state.coming += 1;
        if !state.watched {
            state.watched = true;
            let theirs = Arc::clone(leases);
            let spawned = ctx.workers.shadow().is_some_and(|k| k.beside("spinio-lease", move || theirs.watch()));
            if !spawned {
                state.watched = false;
                state.coming -= 1;
                return None;
            }
        }
        while leases.watcher.load(SeqCst) == 0 {
            state = leases.started.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Some(leases.watcher.load(SeqCst))
    }

    pub fn settle(&self, lease: Option<&Arc<Held>>) {
        let mut state = lock(&self.state);
        state.coming -= 1;
        state.leases.extend(lease.map(Arc::clone));
        drop(state);
        // What was broken before the watcher knew of it.
        linux::nudge(self.watcher.load(SeqCst));
    }

    pub fn forget(&self, lease: &Arc<Held>) {
        lock(&self.state).leases.retain(|l| !Arc::ptr_eq(l, lease));
    }

    fn watch(&self) {
        let state = lock(&self.state);
        self.watcher.store(linux::gettid(), SeqCst);
        drop(state);
        self.started.notify_all();
        loop {
            linux::await_break(Some(LOOK));
            let mut state = lock(&self.state);
            if state.leases.is_empty() && state.coming == 0 {
                state.watched = false;
                self.watcher.store(0, SeqCst);
                return;
            }
            let leases = state.leases.clone();
            drop(state);
            leases.iter().for_each(|lease| lease.yield_if_wanted());
        }
    }
}
