//! The window: a memory file of two pages for each page of the map and a stage for releases, shared with the server.
//!
//! The server made it and sealed its size, so that it stays mapped whatever either side does. The server may change it
//! at any time; it is read by the device's copies and by volatile loads only.
//!
//! The stage is registered with the device once it is worth it ([`crate::registered_stages`]).

#![expect(unsafe_code, reason = "memory shared with another process")]

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::mm::{Advice, MapFlags, ProtFlags};
use spinio_device::PAGE_BYTES;
use spinio_pagecache::messages::STAGE;
use spinio_sys::{Errno, linux};

use crate::owned_fd::OwnedFd;
use crate::{Error, Result};

/// Pages of the stage that keep their memory: 1 MiB.
const KEPT: usize = 256;

/// The mapping.
#[derive(Debug)]
pub(crate) struct Window {
    start: *mut u8,
    pages: usize,
    /// The device knows the memory of the stage, which must stay.
    registered: AtomicBool,
}

// SAFETY: the pointer is to a shared mapping, which any thread may use; it is unmapped with the last reference.
unsafe impl Send for Window {}
// SAFETY: as above. Which thread uses which page is decided by the map's lock.
unsafe impl Sync for Window {}

impl Window {
    /// Maps the memory file for a map of `pages` pages.
    pub(crate) fn map(file: &OwnedFd, pages: usize) -> Result<Window> {
        let too_large = || Error::new(Errno::NOMEM, "The map is too large");
        let len = Window::total(pages).ok_or_else(too_large)?;
        let stat = rustix::fs::fstat(file).map_err(|e| Error::of(e, "query the window"))?;
        let seals = rustix::fs::fcntl_get_seals(file).map_err(|e| Error::of(e, "query the window"))?;
        if (stat.st_size as u64) < len as u64 || !seals.contains(rustix::fs::SealFlags::SHRINK) {
            return Err(Error::new(Errno::PROTO, "The GAIA server sent a window of the wrong size"));
        }
        // SAFETY: a fresh mapping at an address of the Linux kernel's choice; its file cannot shrink.
        let start = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(core::ptr::null_mut(), len, protection, MapFlags::SHARED | MapFlags::NORESERVE, file, 0)
        }
        .map_err(|e| Error::of(e, "map the window"))?;
        // SAFETY: the fresh mapping; a forked child has no maps.
        let _ = unsafe { rustix::mm::madvise(start, len, Advice::LinuxDontFork) };
        Ok(Window { start: start.cast(), pages, registered: AtomicBool::new(false) })
    }

    /// Bytes.
    fn total(pages: usize) -> Option<usize> {
        pages.checked_mul(2)?.checked_add(STAGE as usize)?.checked_mul(PAGE_BYTES)
    }

    /// The address of page `page` of the stage, `count` pages before its end or more.
    pub(crate) fn stage(&self, page: usize, count: usize) -> *mut u8 {
        assert!(page + count <= STAGE as usize);
        // SAFETY: inside the mapping.
        unsafe { self.start.add((2 * self.pages + page) * PAGE_BYTES) }
    }

    /// Whether the device knows the memory of the stage.
    pub(crate) fn is_registered(&self) -> bool {
        self.registered.load(Relaxed)
    }

    /// The device knows the memory of the stage from now on, which stays until the window is unmapped.
    pub(crate) fn set_registered(&self) {
        self.registered.store(true, Relaxed);
    }

    /// Frees the memory of the stage but for its first pages, if more than these were used.
    pub(crate) fn trim_stage(&self, used: usize) {
        if used > KEPT && !self.is_registered() {
            let rest = STAGE as usize - KEPT;
            // SAFETY: inside the mapping. A failure costs memory only.
            let _ =
                unsafe { rustix::mm::madvise(self.stage(KEPT, rest).cast(), rest * PAGE_BYTES, Advice::LinuxRemove) };
        }
    }

    /// The address of page `page` of the map.
    pub(crate) fn page(&self, page: usize) -> *mut u8 {
        assert!(page < self.pages);
        // SAFETY: inside the mapping.
        unsafe { self.start.add(page * PAGE_BYTES) }
    }

    /// Copies page `page` of the map.
    pub(crate) fn read(&self, page: usize) -> [u8; PAGE_BYTES] {
        self.copy(self.page(page))
    }

    /// Copies the base of page `page` of the map.
    pub(crate) fn read_base(&self, page: usize) -> [u8; PAGE_BYTES] {
        assert!(page < self.pages);
        // SAFETY: the second half of the mapping.
        self.copy(unsafe { self.start.add((self.pages + page) * PAGE_BYTES) })
    }

    /// Copies page `page` of the stage.
    pub(crate) fn read_staged(&self, page: usize) -> [u8; PAGE_BYTES] {
        self.copy(self.stage(page, 1))
    }

    fn copy(&self, from: *const u8) -> [u8; PAGE_BYTES] {
        let mut page = [0; PAGE_BYTES];
        for (at, word) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            // SAFETY: inside a mapped page, which starts at a page's boundary.
            *word = unsafe { from.cast::<u64>().add(at).read_volatile() }.to_ne_bytes();
        }
        page
    }

    /// Reads up to `len` bytes of a file to `at` bytes after the begin of the stage.
    pub(crate) fn read_file(
        &self,
        file: &OwnedFd,
        at: usize,
        len: usize,
        offset: u64,
    ) -> core::result::Result<usize, Errno> {
        // SAFETY: inside the stage, which only the Linux kernel writes.
        unsafe { linux::pread(file.get(), self.stage_byte(at, len), len, offset) }
    }

    /// Sets `len` bytes to zero, `at` bytes after the begin of the stage.
    pub(crate) fn zero_stage(&self, at: usize, len: usize) {
        // SAFETY: inside the stage.
        unsafe { core::ptr::write_bytes(self.stage_byte(at, len), 0, len) };
    }

    fn stage_byte(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at + len <= STAGE as usize * PAGE_BYTES);
        self.stage(0, STAGE as usize).wrapping_add(at)
    }

    /// Sets `len` bytes to zero, from `offset` of page `page` of the map.
    pub(crate) fn zero(&self, page: usize, offset: usize, len: usize) {
        assert!(page * PAGE_BYTES + offset + len <= self.pages * PAGE_BYTES);
        // SAFETY: inside the mapping's first half.
        unsafe { core::ptr::write_bytes(self.start.add(page * PAGE_BYTES + offset), 0, len) };
    }

    /// Frees the memory of pages of the map, of their bases too.
    pub(crate) fn free(&self, first: usize, count: usize) {
        assert!(first + count <= self.pages);
        for half in [0, self.pages] {
            // SAFETY: inside the mapping. A failure costs memory only.
            let _ = unsafe {
                let at = self.start.add((half + first) * PAGE_BYTES);
                rustix::mm::madvise(at.cast(), count * PAGE_BYTES, Advice::LinuxRemove)
            };
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: no copy uses it any more: each is waited for before the map's lock is released.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), Window::total(self.pages).unwrap_or(0)) };
    }
}
