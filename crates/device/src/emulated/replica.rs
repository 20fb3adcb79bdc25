//! Replicas of file pages on the emulated device: a scan that stands for the GPU kernel.
//!
//! The scan reads the pages when the stream reaches it, through the engine's view of the memory.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::ffi::c_void;

use super::Emulated;
use super::engine::{Kernel, Operation};
use super::memory::Direction;
use crate::fingerprint::{Fingerprint, PAGE_BYTES};
use crate::{Device, DeviceAddr, DeviceError, ErrorKind, GatherEntry, Piece, ReplicaMemory, StreamId};

struct Scan {
    pages: *const [u8; PAGE_BYTES],
    count: usize,
    out: *mut Fingerprint,
}

impl ReplicaMemory for Emulated {
    fn alloc_replica(&self, len: u64) -> Result<DeviceAddr, DeviceError> {
        if !len.is_multiple_of(PAGE_BYTES as u64) {
            return Err(DeviceError::new(ErrorKind::Unsupported, "replica of a part of a page"));
        }
        let len = usize::try_from(len).map_err(|_| DeviceError::new(ErrorKind::NoMemory, "replica"))?;
        self.alloc(len, false)
    }

    fn free_replica(&self, addr: DeviceAddr) -> Result<(), DeviceError> {
        self.free(addr)
    }

    fn scan_gap(&self) -> u64 {
        8
    }

    unsafe fn fingerprint_pages(
        &self,
        stream: StreamId,
        addr: DeviceAddr,
        count: usize,
        slots: DeviceAddr,
        out: *mut Fingerprint,
    ) -> Result<(), DeviceError> {
        // What a GPU would use must be there.
        let room = count.saturating_mul(size_of::<Fingerprint>());
        self.memory.engine_addr(slots, room, Direction::Store, "scan of pages")?;
        // SAFETY: guaranteed by the caller; there is no difference.
        unsafe { self.fingerprint_pages_beside_stops(stream, addr, count, out) }
    }

    unsafe fn copy_pieces(
        &self,
        stream: StreamId,
        into_device: bool,
        pieces: &[Piece],
        list: *mut GatherEntry,
    ) -> Result<(), DeviceError> {
        if into_device {
            // SAFETY: guaranteed by the caller.
            unsafe { Piece::list(self, true, pieces, list) }?;
            // SAFETY: as above.
            return unsafe { self.gather(stream, list, pieces.len()) };
        }
        // The gather of this device stores to device memory only.
        let copy = |piece: &Piece| {
            // SAFETY: as above.
            unsafe { self.copy_out(stream, piece.host, piece.device, piece.len) }
        };
        pieces.iter().try_for_each(copy)
    }

    unsafe fn fingerprint_pages_beside_stops(
        &self,
        stream: StreamId,
        addr: DeviceAddr,
        count: usize,
        out: *mut Fingerprint,
    ) -> Result<(), DeviceError> {
        self.check()?;
        let outside = DeviceError::new(ErrorKind::BadAddress, "scan of pages");
        let len = count.checked_mul(PAGE_BYTES).ok_or(outside)?;
        let pages = self.memory.engine_addr(addr, len, Direction::Load, "scan of pages")? as *const [u8; PAGE_BYTES];
        let argument = Box::into_raw(Box::new(Scan { pages, count, out }));
        let kernel = Kernel { function: scan, argument: argument as u64, maps_memory: false };
        let submitted = self.engine.submit(stream.0, Operation::Kernel(kernel));
        if submitted.is_err() {
            // SAFETY: made above, and the engine did not take it.
            drop(unsafe { Box::from_raw(argument) });
        }
        submitted
    }
}

/// # Safety
/// For the engine, once per submitted [`Scan`].
unsafe extern "C" fn scan(argument: *mut c_void) {
    // SAFETY: made by `Box::into_raw` for this call alone.
    let scan = unsafe { Box::from_raw(argument.cast::<Scan>()) };
    for i in 0..scan.count {
        let mut fingerprint = Fingerprint::default();
        for word in 0..PAGE_BYTES / 8 {
            // SAFETY: the pages stay allocated until the stream is synchronized, and their view is mapped forever. A
            // copy or kernel of another stream may store there meanwhile, which volatile loads of words tolerate.
            let value = unsafe { scan.pages.add(i).cast::<u64>().add(word).read_volatile() };
            fingerprint.add(word as u64, value);
        }
        // SAFETY: the caller guarantees room for `count` fingerprints, which nothing else uses meanwhile.
        unsafe { scan.out.add(i).write(fingerprint) };
    }
}
