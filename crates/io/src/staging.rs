//! The staging ring: pinned host memory between the page cache or storage and the device.
//!
//! ```text
//!   slab (from the device) ──cut──> blocks of 2 MiB
//!
//!        take()                     retire(block, fence)
//!   free ───────> being filled ───────────────────────────> retired ──fence done──> free
//!                   │      ▲                                   (oldest first)
//!                   └ lane ┘  a block that many small reads share, one lane a processor
//! ```
//!
//! The ring starts with one block, grows on demand up to its bound, and then a taker waits
//! for the oldest copy. Threads meet only in `take` and `retire` (tens of nanoseconds a
//! block) and, for small reads, in their processor's lane.
//!
//! When the driver refuses pinned memory the ring lends ordinary memory instead: every
//! device copies from it, more slowly, and the statistics say so.
//!
//! Known flaws: a block serves one queue at a time, so a program that spreads small reads
//! over many streams on one processor fills blocks only partly. Slabs are never given back
//! to the driver while the process lives.

use std::collections::VecDeque;
use std::sync::Mutex;

use spinio_device::{Device, DeviceError, ErrorKind, Fence, Pinned, QueueId, Wait};
use spinio_sys::linux;

use crate::lock::lock;

/// Bytes of a block.
///
/// Copies of less leave the copy engine half idle when several threads issue them: on an H200, 16 threads reach
/// 26 GB/s with 512 KiB, 42 with 1 MiB and 47 with 2 MiB.
pub(crate) const BLOCK: usize = 2 << 20;

/// Bytes of every slab but the first, which is one block so that a first read is quick.
const SLAB: usize = 8 << 20;

const LANES: usize = 16;

/// A block of staging memory, owned by whoever holds it.
#[derive(Debug)]
pub(crate) struct Block {
    ptr: *mut u8,
    /// Whether the device copies from it at full speed.
    pub(crate) pinned: bool,
}

// SAFETY: plain memory with one owner at a time.
unsafe impl Send for Block {}

impl Block {
    /// Start of its [`BLOCK`] bytes, page-aligned.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.ptr
    }
}

#[derive(Default)]
struct Pool {
    free: Vec<Block>,
    retired: VecDeque<(Block, Fence)>,
    total: u64,
    pinned_refused: bool,
    /// Growing failed once: what there is has to do.
    full: bool,
    slabs: Vec<Pinned>,
}

/// A lane's block while it is being filled or its last readers finish.
struct Open {
    block: Block,
    queue: QueueId,
    filled: usize,
    users: u32,
}

#[derive(Default)]
struct Lane {
    open: Option<Open>,
    closing: Vec<Open>,
}

/// Part of a lane's block, for one small read. Must be given back with [`Staging::end_small`].
#[must_use]
pub(crate) struct Slot {
    lane: usize,
    block: *mut u8,
    /// Where the bytes go.
    pub(crate) ptr: *mut u8,
    /// Whether the memory is pinned.
    pub(crate) pinned: bool,
}

/// The ring of one device.
pub(crate) struct Staging {
    device: &'static dyn Device,
    bound: u64,
    pool: Mutex<Pool>,
    lanes: [Mutex<Lane>; LANES],
}

impl Staging {
    pub(crate) fn new(device: &'static dyn Device, bound: u64) -> Staging {
        Staging { device, bound: bound.max(2 * BLOCK as u64), pool: Mutex::default(), lanes: Default::default() }
    }

