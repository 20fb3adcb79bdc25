//! A pinned file's pages, registered with one device.
//!
//! ```text
//!   the whole file, mapped     ├───── chunk ─────┼───── chunk ─────┼── rest ──┤      one pin each
//!
//!   queue_copy    DMA out of the pins, across chunks
//!   device_ptrs   the device address of each chunk, for a gather kernel
//!   contiguous    the address of a range for the program's own GPU kernels, if its chunks have consecutive addresses
//! ```

#![expect(unsafe_code, reason = "registered mappings")]

use std::sync::Arc;

use spinio_device::{Device, DeviceAddr, DeviceError, ErrorKind, Pin, StreamId};
use spinio_files::{FileState, Files};
use spinio_sys::linux;
use spinio_transfer::Mapping;

use crate::error::PinError;

/// Bytes that are registered at once.
const CHUNK: u64 = 128 << 20;

/// A pinned file's pages, registered with one device.
pub struct PinnedPages {
    /// The device.
    pub device: &'static dyn Device,
    /// Dropped, and so unmapped, after the pins were unpinned: see [`PinnedPages::unpin`].
    mapping: Arc<Mapping>,
    pins: Vec<Pin>,
    /// The device address of each chunk, for a gather kernel; empty if the device has no such addresses.
    pub device_ptrs: Vec<u64>,
    /// Bytes of a chunk: a power of two.
    pub chunk: u64,
}

// SAFETY: addresses and numbers; any thread may use a pin, and the thread that unpins has sole access.
unsafe impl Send for PinnedPages {}
// SAFETY: as above.
unsafe impl Sync for PinnedPages {}

impl PinnedPages {
    /// Maps the file and registers all of it.
    pub(crate) fn register(
        files: &Files,
        file: &Arc<FileState>,
        size: u64,
        device: &'static dyn Device,
    ) -> Result<PinnedPages, PinError> {
        let (sys, file, len, key) = (files.sys(), Arc::clone(file), size as usize, file.storage);
        let len = len.next_multiple_of(linux::PAGE);
        let mapped = files.shadow_workers().and_then(|workers| {
            workers.for_key(key).run_blocking(move || sys.map(file.cached.get(), len).map(|ptr| ptr as usize))
        });
        let ptr = mapped.ok_or(PinError::NoWorkers)?.map_err(PinError::NotMapped)? as *mut u8;
        let mapping = Arc::new(Mapping { ptr, len });
        // SAFETY: advice on a new mapping of this function, which a forked child does not use.
        let _ = unsafe { linux::madvise(ptr, len, linux::MADV_DONTFORK) };
        let chunk = 1u64 << CHUNK.min(device.capabilities().max_pin).max(linux::PAGE as u64).ilog2();
        let mut pages = PinnedPages { device, mapping, pins: Vec::new(), device_ptrs: Vec::new(), chunk };
        match pages.pin_all(size) {
            Ok(()) => Ok(pages),
            Err(refused) => {
                pages.unpin();
                Err(refused)
            }
        }
    }

    /// Bytes that are registered.
    pub(crate) fn bytes(&self) -> u64 {
        self.pins.iter().map(|p| p.len as u64).sum()
    }

    /// Unpins, and then unmaps. For a thread that may call the device.
    pub(crate) fn unpin(self) {
        self.pins.into_iter().for_each(|pin| self.device.unpin(pin));
        drop(self.mapping);
    }

    /// Registers the whole file.
    fn pin_all(&mut self, size: u64) -> Result<(), PinError> {
        let mut at = 0;
        while at < size {
            let len = (size - at).min(self.chunk) as usize;
            let ptr = self.mapping.ptr.wrapping_add(at as usize);
            self.mapping.prefault(at..at + len as u64);
            // SAFETY: the mapping lives until the pins are unpinned.
            let pin = unsafe { self.device.pin(ptr, len) }.map_err(|e| match e.kind {
                ErrorKind::Unsupported => PinError::NoDevice,
                _ => PinError::PinRefused,
            })?;
            if let Ok(ptr) = self.device.pin_device_ptr(&pin) {
                self.device_ptrs.push(ptr);
            }
            self.pins.push(pin);
            at += len as u64;
        }
        if self.device_ptrs.len() < self.pins.len() {
            self.device_ptrs.clear();
        }
        Ok(())
    }

    /// Queues the copies of a range of the file.
    pub(crate) fn queue_copy(
        &self,
        stream: StreamId,
        to: DeviceAddr,
        offset: u64,
        len: u64,
    ) -> Result<(), DeviceError> {
        let mut done = 0;
        while done < len {
            let at = offset + done;
            let in_chunk = at % self.chunk;
            let part = (self.chunk - in_chunk).min(len - done);
            let pin = &self.pins[(at / self.chunk) as usize];
            // SAFETY: the pins stay until the last use ends, and a use waits for its copies.
            unsafe { self.device.copy_pinned(stream, to.offset(done), pin, in_chunk as usize, part as usize) }?;
            done += part;
        }
        Ok(())
    }

    /// The address of a range for GPU kernels, if its chunks have consecutive addresses.
    pub(crate) fn contiguous(&self, offset: u64, len: u64) -> Option<u64> {
        let (first, last) = ((offset / self.chunk) as usize, ((offset + len - 1) / self.chunk) as usize);
        let mut at = self.pins[first..=last].iter().map(|pin| self.device.map_pin(pin).ok());
        let start = at.next()??;
        for (n, next) in at.enumerate() {
            if next? != start + (n as u64 + 1) * self.chunk {
                return None;
            }
        }
        debug_assert!(self.chunk.is_multiple_of(linux::PAGE as u64));
        Some(start + offset % self.chunk)
    }
}
