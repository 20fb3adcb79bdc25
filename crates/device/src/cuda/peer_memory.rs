//! Copies from chunks of other GPUs: the chunk is imported and mapped with access for this GPU, whose copy engine reads it
//! over NVLink or PCI.
//!
//! The program needs no context of the other GPU for it.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::os::fd::{AsRawFd, BorrowedFd};

use super::capture::RelaxedCapture;
use super::device::Cuda;
use crate::{
    Device, DeviceAddr, DeviceError, ErrorKind, PeerChunk, PeerError, PeerMemory, PeerPiece, SharedMemory, WaitMode,
};

impl Cuda {
    /// The number of the device with this UUID.
    fn ordinal_of(&self, uuid: [u8; 16]) -> Option<i32> {
        let count = self.driver.device_count().unwrap_or(0);
        let has_uuid = |ordinal: &i32| {
            let device = self.driver.device(*ordinal);
            device.and_then(|device| self.driver.device_uuid(device)) == Ok(uuid)
        };
        (0..count).find(has_uuid)
    }

    /// Whether this device can access the memory of another one of this process.
    fn check_access(&self, peer: [u8; 16]) -> Result<(), PeerError> {
        let ordinal = self.ordinal_of(peer).ok_or(PeerError::NoDevice)?;
        let can_access = self.driver.can_access_peer(self.ordinal, ordinal).unwrap_or(false);
        if can_access { Ok(()) } else { Err(PeerError::NoAccess) }
    }

    /// Maps allocations of another device for loads, side by side; copies pieces, whose offsets are in all of them; and
    /// unmaps them. The handles are alive.
    fn copy_allocations(&self, allocations: &[(u64, usize)], pieces: &[PeerPiece]) -> Result<(), PeerError> {
        let import = |call| move |e| PeerError::Import(self.driver_error(call, e));
        let len: usize = allocations.iter().map(|(_, len)| len).sum();
        let from = SharedMemory::reserve(self, len as u64).map_err(PeerError::Import)?;
        let mut mapped = Vec::with_capacity(allocations.len());
        let copied = (|| {
            let mut at = from.0;
            for (handle, len) in allocations {
                // SAFETY: reserved above, and the handle is alive and as long, as the driver verifies.
                unsafe { self.driver.map_allocation(at, *len, *handle) }.map_err(import("cuMemMap"))?;
                mapped.push((at, *len));
                at += *len as u64;
            }
            // One call for all: it takes longer than the others.
            // SAFETY: mapped above.
            let granted = unsafe { self.driver.set_access(from.0, len, self.ordinal, false) };
            granted.map_err(import("cuMemSetAccess"))?;
            let stream = self.acquire_stream().map_err(PeerError::Copy)?;
            let queued = pieces.iter().try_for_each(|PeerPiece { from: offset, to, len }| {
                // SAFETY: mapped until the stream was synchronized; `to` by the contract of the trait.
                unsafe { self.driver.copy_within(to.0, from.0 + offset, *len, Cuda::raw_stream(stream)) }
            });
            let queued = queued.map_err(|e| self.driver_error("cuMemcpyDtoDAsync", e));
            // Also after an error: nothing may use the addresses any more.
            let done = self.synchronize(stream, WaitMode::Block);
            self.release_stream(stream);
            queued.and(done).map_err(PeerError::Copy)
        })();
        for (at, len) in mapped {
            // SAFETY: mapped above; the stream that used it was synchronized.
            let _ = unsafe { self.driver.unmap_allocation(at, len) };
        }
        let _ = SharedMemory::free_reservation(self, from, len as u64);
        copied
    }

    fn release_all(&self, allocations: &[(u64, usize)]) {
        for (handle, _) in allocations {
            // SAFETY: imported or retained by the caller, and mapped nowhere any more.
            let _ = unsafe { self.driver.release_allocation(*handle) };
        }
    }
}

impl PeerMemory for Cuda {
    fn copy_from_peer(&self, peer: [u8; 16], chunk: BorrowedFd<'_>, len: u64, to: DeviceAddr) -> Result<(), PeerError> {
        let import = PeerError::Import;
        let _entered = self.enter().map_err(import)?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        self.check_access(peer)?;
        let too_long = DeviceError::new(ErrorKind::NoMemory, "chunk of another device");
        let len = usize::try_from(len).map_err(|_| import(too_long))?;
        let handle = self.driver.import_allocation(chunk.as_raw_fd());
        let handle = handle.map_err(|e| import(self.driver_error("cuMemImportFromShareableHandle", e)))?;
        let copied = self.copy_allocations(&[(handle, len)], &[PeerPiece { from: 0, to, len }]);
        self.release_all(&[(handle, len)]);
        copied
    }

    fn copy_from_chunks(&self, peer: [u8; 16], chunks: &[PeerChunk]) -> Result<(), PeerError> {
        let import = PeerError::Import;
        let _entered = self.enter().map_err(import)?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        self.check_access(peer)?;
        let (mut allocations, mut pieces, mut start) = (Vec::with_capacity(chunks.len()), Vec::new(), 0);
        let retained = chunks.iter().try_for_each(|chunk| {
            let handle = self.driver.retain_allocation(chunk.at.0);
            let handle = handle.map_err(|e| import(self.driver_error("cuMemRetainAllocationHandle", e)))?;
            allocations.push((handle, chunk.len as usize));
            for piece in &chunk.pieces {
                if !chunk.contains(piece) {
                    return Err(PeerError::Copy(DeviceError::new(ErrorKind::BadAddress, "copy from another device")));
                }
                pieces.push(PeerPiece { from: start + piece.from, ..*piece });
            }
            start += chunk.len;
            Ok(())
        });
        let copied = retained.and_then(|()| self.copy_allocations(&allocations, &pieces));
        self.release_all(&allocations);
        copied
    }
}
