//! Write leases: exclusive access to a file, and how to verify it.
//!
//! ```text
//!   with_lease ── still leased? ── write ──> done          no other process has it open or can open it meanwhile
//!                                    │ another process opens the file: it waits in open()
//!   watcher <── SIGIO ───────────────┘
//!      └─ waits until the write is over, releases the lease: open() returns; from then on with_lease returns None
//! ```
//!
//! Linux grants such a lease only on the sole open file description of a file, to its owner or root, on file systems
//! that support leases. If a lease is not released in time, Linux breaks it by force and reports nothing. So work that
//! takes long within `with_lease` checks again before each step ([`WriteLease::check`]).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use spinio_host::lock;
use spinio_host::syscalls::Syscalls;

use crate::lease_watcher::{LeaseWatch, lease_valid_until};
use crate::shadow_file::ShadowFile;

type Result<T> = core::result::Result<T, Errno>;

struct LeaseState {
    sys: &'static dyn Syscalls,
    fd: Fd,
    /// The lease was taken and not released. Locked while a request relies on it.
    active: Mutex<bool>,
    /// Until when it cannot have been broken by force, as of the last check; nanoseconds since boot.
    valid_until: AtomicU64,
}

impl LeaseState {
    /// Whether the lease exists and no break is pending.
    fn is_intact(&self) -> bool {
        let valid_until = lease_valid_until(self.sys.lease_break_time());
        let intact = self.sys.has_write_lease(self.fd);
        if intact {
            self.valid_until.store(valid_until, Relaxed);
        }
        intact
    }

    /// Releases the lease if a break is pending.
    fn release_if_broken(&self) {
        let mut active = lock(&self.active);
        if *active && !self.is_intact() {
            *active = false;
            let _ = linux::release_lease(self.fd);
        }
    }
}

/// Exclusive access to a file. Released when dropped.
pub struct WriteLease {
    file: Arc<ShadowFile>,
    state: Arc<LeaseState>,
    _watch: LeaseWatch,
}

impl WriteLease {
    /// Runs `f` while no other process has the file open or can open it; `None`: the lease was broken.
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

    /// Within [`WriteLease::with_lease`], on a shadow worker: whether the lease is intact and no break is pending.
    pub fn check(&self) -> impl Fn() -> bool + Send + Sync + use<> {
        let state = Arc::clone(&self.state);
        move || state.is_intact()
    }

    /// Within [`WriteLease::with_lease`]: whether no other process can have opened the file until now, even if a break
    /// is pending. The lease was verified so recently that it cannot have been broken by force.
    pub fn is_recent(&self) -> bool {
        linux::boottime_ns() < self.state.valid_until.load(Relaxed)
    }

    /// The watcher may do the same concurrently.
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
    /// Takes a write lease. EAGAIN: the file is open elsewhere. EACCES, EINVAL: no lease for this user, or on this
    /// file system.
    pub fn take_write_lease(self: &Arc<Self>) -> Result<WriteLease> {
        let files = self.files();
        // Shadow descriptors that an earlier read opened count as open too.
        self.evict_state();
        let (fd, active) = (self.shadow_fd(), Mutex::new(false));
        let state = Arc::new(LeaseState { sys: files.ctx.sys, fd, active, valid_until: AtomicU64::new(0) });
        let watched = Arc::clone(&state);
        let poll = move || watched.release_if_broken();
        let workers = files.ctx.workers.shadow().ok_or(Errno::NOSYS)?;
        let watch = files.lease_watcher.watch(workers, poll).ok_or(Errno::NOSYS)?;
        let tid = watch.tid;
        self.run_blocking(move |fd| linux::take_write_lease(fd, tid))?;
        *lock(&state.active) = true;
        // It may have been broken already.
        files.lease_watcher.wake();
        Ok(WriteLease { file: Arc::clone(self), state, _watch: watch })
    }
}
