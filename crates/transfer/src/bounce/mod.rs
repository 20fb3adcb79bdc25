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
//! for the oldest copy, or asleep for a thread that gives a block back. Threads meet only in `take` and `retire` (tens of nanoseconds a
//! block) and, for small reads, in their processor's lane.
//!
//! When the driver refuses pinned memory the ring lends ordinary memory instead: every
//! device copies from it, more slowly, and the statistics say so.
//!
//! There are two rings a device: one for requests that their caller waits for, whose blocks come back by themselves, and one
//! for what waits for a queue of the program's (bounce_pools.rs). A queue may wait for the program, and the
//! program for a read: so what the one ring lends for long must not be what the other one lacks.
//!
//! `interleavings.rs` runs two fillers and a device through every order in which they can meet.
//!
//! Known flaws: a block serves one queue at a time, so a program that spreads small reads
//! over many streams on one processor fills blocks only partly. Slabs are never given back
//! to the driver while the process lives.

#[cfg(all(test, loom))]
mod interleavings;

use std::collections::VecDeque;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use spinio_device::{Device, DeviceError, ErrorKind, Fence, Pinned, QueueId, Wait};
use spinio_sys::linux;

use spinio_host::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Patience, lane, lock, wait_a_while};

/// Bytes of a block.
///
/// Copies of less leave the copy engine half idle when several threads issue them: on an H200, 16 threads reach
/// 26 GB/s with 512 KiB, 42 with 1 MiB and 47 with 2 MiB.
pub const BLOCK: usize = if cfg!(loom) { 4096 } else { 2 << 20 };

/// Bytes of every slab but the first, which is one block so that a first read is quick.
const SLAB: usize = 4 * BLOCK;

const LANES: usize = if cfg!(loom) { 1 } else { 16 };

/// Retired blocks that are looked at before the ring grows.
const LOOKED_AT: usize = 4;

/// A block of staging memory, owned by whoever holds it.
#[derive(Debug)]
pub struct Block {
    ptr: *mut u8,
    /// Whether the device copies from it at full speed.
    pub pinned: bool,
}

// SAFETY: plain memory with one owner at a time.
unsafe impl Send for Block {}

impl Block {
    /// Start of its [`BLOCK`] bytes, page-aligned.
    pub fn ptr(&self) -> *mut u8 {
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
    /// Counts what may be of use to a thread that waits for a block.
    news: u64,
}

/// A lane's block while it is being filled or its last readers finish.
struct Open {
    block: Block,
    queue: QueueId,
    /// Whose queue of that number it is: [`owner`].
    owner: u32,
    filled: usize,
    users: u32,
    /// Behind the last copy, on a queue of the program's own: it may be gone when the block is full.
    last: Option<Fence>,
}

#[derive(Default)]
struct Lane {
    open: Option<Open>,
    closing: Vec<Open>,
}

/// Part of a lane's block, for one small read. Must be given back with [`Staging::end_small`].
#[must_use]
pub struct Slot {
    lane: usize,
    block: *mut u8,
    /// Where the bytes go.
    pub ptr: *mut u8,
    /// Whether the memory is pinned.
    pub pinned: bool,
}

/// The thread whose queue a number means; 0 where it means the same to all.
pub fn owner(queue: QueueId) -> u32 {
    if queue == QueueId::PER_THREAD { linux::gettid() } else { 0 }
}

/// The ring of one device.
pub struct Staging {
    device: &'static dyn Device,
    bound: u64,
    pool: Mutex<Pool>,
    /// Threads that sleep until a block comes back, or are about to; and what wakes them.
    waiting: AtomicU64,
    freed: Condvar,
    lanes: [Mutex<Lane>; LANES],
    /// Held by who takes many blocks, while it takes them.
    gatherer: Mutex<()>,
}

impl Staging {
    pub fn new(device: &'static dyn Device, bound: u64) -> Staging {
        Staging {
            device,
            bound: bound.max(2 * BLOCK as u64),
            pool: Mutex::default(),
            waiting: AtomicU64::new(0),
            freed: Condvar::new(),
            lanes: Default::default(),
            gatherer: Mutex::default(),
        }
    }

    /// The device it stages for.
    pub fn device(&self) -> &'static dyn Device {
        self.device
    }

    /// Bytes of memory it holds now.
    pub fn total(&self) -> u64 {
        lock(&self.pool).total
    }

