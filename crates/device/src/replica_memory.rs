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

    /// Prepares [`ReplicaMemory::copy_pieces`], while no kernel of the program runs that waits for an acquire.
    fn prepare_pieces(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Enqueues copies of pieces, of at most a page each, all in one direction: by one call of a driver, however many they
    /// are. `list` has room for an entry for each.
    ///
    /// # Safety
    /// The pieces' host memory must be in one range that is registered with this device or pinned, and `list` pinned; they and the device
    /// memory must stay valid, and be used by nothing else, until the stream is synchronized.
    unsafe fn copy_pieces(
        &self,
        stream: StreamId,
        into_device: bool,
        pieces: &[Piece],
        list: *mut GatherEntry,
    ) -> Result<(), DeviceError> {
        let _ = list;
        pieces.iter().try_for_each(|Piece { device, host, len }| {
            // SAFETY: guaranteed by the caller.
            unsafe {
                if into_device {
                    self.copy_in(stream, *device, *host, *len)
                } else {
                    self.copy_out(stream, *host, *device, *len)
                }
            }
        })
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

/// Of many copies between device memory and host memory.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// In device memory.
    pub device: DeviceAddr,
    /// In host memory.
    pub host: *mut u8,
    /// Bytes.
    pub len: usize,
}

impl Piece {
    /// Writes the list of a gather that copies pieces.
    ///
    /// # Safety
    /// `list` must have room for an entry for each, and be used by nothing else.
    pub(crate) unsafe fn list<D: Device + ?Sized>(
        device: &D,
        into_device: bool,
        pieces: &[Piece],
        list: *mut GatherEntry,
    ) -> Result<(), DeviceError> {
        // Of memory that is side by side, so are the addresses that the device has for it.
        let Some(first) = pieces.first() else { return Ok(()) };
        let start = device.device_ptr(first.host)?;
        for (at, piece) in pieces.iter().enumerate() {
            let host = start.wrapping_add(piece.host.addr() as u64).wrapping_sub(first.host.addr() as u64);
            let (src, dst) = if into_device { (host, piece.device.0) } else { (piece.device.0, host) };
            // SAFETY: the list has room, and nothing else uses it.
            unsafe { list.add(at).write(GatherEntry { src, dst, len: piece.len as u64 }) };
        }
        Ok(())
    }
}

impl KernelCopy {
    /// Bytes of one entry of the list.
    pub const PIECE: usize = 4096;
}
