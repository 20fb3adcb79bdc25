//! Memory of counters that this process writes and clients read (`spinio_pagecache::change_counters`).

#![expect(unsafe_code, reason = "mapping a file that cannot shrink")]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use spinio_sys::linux::SharedWords;

/// A memory file: other processes that get its descriptor can neither write nor resize it.
#[derive(Debug)]
pub(crate) struct SharedCounters {
    file: OwnedFd,
    words: SharedWords,
}

impl SharedCounters {
    /// Makes it, of zeros.
    pub(crate) fn new(words: usize) -> Result<SharedCounters, Errno> {
        let file = rustix::fs::memfd_create("spinio-gaia-counters", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, words as u64 * 8)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        // SAFETY: the file has this length, and is sealed against shrinking.
        let words = unsafe { SharedWords::map(file.as_fd(), words) }?;
        // This mapping stays writable.
        rustix::fs::fcntl_add_seals(&file, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
        Ok(SharedCounters { file, words })
    }

    pub(crate) fn words(&self) -> &[AtomicU64] {
        &self.words
    }
}

impl AsFd for SharedCounters {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_who_get_the_descriptor_cannot_write() {
        let counters = SharedCounters::new(2).unwrap();
        let got = counters.as_fd().try_clone_to_owned().unwrap();
        assert_eq!(rustix::io::pwrite(&got, &[1; 8], 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&got, 0), Err(Errno::PERM));
        // SAFETY: the file cannot shrink.
        assert_eq!(unsafe { SharedWords::map(got.as_fd(), 2) }.map(drop), Err(Errno::PERM));
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&got));
        let again = rustix::fs::open(path, rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).unwrap();
        assert_eq!(rustix::io::pwrite(&again, &[1; 8], 0), Err(Errno::PERM));
    }
}
