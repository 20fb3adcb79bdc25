//! Ordinary host memory for requests that must not use the bounce buffer pool, or find it empty.

#![expect(unsafe_code, reason = "memory that a device copies from or into")]

use spinio_device::{DeviceError, ErrorKind};
use spinio_sys::linux;

/// Anonymous memory of one request, page-aligned and not pinned.
pub struct HostMemory {
    /// Its first byte.
    pub ptr: *mut u8,
    /// Bytes.
    pub len: usize,
}

impl HostMemory {
    /// Fresh zeros.
    pub fn new(len: usize) -> Result<HostMemory, DeviceError> {
        let memory = linux::map_anonymous(len, linux::PAGE).map(|ptr| HostMemory { ptr, len });
        memory.map_err(|_| DeviceError::new(ErrorKind::NoMemory, "memory of a request"))
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: mapped above, and its owner has waited for all stores into it.
        let _ = unsafe { linux::munmap(self.ptr, self.len) };
    }
}
