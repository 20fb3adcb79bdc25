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

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use spinio_sys::Errno;
use spinio_sys::linux;

use spinio_host::lock;

use crate::lease_watcher::{LeaseState, WriteLeases};
use crate::shadow_file::ShadowFile;

type Result<T> = core::result::Result<T, Errno>;

/// Being alone with a file. Given back when it goes.
pub struct WriteLease {
    file: Arc<ShadowFile>,
    state: Arc<LeaseState>,
}

impl WriteLease {
    /// Runs something while nobody else has the file open or can open it; `None`: that is over, somebody has.
    pub fn with_lease<T>(&self, f: impl FnOnce() -> T) -> Option<T> {
        let active = lock(&self.state.active);
        let state = Arc::clone(&self.state);
        let intact = *active && self.file.run_blocking(move |_| Ok(state.is_intact())) == Ok(true);
        let result = intact.then(f);
        drop(active);
        if !intact {
            self.release_lost();
        }
        result
    }

    /// Within [`WriteLease::while_held`], for a keeper: whether the lease is still there, and nobody wants it.
    pub fn check(&self) -> impl Fn() -> bool + Send + Sync + use<> {
        let state = Arc::clone(&self.state);
        move || state.is_intact()
    }

    /// Within [`WriteLease::while_held`]: whether nobody can have got at the file until now, although somebody may want
    /// to. The lease was seen so lately that it cannot have been taken away.
    pub fn is_recent(&self) -> bool {
        linux::boottime_ns() < self.state.valid_until.load(Relaxed)
    }

    /// The watcher may be about to find out the same.
    fn release_lost(&self) {
        let state = Arc::clone(&self.state);
        let _ = self.file.run_blocking(move |_| {
            state.release_if_broken();
            Ok(())
        });
    }
}

impl Drop for WriteLease {
    fn drop(&mut self) {
        self.file.files().leases.forget(&self.state);
        let state = Arc::clone(&self.state);
        let _ = self.file.run_blocking(move |fd| {
            let mut active = lock(&state.active);
            if std::mem::replace(&mut *active, false) {
                linux::release_lease(fd)?;
            }
            Ok(())
        });
    }
}

impl ShadowFile {
    /// Takes a write lease. EAGAIN: somebody else has the file open. EACCES, EINVAL: no lease for this user, or there.
    pub fn take_write_lease(self: &Arc<Self>) -> Result<WriteLease> {
        let files = self.files();
        // Twins that a read of the file left behind are openings too.
        self.evict_state();
        let watcher_tid = WriteLeases::ensure_watcher(&files.leases, &files.ctx).ok_or(Errno::NOSYS)?;
        let (fd, active) = (self.shadow_fd(), Mutex::new(true));
        let state = Arc::new(LeaseState { kernel: files.ctx.sys, fd, active, valid_until: AtomicU64::new(0) });
        let taken = self.run_blocking(move |fd| linux::take_write_lease(fd, watcher_tid));
        files.leases.finish_pending(taken.is_ok().then_some(&state));
        taken.map(|()| WriteLease { file: Arc::clone(self), state })
    }
}
