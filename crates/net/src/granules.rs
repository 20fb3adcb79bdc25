//! The granules of a net: memory files that each one CPU program may map too, one for each connection over shared memory.
//!
//! ```text
//!   memfd 0, 1, 2 ... ── mapped side by side, registered with the device at once ──> kernels
//!     └ sealed: its length stays ── SCM_RIGHTS ──> one program
//! ```
//!
//! They are made when the net is opened and given back when it is closed, as the rest of its memory. A net without them (no
//! descriptors left, the device registers no memory) works: programs stay with Linux.

#![expect(unsafe_code, reason = "memory that GPU kernels and other processes access at the same time")]

use std::sync::atomic::AtomicU64;

use spinio_device::SharedMemory;
use spinio_ring::granule;
use spinio_sys::Errno;
use spinio_sys::linux::{self, MAP_ANONYMOUS, MAP_FIXED, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_READ, PROT_WRITE};

use crate::socket_fd::SocketFd;

/// The memory of all.
pub(crate) struct Granules {
    start: *mut u8,
    granule_bytes: usize,
    count: u32,
    /// Of the first one, as kernels see it.
    device_address: u64,
}

// SAFETY: the memory stays mapped until `free`, and all accesses of Rust code are atomic.
unsafe impl Send for Granules {}
// SAFETY: as above.
unsafe impl Sync for Granules {}

impl Granules {
    /// Files for at most `count`, which the proxy duplicates; and why there are not as many.
    pub(crate) fn files(count: u32, ring_bytes: u64) -> (Vec<SocketFd>, Option<Errno>) {
        let make = || linux::sized_memfd(c"spinio-net", granule::bytes(ring_bytes)).map(SocketFd);
        let mut failed = None;
        let made = (0..count).map_while(|_| make().map_err(|errno| failed = Some(errno)).ok()).collect();
        (made, failed)
    }

    /// The memory of these files. None: there is none.
    pub(crate) fn new(device: &'static dyn SharedMemory, files: &[SocketFd], ring_bytes: u64) -> Option<Granules> {
        let granule_bytes = granule::bytes(ring_bytes) as usize;
        let bytes = files.len() * granule_bytes;
        if bytes == 0 {
            return None;
        }
        // SAFETY: the Linux kernel chooses the address.
        let start =
            unsafe { linux::mmap(core::ptr::null_mut(), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) }.ok()?;
        let mut granules = Granules { start, granule_bytes, count: files.len() as u32, device_address: 0 };
        for (file, number) in files.iter().zip(0..) {
            let protection = PROT_READ | PROT_WRITE;
            // SAFETY: inside the reservation just made.
            let at = unsafe { start.add(number * granule_bytes) };
            // SAFETY: as above.
            if unsafe { linux::mmap(at, granule_bytes, protection, MAP_SHARED | MAP_FIXED, file.0, 0) }.is_err() {
                granules.unmap();
                return None;
            }
        }
        // A forked child would keep the memory, and see the bytes of later connections.
        // SAFETY: it destroys nothing.
        let _ = unsafe { linux::madvise(start, bytes, linux::MADV_DONTFORK) };
        // SAFETY: it stays mapped, and its files cannot shrink.
        if unsafe { device.register_host(start, bytes) }.is_err() {
            granules.unmap();
            return None;
        }
        match device.device_ptr(start) {
            Ok(address) => granules.device_address = address,
            Err(_) => {
                granules.free(device);
                return None;
            }
        }
        Some(granules)
    }

    /// As kernels see it.
    pub(crate) fn device_address(&self, number: u32) -> u64 {
        self.device_address + u64::from(number) * self.granule_bytes as u64
    }

    /// The words of both ends.
    pub(crate) fn words(&self, number: u32) -> &[AtomicU64] {
        assert!(number < self.count);
        // SAFETY: mapped, aligned to a page, and all accesses of Rust code are atomic.
        unsafe {
            let at = self.start.add(number as usize * self.granule_bytes);
            core::slice::from_raw_parts(at.cast::<AtomicU64>(), granule::WORDS)
        }
    }

    /// Gives it back; it stays mapped if the device still has it.
    pub(crate) fn free(&self, device: &'static dyn SharedMemory) {
        if device.unregister_host(self.start) {
            self.unmap();
        }
    }

    fn unmap(&self) {
        // SAFETY: the mapping of `new`, which nothing uses any more.
        let _ = unsafe { linux::munmap(self.start, self.count as usize * self.granule_bytes) };
    }
}
