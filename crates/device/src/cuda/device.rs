//! One CUDA context as a device.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use spinio_sys::cuda::{Context, CuError, Driver, MemoryType, attribute, schedule};
use spinio_sys::linux;

use super::capture::RelaxedCapture;
use super::events::EventPools;
use super::kernel::LazyKernel;
use super::lookup;
use super::pinned_groups::{MIN_PART, PinnedGroups};
use super::registered::{MAX_PIN, PinSupport};
use super::stops::{self, Stops};
use super::streams::StreamPool;
use crate::{
    Allocation, AppStream, Capabilities, Device, DeviceAddr, DeviceError, DeviceId, DeviceKind, ErrorKind, Fence,
    GatherEntry, KernelStore, PageableAccess, PeerMemory, Pin, PinnedBuffer, ReplicaMemory, SharedMemory, StreamId,
    StreamStop, WaitMode, wait,
};

type Result<T> = core::result::Result<T, DeviceError>;

pub(super) struct Cuda {
    pub(super) driver: &'static Driver,
    context: Context,
    /// The context's number; another number at the same address is another context.
    id: u64,
    pub(super) ordinal: i32,
    flags: u32,
    lost: AtomicBool,
    pub(super) pin_support: PinSupport,
    pub(super) pinned_groups: PinnedGroups,
    pub(super) streams: StreamPool,
    pub(super) events: EventPools,
    pub(super) stops: Stops,
    pub(super) gather_kernel: LazyKernel,
    pub(super) fingerprint_kernel: LazyKernel,
    /// The device uses the host's addresses for registered memory.
    host_addresses_valid: bool,
}

/// The context, current on this thread.
pub(super) struct ContextGuard {
    pushed: Option<&'static Driver>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        if let Some(driver) = self.pushed {
            let _ = driver.pop();
        }
    }
}

impl Cuda {
    /// The object for a living context. Changes nothing in it.
    pub(super) fn new(driver: &'static Driver, context: Context, id: u64, ordinal: i32) -> Option<Cuda> {
        let mut new = Cuda {
            driver,
            context,
            id,
            ordinal,
            flags: 0,
            lost: AtomicBool::new(false),
            pin_support: PinSupport::default(),
            pinned_groups: PinnedGroups::default(),
            streams: StreamPool::new(),
            events: EventPools::new(),
            stops: Stops::default(),
            gather_kernel: LazyKernel::default(),
            fingerprint_kernel: LazyKernel::default(),
            host_addresses_valid: false,
        };
        let entered = new.enter().ok()?;
        let flags = driver.current_flags().unwrap_or(0);
        drop(entered);
        new.flags = flags;
        // Read-only registration has its own attribute; a driver that does not support it reports that at the first
        // try.
        new.pin_support.is_supported =
            driver.device_attribute(ordinal, attribute::HOST_REGISTER_SUPPORTED).unwrap_or(0) != 0;
        let same = attribute::CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
        new.host_addresses_valid = driver.device_attribute(ordinal, same).unwrap_or(0) != 0;
        Some(new)
    }

    pub(super) fn matches(&self, context: Context, id: u64) -> bool {
        self.context == context && self.id == id && !self.lost.load(Relaxed)
    }

    /// Whether its context is destroyed, noticed or not.
    pub(super) fn is_dead(&self) -> bool {
        // SAFETY: a query only; the driver recognises a destroyed context.
        self.lost.load(Relaxed) || unsafe { self.driver.context_id(self.context) } != Ok(self.id)
    }

    /// Ensures that the context lives, and that it is current until the guard is dropped.
    #[inline]
    pub(super) fn enter(&self) -> Result<ContextGuard> {
        debug_assert!(!linux::in_shadow_table(), "the driver's descriptors are not in this thread's fd table");
        if self.lost.load(Relaxed) {
            return Err(self.mark_lost());
        }
        // SAFETY: a query only; the driver recognises a destroyed context.
        match unsafe { self.driver.context_id(self.context) } {
            Ok(id) if id == self.id => {}
            Ok(_) => return Err(self.mark_lost()),
            Err(e) => return Err(self.driver_error("cuCtxGetId", e)),
        }
        match self.driver.current() {
            Ok(current) if current == self.context => Ok(ContextGuard { pushed: None }),
            Ok(_) => {
                // SAFETY: alive: its number was compared above.
                unsafe { self.driver.push(self.context) }.map_err(|e| self.driver_error("cuCtxPushCurrent", e))?;
                Ok(ContextGuard { pushed: Some(self.driver) })
            }
            Err(e) => Err(self.driver_error("cuCtxGetCurrent", e)),
        }
    }

    #[cold]
    fn mark_lost(&self) -> DeviceError {
        self.lost.store(true, Relaxed);
        DeviceError { kind: ErrorKind::ContextLost, operation: "context", code: CuError::CONTEXT_IS_DESTROYED.0 }
    }

