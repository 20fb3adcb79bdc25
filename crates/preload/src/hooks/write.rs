//! Hooks of `write` and `pwrite`, under every name that programs import.
//!
//! A write out of device memory that SPIN has not been notified of fails with EFAULT before it has changed anything, so
//! querying the devices then and writing again is safe, on sockets too.

#![expect(unsafe_code, reason = "interposed C functions")]

use std::ffi::{c_int, c_void};

use spinio_device::Allocation;
use spinio_io::{program_fd, runtime};

use super::read::{MAX_RW_COUNT, is_servable};
use super::{device_owner_after_fault, hook, source_owner, target};
use crate::{errno, ffi_guard as guard, next_symbol as next};

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

/// One write, out of host or device memory. `next` does the host's, with the arguments as the program gave them.
#[inline(always)]
unsafe fn serve(
    fd: c_int,
    buffer: *const c_void,
    len: usize,
    at: Option<i64>,
    caller: usize,
    next: impl Fn() -> isize,
) -> isize {
    let buffer = buffer.cast::<u8>();
    let entry = errno::Saved::now();
    let allocation = source_owner(buffer, len, caller);
    // A query of the driver may have changed errno.
    entry.restore();
    if let Some(allocation) = allocation
        && is_servable(buffer, len, at)
    {
        return write_from_device(fd, buffer, len, at, allocation);
    }
    let wrote = next();
    if wrote == -1
        && is_servable(buffer, len, at)
        && let Some(allocation) = device_owner_after_fault(buffer, len, caller)
    {
        entry.restore();
        return write_from_device(fd, buffer, len, at, allocation);
    }
    wrote
}

#[cold]
#[inline(never)]
fn write_from_device(fd: c_int, buffer: *const u8, len: usize, at: Option<i64>, allocation: Allocation) -> isize {
    guard::cancellation_point();
    guard::call(|| {
        let at = match at {
            Some(offset) => Some(u64::try_from(offset).map_err(|_| guard::Failure::Errno(libc::EINVAL))?),
            None => None,
        };
        Ok(runtime().write(program_fd(fd), at, target(allocation, buffer), len.min(MAX_RW_COUNT))?)
    })
}
