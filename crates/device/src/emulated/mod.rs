//! The emulated device: a software GPU, so that everything runs and is tested on any machine.
//!
//! ```text
//!   program ── device address ── PROT_NONE: the kernel says EFAULT, a store faults
//!                  │
//!   io ── copy_in, copy_out, copy_pinned ──> queues ──> engine thread ──> the bytes, through another mapping
//!      └─ pin ──> helper thread ──> pipes that hold the page cache's own pages
//! ```
//!
//! It is made to be as unforgiving as a GPU. The CPU cannot touch its memory by accident; fresh memory holds
//! [`POISON`]; copies complete later, and read their source when they run; pins go stale; after `fork` the child
//! has no device. [`Emulated::hold`] stalls the engine, so that a test which forgets to wait fails every time.
//!
//! Kernels are functions of the program, in stream order, for which the memory opens ([`Emulated::launch`]); the headers
//! in `device/` make them out of CUDA C++.
//!
//! Known to be wrong: peer and managed memory and graph capture do not exist here; one engine serves both directions;
//! while a kernel runs, the CPU can touch the memory by accident; a freed range is refused at once, while a GPU may keep
//! it mapped.

mod config;
mod engine;
mod first_fit;
mod gather;
mod helper;
mod memory;
mod pins;

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, mpsc};

use spinio_sys::linux::{self, Private};

pub use self::config::{Config, ConfigError};
pub use self::memory::POISON;

use self::engine::{Copy, Engine, Kernel};
use self::helper::Helper;
use self::memory::Memory;
use self::pins::{MAX_PIN, Pins, Scratch};
use crate::host_memory::{HostMemory, system};
use crate::{
    Abilities, Allocation, CodeStore, Device, DeviceAddr, DeviceError, DeviceId, DeviceKind, ErrorKind, Fence,
    Gathered, Pin, Pinned, QueueId, Wait, registry, thread_queue,
};

type Result<T> = core::result::Result<T, DeviceError>;

/// A software GPU. It lives as long as the process.
#[derive(Debug)]
pub struct Emulated {
    ordinal: u32,
    config: Config,
    alive: &'static AtomicU64,
    memory: Arc<Memory>,
    engine: Arc<Engine>,
    pins: Arc<Pins>,
    reach: usize,
    helper: Helper,
    staging: HostMemory,
}

/// What is lent and not given back; all zero when nothing leaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outstanding {
    /// Pins.
    pub pins: usize,
    /// Fences.
    pub fences: usize,
    /// Leased queues.
    pub queues: usize,
    /// Blocks of staging memory.
    pub staging: usize,
    /// Allocations of device memory.
    pub allocations: usize,
}

static STARTED: AtomicU32 = AtomicU32::new(0);