    /// Converts the driver's error to a device error.
    #[cold]
    pub(super) fn driver_error(&self, operation: &'static str, e: CuError) -> DeviceError {
        let kind = match e {
            e if e.is_context_lost() => {
                self.lost.store(true, Relaxed);
                ErrorKind::ContextLost
            }
            CuError::OUT_OF_MEMORY => ErrorKind::NoMemory,
            CuError::NOT_SUPPORTED | CuError::NO_SUCH_FUNCTION => ErrorKind::Unsupported,
            _ => ErrorKind::Driver,
        };
        DeviceError { kind, operation, code: e.0 }
    }
}

impl Device for Cuda {
    fn id(&self) -> DeviceId {
        DeviceId { kind: DeviceKind::Cuda, ordinal: self.ordinal as u32 }
    }

    fn describe(&self) -> String {
        let driver = self.driver;
        let name = driver.device_name(self.ordinal).unwrap_or_else(|e| e.to_string());
        let gib = driver.device_memory(self.ordinal).unwrap_or(0) as f64 / f64::from(1 << 30);
        let pci = driver.device_pci(self.ordinal).unwrap_or_default();
        let version = driver.version().unwrap_or(0);
        let waits = match self.flags & schedule::MASK {
            schedule::SPIN => "spinning",
            schedule::YIELD => "yielding",
            schedule::BLOCKING => "blocking",
            _ => "as the driver chooses",
        };
        let (major, minor) = (version / 1000, version % 1000 / 10);
        format!("{name}, {gib:.0} GiB, {pci}, driver for CUDA {major}.{minor}; waits {waits}")
    }

    fn capabilities(&self) -> Capabilities {
        let gathers = !self.gather_kernel.has_failed();
        let pins = self.pin_support.is_worth_trying();
        Capabilities { can_pin: pins, has_dma_engine: true, max_pin: MAX_PIN, can_gather: gathers }
    }

    fn pageable_access(&self) -> PageableAccess {
        let has = |which| self.driver.device_attribute(self.ordinal, which).unwrap_or(0) != 0;
        match (has(attribute::PAGEABLE_MEMORY_ACCESS), has(attribute::PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)) {
            (false, _) => PageableAccess::None,
            (true, false) => PageableAccess::Faults,
            (true, true) => PageableAccess::HostPageTables,
        }
    }

    fn allocation(&'static self, addr: DeviceAddr, wanted: u64) -> Option<Allocation> {
        let info = self.driver.pointer_info(addr.0).ok().filter(|i| i.kind == MemoryType::Device)?;
        let own_info = lookup::device_for(self.driver, &info)?;
        core::ptr::eq(own_info, self).then(|| lookup::allocation_of(self, &info, addr.0, wanted))?
    }

    fn alloc_pinned(&self, len: usize) -> Result<PinnedBuffer> {
        if len >= MIN_PART { self.alloc_pinned_part(len) } else { self.alloc_pinned_host(len) }
    }

    fn free_pinned(&self, memory: PinnedBuffer) {
        if memory.len >= MIN_PART {
            self.free_pinned_part(memory);
        } else {
            self.free_pinned_host(memory);
        }
    }

