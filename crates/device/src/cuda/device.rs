//! One CUDA context as a device.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

use spinio_sys::cuda::{
    Context, CuError, Driver, Function, MemoryType, PointerInfo, Stream, attribute, register, schedule, stream,
};
use spinio_sys::linux;

use super::capture::Relaxed as RelaxedCapture;
use super::events::Events;
use super::handles::Handles;
use super::lookup;
use crate::thread_queue::thread_queue;
use crate::{
    Abilities, Allocation, CodeStore, Device, DeviceAddr, DeviceError, DeviceId, DeviceKind, ErrorKind, Fence,
    Gathered, Pin, Pinned, QueueId, Wait,
};

type Result<T> = core::result::Result<T, DeviceError>;

/// Queues of ours that may be out at once.
const QUEUES: usize = 128;

/// Longer ranges are pinned piece by piece: a registration holds a lock of the driver while it runs.
const MAX_PIN: u64 = 512 << 20;

/// Refusals in a row after which pinning is not tried again.
const REFUSALS: u32 = 4;

pub(super) struct Cuda {
    pub(super) driver: &'static Driver,
    context: Context,
    /// The context's number; another number at the same address is another context.
    id: u64,
    pub(super) ordinal: i32,
    flags: u32,
    can_pin: bool,
    gone: AtomicBool,
    refusals: AtomicU32,
    queues: Handles,
    /// The queue of small requests while the default queue must be left alone.
    aside: OnceLock<QueueId>,
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
            can_pin: false,
            gone: AtomicBool::new(false),
            refusals: AtomicU32::new(0),
            queues: Handles::new(QUEUES),
            aside: OnceLock::new(),
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
        new.can_pin = driver.device_attribute(ordinal, attribute::HOST_REGISTER_SUPPORTED).unwrap_or(0) != 0;
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

