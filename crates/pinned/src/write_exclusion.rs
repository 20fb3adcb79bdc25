//! What ensures that no process writes a pinned file.
//!
//! ```text
//!   lease      a process that opens the file for writing, or truncates it, waits until the lease is released
//!   sealed     a memory file that no process can write or shrink any more: permanent
//!   immutable  the attribute, which root can clear                          checked at every use
//!   read-only  the file system, which can be remounted                   checked at every use
//! ```
//!
//! The last two may be cleared, the file replaced, and be set again before the next check. So they are valid only
//! together with the times and the length that the file had when it was pinned: every write changes at least one of
//! these. They are not used on file systems that other machines change without the knowledge of this Linux kernel.
//!
//! The Linux kernel breaks a lease by force after `/proc/sys/fs/lease-break-time` seconds (45), for instance when the
//! process was stopped. So a check of the lease is valid for a time: the lease was there at that moment, and from then
//! on no process writes for as long as a break takes. Until that has run out nothing is checked; then a shadow worker
//! checks again.
//!
//! Known flaws:
//! - If the break time is lowered while a lease is being broken, that time can be shorter than it was at the check.
//! - Before Linux 6.13 the time of a change is known to some milliseconds: an attribute that was set, cleared and set
//!   again within these, with a write of the same length between, is not detected.
//! - `open` with O_RDONLY and O_TRUNC breaks no lease (Linux). Reads see the new length at once; a mapping shows old
//!   bytes, and is revoked as soon as inotify has reported it (`unpinner.rs`), or never where the user may have no more
//!   inotify instances.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spinio_files::{Files, lease_valid_until};
use spinio_host::pool::WorkerPool;
use spinio_host::shadow_fd::ShadowFd;
use spinio_host::syscalls::Syscalls;
use spinio_sys::Errno;
use spinio_sys::linux::fs_magic::{LEASES_NOT_BINDING, READ_ONLY_NOT_BINDING, WRITER_NOT_COUNTED};
use spinio_sys::linux::{self, Fd, FileKey};

use crate::error::PinError;

/// What excludes writers of a pinned file.
pub(crate) enum WriteExclusion {
    /// The lease's descriptor, of the shadow table, and the time until which its last check is valid (boot time, ns).
    Lease(Arc<ShadowFd>, AtomicU64),
    Sealed,
    Immutable(ChangeStamp),
    ReadOnly(ChangeStamp),
}

/// Attributes of a file, of which every change of the file changes at least one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChangeStamp {
    changed: i128,
    modified: i128,
    size: u64,
}

impl ChangeStamp {
    fn of(sys: &dyn Syscalls, fd: Fd) -> Option<ChangeStamp> {
        let stat = sys.fstat(fd).ok()?;
        Some(ChangeStamp { changed: stat.ctime_ns, modified: stat.mtime_ns, size: stat.size })
    }

    fn is_unchanged(self, files: &Files, fd: Fd) -> bool {
        ChangeStamp::of(files.sys(), fd) == Some(self)
    }
}

impl WriteExclusion {
    /// Finds something that excludes writers of the file of `fd`, a descriptor of this thread. `watcher_tid`: the
    /// thread that lease breaks are signalled to.
    pub(crate) fn establish(
        files: &Arc<Files>,
        workers: &WorkerPool,
        fd: Fd,
        key: FileKey,
        watcher_tid: u32,
    ) -> Result<WriteExclusion, PinError> {
        let workers = workers.for_key(key.dev);
        let (sys, close_queue, tid) = (files.sys(), workers.close_queue(), linux::gettid());
        let leased = workers.run_blocking(move || {
            let reopened = sys.reopen(tid, fd, linux::O_RDONLY as i32)?;
            let reopened = ShadowFd::new(reopened, close_queue);
            let stat = sys.fstat(reopened.get())?;
            if stat.key() != key {
                // Another thread has closed the descriptor and opened another file as the same number.
                return Err(Errno::BADF);
            }
            let file_system = sys.file_system(reopened.get()).unwrap_or(0);
            if LEASES_NOT_BINDING.contains(&file_system) || (stat.unlinked && WRITER_NOT_COUNTED.contains(&file_system))
            {
                return Err(Errno::INVAL);
            }
            sys.take_lease(reopened.get(), watcher_tid)?;
            Ok((reopened, lease_valid_until(sys.lease_break_time())))
        });
        let refused = match leased.ok_or(PinError::NoWorkers)? {
            Ok((lease, valid_until)) => return Ok(WriteExclusion::Lease(Arc::new(lease), AtomicU64::new(valid_until))),
            Err(errno) => errno,
        };
        if linux::is_sealed(fd) {
            return Ok(WriteExclusion::Sealed);
        }
        let magic = sys.file_system(fd).unwrap_or(0);
        // A process that had it open for writing before may continue to write.
        let may_change =
            refused == Errno::AGAIN || LEASES_NOT_BINDING.contains(&magic) || READ_ONLY_NOT_BINDING.contains(&magic);
        // Before the attribute is read: from here on a change is detected.
        if let Some(stamp) = ChangeStamp::of(sys, fd).filter(|_| !may_change) {
            if linux::is_immutable(fd) {
                return Ok(WriteExclusion::Immutable(stamp));
            }
            if linux::is_superblock_read_only(fd) {
                return Ok(WriteExclusion::ReadOnly(stamp));
            }
        }
        Err(match refused {
            Errno::AGAIN => PinError::OpenForWriting,
            Errno::ACCESS | Errno::PERM => PinError::NotOwner,
            Errno::INVAL | Errno::OPNOTSUPP | Errno::NOLCK => PinError::NoLeases,
            other => PinError::BadFd(other),
        })
    }

    /// Whether no process can have written the file until now. `fd`: a descriptor of it, of this thread.
    pub(crate) fn still_excluded(&self, files: &Arc<Files>, fd: Fd) -> bool {
        match self {
            WriteExclusion::Lease(lease, valid_until) => {
                if linux::boottime_ns() < valid_until.load(Relaxed) {
                    return true;
                }
                let (sys, lease, key) = (files.sys(), Arc::clone(lease), lease.share_key());
                let renewed = files.shadow_workers().and_then(|workers| {
                    workers.for_key(key).run_blocking(move || {
                        let until = lease_valid_until(sys.lease_break_time());
                        sys.has_lease(lease.get()).then_some(until)
                    })
                });
                match renewed.flatten() {
                    Some(until) => {
                        valid_until.store(until, Relaxed);
                        true
                    }
                    None => false,
                }
            }
            WriteExclusion::Sealed => true,
            WriteExclusion::Immutable(stamp) => linux::is_immutable(fd) && stamp.is_unchanged(files, fd),
            WriteExclusion::ReadOnly(stamp) => linux::is_superblock_read_only(fd) && stamp.is_unchanged(files, fd),
        }
    }
}
