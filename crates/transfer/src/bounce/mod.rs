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

use spinio_device::{Device, DeviceError, ErrorKind, Fence, PinnedBuffer, StreamId, WaitMode};
use spinio_sys::linux;

use spinio_host::shares::{ShareKey, Shares};
use spinio_host::sync::{AtomicU64, Backoff, Condvar, Mutex, MutexGuard, cpu_index, lock, wait_a_while};

/// Bytes of a block.
///
/// Copies of less leave the copy engine half idle when several threads issue them: on an H200, 16 threads reach
/// 26 GB/s with 512 KiB, 42 with 1 MiB and 47 with 2 MiB.
pub const BUFFER_SIZE: usize = if cfg!(loom) { 4096 } else { 2 << 20 };

/// Bytes of every slab but the first, which is one block so that a first read is quick.
const SLAB_SIZE: usize = 4 * BUFFER_SIZE;

const CPU_SLOTS: usize = if cfg!(loom) { 1 } else { 16 };

/// Retired blocks that are looked at before the ring grows.
const SCAN_LIMIT: usize = 4;

/// A block of staging memory, owned by whoever holds it.
#[derive(Debug)]
pub struct BounceBuffer {
    ptr: *mut u8,
    /// Whether the device copies from it at full speed.
    pub pinned: bool,
}

// SAFETY: plain memory with one owner at a time.
unsafe impl Send for BounceBuffer {}

impl BounceBuffer {
    /// Start of its [`BLOCK`] bytes, page-aligned.
    pub fn ptr(&self) -> *mut u8 {
        self.ptr
    }
}

#[derive(Default)]
struct PoolState {
    free: Vec<BounceBuffer>,
    retired: VecDeque<(BounceBuffer, Fence)>,
    total: u64,
    pinning_refused: bool,
    /// Growing failed once: what there is has to do.
    growth_failed: bool,
    slabs: Vec<PinnedBuffer>,
    /// Counts what may be of use to a thread that waits for a block.
    news: u64,
}

/// A lane's block while it is being filled or its last readers finish.
struct OpenBuffer {
    buffer: BounceBuffer,
    stream: StreamId,
    /// Whose queue of that number it is: [`owner`].
    owner_tid: u32,
    used: usize,
    readers: u32,
    /// Behind the last copy, on a queue of the program's own: it may be gone when the block is full.
    last_copy: Option<Fence>,
}

#[derive(Default)]
struct CpuSlot {
    current: Option<OpenBuffer>,
    draining: Vec<OpenBuffer>,
}

/// Part of a lane's block, for one small read. Must be given back with [`Staging::end_small`].
#[must_use]
pub struct BufferSlice {
    cpu_slot: usize,
    buffer: *mut u8,
    /// Where the bytes go.
    pub ptr: *mut u8,
    /// Whether the memory is pinned.
    pub pinned: bool,
}

/// The thread whose queue a number means; 0 where it means the same to all.
pub fn stream_owner(stream: StreamId) -> u32 {
    if stream == StreamId::PER_THREAD { linux::gettid() } else { 0 }
}

/// The ring of one device.
pub struct BouncePool {
    device: &'static dyn Device,
    limit: u64,
    state: Mutex<PoolState>,
    /// Threads that sleep until a block comes back, or are about to; and what wakes them.
    waiting: AtomicU64,
    freed: Condvar,
    cpu_slots: [Mutex<CpuSlot>; CPU_SLOTS],
    /// Blocks that requests have lent to threads which fill them from storage, by file system.
    lent: Mutex<Shares>,
    lent_back: Condvar,
    /// Held by who takes many blocks, while it takes them.
    bulk_lock: Mutex<()>,
}

impl BouncePool {
    pub fn new(device: &'static dyn Device, limit: u64) -> BouncePool {
        BouncePool {
            device,
            limit: limit.max(2 * BUFFER_SIZE as u64),
            state: Mutex::default(),
            waiting: AtomicU64::new(0),
            freed: Condvar::new(),
            cpu_slots: Default::default(),
            lent: Mutex::default(),
            lent_back: Condvar::new(),
            bulk_lock: Mutex::default(),
        }
    }

