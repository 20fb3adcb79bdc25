//! Hooks of `write` and `pwrite`, under every name that programs import.
//!
//! A write out of device memory that SPIN has not been notified of fails with EFAULT before it has changed anything, so
//! querying the devices then and writing again is safe, on sockets too.

#![expect(unsafe_code, reason = "interposed C functions")]

use std::ffi::{c_int, c_void};

use spinio_io::Runtime;

use super::{hook, single, source_owner};
use crate::next_symbol as next;

hook! {
    fn write(fd: c_int, buffer: *const c_void, len: usize) -> isize, caller in "rcx" =>
        serve(fd, buffer, len, None, caller, || next::WRITE.get()(fd, buffer, len));
    fn __write(fd: c_int, buffer: *const c_void, len: usize) -> isize, caller in "rcx" =>
        serve(fd, buffer, len, None, caller, || next::WRITE_UNDERSCORED.get()(fd, buffer, len));
    fn pwrite(fd: c_int, buffer: *const c_void, len: usize, offset: i64) -> isize, caller in "r8" =>
        serve(fd, buffer, len, Some(offset), caller, || next::PWRITE.get()(fd, buffer, len, offset));
    fn pwrite64(fd: c_int, buffer: *const c_void, len: usize, offset: i64) -> isize, caller in "r8" =>
        serve(fd, buffer, len, Some(offset), caller, || next::PWRITE64.get()(fd, buffer, len, offset));
    fn __pwrite64(fd: c_int, buffer: *const c_void, len: usize, offset: i64) -> isize, caller in "r8" =>
        serve(fd, buffer, len, Some(offset), caller, || next::PWRITE64_UNDERSCORED.get()(fd, buffer, len, offset));
}

/// One write, out of host or device memory.
#[inline(always)]
fn serve(
    fd: c_int,
    buffer: *const c_void,
    len: usize,
    at: Option<i64>,
    caller: usize,
    next: impl Fn() -> isize,
) -> isize {
    single::serve(fd, buffer.cast(), len, at, caller, source_owner, Runtime::write, next)
}
