//! The bounce buffer pool: pinned host memory between the page cache or storage and the device.
//!
//! ```text
//!   slab (from the device) ──split──> buffers of 2 MiB
//!
//!       acquire()                   release_after(stream)
//!   free ───────> being filled ───────────────────────────> retired ──fence done──> free
//!   (latest first)  │      ▲                                       (oldest first)
//!                   └ slot ┘  a buffer that many small reads share, one slot per processor
//! ```
//!
//! The buffer that was in use last is taken first: it may still be in the processor's cache. On an H200 machine 1 MiB of a
//! virtual disk takes 539 us into the same memory again and again, and 646 us into 128 MiB in turn (O_DIRECT `pread`).
//!
//! The pool starts with one buffer and grows on demand up to its limit. At the limit, a thread that acquires waits for
//! the oldest copy, or sleeps until another thread releases a buffer. Threads contend only in `acquire` and `release`
//! (tens of nanoseconds per buffer) and, for small reads, in the slot of their processor.
//!
//! If the driver refuses pinned memory the pool uses ordinary memory instead: every device copies from it, more slowly,
//! and the statistics report it. The driver is asked again after a second: it may have refused because another process
//! had the memory for a moment.
//!
//! There are two pools per device: one for requests that their caller waits for, whose buffers are released without the
//! program, and one for requests that wait for a stream of the program (bounce_pools.rs). A stream may wait for the
//! program, and the program for a read: so buffers that are in use for long must not be taken from the pool of the
//! other requests.
//!
//! A file server may never answer a read into a buffer, so each file system has a share of the buffers that are being
//! filled (`begin_lending`): from storage, and through the page cache unless the file is on a local disk or in memory.
//!
//! `interleavings.rs` runs two filling threads and a device in every order in which they can interleave.
//!
//! Known flaws:
//! - A buffer serves one stream at a time, so a program that spreads small reads over many streams on one processor
//!   fills buffers only partly.
//! - Slabs are never returned to the driver while the process lives.
//! - Buffers of small reads and of batches that go through the page cache are not counted in shares. Of a server that does
//!   not answer each keeps one buffer, small reads that share one together: as many as the pool has stop the others.
//! - The open buffer of a slot is lost to the pool if it has to be retired while the program captures the default
//!   stream, because nothing can then be ordered after its copies.

#![expect(unsafe_code, reason = "memory that a device copies from or into")]

#[cfg(all(test, loom))]
mod interleavings;
#[cfg(all(test, not(loom)))]
mod tests;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use spinio_device::{Device, DeviceError, ErrorKind, FenceGuard, PinnedBuffer, StreamId, WaitMode};
use spinio_sys::linux;

use spinio_host::shares::{ShareKey, Shares};
use spinio_host::sync::{
    A_WHILE, AtomicU64, Backoff, Condvar, Mutex, MutexGuard, cpu_index, lock, wait_a_while, wait_at_most,
};

/// Bytes of a buffer.
///
/// Copies of less leave the copy engine half idle when several threads issue them: on an H200, 16 threads reach
/// 26 GB/s with 512 KiB, 42 with 1 MiB and 47 with 2 MiB.
pub const BUFFER_SIZE: usize = if cfg!(loom) { 4096 } else { 2 << 20 };

/// Bytes of every slab but the first, which is one buffer so that a first read is quick.
const SLAB_SIZE: usize = 2 * BUFFER_SIZE;

const CPU_SLOTS: usize = if cfg!(loom) { 1 } else { 16 };

/// How long after the driver has refused memory it is asked again: that takes milliseconds. Longer than any test runs:
/// these move the time of the refusal.
const ASK_AGAIN: Duration = if cfg!(test) { Duration::from_secs(3600) } else { Duration::from_secs(1) };

/// Retired buffers in use that are skipped before the pool grows.
const SCAN_LIMIT: usize = 4;

/// A buffer of the pool, with one owner.
#[derive(Debug)]
pub struct BounceBuffer {
    ptr: *mut u8,
    /// Whether the device copies from it at full speed.
    pub pinned: bool,
}

/// Which buffer a thread gets that does not wait for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// A new one if there is none, while the pool is within its limit.
    WithinLimit,
    /// A new one if there is none, up to twice the limit: for requests that wait for a stream of the program.
    UpToTwiceLimit,
    /// A new one if there is none, whatever the limit: for a request without which a stream of the program stops.
    OverLimit,
}