    pub(super) fn stream(queue: QueueId) -> Stream {
        Stream(queue.0 as usize)
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

    /// The allocation around `addr`, which the driver says is device memory of this device.
    pub(super) fn allocation_of(&'static self, info: &PointerInfo, addr: u64, want: u64) -> Option<Allocation> {
        if info.context.0 != 0 {
            return Some(lookup::allocation(self, info.start, info.len, info.managed));
        }
        // Of no context: a pool's, or mapped by the program. What the attributes call the range of a mapping is the
        // whole reservation, holes included; only the address range ends where the memory does.
        let _entered = self.enter().ok()?;
        let (start, mut len) = self.driver.address_range(addr).ok()?;
        let is_mapping = (info.start, info.len) != (start, len);
        let end = addr.saturating_add(want);
        while is_mapping && start + len < end {
            let next = start + len;
            // The neighbour continues the range if it is device memory of the same reservation.
            let Ok(beside) = self.driver.pointer_info(next) else { break };
            let same = beside.kind == MemoryType::Device
                && beside.context == info.context
                && beside.ordinal == info.ordinal
                && (beside.start, beside.len) == (info.start, info.len);
            match self.driver.address_range(next) {
                Ok((at, more)) if same && at == next && more > 0 => len += more,
                _ => break,
            }
        }
        Some(lookup::allocation(self, start, len, info.managed))
    }

    /// Whether work on a queue would be captured or spoil a capture. The context must be entered.
    fn captures(&self, queue: QueueId) -> bool {
        // SAFETY: the queue is ours, the default one, or alive by the word of who chose it.
        match unsafe { self.driver.stream_is_capturing(Cuda::stream(queue)) } {
            Ok(captured) => captured,
            Err(e) => !e.is_gone(),
        }
    }

    /// For calls that would spoil a capture of the default queue; not for the hot path, which has asked before.
    fn spare_captures(&self, queue: QueueId, operation: &'static str) -> Result<()> {
        if queue.0 == 0 && self.captures(queue) {
            return Err(self.fail(operation, CuError::STREAM_CAPTURE_IMPLICIT));
        }
        Ok(())
    }

    /// A queue of ours. The context must be entered.
    pub(super) fn take_queue(&self) -> Result<QueueId> {
        match self.queues.take(|| self.driver.stream_create(stream::NON_BLOCKING).map(|s| s.0)) {
            Ok(Some(queue)) => Ok(QueueId(queue as u64)),
            Ok(None) => Err(DeviceError::new(ErrorKind::NoMemory, "pool of queues")),
            Err(e) => Err(self.fail("cuStreamCreate", e)),
        }
    }

    pub(super) fn keep_queue(&self, queue: QueueId) {
        if queue.0 != 0 && self.aside.get() != Some(&queue) {
            self.queues.give(queue.0 as usize);
        }
    }

    fn aside(&self) -> Result<QueueId> {
        if let Some(queue) = self.aside.get() {
            return Ok(*queue);
        }
        let new = self.take_queue()?;
        let kept = *self.aside.get_or_init(|| new);
        if kept != new {
            self.keep_queue(new);
        }
        Ok(kept)
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
        let pins = self.can_pin && self.refusals.load(Relaxed) < REFUSALS;
        let gathers = !matches!(self.kernel.get(), Some(Err(_)));
        Abilities { pins, copies: true, max_pin: MAX_PIN, gathers }
    }

    fn allocation(&'static self, addr: DeviceAddr, want: u64) -> Option<Allocation> {
        let info = self.driver.pointer_info(addr.0).ok().filter(|i| i.kind == MemoryType::Device)?;
        let ours = lookup::device_for(self.driver, &info)?;
        core::ptr::eq(ours, self).then(|| self.allocation_of(&info, addr.0, want))?
    }

    fn staging(&self, len: usize) -> Result<Pinned> {
        use linux_flags::{DONTFORK, HUGEPAGE, MAP, PROT};
        let _entered = self.enter()?;
        let refused = |_| DeviceError::new(ErrorKind::NoMemory, "mmap of staging memory");
        // SAFETY: a fresh anonymous mapping replaces nothing.
        let ptr = unsafe { linux::mmap(core::ptr::null_mut(), len, PROT, MAP, -1, 0) }.map_err(refused)?;
        // SAFETY: advice on our own fresh mapping. Huge pages make registering cheaper; a forked child has no use for
        // memory that a device writes, and shall not make the parent copy it.
        unsafe {
            let _ = linux::madvise(ptr, len, HUGEPAGE);
            let _ = linux::madvise(ptr, len, DONTFORK);
        }
        let _relaxed = RelaxedCapture::enter(self.driver);
        // SAFETY: mapped above, and unmapped only after it is unregistered.
        match unsafe { self.driver.host_register(ptr, len, register::PORTABLE) } {
            Ok(()) => Ok(Pinned { ptr, len }),
            Err(e) => {
                // SAFETY: nobody has seen the address yet.
                let _ = unsafe { linux::munmap(ptr, len) };
                let error = self.fail("cuMemHostRegister", e);
                let kind = if error.kind == ErrorKind::Driver { ErrorKind::NoMemory } else { error.kind };
                Err(DeviceError { kind, ..error })
            }
        }
    }

    fn free_staging(&self, memory: Pinned) {
        let unregistered = match self.enter() {
            Ok(_entered) => {
                let _relaxed = RelaxedCapture::enter(self.driver);
                // SAFETY: registered by `staging`; by the contract no copy uses it any more.
                unsafe { self.driver.host_unregister(memory.ptr) }.is_ok()
            }
            // The registration, and every copy, died with the context.
            Err(e) => e.kind == ErrorKind::Gone,
        };
        if unregistered {
            // SAFETY: our own mapping, and nobody's any more.
            let _ = unsafe { linux::munmap(memory.ptr, memory.len) };
        }
    }

    #[inline]
    fn program_queue(&self) -> (QueueId, bool) {
        let chosen = thread_queue();
        let Ok(_entered) = self.enter() else { return (chosen, false) };
        if !self.captures(chosen) {
            return (chosen, false);
        }
        // Without a queue of ours the next call on the chosen one reports what is wrong; fences and waits spare the
        // capture themselves.
        self.aside().map_or((chosen, false), |queue| (queue, true))
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
        let _entered = self.enter()?;
        let _relaxed = RelaxedCapture::enter(self.driver);
        let start = ptr as usize & !(linux::PAGE - 1);
        let end = (ptr as usize + len).next_multiple_of(linux::PAGE);
        // SAFETY: the caller keeps the range mapped; the rest of its first and last page is mapped with it.
        match unsafe { self.driver.host_register(start as *mut u8, end - start, register::READ_ONLY) } {
            Ok(()) => {
                self.refusals.store(0, Relaxed);
                Ok(Pin { ptr, len, handle: start as u64 })
            }
            Err(e) => {
                let error = self.fail("cuMemHostRegister", e);
                if error.kind == ErrorKind::Gone {
                    return Err(error);
                }
                // Memory that is short, or pinned by another request at the moment, says nothing about the next pin.
                if !matches!(e, CuError::OUT_OF_MEMORY | CuError::HOST_MEMORY_ALREADY_REGISTERED) {
                    self.refusals.fetch_add(1, Relaxed);
                }
                Err(DeviceError { kind: ErrorKind::PinRefused, ..error })
            }
        }
    }

    unsafe fn copy_pinned(&self, queue: QueueId, dst: DeviceAddr, pin: &Pin, offset: usize, len: usize) -> Result<()> {
        debug_assert!(offset + len <= pin.len);
        // SAFETY: the pin keeps its range mapped and registered; the rest is the caller's word.
        unsafe { self.copy_in(queue, dst, pin.ptr.wrapping_add(offset), len) }
    }

    fn unpin(&self, pin: Pin) {
        let Ok(_entered) = self.enter() else { return }; // the registration died with its context
        let _relaxed = RelaxedCapture::enter(self.driver);
        // SAFETY: registered by `pin`; by the contract every copy from it is done.
        let _ = unsafe { self.driver.host_unregister(pin.handle as usize as *mut u8) };
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

/// Numbers of `mmap` and `madvise`.
mod linux_flags {
    pub(super) const PROT: u32 = (libc::PROT_READ | libc::PROT_WRITE) as u32;
    pub(super) const MAP: u32 = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u32;
    pub(super) const HUGEPAGE: u32 = libc::MADV_HUGEPAGE as u32;
    pub(super) const DONTFORK: u32 = libc::MADV_DONTFORK as u32;
}
