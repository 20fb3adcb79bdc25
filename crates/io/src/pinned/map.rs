//! A held file as memory that the program's own kernels read.
//!
//! What reads through such an address is out of our sight. So a map counts as a user: while there is one, the pins stay,
//! and who wants to write the file waits until the program has unmapped it ([`Mapped::is_wanted_back`] tells that somebody
//! waits), or until the kernel breaks the lease by force. From then on kernels read what the file was: old bytes, but no
//! fault, until it is unmapped.

use std::sync::{Arc, Mutex};

use spinio_device::Device;
use spinio_sys::linux::Fd;

use super::Holds;
use spinio_files::FileTable;
use crate::pinned::{NotHeld, Using};
use spinio_host::lock;

/// A mapped range. It stays until it is dropped, by the process that mapped it: in a forked child it is an address and
/// no memory.
pub struct Mapped {
    /// Always there, until the drop.
    using: Option<Using>,
    process: u32,
    address: u64,
    len: u64,
    /// The runtime waits for its maps before it ends.
    pinned: Option<Arc<Holds>>,
}

impl Mapped {
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
    pub fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    /// Whether somebody waits to write the file: unmap it soon.
    pub fn is_wanted_back(&self) -> bool {
        self.is_here() && self.using.as_ref().is_some_and(Using::is_closing)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if !self.is_here() {
            // The parent's, who still uses it. Its locks may be held for ever here.
            std::mem::forget((self.using.take(), self.pinned.take()));
        }
    }
}

impl std::fmt::Debug for Mapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mapped {{ address: {:#x}, len: {} }}", self.address, self.len)
    }
}

/// Maps that C programs know by their addresses.
#[derive(Default)]
pub(crate) struct Maps {
    kept: Mutex<Vec<Mapped>>,
}

impl Maps {
    pub(crate) fn forget(&self) {
        lock(&self.kept).clear();
    }
}

impl Holds {
    /// Maps a range of a held file for a device; held now if it was not, for as long as the runtime lives or somebody
    /// wants to write it.
    pub fn map(self: &Arc<Self>, fd: Fd, offset: u64, len: u64, device: &'static dyn Device) -> Result<Mapped, NotHeld> {
        let files = &self.files;
        let stat = files.sys().fstat(fd).map_err(NotHeld::Descriptor)?;
        let inside = |size: u64| len > 0 && offset.checked_add(len).is_some_and(|end| end <= size);
        // Before the file is held for nothing.
        if !inside(stat.size) {
            return Err(NotHeld::Range);
        }
        if self.find((stat.dev, stat.ino)).is_none_or(|hold| hold.users.is_closing()) {
            self.hold_file(files, fd, Some(device))?;
        }
        let hold = self.find((stat.dev, stat.ino)).ok_or(NotHeld::Gone)?;
        let mut using = self.enter_hold(files, fd, hold, device)?;
        using.become_map();
        if !inside(using.size()) {
            return Err(NotHeld::Range);
        }
        let address = using.on.contiguous(offset, len).ok_or(NotHeld::NoDevice)?;
        Ok(Mapped { using: Some(using), process: std::process::id(), address, len, pinned: Some(Arc::clone(self)) })
    }

    /// As [`Holds::map`], until [`Holds::unmap`] of the address.
    pub fn map_kept(self: &Arc<Self>, fd: Fd, offset: u64, len: u64, device: &'static dyn Device) -> Result<u64, NotHeld> {
        let mut mapped = self.map(fd, offset, len, device)?;
        // Kept by the runtime itself.
        drop(mapped.pinned.take());
        let address = mapped.address();
        lock(&self.maps.kept).push(mapped);
        Ok(address)
    }

    /// Ends a map; false if there is none at this address.
    pub fn unmap(&self, address: u64) -> bool {
        let mut kept = lock(&self.maps.kept);
        let gone = kept.iter().position(|m| m.address == address).map(|at| kept.swap_remove(at));
        drop(kept);
        gone.is_some()
    }

    /// Whether somebody waits to write the file of a map; `None` if there is none at this address.
    pub fn is_wanted_back(&self, address: u64) -> Option<bool> {
        lock(&self.maps.kept).iter().find(|m| m.address == address).map(Mapped::is_wanted_back)
    }
}
