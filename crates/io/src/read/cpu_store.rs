//! One kernel read into memory that the CPU can store to, through the program's own descriptor.
//!
//! ```text
//!   pread(descriptor, device memory) ──> the kernel stores, or storage DMAs
//!         │ O_DIRECT, and this storage cannot DMA there
//!         └────> pread(descriptor, host memory) ──> the CPU stores
//! ```
//!
//! Without O_DIRECT the kernel copies out of the page cache, and that always works. With it, storage itself has to
//! reach the device: what an array, a volume or a bridge refuses fails with EREMOTEIO or EINVAL, or ends early where
//! only a part of the range lies on a member that reaches it. A host buffer would have been filled.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use crate::ctx::Reader;
use crate::read::app_fd_calls::read_fd;
use spinio_device::Target;
use spinio_files::SameFile;
use spinio_transfer::AlignedBuf;
use spinio_transfer::Error;
use spinio_transfer::bounce::BUFFER_SIZE;

/// A `read` or `pread` into host-mapped memory.
///
/// # Safety
/// `to` must have `len` bytes, inside its allocation, that the kernel and the CPU may write.
pub(super) unsafe fn read(ctx: &Reader, fd: Fd, at: Option<u64>, to: Target, len: usize) -> Result<usize, Error> {
    // SAFETY: passed on to the caller.
    let got = unsafe { read_or_bounce(ctx, fd, at, to.addr.0 as *mut u8, len) };
    got.map_err(|e| Error::kernel(e, "read", at.unwrap_or(0), len as u64))
}

/// # Safety
/// As for [`read`].
unsafe fn read_or_bounce(ctx: &Reader, fd: Fd, at: Option<u64>, to: *mut u8, len: usize) -> Result<usize, Errno> {
    // SAFETY: passed on to the caller.
    let first = unsafe { read_fd(ctx, Route::Store, fd, at, to, len) };
    let done = match first {
        Ok(done) if done == 0 || done == len => return first,
        Ok(done) => done,
        Err(Errno::REMOTEIO | Errno::INVAL | Errno::OPNOTSUPP) => 0,
        Err(_) => return first,
    };
    if ctx.files.sys().status_flags(fd).map_or(0, |flags| flags & linux::O_DIRECT as i32) == 0 {
        return first;
    }
    // SAFETY: `done` of `len` bytes are there.
    match unsafe { bounce(ctx, fd, at.map(|at| at + done as u64), to.add(done), len - done) } {
        Ok(rest) => Ok(done + rest),
        // The end of a file is rarely aligned: past it the kernel refuses to read.
        Err(_) if done > 0 => Ok(done),
        Err(e) => Err(e),
    }
}

/// By way of host memory.
///
/// # Safety
/// As for [`read`].
unsafe fn bounce(ctx: &Reader, fd: Fd, at: Option<u64>, to: *mut u8, len: usize) -> Result<usize, Errno> {
    let mut host = AlignedBuf::zeroed(len.min(BUFFER_SIZE));
    let mut done = 0;
    let file = SameFile::of(ctx.files.sys(), fd);
    while done < len {
        let want = (len - done).min(BUFFER_SIZE);
        // SAFETY: `host` has at least as many bytes.
        let got =
            match unsafe { read_fd(ctx, Route::Store, fd, at.map(|at| at + done as u64), host.as_mut_ptr(), want) } {
                Ok(got) => got,
                Err(e) if done == 0 => return Err(e),
                Err(_) => break,
            };
        if done > 0 && !file.is_same(ctx.files.sys()) {
            break;
        }
        // SAFETY: the range lies inside `to`, which is other memory than `host`.
        unsafe { host.as_ptr().copy_to_nonoverlapping(to.add(done), got) };
        done += got;
        if got < want {
            break;
        }
    }
    Ok(done)
}
