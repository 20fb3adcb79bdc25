//! A device that fails the n-th call of an operation, and otherwise forwards to the device that it wraps.
//!
//! It reports allocations as its own, so a request made with them uses it for all calls.
//!
//! A wait that fails lets the copies end first: a driver that cannot wait has lost its context, and no work of that
//! context runs any more.

#![expect(unsafe_code, reason = "C calls of tests")]

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use spinio_device::{
    Allocation, AppStream, Capabilities, Device, DeviceAddr, DeviceError, DeviceId, ErrorKind, Fence, GatherEntry,
    KernelStore, Pin, PinnedBuffer, StreamId, WaitMode,
};

use crate::deadline::eventually;

type Result<T> = core::result::Result<T, DeviceError>;

/// Operations that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
#[expect(missing_docs, reason = "named after the functions of Device")]
pub enum Operation {
    Staging,
    AcquireStream,
    CopyIn,
    CopyOut,
    Fence,
    WaitEvent,
    Query,
    Wait,
    Synchronize,
    Pin,
    CopyPinned,
    LoadGatherKernel,
    Gather,
    LaunchHostFunc,
}

impl Operation {
    /// All of them.
    pub const ALL: [Operation; 14] = [
        Operation::Staging,
        Operation::AcquireStream,
        Operation::CopyIn,
        Operation::CopyOut,
        Operation::Fence,
        Operation::WaitEvent,
        Operation::Query,
        Operation::Wait,
        Operation::Synchronize,
        Operation::Pin,
        Operation::CopyPinned,
        Operation::LoadGatherKernel,
        Operation::Gather,
        Operation::LaunchHostFunc,
    ];
}

/// Calls that fail: `times` calls after the first `after`.
#[derive(Clone, Copy, Debug)]
struct Fault {
    operation: Operation,
    after: u64,
    times: u64,
    kind: ErrorKind,
}

#[derive(Debug, Default)]
struct Plan {
    faults: Vec<Fault>,
    calls: [u64; Operation::ALL.len()],
    failed: u64,
    /// Work for the first stream is queued on the second.
    redirected: Option<(StreamId, StreamId)>,
    /// The operation that panics, on which thread, and how many calls pass first.
    panic: Option<(Operation, ThreadId, u64)>,
}

/// What a call waits for.
type StallCondition = Box<dyn Fn() -> bool + Send>;

/// The device with faults.
pub struct FaultyDevice {
    inner: &'static dyn Device,
    plan: Mutex<Plan>,
    /// The operation that waits, how many calls of it pass first, and for what.
    stall: Mutex<Option<(Operation, u64, StallCondition)>>,
}

