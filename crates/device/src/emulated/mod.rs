//! The emulated device: a software GPU, so that everything runs and is tested on any machine.
//!
//! ```text
//!   program ── device address ── PROT_NONE: the Linux kernel returns EFAULT, a store faults
//!                  │
//!   io ── copy_in, copy_out, copy_pinned ──> streams ──> engine thread ──> the bytes, through another mapping
//!      └─ pin ──> worker thread ──> pipes that reference the page cache's own pages
//! ```
//!
//! It is as strict as a GPU. The CPU cannot access its memory by accident; fresh memory contains [`POISON`]; copies
//! complete later, and read their source when they run; pins become stale; after `fork` the child has no device.
//! [`Emulated::pause`] stalls the engine, so that a test which lacks a wait fails every time.
//!
//! GPU kernels are functions of the program, run in stream order, those of several streams side by side. The memory is
//! accessible while one runs ([`Emulated::launch`]); the headers in `device/` make them from CUDA C++. A process may have
//! several devices (`devices.rs`), which copy from each other and access each other's memory (`peer.rs`).
//!
//! Known differences: managed memory and graph capture do not exist here; one engine serves both directions;
//! while kernels run, the CPU can access the memory by accident; a freed range is refused at once, while a GPU may
//! keep it mapped.

#![expect(unsafe_code, reason = "driver calls and device memory")]

mod chunks;
mod config;
mod devices;
mod engine;
mod first_fit;
mod gather;
mod memory;
mod peer;
mod pins;
mod replica;
mod shared_memory;
mod worker;

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};

use spinio_sys::linux::{self, FdTableRoot};

pub use self::config::{Config, ConfigError, MAX_DEVICES};
pub use self::devices::{configure, count, current, current_ordinal, device, of_stream, set_current};
pub(crate) use self::devices::{current_in_use, with_id};
pub use self::memory::POISON;
pub(crate) use self::shared_memory::ordinal_of;

use self::engine::{Engine, Kernel, Operation};
use self::memory::{Direction, Memory};
use self::pins::{MAX_PIN, Pins};
use self::worker::Worker;
use crate::host_memory::{HostMemoryPool, system_error};
use crate::{
    Allocation, AppStream, Capabilities, Device, DeviceAddr, DeviceError, DeviceId, DeviceKind, ErrorKind, Fence,
    GatherEntry, KernelStore, PageableAccess, PeerMemory, Pin, PinnedBuffer, ReplicaMemory, SharedMemory, StreamId,
    StreamStop, WaitMode, registry, thread_stream,
};

type Result<T> = core::result::Result<T, DeviceError>;

/// A software GPU. It lives as long as the process.
#[derive(Debug)]
pub struct Emulated {
    ordinal: u32,
    /// Its number in the table of owners.
    owner: u32,
    config: Config,
    alive: &'static AtomicU64,
    memory: Arc<Memory>,
    engine: Arc<Engine>,
    pins: Arc<Pins>,
    worker: Worker,
    pinned: HostMemoryPool,
    registered: AtomicUsize,
}

/// Acquired and not released objects; all zero when nothing leaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceCounts {
    /// Pins.
    pub pins: usize,
    /// Pipes of pins.
    pub pipes: usize,
    /// Fences.
    pub fences: usize,
    /// Internal streams.
    pub streams: usize,
    /// Bounce buffers.
    pub pinned_blocks: usize,
    /// Registered ranges of host memory.
    pub registered: usize,
    /// Allocations of device memory.
    pub allocations: usize,
    /// Handles and mappings of chunks, and reserved ranges for them.
    pub chunks: usize,
}

/// The next number of a device that is none of [`device`]'s.
static COUNT: AtomicU32 = AtomicU32::new(MAX_DEVICES);

