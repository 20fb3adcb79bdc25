//! Shared read-only mappings of files, from which devices copy, and their page tables.

#![expect(unsafe_code, reason = "memory that a device copies from or into")]

use std::ops::Range;

use spinio_sys::linux;

/// A shared read-only mapping of a whole file.
#[derive(Debug)]
pub struct Mapping {
    /// Its first byte.
    pub ptr: *mut u8,
    /// Bytes, whole pages.
    pub len: usize,
}

// SAFETY: a read-only mapping; no reference into it is made, addresses go to the kernel and the driver.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reads absent pages of a range of the file, and fills its page tables, in the kernel and without a lock of the
    /// driver. Registration, which the driver does one range at a time, then finds them filled. It refuses pages that
    /// cannot be filled.
    pub fn prefault(&self, range: Range<u64>) {
        let page = linux::PAGE as u64;
        let (from, to) = (range.start / page * page, range.end.next_multiple_of(page).min(self.len as u64));
        if from < to {
            // SAFETY: reading advice on a live mapping destroys nothing.
            let _ = unsafe {
                linux::madvise(self.ptr.wrapping_add(from as usize), (to - from) as usize, linux::MADV_POPULATE_READ)
            };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: a mapping is dropped when no request uses it, and every pin on it was released before.
        let _ = unsafe { linux::munmap(self.ptr, self.len) };
    }
}
