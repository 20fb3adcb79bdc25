//! Copies from chunks of other GPUs: the chunk is imported and mapped with access for this GPU, whose copy engine reads it
//! over NVLink or PCI.
//!
//! The program needs no context of the other GPU for it.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::os::fd::{AsRawFd, BorrowedFd};

use super::capture::RelaxedCapture;
use super::device::Cuda;
use crate::{Device, DeviceAddr, DeviceError, ErrorKind, PeerError, PeerMemory, SharedMemory, WaitMode};

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

    /// Maps an allocation of another device for loads, copies it, and unmaps it.
    fn copy_allocation(&self, handle: u64, len: usize, to: DeviceAddr) -> Result<(), PeerError> {
        let import = |call| move |e| PeerError::Import(self.driver_error(call, e));
        let from = SharedMemory::reserve(self, len as u64).map_err(PeerError::Import)?;
        let copied = (|| {
            // SAFETY: reserved above, and the handle is alive and as long, as the driver verifies.
            unsafe { self.driver.map_allocation(from.0, len, handle) }.map_err(import("cuMemMap"))?;
            // SAFETY: mapped in the line above.
            let granted = unsafe { self.driver.set_access(from.0, len, self.ordinal, false) };
            let copied = granted.map_err(import("cuMemSetAccess")).and_then(|()| {
                let stream = self.acquire_stream().map_err(PeerError::Copy)?;
                // SAFETY: `from` is mapped until the stream was synchronized, `to` by the contract of the trait.
                let queued = unsafe { self.driver.copy_within(to.0, from.0, len, Cuda::raw_stream(stream)) };
                let queued = queued.map_err(|e| self.driver_error("cuMemcpyDtoDAsync", e));
                // Also after an error: nothing may use the addresses any more.
                let done = self.synchronize(stream, WaitMode::Block);
                self.release_stream(stream);
                queued.and(done).map_err(PeerError::Copy)
            });
            // SAFETY: mapped above; the stream that used it was synchronized.
            let _ = unsafe { self.driver.unmap_allocation(from.0, len) };
            copied
        })();
        let _ = SharedMemory::free_reservation(self, from, len as u64);
        copied
    }
}

impl PeerMemory for Cuda {
    fn copy_from_peer(&self, peer: [u8; 16], chunk: BorrowedFd<'_>, len: u64, to: DeviceAddr) -> Result<(), PeerError> {
        let import = PeerError::Import;
        let _entered = self.enter().map_err(import)?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        let ordinal = self.ordinal_of(peer).ok_or(PeerError::NoDevice)?;
        if !self.driver.can_access_peer(self.ordinal, ordinal).unwrap_or(false) {
            return Err(PeerError::NoAccess);
        }
        let too_long = DeviceError::new(ErrorKind::NoMemory, "chunk of another device");
        let len = usize::try_from(len).map_err(|_| import(too_long))?;
        let handle = self.driver.import_allocation(chunk.as_raw_fd());
        let handle = handle.map_err(|e| import(self.driver_error("cuMemImportFromShareableHandle", e)))?;
        let copied = self.copy_allocation(handle, len, to);
        // SAFETY: imported above, and mapped nowhere any more.
        let _ = unsafe { self.driver.release_allocation(handle) };
        copied
    }
}
