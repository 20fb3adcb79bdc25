//! What ensures that no process writes a leased file: the daemon's side of what `crates/pinned` does in a program.
//!
//! ```text
//!   lease      a process that opens the file for writing waits until the lease is given back: at once
//!   sealed     a memory file that no process can write or shrink any more
//!   immutable  the attribute                                    with the times and the length: every write changes one
//!   read-only  the file system, not only this mount of it       as above
//! ```
//!
//! A lease is verified at each acquire and after each fill: the Linux kernel breaks it by force where the daemon was
//! stopped for too long. So are size and time of the file: `open` with O_RDONLY and O_TRUNC breaks no lease.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use spinio_sys::linux::{self, FileKey, fs_magic};

/// A file, through a descriptor of the daemon's own: a lease belongs to the open file description, and a client could
/// release that of its own.
#[derive(Debug)]
pub(super) struct LeasedFile {
    fd: OwnedFd,
    file_system: u64,
}

/// What excludes writers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exclusion {
    Lease(ChangeStamp),
    Sealed(ChangeStamp),
    Immutable(ChangeStamp),
    ReadOnly(ChangeStamp),
}

/// Attributes of which every change of a file changes at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChangeStamp {
    changed: i128,
    modified: i128,
    size: u64,
}

impl LeasedFile {
    /// Opens the file of a client's descriptor again, for reading.
    ///
    /// # Errors
    /// EACCES: the descriptor is not open for reading. EINVAL: not a regular file. ENOTSUP: other machines, or a
    /// process, may change the file without the knowledge of this Linux kernel. ETXTBSY: a process has exclusive access.
    pub(super) fn open(passed: &OwnedFd) -> Result<LeasedFile, Errno> {
        let flags = rustix::fs::fcntl_getfl(passed)?;
        if flags.contains(OFlags::PATH) || flags & OFlags::RWMODE == OFlags::WRONLY {
            return Err(Errno::ACCESS);
        }
        let stat = rustix::fs::fstat(passed)?;
        if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file() {
            return Err(Errno::INVAL);
        }
        let file_system = linux::file_system_magic(passed.as_raw_fd())?;
        if fs_magic::LEASES_NOT_BINDING.contains(&file_system) || fs_magic::READ_ONLY_NOT_BINDING.contains(&file_system)
        {
            return Err(Errno::NOTSUP);
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let path = format!("/proc/self/fd/{}", passed.as_raw_fd());
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| match e {
            Errno::AGAIN => Errno::TXTBSY,
            e => e,
        })?;
        let own = rustix::fs::fstat(&fd)?;
        if (own.st_dev, own.st_ino) != (stat.st_dev, stat.st_ino) {
            return Err(Errno::STALE);
        }
        Ok(LeasedFile { fd, file_system })
    }

    pub(super) fn key(&self) -> Result<FileKey, Errno> {
        linux::fstat(self.fd.as_raw_fd()).map(|stat| stat.key())
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Whether it has no name any more.
    pub(super) fn is_deleted(&self) -> bool {
        linux::fstat(self.fd.as_raw_fd()).is_ok_and(|stat| stat.unlinked)
    }

    /// Excludes writers; what does, and the size of the file. Breaks of a lease are signalled to thread `watcher`.
    ///
    /// # Errors
    /// ETXTBSY: a process has it open for writing. ENOTSUP: nothing excludes writers.
    pub(super) fn exclude_writers(&self, watcher: u32) -> Result<(Exclusion, u64), Errno> {
        let fd = self.fd.as_raw_fd();
        let stat = linux::fstat(fd)?;
        // The Linux kernel does not count the descriptor that creates a memory file among its writers.
        let uncounted = stat.unlinked && fs_magic::WRITER_NOT_COUNTED.contains(&self.file_system);
        let leased = if uncounted { Err(Errno::INVAL) } else { linux::take_read_lease(fd, watcher) };
        let refused = match leased {
            Ok(()) => {
                let stamp = self.stamp()?;
                return Ok((Exclusion::Lease(stamp), stamp.size));
            }
            Err(errno) => errno,
        };
        if linux::is_sealed(fd) {
            let stamp = self.stamp()?;
            return Ok((Exclusion::Sealed(stamp), stamp.size));
        }
        if refused == Errno::AGAIN {
            return Err(Errno::TXTBSY);
        }
        let stamp = self.stamp()?;
        if linux::is_immutable(fd) {
            return Ok((Exclusion::Immutable(stamp), stamp.size));
        }
        if linux::is_superblock_read_only(fd) {
            return Ok((Exclusion::ReadOnly(stamp), stamp.size));
        }
        // EPERM says that a lease would be possible for the owner.
        Err(if matches!(refused, Errno::ACCESS | Errno::PERM) { Errno::PERM } else { Errno::NOTSUP })
    }

    /// Whether no process can have written the file until now.
    pub(super) fn is_excluded(&self, by: Exclusion) -> bool {
        let fd = self.fd.as_raw_fd();
        let unchanged = |stamp| self.stamp() == Ok(stamp);
        match by {
            // Not the time of change, which another name of the file or another mode sets too.
            Exclusion::Lease(stamp) => {
                let same = |now: ChangeStamp| (now.modified, now.size) == (stamp.modified, stamp.size);
                linux::has_read_lease(fd) && self.stamp().is_ok_and(same)
            }
            // It may grow.
            Exclusion::Sealed(stamp) => self.stamp().is_ok_and(|now| now.size == stamp.size),
            Exclusion::Immutable(stamp) => linux::is_immutable(fd) && unchanged(stamp),
            Exclusion::ReadOnly(stamp) => linux::is_superblock_read_only(fd) && unchanged(stamp),
        }
    }

    /// Lets writers go on.
    pub(super) fn admit_writers(&self, by: Exclusion) {
        if matches!(by, Exclusion::Lease(_)) {
            let _ = linux::release_lease(self.fd.as_raw_fd());
        }
    }

    fn stamp(&self) -> Result<ChangeStamp, Errno> {
        let stat = linux::fstat(self.fd.as_raw_fd())?;
        Ok(ChangeStamp { changed: stat.ctime_ns, modified: stat.mtime_ns, size: stat.size })
    }
}
