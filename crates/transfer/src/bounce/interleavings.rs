//! The ring under a model checker: no block is ever filled by two, none while the device still reads it, none is lost, and
//! nobody waits for ever.
//!
//! The device is a thread that finishes copies one after another, at any moment the checker likes. Each block has a cell:
//! a filler writes it, the device reads it when it finishes a copy, and loom fails if one touches it while the other may.

use std::sync::{Arc, OnceLock};

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering::*};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use spinio_device::{
    Abilities, Allocation, Device, DeviceAddr, DeviceError, DeviceId, DeviceKind, ErrorKind, Fence, Pin, Pinned,
    QueueId, Wait,
};

use super::{BLOCK, Staging};

/// Blocks of the models: two, the least that a ring has.
const BLOCKS: usize = 2;

/// Memory that lives as long as the test program, so that addresses mean blocks.
fn memory() -> *mut u8 {
    struct Memory(*mut u8);
    // SAFETY: only its address is used.
    unsafe impl Send for Memory {}
    // SAFETY: as above.
    unsafe impl Sync for Memory {}
    static MEMORY: OnceLock<Memory> = OnceLock::new();
    MEMORY
        .get_or_init(|| {
            let blocks: Vec<[u8; BLOCK]> = vec![[0; BLOCK]; BLOCKS];
            Memory(blocks.leak().as_mut_ptr().cast())
        })
        .0
}

fn block_of(ptr: *const u8) -> usize {
    (ptr as usize - memory() as usize) / BLOCK
}

/// What the model's threads share: cells of the blocks and the device's one queue.
struct Model {
    cells: [UnsafeCell<u32>; BLOCKS],
    handed_out: AtomicUsize,
    queued: Mutex<Vec<usize>>,
    news: Condvar,
    finished: AtomicUsize,
}

// SAFETY: the cells are what is being checked; loom reports a touch that the protocol does not order.
unsafe impl Sync for Model {}
// SAFETY: as above.
unsafe impl Send for Model {}

impl Model {
    fn new() -> Arc<Model> {
        Arc::new(Model {
            cells: [UnsafeCell::new(0), UnsafeCell::new(0)],
            handed_out: AtomicUsize::new(0),
            queued: Mutex::new(Vec::new()),
            news: Condvar::new(),
            finished: AtomicUsize::new(0),
        })
    }

    /// Fills (part of) a block.
    fn fill(&self, ptr: *const u8) {
        // SAFETY: loom checks that nobody else touches the cell.
        self.cells[block_of(ptr)].with_mut(|value| unsafe { *value += 1 });
    }

    /// Finishes the oldest copy.
    fn step(&self) {
        let next = self.finished.load(Relaxed);
        let block = self.queued.lock().unwrap()[next];
        // SAFETY: loom checks that nobody writes the cell.
        self.cells[block].with(|value| unsafe { assert!(*value > 0, "a copy from a block that nobody filled") });
        self.finished.store(next + 1, Release);
    }

    /// Finishes that many copies, as they come.
    fn run(&self, copies: usize) {
        for _ in 0..copies {
            let mut queued = self.queued.lock().unwrap();
            while queued.len() == self.finished.load(Relaxed) {
                queued = self.news.wait(queued).unwrap();
            }
            drop(queued);
            self.step();
        }
    }
}

/// The model as a device: one queue, whose fences are places in it.
struct Engine(Arc<Model>);

type Result<T> = core::result::Result<T, DeviceError>;