    unsafe fn register_host(&self, ptr: *mut u8, len: usize) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.register_memory(ptr, len) }
    }

    fn unregister_host(&self, ptr: *mut u8) -> bool {
        self.unregister_memory(ptr)
    }

    #[inline]
    fn app_stream(&self) -> AppStream {
        self.thread_app_stream()
    }

    fn is_capturing(&self, stream: StreamId) -> bool {
        self.enter().is_ok_and(|_entered| self.stream_captures(stream))
    }

    fn acquire_stream(&self) -> Result<StreamId> {
        let _entered = self.enter()?;
        self.take_stream()
    }

    fn release_stream(&self, stream: StreamId) {
        self.recycle_stream(stream);
    }

    #[inline]
    unsafe fn copy_in(&self, stream: StreamId, dst: DeviceAddr, src: *const u8, len: usize) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: the caller guarantees the memory; the stream belongs to this context, which lives.
        unsafe { self.driver.copy_in(dst.0, src, len, Cuda::raw_stream(stream)) }
            .map_err(|e| self.copy_error("cuMemcpyHtoDAsync", e))
    }

    unsafe fn copy_out(&self, stream: StreamId, dst: *mut u8, src: DeviceAddr, len: usize) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: as above.
        unsafe { self.driver.copy_out(dst, src.0, len, Cuda::raw_stream(stream)) }
            .map_err(|e| self.copy_error("cuMemcpyDtoHAsync", e))
    }

    unsafe fn launch_host_func(
        &self,
        stream: StreamId,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: the caller guarantees the function; the stream belongs to this context, which lives.
        unsafe { self.driver.launch_host_func(Cuda::raw_stream(stream), function, argument) }
            .map_err(|e| self.driver_error("cuLaunchHostFunc", e))
    }

    fn stop_stream(&self, stream: StreamId, reached: Box<dyn FnOnce(StreamStop) + Send>) -> Result<()> {
        self.enqueue_stop(stream, reached)
    }

    fn runs_beside_stops(&self) -> bool {
        stops::has_channels()
    }

    fn acquire_stream_beside_stops(&self) -> Result<StreamId> {
        self.load_kernels_beside_stops()?;
        let _entered = self.enter()?;
        self.new_stream_beside_stops()
    }

    fn is_lost(&self) -> bool {
        self.is_dead() || self.has_failed()
    }

    fn fence(&self, stream: StreamId) -> Result<Fence> {
        let _entered = self.enter()?;
        self.refuse_if_capturing(stream, "cuEventRecord")?;
        self.record_fence(stream, self.flags & schedule::MASK == schedule::BLOCKING)
    }

    fn wait_event(&self, stream: StreamId, fence: &Fence) -> Result<()> {
        let _entered = self.enter()?;
        self.refuse_if_capturing(stream, "cuStreamWaitEvent")?;
        self.stream_wait_fence(stream, fence)
    }

    fn query(&self, fence: &Fence) -> Result<bool> {
        let _entered = self.enter()?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        self.fence_query(fence)
    }

    fn wait(&self, fence: &Fence, mode: WaitMode) -> Result<()> {
        let _entered = self.enter()?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        self.wait_fence(fence, mode)
    }

    fn release_fence(&self, fence: Fence) {
        self.recycle_fence(fence);
    }

    fn synchronize(&self, stream: StreamId, mode: WaitMode) -> Result<()> {
        let _entered = self.enter()?;
        self.refuse_if_capturing(stream, "cuStreamSynchronize")?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        if wait::must_poll() {
            return wait::poll(|| {
                // SAFETY: the stream belongs to this context, which lives.
                let done = unsafe { self.driver.stream_query(Cuda::raw_stream(stream)) };
                done.map_err(|e| self.driver_error("cuStreamQuery", e))
            });
        }
        if mode == WaitMode::Context {
            // SAFETY: the stream belongs to this context, which lives.
            return unsafe { self.driver.stream_synchronize(Cuda::raw_stream(stream)) }
                .map_err(|e| self.driver_error("cuStreamSynchronize", e));
        }
        let fence = self.record_fence(stream, true)?;
        let result = self.wait_fence(&fence, mode);
        self.recycle_fence(fence);
        result
    }

    unsafe fn pin(&self, ptr: *const u8, len: usize) -> Result<Pin> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.pin_pages(ptr, len) }
    }

    unsafe fn copy_pinned(
        &self,
        stream: StreamId,
        dst: DeviceAddr,
        pin: &Pin,
        offset: usize,
        len: usize,
    ) -> Result<()> {
        debug_assert!(offset + len <= pin.len);
        // SAFETY: the pin keeps its range mapped and registered; the caller guarantees the rest.
        unsafe { self.copy_in(stream, dst, pin.ptr.wrapping_add(offset), len) }
    }

    fn unpin(&self, pin: Pin) {
        self.unpin_pages(pin);
    }

    fn load_gather_kernel(&self, store: &dyn KernelStore) -> Result<()> {
        self.load_or_compile(store).map(drop)
    }

    fn is_gather_ready(&self) -> bool {
        self.gather_kernel.is_ready()
    }

    fn device_ptr(&self, memory: *const u8) -> Result<u64> {
        if self.host_addresses_valid {
            return Ok(memory as u64);
        }
        let _entered = self.enter()?;
        self.driver.host_device_pointer(memory).map_err(|e| self.driver_error("cuMemHostGetDevicePointer", e))
    }

    fn pin_device_ptr(&self, pin: &Pin) -> Result<u64> {
        self.device_ptr(pin.ptr)
    }

    fn map_pin(&self, pin: &Pin) -> Result<u64> {
        self.device_ptr(pin.ptr)
    }

    unsafe fn gather(&self, stream: StreamId, list: *const GatherEntry, count: usize) -> Result<()> {
        let list = self.device_ptr(list.cast())?;
        let _entered = self.enter()?;
        // SAFETY: guaranteed by the caller.
        unsafe { self.launch_gather(stream, list, count) }
    }

    fn replica_memory(&'static self) -> Option<&'static dyn ReplicaMemory> {
        Some(self)
    }

    fn shared_memory(&'static self) -> Option<&'static dyn SharedMemory> {
        Some(self)
    }

    fn peer_memory(&'static self) -> Option<&'static dyn PeerMemory> {
        Some(self)
    }
}

impl Cuda {
    /// A copy returns "invalid value" when its device range is not (wholly) allocated any more.
    #[cold]
    fn copy_error(&self, operation: &'static str, e: CuError) -> DeviceError {
        let error = self.driver_error(operation, e);
        let kind = if e == CuError::INVALID_VALUE { ErrorKind::BadAddress } else { error.kind };
        DeviceError { kind, ..error }
    }
}
