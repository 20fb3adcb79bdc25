//! Copies from chunks of other GPUs, whose memory this GPU's copy engine loads over NVLink or PCI.
//!
//! Chunks of another process are imported and mapped for the time of the copy, and the program needs no context of the other
//! GPU for it. A chunk that this process has mapped for the other GPU gets access for this one where it is mapped, and keeps
//! it until it is unmapped, so that further copies are one call for each piece.
//!
//! The access is for loads and stores, as that of memory after `cudaDeviceEnablePeerAccess`: both maps are of one process.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::os::fd::AsRawFd;

use super::capture::RelaxedCapture;
use super::device::Cuda;
use crate::peer_memory::copy_groups;
use crate::{DeviceAddr, DeviceError, ErrorKind, PeerChunk, PeerError, PeerGroup, PeerMemory, PeerPiece, SharedMemory};

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

    /// Maps imported chunks side by side for loads, copies them, and unmaps them. A chunk becomes accessible while those
    /// before it are copied. The handles are alive.
    fn copy_imported(&self, chunks: &[(u64, usize)], to: DeviceAddr) -> Result<(), PeerError> {
        let import = |call| move |e| PeerError::Import(self.driver_error(call, e));
        let len: usize = chunks.iter().map(|(_, len)| len).sum();
        let from = SharedMemory::reserve(self, len as u64).map_err(PeerError::Import)?;
        let mut mapped = 0;
        let map = |&(handle, len): &(u64, usize)| {
            // SAFETY: reserved above, and the handle is alive and as long, as the driver verifies.
            unsafe { self.driver.map_allocation(from.0 + mapped as u64, len, handle) }.map_err(import("cuMemMap"))?;
            mapped += len;
            Ok(())
        };
        let copied = chunks.iter().try_for_each(map).and_then(|()| {
            let mut at = 0;
            let pieces = chunks.iter().map(|&(_, len)| {
                let piece = PeerPiece { from: from.offset(at), to: to.offset(at), len };
                at += len as u64;
                [piece]
            });
            let pieces: Vec<[PeerPiece; 1]> = pieces.collect();
            let mut groups = pieces.iter().map(|piece| {
                // SAFETY: mapped above.
                let granted = unsafe { self.driver.set_access(piece[0].from.0, piece[0].len, self.ordinal, false) };
                granted.map(|()| &piece[..]).map_err(import("cuMemSetAccess"))
            });
            // Mapped until the copies are made; `to` by the contract of the trait.
            self.copy_now(&mut groups)
        });
        if mapped > 0 {
            // SAFETY: mapped above; the stream that used it was synchronized.
            let _ = unsafe { self.driver.unmap_allocation(from.0, mapped) };
        }
        let _ = SharedMemory::free_reservation(self, from, len as u64);
        copied
    }

    /// Copies pieces on a stream of its own, and waits for it. What they are copied from and to is mapped until then.
    fn copy_now(&self, groups: &mut dyn Iterator<Item = PeerGroup<'_>>) -> Result<(), PeerError> {
        copy_groups(self, groups, |stream, PeerPiece { from, to, len }| {
            // SAFETY: mapped until the stream was synchronized, by the contract of the callers.
            let queued = unsafe { self.driver.copy_within(to.0, from.0, *len, Cuda::raw_stream(stream)) };
            queued.map_err(|e| self.driver_error("cuMemcpyDtoDAsync", e))
        })
    }
}

impl PeerMemory for Cuda {
    fn copy_from_peer(&self, peer: [u8; 16], chunks: &[PeerChunk<'_>], to: DeviceAddr) -> Result<(), PeerError> {
        let import = PeerError::Import;
        let _entered = self.enter().map_err(import)?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        self.check_access(peer)?;
        let too_long = DeviceError::new(ErrorKind::NoMemory, "chunk of another device");
        let mut imported = Vec::with_capacity(chunks.len());
        let all_imported = chunks.iter().try_for_each(|chunk| {
            let len = usize::try_from(chunk.len).map_err(|_| import(too_long))?;
            let handle = self.driver.import_allocation(chunk.fd.as_raw_fd());
            let handle = handle.map_err(|e| import(self.driver_error("cuMemImportFromShareableHandle", e)))?;
            imported.push((handle, len));
            Ok(())
        });
        let copied = all_imported.and_then(|()| self.copy_imported(&imported, to));
        for (handle, _) in imported {
            // SAFETY: imported above, and mapped nowhere any more.
            let _ = unsafe { self.driver.release_allocation(handle) };
        }
        copied
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
        self.copy_now(groups)
    }
}
