//! Files of chosen shape and residency.

#![expect(unsafe_code, reason = "C calls of tests")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::Rng;

/// The unit of the page cache.
pub const PAGE: u64 = 4096;

/// The byte at an offset of a test file, for a version of it.
pub fn byte(offset: u64, version: u8) -> u8 {
    let mixed = (offset ^ (offset >> 9)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56;
    (mixed as u8).wrapping_add(version)
}

/// The bytes at a range.
pub fn bytes(offset: u64, len: usize, version: u8) -> Vec<u8> {
    (offset..offset + len as u64).map(|at| byte(at, version)).collect()
}

/// Creates or truncates a file, open for reading and writing.
pub fn create(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).expect("a new file")
}

/// A file of `len` bytes of version 0, all written.
pub fn create_filled(path: &Path, len: u64) -> File {
    let file = create(path);
    let mut at = 0;
    while at < len {
        let part = bytes(at, (len - at).min(1 << 20) as usize, 0);
        file.write_all_at(&part, at).expect("write");
        at += part.len() as u64;
    }
    file
}

/// The same, of which no page is cached. `None`, with a message, if its file system does not evict pages.
pub fn create_evicted(path: &Path, len: u64) -> Option<File> {
    let file = create_filled(path, len);
    evict(&file);
    if cached_pages(&file).is_some_and(|pages| pages > 0) {
        eprintln!("skipped: this file system does not evict pages");
        return None;
    }
    Some(file)
}

/// A file of `len` bytes made of data, holes and (where the file system has them) unwritten extents.
pub fn create_random_layout(path: &Path, len: u64, rng: &mut Rng) -> File {
    let file = create(path);
    file.set_len(len).expect("length");
    let mut at = 0;
    while at < len {
        let part = (1 + rng.near_page_edge(len / 3 + 1)).min(len - at);
        match rng.below(4) {
            0 => {}
            1 => drop(allocate(&file, at, part)),
            _ => file.write_all_at(&bytes(at, part as usize, 0), at).expect("write"),
        }
        at += part;
    }
    file
}

/// `fallocate`: space, but no data.
pub fn allocate(file: &File, at: u64, len: u64) -> io::Result<()> {
    // SAFETY: no memory is involved.
    let ret = unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, at as i64, len as i64) };
    if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Punches a hole.
pub fn punch_hole(file: &File, at: u64, len: u64) -> io::Result<()> {
    let mode = libc::FALLOC_FL_KEEP_SIZE | libc::FALLOC_FL_PUNCH_HOLE;
    // SAFETY: no memory is involved.
    let ret = unsafe { libc::fallocate(file.as_raw_fd(), mode, at as i64, len as i64) };
    if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// `posix_fadvise`.
pub fn advise(file: &File, at: u64, len: u64, advice: i32) {
    // SAFETY: no memory is involved.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), at as i64, len as i64, advice) };
}

/// Writes everything to storage, and drops all pages that Linux can drop.
pub fn evict(file: &File) {
    file.sync_all().expect("sync");
    // Linux skips pages that are being read ahead: they are unlocked soon, but for those of a slow disk.
    for _ in 0..100 {
        advise(file, 0, 0, libc::POSIX_FADV_DONTNEED);
        if !spinio_sys::linux::cachestat(file.as_raw_fd(), 0, 0).is_ok_and(|pages| pages.cached > 0) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

/// Reads pages into the cache, without read-ahead if Linux follows the advice. Advice applies to the open file
/// description, so the file is opened again.
pub fn load_pages(path: &Path, pages: impl IntoIterator<Item = u64>) {
    let file = File::open(path).expect("open");
    advise(&file, 0, 0, libc::POSIX_FADV_RANDOM);
    let mut bytes = vec![0; 64 * PAGE as usize];
    let mut pages = pages.into_iter().peekable();
    while let Some(first) = pages.next() {
        // A run at a time.
        let mut run = 1;
        while run < 64 && pages.next_if_eq(&(first + run)).is_some() {
            run += 1;
        }
        let _ = file.read_at(&mut bytes[..(run * PAGE) as usize], first * PAGE);
    }
}

/// Sets a random residency: runs of pages cached, absent and dirty.
pub fn randomize_residency(path: &Path, file: &File, rng: &mut Rng) {
    let pages = file.metadata().expect("metadata").len().div_ceil(PAGE);
    match rng.below(5) {
        0 => evict(file),
        1 => load_pages(path, 0..pages),
        _ => {
            evict(file);
            let mut at = 0;
            while at < pages {
                let run = 1 + rng.below(1 + rng.clone().below(pages / 2 + 1));
                let range = at..(at + run).min(pages);
                match rng.below(3) {
                    0 => {}
                    1 => load_pages(path, range.clone()),
                    _ => dirty(file, range.clone()),
                }
                at = range.end;
            }
        }
    }
}

/// Rewrites a byte of each page with its current value.
fn dirty(file: &File, pages: std::ops::Range<u64>) {
    for page in pages {
        let mut one = [0u8];
        if file.read_at(&mut one, page * PAGE).is_ok_and(|n| n == 1) {
            file.write_all_at(&one, page * PAGE).expect("write");
        }
    }
}

/// How many pages of a file are in the cache, if `cachestat` works.
pub fn cached_pages(file: &File) -> Option<u64> {
    spinio_sys::linux::cachestat(file.as_raw_fd(), 0, 0).ok().map(|c| c.cached)
}

/// Pages that no test drops. While they are cached, the machine does not evict pages by itself, for lack of memory or
/// on request of another process.
#[derive(Debug)]
pub struct EvictionDetector(File);

impl EvictionDetector {
    const LEN: u64 = 1 << 20;

    /// Reads its pages now: pages read later are evicted later.
    pub fn new(path: &Path) -> EvictionDetector {
        let file = create_filled(path, EvictionDetector::LEN);
        file.sync_all().expect("sync");
        load_pages(path, 0..EvictionDetector::LEN / PAGE);
        EvictionDetector(file)
    }

    /// Whether pages were evicted; prints that.
    pub fn pages_were_evicted(&self) -> bool {
        let remaining = cached_pages(&self.0);
        let evicted = remaining.is_some_and(|pages| pages < EvictionDetector::LEN / PAGE);
        if evicted {
            println!(
                "skipped: this machine drops pages of the page cache by itself: {remaining:?} of the detector's pages are left"
            );
        }
        evicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_pages_sets_residency() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let file = create_filled(&path, 64 * PAGE);
        evict(&file);
        if cached_pages(&file) != Some(0) {
            println!("skipped: this file system keeps its pages");
            return;
        }
        load_pages(&path, [3, 4, 60]);
        assert_eq!(cached_pages(&file), Some(3));
    }

    #[test]
    fn detector_reports_eviction() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let detector = EvictionDetector::new(&path);
        evict(&detector.0);
        let left = cached_pages(&detector.0);
        assert_eq!(detector.pages_were_evicted(), left.is_some_and(|pages| pages < EvictionDetector::LEN / PAGE));
    }

    #[test]
    fn random_layout_has_expected_bytes() {
        let directory = tempfile::tempdir().unwrap();
        let mut rng = Rng::new(1);
        for len in [1, 4096, 100_000] {
            let file = create_random_layout(&directory.path().join("file"), len, &mut rng);
            let mut seen = vec![1; len as usize + 1];
            assert_eq!(file.read_at(&mut seen, 0).unwrap() as u64, len);
            let expected = seen[..len as usize].iter().enumerate().all(|(at, &b)| b == 0 || b == byte(at as u64, 0));
            assert!(expected);
        }
    }
}
