//! Modification times: the kernel owns them.
//!
//! With the write-back cache the kernel decides when a file was modified, and tells the server (SETATTR) only if the
//! time is another than it was. A file that is created and written within one tick of the clock is not: so a WRITE that
//! gave the file below a time of its own would make the file look modified once the kernel has forgotten it. Therefore
//! what the server writes to a file leaves the time as it was.
//!
//! ```text
//!   WRITE, FALLOCATE, released pages: lock ── time? ── write ── set that time ── unlock
//!   SETATTR(times):                   lock ── set the kernel's time ── unlock
//! ```
//!
//! Known flaws: the change time (ctime) cannot be set, so it is that of the last WRITE once the kernel has forgotten the
//! file. A server that is killed between both calls leaves the time of the WRITE.

use std::array;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{Timespec, Timestamps, UTIME_OMIT};
use rustix::io::Errno;

/// Writes of two files wait for each other if they share a lock.
const LOCKS: usize = 1024;

/// The locks.
#[derive(Debug)]
pub(crate) struct Times([Mutex<()>; LOCKS]);

impl Default for Times {
    fn default() -> Times {
        Times(array::from_fn(|_| Mutex::default()))
    }
}

impl Times {
    /// While this is held, no other thread changes a time of the node. The lock of its pages may be taken meanwhile.
    pub(crate) fn lock(&self, node: u64) -> MutexGuard<'_, ()> {
        self.0[node as usize % LOCKS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a call that writes to the file, and sets its modification time back.
    pub(crate) fn keep<T>(
        &self,
        node: u64,
        file: BorrowedFd<'_>,
        call: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let _lock = self.lock(node);
        let before = rustix::fs::fstat(file)?;
        let result = call();
        let omit = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        let modified = Timespec { tv_sec: before.st_mtime as _, tv_nsec: before.st_mtime_nsec as _ };
        // A file whose time cannot be set is written all the same.
        let _ = rustix::fs::futimens(file, &Timestamps { last_access: omit, last_modification: modified });
        result
    }
}
