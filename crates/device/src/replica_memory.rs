//! Memory for replicas of file pages, a second interface of a device.
//!
//! A replica is one range of addresses of whole pages, contiguous for kernels, and private to one map. Its memory is
//! private chunks ([`crate::SharedMemory`]), or one allocation where the device has no chunks.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use crate::fingerprint::Fingerprint;
use crate::{Device, DeviceAddr, DeviceError, GatherEntry, StreamId};

/// A device whose memory can have replicas of file pages.
pub trait ReplicaMemory: Device {
    /// Allocates memory of whole pages at a page's boundary; its content is undefined.
    fn alloc_replica(&self, len: u64) -> Result<DeviceAddr, DeviceError>;

    /// Frees it, after all work on the device is done.
    fn free_replica(&self, addr: DeviceAddr) -> Result<(), DeviceError>;

    /// How many pages take less time to scan than another scan to begin.
    fn scan_gap(&self) -> u64;

    /// Enqueues the fingerprints of `count` pages from `addr`, as they are when the stream reaches that point. They are
    /// put into `slots`, device memory, before they are copied to `out`.
    ///
    /// # Safety
    /// `slots` and `out` must have room for `count` fingerprints, and the pages must stay allocated, until the stream is
    /// synchronized; nothing may use `out` before, and no other stream `slots`.
    unsafe fn fingerprint_pages(
        &self,
        stream: StreamId,
        addr: DeviceAddr,
        count: usize,
        slots: DeviceAddr,
        out: *mut Fingerprint,
    ) -> Result<(), DeviceError>;

    /// Enqueues a copy on a stream of [`Device::acquire_stream_beside_stops`], so that it runs while other streams are
    /// stopped: their copies, which wait for the stops, may occupy the device's copy engines.
    ///
    /// # Safety
    /// `copy.host` and `copy.list` must be in pinned memory of this device, `list` with room for an entry for each
    /// [`KernelCopy::PIECE`] bytes; they and the device memory must stay valid, and be used by nothing else, until the
    /// stream is synchronized.
    unsafe fn copy_beside_stops(&self, stream: StreamId, copy: KernelCopy) -> Result<(), DeviceError> {
        let KernelCopy { into_device, device, host, len, .. } = copy;
        // SAFETY: guaranteed by the caller.
        unsafe {
            if into_device { self.copy_in(stream, device, host, len) } else { self.copy_out(stream, host, device, len) }
        }
    }

    /// [`ReplicaMemory::fingerprint_pages`] on such a stream, straight to `out`.
    ///
    /// # Safety
    /// As there; `out` must be in pinned memory of this device.
    unsafe fn fingerprint_pages_beside_stops(
        &self,
        stream: StreamId,
        addr: DeviceAddr,
        count: usize,
        out: *mut Fingerprint,
    ) -> Result<(), DeviceError>;
}

/// A copy between device memory and pinned memory.
#[derive(Clone, Copy, Debug)]
pub struct KernelCopy {
    /// Or out of it.
    pub into_device: bool,
    /// In device memory.
    pub device: DeviceAddr,
    /// In pinned memory.
    pub host: *mut u8,
    /// Bytes.
    pub len: usize,
    /// What the kernel gets to do, in pinned memory.
    pub list: *mut GatherEntry,
}

impl KernelCopy {
    /// Bytes of one entry of the list.
    pub const PIECE: usize = 4096;
}
