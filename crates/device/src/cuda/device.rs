//! One CUDA context as a device.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

use spinio_sys::cuda::{Context, CuError, Driver, Function, MemoryType, attribute, schedule};
use spinio_sys::linux;

use super::capture::Relaxed as RelaxedCapture;
use super::events::Events;
use super::lookup;
use super::queues::Queues;
use super::registered::{MAX_PIN, Pinning};
use crate::{
    Abilities, Allocation, CodeStore, Device, DeviceAddr, DeviceError, DeviceId, DeviceKind, ErrorKind, Fence,
    Gathered, Pin, Pinned, QueueId, Wait,
};

type Result<T> = core::result::Result<T, DeviceError>;

pub(super) struct Cuda {
    pub(super) driver: &'static Driver,
    context: Context,
    /// The context's number; another number at the same address is another context.
    id: u64,
    pub(super) ordinal: i32,
    flags: u32,
    gone: AtomicBool,
    pub(super) pinning: Pinning,
    pub(super) queues: Queues,
    pub(super) events: Events,
    pub(super) kernel: OnceLock<core::result::Result<Function, CuError>>,
    pub(super) loading: Mutex<()>,
    /// The device sees registered memory at the addresses that the host sees it at.
    same_addresses: bool,
}

/// The context, current on this thread.
pub(super) struct Entered {
    pushed: Option<&'static Driver>,
}

