//! How it is known that nobody writes a held file.
//!
//! ```text
//!   lease      who opens it for writing, or truncates it, waits until the lease is given back
//!   sealed     a memory file that nobody can write or shrink any more: for ever
//!   immutable  the attribute, which root can take away                      asked at every use
//!   read-only  the file system itself, which can be mounted anew            asked at every use
//! ```
//!
//! The last two may be taken away, the file replaced, and be there again before anybody asks. So they count only with the
//! times and the length that the file had when it was held: no write leaves all of these as they were. And not on file
//! systems that others change behind this kernel's back.
//!
//! The kernel breaks a lease by force after `/proc/sys/fs/lease-break-time` seconds (45), for instance when the process
//! was stopped. So the word of a lease is good for a time: it was there at a moment, and from then on nobody writes for
//! as long as a break takes. As long as that has not run out nobody needs to be asked; then a keeper asks again.
//!
//! Known flaws:
//! - Whoever lowers the break time while a lease is being broken can make that time shorter than it was when we asked.
//! - Before Linux 6.13 the time of a change is known to some milliseconds: an attribute that was set, taken away and set
//!   again within these, with a write of the same length between, is not seen.
//! - `open` with O_RDONLY and O_TRUNC breaks no lease (Linux). Reads see the new length at once; a map shows old bytes, and is
//!   wanted back as soon as inotify has told (`watch.rs`), or never where the user may have no more inotify instances.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, fs_magic};

use spinio_files::{Files, lease_valid_until};
use spinio_host::shadow_fd::ShadowFd;
use spinio_host::syscalls::Syscalls;

/// Why a file cannot be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PinError {
    /// The descriptor is no good.
    BadFd(Errno),
    /// No regular file, or an empty one.
    NotRegularFile,
    /// Somebody has it open for writing.
    OpenForWriting,
    /// It belongs to somebody else.
    NotOwner,
    /// The file system has no leases that bind everybody.
    NoLeases,
    /// Its pages cannot be kept (overlayfs).
    NotMappable,
    /// It cannot be opened a second time: another procfs, a security policy, a server that has lost it.
    NotReopened,
    /// The kernel refused to map it.
    NotMapped(Errno),
    /// More than may be held.
    LimitExceeded,
    /// No helper threads.
    NoWorkers,
    /// The device cannot register the pages.
    PinRefused,
    /// No device is in use, or this one reads no host memory.
    NoDevice,
    /// It is not held, or not any more.
    NotPinned,
    /// The range is not in the file.
    OutOfRange,
}

impl PinError {
    /// The errno of a C call.
    pub fn errno(self) -> Errno {
        match self {
            PinError::BadFd(errno) => errno,
            PinError::NotMapped(_) => Errno::NOMEM,
            PinError::NotRegularFile | PinError::OutOfRange => Errno::INVAL,
            PinError::OpenForWriting => Errno::TXTBSY,
            PinError::NotOwner => Errno::ACCESS,
            PinError::NoLeases | PinError::NotMappable | PinError::NotReopened => Errno::OPNOTSUPP,
            PinError::LimitExceeded | PinError::PinRefused => Errno::NOMEM,
            PinError::NoWorkers => Errno::AGAIN,
            PinError::NoDevice => Errno::NODEV,
            PinError::NotPinned => Errno::STALE,
        }
    }
}

impl fmt::Display for PinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let PinError::BadFd(errno) = self {
            return write!(f, "Cannot hold the file: {errno}");
        }
        if let PinError::NotMapped(errno) = self {
            return write!(
                f,
                "Cannot hold the file: it cannot be mapped ({errno}); is RLIMIT_AS lower than its length?"
            );
        }
        f.write_str(match self {
            PinError::NotMapped(_) | PinError::BadFd(_) | PinError::NotRegularFile => {
                "Cannot hold it: not a regular file with bytes in it"
            }
            PinError::OpenForWriting => "Cannot hold the file: it is open for writing, perhaps by this very process",
            PinError::NotOwner => {
                "Cannot hold the file: it belongs to another user, and is neither sealed nor immutable nor on a \
                 read-only file system"
            }
            PinError::NoLeases => "Cannot hold the file: its file system has no leases that bind every writer",
            PinError::NotMappable => "Cannot hold the file: a mapping of it may show an older file (overlayfs)",
            PinError::NotReopened => {
                "Cannot hold the file: it cannot be opened a second time through /proc/thread-self/fd"
            }
            PinError::LimitExceeded => "Cannot hold the file: with it more would be held than SPINIO_PIN_LIMIT allows",
            PinError::NoWorkers => "Cannot hold the file: no helper threads",
            PinError::PinRefused => "Cannot hold the file: the device refused to register its pages",
            PinError::NoDevice => "Cannot hold the file: no device is in use that reads host memory",
            PinError::NotPinned => "The file is not held, or not any more: somebody opened it for writing",
            PinError::OutOfRange => "The range does not lie in the file",
        })
    }
}

