//! A table of counters in a file: its disk space and its header.

#![expect(unsafe_code, reason = "counters in shared memory")]

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Relaxed;

use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, SharedWords};

use super::layout::{FINGERPRINT, MAGIC, RING, TABLE_WORDS, header};

/// Sets the length of an empty file and allocates the disk space of what will be written: a write must not fail later.
pub(super) fn allocate_table(fd: Fd, trace: bool) -> Result<(), Errno> {
    linux::fallocate(fd, if trace { TABLE_WORDS } else { RING } as u64 * 8)?;
    linux::ftruncate(fd, TABLE_WORDS as u64 * 8)
}

/// The words of a table in a file of its length, with disk space for the pages that will be touched.
pub(super) fn map_table(fd: Fd) -> Result<SharedWords, Errno> {
    // SAFETY: the caller has the descriptor open. The file has this length, and programs that know it do not cut it.
    unsafe { SharedWords::map(BorrowedFd::borrow_raw(fd), TABLE_WORDS) }
}

/// Writes the header: magic, fingerprint, and this process as the owner unless the table already has one.
pub(super) fn write_header(words: &SharedWords) {
    let mut name = [0u8; 16];
    if let Ok(fd) = linux::open(c"/proc/self/comm", linux::O_RDONLY as i32, 0) {
        // SAFETY: fifteen bytes at most are read into a local of sixteen.
        let len = unsafe { linux::read(fd, name.as_mut_ptr(), 15) }.unwrap_or(0);
        let _ = linux::close(fd);
        let end = name[..len].iter().position(|b| *b == b'\n').unwrap_or(len);
        name[end..].fill(0);
    }
    words[header::FINGERPRINT].store(FINGERPRINT, Relaxed);
    words[header::MAGIC].store(MAGIC, Relaxed);
    if words[header::PID].compare_exchange(0, linux::getpid().into(), Relaxed, Relaxed).is_ok() {
        words[header::STARTED].store(linux::monotonic_ns(), Relaxed);
        words[header::STARTED_WALL].store(linux::realtime_ns(), Relaxed);
        for (i, bytes) in name.chunks_exact(8).enumerate() {
            words[header::NAME + i].store(u64::from_le_bytes(bytes.try_into().unwrap_or_default()), Relaxed);
        }
    }
}
