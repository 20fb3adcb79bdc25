//! Mappings, and which parts of the address space are accessible.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::files::Fd;
use super::process::getpid;
use super::raw::syscall;

type Result<T> = core::result::Result<T, Errno>;

pub use k::{
    MADV_DONTDUMP, MADV_DONTFORK, MADV_DONTNEED, MADV_HUGEPAGE, MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_REMOVE,
    MAP_ANONYMOUS, MAP_FIXED, MAP_NORESERVE, MAP_POPULATE, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_READ, PROT_WRITE,
};

/// Size of a page; x86-64 has only this one in the page cache.
pub const PAGE: usize = 4096;

/// `mmap`; `addr` is a hint unless MAP_FIXED is among the flags.
///
/// # Safety
/// With MAP_FIXED the range must be the caller's to replace.
pub unsafe fn mmap(addr: *mut u8, len: usize, prot: u32, flags: u32, fd: Fd, offset: u64) -> Result<*mut u8> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        syscall(
            k::__NR_mmap,
            [addr as usize, len, prot as usize, flags as usize, fd as isize as usize, offset as usize],
        )
    }
    .map(|v| v as *mut u8)
}

/// New memory of this process, readable and writable, of whole pages, aligned to `align` bytes (a power of two).
pub fn map_anonymous(len: usize, align: usize) -> Result<*mut u8> {
    let (access, private) = (PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
    let len = len.next_multiple_of(PAGE);
    let reserved = len + align;
    // SAFETY: a new anonymous mapping replaces nothing.
    let start = unsafe { mmap(core::ptr::null_mut(), reserved, access, private, -1, 0) }?;
    let before = start.align_offset(align);
    let memory = start.wrapping_add(before);
    for (at, surplus) in [(start, before), (memory.wrapping_add(len), align - before)] {
        if surplus > 0 {
            // SAFETY: mapped above, and not handed out.
            let _ = unsafe { munmap(at, surplus) };
        }
    }
    Ok(memory)
}

/// `munmap`.
///
/// # Safety
/// The range must no longer be used.
pub unsafe fn munmap(addr: *mut u8, len: usize) -> Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe { syscall(k::__NR_munmap, [addr as usize, len, 0, 0, 0, 0]) }.map(drop)
}

/// `madvise`.
///
/// # Safety
/// The advice must not destroy data that is still needed.
pub unsafe fn madvise(addr: *mut u8, len: usize, advice: u32) -> Result<()> {
    // SAFETY: guaranteed by the caller.
    unsafe { syscall(k::__NR_madvise, [addr as usize, len, advice as usize, 0, 0, 0]) }.map(drop)
}

/// Whether `len` bytes from `addr` may be read. Yes if the Linux kernel does not allow the query (seccomp).
pub fn is_readable(addr: *const u8, len: usize) -> bool {
    // One byte of each page, fetched by the Linux kernel, which returns EFAULT where a load would crash.
    let mut first = addr as usize;
    let Some(end) = first.checked_add(len) else { return false };
    while first < end {
        let mut byte = 0u8;
        let (local, remote) = ([&raw mut byte as usize, 1], [first, 1]);
        let vectors = [local.as_ptr() as usize, remote.as_ptr() as usize];
        // SAFETY: both vectors and the byte live across the call; the Linux kernel validates the remote address.
        let got = unsafe { syscall(k::__NR_process_vm_readv, [getpid() as usize, vectors[0], 1, vectors[1], 1, 0]) };
        if got == Err(Errno::FAULT) {
            return false;
        }
        first = (first / PAGE + 1) * PAGE;
    }
    true
}

/// Stores bytes at an address of this process. EFAULT, where a store would crash; those before it may be stored.
///
/// # Safety
/// The bytes from `addr` on, as far as they may be written, must be memory that the caller may change.
pub unsafe fn store_checked(addr: *mut u8, bytes: &[u8]) -> Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let (local, remote) =
            ([bytes.as_ptr() as usize + done, bytes.len() - done], [addr as usize + done, bytes.len() - done]);
        let vectors = [local.as_ptr() as usize, remote.as_ptr() as usize];
        // SAFETY: both vectors and the bytes live across the call; the Linux kernel validates the remote address, whose
        // memory is the caller's.
        done += unsafe { syscall(k::__NR_process_vm_writev, [getpid() as usize, vectors[0], 1, vectors[1], 1, 0]) }?;
    }
    Ok(())
}
