//! The memory of a table: words that several threads, and with a file several processes, add to.

#![expect(unsafe_code, reason = "counters in shared memory")]

use core::ops::Deref;
use core::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

/// Words of zeros, private or shared through a file. Untouched pages cost nothing.
pub(super) struct SharedWords {
    start: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: atomic words may be used from any thread, and unmapping is not tied to one.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Words private to this process.
    pub(super) fn anonymous(count: usize) -> Result<SharedWords, Errno> {
        SharedWords::map(count, linux::MAP_PRIVATE | linux::MAP_ANONYMOUS, -1)
    }

    /// The first words of a file, which must be long enough, with disk space for the pages that will be touched.
    pub(super) fn from_file(count: usize, fd: Fd) -> Result<SharedWords, Errno> {
        SharedWords::map(count, linux::MAP_SHARED, fd)
    }

    fn map(count: usize, flags: u32, fd: Fd) -> Result<SharedWords, Errno> {
        let protection = linux::PROT_READ | linux::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
        let start = unsafe { linux::mmap(core::ptr::null_mut(), count * 8, protection, flags, fd, 0) }?;
        Ok(SharedWords { start: NonNull::new(start.cast()).ok_or(Errno::FAULT)?, count })
    }
}

impl Deref for SharedWords {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: page-aligned, `count` words long, mapped for as long as `self` lives, and every bit pattern is a
        // valid atomic word, even if another process writes there.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and no reference into it outlives `self`.
        let _ = unsafe { linux::munmap(self.start.as_ptr().cast(), self.count * 8) };
    }
}