impl Device for Engine {
    fn id(&self) -> DeviceId {
        DeviceId { kind: DeviceKind::Emulated, ordinal: 0 }
    }
    fn describe(&self) -> String {
        "model".into()
    }
    fn abilities(&self) -> Abilities {
        Abilities { pins: false, copies: true, max_pin: 0, gathers: false }
    }
    fn allocation(&'static self, _: DeviceAddr, _: u64) -> Option<Allocation> {
        None
    }
    fn staging(&self, len: usize) -> Result<Pinned> {
        let at = self.0.handed_out.fetch_add(len / BLOCK, Relaxed);
        assert!((at + 1) * BLOCK <= BLOCKS * BLOCK && len == BLOCK, "the ring grows past its bound");
        Ok(Pinned { ptr: memory().wrapping_add(at * BLOCK), len })
    }
    fn free_staging(&self, _: Pinned) {}
    fn program_queue(&self) -> (QueueId, bool) {
        (QueueId(0), false)
    }
    fn lease_queue(&self) -> Result<QueueId> {
        Ok(QueueId(1))
    }
    fn return_queue(&self, _: QueueId) {}
    unsafe fn copy_in(&self, _: QueueId, _: DeviceAddr, src: *const u8, _: usize) -> Result<()> {
        self.0.queued.lock().unwrap().push(block_of(src));
        self.0.news.notify_one();
        Ok(())
    }
    unsafe fn copy_out(&self, _: QueueId, _: *mut u8, _: DeviceAddr, _: usize) -> Result<()> {
        Err(DeviceError::new(ErrorKind::Unsupported, "copy out"))
    }
    fn fence(&self, _: QueueId) -> Result<Fence> {
        Ok(Fence(self.0.queued.lock().unwrap().len() as u64))
    }
    fn follow(&self, _: QueueId, _: &Fence) -> Result<()> {
        Ok(())
    }
    fn is_done(&self, fence: &Fence) -> Result<bool> {
        Ok(self.0.finished.load(Acquire) as u64 >= fence.0)
    }
    fn wait(&self, fence: &Fence, _: Wait) -> Result<()> {
        while !self.is_done(fence)? {
            thread::yield_now();
        }
        Ok(())
    }
    fn release_fence(&self, _: Fence) {}
    fn drain(&self, queue: QueueId, how: Wait) -> Result<()> {
        let fence = self.fence(queue)?;
        self.wait(&fence, how)
    }
    unsafe fn pin(&self, _: *const u8, _: usize) -> Result<Pin> {
        Err(DeviceError::new(ErrorKind::Unsupported, "pin"))
    }
    unsafe fn copy_pinned(&self, _: QueueId, _: DeviceAddr, _: &Pin, _: usize, _: usize) -> Result<()> {
        Err(DeviceError::new(ErrorKind::Unsupported, "copy out of a pin"))
    }
    fn unpin(&self, _: Pin) {}
}

/// Runs `work`, which queues `copies` copies, in two threads beside the device: in every order that needs at most two
/// forced switches.
fn check(copies: usize, work: fn(&Staging, &Model)) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.max_branches = 20_000;
    model.check(move || {
        let model = Model::new();
        let device: &'static Engine = Box::leak(Box::new(Engine(Arc::clone(&model))));
        let staging = Arc::new(Staging::new(device, (BLOCKS * BLOCK) as u64));
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
        // Whatever happened, both blocks can be had again.
        let all: Vec<_> = (0..BLOCKS).map(|_| staging.take().unwrap()).collect();
        all.iter().for_each(|block| model.fill(block.ptr()));
        assert_ne!(block_of(all[0].ptr()), block_of(all[1].ptr()), "one block was lent twice");
        all.into_iter().for_each(|block| staging.give_back(block));
        engine.join().unwrap();
    });
}

/// A large read's block: take, fill, copy, retire.
fn large(staging: &Staging, model: &Model) {
    let block = staging.take().unwrap();
    model.fill(block.ptr());
    // SAFETY: the model device copies nothing.
    unsafe { staging.device().copy_in(QueueId(0), DeviceAddr(0), block.ptr(), BLOCK).unwrap() };
    staging.retire(block, QueueId(0));
}

#[test]
fn a_block_is_lent_again_only_when_its_copy_is_done() {
    // Two blocks for two copies and then two more fillings: each block is lent again.
    check(1, large);
}

#[test]
fn a_block_that_nothing_was_queued_from_comes_back() {
    check(0, |staging, model| {
        for _ in 0..2 {
            let block = staging.take().unwrap();
            model.fill(block.ptr());
            staging.give_back(block);
        }
    });
}

#[test]
fn blocks_of_a_lane_come_back() {
    check(0, |staging, _| {
        // Two queues on one lane: each makes the other's block close, while somebody may still fill it.
        for queue in [QueueId(1), QueueId(2)] {
            let slot = staging.begin_small(BLOCK / 4, queue).unwrap();
            assert!(slot.ptr as usize - slot.block as usize <= BLOCK - BLOCK / 4, "a slot leaves its block");
            staging.end_small(slot);
        }
    });
}