    /// The device it stages for.
    pub fn device(&self) -> &'static dyn Device {
        self.device
    }

    /// Bytes of memory it holds now.
    pub fn total_bytes(&self) -> u64 {
        lock(&self.state).total
    }

    /// A block of one's own. Waits for the oldest copy when the ring is at its bound; not for threads that hold blocks
    /// already.
    pub fn acquire(&self) -> Result<BounceBuffer, DeviceError> {
        loop {
            if let Some(block) = self.try_acquire()? {
                return Ok(block);
            }
            self.wait_for_release();
        }
    }

    /// So many blocks, or fewer if the ring has no more to give for as long as `patience`: for who holds blocks while it
    /// takes others, and has other memory too.
    pub fn acquire_many(&self, count: usize, timeout: Duration) -> Vec<BounceBuffer> {
        // One at a time: two that each hold half of the ring would both go short.
        let _bulk = lock(&self.bulk_lock);
        let mut acquired = Vec::with_capacity(count);
        let mut progress = Instant::now();
        while acquired.len() < count {
            match self.try_acquire() {
                Ok(Some(block)) => {
                    acquired.push(block);
                    progress = Instant::now();
                }
                Ok(None) if progress.elapsed() < timeout => self.wait_for_release(),
                _ => break,
            }
        }
        acquired
    }

    /// Whether one more buffer may be lent to threads that fill it from the storage with this key, which may never answer;
    /// counted until [`BouncePool::end_lending`]. `wait`: wait for that, which is only for requests that have lent none.
    pub fn begin_lending(&self, key: ShareKey, wait: bool) -> bool {
        let size = (self.limit / BUFFER_SIZE as u64) as usize;
        let mut lent = lock(&self.lent);
        while lent.available(key, size) == 0 {
            if !wait {
                return false;
            }
            lent = wait_a_while(&self.lent_back, lent);
        }
        lent.add(key, 1);
        true
    }

    /// So many buffers are no longer lent.
    pub fn end_lending(&self, key: ShareKey, count: usize) {
        lock(&self.lent).remove(key, count);
        self.lent_back.notify_all();
    }

    /// Blocks that could be taken now without waiting, if nobody else took any.
    pub fn available(&self) -> usize {
        let mut state = lock(&self.state);
        while let Some(block) = self.reclaim(&mut state, usize::MAX) {
            state.free.push(block);
        }
        state.free.len() + (self.limit.saturating_sub(state.total) / BUFFER_SIZE as u64) as usize
    }

    /// A block that the bound does not allow, for who must not wait. It stays in the ring.
    pub fn acquire_over_limit(&self) -> Result<BounceBuffer, DeviceError> {
        match self.try_acquire()? {
            Some(block) => Ok(block),
            None => self.grow(&mut lock(&self.state)),
        }
    }

    /// The same, but only up to twice the bound.
    pub fn acquire_for_stream(&self) -> Result<Option<BounceBuffer>, DeviceError> {
        if self.total_bytes() < 2 * self.limit { self.acquire_over_limit().map(Some) } else { self.try_acquire() }
    }

    /// A block of one's own, if there is one without waiting.
    pub fn try_acquire(&self) -> Result<Option<BounceBuffer>, DeviceError> {
        let mut state = lock(&self.state);
        if let Some(block) = state.free.pop() {
            return Ok(Some(block));
        }
        // The oldest is usually the first to be done, but one queue may stand still while others move.
        if let Some(block) = self.reclaim(&mut state, SCAN_LIMIT) {
            return Ok(Some(block));
        }
        if state.total < self.limit && !state.growth_failed {
            match self.grow(&mut state) {
                Ok(block) => return Ok(Some(block)),
                Err(error) if state.total == 0 || error.kind == ErrorKind::ContextLost => return Err(error),
                Err(_) => state.growth_failed = true,
            }
        }
        Ok(None)
    }

    /// The same, but rather one that was in use a moment ago than one that has lain idle: the processor's cache may still
    /// have it, and storage writes there faster.
    pub fn try_acquire_warm(&self) -> Result<Option<BounceBuffer>, DeviceError> {
        if let Some(block) = self.reclaim(&mut lock(&self.state), SCAN_LIMIT) {
            return Ok(Some(block));
        }
        self.try_acquire()
    }

    /// The same, of a ring that is not to grow beyond so many bytes for this.
    pub fn try_acquire_within(&self, max_total: u64) -> Result<Option<BounceBuffer>, DeviceError> {
        if self.total_bytes() < max_total {
            return self.try_acquire_warm();
        }
        let mut state = lock(&self.state);
        Ok(self.reclaim(&mut state, SCAN_LIMIT).or_else(|| state.free.pop()))
    }

    /// Waits for a block to become free, whichever copy is done first; not for ever, and it may be for nothing.
    pub fn wait_for_release(&self) {
        let backoff = Backoff::new();
        loop {
            let mut state = lock(&self.state);
            if !state.free.is_empty() {
                return;
            }
            if let Some(block) = self.reclaim(&mut state, usize::MAX) {
                state.free.push(block);
                return;
            }
            if state.retired.is_empty() {
                // Every block is being filled by another thread, or lies open in a lane.
                return self.sleep(state);
            }
            drop(state);
            if !backoff.wait() {
                return;
            }
        }
    }

    /// Sleeps until something has changed. A thread that changes something before this one sleeps finds it counted: it is
    /// counted before the lanes are looked at, and `news` is read before that.
    fn sleep<'a>(&'a self, pool: MutexGuard<'a, PoolState>) {
        let news = pool.news;
        self.waiting.fetch_add(1, SeqCst);
        drop(pool);
        if !self.close_idle_slots() {
            let pool = lock(&self.state);
            if pool.news == news && pool.free.is_empty() && pool.retired.is_empty() {
                drop(wait_a_while(&self.freed, pool));
            }
        }
        self.waiting.fetch_sub(1, SeqCst);
    }

    /// Something is there for a thread that waits. Needs the lock of the pool, so that none falls asleep meanwhile.
    fn tell(&self, state: &mut PoolState) {
        state.news += 1;
        if self.waiting.load(SeqCst) > 0 {
            self.freed.notify_all();
        }
    }

    /// A retired block that nothing reads any more, of the oldest `among`.
    fn reclaim(&self, state: &mut PoolState, scan_limit: usize) -> Option<BounceBuffer> {
        let at = state.retired.iter().take(scan_limit).position(|(_, fence)| self.is_copy_done(fence))?;
        let (block, fence) = state.retired.remove(at)?;
        self.device.release_fence(fence);
        Some(block)
    }

    /// Whether nothing reads the block behind the fence any more; a device that cannot tell has lost its context.
    fn is_copy_done(&self, fence: &Fence) -> bool {
        self.device.query(fence).unwrap_or(true)
    }

    /// Retires the open blocks of lanes without a reader; whether there was one.
    fn close_idle_slots(&self) -> bool {
        let mut closed = false;
        for lane in &self.cpu_slots {
            // A lane that is locked is in use, or its owner is the one who waits.
            let Ok(mut lane) = lane.try_lock() else { continue };
            if lane.current.as_ref().is_some_and(|o| o.readers == 0)
                && let Some(open) = lane.current.take()
            {
                self.close_open(open);
                closed = true;
            }
        }
        closed
    }

    /// New blocks: one at first, then a slab at a time.
    fn grow(&self, state: &mut PoolState) -> Result<BounceBuffer, DeviceError> {
        let available = self.limit.saturating_sub(state.total) as usize;
        let len = if state.total == 0 { BUFFER_SIZE } else { SLAB_SIZE.min(available).max(BUFFER_SIZE) };
        if !state.pinning_refused {
            match self.device.alloc_pinned(len) {
                Ok(slab) => {
                    state.slabs.push(slab);
                    return Ok(self.split_slab(state, slab.ptr, slab.len, true));
                }
                Err(error) if error.kind == ErrorKind::ContextLost => return Err(error),
                // Smaller may still do, and what the ring has already may be enough.
                Err(error) if state.total > 0 => return Err(error),
                Err(_) => state.pinning_refused = true,
            }
        }
        // SAFETY: a new anonymous mapping replaces nothing.
        let memory = unsafe {
            linux::mmap(
                core::ptr::null_mut(),
                BUFFER_SIZE,
                linux::PROT_READ | linux::PROT_WRITE,
                linux::MAP_PRIVATE | linux::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        match memory {
            Ok(ptr) => Ok(self.split_slab(state, ptr, BUFFER_SIZE, false)),
            Err(_) => Err(DeviceError::new(ErrorKind::NoMemory, "staging memory")),
        }
    }

    fn split_slab(&self, pool: &mut PoolState, ptr: *mut u8, len: usize, pinned: bool) -> BounceBuffer {
        pool.total += len as u64;
        for at in (BUFFER_SIZE..=len - BUFFER_SIZE).step_by(BUFFER_SIZE) {
            pool.free.push(BounceBuffer { ptr: ptr.wrapping_add(at), pinned });
        }
        BounceBuffer { ptr, pinned }
    }

    /// Gives a block back that nothing was queued from.
    pub fn release(&self, buffer: BounceBuffer) {
        let mut state = lock(&self.state);
        state.free.push(buffer);
        self.tell(&mut state);
    }

    /// A block that storage or the device may still use at any time: it is never lent again, and the ring may grow by another instead.
    pub fn quarantine(&self, _buffer: BounceBuffer) {
        let mut state = lock(&self.state);
        state.total -= BUFFER_SIZE as u64;
        // It may have been the last one.
        state.growth_failed = false;
        self.tell(&mut state);
    }

    /// Gives a block back after copies from it were queued; it is lent again when they are done.
    pub fn release_after(&self, buffer: BounceBuffer, stream: StreamId) {
        match self.device.fence(stream) {
            Ok(fence) => self.retire_behind(buffer, fence),
            Err(_) => {
                // No fence left, or the queue is no longer: a block that may still be read is never lent again.
                match self.device.synchronize(stream, WaitMode::Context) {
                    Ok(()) => self.release(buffer),
                    Err(_) => self.quarantine(buffer),
                }
            }
        }
    }

    /// Memory for a read of up to `len` bytes (at most a quarter block) that will be copied on `queue`.
    pub fn acquire_slice(&self, len: usize, stream: StreamId) -> Result<BufferSlice, DeviceError> {
        debug_assert!(len <= BUFFER_SIZE / 4);
        // O_DIRECT descriptors want aligned memory; below a page they cannot be meant.
        let align = if len >= linux::PAGE { linux::PAGE } else { 512 };
        let (index, owner) = (cpu_index(CPU_SLOTS), stream_owner(stream));
        let mut fresh = None;
        loop {
            let mut lane = lock(&self.cpu_slots[index]);
            if let Some(open) = lane.current.as_mut().filter(|o| (o.stream, o.owner_tid) == (stream, owner)) {
                let at = open.used.next_multiple_of(align);
                if at + len <= BUFFER_SIZE {
                    open.used = at + len.next_multiple_of(512);
                    open.readers += 1;
                    let ptr = open.buffer.ptr.wrapping_add(at);
                    let slot =
                        BufferSlice { cpu_slot: index, buffer: open.buffer.ptr, ptr, pinned: open.buffer.pinned };
                    drop(lane);
                    if let Some(spare) = fresh {
                        self.release(spare);
                    }
                    return Ok(slot);
                }
            }
            // Away with the full one first: it may be the block that the ring has left.
            let full = lane.current.take();
            if let Some(block) = fresh.take() {
                lane.current =
                    Some(OpenBuffer { buffer: block, stream, owner_tid: owner, used: 0, readers: 0, last_copy: None });
            }
            let full = match full {
                Some(open) if open.readers > 0 => {
                    lane.draining.push(open);
                    None
                }
                other => other,
            };
            let wanted = lane.current.is_none();
            // Not with the lane in hand: those who could free a block may need it.
            drop(lane);
            if let Some(open) = full {
                self.close_open(open);
            }
            if wanted {
                fresh = Some(self.acquire()?);
            }
        }
    }

    /// The small read is done: its copy is queued, or there was none.
    pub fn release_slice(&self, slice: BufferSlice) {
        let mut lane = lock(&self.cpu_slots[slice.cpu_slot]);
        let CpuSlot { current: open, draining: closing } = &mut *lane;
        let Some(used) = open.iter_mut().chain(closing.iter_mut()).find(|o| o.buffer.ptr == slice.buffer) else {
            return;
        };
        used.readers -= 1;
        if used.stream != StreamId(0)
            && let Ok(fence) = self.device.fence(used.stream)
            && let Some(earlier) = used.last_copy.replace(fence)
        {
            self.device.release_fence(earlier);
        }
        if let Some(at) = closing.iter().position(|o| o.readers == 0) {
            let done = closing.swap_remove(at);
            drop(lane);
            return self.close_open(done);
        }
        let idle = open.as_ref().is_some_and(|o| o.readers == 0);
        drop(lane);
        // A thread that waits may close an idle lane.
        if idle && self.waiting.load(SeqCst) > 0 {
            self.tell(&mut lock(&self.state));
        }
    }

    /// Retires the block of a lane.
    fn close_open(&self, open: OpenBuffer) {
        match open.last_copy {
            Some(fence) => self.retire_behind(open.buffer, fence),
            None => self.release_after(open.buffer, open.stream),
        }
    }

    fn retire_behind(&self, block: BounceBuffer, fence: Fence) {
        let mut pool = lock(&self.state);
        pool.retired.push_back((block, fence));
        self.tell(&mut pool);
    }
}

/// A ring goes with its runtime, which only tests and tools let go.
impl Drop for BouncePool {
    fn drop(&mut self) {
        let lanes: Vec<CpuSlot> = self.cpu_slots.iter().map(|lane| core::mem::take(&mut *lock(lane))).collect();
        for open in lanes.into_iter().flat_map(|lane| lane.current.into_iter().chain(lane.draining)) {
            self.close_open(open);
        }
        let mut pool = lock(&self.state);
        for (_, fence) in core::mem::take(&mut pool.retired) {
            let _ = self.device.wait(&fence, WaitMode::Context);
            self.device.release_fence(fence);
        }
        for slab in pool.slabs.drain(..) {
            self.device.free_pinned(slab);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use spinio_testkit::buffer::emulated;
    use spinio_testkit::deadline::eventually;

    use super::*;

    #[test]
    fn waiting_for_a_block_sleeps_until_one_comes_back() {
        let device = emulated("size=64M");
        let staging = BouncePool::new(device, 2 * BUFFER_SIZE as u64);
        let buffers = [staging.acquire().unwrap(), staging.acquire().unwrap()];
        let tid = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                tid.store(linux::gettid(), SeqCst);
                let block = staging.acquire().unwrap();
                let at = block.ptr() as usize;
                staging.release(block);
                at
            });
            eventually("the thread that waits sleeps", || {
                let stat = format!("/proc/self/task/{}/stat", tid.load(SeqCst));
                staging.waiting.load(SeqCst) > 0
                    && (0..100).all(|_| std::fs::read_to_string(&stat).is_ok_and(|s| s.contains(") S ")))
            });
            let [one, other] = buffers;
            let at = one.ptr() as usize;
            staging.release(one);
            assert_eq!(waiter.join().unwrap(), at);
            staging.release(other);
        });
    }

    #[test]
    fn waiting_for_a_block_gets_that_of_a_small_read_that_ends() {
        let device = emulated("size=64M");
        let staging = BouncePool::new(device, 2 * BUFFER_SIZE as u64);
        let slot = staging.acquire_slice(4096, StreamId(0)).unwrap();
        let other = staging.acquire().unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| staging.acquire().unwrap());
            eventually("a thread waits", || staging.waiting.load(SeqCst) > 0);
            staging.release_slice(slot);
            staging.release(waiter.join().unwrap());
        });
        staging.release(other);
    }

    #[test]
    fn warm_buffers_are_reused_before_idle_ones() {
        let device = emulated("size=64M");
        let staging = BouncePool::new(device, 16 << 20);
        let blocks: Vec<BounceBuffer> = (0..3).map(|_| staging.acquire().unwrap()).collect();
        let total = staging.total_bytes();
        let [warm_buffer, idle_buffer, held_buffer] = <[BounceBuffer; 3]>::try_from(blocks).unwrap();
        let (warm, cold) = (warm_buffer.ptr(), idle_buffer.ptr());
        let queue = device.acquire_stream().unwrap();
        staging.release_after(warm_buffer, queue);
        staging.release(idle_buffer);
        eventually("the copy is over", || {
            lock(&staging.state).retired.iter().all(|(_, fence)| staging.is_copy_done(fence))
        });
        let first = staging.try_acquire_warm().unwrap().expect("a block");
        let second = staging.try_acquire_warm().unwrap().expect("a block");
        assert_eq!((first.ptr(), second.ptr()), (warm, cold));
        assert_eq!(staging.total_bytes(), total, "nothing had to grow");
        for block in [first, second, held_buffer] {
            staging.release(block);
        }
        device.release_stream(queue);
    }
}
