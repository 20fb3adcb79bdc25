//! The registry: whose is this address?
//!
//! ```text
//!   hook ── any()? ── no ──> the next function        one load: all a host program pays
//!             │ yes
//!          find(addr) ── known device range ── still the same allocation? ──> device
//!             │       └─ known host granule ──> host, no driver call
//!             └ unknown: ask the driver, remember the answer
//!
//!   the next function said EFAULT ──> find_after_fault(addr): never trusts "known host"
//! ```
//!
//! So a wrong "host" is never more than a wasted call: the kernel refuses device memory.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::{Allocation, DeviceAddr, DeviceError, DeviceKind, ErrorKind, cuda};

/// Whether any device could own any address. It is never lowered again.
static ANY: AtomicBool = AtomicBool::new(false);

/// Whether any device could own any address now. One relaxed load.
#[inline]
pub fn any() -> bool {
    ANY.load(Relaxed)
}

/// From now on [`find`] is worth a call.
pub(crate) fn raise() {
    ANY.store(true, Relaxed);
}

/// The allocation that holds `addr`, if a device owns it. No lock and no driver call for memory that is known to be
/// the host's. `want`: how many bytes from `addr` the caller is interested in.
pub fn find(addr: *const u8, want: usize) -> Option<Allocation> {
    if any() { cuda::find(addr, want) } else { None }
}

/// As [`find`], after the kernel refused the address: asks the devices themselves, and looks whether the
/// program has loaded a driver meanwhile.
pub fn find_after_fault(addr: *const u8, want: usize) -> Option<Allocation> {
    let found = cuda::find_after_fault(addr, want);
    if found.is_some() {
        raise();
    }
    found
}

/// The program opened a path: an early hint that a driver is in use (`/dev/nvidia...`).
pub fn hint_open(path: &[u8]) {
    cuda::hint_open(path);
    if !any() && cuda::possible() {
        raise();
    }
}

/// New memory on a device that has no allocator of its own. `host_mapped` asks for memory that the CPU can store to.
pub fn alloc(kind: DeviceKind, ordinal: u32, len: usize, host_mapped: bool) -> Result<DeviceAddr, DeviceError> {
    let _ = (kind, ordinal, len, host_mapped);
    Err(DeviceError::new(ErrorKind::Unsupported, "allocation"))
}

/// Gives back memory of [`alloc`], after everything queued on it is done.
pub fn free(addr: DeviceAddr) -> Result<(), DeviceError> {
    let _ = addr;
    Err(DeviceError::new(ErrorKind::BadAddress, "free"))
}
