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

use crate::lease_watcher::{Held, Leases};
use crate::shadow_file::OwnFile;

type Result<T> = core::result::Result<T, Errno>;

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
        self.file.files().leases.forget(&self.held);
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
        let files = self.files();
        // Twins that a read of the file left behind are openings too.
        self.forget();
        let watcher = Leases::watcher(&files.leases, &files.ctx).ok_or(Errno::NOSYS)?;
        let (fd, held) = (self.shadow_fd(), Mutex::new(true));
        let held = Arc::new(Held { kernel: files.ctx.sys, fd, held, good: AtomicU64::new(0) });
        let taken = self.call(move |fd| linux::take_write_lease(fd, watcher));
        files.leases.settle(taken.is_ok().then_some(&held));
        taken.map(|()| WriteLease { file: Arc::clone(self), held })
    }
}