impl Emulated {
    /// Creates a device that is none of the process's numbered ones, and registers it: for tests.
    pub fn start(config: Config) -> Result<&'static Emulated> {
        Emulated::start_numbered(config, COUNT.fetch_add(1, Relaxed))
    }

    fn start_numbered(config: Config, ordinal: u32) -> Result<&'static Emulated> {
        let no_thread = DeviceError::new(ErrorKind::Driver, "shadow thread of the emulated device");
        let root = FdTableRoot::new().map_err(|_| no_thread)?;
        let worker = Worker::start(&root, "spinio-emu-pin")?;
        let memory = Arc::new(worker.run_blocking(|| Memory::map(config.size, config.bar))??);
        let engine = Arc::new(Engine::new(config, ordinal));
        let pins = Arc::new(Pins::default());
        let (engine_ref, pins_ref, memory_ref) = (Arc::clone(&engine), Arc::clone(&pins), Arc::clone(&memory));
        if !root.spawn("spinio-emu-dma", move || engine_ref.run(&memory_ref, &pins_ref)) {
            return Err(no_thread);
        }
        let functions = Arc::clone(&engine);
        if !root.spawn("spinio-emu-host", move || functions.run_host_functions()) {
            return Err(no_thread);
        }
        let (kernels, memory_ref) = (Arc::clone(&engine), Arc::clone(&memory));
        let threads = Arc::new(root);
        let root_ref = Arc::clone(&threads);
        if !threads.spawn("spinio-emu-kern", move || Engine::start_kernel_threads(&kernels, &memory_ref, &root_ref)) {
            return Err(no_thread);
        }
        let alive = linux::wipe_on_fork_word().map_err(|e| system_error("madvise", e))?;
        alive.store(1, Relaxed);
        let (start, len) = memory.range();
        let mut owner_number = 0;
        let device: &'static Emulated = registry::add_owner(|owner| {
            owner_number = owner;
            let staging = HostMemoryPool::default();
            Box::leak(Box::new(Emulated {
                ordinal,
                owner,
                config,
                alive,
                memory,
                engine,
                pins,
                worker,
                pinned: staging,
                registered: AtomicUsize::new(0),
            }))
        })?;
        devices::add(device);
        registry::add_range(owner_number, start, len)?;
        Ok(device)
    }

    /// Allocates memory, filled with [`POISON`].
    pub fn alloc(&self, len: usize, host_mapped: bool) -> Result<DeviceAddr> {
        self.check()?;
        self.memory.alloc(len as u64, host_mapped)
    }

    /// Frees memory, after all work enqueued on the device is done.
    pub fn free(&self, addr: DeviceAddr) -> Result<()> {
        self.check()?;
        self.engine.synchronize_all();
        self.memory.free(addr)
    }

    /// A stream of the program, as a CUDA stream: ordered with stream 0 both ways. For
    /// [`set_thread_stream`](crate::set_thread_stream).
    pub fn new_stream(&self) -> Result<StreamId> {
        self.check()?;
        Ok(StreamId(self.engine.new_app_stream()))
    }

    /// A stream of the program that is ordered with no other, as a non-blocking CUDA stream.
    pub fn new_unordered_stream(&self) -> Result<StreamId> {
        self.check()?;
        Ok(StreamId(self.engine.new_unordered_stream()))
    }

    /// Enqueues a call of `function`, during which the CPU can load and store in this device's memory.
    ///
    /// # Safety
    /// The function may be called with the argument, on another thread, until [`Emulated::wait_stream`] has returned.
    pub unsafe fn launch(
        &self,
        stream: StreamId,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Result<()> {
        self.check()?;
        self.engine
            .submit(stream.0, Operation::Kernel(Kernel { function, argument: argument as u64, maps_memory: true }))
    }

    /// Waits for all work on a stream; on stream 0 for all work anywhere, as a device's synchronisation does.
    pub fn wait_stream(&self, stream: StreamId) -> Result<()> {
        self.check()?;
        if stream.0 == 0 {
            self.engine.synchronize_all();
        }
        self.synchronize(stream, WaitMode::Block)
    }

    /// For tests: no copy starts until [`Emulated::resume`], and none is running when this returns.
    pub fn pause(&self) {
        self.engine.pause();
    }

    /// For tests: undoes one [`Emulated::pause`].
    pub fn resume(&self) {
        self.engine.resume();
    }

    /// For tests: the acquired objects.
    pub fn resources_in_use(&self) -> ResourceCounts {
        let (queues, fences) = self.engine.in_use();
        let (pins, pipes) = self.pins.in_use();
        ResourceCounts {
            pins,
            pipes,
            fences,
            streams: queues,
            pinned_blocks: self.pinned.in_use(),
            registered: self.registered.load(Relaxed),
            allocations: self.memory.count(),
            chunks: self.memory.chunks.in_use(),
        }
    }

    /// In a forked child the threads do not exist, and locks may be held forever: no operation works there.
    fn check(&self) -> Result<()> {
        if self.alive.load(Relaxed) == 1 {
            Ok(())
        } else {
            Err(DeviceError::new(ErrorKind::ContextLost, "use after fork"))
        }
    }
}