    /// A block of one's own. Waits for the oldest copy when the ring is at its bound; not for threads that hold blocks
    /// already.
    pub fn take(&self) -> Result<Block, DeviceError> {
        loop {
            if let Some(block) = self.try_take()? {
                return Ok(block);
            }
            self.wait();
        }
    }

    /// So many blocks, or fewer if the ring has no more to give for as long as `patience`: for who holds blocks while it
    /// takes others, and has other memory too.
    pub fn take_many(&self, count: usize, patience: Duration) -> Vec<Block> {
        // One at a time: two that each hold half of the ring would both go short.
        let _only = lock(&self.gatherer);
        let mut taken = Vec::with_capacity(count);
        let mut progress = Instant::now();
        while taken.len() < count {
            match self.try_take() {
                Ok(Some(block)) => {
                    taken.push(block);
                    progress = Instant::now();
                }
                Ok(None) if progress.elapsed() < patience => self.wait(),
                _ => break,
            }
        }
        taken
    }

    /// Blocks that could be taken now without waiting, if nobody else took any.
    pub fn left(&self) -> usize {
        let mut pool = lock(&self.pool);
        while let Some(block) = self.reclaim(&mut pool, usize::MAX) {
            pool.free.push(block);
        }
        pool.free.len() + (self.bound.saturating_sub(pool.total) / BLOCK as u64) as usize
    }

    /// A block that the bound does not allow, for who must not wait. It stays in the ring.
    pub fn beyond_bound(&self) -> Result<Block, DeviceError> {
        match self.try_take()? {
            Some(block) => Ok(block),
            None => self.grow(&mut lock(&self.pool)),
        }
    }

    /// The same, but only up to twice the bound.
    pub fn take_queued(&self) -> Result<Option<Block>, DeviceError> {
        if self.total() < 2 * self.bound { self.beyond_bound().map(Some) } else { self.try_take() }
    }

    /// A block of one's own, if there is one without waiting.
    pub fn try_take(&self) -> Result<Option<Block>, DeviceError> {
        let mut pool = lock(&self.pool);
        if let Some(block) = pool.free.pop() {
            return Ok(Some(block));
        }
        // The oldest is usually the first to be done, but one queue may stand still while others move.
        if let Some(block) = self.reclaim(&mut pool, LOOKED_AT) {
            return Ok(Some(block));
        }
        if pool.total < self.bound && !pool.full {
            match self.grow(&mut pool) {
                Ok(block) => return Ok(Some(block)),
                Err(error) if pool.total == 0 || error.kind == ErrorKind::Gone => return Err(error),
                Err(_) => pool.full = true,
            }
        }
        Ok(None)
    }

    /// The same, but rather one that was in use a moment ago than one that has lain idle: the processor's cache may still
    /// have it, and storage writes there faster.
    pub fn try_take_warm(&self) -> Result<Option<Block>, DeviceError> {
        if let Some(block) = self.reclaim(&mut lock(&self.pool), LOOKED_AT) {
            return Ok(Some(block));
        }
        self.try_take()
    }

    /// The same, of a ring that is not to grow beyond so many bytes for this.
    pub fn try_take_within(&self, bytes: u64) -> Result<Option<Block>, DeviceError> {
        if self.total() < bytes {
            return self.try_take_warm();
        }
        let mut pool = lock(&self.pool);
        Ok(self.reclaim(&mut pool, LOOKED_AT).or_else(|| pool.free.pop()))
    }

    /// Waits for a block to become free, whichever copy is done first; not for ever, and it may be for nothing.
    pub fn wait(&self) {
        let patience = Patience::new();
        loop {
            let mut pool = lock(&self.pool);
            if !pool.free.is_empty() {
                return;
            }
            if let Some(block) = self.reclaim(&mut pool, usize::MAX) {
                pool.free.push(block);
                return;
            }
            if pool.retired.is_empty() {
                // Every block is being filled by another thread, or lies open in a lane.
                return self.sleep(pool);
            }
            drop(pool);
            if !patience.wait() {
                return;
            }
        }
    }