impl std::error::Error for PinError {}

/// What vouches for a held file.
pub(super) enum WriteExclusion {
    /// A descriptor of the keepers' table that has the lease, and until when its word is good.
    Lease(Arc<ShadowFd>, AtomicU64),
    Sealed,
    Immutable(ChangeStamp),
    ReadOnly(ChangeStamp),
}

/// What a file looks like as long as nobody changes it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct ChangeStamp {
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

/// File systems whose leases do not bind those who write on other machines or behind the file system's back: FUSE, 9p,
/// SMB, AFS, eCryptfs.
const LEASES_NOT_BINDING: [u64; 6] =
    [fs_magic::FUSE, fs_magic::V9FS, fs_magic::CIFS, fs_magic::SMB2, fs_magic::AFS, fs_magic::ECRYPTFS];

/// More of them, which have no leases or good ones, but are read-only for this kernel alone: NFS, Ceph, GFS2, OCFS2,
/// Lustre, GPFS, OrangeFS, Coda, VirtualBox.
const READ_ONLY_NOT_BINDING: [u64; 9] = [
    fs_magic::NFS,
    fs_magic::CEPH,
    fs_magic::GFS2,
    fs_magic::OCFS2,
    fs_magic::LUSTRE,
    fs_magic::GPFS,
    fs_magic::ORANGEFS,
    fs_magic::CODA,
    fs_magic::VBOXSF,
];

/// Memory files (memfd, of ordinary and of huge pages): the kernel does not count the descriptor that makes one among its
/// writers, so a lease is given though that descriptor can write.
const WRITER_NOT_COUNTED: [u64; 2] = [fs_magic::TMPFS, fs_magic::HUGETLBFS];

impl WriteExclusion {
    /// Finds something that vouches for the file of `fd`, a descriptor of this thread. `watcher`: who is told of breaks.
    pub(super) fn establish(
        files: &Arc<Files>,
        fd: Fd,
        key: (u64, u64),
        watcher_tid: u32,
    ) -> Result<WriteExclusion, PinError> {
        let workers = files.shadow_workers().ok_or(PinError::NoWorkers)?;
        let (sys, close_queue, tid) = (files.sys(), workers.close_queue(), linux::gettid());
        let leased = workers.run_blocking(move || {
            let reopened = sys.reopen(tid, fd, linux::O_RDONLY as i32)?;
            let reopened = ShadowFd::new(reopened, close_queue);
            let stat = sys.fstat(reopened.get())?;
            if (stat.dev, stat.ino) != key {
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
        // Who had it open for writing before may go on writing.
        let may_change =
            refused == Errno::AGAIN || LEASES_NOT_BINDING.contains(&magic) || READ_ONLY_NOT_BINDING.contains(&magic);
        // Before the attribute is asked for: from here on a change is seen.
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

    /// Whether nobody can have written the file until now. `fd`: a descriptor of it, of this thread.
    pub(super) fn still_excluded(&self, files: &Arc<Files>, fd: Fd) -> bool {
        match self {
            WriteExclusion::Lease(lease, valid_until) => {
                if linux::boottime_ns() < valid_until.load(Relaxed) {
                    return true;
                }
                let (sys, lease) = (files.sys(), Arc::clone(lease));
                let renewed = files.shadow_workers().and_then(|workers| {
                    workers.run_blocking(move || {
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