// SAFETY: plain memory with one owner at a time.
unsafe impl Send for BounceBuffer {}

impl BounceBuffer {
    /// Start of its [`BUFFER_SIZE`] bytes, page-aligned.
    pub fn ptr(&self) -> *mut u8 {
        self.ptr
    }
}

#[derive(Default)]
struct PoolState {
    free: Vec<BounceBuffer>,
    retired: VecDeque<(BounceBuffer, FenceGuard)>,
    total: u64,
    /// Bytes that threads are adding to it just now.
    growing: u64,
    /// When the driver last refused pinned memory to an empty pool, or to one of ordinary memory.
    pinning_refused: Option<Instant>,
    /// When growing last failed: for a while the pool does not grow.
    growth_failed: Option<Instant>,
    slabs: Vec<PinnedBuffer>,
    /// Counts changes that a thread waiting for a buffer must see.
    change_seq: u64,
}

impl PoolState {
    /// Its size once all growing threads are done.
    fn planned(&self) -> u64 {
        self.total + self.growing
    }

    fn may_grow(&self) -> bool {
        !is_recent(self.growth_failed)
    }
}

fn is_recent(refused: Option<Instant>) -> bool {
    refused.is_some_and(|refused| refused.elapsed() < ASK_AGAIN)
}

/// One buffer of ordinary memory, for a driver that refuses pinned memory.
fn pageable_buffer() -> Result<PinnedBuffer, DeviceError> {
    match linux::map_anonymous(BUFFER_SIZE, linux::PAGE) {
        Ok(ptr) => Ok(PinnedBuffer { ptr, len: BUFFER_SIZE }),
        Err(_) => Err(DeviceError::new(ErrorKind::NoMemory, "bounce buffer")),
    }
}

/// The buffer of a slot while it is being filled or its last readers finish.
struct OpenBuffer {
    buffer: BounceBuffer,
    stream: StreamId,
    /// The thread that the stream ID refers to: [`stream_owner`].
    owner_tid: u32,
    used: usize,
    readers: u32,
    /// After the last copy, on a stream of the program: the stream may be destroyed when the buffer is full.
    last_copy: Option<FenceGuard>,
    /// The device may read it at any time.
    copy_unresolved: bool,
}

#[derive(Default)]
struct CpuSlot {
    current: Option<OpenBuffer>,
    draining: Vec<OpenBuffer>,
}

/// Part of a slot's buffer, for one small read. Must be released with [`BouncePool::release_slice`].
#[must_use]
pub struct BufferSlice {
    cpu_slot: usize,
    buffer: *mut u8,
    /// The destination of the bytes.
    pub ptr: *mut u8,
    /// Whether the memory is pinned.
    pub pinned: bool,
}

/// The thread that a stream ID refers to; 0 if it means the same stream on all threads.
pub fn stream_owner(stream: StreamId) -> u32 {
    if stream == StreamId::PER_THREAD { linux::gettid() } else { 0 }
}

/// One buffer of the share of a file system, which a thread fills. Released when dropped: once the buffer is filled.
#[must_use]
pub struct ShareGuard<'a> {
    pool: &'a BouncePool,
    key: ShareKey,
}

impl Drop for ShareGuard<'_> {
    fn drop(&mut self) {
        self.pool.end_lending(self.key, 1);
    }
}

/// What [`BouncePool::try_share`] had seen when it refused.
#[derive(Clone, Copy, Debug)]
pub struct Refusal {
    change_seq: u64,
}

/// Buffers that are being filled, by file system.
#[derive(Default)]
struct Lent {
    shares: Shares,
    /// Threads that wait until one more may be lent.
    waiting: usize,
    /// Counts changes that a thread waiting for a share must see.
    change_seq: u64,
}

/// The pool of one device.
pub struct BouncePool {
    device: &'static dyn Device,
    limit: u64,
    state: Mutex<PoolState>,
    /// Threads that sleep until a buffer is released, or are about to; and their wake-up word.
    waiting: AtomicU64,
    freed: Condvar,
    cpu_slots: [Mutex<CpuSlot>; CPU_SLOTS],
    lent: Mutex<Lent>,
    lent_back: Condvar,
    /// Taken by a thread that acquires many buffers.
    bulk_lock: Mutex<()>,
    /// Copies that the threads of long requests have queued, for these threads to count.
    pub queued_copies: AtomicUsize,
}

