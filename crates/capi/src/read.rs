//! Reads, for programs that link the library.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{c_int, c_void};

use spinio_device::{StreamId, set_thread_stream};
use spinio_io::settings::next_part;
use spinio_io::{program_fd, runtime};
use spinio_sys::linux;

use super::{for_each_part, target_of};
use crate::ffi_guard::{self as guard, Failure};

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_pread(fd: c_int, buffer: *mut c_void, size: usize, offset: i64) -> isize {
    guard::cancellation_point();
    guard::call(|| {
        let buffer = buffer.cast::<u8>();
        for_each_part(buffer, size, offset, next_part, |part| match part.device {
            Some(to) => runtime().read(program_fd(fd), Some(part.offset), to, part.len).map_err(Failure::Io),
            None => {
                let at = buffer.wrapping_add(part.at);
                // SAFETY: host memory of the program, for the kernel to judge.
                unsafe { linux::pread(fd, at, part.len, part.offset) }.map_err(Failure::from)
            }
        })
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
        let to = target_of(buffer.cast(), size).ok_or(Failure::Errno(libc::EFAULT))?;
        Ok(runtime().read_async(program_fd(fd), at, to, size, StreamId(stream as u64))?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn spinio_set_stream(stream: *mut c_void) {
    set_thread_stream(StreamId(stream as u64));
}
