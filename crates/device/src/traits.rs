//! The contract between `io` and a device.
//!
//! Order is the heart of it. A **queue** runs its copies one after another; queue 0
//! is the device's default queue (CUDA: the legacy default stream), which also waits
//! for, and is waited for by, the program's own ordinary streams. A **fence** marks a
//! place in a queue.
//!
//! ```text
//!   small read                     large read
//!   default: copy copy copy        default: ──fence─┐
//!            └ returns once        leased:          └follow, copy copy ─ fence ─ wait
//!              queued
//! ```

use std::ffi::c_void;
use std::fmt;

use crate::DeviceError;

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

/// Which device: back end and number within it. Written `cuda:0`.
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

/// What a device can do at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// It can read page-cache pages that [`Device::pin`] registered.
    pub can_pin: bool,
    /// It has a DMA engine: [`Device::copy_in`] works and staging is worth having.
    /// Without it (p2pmem) bytes move by CPU stores or by the storage device.
    pub has_dma_engine: bool,
    /// How many bytes one pin may cover; larger ranges are pinned piece by piece.
    pub max_pin: u64,
    /// It can fetch many small pieces at once: [`Device::gather`] works, once it was prepared.
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
    /// The kernel can make a storage device DMA into it.
    pub p2p_mapped: bool,
}

impl Allocation {
    /// Bytes from `addr` to the end of the allocation.
    pub fn bytes_left(&self, addr: DeviceAddr) -> u64 {
        (self.start.0 + self.len).saturating_sub(addr.0)
    }
}

/// A queue of a device; 0 is the default queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId(pub u64);

impl StreamId {
    /// A number that means another queue on each thread (`cudaStreamPerThread`).
    pub const PER_THREAD: StreamId = StreamId(2);
}

/// A place in a queue. From a bounded pool: give it back with [`Device::release_fence`].
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

// SAFETY: plain memory; who may touch it when is the staging ring's business.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above.
unsafe impl Sync for PinnedBuffer {}

/// Page-cache pages that the device may read, made by [`Device::pin`].
#[derive(Debug)]
#[must_use]
pub struct Pin {
    /// Where the range is mapped.
    pub ptr: *const u8,
    /// Bytes.
    pub len: usize,
    /// The back end's own.
    pub handle: u64,
}

/// One piece for [`Device::gather`], as the device itself reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GatherEntry {
    /// Where the bytes are: what [`Device::view`] or [`Device::view_pin`] said, and so much further on.
    pub src: u64,
    /// Where they go: device memory.
    pub dst: u64,
    /// How many.
    pub len: u64,
}

/// Where compiled code for devices is kept between processes.
pub trait KernelStore {
    /// What was kept under a name.
    fn load(&self, name: &str) -> Option<Vec<u8>>;
    /// Keeps it; without effect where nothing can be kept.
    fn store(&self, name: &str, code: &[u8]);
}

/// How to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitMode {
    /// As the program's context says (CUDA's spin, yield or blocking schedule).
    Context,
    /// Asleep, whatever the context says: for long transfers.
    Block,
}

