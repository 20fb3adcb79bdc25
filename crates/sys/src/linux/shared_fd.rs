//! Memory with a descriptor, and memory protection.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::ffi::CStr;

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::files::Fd;
use super::raw::syscall;

type Result<T> = core::result::Result<T, Errno>;

/// `memfd_create(MFD_CLOEXEC)`: memory that can be mapped more than once.
pub fn memfd(name: &CStr) -> Result<Fd> {
    // SAFETY: `name` is NUL-terminated and lives across the call.
    unsafe { syscall(k::__NR_memfd_create, [name.as_ptr() as usize, k::MFD_CLOEXEC as usize, 0, 0, 0, 0]) }
        .map(|v| v as Fd)
}

/// `ftruncate`.
pub fn ftruncate(fd: Fd, len: u64) -> Result<()> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_ftruncate, [fd as usize, len as usize, 0, 0, 0, 0]) }.map(drop)
}

/// `mprotect`.
///
/// # Safety
/// The range must not be used in a way that the new protection refuses.
pub unsafe fn mprotect(addr: *mut u8, len: usize, prot: u32) -> Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe { syscall(k::__NR_mprotect, [addr as usize, len, prot as usize, 0, 0, 0]) }.map(drop)
}

/// `fallocate` of the first `len` bytes: a file of that length, with its storage allocated.
pub fn fallocate(fd: Fd, len: u64) -> Result<()> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_fallocate, [fd as usize, 0, 0, len as usize, 0, 0]) }.map(drop)
}
