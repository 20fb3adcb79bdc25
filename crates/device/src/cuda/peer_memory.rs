//! Copies from chunks of other GPUs, whose memory this GPU's copy engine loads over NVLink or PCI.
//!
//! A chunk of another process is imported and mapped for the time of the copy, and the program needs no context of the other
//! GPU for it. A chunk that this process has mapped for the other GPU gets access for this one where it is mapped, and keeps
//! it until it is unmapped, so that further copies are one call for each piece.
//!
//! The access is for loads and stores, as that of memory after `cudaDeviceEnablePeerAccess`: both maps are of one process.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::os::fd::{AsRawFd, BorrowedFd};

use super::capture::RelaxedCapture;
use super::device::Cuda;
use crate::peer_memory::copy_groups;
use crate::{DeviceAddr, DeviceError, ErrorKind, PeerError, PeerGroup, PeerMemory, PeerPiece, SharedMemory};

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

    /// Maps an allocation of another device for loads, copies all of it, and unmaps it. The handle is alive.
    fn copy_allocation(&self, handle: u64, len: usize, to: DeviceAddr) -> Result<(), PeerError> {
        let import = |call| move |e| PeerError::Import(self.driver_error(call, e));
        let from = SharedMemory::reserve(self, len as u64).map_err(PeerError::Import)?;
        // SAFETY: reserved above, and the handle is alive and as long, as the driver verifies.
        let mapped = unsafe { self.driver.map_allocation(from.0, len, handle) };
        let copied = mapped.map_err(import("cuMemMap")).and_then(|()| {
            // SAFETY: mapped above.
            let granted = unsafe { self.driver.set_access(from.0, len, self.ordinal, false) };
            let copied = granted.map_err(import("cuMemSetAccess")).and_then(|()| {
                let piece = PeerPiece { from, to, len };
                // Mapped until the copy is made; `to` by the contract of the trait.
                self.copy_now(&mut std::iter::once(Ok(&[piece][..])))
            });
            // SAFETY: mapped above; the stream that used it was synchronized.
            let _ = unsafe { self.driver.unmap_allocation(from.0, len) };
            copied
        });
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
    fn copy_from_peer(&self, peer: [u8; 16], chunk: BorrowedFd<'_>, len: u64, to: DeviceAddr) -> Result<(), PeerError> {
        let import = PeerError::Import;
        let _entered = self.enter().map_err(import)?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        self.check_access(peer)?;
        let too_long = DeviceError::new(ErrorKind::NoMemory, "chunk of another device");
        let len = usize::try_from(len).map_err(|_| import(too_long))?;
        let handle = self.driver.import_allocation(chunk.as_raw_fd());
        let handle = handle.map_err(|e| import(self.driver_error("cuMemImportFromShareableHandle", e)))?;
        let copied = self.copy_allocation(handle, len, to);
        // SAFETY: imported above, and mapped nowhere any more.
        let _ = unsafe { self.driver.release_allocation(handle) };
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
