//! Calls with one buffer: what `read` and `write` have in common.

use std::ffi::c_int;

use spinio_device::Allocation;
use spinio_io::{Error, Runtime, Target, program_fd, runtime};
use spinio_sys::linux::{Fd, MAX_RW_COUNT};

use super::{device_owner_after_fault, target};
use crate::{errno, ffi_guard as guard};

/// A read or a write of device memory.
type Transfer = fn(&Runtime, Fd, Option<u64>, Target, usize) -> Result<usize, Error>;

/// One call, on host or device memory. `owner` finds the device of the buffer, `transfer` serves that. `next` does the
/// host's, with the arguments as the program gave them.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the call's own four, and what differs between reads and writes")]
pub(super) fn serve(
    fd: c_int,
    buffer: *const u8,
    len: usize,
    at: Option<i64>,
    caller: usize,
    owner: impl Fn(*const u8, usize, usize) -> Option<Allocation>,
    transfer: Transfer,
    next: impl Fn() -> isize,
) -> isize {
    let entry = errno::Saved::now();
    let allocation = owner(buffer, len, caller);
    // A query of the driver may have changed errno.
    entry.restore();
    if let Some(allocation) = allocation
        && is_servable(buffer, len, at)
    {
        return on_device(fd, buffer, len, at, allocation, transfer);
    }
    let moved = next();
    if moved == -1
        && is_servable(buffer, len, at)
        && let Some(allocation) = device_owner_after_fault(buffer, len, caller)
    {
        entry.restore();
        return on_device(fd, buffer, len, at, allocation, transfer);
    }
    moved
}

#[cold]
#[inline(never)]
fn on_device(
    fd: c_int,
    buffer: *const u8,
    len: usize,
    at: Option<i64>,
    allocation: Allocation,
    transfer: Transfer,
) -> isize {
    guard::cancellation_point();
    guard::call(|| {
        let at = match at {
            Some(offset) => Some(u64::try_from(offset).map_err(|_| guard::Failure::Errno(libc::EINVAL))?),
            None => None,
        };
        Ok(transfer(runtime(), program_fd(fd), at, target(allocation, buffer), len.min(MAX_RW_COUNT))?)
    })
}

/// Whether SPIN may serve a call. Empty ranges, ranges beyond the address space and offsets that no file has are left
/// to the kernel, which refuses them before it looks at the memory.
fn is_servable(buffer: *const u8, len: usize, at: Option<i64>) -> bool {
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
