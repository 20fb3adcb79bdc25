//! Which parts of a file are in the page cache, and advice about it.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::files::Fd;
use super::memory::{MAP_SHARED, PAGE, PROT_READ, mmap, munmap};
use super::raw::syscall;
use super::types::{Advice, CacheStat};

type Result<T> = core::result::Result<T, Errno>;

/// `mincore`: one byte per page, bit 0 set when the page is resident.
///
/// Reliable only on files that the caller owns or may write: for other users
/// the Linux kernel reports every page as resident.
///
/// # Safety
/// `addr` must be the page-aligned start of a mapping of at least `out.len()` pages.
pub unsafe fn mincore(addr: *const u8, out: &mut [u8]) -> Result<()> {
    // SAFETY: `out` has a byte for each queried page.
    unsafe { syscall(k::__NR_mincore, [addr as usize, out.len() * PAGE, out.as_mut_ptr() as usize, 0, 0, 0]) }.map(drop)
}

/// The number of pages of a file's first `len` bytes in the page cache, by [`mincore`]: reliable for one's own files,
/// on any Linux kernel, and the query reads nothing in.
pub fn resident_pages(fd: Fd, len: u64) -> Result<u64> {
    const PAGES_PER_CALL: usize = 1 << 16;
    let pages = (len as usize).div_ceil(PAGE);
    if pages == 0 {
        return Ok(0);
    }
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let start = unsafe { mmap(core::ptr::null_mut(), pages * PAGE, PROT_READ, MAP_SHARED, fd, 0) }?;
    let mut out = vec![0u8; pages.min(PAGES_PER_CALL)];
    let (mut done, mut resident) = (0, Ok(0));
    while done < pages && resident.is_ok() {
        let part = &mut out[..(pages - done).min(PAGES_PER_CALL)];
        // SAFETY: as many pages are mapped from there on.
        let result = unsafe { mincore(start.wrapping_add(done * PAGE), part) };
        let found = part.iter().filter(|&&page| page & 1 != 0).count() as u64;
        resident = result.and_then(|()| resident.map(|before| before + found));
        done += part.len();
    }
    // SAFETY: mapped above, and not used elsewhere.
    unsafe { munmap(start, pages * PAGE) }?;
    resident
}

/// `cachestat` (Linux 6.5): the pages of a range in the page cache. EPERM without write permission for the file.
pub fn cachestat(fd: Fd, offset: u64, len: u64) -> Result<CacheStat> {
    const NR_CACHESTAT: u32 = 451;
    let range = [offset, len];
    let mut out = CacheStat::default();
    // SAFETY: `range` and `out` have the layouts of the kernel's structures and live across the call.
    unsafe { syscall(NR_CACHESTAT, [fd as usize, range.as_ptr() as usize, &raw mut out as usize, 0, 0, 0]) }?;
    Ok(out)
}

/// `fadvise64`; length 0 means to the end of the file.
pub fn fadvise(fd: Fd, offset: u64, len: u64, advice: Advice) -> Result<()> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_fadvise64, [fd as usize, offset as usize, len as usize, advice as usize, 0, 0]) }.map(drop)
}
