//! A pinned file as memory that the program's own GPU kernels read.
//!
//! SPIN does not see reads through such an address. So a mapping counts as a use: while there is one, the pins stay,
//! and a process that opens the file for writing waits until the program has unmapped it
//! ([`DeviceMapping::revoke_requested`] reports that a process waits), or until the Linux kernel breaks the lease by
//! force. From then on GPU kernels read the old contents of the file, without a fault, until it is unmapped.

use std::any::Any;
use std::sync::{Arc, Mutex};

use spinio_host::lock;

use crate::pinned_file::PinGuard;

/// A mapped range. It stays until it is dropped by the process that mapped it: in a forked child it is an address
/// without memory.
pub struct DeviceMapping {
    /// Present until the drop.
    guard: Option<PinGuard>,
    pid: u32,
    address: u64,
    len: u64,
    /// The pinned files of the runtime, which wait for their mappings before they end.
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

impl DeviceMapping {
    pub(crate) fn new(guard: PinGuard, address: u64, len: u64) -> DeviceMapping {
        DeviceMapping { guard: Some(guard), pid: std::process::id(), address, len, owner: None }
    }

    /// Keeps `owner` alive as long as the mapping.
    pub(crate) fn owned_by(self, owner: Arc<dyn Any + Send + Sync>) -> DeviceMapping {
        let mut mapping = self;
        mapping.owner = Some(owner);
        mapping
    }

    /// Where GPU kernels find the first byte.
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

    /// Whether a process waits to write the file: unmap it soon.
    pub fn revoke_requested(&self) -> bool {
        self.is_own_process() && self.guard.as_ref().is_some_and(PinGuard::is_closing)
    }
}

impl Drop for DeviceMapping {
    fn drop(&mut self) {
        if !self.is_own_process() {
            // The parent still uses it. In this process its locks may stay locked forever.
            std::mem::forget((self.guard.take(), self.owner.take()));
        }
    }
}

impl std::fmt::Debug for DeviceMapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceMapping {{ address: {:#x}, len: {} }}", self.address, self.len)
    }
}

/// Mappings that C programs identify by address.
#[derive(Default)]
pub(crate) struct DeviceMappings {
    entries: Mutex<Vec<DeviceMapping>>,
}

impl DeviceMappings {
    /// Takes a mapping without an owner, and returns its address.
    pub(crate) fn add(&self, mapping: DeviceMapping) -> u64 {
        debug_assert!(mapping.owner.is_none(), "the owner has this list: neither would ever be dropped");
        let address = mapping.address;
        lock(&self.entries).push(mapping);
        address
    }

    /// Drops the mapping at `address`; false if there is none.
    pub(crate) fn remove(&self, address: u64) -> bool {
        let mut entries = lock(&self.entries);
        let removed = entries.iter().position(|m| m.address == address).map(|at| entries.swap_remove(at));
        drop(entries);
        removed.is_some()
    }

    pub(crate) fn revoke_requested(&self, address: u64) -> Option<bool> {
        lock(&self.entries).iter().find(|m| m.address == address).map(DeviceMapping::revoke_requested)
    }

    pub(crate) fn clear(&self) {
        lock(&self.entries).clear();
    }
}
