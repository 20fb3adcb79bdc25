//! System calls on the program's own descriptor that several kinds of reads share.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use spinio_files::{SameFile, share_key};
use spinio_host::shares::ShareKey;
use spinio_host::syscalls::Syscalls;
use spinio_host::{HeldSignals, deliver_now, has_cancel_poll};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{Fd, Stat};
use spinio_transfer::Error;

use crate::ctx::Reader;

pub(super) const SEEK_CUR: i32 = 1;

/// One kernel read: at an offset, or at the descriptor's own.
///
/// # Safety
/// `buf` must have `len` bytes that the kernel may write.
pub(super) unsafe fn read_fd(
    ctx: &Reader,
    route: Route,
    fd: Fd,
    at: Option<u64>,
    buf: *mut u8,
    len: usize,
) -> Result<usize, Errno> {
    // SAFETY: passed on to the caller.
    unsafe {
        match at {
            Some(offset) => ctx.files.sys().pread(route, fd, buf, len, offset, 0),
            None => ctx.files.sys().read(fd, buf, len),
        }
    }
}

/// Handlers wait until a read of a local disk or of memory is over, which never makes the kernel's read end early. They do not wait for
/// any other file system.
pub(super) fn hold_signals(ctx: &Reader, fd: Fd) -> Option<HeldSignals> {
    hold_signals_if(ctx.files.is_descriptor_local(fd))
}

/// The same of a stream.
pub(super) fn hold_signals_of_stream(ctx: &Reader, fd: Fd) -> Option<HeldSignals> {
    hold_signals_if(ctx.files.sequential.is_local(fd, || ctx.files.is_descriptor_local(fd)))
}

fn hold_signals_if(is_local: bool) -> Option<HeldSignals> {
    if is_local && !has_cancel_poll() {
        return Some(HeldSignals::hold());
    }
    deliver_now();
    None
}

/// The share of bounce buffers that a read through this descriptor takes; `None`: none, since a local file waits for no server.
/// `held`: signals are, so it is known to be one.
pub(super) fn share_key_unless(ctx: &Reader, fd: Fd, held: bool) -> Option<ShareKey> {
    if held || ctx.files.is_descriptor_local(fd) {
        return None;
    }
    ctx.files.sys().fstat(fd).ok().map(|stat| share_key(&stat))
}

/// Moves the offset of a descriptor forward by `len` for a read to come; where it stood.
pub(crate) fn reserve_offset(sys: &dyn Syscalls, fd: Fd, len: u64) -> Result<u64, Errno> {
    Ok(sys.lseek(fd, len as i64, SEEK_CUR)? - len)
}

/// Gives back what a reserved read did not use: relatively, because others may have moved the offset too.
pub(crate) fn release_offset(sys: &dyn Syscalls, fd: Fd, unused: u64) {
    if unused > 0 {
        let _ = sys.lseek(fd, -(unused as i64), SEEK_CUR);
    }
}

/// A descriptor's own offset, moved forward for a request to come.
#[derive(Debug)]
pub struct ReservedOffset {
    /// Where it stood.
    pub start: u64,
    file: SameFile,
}

impl ReservedOffset {
    /// Moves it forward by `len`. `stat`: of the file that the descriptor refers to.
    pub(crate) fn new(sys: &dyn Syscalls, fd: Fd, len: u64, stat: &Stat) -> Result<ReservedOffset, Errno> {
        let file = SameFile::known(fd, stat.key());
        Ok(ReservedOffset { start: reserve_offset(sys, fd, len)?, file })
    }

    /// Gives back what the request did not use; not if the number refers to another file by now, whose offset that
    /// would move. Two changes of the number that were in progress when the request began are no reason to keep it: they
    /// matter to which bytes were read, and the offset would stay wrong.
    pub(crate) fn release(&self, sys: &dyn Syscalls, fd: Fd, unused: u64) {
        if unused > 0 && self.file.refers_to_it_now(sys) {
            release_offset(sys, fd, unused);
        }
    }
}

/// A read went through the program's descriptor and did not check the file; the stream is checked every so often.
pub(super) fn record_app_fd_read(ctx: &Reader, fd: Fd, at: Option<u64>, got: &Result<usize, Error>) {
    if let &Ok(got @ 1..) = got
        && ctx.files.sequential.record(fd, at, got)
    {
        ctx.files.readahead.check_stream(fd, at.map(|at| at + got as u64));
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use spinio_files::FdChange;
    use spinio_host::syscalls::LinuxSyscalls;
    use spinio_sys::linux::{fstat, lseek};

    use super::*;

    #[test]
    fn offset_of_replaced_descriptor_is_left_alone() {
        let [ours, theirs] = [(); 2].map(|()| tempfile::tempfile().unwrap());
        let fd = ours.as_raw_fd();
        lseek(fd, 10, 0).unwrap();
        lseek(theirs.as_raw_fd(), 1000, 0).unwrap();
        let reserve = || ReservedOffset::new(&LinuxSyscalls, fd, 100, &fstat(fd).unwrap()).unwrap();
        let reserved = reserve();
        assert_eq!((reserved.start, lseek(fd, 0, SEEK_CUR)), (10, Ok(110)));
        reserved.release(&LinuxSyscalls, fd, 60);
        assert_eq!(lseek(fd, 0, SEEK_CUR), Ok(50));
        let reserved = reserve();
        let change = FdChange::begin(fd as u32, fd as u32);
        // SAFETY: both descriptors are this test's own.
        assert_eq!(unsafe { libc::dup2(theirs.as_raw_fd(), fd) }, fd);
        drop(change);
        reserved.release(&LinuxSyscalls, fd, 100);
        assert_eq!(lseek(fd, 0, SEEK_CUR), Ok(1000));
    }
}