impl Drop for Entered {
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
            gone: AtomicBool::new(false),
            pinning: Pinning::default(),
            queues: Queues::new(),
            events: Events::new(),
            kernel: OnceLock::new(),
            loading: Mutex::new(()),
            same_addresses: false,
        };
        let entered = new.enter().ok()?;
        let flags = driver.current_flags().unwrap_or(0);
        drop(entered);
        new.flags = flags;
        // Read-only registration has an attribute of its own; a driver that does not know it says so at the first try.
        new.pinning.is_possible =
            driver.device_attribute(ordinal, attribute::HOST_REGISTER_SUPPORTED).unwrap_or(0) != 0;
        let same = attribute::CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
        new.same_addresses = driver.device_attribute(ordinal, same).unwrap_or(0) != 0;
        Some(new)
    }

    pub(super) fn stands_for(&self, context: Context, id: u64) -> bool {
        self.context == context && self.id == id && !self.gone.load(Relaxed)
    }

    /// Whether its context is dead, noticed or not.
    pub(super) fn is_dead(&self) -> bool {
        // SAFETY: asks only; the driver knows a dead context when it sees one.
        self.gone.load(Relaxed) || unsafe { self.driver.context_id(self.context) } != Ok(self.id)
    }

    /// Makes sure that the context lives, and that it is current until the guard is dropped.
    #[inline]
    pub(super) fn enter(&self) -> Result<Entered> {
        debug_assert!(!linux::in_private_table(), "the driver's descriptors are not in this thread's table");
        if self.gone.load(Relaxed) {
            return Err(self.retire());
        }
        // SAFETY: asks only; the driver knows a dead context when it sees one.
        match unsafe { self.driver.context_id(self.context) } {
            Ok(id) if id == self.id => {}
            Ok(_) => return Err(self.retire()),
            Err(e) => return Err(self.fail("cuCtxGetId", e)),
        }
        match self.driver.current() {
            Ok(current) if current == self.context => Ok(Entered { pushed: None }),
            Ok(_) => {
                // SAFETY: alive, as its number has just shown.
                unsafe { self.driver.push(self.context) }.map_err(|e| self.fail("cuCtxPushCurrent", e))?;
                Ok(Entered { pushed: Some(self.driver) })
            }
            Err(e) => Err(self.fail("cuCtxGetCurrent", e)),
        }
    }

    #[cold]
    fn retire(&self) -> DeviceError {
        self.gone.store(true, Relaxed);
        DeviceError { kind: ErrorKind::Gone, operation: "context", code: CuError::CONTEXT_IS_DESTROYED.0 }
    }

    /// The driver's error in the terms of a device.
    #[cold]
    pub(super) fn fail(&self, operation: &'static str, e: CuError) -> DeviceError {
        let kind = match e {
            e if e.is_gone() => {
                self.gone.store(true, Relaxed);
                ErrorKind::Gone
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

    fn abilities(&self) -> Abilities {
        let gathers = !matches!(self.kernel.get(), Some(Err(_)));
        let pins = self.pinning.is_worth_trying();
        Abilities { pins, copies: true, max_pin: MAX_PIN, gathers }
    }

    fn allocation(&'static self, addr: DeviceAddr, want: u64) -> Option<Allocation> {
        let info = self.driver.pointer_info(addr.0).ok().filter(|i| i.kind == MemoryType::Device)?;
        let ours = lookup::device_for(self.driver, &info)?;
        core::ptr::eq(ours, self).then(|| lookup::allocation_of(self, &info, addr.0, want))?
    }

    fn staging(&self, len: usize) -> Result<Pinned> {
        self.make_staging(len)
    }

    fn free_staging(&self, memory: Pinned) {
        self.give_staging(memory);
    }

    #[inline]
    fn program_queue(&self) -> (QueueId, bool) {
        self.queue_of_thread()
    }

    fn is_captured(&self, queue: QueueId) -> bool {
        self.enter().is_ok_and(|_entered| self.captures(queue))
    }

    fn lease_queue(&self) -> Result<QueueId> {
        let _entered = self.enter()?;
        self.take_queue()
    }

    fn return_queue(&self, queue: QueueId) {
        self.keep_queue(queue);
    }

    #[inline]
    unsafe fn copy_in(&self, queue: QueueId, dst: DeviceAddr, src: *const u8, len: usize) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: the memory is the caller's word; the queue belongs to this context, which lives.
        unsafe { self.driver.copy_in(dst.0, src, len, Cuda::stream(queue)) }
            .map_err(|e| self.copy_failed("cuMemcpyHtoDAsync", e))
    }

    unsafe fn copy_out(&self, queue: QueueId, dst: *mut u8, src: DeviceAddr, len: usize) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: as above.
        unsafe { self.driver.copy_out(dst, src.0, len, Cuda::stream(queue)) }
            .map_err(|e| self.copy_failed("cuMemcpyDtoHAsync", e))
    }

    unsafe fn call_host(
        &self,
        queue: QueueId,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: the function is the caller's word; the queue belongs to this context, which lives.
        unsafe { self.driver.call_host(Cuda::stream(queue), function, argument) }
            .map_err(|e| self.fail("cuLaunchHostFunc", e))
    }

    fn fence(&self, queue: QueueId) -> Result<Fence> {
        let _entered = self.enter()?;
        self.spare_captures(queue, "cuEventRecord")?;
        self.fence_here(queue, self.flags & schedule::MASK == schedule::BLOCKING)
    }

    fn follow(&self, queue: QueueId, fence: &Fence) -> Result<()> {
        let _entered = self.enter()?;
        self.spare_captures(queue, "cuStreamWaitEvent")?;
        self.follow_fence(queue, fence)
    }

    fn is_done(&self, fence: &Fence) -> Result<bool> {
        let _entered = self.enter()?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        self.fence_is_done(fence)
    }

    fn wait(&self, fence: &Fence, how: Wait) -> Result<()> {
        let _entered = self.enter()?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        self.wait_for(fence, how)
    }

    fn release_fence(&self, fence: Fence) {
        self.keep_fence(fence);
    }

    fn drain(&self, queue: QueueId, how: Wait) -> Result<()> {
        let _entered = self.enter()?;
        self.spare_captures(queue, "cuStreamSynchronize")?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        if how == Wait::Context {
            // SAFETY: the queue belongs to this context, which lives.
            return unsafe { self.driver.stream_synchronize(Cuda::stream(queue)) }
                .map_err(|e| self.fail("cuStreamSynchronize", e));
        }
        let fence = self.fence_here(queue, true)?;
        let waited = self.wait_for(&fence, how);
        self.keep_fence(fence);
        waited
    }

    unsafe fn pin(&self, ptr: *const u8, len: usize) -> Result<Pin> {
        // SAFETY: passed on to the caller.
        unsafe { self.pin_pages(ptr, len) }
    }

    unsafe fn copy_pinned(&self, queue: QueueId, dst: DeviceAddr, pin: &Pin, offset: usize, len: usize) -> Result<()> {
        debug_assert!(offset + len <= pin.len);
        // SAFETY: the pin keeps its range mapped and registered; the rest is the caller's word.
        unsafe { self.copy_in(queue, dst, pin.ptr.wrapping_add(offset), len) }
    }

    fn unpin(&self, pin: Pin) {
        self.unpin_pages(pin);
    }

    fn prepare_gather(&self, code: &dyn CodeStore) -> Result<()> {
        self.gather_kernel(code).map(drop)
    }

    fn is_gather_ready(&self) -> bool {
        matches!(self.kernel.get(), Some(Ok(_)))
    }

    fn view(&self, memory: *const u8) -> Result<u64> {
        if self.same_addresses {
            return Ok(memory as u64);
        }
        let _entered = self.enter()?;
        self.driver.host_device_pointer(memory).map_err(|e| self.fail("cuMemHostGetDevicePointer", e))
    }

    fn view_pin(&self, pin: &Pin) -> Result<u64> {
        self.view(pin.ptr)
    }

    fn map_pin(&self, pin: &Pin) -> Result<u64> {
        self.view(pin.ptr)
    }

    unsafe fn gather(&self, queue: QueueId, list: *const Gathered, count: usize) -> Result<()> {
        let list = self.view(list.cast())?;
        let _entered = self.enter()?;
        // SAFETY: passed on to the caller.
        unsafe { self.launch_gather(queue, list, count) }
    }
}

impl Cuda {
    /// A copy says "invalid value" when the device end is not (wholly) allocated any more.
    #[cold]
    fn copy_failed(&self, operation: &'static str, e: CuError) -> DeviceError {
        let error = self.fail(operation, e);
        let kind = if e == CuError::INVALID_VALUE { ErrorKind::BadAddress } else { error.kind };
        DeviceError { kind, ..error }
    }
}
