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

use spinio_files::{FileTable, lease_valid_until as word};
use spinio_host::shadow_fd::PrivateFd;
use spinio_host::syscalls::Kernel;

/// Why a file cannot be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotHeld {
    /// The descriptor is no good.
    Descriptor(Errno),
    /// No regular file, or an empty one.
    NotAFile,
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
    TooLarge,
    /// No helper threads.
    NoHelpers,
    /// The device cannot register the pages.
    PinRefused,
    /// No device is in use, or this one reads no host memory.
    NoDevice,
    /// It is not held, or not any more.
    Gone,
    /// The range is not in the file.
    Range,
}

impl NotHeld {
    /// The errno of a C call.
    pub fn errno(self) -> Errno {
        match self {
            NotHeld::Descriptor(errno) => errno,
            NotHeld::NotMapped(_) => Errno::NOMEM,
            NotHeld::NotAFile | NotHeld::Range => Errno::INVAL,
            NotHeld::OpenForWriting => Errno::TXTBSY,
            NotHeld::NotOwner => Errno::ACCESS,
            NotHeld::NoLeases | NotHeld::NotMappable | NotHeld::NotReopened => Errno::OPNOTSUPP,
            NotHeld::TooLarge | NotHeld::PinRefused => Errno::NOMEM,
            NotHeld::NoHelpers => Errno::AGAIN,
            NotHeld::NoDevice => Errno::NODEV,
            NotHeld::Gone => Errno::STALE,
        }
    }
}

impl fmt::Display for NotHeld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let NotHeld::Descriptor(errno) = self {
            return write!(f, "Cannot hold the file: {errno}");
        }
        if let NotHeld::NotMapped(errno) = self {
            return write!(
                f,
                "Cannot hold the file: it cannot be mapped ({errno}); is RLIMIT_AS lower than its length?"
            );
        }
        f.write_str(match self {
            NotHeld::NotMapped(_) | NotHeld::Descriptor(_) | NotHeld::NotAFile => {
                "Cannot hold it: not a regular file with bytes in it"
            }
            NotHeld::OpenForWriting => "Cannot hold the file: it is open for writing, perhaps by this very process",
            NotHeld::NotOwner => {
                "Cannot hold the file: it belongs to another user, and is neither sealed nor immutable nor on a \
                 read-only file system"
            }
            NotHeld::NoLeases => "Cannot hold the file: its file system has no leases that bind every writer",
            NotHeld::NotMappable => "Cannot hold the file: a mapping of it may show an older file (overlayfs)",
            NotHeld::NotReopened => {
                "Cannot hold the file: it cannot be opened a second time through /proc/thread-self/fd"
            }
            NotHeld::TooLarge => "Cannot hold the file: with it more would be held than SPINIO_HOLD allows",
            NotHeld::NoHelpers => "Cannot hold the file: no helper threads",
            NotHeld::PinRefused => "Cannot hold the file: the device refused to register its pages",
            NotHeld::NoDevice => "Cannot hold the file: no device is in use that reads host memory",
            NotHeld::Gone => "The file is not held, or not any more: somebody opened it for writing",
            NotHeld::Range => "The range does not lie in the file",
        })
    }
}

impl std::error::Error for NotHeld {}

/// What vouches for a held file.
pub(super) enum Safety {
    /// A descriptor of the keepers' table that has the lease, and until when its word is good.
    Lease(Arc<PrivateFd>, AtomicU64),
    Sealed,
    Immutable(Stamp),
    ReadOnly(Stamp),
}

/// What a file looks like as long as nobody changes it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    changed: i128,
    modified: i128,
    size: u64,
}

impl Stamp {
    fn of(kernel: &dyn Kernel, fd: Fd) -> Option<Stamp> {
        let stat = kernel.fstat(fd).ok()?;
        Some(Stamp { changed: stat.ctime_ns, modified: stat.mtime_ns, size: stat.size })
    }

    fn is_still(self, files: &FileTable, fd: Fd) -> bool {
        Stamp::of(files.sys(), fd) == Some(self)
    }
}

