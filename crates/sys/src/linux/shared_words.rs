//! Memory as atomic words: of a file that several processes map, or of this process.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::ops::Deref;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::AtomicU64;

use rustix::io::Errno;

use super::files::Fd;
use super::memory::{MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap};

/// A shared mapping of a file. Other processes may change the words at any time, which atomics allow.
#[derive(Debug)]
pub struct SharedWords {
    address: *const AtomicU64,
    words: usize,
}

// SAFETY: the memory consists of atomics and stays mapped as long as the value lives.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Words of zeros that are private to this process. Untouched pages cost nothing.
    pub fn anonymous(words: usize) -> Result<SharedWords, Errno> {
        // SAFETY: no file.
        unsafe { map_words(-1, words, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS) }
    }

    /// Maps `words` words from the beginning of a file.
    ///
    /// # Safety
    /// The file must have that length, and must never shrink while it is mapped (for a memfd: F_SEAL_SHRINK).
    pub unsafe fn map(file: BorrowedFd<'_>, words: usize) -> Result<SharedWords, Errno> {
        // SAFETY: the caller's promise.
        unsafe { map_words(file.as_raw_fd(), words, PROT_READ | PROT_WRITE, MAP_SHARED) }
    }
}

/// The same of a file that this process may only read.
#[derive(Debug)]
pub struct ReadOnlyWords(SharedWords);

impl ReadOnlyWords {
    /// Maps `words` words from the beginning of a memory file.
    ///
    /// # Safety
    /// As of [`SharedWords::map`]. Words are only loaded: a store to one of them ends the process by SIGSEGV.
    pub unsafe fn map(file: BorrowedFd<'_>, words: usize) -> Result<ReadOnlyWords, Errno> {
        // SAFETY: the caller's promise.
        unsafe { map_words(file.as_raw_fd(), words, PROT_READ, MAP_SHARED) }.map(ReadOnlyWords)
    }
}

impl Deref for ReadOnlyWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        &self.0
    }
}

/// # Safety
/// A file has that length, and never shrinks.
unsafe fn map_words(file: Fd, words: usize, protection: u32, flags: u32) -> Result<SharedWords, Errno> {
    let len = words.checked_mul(8).filter(|l| *l > 0).ok_or(Errno::INVAL)?;
    // SAFETY: the Linux kernel chooses the address.
    let at = unsafe { mmap(std::ptr::null_mut(), len, protection, flags, file, 0) }?;
    Ok(SharedWords { address: at.cast_const().cast(), words })
}

impl Deref for SharedWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: mapped until drop, page-aligned, and every bit pattern is a word.
        unsafe { std::slice::from_raw_parts(self.address, self.words) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: borrows of the memory have ended.
        let _ = unsafe { munmap(self.address.cast_mut().cast(), self.words * 8) };
    }
}
