//! Pipes, which can reference pages without copying them.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::files::Fd;
use super::raw::syscall;

type Result<T> = core::result::Result<T, Errno>;

const SPLICE_F_NONBLOCK: usize = 2;

/// `pipe2(O_CLOEXEC)`: the reading and the writing end.
pub fn pipe() -> Result<(Fd, Fd)> {
    let mut ends = [-1 as Fd; 2];
    // SAFETY: `ends` takes two descriptors and lives across the call.
    unsafe { syscall(k::__NR_pipe2, [ends.as_mut_ptr() as usize, k::O_CLOEXEC as usize, 0, 0, 0, 0]) }?;
    Ok((ends[0], ends[1]))
}

/// `fcntl(F_SETPIPE_SZ)`: the capacity in bytes that the kernel granted, a page a slot.
pub fn set_pipe_size(pipe: Fd, bytes: usize) -> Result<usize> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_fcntl, [pipe as usize, k::F_SETPIPE_SZ as usize, bytes, 0, 0, 0]) }
}

/// `fcntl(F_GETPIPE_SZ)`.
pub fn pipe_size(pipe: Fd) -> Result<usize> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_fcntl, [pipe as usize, k::F_GETPIPE_SZ as usize, 0, 0, 0, 0]) }
}

/// `vmsplice(SPLICE_F_NONBLOCK)` into a pipe: the pipe references the pages themselves, not their bytes. Returns the
/// number of bytes in the pipe, fewer where it is full or a page is not available.
///
/// # Safety
/// A reader of the pipe sees the contents of the pages at that time: the caller must want that.
pub unsafe fn vmsplice(pipe: Fd, from: *const u8, len: usize) -> Result<usize> {
    let iov = [from as usize, len];
    // SAFETY: `iov` has the layout of `struct iovec` and lives across the call; the pages are only read.
    unsafe { syscall(k::__NR_vmsplice, [pipe as usize, iov.as_ptr() as usize, 1, SPLICE_F_NONBLOCK, 0, 0]) }
}

/// `tee(SPLICE_F_NONBLOCK)`: the second pipe references the first `len` bytes of the first pipe too.
pub fn tee(from: Fd, to: Fd, len: usize) -> Result<usize> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_tee, [from as usize, to as usize, len, SPLICE_F_NONBLOCK, 0, 0]) }
}

/// `sendfile` from an offset of a file to a socket or pipe: bytes sent, 0 at the end of the file. It raises SIGPIPE, unless
/// the thread blocks it.
pub fn sendfile(to: Fd, file: Fd, offset: i64, len: usize) -> Result<usize> {
    let mut offset = offset;
    // SAFETY: the offset lives across the call.
    unsafe { syscall(k::__NR_sendfile, [to as usize, file as usize, &raw mut offset as usize, len, 0, 0]) }
}

/// `readv` into two buffers, one after the other.
///
/// # Safety
/// Both must be memory that the caller lets the Linux kernel write, or addresses it may refuse.
pub unsafe fn readv_pair(fd: Fd, first: (*mut u8, usize), second: (*mut u8, usize)) -> Result<usize> {
    let iov = [first.0 as usize, first.1, second.0 as usize, second.1];
    // SAFETY: `iov` has the layout of two `struct iovec` and lives across the call; the rest is the caller's.
    unsafe { syscall(k::__NR_readv, [fd as usize, iov.as_ptr() as usize, 2, 0, 0, 0]) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linux::{close, read};

    #[test]
    fn pipe_references_pages_without_copying() {
        let (out, into) = pipe().unwrap();
        let (copy_out, copy_in) = pipe().unwrap();
        let mut page = vec![1u8; 4096];
        // SAFETY: the test expects the page to change under the pipe.
        assert_eq!(unsafe { vmsplice(into, page.as_ptr(), page.len()) }, Ok(4096));
        assert_eq!(tee(out, copy_in, 4096), Ok(4096));
        page.fill(2);
        let mut seen = vec![0u8; 4096];
        let at = seen.as_mut_ptr();
        // SAFETY: both halves are in `seen`.
        assert_eq!(unsafe { readv_pair(copy_out, (at, 96), (at.add(96), 4000)) }, Ok(4096));
        assert!(seen.iter().all(|&b| b == 2));
        // SAFETY: as above.
        assert_eq!(unsafe { read(out, at, 4096) }, Ok(4096));
        for end in [out, into, copy_out, copy_in] {
            close(end).unwrap();
        }
    }

    #[test]
    fn pipe_size_reports_granted_capacity() {
        let (out, into) = pipe().unwrap();
        let before = pipe_size(into).unwrap();
        let granted = set_pipe_size(into, 2 * before).unwrap_or(before);
        assert_eq!(pipe_size(out), Ok(granted));
        close(out).unwrap();
        close(into).unwrap();
    }
}
