//! The client's own descriptor of the mounted file.
//!
//! The client flushes and sets times itself, through the mount, as any program could. So the server never uses its own
//! mount, which could wait for itself, and a client that does not flush harms only itself: it loads old bytes.

use rustix::fs::{Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::retry_on_intr;
use spinio_pagecache::messages::{TICKET_IOCTL, TICKET_REPLY, TicketReply};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use crate::owned_fd::OwnedFd;
use crate::{Error, Result};

/// What a map does with a mounted file; tests have a file without a mount.
pub(crate) trait MountedFile: Send {
    /// A ticket for the server. It waits while no server serves the mount.
    fn ticket(&self) -> Result<TicketReply>;
    /// Hands the Linux kernel's dirty pages of the range to the server; `len` 0: to the end of the file.
    fn flush(&self, offset: u64, len: u64) -> Result<()>;
    /// Returns when all bytes of the file are on storage.
    fn sync(&self) -> Result<()>;
    /// The size as CPU programs see it; it may not be with the server yet.
    fn size(&self) -> Result<u64>;
    /// The file was modified now.
    fn touch(&self) -> Result<()>;
    /// Its descriptor in this thread's table, to map it.
    fn descriptor(&self) -> Fd;
}

/// A descriptor below a mount of GAIA.
#[derive(Debug)]
pub(crate) struct FuseFile(OwnedFd);

impl FuseFile {
    /// Duplicates descriptor `fd` of thread `tid` into this thread's table.
    pub(crate) fn dup(tid: u32, fd: Fd) -> Result<FuseFile> {
        let dup = linux::dup_from_thread(tid, fd).map_err(|e| Error::of(e, "duplicate the descriptor"))?;
        Ok(FuseFile(OwnedFd::new(dup)))
    }
}

impl MountedFile for FuseFile {
    fn ticket(&self) -> Result<TicketReply> {
        let mut bytes = [0; TICKET_REPLY];
        linux::ioctl_read(self.0.get(), TICKET_IOCTL, &mut bytes).map_err(|e| match e {
            Errno::NOTTY | Errno::INVAL | Errno::NOSYS | Errno::NOTSUP => {
                Error::new(Errno::NOTSUP, "The file is not below a GAIA mount: `spinio gaia mount DIR` makes one")
            }
            Errno::PROTONOSUPPORT => {
                Error::new(Errno::NOTSUP, "Maps take Linux 6.16 or later: before, FUSE may lose stores of CPU programs")
            }
            Errno::NOTCONN => Error::new(Errno::IO, "The GAIA mount of this file has ended"),
            e => Error::of(e, "get a ticket of the GAIA mount"),
        })?;
        TicketReply::from_bytes(&bytes)
            .ok_or_else(|| Error::new(Errno::NOTSUP, "The file's mount gave a ticket that is not GAIA's"))
    }

    fn flush(&self, offset: u64, len: u64) -> Result<()> {
        // EINTR is not of this call, and no bytes are lost: a program was killed while it unmapped the file, before the
        // server had answered the new times, and the Linux kernel reports that to all who have the file open.
        retry_on_intr(|| linux::write_back_range(self.0.get(), offset, len)).map_err(|e| Error::of(e, "flush the file"))
    }

    fn sync(&self) -> Result<()> {
        // EINTR: as in `flush`.
        retry_on_intr(|| rustix::fs::fsync(&self.0)).map_err(|e| Error::of(e, "write the file to storage"))
    }

    fn size(&self) -> Result<u64> {
        linux::fstat(self.0.get()).map(|stat| stat.size).map_err(|e| Error::of(e, "query the size of the file"))
    }

    fn touch(&self) -> Result<()> {
        let time = |nanoseconds| Timespec { tv_sec: 0, tv_nsec: nanoseconds };
        let times = Timestamps { last_access: time(UTIME_OMIT), last_modification: time(UTIME_NOW) };
        rustix::fs::futimens(&self.0, &times).map_err(|e| Error::of(e, "set the time of the file"))
    }

    fn descriptor(&self) -> Fd {
        self.0.get()
    }
}
