//! The bounce buffer pool under a model checker: no buffer is ever filled by two threads, none while the device still
//! reads it, none is lost, and no thread waits forever.
//!
//! The device is a thread that finishes copies one after another, at any moment that the checker chooses. Each buffer
//! has a cell: a filling thread writes it, the device reads it when it finishes a copy, and loom fails if two accesses
//! may overlap.

use std::sync::{Arc, OnceLock};

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering::*};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use spinio_device::{
    Allocation, AppStream, Capabilities, Device, DeviceAddr, DeviceError, DeviceId, DeviceKind, ErrorKind, Fence, Pin,
    PinnedBuffer, StreamId, WaitMode,
};

use super::{BUFFER_SIZE, BouncePool};

/// Buffers of the models: two, the fewest that a pool has.
const BUFFERS: usize = 2;

/// Memory that lives as long as the test program, so that addresses identify buffers.
fn memory() -> *mut u8 {
    struct Memory(*mut u8);
    // SAFETY: only its address is used.
    unsafe impl Send for Memory {}
    // SAFETY: as above.
    unsafe impl Sync for Memory {}
    static MEMORY: OnceLock<Memory> = OnceLock::new();
    MEMORY
        .get_or_init(|| {
            let buffers: Vec<[u8; BUFFER_SIZE]> = vec![[0; BUFFER_SIZE]; BUFFERS];
            Memory(buffers.leak().as_mut_ptr().cast())
        })
        .0
}

fn index_of(ptr: *const u8) -> usize {
    (ptr as usize - memory() as usize) / BUFFER_SIZE
}

/// What the model's threads share: cells of the buffers and the device's one stream.
struct Model {
    cells: [UnsafeCell<u32>; BUFFERS],
    handed_out: AtomicUsize,
    queued: Mutex<Vec<usize>>,
    changed: Condvar,
    finished: AtomicUsize,
}

// SAFETY: the cells are what is being checked; loom reports an access that the protocol does not order.
unsafe impl Sync for Model {}
// SAFETY: as above.
unsafe impl Send for Model {}

impl Model {
    fn new() -> Arc<Model> {
        Arc::new(Model {
            cells: [UnsafeCell::new(0), UnsafeCell::new(0)],
            handed_out: AtomicUsize::new(0),
            queued: Mutex::new(Vec::new()),
            changed: Condvar::new(),
            finished: AtomicUsize::new(0),
        })
    }

    /// Fills (part of) a buffer.
    fn fill(&self, ptr: *const u8) {
        // SAFETY: loom checks that no other thread accesses the cell.
        self.cells[index_of(ptr)].with_mut(|value| unsafe { *value += 1 });
    }

    /// Finishes the oldest copy.
    fn step(&self) {
        let next = self.finished.load(Relaxed);
        let buffer = self.queued.lock().unwrap()[next];
        // SAFETY: loom checks that no thread writes the cell.
        self.cells[buffer].with(|value| unsafe { assert!(*value > 0, "a copy from a buffer that was not filled") });
        self.finished.store(next + 1, Release);
    }

    /// Finishes that many copies, as they arrive.
    fn run(&self, copies: usize) {
        for _ in 0..copies {
            let mut queued = self.queued.lock().unwrap();
            while queued.len() == self.finished.load(Relaxed) {
                queued = self.changed.wait(queued).unwrap();
            }
            drop(queued);
            self.step();
        }
    }
}

/// The model as a device: one stream, whose fences are positions in it.
struct Engine(Arc<Model>);

type Result<T> = core::result::Result<T, DeviceError>;

