//! Memory for replicas of file pages, a second interface of a device.
//!
//! A replica is one range of addresses of whole pages, contiguous for kernels. It is private to one map, so it is an
//! ordinary allocation of the device; memory that processes share is [`crate::SharedMemory`].

#![expect(unsafe_code, reason = "driver calls and device memory")]

use crate::fingerprint::Fingerprint;
use crate::{Device, DeviceAddr, DeviceError, StreamId};

/// A device whose memory can have replicas of file pages.
pub trait ReplicaMemory: Device {
    /// Allocates memory of whole pages at a page's boundary; its content is undefined.
    fn alloc_replica(&self, len: u64) -> Result<DeviceAddr, DeviceError>;

    /// Frees it, after all work on the device is done.
    fn free_replica(&self, addr: DeviceAddr) -> Result<(), DeviceError>;

    /// How many pages take less time to scan than another scan to begin.
    fn scan_gap(&self) -> u64;

    /// Enqueues the fingerprints of `count` pages from `addr`, as they are when the stream reaches that point.
    ///
    /// # Safety
    /// `out` must have room for `count` fingerprints, and the pages must stay allocated, until the stream is
    /// synchronized; nothing may use `out` before.
    unsafe fn fingerprint_pages(
        &self,
        stream: StreamId,
        addr: DeviceAddr,
        count: usize,
        out: *mut Fingerprint,
    ) -> Result<(), DeviceError>;
}