impl FaultyDevice {
    /// Wraps a device, without a fault yet.
    pub fn wrap(inner: &'static dyn Device) -> &'static FaultyDevice {
        Box::leak(Box::new(FaultyDevice { inner, plan: Mutex::default(), stall: Mutex::default() }))
    }

    /// Makes calls of an operation fail, from the `nth` from now on (1: the next), `times` times.
    pub fn inject(&self, operation: Operation, nth: u64, times: u64, kind: ErrorKind) {
        let mut plan = self.plan();
        let after = plan.calls[operation as usize] + nth - 1;
        plan.faults.push(Fault { operation, after, times, kind });
    }

    /// Makes the `nth` call of an operation by this thread from now on panic, without a message.
    pub fn panic(&self, operation: Operation, nth: u64) {
        self.plan().panic = Some((operation, thread::current().id(), nth - 1));
    }

    /// Makes the `nth` call of an operation from now on wait until a condition holds; fails if it never does.
    pub fn stall_until(&self, operation: Operation, nth: u64, until: impl Fn() -> bool + Send + 'static) {
        *self.stall.lock().unwrap_or_else(PoisonError::into_inner) = Some((operation, nth - 1, Box::new(until)));
    }

    fn wait_if_stalled(&self, operation: Operation) {
        let mut stall = self.stall.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((_, left, _)) = stall.as_mut().filter(|stall| stall.0 == operation) else { return };
        if *left > 0 {
            *left -= 1;
            return;
        }
        let taken = stall.take();
        drop(stall);
        if let Some((_, _, until)) = taken {
            eventually("what an operation of the device waits for", until);
        }
    }

    /// From now on copies into the device and host functions for stream `from` are queued on stream `to`.
    pub fn redirect(&self, from: StreamId, to: StreamId) {
        self.plan().redirected = Some((from, to));
    }

    fn redirect_target(&self, queue: StreamId) -> StreamId {
        self.plan().redirected.filter(|r| r.0 == queue).map_or(queue, |r| r.1)
    }

    /// No more faults.
    pub fn clear_faults(&self) {
        self.plan().faults.clear();
    }

    /// How many calls failed so far.
    pub fn failures(&self) -> u64 {
        self.plan().failed
    }

    /// How many calls an operation has had.
    pub fn calls(&self, operation: Operation) -> u64 {
        self.plan().calls[operation as usize]
    }

    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, operation: Operation) -> Result<()> {
        self.wait_if_stalled(operation);
        let mut plan = self.plan();
        let count = plan.calls[operation as usize];
        plan.calls[operation as usize] += 1;
        if let Some((operation_to_panic, thread_id, left)) = &mut plan.panic
            && *operation_to_panic == operation
            && *thread_id == thread::current().id()
        {
            if *left == 0 {
                plan.panic = None;
                drop(plan);
                std::panic::resume_unwind(Box::new("planned"));
            }
            *left -= 1;
        }
        let hits = |f: &&Fault| f.operation == operation && (f.after..f.after.saturating_add(f.times)).contains(&count);
        match plan.faults.iter().find(hits).map(|f| f.kind) {
            Some(kind) => {
                plan.failed += 1;
                Err(DeviceError { kind, operation: "injected fault", code: 999 })
            }
            None => Ok(()),
        }
    }
}

impl Device for FaultyDevice {
    fn id(&self) -> DeviceId {
        self.inner.id()
    }