impl BouncePool {
    /// A pool without a buffer yet, which may grow to `limit` bytes.
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
            queued_copies: AtomicUsize::new(0),
        }
    }

    /// The device that copies from it.
    pub fn device(&self) -> &'static dyn Device {
        self.device
    }

    /// Its current size in bytes.
    pub fn total_bytes(&self) -> u64 {
        lock(&self.state).total
    }

    /// A buffer. Waits for the oldest copy when the pool is at its limit; not for threads that have buffers already.
    pub fn acquire(&self) -> Result<BounceBuffer, DeviceError> {
        loop {
            if let Some(buffer) = self.try_acquire(Policy::WithinLimit)? {
                return Ok(buffer);
            }
            self.wait_for_release();
        }
    }

    /// `count` buffers, or fewer if none is released for `timeout`: for a thread that keeps buffers while it acquires
    /// others, and can use other memory.
    pub fn acquire_many(&self, count: usize, timeout: Duration) -> Vec<BounceBuffer> {
        // One thread at a time: two that each have half of the pool would both get too few.
        let _bulk = lock(&self.bulk_lock);
        let mut acquired = Vec::with_capacity(count);
        let mut progress = Instant::now();
        while acquired.len() < count {
            match self.try_acquire(Policy::WithinLimit) {
                Ok(Some(buffer)) => {
                    acquired.push(buffer);
                    progress = Instant::now();
                }
                Ok(None) if progress.elapsed() < timeout => {
                    self.wait_for_release_at_most(timeout.saturating_sub(progress.elapsed()));
                }
                _ => break,
            }
        }
        acquired
    }

    /// Whether one more buffer may be lent to threads that fill it from the storage with this key, which may never
    /// answer; counted until [`BouncePool::end_lending`]. `wait`: waits until it may, which is only for requests that
    /// have lent none.
    pub fn begin_lending(&self, key: ShareKey, wait: bool) -> bool {
        let mut lent = lock(&self.lent);
        while lent.shares.available(key, self.max_buffers()) == 0 {
            if !wait {
                return false;
            }
            lent.waiting += 1;
            lent = wait_a_while(&self.lent_back, lent);
            lent.waiting -= 1;
        }
        lent.shares.add(key, 1);
        true
    }

    /// Whether a request could lend a buffer now.
    pub fn can_lend(&self, key: ShareKey) -> bool {
        lock(&self.lent).shares.available(key, self.max_buffers()) > 0
    }

    /// As [`BouncePool::begin_lending`], for a thread that fills one buffer itself and has none that others wait for.
    pub fn share(&self, key: ShareKey) -> ShareGuard<'_> {
        self.begin_lending(key, true);
        ShareGuard { pool: self, key }
    }

    /// The same without waiting.
    pub fn try_share(&self, key: ShareKey) -> Result<ShareGuard<'_>, Refusal> {
        let mut lent = lock(&self.lent);
        if lent.shares.available(key, self.max_buffers()) == 0 {
            return Err(Refusal { change_seq: lent.change_seq });
        }
        lent.shares.add(key, 1);
        Ok(ShareGuard { pool: self, key })
    }

    /// A guard of one buffer that [`BouncePool::begin_lending`] has counted.
    pub fn lent_share(&self, key: ShareKey) -> ShareGuard<'_> {
        ShareGuard { pool: self, key }
    }

    /// Waits until a buffer of any share is filled, or [`BouncePool::wake_share_waiters`] is called, after the refusal; false
    /// if neither happens up to a limit.
    pub fn wait_for_share(&self, refusal: Refusal) -> bool {
        let mut lent = lock(&self.lent);
        if lent.change_seq == refusal.change_seq {
            lent.waiting += 1;
            lent = wait_a_while(&self.lent_back, lent);
            lent.waiting -= 1;
        }
        lent.change_seq != refusal.change_seq
    }

    /// Ends the waits for a share: the thread that waits has something else to do, which may free one.
    pub fn wake_share_waiters(&self) {
        self.notify_share_waiters(&mut lock(&self.lent));
    }

    fn notify_share_waiters(&self, lent: &mut Lent) {
        lent.change_seq += 1;
        // A system call, also if no thread waits.
        if lent.waiting > 0 {
            self.lent_back.notify_all();
        }
    }

    fn max_buffers(&self) -> usize {
        (self.limit / BUFFER_SIZE as u64) as usize
    }

    /// `count` buffers are no longer lent.
    pub fn end_lending(&self, key: ShareKey, count: usize) {
        let mut lent = lock(&self.lent);
        lent.shares.remove(key, count);
        self.notify_share_waiters(&mut lent);
    }

    /// Buffers that could be acquired now without waiting, if no other thread acquired any.
    pub fn available(&self) -> usize {
        let mut state = lock(&self.state);
        self.reclaim(&mut state, usize::MAX);
        let growth = if state.may_grow() { self.limit.saturating_sub(state.planned()) } else { 0 };
        state.free.len() + (growth / BUFFER_SIZE as u64) as usize
    }

    /// A buffer without waiting, if the policy allows one. Checks only the oldest copies, and leaves small reads the
    /// buffers that they keep open: see [`BouncePool::reclaim_unused`].
    pub fn try_acquire(&self, policy: Policy) -> Result<Option<BounceBuffer>, DeviceError> {
        let mut state = lock(&self.state);
        // The oldest is usually done first, but one stream may stall while others continue.
        let in_use = if state.free.is_empty() { SCAN_LIMIT } else { 1 };
        self.reclaim(&mut state, in_use);
        if let Some(buffer) = state.free.pop() {
            return Ok(Some(buffer));
        }
        if state.planned() < self.limit && state.may_grow() {
            let grown;
            (state, grown) = self.grow(state);
            match grown {
                Ok(buffer) => return Ok(Some(buffer)),
                Err(error) if state.total == 0 || error.kind == ErrorKind::ContextLost => return Err(error),
                Err(_) => state.growth_failed = Some(Instant::now()),
            }
        }
        match policy {
            Policy::OverLimit => self.grow(state).1.map(Some),
            Policy::UpToTwiceLimit if state.planned() < 2 * self.limit => self.grow(state).1.map(Some),
            _ => Ok(None),
        }
    }

    /// Waits until a buffer becomes free, whichever copy is done first; up to a limit, and may return without one.
    pub fn wait_for_release(&self) {
        self.wait_for_release_at_most(A_WHILE);
    }

    fn wait_for_release_at_most(&self, limit: Duration) {
        let backoff = Backoff::new();
        loop {
            let mut state = lock(&self.state);
            self.reclaim(&mut state, usize::MAX);
            if !state.free.is_empty() {
                return;
            }
            if state.retired.is_empty() {
                // Every buffer is being filled by another thread, or is open in a slot.
                return self.sleep(state, limit);
            }
            drop(state);
            if !backoff.wait() {
                return;
            }
        }
    }

    /// Sleeps until something has changed. A thread that changes something before this one sleeps finds it counted: it
    /// is counted before the slots are checked, and `change_seq` is read before that.
    fn sleep<'a>(&'a self, pool: MutexGuard<'a, PoolState>, limit: Duration) {
        let change_seq = pool.change_seq;
        self.waiting.fetch_add(1, SeqCst);
        drop(pool);
        if !self.retire_idle_slots() {
            let pool = lock(&self.state);
            if pool.change_seq == change_seq && pool.free.is_empty() && pool.retired.is_empty() {
                drop(wait_at_most(&self.freed, pool, limit));
            }
        }
        self.waiting.fetch_sub(1, SeqCst);
    }

    /// Wakes threads that wait. Needs the lock of the pool, so that none falls asleep meanwhile.
    fn notify_waiters(&self, state: &mut PoolState) {
        state.change_seq += 1;
        if self.waiting.load(SeqCst) > 0 {
            self.freed.notify_all();
        }
    }

    /// Frees the retired buffers that the device no longer reads, the oldest first; ends at the `in_use`-th that it does.
    fn reclaim(&self, state: &mut PoolState, in_use: usize) {
        let (mut at, mut left) = (0, in_use);
        while at < state.retired.len() && left > 0 {
            if state.retired[at].1.is_done() {
                let done = state.retired.remove(at);
                state.free.extend(done.map(|(buffer, _)| buffer));
            } else {
                (at, left) = (at + 1, left - 1);
            }
        }
    }

    /// For threads that try again and again and do other work in between, with nothing to do now: frees a buffer as a
    /// thread that waits does, if there is one that small reads keep open or whose copy is done.
    pub fn reclaim_unused(&self) {
        self.retire_idle_slots();
        let mut state = lock(&self.state);
        let before = state.free.len();
        self.reclaim(&mut state, usize::MAX);
        if state.free.len() > before {
            self.notify_waiters(&mut state);
        }
    }

    /// Retires the open buffers of slots without a reader; whether there was one.
    fn retire_idle_slots(&self) -> bool {
        let mut closed = false;
        for slot in &self.cpu_slots {
            // A locked slot is in use, or its owner is the thread that waits.
            let Ok(mut slot) = slot.try_lock() else { continue };
            if slot.current.as_ref().is_some_and(|o| o.readers == 0)
                && let Some(open) = slot.current.take()
            {
                self.close_open(open);
                closed = true;
            }
        }
        closed
    }

    /// New buffers: one at first, then a slab at a time. Without the lock meanwhile: it takes milliseconds, and the threads
    /// of a long read do it side by side.
    fn grow<'a>(
        &'a self,
        mut state: MutexGuard<'a, PoolState>,
    ) -> (MutexGuard<'a, PoolState>, Result<BounceBuffer, DeviceError>) {
        let available = self.limit.saturating_sub(state.planned()) as usize;
        let pin = !is_recent(state.pinning_refused);
        let len = if pin && state.planned() > 0 { SLAB_SIZE.min(available).max(BUFFER_SIZE) } else { BUFFER_SIZE };
        state.growing += len as u64;
        drop(state);
        let slab = match pin {
            // A smaller slab may still work.
            true => self.device.alloc_pinned(len).or_else(|error| match error.kind {
                ErrorKind::ContextLost => Err(error),
                _ if len > BUFFER_SIZE => self.device.alloc_pinned(BUFFER_SIZE),
                _ => Err(error),
            }),
            false => pageable_buffer(),
        };
        let mut state = lock(&self.state);
        state.growing -= len as u64;
        let grown = match slab {
            Ok(slab) => {
                state.growth_failed = None;
                if pin {
                    state.pinning_refused = None;
                    state.slabs.push(slab);
                }
                Ok(self.split_slab(&mut state, slab.ptr, slab.len, pin))
            }
            // The existing buffers may be enough.
            Err(error) if !pin || error.kind == ErrorKind::ContextLost => Err(error),
            Err(error) if state.total > 0 && state.pinning_refused.is_none() => Err(error),
            Err(_) => {
                state.pinning_refused = Some(Instant::now());
                pageable_buffer().map(|buffer| self.split_slab(&mut state, buffer.ptr, buffer.len, false))
            }
        };
        self.notify_waiters(&mut state);
        (state, grown)
    }

    fn split_slab(&self, pool: &mut PoolState, ptr: *mut u8, len: usize, pinned: bool) -> BounceBuffer {
        pool.total += len as u64;
        for at in (BUFFER_SIZE..=len - BUFFER_SIZE).step_by(BUFFER_SIZE) {
            pool.free.push(BounceBuffer { ptr: ptr.wrapping_add(at), pinned });
        }
        BounceBuffer { ptr, pinned }
    }

    /// Releases a buffer from which no copy was queued.
    pub fn release(&self, buffer: BounceBuffer) {
        let mut state = lock(&self.state);
        state.free.push(buffer);
        self.notify_waiters(&mut state);
    }

    /// A buffer that storage or the device may still use at any time: it is never used again, and the pool may grow by
    /// another one instead.
    pub fn quarantine(&self, _buffer: BounceBuffer) {
        let mut state = lock(&self.state);
        state.total -= BUFFER_SIZE as u64;
        // It may have been the last one.
        state.growth_failed = None;
        self.notify_waiters(&mut state);
    }

    /// Releases a buffer after copies from it were queued; it is used again when they are done.
    pub fn release_after(&self, buffer: BounceBuffer, stream: StreamId) {
        match FenceGuard::new(self.device, stream) {
            Ok(fence) => self.retire_after(buffer, fence),
            Err(_) => {
                // No fence left, or the stream was destroyed: a buffer that may still be read is never used again.
                match self.device.synchronize(stream, WaitMode::Context) {
                    Ok(()) => self.release(buffer),
                    Err(_) => self.quarantine(buffer),
                }
            }
        }
    }

    /// Memory for a read of up to `len` bytes (at most a quarter of a buffer) that will be copied on `stream`.
    pub fn acquire_slice(&self, len: usize, stream: StreamId) -> Result<BufferSlice, DeviceError> {
        debug_assert!(len <= BUFFER_SIZE / 4);
        // O_DIRECT descriptors need aligned memory; reads below a page cannot be theirs.
        let align = if len >= linux::PAGE { linux::PAGE } else { 512 };
        let (index, owner) = (cpu_index(CPU_SLOTS), stream_owner(stream));
        let mut fresh = None;
        loop {
            let mut slot = lock(&self.cpu_slots[index]);
            if let Some(open) = slot.current.as_mut().filter(|o| (o.stream, o.owner_tid) == (stream, owner)) {
                let at = open.used.next_multiple_of(align);
                if at + len <= BUFFER_SIZE {
                    open.used = at + len.next_multiple_of(512);
                    open.readers += 1;
                    let ptr = open.buffer.ptr.wrapping_add(at);
                    let slice =
                        BufferSlice { cpu_slot: index, buffer: open.buffer.ptr, ptr, pinned: open.buffer.pinned };
                    drop(slot);
                    if let Some(spare) = fresh {
                        self.release(spare);
                    }
                    return Ok(slice);
                }
            }
            // The full one is retired first: it may be the last buffer of the pool.
            let full = slot.current.take();
            if let Some(buffer) = fresh.take() {
                slot.current = Some(OpenBuffer {
                    buffer,
                    stream,
                    owner_tid: owner,
                    used: 0,
                    readers: 0,
                    last_copy: None,
                    copy_unresolved: false,
                });
            }
            let full = match full {
                Some(open) if open.readers > 0 => {
                    slot.draining.push(open);
                    None
                }
                other => other,
            };
            let wanted = slot.current.is_none();
            // Not with the slot locked: threads that could free a buffer may need it.
            drop(slot);
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
        let mut slot = lock(&self.cpu_slots[slice.cpu_slot]);
        let CpuSlot { current: open, draining: closing } = &mut *slot;
        let Some(used) = open.iter_mut().chain(closing.iter_mut()).find(|o| o.buffer.ptr == slice.buffer) else {
            return;
        };
        used.readers -= 1;
        if used.stream != StreamId(0) {
            used.last_copy = FenceGuard::new(self.device, used.stream).ok();
            // No fence left: an older one says nothing about this copy, and only this thread knows the stream.
            if used.last_copy.is_none() {
                used.copy_unresolved |= self.device.synchronize(used.stream, WaitMode::Context).is_err();
            }
        }
        if let Some(at) = closing.iter().position(|o| o.readers == 0) {
            let done = closing.swap_remove(at);
            drop(slot);
            return self.close_open(done);
        }
        let idle = open.as_ref().is_some_and(|o| o.readers == 0);
        drop(slot);
        // A thread that waits may close an idle slot.
        if idle && self.waiting.load(SeqCst) > 0 {
            self.notify_waiters(&mut lock(&self.state));
        }
    }

    /// Retires the buffer of a slot.
    fn close_open(&self, open: OpenBuffer) {
        match open.last_copy {
            _ if open.copy_unresolved => self.quarantine(open.buffer),
            Some(fence) => self.retire_after(open.buffer, fence),
            None => self.release_after(open.buffer, open.stream),
        }
    }

    fn retire_after(&self, buffer: BounceBuffer, fence: FenceGuard) {
        let mut pool = lock(&self.state);
        pool.retired.push_back((buffer, fence));
        self.notify_waiters(&mut pool);
    }
}

/// A pool is dropped with its runtime, which only tests and tools drop.
impl Drop for BouncePool {
    fn drop(&mut self) {
        let slots: Vec<CpuSlot> = self.cpu_slots.iter().map(|slot| core::mem::take(&mut *lock(slot))).collect();
        for open in slots.into_iter().flat_map(|slot| slot.current.into_iter().chain(slot.draining)) {
            self.close_open(open);
        }
        let mut pool = lock(&self.state);
        for (_, fence) in core::mem::take(&mut pool.retired) {
            let _ = fence.wait(WaitMode::Context);
        }
        for slab in pool.slabs.drain(..) {
            self.device.free_pinned(slab);
        }
    }
}