    /// Sleeps until something has changed. A thread that changes something before this one sleeps finds it counted: it is
    /// counted before the lanes are looked at, and `news` is read before that.
    fn sleep<'a>(&'a self, pool: MutexGuard<'a, Pool>) {
        let news = pool.news;
        self.waiting.fetch_add(1, SeqCst);
        drop(pool);
        if !self.close_idle_lanes() {
            let pool = lock(&self.pool);
            if pool.news == news && pool.free.is_empty() && pool.retired.is_empty() {
                drop(wait_a_while(&self.freed, pool));
            }
        }
        self.waiting.fetch_sub(1, SeqCst);
    }

    /// Something is there for a thread that waits. Needs the lock of the pool, so that none falls asleep meanwhile.
    fn tell(&self, pool: &mut Pool) {
        pool.news += 1;
        if self.waiting.load(SeqCst) > 0 {
            self.freed.notify_all();
        }
    }

    /// A retired block that nothing reads any more, of the oldest `among`.
    fn reclaim(&self, pool: &mut Pool, among: usize) -> Option<Block> {
        let at = pool.retired.iter().take(among).position(|(_, fence)| self.is_over(fence))?;
        let (block, fence) = pool.retired.remove(at)?;
        self.device.release_fence(fence);
        Some(block)
    }

    /// Whether nothing reads the block behind the fence any more; a device that cannot tell has lost its context.
    fn is_over(&self, fence: &Fence) -> bool {
        self.device.is_done(fence).unwrap_or(true)
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
                self.close(open);
                closed = true;
            }
        }
        closed
    }

    /// New blocks: one at first, then a slab at a time.
    fn grow(&self, pool: &mut Pool) -> Result<Block, DeviceError> {
        let room = self.bound.saturating_sub(pool.total) as usize;
        let wanted = if pool.total == 0 { BLOCK } else { SLAB.min(room).max(BLOCK) };
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
    pub fn give_back(&self, block: Block) {
        let mut pool = lock(&self.pool);
        pool.free.push(block);
        self.tell(&mut pool);
    }

    /// A block that storage or the device may still use at any time: it is never lent again, and the ring may grow by another instead.
    pub fn lose(&self, _lost: Block) {
        let mut pool = lock(&self.pool);
        pool.total -= BLOCK as u64;
        // It may have been the last one.
        pool.full = false;
        self.tell(&mut pool);
    }

    /// Gives a block back after copies from it were queued; it is lent again when they are done.
    pub fn retire(&self, block: Block, queue: QueueId) {
        match self.device.fence(queue) {
            Ok(fence) => self.retire_behind(block, fence),
            Err(_) => {
                // No fence left, or the queue is no longer: a block that may still be read is never lent again.
                match self.device.drain(queue, Wait::Context) {
                    Ok(()) => self.give_back(block),
                    Err(_) => self.lose(block),
                }
            }
        }
    }

    /// Memory for a read of up to `len` bytes (at most a quarter block) that will be copied on `queue`.
    pub fn begin_small(&self, len: usize, queue: QueueId) -> Result<Slot, DeviceError> {
        debug_assert!(len <= BLOCK / 4);
        // O_DIRECT descriptors want aligned memory; below a page they cannot be meant.
        let unit = if len >= linux::PAGE { linux::PAGE } else { 512 };
        let (index, owner) = (lane(LANES), owner(queue));
        let mut fresh = None;
        loop {
            let mut lane = lock(&self.lanes[index]);
            if let Some(open) = lane.open.as_mut().filter(|o| (o.queue, o.owner) == (queue, owner)) {
                let at = open.filled.next_multiple_of(unit);
                if at + len <= BLOCK {
                    open.filled = at + len.next_multiple_of(512);
                    open.users += 1;
                    let ptr = open.block.ptr.wrapping_add(at);
                    let slot = Slot { lane: index, block: open.block.ptr, ptr, pinned: open.block.pinned };
                    drop(lane);
                    if let Some(spare) = fresh {
                        self.give_back(spare);
                    }
                    return Ok(slot);
                }
            }
            // Away with the full one first: it may be the block that the ring has left.
            let full = lane.open.take();
            if let Some(block) = fresh.take() {
                lane.open = Some(Open { block, queue, owner, filled: 0, users: 0, last: None });
            }
            let full = match full {
                Some(open) if open.users > 0 => {
                    lane.closing.push(open);
                    None
                }
                other => other,
            };
            let wanted = lane.open.is_none();
            // Not with the lane in hand: those who could free a block may need it.
            drop(lane);
            if let Some(open) = full {
                self.close(open);
            }
            if wanted {
                fresh = Some(self.take()?);
            }
        }
    }

    /// The small read is done: its copy is queued, or there was none.
    pub fn end_small(&self, slot: Slot) {
        let mut lane = lock(&self.lanes[slot.lane]);
        let Lane { open, closing } = &mut *lane;
        let Some(used) = open.iter_mut().chain(closing.iter_mut()).find(|o| o.block.ptr == slot.block) else { return };
        used.users -= 1;
        if used.queue != QueueId(0)
            && let Ok(fence) = self.device.fence(used.queue)
            && let Some(earlier) = used.last.replace(fence)
        {
            self.device.release_fence(earlier);
        }
        if let Some(at) = closing.iter().position(|o| o.users == 0) {
            let done = closing.swap_remove(at);
            drop(lane);
            return self.close(done);
        }
        let idle = open.as_ref().is_some_and(|o| o.users == 0);
        drop(lane);
        // A thread that waits may close an idle lane.
        if idle && self.waiting.load(SeqCst) > 0 {
            self.tell(&mut lock(&self.pool));
        }
    }

    /// Retires the block of a lane.
    fn close(&self, open: Open) {
        match open.last {
            Some(fence) => self.retire_behind(open.block, fence),
            None => self.retire(open.block, open.queue),
        }
    }

    fn retire_behind(&self, block: Block, fence: Fence) {
        let mut pool = lock(&self.pool);
        pool.retired.push_back((block, fence));
        self.tell(&mut pool);
    }
}