/// File systems whose leases do not bind those who write on other machines or behind the file system's back: FUSE, 9p,
/// SMB, AFS, eCryptfs.
const UNBOUND: [u64; 6] =
    [fs_magic::FUSE, fs_magic::V9FS, fs_magic::CIFS, fs_magic::SMB2, fs_magic::AFS, fs_magic::ECRYPTFS];

/// More of them, which have no leases or good ones, but are read-only for this kernel alone: NFS, Ceph, GFS2, OCFS2,
/// Lustre, GPFS, OrangeFS, Coda, VirtualBox.
const SHARED: [u64; 9] = [
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
const UNCOUNTED: [u64; 2] = [fs_magic::TMPFS, fs_magic::HUGETLBFS];

impl Safety {
    /// Finds something that vouches for the file of `fd`, a descriptor of this thread. `watcher`: who is told of breaks.
    pub(super) fn find(files: &Arc<FileTable>, fd: Fd, key: (u64, u64), watcher: u32) -> Result<Safety, NotHeld> {
        let crew = files.shadow_workers().ok_or(NotHeld::NoHelpers)?;
        let (kernel, graves, tid) = (files.sys(), crew.graveyard(), linux::gettid());
        let leased = crew.call(move || {
            let again = kernel.open_again(tid, fd, linux::O_RDONLY as i32)?;
            let again = PrivateFd::new(again, graves);
            let stat = kernel.fstat(again.get())?;
            if (stat.dev, stat.ino) != key {
                // Another thread has closed the descriptor and opened another file as the same number.
                return Err(Errno::BADF);
            }
            let file_system = kernel.file_system(again.get()).unwrap_or(0);
            if UNBOUND.contains(&file_system) || (stat.nameless && UNCOUNTED.contains(&file_system)) {
                return Err(Errno::INVAL);
            }
            kernel.take_lease(again.get(), watcher)?;
            Ok((again, word(kernel.lease_break_time())))
        });
        let refused = match leased.ok_or(NotHeld::NoHelpers)? {
            Ok((lease, good)) => return Ok(Safety::Lease(Arc::new(lease), AtomicU64::new(good))),
            Err(errno) => errno,
        };
        if linux::is_sealed(fd) {
            return Ok(Safety::Sealed);
        }
        let magic = kernel.file_system(fd).unwrap_or(0);
        // Who had it open for writing before may go on writing.
        let may_change = refused == Errno::AGAIN || UNBOUND.contains(&magic) || SHARED.contains(&magic);
        // Before the attribute is asked for: from here on a change is seen.
        if let Some(stamp) = Stamp::of(kernel, fd).filter(|_| !may_change) {
            if linux::is_immutable(fd) {
                return Ok(Safety::Immutable(stamp));
            }
            if linux::is_superblock_read_only(fd) {
                return Ok(Safety::ReadOnly(stamp));
            }
        }
        Err(match refused {
            Errno::AGAIN => NotHeld::OpenForWriting,
            Errno::ACCESS | Errno::PERM => NotHeld::NotOwner,
            Errno::INVAL | Errno::OPNOTSUPP | Errno::NOLCK => NotHeld::NoLeases,
            other => NotHeld::Descriptor(other),
        })
    }

    /// Whether nobody can have written the file until now. `fd`: a descriptor of it, of this thread.
    pub(super) fn holds(&self, files: &Arc<FileTable>, fd: Fd) -> bool {
        match self {
            Safety::Lease(lease, good) => {
                if linux::since_boot() < good.load(Relaxed) {
                    return true;
                }
                let (kernel, lease) = (files.sys(), Arc::clone(lease));
                let asked = files.shadow_workers().and_then(|crew| {
                    crew.call(move || {
                        let until = word(kernel.lease_break_time());
                        kernel.has_lease(lease.get()).then_some(until)
                    })
                });
                match asked.flatten() {
                    Some(until) => {
                        good.store(until, Relaxed);
                        true
                    }
                    None => false,
                }
            }
            Safety::Sealed => true,
            Safety::Immutable(stamp) => linux::is_immutable(fd) && stamp.is_still(files, fd),
            Safety::ReadOnly(stamp) => linux::is_superblock_read_only(fd) && stamp.is_still(files, fd),
        }
    }
}
