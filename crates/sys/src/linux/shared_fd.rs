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

const SEAL_SEAL: usize = 1;
const SEAL_SHRINK: usize = 2;
const SEAL_GROW: usize = 4;
const F_ADD_SEALS: usize = 1033;
const F_GET_SEALS: usize = 1034;

/// A memory file of `len` bytes whose length no process can change.
pub fn sized_memfd(name: &CStr, len: u64) -> Result<Fd> {
    let flags = k::MFD_CLOEXEC | k::MFD_ALLOW_SEALING;
    // SAFETY: `name` is NUL-terminated and lives across the call.
    let fd = unsafe { syscall(k::__NR_memfd_create, [name.as_ptr() as usize, flags as usize, 0, 0, 0, 0]) }? as Fd;
    let seals = SEAL_SEAL | SEAL_SHRINK | SEAL_GROW;
    let sealed = ftruncate(fd, len).and_then(|()| {
        // SAFETY: no memory is involved.
        unsafe { syscall(k::__NR_fcntl, [fd as usize, F_ADD_SEALS, seals, 0, 0, 0]) }
    });
    if sealed.is_err() {
        let _ = super::files::close(fd);
    }
    sealed.map(|_| fd)
}

/// Whether a descriptor is of a memory file that no process can shrink: its mapping cannot fault.
pub fn cannot_shrink(fd: Fd) -> bool {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_fcntl, [fd as usize, F_GET_SEALS, 0, 0, 0, 0]) }
        .is_ok_and(|seals| seals & SEAL_SHRINK != 0)
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