    fn describe(&self) -> String {
        format!("{}, with faults", self.inner.describe())
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn allocation(&'static self, addr: DeviceAddr, want: u64) -> Option<Allocation> {
        self.inner.allocation(addr, want).map(|found| Allocation { device: self, ..found })
    }

    fn alloc_pinned(&self, len: usize) -> Result<PinnedBuffer> {
        self.check(Operation::Staging)?;
        self.inner.alloc_pinned(len)
    }

    fn free_pinned(&self, memory: PinnedBuffer) {
        self.inner.free_pinned(memory);
    }

    unsafe fn register_host(&self, ptr: *mut u8, len: usize) -> Result<()> {
        self.check(Operation::Staging)?;
        // SAFETY: guaranteed by the caller.
        unsafe { self.inner.register_host(ptr, len) }
    }

    fn unregister_host(&self, ptr: *mut u8) -> bool {
        self.inner.unregister_host(ptr)
    }

    fn app_stream(&self) -> AppStream {
        self.inner.app_stream()
    }

    fn acquire_stream(&self) -> Result<StreamId> {
        self.check(Operation::AcquireStream)?;
        self.inner.acquire_stream()
    }

    fn release_stream(&self, queue: StreamId) {
        self.inner.release_stream(queue);
    }

    unsafe fn copy_in(&self, queue: StreamId, dst: DeviceAddr, src: *const u8, len: usize) -> Result<()> {
        self.check(Operation::CopyIn)?;
        // SAFETY: passed on to the caller.
        unsafe { self.inner.copy_in(self.redirect_target(queue), dst, src, len) }
    }

    unsafe fn copy_out(&self, queue: StreamId, dst: *mut u8, src: DeviceAddr, len: usize) -> Result<()> {
        self.check(Operation::CopyOut)?;
        // SAFETY: passed on to the caller.
        unsafe { self.inner.copy_out(queue, dst, src, len) }
    }

    fn fence(&self, queue: StreamId) -> Result<Fence> {
        self.check(Operation::Fence)?;
        self.inner.fence(queue)
    }

    fn wait_event(&self, queue: StreamId, fence: &Fence) -> Result<()> {
        self.check(Operation::WaitEvent)?;
        self.inner.wait_event(queue, fence)
    }

    fn query(&self, fence: &Fence) -> Result<bool> {
        self.check(Operation::Query).map_err(|e| self.inner.wait(fence, WaitMode::Block).err().unwrap_or(e))?;
        self.inner.query(fence)
    }

    fn wait(&self, fence: &Fence, how: WaitMode) -> Result<()> {
        self.check(Operation::Wait).map_err(|e| self.inner.wait(fence, WaitMode::Block).err().unwrap_or(e))?;
        self.inner.wait(fence, how)
    }

    fn release_fence(&self, fence: Fence) {
        self.inner.release_fence(fence);
    }

    fn synchronize(&self, queue: StreamId, how: WaitMode) -> Result<()> {
        self.check(Operation::Synchronize)
            .map_err(|e| self.inner.synchronize(queue, WaitMode::Block).err().unwrap_or(e))?;
        self.inner.synchronize(queue, how)
    }

    unsafe fn pin(&self, ptr: *const u8, len: usize) -> Result<Pin> {
        self.check(Operation::Pin)?;
        // SAFETY: passed on to the caller.
        unsafe { self.inner.pin(ptr, len) }
    }

    unsafe fn copy_pinned(&self, queue: StreamId, dst: DeviceAddr, pin: &Pin, offset: usize, len: usize) -> Result<()> {
        self.check(Operation::CopyPinned)?;
        // SAFETY: passed on to the caller.
        unsafe { self.inner.copy_pinned(queue, dst, pin, offset, len) }
    }

    fn unpin(&self, pin: Pin) {
        self.inner.unpin(pin);
    }

    unsafe fn launch_host_func(
        &self,
        queue: StreamId,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Result<()> {
        self.check(Operation::LaunchHostFunc)?;
        // SAFETY: passed on to the caller.
        unsafe { self.inner.launch_host_func(self.redirect_target(queue), function, argument) }
    }

    fn load_gather_kernel(&self, code: &dyn KernelStore) -> Result<()> {
        self.check(Operation::LoadGatherKernel)?;
        self.inner.load_gather_kernel(code)
    }

    fn device_ptr(&self, memory: *const u8) -> Result<u64> {
        self.inner.device_ptr(memory)
    }

    fn pin_device_ptr(&self, pin: &Pin) -> Result<u64> {
        self.inner.pin_device_ptr(pin)
    }

    fn map_pin(&self, pin: &Pin) -> Result<u64> {
        self.inner.map_pin(pin)
    }

    unsafe fn gather(&self, queue: StreamId, list: *const GatherEntry, count: usize) -> Result<()> {
        self.check(Operation::Gather)?;
        // SAFETY: passed on to the caller.
        unsafe { self.inner.gather(queue, list, count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{Buffer, emulated};

    #[test]
    fn faults_affect_named_calls() {
        let inner = emulated("size=1M");
        let device = FaultyDevice::wrap(inner);
        let buffer = Buffer::new(inner, 4096);
        let found = device.allocation(buffer.addr(), 1).unwrap();
        assert!(core::ptr::addr_eq(found.device, device));
        let drain = || device.synchronize(StreamId(0), WaitMode::Block).is_ok();
        assert!(drain());
        device.inject(Operation::Synchronize, 2, 2, ErrorKind::Driver);
        assert_eq!([drain(), drain(), drain(), drain()], [true, false, false, true]);
        device.inject(Operation::Staging, 1, u64::MAX, ErrorKind::NoMemory);
        assert_eq!(device.alloc_pinned(4096).unwrap_err().kind, ErrorKind::NoMemory);
        device.clear_faults();
        device.free_pinned(device.alloc_pinned(4096).unwrap());
        assert_eq!((device.failures(), device.calls(Operation::Synchronize)), (3, 5));
    }
}
