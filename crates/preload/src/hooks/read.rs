//! Hooks of `read` and `pread`, under every name that programs import.

#![expect(unsafe_code, reason = "interposed C functions")]

use std::ffi::{c_int, c_void};

use spinio_io::Runtime;

use super::{device_owner, hook, single};
use crate::next_symbol as next;

hook! {
    fn read(fd: c_int, buffer: *mut c_void, len: usize) -> isize, caller in "rcx" =>
        serve(fd, buffer, len, None, caller, || next::READ.get()(fd, buffer, len));
    fn __read(fd: c_int, buffer: *mut c_void, len: usize) -> isize, caller in "rcx" =>
        serve(fd, buffer, len, None, caller, || next::READ_UNDERSCORED.get()(fd, buffer, len));
    fn pread(fd: c_int, buffer: *mut c_void, len: usize, offset: i64) -> isize, caller in "r8" =>
        serve(fd, buffer, len, Some(offset), caller, || next::PREAD.get()(fd, buffer, len, offset));
    fn pread64(fd: c_int, buffer: *mut c_void, len: usize, offset: i64) -> isize, caller in "r8" =>
        serve(fd, buffer, len, Some(offset), caller, || next::PREAD64.get()(fd, buffer, len, offset));
    fn __pread64(fd: c_int, buffer: *mut c_void, len: usize, offset: i64) -> isize, caller in "r8" =>
        serve(fd, buffer, len, Some(offset), caller, || next::PREAD64_UNDERSCORED.get()(fd, buffer, len, offset));
    fn __read_chk(fd: c_int, buffer: *mut c_void, len: usize, room: usize) -> isize, caller in "r8" =>
        serve(fd, buffer, checked_len(len, room), None, caller, || next::READ_CHK.get()(fd, buffer, len, room));
    fn __pread_chk(fd: c_int, buffer: *mut c_void, len: usize, offset: i64, room: usize) -> isize, caller in "r9" =>
        serve(fd, buffer, checked_len(len, room), Some(offset), caller,
            || next::PREAD_CHK.get()(fd, buffer, len, offset, room));
    fn __pread64_chk(fd: c_int, buffer: *mut c_void, len: usize, offset: i64, room: usize) -> isize, caller in "r9" =>
        serve(fd, buffer, checked_len(len, room), Some(offset), caller,
            || next::PREAD64_CHK.get()(fd, buffer, len, offset, room));
}

/// One read, into host or device memory.
#[inline(always)]
fn serve(
    fd: c_int,
    buffer: *mut c_void,
    len: usize,
    at: Option<i64>,
    caller: usize,
    next: impl Fn() -> isize,
) -> isize {
    single::serve(fd, buffer.cast(), len, at, caller, device_owner, Runtime::read, next)
}

/// A length that the fortified function may serve; 0, which is left to the next function, where that function would
/// abort.
fn checked_len(len: usize, room: usize) -> usize {
    if len > room { 0 } else { len }
}