impl Device for Emulated {
    fn id(&self) -> DeviceId {
        DeviceId { kind: DeviceKind::Emulated, ordinal: self.ordinal }
    }

    fn describe(&self) -> String {
        let c = &self.config;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let speed = c.bandwidth.map_or("as fast as memory".to_owned(), |b| format!("{} GB/s", b / 1e9));
        let hmm = if c.hmm { "; kernels access all memory of the process, as with HMM" } else { "" };
        let p2p = if c.p2p { " and P2P-mapped" } else { "" };
        format!(
            "emulated GPU, {} MiB of memory, {} MiB host-mapped{p2p}; DMA {speed}, latency {} us{hmm}",
            mib(c.size),
            mib(c.bar),
            c.latency.as_secs_f64() * 1e6,
        )
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { can_pin: true, has_dma_engine: true, max_pin: MAX_PIN as u64, can_gather: true }
    }

    fn pageable_access(&self) -> PageableAccess {
        if self.config.hmm { PageableAccess::Faults } else { PageableAccess::None }
    }

    fn allocation(&'static self, addr: DeviceAddr, _want: u64) -> Option<Allocation> {
        self.check().ok()?;
        let allocation = self.memory.find(addr)?;
        Some(Allocation {
            device: self,
            start: allocation.start,
            len: allocation.len,
            host_mapped: allocation.host_mapped,
            p2p_mapped: allocation.host_mapped && self.config.p2p,
        })
    }

    fn alloc_pinned(&self, len: usize) -> Result<PinnedBuffer> {
        self.check()?;
        self.pinned.acquire(len)
    }

    fn free_pinned(&self, memory: PinnedBuffer) {
        if self.check().is_ok() {
            self.pinned.release(memory);
        }
    }

    unsafe fn register_host(&self, _ptr: *mut u8, _len: usize) -> Result<()> {
        self.check()?;
        self.registered.fetch_add(1, Relaxed);
        Ok(())
    }

    fn unregister_host(&self, _ptr: *mut u8) -> bool {
        if self.check().is_ok() {
            // As a driver, which waits for running kernels.
            self.engine.synchronize_all();
            self.registered.fetch_sub(1, Relaxed);
        }
        true
    }

    fn app_stream(&self) -> AppStream {
        AppStream::Named(thread_stream())
    }

    fn acquire_stream(&self) -> Result<StreamId> {
        self.check()?;
        self.engine.acquire_stream().map(StreamId)
    }

    fn release_stream(&self, stream: StreamId) {
        if self.check().is_ok() {
            self.engine.release_stream(stream.0);
        }
    }

    unsafe fn copy_in(&self, stream: StreamId, dst: DeviceAddr, src: *const u8, len: usize) -> Result<()> {
        self.check()?;
        let dst = self.memory.engine_addr(dst, len, Direction::Store, "copy to the device")?;
        self.engine.submit(stream.0, Operation::Bytes { dst, src: src as u64, len })
    }

    unsafe fn copy_out(&self, stream: StreamId, dst: *mut u8, src: DeviceAddr, len: usize) -> Result<()> {
        self.check()?;
        let src = self.memory.engine_addr(src, len, Direction::Load, "copy from the device")?;
        self.engine.submit(stream.0, Operation::Bytes { dst: dst as u64, src, len })
    }