/// A device. All calls may come from any thread, also from several at once.
pub trait Device: Send + Sync + 'static {
    /// Which device this is.
    fn id(&self) -> DeviceId;

    /// One line for people: name, memory, driver.
    fn describe(&self) -> String;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// The allocation that holds `addr`, asked afresh: `None` if it is (no longer) ours.
    /// Neighbouring mappings that the program sees as one range (CUDA VMM) count as one, as far as `want` bytes reach.
    fn allocation(&'static self, addr: DeviceAddr, wanted: u64) -> Option<Allocation>;

    /// New pinned memory for the staging ring, for the life of the process.
    fn alloc_pinned(&self, len: usize) -> Result<PinnedBuffer>;

    /// Gives back pinned memory of [`Device::staging`] that no copy uses any more.
    fn free_pinned(&self, buffer: PinnedBuffer);

    /// The queue that small requests of this thread go to: the default queue, or the one the thread chose.
    /// Sets aside what must not be disturbed: while the program captures a graph that the default queue would
    /// break, this is a queue of ours and `true` (then the caller must wait before it returns).
    fn app_stream(&self) -> (StreamId, bool);

    /// Whether what is put on a queue now would become part of a graph, or spoil one.
    fn is_capturing(&self, stream: StreamId) -> bool {
        let _ = stream;
        false
    }

    /// Lends a queue that nobody else uses, ordered with nothing; from a bounded pool.
    fn acquire_stream(&self) -> Result<StreamId>;

    /// Gives it back, idle or not.
    fn release_stream(&self, stream: StreamId);

    /// Queues a copy from pinned host memory (or any host memory, slower) into the device.
    ///
    /// # Safety
    /// `src` must stay readable and unchanged, and `dst` allocated, until the copy is done.
    unsafe fn copy_in(&self, stream: StreamId, dst: DeviceAddr, src: *const u8, len: usize) -> Result<()>;

    /// Queues a copy out of the device into pinned host memory (or any host memory, slower).
    ///
    /// # Safety
    /// `dst` must stay writable and unread, and `src` allocated, until the copy is done.
    unsafe fn copy_out(&self, stream: StreamId, dst: *mut u8, src: DeviceAddr, len: usize) -> Result<()>;

    /// Marks the present end of a queue.
    fn fence(&self, stream: StreamId) -> Result<Fence>;

    /// Makes what is queued on `queue` from now on wait for the fence.
    fn wait_event(&self, stream: StreamId, fence: &Fence) -> Result<()>;

    /// Whether everything before the fence is done.
    fn query(&self, fence: &Fence) -> Result<bool>;

    /// Waits until everything before the fence is done.
    fn wait(&self, fence: &Fence, mode: WaitMode) -> Result<()>;

    /// Gives a fence back to the pool.
    fn release_fence(&self, fence: Fence);

    /// Waits until everything on the queue is done.
    fn synchronize(&self, stream: StreamId, mode: WaitMode) -> Result<()>;

    /// Registers the pages behind a read-only file mapping, so that the device can read them.
    /// They are the pages that are in the page cache now: pin for one request, then [`Device::unpin`].
    ///
    /// # Safety
    /// The range must stay mapped until it is unpinned.
    unsafe fn pin(&self, ptr: *const u8, len: usize) -> Result<Pin>;

    /// Queues a copy of `len` bytes from `offset` in the pin into the device.
    ///
    /// # Safety
    /// The pin must live, and `dst` stay allocated, until the copy is done.
    unsafe fn copy_pinned(&self, stream: StreamId, dst: DeviceAddr, pin: &Pin, offset: usize, len: usize)
    -> Result<()>;

    /// Queues a call of a host function: it runs once what was queued before it is done, and what is queued behind it
    /// waits for its end. It must not call a device.
    ///
    /// # Safety
    /// The function must be one that may be called once with the argument, on any thread, until the queue is drained.
    unsafe fn launch_host_func(
        &self,
        stream: StreamId,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Result<()> {
        let _ = (stream, function, argument);
        Err(DeviceError::new(crate::ErrorKind::Unsupported, "call of a host function"))
    }

    /// Gives the pages back. Every copy from the pin must be done.
    fn unpin(&self, pin: Pin);

    /// Makes [`Device::gather`] ready: may compile and load code. Slow the first time, free afterwards.
    fn load_gather_kernel(&self, store: &dyn KernelStore) -> Result<()> {
        let _ = store;
        Err(DeviceError::new(crate::ErrorKind::Unsupported, "gather"))
    }

    /// Whether [`Device::gather`] is ready: then [`Device::prepare_gather`] takes no time.
    fn is_gather_ready(&self) -> bool {
        false
    }

    /// Where a gather finds pinned memory of [`Device::staging`].
    fn device_ptr(&self, memory: *const u8) -> Result<u64> {
        let _ = memory;
        Err(DeviceError::new(crate::ErrorKind::Unsupported, "view of staging memory"))
    }

    /// Where a gather finds the first byte of a pin. The rest lies behind it.
    fn pin_device_ptr(&self, pin: &Pin) -> Result<u64> {
        let _ = pin;
        Err(DeviceError::new(crate::ErrorKind::Unsupported, "view of a pin"))
    }

    /// Where a kernel of the program finds the first byte of a pin, as memory. The rest lies behind it.
    fn map_pin(&self, pin: &Pin) -> Result<u64> {
        let _ = pin;
        Err(DeviceError::new(crate::ErrorKind::Unsupported, "a pin as memory"))
    }

    /// Queues the copies of a list, in no order among themselves.
    ///
    /// # Safety
    /// `list` must lie in pinned memory of [`Device::staging`] and hold `count` pieces; it, every byte that they name and
    /// every place that these go to must stay as they are until the gather is done.
    unsafe fn gather(&self, stream: StreamId, list: *const GatherEntry, count: usize) -> Result<()> {
        let _ = (stream, list, count);
        Err(DeviceError::new(crate::ErrorKind::Unsupported, "gather"))
    }
}

impl fmt::Debug for dyn Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.id())
    }
}
