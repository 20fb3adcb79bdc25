//! Chunks of another device, mapped side by side for this one while it copies them.
//!
//! All have one reservation and are unmapped together, once the copies are made: CUDA waits for copies under way before it unmaps,
//! 6 ms for 8 GiB (benches/gaia/leased_steps.cu).

use std::os::fd::AsFd;

use spinio_device::{DeviceAddr, DeviceError, PeerError, PeerMemory};

use crate::owned_fd::OwnedFd;

pub(super) struct Imports {
    memory: &'static dyn PeerMemory,
    at: DeviceAddr,
    /// Of the reservation.
    len: u64,
    /// The lengths of the chunks that are mapped.
    mapped: Vec<u64>,
    /// The bytes of those that are accessible.
    accessible: u64,
}

impl Imports {
    /// Reserves addresses.
    pub(super) fn reserve(memory: &'static dyn PeerMemory, len: u64) -> Result<Imports, PeerError> {
        let at = memory.reserve(len).map_err(PeerError::Import)?;
        Ok(Imports { memory, at, len, mapped: Vec::new(), accessible: 0 })
    }

    /// The address of the first chunk.
    pub(super) fn start(&self) -> DeviceAddr {
        self.at
    }

    /// Imports the next chunk.
    pub(super) fn map(&mut self, fd: &OwnedFd, len: u64) -> Result<(), DeviceError> {
        let at = self.at.offset(self.mapped.iter().sum());
        let handle = self.memory.import_chunk(fd.as_fd(), len)?;
        let mapped = self.memory.map_without_access(at, len, handle);
        let _ = self.memory.release_chunk(handle);
        mapped.map(|()| self.mapped.push(len))
    }

    /// Lets the device load all that are mapped.
    pub(super) fn grant_access(&mut self) -> Result<(), DeviceError> {
        let mapped: u64 = self.mapped.iter().sum();
        self.memory.protect_chunks(self.at.offset(self.accessible), mapped - self.accessible, false)?;
        self.accessible = mapped;
        Ok(())
    }
}

impl Drop for Imports {
    fn drop(&mut self) {
        // What cannot be unmapped stays there, and so does the reservation.
        if self.mapped.is_empty() || self.memory.unmap_imports(self.at, &self.mapped).is_ok() {
            let _ = self.memory.free_reservation(self.at, self.len);
        }
    }
}
