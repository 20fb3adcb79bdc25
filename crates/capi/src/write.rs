//! Writes, for programs that link the library.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{c_int, c_void};
use std::sync::atomic::AtomicIsize;

use spinio_device::StreamId;
use spinio_io::{program_fd, runtime};
use spinio_sys::linux;

use super::{for_each_part, target_of};
use crate::ffi_guard::{self as guard, Failure};

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_pwrite(fd: c_int, buffer: *const c_void, size: usize, offset: i64) -> isize {
    guard::cancellation_point();
    guard::call(|| {
        let buffer = buffer.cast::<u8>();
        for_each_part(
            buffer,
            size,
            offset,
            |left| left.min(linux::MAX_RW_COUNT),
            |part| match part.device {
                Some(from) => runtime().write(program_fd(fd), Some(part.offset), from, part.len).map_err(Failure::Io),
                None => {
                    let at = buffer.wrapping_add(part.at);
                    // SAFETY: host memory of the program, for the kernel to judge.
                    unsafe { linux::pwrite(fd, at, part.len, part.offset) }.map_err(Failure::from)
                }
            },
        )
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
    guard::status(|| {
        let at = u64::try_from(offset).map_err(|_| Failure::Errno(libc::EINVAL))?;
        if size == 0 || size > isize::MAX as usize {
            return Err(Failure::Errno(libc::EINVAL));
        }
        let from = target_of(buffer.cast(), size).ok_or(Failure::Errno(libc::EFAULT))?;
        // An ssize_t as the atomic word that it is set as.
        let result = written.cast::<AtomicIsize>();
        // SAFETY: the header asks for a word that stays until it is set.
        Ok(unsafe { runtime().write_async(program_fd(fd), at, from, size, StreamId(stream as u64), result) }?)
    })
}
