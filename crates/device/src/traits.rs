//! The interface between `io` and a device.
//!
//! Order is the central part. A **stream** runs its copies one after another; stream 0
//! is the device's default stream (CUDA: the legacy default stream), which also waits
//! for, and is waited for by, the program's own ordinary streams. A **fence** marks a
//! position in a stream.
//!
//! ```text
//!   small read                     large read
//!   default: copy copy copy        default: ──fence─┐
//!   default: copy copy copy        default: ──fence─┐
//!            └ returns once        internal:        └follow, copy copy ─ fence ─ wait
//!              enqueued

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::ffi::c_void;
use std::fmt;

use crate::{AppStream, DeviceError, PageableAccess, PeerMemory, ReplicaMemory, SharedMemory, StreamStop};

type Result<T> = core::result::Result<T, DeviceError>;

/// An address in a device's memory, as the program passes it. Never dereferenced here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceAddr(pub u64);

impl DeviceAddr {
    /// The address `bytes` further on.
    pub const fn offset(self, bytes: u64) -> DeviceAddr {
        DeviceAddr(self.0 + bytes)
    }
}

/// Back end of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// The software GPU.
    Emulated,
    /// An NVIDIA GPU.
    Cuda,
    /// PCI memory published for peer-to-peer.
    P2pmem,
}

impl DeviceKind {
    /// The name used on the command line and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            DeviceKind::Emulated => "emulated",
            DeviceKind::Cuda => "cuda",
            DeviceKind::P2pmem => "p2pmem",
        }
    }
}

/// A device: back end and number within it. Written `cuda:0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId {
    /// Back end.
    pub kind: DeviceKind,
    /// Counted from 0 (CUDA: the driver's ordinal).
    pub ordinal: u32,
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind.name(), self.ordinal)
    }
}

/// The capabilities of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// It can read page-cache pages that [`Device::pin`] registered.
    pub can_pin: bool,
    /// It has a DMA engine: [`Device::copy_in`] works and bounce buffers are useful.
    /// Without it (p2pmem) bytes are moved by CPU stores or by the storage device.
    pub has_dma_engine: bool,
    /// The largest pin in bytes; larger ranges are pinned part by part.
    pub max_pin: u64,
    /// It can fetch many small fragments at once: [`Device::gather`] works, once it was prepared.
    pub can_gather: bool,
}

/// One allocation of a device, as found for an address.
#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    /// Its device; devices live as long as the process.
    pub device: &'static dyn Device,
    /// First byte.
    pub start: DeviceAddr,
    /// Length in bytes.
    pub len: u64,
    /// The CPU can store to it at the same address.
    pub host_mapped: bool,
    /// The Linux kernel can make a storage device DMA into it.
    pub p2p_mapped: bool,
}

impl Allocation {
    /// Bytes from `addr` to the end of the allocation.
    pub fn bytes_left(&self, addr: DeviceAddr) -> u64 {
        (self.start.0 + self.len).saturating_sub(addr.0)
    }
}

/// A stream of a device; 0 is the default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId(pub u64);

impl StreamId {
    /// A number that means another stream on each thread (`cudaStreamPerThread`).
    pub const PER_THREAD: StreamId = StreamId(2);
}

/// A position in a stream. From a bounded pool: release it with [`Device::release_fence`].
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct Fence(pub u64);

/// Pinned host memory that the device copies from and to at full speed.
/// It is never unmapped while the process lives, so a late copy can read stale bytes but cannot fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedBuffer {
    /// Page-aligned.
    pub ptr: *mut u8,
    /// Bytes.
    pub len: usize,
}

// SAFETY: plain memory; the bounce pool decides which thread uses it.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above.
unsafe impl Sync for PinnedBuffer {}

/// Page-cache pages that the device may read, made by [`Device::pin`].
#[derive(Debug)]
#[must_use]
pub struct Pin {
    /// The address of the mapped range.
    pub ptr: *const u8,
    /// Bytes.
    pub len: usize,
    /// Data of the back end.
    pub handle: u64,
}

/// One fragment for [`Device::gather`], in the layout that the device reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GatherEntry {
    /// The source: an address from [`Device::device_ptr`] or [`Device::pin_device_ptr`], plus an offset.
    pub src: u64,
    /// The destination: device memory.
    pub dst: u64,
    /// Number of bytes.
    pub len: u64,
}

