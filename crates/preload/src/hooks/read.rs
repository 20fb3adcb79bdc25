//! Hooks of `read` and `pread`, under every name that programs import.

#![expect(unsafe_code, reason = "interposed C functions")]

use std::ffi::{c_int, c_void};

use spinio_device::Allocation;
use spinio_io::{program_fd, runtime};

use super::{device_owner, device_owner_after_fault, hook, target};
use crate::{errno, ffi_guard as guard, next_symbol as next};

/// The most that Linux moves in one call.
pub(super) const MAX_RW_COUNT: usize = 0x7fff_f000;

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

/// A length that the fortified function may serve; 0, which is left to the next function, where that function would
/// abort.
fn checked_len(len: usize, room: usize) -> usize {
    if len > room { 0 } else { len }
}

/// One read, into host or device memory. `next` does the host's, with the arguments as the program gave them.
#[inline(always)]
unsafe fn serve(
    fd: c_int,
    buffer: *mut c_void,
    len: usize,
    at: Option<i64>,
    caller: usize,
    next: impl Fn() -> isize,
) -> isize {
    let buffer = buffer.cast::<u8>().cast_const();
    let entry = errno::Saved::now();
    let allocation = device_owner(buffer, len, caller);
    // A query of the driver may have changed errno.
    entry.restore();
    if let Some(allocation) = allocation
        && is_servable(buffer, len, at)
    {
        return read_into_device(fd, buffer, len, at, allocation);
    }
    let got = next();
    if got == -1
        && is_servable(buffer, len, at)
        && let Some(allocation) = device_owner_after_fault(buffer, len, caller)
    {
        entry.restore();
        return read_into_device(fd, buffer, len, at, allocation);
    }
    got
}

/// Whether SPIN may serve a call. Empty ranges, ranges beyond the address space and offsets that no file has are left
/// to the kernel, which refuses them before it looks at the memory.
pub(super) fn is_servable(buffer: *const u8, len: usize, at: Option<i64>) -> bool {
    len != 0 && is_in_address_space(buffer, len) && is_in_file(at, len)
}

/// Whether a range ends within the address space of programs: below 2^47 with four levels of page tables. A range that
/// begins past that is on a machine with five, and ends below 2^56.
pub(super) fn is_in_address_space(buffer: *const u8, len: usize) -> bool {
    let end = if (buffer as usize) < 1 << 47 { 1 << 47 } else { 1 << 56 };
    (buffer as usize).checked_add(len).is_some_and(|last| last <= end)
}

/// Whether a range has valid offsets; `None`: at the descriptor's own offset.
pub(super) fn is_in_file(at: Option<i64>, len: usize) -> bool {
    at.is_none_or(|at| at >= 0 && i64::try_from(len).is_ok_and(|len| at.checked_add(len).is_some()))
}

#[cold]
#[inline(never)]
fn read_into_device(fd: c_int, buffer: *const u8, len: usize, at: Option<i64>, allocation: Allocation) -> isize {
    guard::cancellation_point();
    guard::call(|| {
        let at = match at {
            Some(offset) => Some(u64::try_from(offset).map_err(|_| guard::Failure::Errno(libc::EINVAL))?),
            None => None,
        };
        Ok(runtime().read(program_fd(fd), at, target(allocation, buffer), len.min(MAX_RW_COUNT))?)
    })
}
