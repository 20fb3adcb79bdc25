//! Copies from chunks of other GPUs, whose memory this GPU's copy engine loads over NVLink or PCI.
//!
//! Chunks of another process are imported and mapped for the time of their copy, and the program needs no context of the other
//! GPU for it. A chunk that this process has mapped for the other GPU gets access for this one where it is mapped, and keeps
//! it until it is unmapped, so that further copies are one call for each piece.
//!
//! The access is for loads and stores, as that of memory after `cudaDeviceEnablePeerAccess`: both maps are of one process.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::os::fd::AsRawFd;

use super::capture::RelaxedCapture;
use super::device::Cuda;
use crate::peer_memory::{NextChunks, copy_groups, copy_mapped};
use crate::{
    DeviceAddr, DeviceError, ErrorKind, PeerChunk, PeerChunks, PeerError, PeerGroup, PeerMemory, PeerPiece,
    SharedMemory, StreamId,
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

    /// Imports chunks and maps them side by side for loads.
    fn import_chunks(&self, chunks: &[PeerChunk<'_>]) -> Result<ImportedChunks<'_>, PeerError> {
        let failed = |call| move |e| PeerError::Import(self.driver_error(call, e));
        let len: u64 = chunks.iter().map(|chunk| chunk.len).sum();
        let at = SharedMemory::reserve(self, len).map_err(PeerError::Import)?;
        let mut imported = ImportedChunks { cuda: self, at, len, mapped: 0 };
        for chunk in chunks {
            let handle = self.driver.import_allocation(chunk.fd.as_raw_fd());
            let handle = handle.map_err(failed("cuMemImportFromShareableHandle"))?;
            // SAFETY: reserved above, and the handle is alive and as long, as the driver verifies.
            let mapped =
                unsafe { self.driver.map_allocation(at.0 + imported.mapped as u64, chunk.len as usize, handle) };
            // The mapping keeps the memory.
            // SAFETY: imported above, and not used again.
            let _ = unsafe { self.driver.release_allocation(handle) };
            mapped.map_err(failed("cuMemMap"))?;
            imported.mapped += chunk.len as usize;
        }
        // SAFETY: mapped above.
        let granted = unsafe { self.driver.set_access(at.0, imported.mapped, self.ordinal, false) };
        granted.map_err(failed("cuMemSetAccess"))?;
        Ok(imported)
    }

    /// Queues a copy. What it is from and to must stay mapped until it is made.
    fn copy_piece(&self, stream: StreamId, PeerPiece { from, to, len }: &PeerPiece) -> Result<(), DeviceError> {
        // SAFETY: mapped until the stream was synchronized, by the contract of the callers.
        let queued = unsafe { self.driver.copy_within(to.0, from.0, *len, Cuda::raw_stream(stream)) };
        queued.map_err(|e| self.driver_error("cuMemcpyDtoDAsync", e))
    }
}

/// Chunks of another device, mapped side by side until this is dropped.
struct ImportedChunks<'a> {
    cuda: &'a Cuda,
    at: DeviceAddr,
    /// Of the reservation.
    len: u64,
    mapped: usize,
}

impl Drop for ImportedChunks<'_> {
    fn drop(&mut self) {
        if self.mapped > 0 {
            // SAFETY: mapped by `import_chunks`; the stream that used it was synchronized.
            let _ = unsafe { self.cuda.driver.unmap_allocation(self.at.0, self.mapped) };
        }
        let _ = SharedMemory::free_reservation(self.cuda, self.at, self.len);
    }
}

impl PeerMemory for Cuda {
    fn copy_from_peer(&self, peer: [u8; 16], next: NextChunks<'_, '_>) -> Result<(), PeerError> {
        let _entered = self.enter().map_err(PeerError::Import)?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        self.check_access(peer)?;
        let next = |arrived| {
            let PeerChunks { chunks, to } = next(arrived)?;
            Some(self.import_chunks(&chunks).map(|imported| {
                let whole = PeerPiece { from: imported.at, to, len: imported.mapped };
                (imported, vec![whole])
            }))
        };
        // Mapped until the copies are made; `to` by the contract of the trait.
        copy_mapped(self, next, |stream, piece| self.copy_piece(stream, piece))
    }

    fn allow_loads(&self, peer: [u8; 16], at: DeviceAddr, len: u64) -> Result<(), PeerError> {
        let import = PeerError::Import;
        let _entered = self.enter().map_err(import)?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        self.check_access(peer)?;
        let too_long = DeviceError::new(ErrorKind::NoMemory, "chunks of another device");
        let len = usize::try_from(len).map_err(|_| import(too_long))?;
        // SAFETY: whole chunks that the caller keeps mapped. The other device's access stays as it is.
        let granted = unsafe { self.driver.set_access(at.0, len, self.ordinal, true) };
        granted.map_err(|e| import(self.driver_error("cuMemSetAccess", e)))
    }

    fn copy_from_chunks(&self, groups: &mut dyn Iterator<Item = PeerGroup<'_>>) -> Result<(), PeerError> {
        let _entered = self.enter().map_err(PeerError::Import)?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        // Mapped by the contract of the trait.
        copy_groups(self, groups, |stream, piece| self.copy_piece(stream, piece))
    }
}
