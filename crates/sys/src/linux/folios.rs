//! Folios: the pieces of 4 KiB to 2 MiB in which the page cache keeps a file. Programs that write or read much at once get
//! large ones.
//!
//! No call sets their size. But MADV_COLD for some pages of a folio that only this process has mapped makes the Linux kernel
//! split it into single pages, which stay where they are (Linux 6.18). If a page of it is dirty or pinned it stays as it is.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::fs::File;
use std::os::unix::fs::FileExt;

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::files::Fd;
use super::memory::{MADV_POPULATE_READ, MAP_SHARED, PAGE, PROT_READ, madvise, mmap, munmap};

/// Splits the folios that have these pages of a file, in ascending order, as far as the Linux kernel does that. No byte
/// changes; pages that are not in the page cache are read.
pub fn split_folios(fd: Fd, pages: &[u64]) -> Result<(), Errno> {
    let (Some(first), Some(last)) = (pages.first(), pages.last()) else { return Ok(()) };
    let len = usize::try_from((last + 1).checked_sub(*first).ok_or(Errno::INVAL)?).map_err(|_| Errno::INVAL)?;
    let len = len.checked_mul(PAGE).ok_or(Errno::INVAL)?;
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let start = unsafe { mmap(core::ptr::null_mut(), len, PROT_READ, MAP_SHARED, fd, first * PAGE as u64) }?;
    for page in pages {
        let at = start.wrapping_add((page - first) as usize * PAGE);
        // SAFETY: a page of the mapping; both kinds of advice keep its bytes, and a page past the end of the file is EFAULT.
        let _ = unsafe { madvise(at, PAGE, MADV_POPULATE_READ).and_then(|()| madvise(at, PAGE, k::MADV_COLD)) };
    }
    // SAFETY: mapped above, and not used elsewhere.
    unsafe { munmap(start, len) }
}

/// Whether a page of a file is one of several of a folio; `None`: the Linux kernel tells root only. For tests.
#[doc(hidden)]
pub fn is_in_large_folio(fd: Fd, page: u64) -> Option<bool> {
    // Head or tail of a compound page.
    const COMPOUND: u64 = 3 << 15;
    const FRAME: u64 = (1 << 55) - 1;
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let at = unsafe { mmap(core::ptr::null_mut(), PAGE, PROT_READ, MAP_SHARED, fd, page * PAGE as u64) }.ok()?;
    // SAFETY: mapped above; the advice keeps its bytes.
    let there = unsafe { madvise(at, PAGE, MADV_POPULATE_READ) };
    let word = |path: &str, number: u64| {
        let mut word = [0; 8];
        File::open(path).ok()?.read_exact_at(&mut word, number * 8).ok()?;
        Some(u64::from_ne_bytes(word))
    };
    let frame =
        there.ok().and_then(|()| word("/proc/self/pagemap", at as u64 / PAGE as u64)).map(|entry| entry & FRAME);
    // SAFETY: mapped above, and not used elsewhere.
    let _ = unsafe { munmap(at, PAGE) };
    word("/proc/kpageflags", frame.filter(|frame| *frame > 0)?).map(|flags| flags & COMPOUND != 0)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn large_folio_is_split_and_keeps_its_bytes() {
        let path = format!("/var/tmp/spinio-folios-{}", std::process::id());
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let bytes: Vec<u8> = (0..1 << 20).map(|n: u32| (n % 251) as u8).collect();
        file.write_all_at(&bytes, 0).unwrap();
        file.sync_all().unwrap();
        let is_large = |page| is_in_large_folio(file.as_raw_fd(), page);
        if is_large(40) != Some(true) {
            eprintln!("skipped: no large folio here, or not root");
            return;
        }
        // The second is past the end.
        split_folios(file.as_raw_fd(), &[40, 300]).unwrap();
        assert_eq!([0, 40, 41, 255].map(is_large), [Some(false); 4]);
        let mut now = vec![0; bytes.len()];
        file.read_exact_at(&mut now, 0).unwrap();
        assert!(now == bytes);
        assert_eq!(
            (split_folios(file.as_raw_fd(), &[]), split_folios(file.as_raw_fd(), &[7, 3])),
            (Ok(()), Err(Errno::INVAL))
        );
    }
}
