//! Write leases: to be alone with a file, and to know it.
//!
//! ```text
//!   while_held ── still leased? ── write ──> done          nobody else has it open, nor can open it meanwhile
//!                                    │ somebody opens the file: waits in open()
//!   watcher <── SIGIO ───────────────┘
//!      └─ waits for the write to be over, gives the lease back: open() returns; from then on while_held says no
//! ```
//!
//! The kernel grants such a lease only to the sole opening of a file, to its owner or root, on file systems that know
//! leases. Where a lease is not given back in time, it takes it away by force, and nobody is told. So who works for long
//! within `while_held` asks again before each step ([`WriteLease::check`]). The watcher is a thread of the keepers' table that has all signals blocked: it fetches the one that tells of
//! a break, so no handler of the program runs. It exists while there are leases.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::{OwnFile, Result};
use crate::core::Core;
use crate::hold::word;
use spinio_host::syscalls::Kernel;
use spinio_host::lock;

/// One lease; the lock is held while something relies on it.
struct Held {
    kernel: &'static dyn Kernel,
    fd: Fd,
    held: Mutex<bool>,
    /// Until when nobody can have taken it away, as it was last seen; nanoseconds since boot.
    good: AtomicU64,
}

impl Held {
    /// Whether the lease is there and nobody wants it broken.
    fn is_there(&self) -> bool {
        let good = word(self.kernel.lease_break_time());
        let there = self.kernel.has_write_lease(self.fd);
        if there {
            self.good.store(good, Relaxed);
        }
        there
    }

    /// Gives the lease back if somebody waits for that.
    fn yield_if_wanted(&self) {
        let mut held = lock(&self.held);
        if *held && !self.is_there() {
            *held = false;
            let _ = linux::drop_lease(self.fd);
        }
    }
}

/// The leases of a runtime.
#[derive(Default)]
pub(crate) struct Leases {
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
    fn watcher(core: &Arc<Core>) -> Option<u32> {
        let leases = &core.leases;
        let mut state = lock(&leases.state);
        state.coming += 1;
        if !state.watched {
            state.watched = true;
            let theirs = Arc::clone(leases);
            let spawned = core.keepers().is_some_and(|k| k.beside("spinio-lease", move || theirs.watch()));
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

    fn settle(&self, lease: Option<&Arc<Held>>) {
        let mut state = lock(&self.state);
        state.coming -= 1;
        state.leases.extend(lease.map(Arc::clone));
        drop(state);
        // What was broken before the watcher knew of it.
        linux::nudge(self.watcher.load(SeqCst));
    }

    fn forget(&self, lease: &Arc<Held>) {
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

/// Being alone with a file. Given back when it goes.
pub struct WriteLease {
    file: Arc<OwnFile>,
    held: Arc<Held>,
}

impl WriteLease {
    /// Runs something while nobody else has the file open or can open it; `None`: that is over, somebody has.
    pub fn while_held<T>(&self, f: impl FnOnce() -> T) -> Option<T> {
        let held = lock(&self.held.held);
        let asked = Arc::clone(&self.held);
        let alone = *held && self.file.call(move |_| Ok(asked.is_there())) == Ok(true);
        let done = alone.then(f);
        drop(held);
        if !alone {
            self.held_by_nobody();
        }
        done
    }

    /// Within [`WriteLease::while_held`], for a keeper: whether the lease is still there, and nobody wants it.
    pub fn check(&self) -> impl Fn() -> bool + Send + Sync + use<> {
        let held = Arc::clone(&self.held);
        move || held.is_there()
    }

    /// Within [`WriteLease::while_held`]: whether nobody can have got at the file until now, although somebody may want
    /// to. The lease was seen so lately that it cannot have been taken away.
    pub fn is_fresh(&self) -> bool {
        linux::since_boot() < self.held.good.load(Relaxed)
    }

    /// The watcher may be about to find out the same.
    fn held_by_nobody(&self) {
        let held = Arc::clone(&self.held);
        let _ = self.file.call(move |_| {
            held.yield_if_wanted();
            Ok(())
        });
    }
}

impl Drop for WriteLease {
    fn drop(&mut self) {
        self.file.core.leases.forget(&self.held);
        let held = Arc::clone(&self.held);
        let _ = self.file.call(move |fd| {
            let mut held = lock(&held.held);
            if std::mem::replace(&mut *held, false) {
                linux::drop_lease(fd)?;
            }
            Ok(())
        });
    }
}

impl OwnFile {
    /// Takes a write lease. EAGAIN: somebody else has the file open. EACCES, EINVAL: no lease for this user, or there.
    pub fn lease(self: &Arc<Self>) -> Result<WriteLease> {
        let core = &self.core;
        // Twins that a read of the file left behind are openings too.
        self.forget();
        let watcher = Leases::watcher(core).ok_or(Errno::NOSYS)?;
        let (fd, held) = (self.twin.get(), Mutex::new(true));
        let held = Arc::new(Held { kernel: core.kernel, fd, held, good: AtomicU64::new(0) });
        let taken = self.call(move |fd| linux::take_write_lease(fd, watcher));
        core.leases.settle(taken.is_ok().then_some(&held));
        taken.map(|()| WriteLease { file: Arc::clone(self), held })
    }
}