/// The cache of compiled GPU code, shared by processes.
pub trait KernelStore {
    /// Loads the entry of a name.
    fn load(&self, name: &str) -> Option<Vec<u8>>;
    /// Stores it; without effect where nothing can be stored.
    fn store(&self, name: &str, code: &[u8]);
}

/// How to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitMode {
    /// As the program's context specifies (CUDA's spin, yield or blocking schedule).
    Context,
    /// Sleeping, whatever the context specifies: for long transfers.
    Block,
}

/// A device. All calls may come from any thread, also from several at once.
pub trait Device: Send + Sync + 'static {
    /// Which device this is.
    fn id(&self) -> DeviceId;

    /// A one-line description: name, memory, driver.
    fn describe(&self) -> String;

    /// Its capabilities.
    fn capabilities(&self) -> Capabilities;

    /// How its kernels access memory of the process that is not registered.
    fn pageable_access(&self) -> PageableAccess {
        PageableAccess::None
    }

    /// The allocation that contains `addr`, queried again: `None` if it is not (or no longer) the device's.
    /// Neighbouring mappings that the program sees as one range (CUDA VMM) count as one, as far as `want` bytes reach.
    fn allocation(&'static self, addr: DeviceAddr, wanted: u64) -> Option<Allocation>;

    /// Allocates a pinned bounce buffer, for the life of the process.
    fn alloc_pinned(&self, len: usize) -> Result<PinnedBuffer>;

    /// Frees a bounce buffer that no copy uses any more.
    fn free_pinned(&self, buffer: PinnedBuffer);

    /// Registers memory of the process, so that copies from and to it run at full speed; any others are slower. It may
    /// be shared with other processes.
    ///
    /// # Safety
    /// The range must stay mapped, and keep its pages, until it is unregistered.
    unsafe fn register_host(&self, ptr: *mut u8, len: usize) -> Result<()> {
        let _ = (ptr, len);
        Err(DeviceError::new(crate::ErrorKind::Unsupported, "registration of host memory"))
    }

    /// Unregisters what begins at `ptr`. No copy may use it any more. It may wait for all work of the device. False: it may be
    /// registered still, and must stay mapped.
    fn unregister_host(&self, ptr: *mut u8) -> bool {
        let _ = ptr;
        true
    }

    /// The stream for small requests of this thread.
    fn app_stream(&self) -> AppStream;

    /// Whether work enqueued on a stream now would become part of a graph, or invalidate one.
    fn is_capturing(&self, stream: StreamId) -> bool {
        let _ = stream;
        false
    }

    /// Acquires an internal stream, ordered with no other; from a bounded pool.
    fn acquire_stream(&self) -> Result<StreamId>;

    /// Releases it, idle or not.
    fn release_stream(&self, stream: StreamId);

    /// Enqueues a copy from pinned host memory (or any host memory, slower) into the device.
    ///
    /// # Safety
    /// `src` must stay readable and unchanged, and `dst` allocated, until the copy is done.
    unsafe fn copy_in(&self, stream: StreamId, dst: DeviceAddr, src: *const u8, len: usize) -> Result<()>;

    /// Enqueues a copy out of the device into pinned host memory (or any host memory, slower).
    ///
    /// # Safety
    /// `dst` must stay writable and unread, and `src` allocated, until the copy is done.
    unsafe fn copy_out(&self, stream: StreamId, dst: *mut u8, src: DeviceAddr, len: usize) -> Result<()>;

    /// Marks the present end of a stream.
    fn fence(&self, stream: StreamId) -> Result<Fence>;

    /// Makes later work on `stream` wait for the fence.
    fn wait_event(&self, stream: StreamId, fence: &Fence) -> Result<()>;

    /// Whether all work before the fence is done.
    fn query(&self, fence: &Fence) -> Result<bool>;

    /// Waits until all work before the fence is done.
    fn wait(&self, fence: &Fence, mode: WaitMode) -> Result<()>;

    /// Returns a fence to the pool.
    fn release_fence(&self, fence: Fence);

    /// Waits until all work on the stream is done.
    fn synchronize(&self, stream: StreamId, mode: WaitMode) -> Result<()>;

    /// Registers the pages of a read-only file mapping, so that the device can read them.
    /// They are the pages that are in the page cache now: pin for one request, then [`Device::unpin`].
    ///
    /// # Safety
    /// The range must stay mapped until it is unpinned.
    unsafe fn pin(&self, ptr: *const u8, len: usize) -> Result<Pin>;

    /// Enqueues a copy of `len` bytes from `offset` in the pin into the device.
    ///
    /// # Safety
    /// The pin must live, and `dst` stay allocated, until the copy is done.
    unsafe fn copy_pinned(&self, stream: StreamId, dst: DeviceAddr, pin: &Pin, offset: usize, len: usize)
    -> Result<()>;

    /// Enqueues a call of a host function: it runs once earlier work is done, and later work
    /// waits for its end. It must not call a device.
    ///
    /// # Safety
    /// The function must be one that may be called once with the argument, on any thread, until the stream is
    /// synchronized.
    unsafe fn launch_host_func(
        &self,
        stream: StreamId,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Result<()> {
        let _ = (stream, function, argument);
        Err(DeviceError::new(crate::ErrorKind::Unsupported, "call of a host function"))
    }

    /// Stops a stream: once earlier work is done, `reached` is called, and later work waits until the [`StreamStop`]
    /// that it gets is dropped. `reached` may run on a thread of the driver: it must not call a device, and not wait.
    /// Until the stop is dropped, only work on a stream of [`Device::acquire_stream_beside_stops`] is sure to run.
    /// After an error of the device it is neither called nor dropped: see [`Device::is_lost`].
    fn stop_stream(&self, stream: StreamId, reached: Box<dyn FnOnce(StreamStop) + Send>) -> Result<()> {
        let _ = (stream, reached);
        Err(DeviceError::new(crate::ErrorKind::Unsupported, "stop of a stream"))
    }

    /// Whether that work runs while streams of the program are stopped. If not, streams should not be stopped.
    fn runs_beside_stops(&self) -> bool {
        true
    }

    /// An internal stream whose work runs while streams of the program are stopped. It is for the life of the process.
    fn acquire_stream_beside_stops(&self) -> Result<StreamId> {
        self.acquire_stream()
    }

    /// Whether no work runs any more: the context was destroyed, or a GPU kernel has failed.
    fn is_lost(&self) -> bool {
        false
    }

    /// Unregisters the pages. Every copy from the pin must be done.
    fn unpin(&self, pin: Pin);

    /// Makes [`Device::gather`] ready: may compile and load code. Slow the first time, free afterwards.
    fn load_gather_kernel(&self, store: &dyn KernelStore) -> Result<()> {
        let _ = store;
        Err(DeviceError::new(crate::ErrorKind::Unsupported, "gather"))
    }

    /// Whether [`Device::gather`] is ready: then [`Device::load_gather_kernel`] takes no time.
    fn is_gather_ready(&self) -> bool {
        false
    }

    /// The address of a bounce buffer as a gather sees it.
    fn device_ptr(&self, memory: *const u8) -> Result<u64> {
        let _ = memory;
        Err(DeviceError::new(crate::ErrorKind::Unsupported, "view of staging memory"))
    }

    /// The address of a pin's first byte as a gather sees it. The pin is contiguous.
    fn pin_device_ptr(&self, pin: &Pin) -> Result<u64> {
        let _ = pin;
        Err(DeviceError::new(crate::ErrorKind::Unsupported, "view of a pin"))
    }

    /// The address of a pin's first byte as the program's GPU kernels see it. The pin is contiguous.
    fn map_pin(&self, pin: &Pin) -> Result<u64> {
        let _ = pin;
        Err(DeviceError::new(crate::ErrorKind::Unsupported, "a pin as memory"))
    }

    /// Enqueues the copies of a list, in no order among themselves.
    ///
    /// # Safety
    /// `list` must be in a pinned bounce buffer and have `count` entries; it, every byte that they name and
    /// every destination must stay valid and unchanged until the gather is done.
    unsafe fn gather(&self, stream: StreamId, list: *const GatherEntry, count: usize) -> Result<()> {
        let _ = (stream, list, count);
        Err(DeviceError::new(crate::ErrorKind::Unsupported, "gather"))
    }

    /// Its memory for replicas of file pages; `None` where there is none.
    fn replica_memory(&'static self) -> Option<&'static dyn ReplicaMemory> {
        None
    }

    /// Its memory that other processes can map; `None` where there is none.
    fn shared_memory(&'static self) -> Option<&'static dyn SharedMemory> {
        None
    }

    /// Its copies from chunks of other devices; `None` where there are none.
    fn peer_memory(&'static self) -> Option<&'static dyn PeerMemory> {
        None
    }
}

impl fmt::Debug for dyn Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.id())
    }
}
