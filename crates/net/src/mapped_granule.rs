//! A granule of another net, as a process maps it that was offered one: a program, or a net whose kernel connects.

#![expect(unsafe_code, reason = "memory that GPU kernels and other processes access at the same time")]

use std::sync::atomic::AtomicU64;

use spinio_device::SharedMemory;
use spinio_ring::granule;
use spinio_sys::linux::{self, Fd, MAP_SHARED, PROT_READ, PROT_WRITE};

/// Logarithms of the sizes that rings have.
pub(crate) const SIZES: std::ops::RangeInclusive<u8> = 12..=22;

/// The mapping, which a child of fork does not have.
#[derive(Debug)]
pub(crate) struct MappedGranule {
    start: *mut u8,
    bytes: usize,
    size: u64,
    pid: u32,
}

// SAFETY: the memory stays mapped as long as this lives; words are atomics, and rings are used under a lock.
unsafe impl Send for MappedGranule {}
// SAFETY: as above.
unsafe impl Sync for MappedGranule {}

impl MappedGranule {
    /// Maps it. None: the file is none with rings of this size, or could be cut while it is mapped.
    pub(crate) fn map(file: Fd, size_log2: u8) -> Option<MappedGranule> {
        if !SIZES.contains(&size_log2) || !linux::cannot_shrink(file) {
            return None;
        }
        let size = 1 << size_log2;
        let bytes = granule::bytes(size);
        if linux::fstat(file).ok()?.size < bytes {
            return None;
        }
        let (bytes, protection) = (bytes as usize, PROT_READ | PROT_WRITE);
        // SAFETY: the Linux kernel chooses the address.
        let start = unsafe { linux::mmap(core::ptr::null_mut(), bytes, protection, MAP_SHARED, file, 0) }.ok()?;
        // SAFETY: it destroys nothing.
        let _ = unsafe { linux::madvise(start, bytes, linux::MADV_DONTFORK) };
        Some(MappedGranule { start, bytes, size, pid: linux::getpid() })
    }

    /// Bytes of each ring.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of the whole.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The words of both ends.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped, aligned to a page; all accesses of this process are atomic.
        unsafe { core::slice::from_raw_parts(self.start.cast::<AtomicU64>(), granule::WORDS) }
    }

    /// A ring: that to the end that has connected, or that from it.
    pub(crate) fn ring(&self, to_first: bool) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.start.add(granule::ring(self.size, to_first) as usize) }
    }

    /// Registers it with a device. The caller keeps it until it is unregistered.
    pub(crate) fn register(&self, device: &dyn SharedMemory) -> bool {
        // SAFETY: it stays mapped until it is unregistered, and its file cannot shrink.
        unsafe { device.register_host(self.start, self.bytes) }.is_ok()
    }

    /// Where kernels see it, once it is registered.
    pub(crate) fn device_address(&self, device: &dyn SharedMemory) -> Option<u64> {
        device.device_ptr(self.start).ok()
    }

    /// Takes that back; false if the device may still use it.
    pub(crate) fn unregister(&self, device: &dyn SharedMemory) -> bool {
        device.unregister_host(self.start)
    }
}

impl Drop for MappedGranule {
    fn drop(&mut self) {
        if linux::getpid() == self.pid {
            // SAFETY: the mapping of `map`, which nothing uses any more.
            let _ = unsafe { linux::munmap(self.start, self.bytes) };
        }
    }
}
