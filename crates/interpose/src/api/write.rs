//! Writes for programs that link us.

use std::ffi::{c_int, c_void};
use std::sync::atomic::AtomicIsize;

use spinio_device::QueueId;
use spinio_io::runtime;
use spinio_sys::linux;

use super::target;
use crate::guard::{self, Failure};

/// Bytes of one call at most: what Linux moves in one.
const PIECE: usize = 0x7fff_f000;

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_pwrite(fd: c_int, buffer: *const c_void, size: usize, offset: i64) -> isize {
    guard::cancellation_point();
    guard::call(|| {
        let start = u64::try_from(offset).map_err(|_| Failure::Errno(libc::EINVAL))?;
        if size > isize::MAX as usize {
            return Err(Failure::Errno(libc::EINVAL));
        }
        let buffer = buffer.cast::<u8>();
        let device = target(buffer, size);
        let mut done = 0;
        loop {
            let (at, len) = (start + done as u64, PIECE.min(size - done));
            let wrote = match device {
                Some(from) => {
                    let from = spinio_io::Target { addr: from.addr.offset(done as u64), ..from };
                    runtime().write(fd, Some(at), from, len).map_err(Failure::Io)
                }
                // SAFETY: host memory of the program, for the kernel to judge.
                None => unsafe { linux::pwrite(fd, buffer.wrapping_add(done), len, at) }.map_err(Failure::from),
            };
            match wrote {
                Ok(wrote) => done += wrote,
                Err(_) if done > 0 => return Ok(done),
                Err(failure) => return Err(failure),
            }
            if wrote.is_ok_and(|wrote| wrote < len) || done == size {
                return Ok(done);
            }
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_pwrite_async(
    fd: c_int,
    buffer: *const c_void,
    size: usize,
    offset: i64,
    stream: *mut c_void,
    written: *mut isize,
) -> c_int {
    guard::cancellation_point();
    let queued = guard::run(|| {
        let at = u64::try_from(offset).map_err(|_| Failure::Errno(libc::EINVAL))?;
        if size == 0 || size > isize::MAX as usize {
            return Err(Failure::Errno(libc::EINVAL));
        }
        let from = target(buffer.cast(), size).ok_or(Failure::Errno(libc::EFAULT))?;
        // An ssize_t as the atomic word that it is set as.
        let result = written.cast::<AtomicIsize>();
        // SAFETY: the header asks for a word that stays until it is set.
        Ok(unsafe { runtime().write_async(fd, at, from, size, QueueId(stream as u64), result) }?)
    });
    queued.map_or(-1, |()| 0)
}
