//! System calls on the program's own descriptor that several kinds of reads share.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use spinio_host::syscalls::Syscalls;
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::Fd;
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

/// The file that a descriptor refers to now.
pub(super) fn file_id(ctx: &Reader, fd: Fd) -> Option<(u64, u64)> {
    ctx.files.sys().fstat(fd).ok().map(|s| (s.dev, s.ino))
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

/// A read went through the program's descriptor and did not check the file; the stream is checked every so often.
pub(super) fn record_app_fd_read(ctx: &Reader, fd: Fd, at: Option<u64>, got: &Result<usize, Error>) {
    if let &Ok(got @ 1..) = got
        && ctx.files.sequential.record(fd, at, got)
    {
        ctx.files.readahead.check_stream(fd, at.map(|at| at + got as u64));
    }
}