impl Device for Engine {
    fn id(&self) -> DeviceId {
        DeviceId { kind: DeviceKind::Emulated, ordinal: 0 }
    }
    fn describe(&self) -> String {
        "model".into()
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities { can_pin: false, has_dma_engine: true, max_pin: 0, can_gather: false }
    }
    fn allocation(&'static self, _: DeviceAddr, _: u64) -> Option<Allocation> {
        None
    }
    fn alloc_pinned(&self, len: usize) -> Result<PinnedBuffer> {
        let at = self.0.handed_out.fetch_add(len / BUFFER_SIZE, Relaxed);
        assert!((at + 1) * BUFFER_SIZE <= BUFFERS * BUFFER_SIZE && len == BUFFER_SIZE, "the pool grows past its limit");
        Ok(PinnedBuffer { ptr: memory().wrapping_add(at * BUFFER_SIZE), len })
    }
    fn free_pinned(&self, _: PinnedBuffer) {}
    fn app_stream(&self) -> AppStream {
        AppStream::Named(StreamId(0))
    }
    fn acquire_stream(&self) -> Result<StreamId> {
        Ok(StreamId(1))
    }
    fn release_stream(&self, _: StreamId) {}
    unsafe fn copy_in(&self, _: StreamId, _: DeviceAddr, src: *const u8, _: usize) -> Result<()> {
        self.0.queued.lock().unwrap().push(index_of(src));
        self.0.changed.notify_one();
        Ok(())
    }
    unsafe fn copy_out(&self, _: StreamId, _: *mut u8, _: DeviceAddr, _: usize) -> Result<()> {
        Err(DeviceError::new(ErrorKind::Unsupported, "copy out"))
    }
    fn fence(&self, _: StreamId) -> Result<Fence> {
        Ok(Fence(self.0.queued.lock().unwrap().len() as u64))
    }
    fn wait_event(&self, _: StreamId, _: &Fence) -> Result<()> {
        Ok(())
    }
    fn query(&self, fence: &Fence) -> Result<bool> {
        Ok(self.0.finished.load(Acquire) as u64 >= fence.0)
    }
    fn wait(&self, fence: &Fence, _: WaitMode) -> Result<()> {
        while !self.query(fence)? {
            thread::yield_now();
        }
        Ok(())
    }
    fn release_fence(&self, _: Fence) {}
    fn synchronize(&self, stream: StreamId, how: WaitMode) -> Result<()> {
        let fence = self.fence(stream)?;
        self.wait(&fence, how)
    }
    unsafe fn pin(&self, _: *const u8, _: usize) -> Result<Pin> {
        Err(DeviceError::new(ErrorKind::Unsupported, "pin"))
    }
    unsafe fn copy_pinned(&self, _: StreamId, _: DeviceAddr, _: &Pin, _: usize, _: usize) -> Result<()> {
        Err(DeviceError::new(ErrorKind::Unsupported, "copy out of a pin"))
    }
    fn unpin(&self, _: Pin) {}
}

/// Runs `work`, which queues `copies` copies, in two threads concurrently with the device: in every order that needs at
/// most two forced switches.
fn check(copies: usize, work: fn(&BouncePool, &Model)) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.max_branches = 20_000;
    model.check(move || {
        let model = Model::new();
        let device: &'static Engine = Box::leak(Box::new(Engine(Arc::clone(&model))));
        let staging = Arc::new(BouncePool::new(device, (BUFFERS * BUFFER_SIZE) as u64));
        let engine = {
            let model = Arc::clone(&model);
            thread::spawn(move || model.run(2 * copies))
        };
        let other = {
            let (staging, model) = (Arc::clone(&staging), Arc::clone(&model));
            thread::spawn(move || work(&staging, &model))
        };
        work(&staging, &model);
        other.join().unwrap();
        // Both buffers can be acquired again.
        let all: Vec<_> = (0..BUFFERS).map(|_| staging.acquire().unwrap()).collect();
        all.iter().for_each(|buffer| model.fill(buffer.ptr()));
        assert_ne!(index_of(all[0].ptr()), index_of(all[1].ptr()), "one buffer was acquired twice");
        all.into_iter().for_each(|buffer| staging.release(buffer));
        engine.join().unwrap();
    });
}

/// A large read's buffer: acquire, fill, copy, release after the copy.
fn large(staging: &BouncePool, model: &Model) {
    let buffer = staging.acquire().unwrap();
    model.fill(buffer.ptr());
    // SAFETY: the model device copies nothing.
    unsafe { staging.device().copy_in(StreamId(0), DeviceAddr(0), buffer.ptr(), BUFFER_SIZE).unwrap() };
    staging.release_after(buffer, StreamId(0));
}

#[test]
fn buffer_is_reused_only_after_its_copy() {
    // Two buffers for two copies and then two more fillings: each buffer is reused.
    check(1, large);
}

#[test]
fn buffer_without_copy_is_released() {
    check(0, |staging, model| {
        for _ in 0..2 {
            let buffer = staging.acquire().unwrap();
            model.fill(buffer.ptr());
            staging.release(buffer);
        }
    });
}

#[test]
fn buffers_of_a_cpu_slot_are_released() {
    check(0, |staging, _| {
        // Two streams on one slot: each closes the other's buffer, while a thread may still fill it.
        for stream in [StreamId(1), StreamId(2)] {
            let slice = staging.acquire_slice(BUFFER_SIZE / 4, stream).unwrap();
            assert!(
                slice.ptr as usize - slice.buffer as usize <= BUFFER_SIZE - BUFFER_SIZE / 4,
                "a slice leaves its buffer"
            );
            staging.release_slice(slice);
        }
    });
}