impl Emulated {
    /// Makes a device and tells the registry of it.
    pub fn start(config: Config) -> Result<&'static Emulated> {
        let no_thread = DeviceError::new(ErrorKind::Driver, "private thread of the emulated device");
        let family = Private::new().map_err(|_| no_thread)?;
        let helper = Helper::start(&family, "spinio-emu-pin")?;
        let memory = Arc::new(helper.call(|| Memory::map(config.size, config.bar))??);
        let engine = Arc::new(Engine::new(config));
        let pins = Arc::new(Pins::default());
        let (ready, reach) = mpsc::channel();
        let (its_engine, its_pins, its_memory) = (Arc::clone(&engine), Arc::clone(&pins), Arc::clone(&memory));
        let started = family.spawn("spinio-emu-dma", move || match Scratch::new() {
            Ok(mut scratch) => {
                let _ = ready.send(Ok(scratch.capacity()));
                its_engine.run(&its_memory, &its_pins, &mut scratch)
            }
            Err(e) => drop(ready.send(Err(e))),
        });
        let (kernels, its_memory) = (Arc::clone(&engine), Arc::clone(&memory));
        if !family.spawn("spinio-emu-kern", move || kernels.run_kernels(&its_memory)) {
            return Err(no_thread);
        }
        let reach = if started { reach.recv().map_err(|_| no_thread)?? } else { return Err(no_thread) };
        let alive = linux::word_wiped_on_fork().map_err(|e| system("madvise", e))?;
        alive.store(1, Relaxed);
        let ordinal = STARTED.fetch_add(1, Relaxed);
        let (start, len) = memory.range();
        let mut its_owner = 0;
        let device: &'static Emulated = registry::add_owner(|owner| {
            its_owner = owner;
            let staging = HostMemory::default();
            Box::leak(Box::new(Emulated { ordinal, config, alive, memory, engine, pins, reach, helper, staging }))
        })?;
        registry::add_range(its_owner, start, len)?;
        Ok(device)
    }

    /// New memory, full of [`POISON`].
    pub fn alloc(&self, len: usize, host_mapped: bool) -> Result<DeviceAddr> {
        self.check()?;
        self.memory.take(len as u64, host_mapped)
    }

    /// Gives memory back, after everything queued on the device is done.
    pub fn free(&self, addr: DeviceAddr) -> Result<()> {
        self.check()?;
        self.engine.drain_all();
        self.memory.give(addr)
    }

    /// A queue of the program's own, as a CUDA stream: ordered with queue 0 both ways. For
    /// [`set_thread_queue`](crate::set_thread_queue).
    pub fn new_queue(&self) -> Result<QueueId> {
        self.check()?;
        Ok(QueueId(self.engine.program_queue()))
    }

    /// Queues a call of `function`, for whose time the CPU can load and store in this device's memory.
    ///
    /// # Safety
    /// The function may be called with the argument, on another thread, until [`Emulated::finish`] has returned.
    pub unsafe fn launch(
        &self,
        queue: QueueId,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Result<()> {
        self.check()?;
        self.engine.queue(queue.0, Copy::Kernel(Kernel { function, argument: argument as u64, opens: true }))
    }

    /// Waits for what is queued on a queue; on queue 0 for what is queued anywhere, as a device's synchronisation does.
    pub fn finish(&self, queue: QueueId) -> Result<()> {
        self.check()?;
        if queue.0 == 0 {
            self.engine.drain_all();
        }
        self.drain(queue, Wait::Sleep)
    }

    /// For tests: no copy starts until [`Emulated::resume`], and none is running when this returns.
    pub fn hold(&self) {
        self.engine.hold();
    }

    /// For tests: ends one [`Emulated::hold`].
    pub fn resume(&self) {
        self.engine.resume();
    }

    /// For tests: what is lent now.
    pub fn outstanding(&self) -> Outstanding {
        let (queues, fences) = self.engine.lent();
        Outstanding {
            pins: self.pins.count(),
            fences,
            queues,
            staging: self.staging.lent(),
            allocations: self.memory.count(),
        }
    }

    /// In a forked child the threads are gone, and locks may be held for ever: nothing works there.
    fn check(&self) -> Result<()> {
        if self.alive.load(Relaxed) == 1 { Ok(()) } else { Err(DeviceError::new(ErrorKind::Gone, "use after fork")) }
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
        let p2p = if c.p2p { " and P2P-mapped" } else { "" };
        format!(
            "emulated GPU, {} MiB of memory, {} MiB host-mapped{p2p}; DMA {speed}, latency {} us",
            mib(c.size),
            mib(c.bar),
            c.latency.as_secs_f64() * 1e6,
        )
    }

    fn abilities(&self) -> Abilities {
        Abilities { pins: true, copies: true, max_pin: MAX_PIN as u64, gathers: true }
    }

    fn allocation(&'static self, addr: DeviceAddr, _want: u64) -> Option<Allocation> {
        self.check().ok()?;
        let held = self.memory.holding(addr)?;
        Some(Allocation {
            device: self,
            start: held.start,
            len: held.len,
            host_mapped: held.host_mapped,
            p2p_mapped: held.host_mapped && self.config.p2p,
        })
    }

    fn staging(&self, len: usize) -> Result<Pinned> {
        self.check()?;
        self.staging.take(len)
    }

    fn free_staging(&self, memory: Pinned) {
        if self.check().is_ok() {
            self.staging.give(memory);
        }
    }

    fn program_queue(&self) -> (QueueId, bool) {
        (thread_queue(), false)
    }

    fn lease_queue(&self) -> Result<QueueId> {
        self.check()?;
        self.engine.lease().map(QueueId)
    }

    fn return_queue(&self, queue: QueueId) {
        if self.check().is_ok() {
            self.engine.unlease(queue.0);
        }
    }

    unsafe fn copy_in(&self, queue: QueueId, dst: DeviceAddr, src: *const u8, len: usize) -> Result<()> {
        self.check()?;
        let dst = self.memory.view(dst, len, "copy to the device")?;
        self.engine.queue(queue.0, Copy::Bytes { dst, src: src as u64, len })
    }

    unsafe fn copy_out(&self, queue: QueueId, dst: *mut u8, src: DeviceAddr, len: usize) -> Result<()> {
        self.check()?;
        let src = self.memory.view(src, len, "copy from the device")?;
        self.engine.queue(queue.0, Copy::Bytes { dst: dst as u64, src, len })
    }

    unsafe fn call_host(
        &self,
        queue: QueueId,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> Result<()> {
        self.check()?;
        self.engine.queue(queue.0, Copy::Kernel(Kernel { function, argument: argument as u64, opens: false }))
    }

    fn fence(&self, queue: QueueId) -> Result<Fence> {
        self.check()?;
        self.engine.fence(queue.0).map(Fence)
    }

    fn follow(&self, queue: QueueId, fence: &Fence) -> Result<()> {
        self.check()?;
        self.engine.follow(queue.0, self.engine.fenced(fence.0)?)
    }

    fn is_done(&self, fence: &Fence) -> Result<bool> {
        self.check()?;
        self.engine.is_done(self.engine.fenced(fence.0)?)
    }

    fn wait(&self, fence: &Fence, _how: Wait) -> Result<()> {
        self.check()?;
        self.engine.wait(self.engine.fenced(fence.0)?)
    }

    fn release_fence(&self, fence: Fence) {
        if self.check().is_ok() {
            self.engine.unfence(fence.0);
        }
    }

    fn drain(&self, queue: QueueId, _how: Wait) -> Result<()> {
        self.check()?;
        self.engine.wait(self.engine.mark(queue.0)?)
    }

    unsafe fn pin(&self, ptr: *const u8, len: usize) -> Result<Pin> {
        self.check()?;
        std::thread::sleep(self.config.pin);
        let at = ptr as usize;
        // SAFETY: the caller keeps the range mapped, and wants its pages as they are when they are copied.
        let pinned = self.helper.call(|| unsafe { self.pins.pin(at as *const u8, len, self.reach) });
        Ok(Pin { ptr, len, handle: pinned?? })
    }

    unsafe fn copy_pinned(&self, queue: QueueId, dst: DeviceAddr, pin: &Pin, offset: usize, len: usize) -> Result<()> {
        self.check()?;
        if !self.pins.covers(pin.handle, offset, len) {
            return Err(DeviceError::new(ErrorKind::BadAddress, "copy from a pin"));
        }
        let dst = self.memory.view(dst, len, "copy to the device")?;
        self.engine.queue(queue.0, Copy::Pinned { dst, pin: pin.handle, offset, len })
    }

    fn unpin(&self, pin: Pin) {
        if self.check().is_ok() {
            std::thread::sleep(self.config.unpin);
            let _ = self.helper.call(|| self.pins.unpin(pin.handle));
        }
    }

    fn prepare_gather(&self, _code: &dyn CodeStore) -> Result<()> {
        self.check()
    }

    fn is_gather_ready(&self) -> bool {
        true
    }

    fn view(&self, memory: *const u8) -> Result<u64> {
        Ok(memory as u64)
    }

    fn view_pin(&self, pin: &Pin) -> Result<u64> {
        Ok(gather::view_of(pin.handle))
    }

    fn map_pin(&self, pin: &Pin) -> Result<u64> {
        // Kernels run on the CPU: they read the mapping itself.
        Ok(pin.ptr as u64)
    }

    unsafe fn gather(&self, queue: QueueId, list: *const Gathered, count: usize) -> Result<()> {
        self.check()?;
        self.engine.queue(queue.0, Copy::Gather { list: list as u64, count })
    }
}

#[cfg(test)]
mod tests;
