//! Copies from chunks of other GPUs, whose memory this GPU's copy engine loads over NVLink or PCI.
//!
//! Chunks of another process are imported and mapped for the time of the copies, and the program needs no context of the other
//! GPU for it. A chunk that this process has mapped for the other GPU gets access for this one where it is mapped, and keeps
//! it until it is unmapped, so that further copies are one call for each piece.
//!
//! The access is for loads and stores, as that of memory after `cudaDeviceEnablePeerAccess`: both maps are of one process.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use super::capture::RelaxedCapture;
use super::device::Cuda;
use crate::peer_memory::copy_groups;
use crate::{DeviceAddr, DeviceError, ErrorKind, PeerError, PeerGroup, PeerMemory, PeerPiece, StreamId};

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

    /// Queues a copy. What it is from and to must stay mapped until it is made.
    fn copy_piece(&self, stream: StreamId, PeerPiece { from, to, len }: &PeerPiece) -> Result<(), DeviceError> {
        // SAFETY: mapped until the stream was synchronized, by the contract of the callers.
        let queued = unsafe { self.driver.copy_within(to.0, from.0, *len, Cuda::raw_stream(stream)) };
        queued.map_err(|e| self.driver_error("cuMemcpyDtoDAsync", e))
    }
}

impl PeerMemory for Cuda {
    fn check_access(&self, peer: [u8; 16]) -> Result<(), PeerError> {
        let ordinal = self.ordinal_of(peer).ok_or(PeerError::NoDevice)?;
        let can_access = self.driver.can_access_peer(self.ordinal, ordinal).unwrap_or(false);
        if can_access { Ok(()) } else { Err(PeerError::NoAccess) }
    }

    fn unmap_imports(&self, at: DeviceAddr, lens: &[u64]) -> Result<(), DeviceError> {
        let _entered = self.enter_or_lost()?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        let len = lens.iter().sum::<u64>() as usize;
        // SAFETY: mapped chunks that nothing uses any more, by the contract of the trait.
        unsafe { self.driver.unmap_allocation(at.0, len) }.map_err(|e| self.driver_error("cuMemUnmap", e))
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