    unsafe fn launch_host_func(
        &self,
        stream: StreamId,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Result<()> {
        self.check()?;
        self.engine
            .submit(stream.0, Operation::Kernel(Kernel { function, argument: argument as u64, maps_memory: false }))
    }

    fn stop_stream(&self, stream: StreamId, reached: Box<dyn FnOnce(StreamStop) + Send>) -> Result<()> {
        self.check()?;
        let engine = Arc::clone(&self.engine);
        let stop = move |at| reached(StreamStop::new(move || engine.go_on(at)));
        self.engine.submit_stop(stream.0, Box::new(stop))
    }

    fn is_lost(&self) -> bool {
        self.check().is_err()
    }

    fn fence(&self, stream: StreamId) -> Result<Fence> {
        self.check()?;
        self.engine.fence(stream.0).map(Fence)
    }

    fn wait_event(&self, stream: StreamId, fence: &Fence) -> Result<()> {
        self.check()?;
        self.engine.wait_mark(stream.0, self.engine.fence_mark(fence.0)?)
    }

    fn query(&self, fence: &Fence) -> Result<bool> {
        self.check()?;
        self.engine.query(self.engine.fence_mark(fence.0)?)
    }

    fn wait(&self, fence: &Fence, _how: WaitMode) -> Result<()> {
        self.check()?;
        self.engine.wait(self.engine.fence_mark(fence.0)?)
    }

    fn release_fence(&self, fence: Fence) {
        if self.check().is_ok() {
            self.engine.release_fence(fence.0);
        }
    }

    fn synchronize(&self, stream: StreamId, _how: WaitMode) -> Result<()> {
        self.check()?;
        self.engine.wait(self.engine.mark(stream.0)?)
    }

    unsafe fn pin(&self, ptr: *const u8, len: usize) -> Result<Pin> {
        self.check()?;
        std::thread::sleep(self.config.pin_latency);
        let at = ptr as usize;
        // SAFETY: the caller keeps the range mapped, and expects its pages as they are when they are copied.
        let pinned = self.worker.run_blocking(|| unsafe { self.pins.pin(at as *const u8, len) });
        Ok(Pin { ptr, len, handle: pinned?? })
    }

    unsafe fn copy_pinned(
        &self,
        stream: StreamId,
        dst: DeviceAddr,
        pin: &Pin,
        offset: usize,
        len: usize,
    ) -> Result<()> {
        self.check()?;
        if !self.pins.contains_range(pin.handle, offset, len) {
            return Err(DeviceError::new(ErrorKind::BadAddress, "copy from a pin"));
        }
        let dst = self.memory.engine_addr(dst, len, Direction::Store, "copy to the device")?;
        self.engine.submit(stream.0, Operation::Pinned { dst, pin: pin.handle, offset, len })
    }

    fn unpin(&self, pin: Pin) {
        if self.check().is_ok() {
            std::thread::sleep(self.config.unpin_latency);
            let _ = self.worker.run_blocking(|| self.pins.unpin(pin.handle));
        }
    }

    fn load_gather_kernel(&self, _code: &dyn KernelStore) -> Result<()> {
        self.check()
    }

    fn is_gather_ready(&self) -> bool {
        true
    }

    fn device_ptr(&self, memory: *const u8) -> Result<u64> {
        Ok(memory as u64)
    }

    fn pin_device_ptr(&self, pin: &Pin) -> Result<u64> {
        Ok(gather::device_ptr_of(pin.handle))
    }

    fn map_pin(&self, pin: &Pin) -> Result<u64> {
        // GPU kernels run on the CPU: they read the mapping itself.
        Ok(pin.ptr as u64)
    }

    unsafe fn gather(&self, stream: StreamId, list: *const GatherEntry, count: usize) -> Result<()> {
        self.check()?;
        self.engine.submit(stream.0, Operation::Gather { list: list as u64, count })
    }

    fn replica_memory(&'static self) -> Option<&'static dyn ReplicaMemory> {
        Some(self)
    }

    fn shared_memory(&'static self) -> Option<&'static dyn SharedMemory> {
        self.config.vmm.then_some(self)
    }

    fn peer_memory(&'static self) -> Option<&'static dyn PeerMemory> {
        self.config.vmm.then_some(self)
    }
}

#[cfg(test)]
mod tests;