/// A ring goes with its runtime, which only tests and tools let go.
impl Drop for Staging {
    fn drop(&mut self) {
        let lanes: Vec<Lane> = self.lanes.iter().map(|lane| core::mem::take(&mut *lock(lane))).collect();
        for open in lanes.into_iter().flat_map(|lane| lane.open.into_iter().chain(lane.closing)) {
            self.close(open);
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

#[cfg(all(test, not(loom)))]
mod tests {
    use spinio_testkit::buffer::emulated;
    use spinio_testkit::deadline::in_a_while;

    use super::*;

    #[test]
    fn waiting_for_a_block_sleeps_until_one_comes_back() {
        let device = emulated("size=64M");
        let staging = Staging::new(device, 2 * BLOCK as u64);
        let blocks = [staging.take().unwrap(), staging.take().unwrap()];
        let tid = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                tid.store(linux::gettid(), SeqCst);
                let block = staging.take().unwrap();
                let at = block.ptr() as usize;
                staging.give_back(block);
                at
            });
            in_a_while("the thread that waits sleeps", || {
                let stat = format!("/proc/self/task/{}/stat", tid.load(SeqCst));
                staging.waiting.load(SeqCst) > 0
                    && (0..100).all(|_| std::fs::read_to_string(&stat).is_ok_and(|s| s.contains(") S ")))
            });
            let [one, other] = blocks;
            let at = one.ptr() as usize;
            staging.give_back(one);
            assert_eq!(waiter.join().unwrap(), at);
            staging.give_back(other);
        });
    }

    #[test]
    fn waiting_for_a_block_gets_that_of_a_small_read_that_ends() {
        let device = emulated("size=64M");
        let staging = Staging::new(device, 2 * BLOCK as u64);
        let slot = staging.begin_small(4096, QueueId(0)).unwrap();
        let other = staging.take().unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| staging.take().unwrap());
            in_a_while("a thread waits", || staging.waiting.load(SeqCst) > 0);
            staging.end_small(slot);
            staging.give_back(waiter.join().unwrap());
        });
        staging.give_back(other);
    }

    #[test]
    fn warm_blocks_come_before_idle_ones_and_idle_ones_before_none() {
        let device = emulated("size=64M");
        let staging = Staging::new(device, 16 << 20);
        let blocks: Vec<Block> = (0..3).map(|_| staging.take().unwrap()).collect();
        let total = staging.total();
        let [used, idle, busy] = <[Block; 3]>::try_from(blocks).unwrap();
        let (warm, cold) = (used.ptr(), idle.ptr());
        let queue = device.lease_queue().unwrap();
        staging.retire(used, queue);
        staging.give_back(idle);
        in_a_while("the copy is over", || lock(&staging.pool).retired.iter().all(|(_, fence)| staging.is_over(fence)));
        let first = staging.try_take_warm().unwrap().expect("a block");
        let second = staging.try_take_warm().unwrap().expect("a block");
        assert_eq!((first.ptr(), second.ptr()), (warm, cold));
        assert_eq!(staging.total(), total, "nothing had to grow");
        for block in [first, second, busy] {
            staging.give_back(block);
        }
        device.return_queue(queue);
    }
}
