//! The client's own descriptor of the mounted file.
//!
//! The client flushes and sets times itself, through the mount, as any program could. So the server never uses its own
//! mount, which could wait for itself, and a client that does not flush harms only itself: it loads old bytes, or its releases of
//! pages that CPU programs have changed too take longer.
//!
//! **Not every error of a flush is one** (Linux 6.18). A mapping of a file ends, and the Linux kernel sends its new times.
//! If the program is killed before a server has read that request, `fuse_vma_close` keeps EINTR as an error of the file
//! and the mark of a failed write-back with it. The end of any other mapping finds the mark and keeps EIO, and all programs
//! that have the file open get these errors, once each, though no byte is lost:
//!
//! ```text
//!   program 1  munmap ── SETATTR, not read ── SIGKILL ──> EINTR, mark        program 2  munmap: mark ──> EIO, to all
//!   this file  flush ──> EIO ── has the server refused to write this file? ── no: flush again
//! ```
//!
//! Known flaw: once the server has refused one, a later EIO of the same file counts as true.

use rustix::fs::{Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::retry_on_intr;
use spinio_pagecache::messages::{REFUSALS_IOCTL, REFUSALS_REPLY, TICKET_IOCTL, TICKET_REPLY, TicketReply};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use crate::owned_fd::OwnedFd;
use crate::{Error, Result};

/// Flushes that fail though the server has refused nothing, after which the error is passed on. Each takes one error away.
const REPEATS: usize = 100;

/// What a map does with a mounted file; tests have a file without a mount.
pub(crate) trait MountedFile: Send {
    /// A ticket for the server. It waits while no server serves the mount.
    fn ticket(&self) -> Result<TicketReply>;
    /// Hands the Linux kernel's dirty pages of the range to the server; `len` 0: to the end of the file.
    fn flush(&self, offset: u64, len: u64) -> Result<()>;
    /// The same, without waiting, and without a result: of pages that the server will ask the kernel for.
    fn start_flush(&self, offset: u64, len: u64);
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

    /// Repeats a call while it reports errors of the file that the server knows nothing of.
    fn unless_refused(&self, call: impl Fn() -> std::result::Result<(), Errno>) -> std::result::Result<(), Errno> {
        let mut result = retry_on_intr(&call);
        for _ in 0..REPEATS {
            if result != Err(Errno::IO) || self.may_be_refused() {
                break;
            }
            result = retry_on_intr(&call);
        }
        result
    }

    /// Whether a server has refused to write the file, or there is none to ask.
    fn may_be_refused(&self) -> bool {
        let mut refusals = [0; REFUSALS_REPLY];
        let asked = linux::ioctl_read(self.0.get(), REFUSALS_IOCTL, &mut refusals);
        asked.is_err() || u64::from_ne_bytes(refusals) > 0
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
        self.unless_refused(|| linux::write_back_range(self.0.get(), offset, len))
            .map_err(|e| Error::of(e, "flush the file"))
    }

    fn start_flush(&self, offset: u64, len: u64) {
        // It waits for nothing, and reports no failed write-back.
        let _ = linux::start_write_back(self.0.get(), offset, len);
    }

    fn sync(&self) -> Result<()> {
        self.unless_refused(|| rustix::fs::fsync(&self.0)).map_err(|e| Error::of(e, "write the file to storage"))
    }

    fn size(&self) -> Result<u64> {
        linux::fstat(self.0.get()).map(|stat| stat.size).map_err(|e| Error::of(e, "query the size of the file"))
    }

    fn touch(&self) -> Result<()> {
        let time = |nanoseconds| Timespec { tv_sec: 0, tv_nsec: nanoseconds };
        let times = Timestamps { last_access: time(UTIME_OMIT), last_modification: time(UTIME_NOW) };
        // It flushes, too.
        self.unless_refused(|| rustix::fs::futimens(&self.0, &times))
            .map_err(|e| Error::of(e, "set the time of the file"))
    }

    fn descriptor(&self) -> Fd {
        self.0.get()
    }
}
