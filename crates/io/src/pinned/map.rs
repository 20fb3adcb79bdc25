//! A held file as memory that the program's own kernels read.
//!
//! What reads through such an address is out of our sight. So a map counts as a user: while there is one, the pins stay,
//! and who wants to write the file waits until the program has unmapped it ([`Mapped::is_wanted_back`] tells that somebody
//! waits), or until the kernel breaks the lease by force. From then on kernels read what the file was: old bytes, but no
//! fault, until it is unmapped.

use std::sync::{Arc, Mutex};

use spinio_device::Device;
use spinio_sys::linux::Fd;

use super::PinnedFiles;
use crate::pinned::{PinError, PinGuard};
use spinio_files::Files;
use spinio_host::lock;

/// A mapped range. It stays until it is dropped, by the process that mapped it: in a forked child it is an address and
/// no memory.
pub struct DeviceMapping {
    /// Always there, until the drop.
    guard: Option<PinGuard>,
    pid: u32,
    address: u64,
    len: u64,
    /// The runtime waits for its maps before it ends.
    pinned: Option<Arc<PinnedFiles>>,
}

impl DeviceMapping {
    /// Where kernels find the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no byte; it always has one.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether this process mapped it, and is not a forked child of that.
    pub fn is_own_process(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Whether somebody waits to write the file: unmap it soon.
    pub fn revoke_requested(&self) -> bool {
        self.is_own_process() && self.guard.as_ref().is_some_and(PinGuard::is_closing)
    }
}

impl Drop for DeviceMapping {
    fn drop(&mut self) {
        if !self.is_own_process() {
            // The parent's, who still uses it. Its locks may be held for ever here.
            std::mem::forget((self.guard.take(), self.pinned.take()));
        }
    }
}

impl std::fmt::Debug for DeviceMapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mapped {{ address: {:#x}, len: {} }}", self.address, self.len)
    }
}

/// Maps that C programs know by their addresses.
#[derive(Default)]
pub(crate) struct DeviceMappings {
    entries: Mutex<Vec<DeviceMapping>>,
}

impl DeviceMappings {
    pub(crate) fn clear(&self) {
        lock(&self.entries).clear();
    }
}

impl PinnedFiles {
    /// Maps a range of a held file for a device; held now if it was not, for as long as the runtime lives or somebody
    /// wants to write it.
    pub fn map(
        self: &Arc<Self>,
        fd: Fd,
        offset: u64,
        len: u64,
        device: &'static dyn Device,
    ) -> Result<DeviceMapping, PinError> {
        let files = &self.files;
        let stat = files.sys().fstat(fd).map_err(PinError::BadFd)?;
        let inside = |size: u64| len > 0 && offset.checked_add(len).is_some_and(|end| end <= size);
        // Before the file is held for nothing.
        if !inside(stat.size) {
            return Err(PinError::OutOfRange);
        }
        if self.find((stat.dev, stat.ino)).is_none_or(|file| file.gate.is_closing()) {
            self.hold_file(files, fd, Some(device))?;
        }
        let file = self.find((stat.dev, stat.ino)).ok_or(PinError::NotPinned)?;
        let mut guard = self.acquire_pinned(files, fd, file, device)?;
        guard.mark_mapping();
        if !inside(guard.size()) {
            return Err(PinError::OutOfRange);
        }
        let address = guard.pages.contiguous(offset, len).ok_or(PinError::NoDevice)?;
        Ok(DeviceMapping { guard: Some(guard), pid: std::process::id(), address, len, pinned: Some(Arc::clone(self)) })
    }

    /// As [`Holds::map`], until [`Holds::unmap`] of the address.
    pub fn map_until_unmap(
        self: &Arc<Self>,
        fd: Fd,
        offset: u64,
        len: u64,
        device: &'static dyn Device,
    ) -> Result<u64, PinError> {
        let mut mapping = self.map(fd, offset, len, device)?;
        // Kept by the runtime itself.
        drop(mapping.pinned.take());
        let address = mapping.address();
        lock(&self.mappings.entries).push(mapping);
        Ok(address)
    }

    /// Ends a map; false if there is none at this address.
    pub fn unmap(&self, address: u64) -> bool {
        let mut entries = lock(&self.mappings.entries);
        let removed = entries.iter().position(|m| m.address == address).map(|at| entries.swap_remove(at));
        drop(entries);
        removed.is_some()
    }

    /// Whether somebody waits to write the file of a map; `None` if there is none at this address.
    pub fn revoke_requested(&self, address: u64) -> Option<bool> {
        lock(&self.mappings.entries).iter().find(|m| m.address == address).map(DeviceMapping::revoke_requested)
    }
}
