//! Reads for programs that link us.

use std::ffi::{c_int, c_void};

use spinio_device::{QueueId, set_thread_queue};
use spinio_io::runtime;
use spinio_sys::linux;

use super::target;
use crate::guard::{self, Failure};

/// Bytes asked of `io` at once: a kernel moves a little less than 2 GiB in a call.
const PIECE: usize = 1 << 30;

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_pread(fd: c_int, buffer: *mut c_void, size: usize, offset: i64) -> isize {
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
            let got = match device {
                Some(to) => {
                    let to = spinio_io::Target { addr: to.addr.offset(done as u64), ..to };
                    runtime().read(fd, Some(at), to, len).map_err(Failure::Io)
                }
                // SAFETY: host memory of the program, for the kernel to judge.
                None => unsafe { linux::pread(fd, buffer.wrapping_add(done), len, at) }.map_err(Failure::from),
            };
            match got {
                Ok(got) => done += got,
                Err(_) if done > 0 => return Ok(done),
                Err(failure) => return Err(failure),
            }
            if got.is_ok_and(|got| got < len) || done == size {
                return Ok(done);
            }
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_pread_async(
    fd: c_int,
    buffer: *mut c_void,
    size: usize,
    offset: i64,
    stream: *mut c_void,
) -> isize {
    guard::cancellation_point();
    guard::call(|| {
        let at = u64::try_from(offset).map_err(|_| Failure::Errno(libc::EINVAL))?;
        let to = target(buffer.cast(), size).ok_or(Failure::Errno(libc::EFAULT))?;
        Ok(runtime().read_async(fd, at, to, size, QueueId(stream as u64))?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn spinio_set_stream(stream: *mut c_void) {
    set_thread_queue(QueueId(stream as u64));
}