    /// The device it stages for.
    pub(crate) fn device(&self) -> &'static dyn Device {
        self.device
    }

    /// Bytes of memory it holds now.
    pub(crate) fn total(&self) -> u64 {
        lock(&self.pool).total
    }

    /// A block of one's own. Waits for the oldest copy when the ring is at its bound.
    pub(crate) fn take(&self) -> Result<Block, DeviceError> {
        loop {
            let mut pool = lock(&self.pool);
            if let Some(block) = pool.free.pop() {
                return Ok(block);
            }
            if let Some((_, fence)) = pool.retired.front()
                && self.device.is_done(fence).unwrap_or(true)
                && let Some((block, fence)) = pool.retired.pop_front()
            {
                self.device.release_fence(fence);
                return Ok(block);
            }
            if pool.total < self.bound && !pool.full {
                match self.grow(&mut pool) {
                    Ok(block) => return Ok(block),
                    Err(error) if pool.total == 0 || error.kind == ErrorKind::Gone => return Err(error),
                    Err(_) => pool.full = true,
                }
            }
            if let Some((block, fence)) = pool.retired.pop_front() {
                drop(pool);
                // Done or failed, nothing reads the block any more: a device that cannot wait has lost its context.
                let _ = self.device.wait(&fence, Wait::Context);
                self.device.release_fence(fence);
                return Ok(block);
            }
            // Every block is being filled by somebody else, or lies open in a lane that nobody uses now.
            drop(pool);
            if !self.close_idle_lanes() {
                std::thread::yield_now();
            }
        }
    }

    /// Retires the open blocks of lanes without a reader; whether there was one.
    fn close_idle_lanes(&self) -> bool {
        let mut closed = false;
        for lane in &self.lanes {
            // A lane that is locked is in use, or its owner is the one who waits.
            let Ok(mut lane) = lane.try_lock() else { continue };
            if lane.open.as_ref().is_some_and(|o| o.users == 0)
                && let Some(open) = lane.open.take()
            {
                self.retire(open.block, open.queue);
                closed = true;
            }
        }
        closed
    }

    /// New blocks: one at first, then a slab at a time.
    fn grow(&self, pool: &mut Pool) -> Result<Block, DeviceError> {
        let wanted = if pool.total == 0 { BLOCK } else { SLAB.min((self.bound - pool.total) as usize).max(BLOCK) };
        if !pool.pinned_refused {
            match self.device.staging(wanted) {
                Ok(slab) => {
                    pool.slabs.push(slab);
                    return Ok(self.cut(pool, slab.ptr, slab.len, true));
                }
                Err(error) if error.kind == ErrorKind::Gone => return Err(error),
                // Smaller may still do, and what the ring has already may be enough.
                Err(error) if pool.total > 0 => return Err(error),
                Err(_) => pool.pinned_refused = true,
            }
        }
        // SAFETY: a new anonymous mapping replaces nothing.
        let memory = unsafe {
            linux::mmap(
                core::ptr::null_mut(),
                BLOCK,
                linux::PROT_READ | linux::PROT_WRITE,
                linux::MAP_PRIVATE | linux::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        match memory {
            Ok(ptr) => Ok(self.cut(pool, ptr, BLOCK, false)),
            Err(_) => Err(DeviceError::new(ErrorKind::NoMemory, "staging memory")),
        }
    }

    fn cut(&self, pool: &mut Pool, ptr: *mut u8, len: usize, pinned: bool) -> Block {
        pool.total += len as u64;
        for at in (BLOCK..=len - BLOCK).step_by(BLOCK) {
            pool.free.push(Block { ptr: ptr.wrapping_add(at), pinned });
        }
        Block { ptr, pinned }
    }

    /// Gives a block back that nothing was queued from.
    pub(crate) fn give_back(&self, block: Block) {
        lock(&self.pool).free.push(block);
    }

    /// Gives a block back after copies from it were queued; it is lent again when they are done.
    pub(crate) fn retire(&self, block: Block, queue: QueueId) {
        match self.device.fence(queue) {
            Ok(fence) => lock(&self.pool).retired.push_back((block, fence)),
            Err(_) => {
                // No fence left, or the program destroyed its stream: then whatever was queued there is ordered
                // before the second drain or died with its context.
                if self.device.drain(queue, Wait::Context).is_err() {
                    let _ = self.device.drain(QueueId(0), Wait::Context);
                }
                self.give_back(block);
            }
        }
    }

    /// Memory for a read of up to `len` bytes (at most a quarter block) that will be copied on `queue`.
    pub(crate) fn begin_small(&self, len: usize, queue: QueueId) -> Result<Slot, DeviceError> {
        debug_assert!(len <= BLOCK / 4);
        // O_DIRECT descriptors want aligned memory; below a page they cannot be meant.
        let room = if len >= linux::PAGE { len.next_multiple_of(linux::PAGE) } else { len.next_multiple_of(512) };
        let index = linux::cpu() % LANES;
        let mut lane = lock(&self.lanes[index]);
        let fits = lane.open.as_ref().is_some_and(|o| o.queue == queue && o.filled + room <= BLOCK);
        if !fits {
            // Away with the full one first: it may be the block that the ring has left.
            if let Some(full) = lane.open.take() {
                match full.users {
                    0 => self.retire(full.block, full.queue),
                    _ => lane.closing.push(full),
                }
            }
            let block = self.take()?;
            lane.open = Some(Open { block, queue, filled: 0, users: 0 });
        }
        // Sub-page slots share pages with page-aligned ones; both stay aligned by filling in whole units.
        let Some(open) = lane.open.as_mut() else { return Err(DeviceError::new(ErrorKind::NoMemory, "staging lane")) };
        if room >= linux::PAGE {
            open.filled = open.filled.next_multiple_of(linux::PAGE);
            if open.filled + room > BLOCK {
                // Rounding up pushed it over the end: start the next block.
                open.filled = BLOCK;
                drop(lane);
                return self.begin_small(len, queue);
            }
        }
        let ptr = open.block.ptr.wrapping_add(open.filled);
        open.filled += room;
        open.users += 1;
        Ok(Slot { lane: index, block: open.block.ptr, ptr, pinned: open.block.pinned })
    }

    /// The small read is done: its copy is queued, or there was none.
    pub(crate) fn end_small(&self, slot: Slot) {
        let mut lane = lock(&self.lanes[slot.lane]);
        if let Some(open) = lane.open.as_mut()
            && open.block.ptr == slot.block
        {
            open.users -= 1;
            return;
        }
        if let Some(at) = lane.closing.iter().position(|o| o.block.ptr == slot.block) {
            lane.closing[at].users -= 1;
            if lane.closing[at].users == 0 {
                let done = lane.closing.swap_remove(at);
                drop(lane);
                self.retire(done.block, done.queue);
            }
        }
    }
}

/// A ring goes with its runtime, which only tests and tools let go.
impl Drop for Staging {
    fn drop(&mut self) {
        let lanes: Vec<Lane> = self.lanes.iter().map(|lane| core::mem::take(&mut *lock(lane))).collect();
        for open in lanes.into_iter().flat_map(|lane| lane.open.into_iter().chain(lane.closing)) {
            self.retire(open.block, open.queue);
        }
        let mut pool = lock(&self.pool);
        for (_, fence) in core::mem::take(&mut pool.retired) {
            let _ = self.device.wait(&fence, Wait::Context);
            self.device.release_fence(fence);
        }
        for slab in pool.slabs.drain(..) {
            self.device.free_staging(slab);
        }
    }
}
