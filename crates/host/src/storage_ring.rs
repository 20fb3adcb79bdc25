//! Reads of storage in flight, started by any thread without a system call.
//!
//! ```text
//!   reserve ──> ReadTicket ──start(slot, buffer)──> RingRead ──poll──> None, or bytes / errno
//!                  │                                   │
//!               a record, of a fixed number         whichever thread polls stores the results of all
//! ```
//!
//! The ring (sys/src/linux/uring/shared.rs) is in memory that all threads share; a kernel thread makes the reads. Its
//! descriptor and the files in its slots belong to the shadow table, so shadow workers make it, fill its slots and wake
//! its kernel thread; the thread that reads needs none of them while the kernel thread is awake.
//!
//! A record is free, in flight, or done. It leaves "in flight" by a completion only: a read that was begun writes into
//! its buffer until then, whatever becomes of the thread that began it. So a [`RingRead`] that is dropped waits. A caller
//! holds the program's signals (held_signals.rs): a handler that left by `longjmp` would leave a lock locked.
//!
//! No thread sleeps on another: a waiter polls, and naps between two looks.
//!
//! There is one ring for each file system or block device, so that one that does not answer holds the kernel thread and
//! the records of its own ring only.
//!
//! Known flaws:
//! - The naps of a long wait cost up to half a millisecond after the completion.
//! - Before Linux 6.13 a file that was taken out stays open until reads of the ring that began before are over.

#![expect(unsafe_code, reason = "the kernel writes into memory of callers")]

use std::sync::Arc;
use std::sync::TryLockError;
use std::sync::atomic::{
    AtomicBool, AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};
use std::time::Duration;

use spinio_sys::Errno;
use spinio_sys::linux::{Fd, SharedRing};

use crate::ring_slots::RingSlots;
use crate::shadow_fd::{CloseQueue, ShadowFd};
use crate::sync::{AtomicU64, Mutex, lock};
use crate::syscalls::Syscalls;

type Result<T> = core::result::Result<T, Errno>;

/// Reads in flight at most, of all threads together; a power of two.
pub const DEPTH: u32 = 128;

/// Files that can be in the ring at once: twice as many as are remembered (files/src/table.rs).
const SLOTS: u32 = 128;

/// How long the kernel thread polls after the last read.
const IDLE: Duration = Duration::from_millis(2);

/// The submission side and the completion side of a ring, each under a lock of its own.
pub trait ReadQueue: Send + Sync {
    /// Adds a read with this token; false if there is no room.
    ///
    /// # Safety
    /// As [`SharedRing::push`].
    unsafe fn push(&self, slot: u32, buf: *mut u8, len: u32, offset: u64, token: u64) -> bool;

    /// Whether there is one to take; any thread may ask at any time.
    fn has_completion(&self) -> bool;

    /// The next completion.
    ///
    /// # Safety
    /// As [`SharedRing::take_completion`].
    unsafe fn take_completion(&self) -> Option<(u64, Result<usize>)>;
}

impl ReadQueue for SharedRing {
    unsafe fn push(&self, slot: u32, buf: *mut u8, len: u32, offset: u64, token: u64) -> bool {
        // SAFETY: passed on.
        unsafe { SharedRing::push(self, slot, buf, len, offset, token) }
    }

    fn has_completion(&self) -> bool {
        SharedRing::has_completion(self)
    }

    unsafe fn take_completion(&self) -> Option<(u64, Result<usize>)> {
        // SAFETY: passed on.
        unsafe { SharedRing::take_completion(self) }
    }
}

/// A record that is in flight, or free.
const IN_FLIGHT: u64 = u64::MAX;
/// Set in a record whose read failed; the errno is in the low bits.
const FAILED: u64 = 1 << 63;

/// Threads that may poll without a pause: the kernel thread polls as well, and the program computes.
fn spinners(processors: usize) -> usize {
    (processors / 2).saturating_sub(1)
}

/// The records of the reads of one ring.
pub struct ReadTable<Q> {
    queue: Q,
    records: Box<[AtomicU64]>,
    /// Records that are free. Held while a read is pushed.
    free: Mutex<Vec<u16>>,
    /// Held while completions are taken.
    completions: Mutex<()>,
}

impl<Q: ReadQueue> ReadTable<Q> {
    fn new(queue: Q, depth: u16) -> ReadTable<Q> {
        ReadTable {
            queue,
            records: (0..depth).map(|_| AtomicU64::new(IN_FLIGHT)).collect(),
            free: Mutex::new((0..depth).rev().collect()),
            completions: Mutex::new(()),
        }
    }

    fn reserve(&self) -> Option<u16> {
        lock(&self.free).pop()
    }

    fn release(&self, record: u16) {
        lock(&self.free).push(record);
    }

    /// # Safety
    /// `buf` must be memory that the Linux kernel may write until [`ReadTable::result`] has returned a result for this
    /// record, or an address that it may refuse.
    unsafe fn push(&self, record: u16, slot: u32, buf: *mut u8, len: u32, offset: u64) -> bool {
        let _one_at_a_time = lock(&self.free);
        self.records[usize::from(record)].store(IN_FLIGHT, Release);
        // SAFETY: under the lock; the caller promises the rest. As many reads are in flight as there are records.
        unsafe { self.queue.push(slot, buf, len, offset, u64::from(record)) }
    }

    /// What came of the read of a record; stores what came of others.
    fn result(&self, record: u16) -> Option<Result<usize>> {
        let record = &self.records[usize::from(record)];
        // Without the lock, as long as there is nothing to take.
        if record.load(Acquire) == IN_FLIGHT && self.queue.has_completion() {
            // Another thread that is at it stores the result of this record as well.
            let _one_at_a_time = match self.completions.try_lock() {
                Ok(guard) => guard,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return None,
            };
            // SAFETY: under the lock.
            while let Some((token, result)) = unsafe { self.queue.take_completion() } {
                let value = result.map_or_else(|e| FAILED | e.raw_os_error().unsigned_abs() as u64, |n| n as u64);
                if let Some(done) = self.records.get(token as usize) {
                    done.store(value, Release);
                }
            }
        }
        match record.load(Acquire) {
            IN_FLIGHT => None,
            failed if failed & FAILED != 0 => Some(Err(Errno::from_raw_os_error((failed & !FAILED) as i32))),
            bytes => Some(Ok(bytes as usize)),
        }
    }
}

/// A ring of a runtime, and the files in it.
pub struct StorageRing {
    table: ReadTable<SharedRing>,
    slots: RingSlots,
    /// Reads that were started.
    started: std::sync::atomic::AtomicU64,
    /// Threads that poll without a pause, and how many may: more would take the processors from the reads.
    spinning: AtomicUsize,
    spinners: usize,
    /// A worker is on its way to wake the kernel thread.
    waking: AtomicBool,
    /// Closed by a worker, after the memory above is unmapped.
    _fd: ShadowFd,
}

impl StorageRing {
    /// Makes a ring, on a shadow worker, to whose pool the queue belongs.
    pub(crate) fn new(sys: &dyn Syscalls, close_queue: CloseQueue, processors: usize) -> Result<StorageRing> {
        let ring = sys.new_shared_ring(DEPTH, SLOTS, IDLE)?;
        let fd = ShadowFd::new(ring.fd(), close_queue);
        Ok(StorageRing {
            table: ReadTable::new(ring, DEPTH as u16),
            slots: RingSlots::new(SLOTS),
            started: std::sync::atomic::AtomicU64::new(0),
            spinning: AtomicUsize::new(0),
            spinners: spinners(processors),
            waking: AtomicBool::new(false),
            _fd: fd,
        })
    }

    /// Reads that were started so far.
    pub(crate) fn reads(&self) -> u64 {
        self.started.load(Relaxed)
    }

    /// The right to poll without a pause, until it is dropped; `None`: enough threads do, and this one naps.
    pub fn begin_spin(&self) -> Option<SpinGuard<'_>> {
        let others = self.spinning.fetch_add(1, AcqRel);
        let guard = SpinGuard(self);
        (others < self.spinners).then_some(guard)
    }

    /// Puts a file into a slot, on a shadow worker.
    pub fn add_file(&self, fd: Fd) -> Option<u32> {
        self.slots.add(|slot| self.table.queue.set_slot(slot, Some(fd)))
    }

    /// Empties a slot, on a shadow worker. No read of it may begin any more; those in flight keep the file open.
    pub fn remove_file(&self, slot: u32) {
        self.slots.remove(slot, |slot| self.table.queue.set_slot(slot, None));
    }

    /// Whether the kernel thread sleeps: reads begin only once it was woken.
    pub fn is_asleep(&self) -> bool {
        self.table.queue.is_asleep()
    }

    /// Whether the calling thread has to have a worker call [`StorageRing::wake`].
    pub(crate) fn needs_wake(&self) -> bool {
        self.is_asleep() && !self.waking.swap(true, AcqRel)
    }

    /// Wakes the kernel thread, on a shadow worker.
    pub(crate) fn wake(&self) {
        self.waking.store(false, Release);
        let _ = self.table.queue.wake();
    }

    /// Room for one read; `None` while too many are in flight.
    pub fn reserve(self: &Arc<Self>) -> Option<ReadTicket> {
        self.table.reserve().map(|record| ReadTicket { ring: Arc::clone(self), record, is_used: false })
    }
}

/// A thread that polls without a pause.
pub struct SpinGuard<'a>(&'a StorageRing);

impl Drop for SpinGuard<'_> {
    fn drop(&mut self) {
        self.0.spinning.fetch_sub(1, AcqRel);
    }
}

/// Room for one read.
pub struct ReadTicket {
    ring: Arc<StorageRing>,
    record: u16,
    is_used: bool,
}

impl ReadTicket {
    /// Starts a read of the file in a slot.
    ///
    /// # Safety
    /// `buf` must be memory that the Linux kernel may write until the result was taken or the [`RingRead`] dropped, or
    /// an address that it may refuse.
    pub unsafe fn start(mut self, slot: u32, buf: *mut u8, len: u32, offset: u64) -> RingRead {
        // SAFETY: passed on.
        let pushed = unsafe { self.ring.table.push(self.record, slot, buf, len, offset) };
        self.is_used = pushed;
        self.ring.started.fetch_add(u64::from(pushed), Relaxed);
        // A full queue, which the number of records excludes, reads nothing: the caller reads in another way.
        let result = (!pushed).then_some(Err(Errno::AGAIN));
        RingRead { ring: Arc::clone(&self.ring), record: self.record, result }
    }
}

impl Drop for ReadTicket {
    fn drop(&mut self) {
        if !self.is_used {
            self.ring.table.release(self.record);
        }
    }
}

/// A read in flight.
pub struct RingRead {
    ring: Arc<StorageRing>,
    record: u16,
    /// Taken: the record is free.
    result: Option<Result<usize>>,
}

impl RingRead {
    /// Bytes read or the errno; `None` while the read is in flight.
    pub fn poll(&mut self) -> Option<Result<usize>> {
        if self.result.is_none() {
            self.result = self.ring.table.result(self.record);
            if self.result.is_some() {
                self.ring.table.release(self.record);
            }
        }
        self.result
    }
}

impl Drop for RingRead {
    fn drop(&mut self) {
        while self.poll().is_none() {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

#[cfg(all(test, loom))]
mod interleavings {
    use std::collections::VecDeque;
    use std::sync::Arc;

    use loom::cell::UnsafeCell;
    use loom::thread;

    use super::*;

    /// A kernel that answers each read at once, with its offset. The cells find two threads that push, or take, at once.
    #[derive(Default)]
    struct Kernel {
        completed: Mutex<VecDeque<(u64, Result<usize>)>>,
        pushing: UnsafeCell<()>,
        taking: UnsafeCell<()>,
    }

    // SAFETY: loom checks the accesses to the cells.
    unsafe impl Sync for Kernel {}
    // SAFETY: as above.
    unsafe impl Send for Kernel {}

    impl ReadQueue for Kernel {
        unsafe fn push(&self, _slot: u32, _buf: *mut u8, _len: u32, offset: u64, token: u64) -> bool {
            let result = if offset == 0 { Err(Errno::IO) } else { Ok(offset as usize) };
            self.pushing.with_mut(|_| lock(&self.completed).push_back((token, result)));
            true
        }

        fn has_completion(&self) -> bool {
            !lock(&self.completed).is_empty()
        }

        unsafe fn take_completion(&self) -> Option<(u64, Result<usize>)> {
            self.taking.with_mut(|_| lock(&self.completed).pop_front())
        }
    }

    /// A read of one thread: its own result comes back, whichever thread took the completion.
    fn read(table: &ReadTable<Kernel>, offset: u64) {
        let record = loop {
            match table.reserve() {
                Some(record) => break record,
                None => thread::yield_now(),
            }
        };
        // SAFETY: the kernel above writes nothing.
        assert!(unsafe { table.push(record, 0, core::ptr::null_mut(), 1, offset) });
        let result = loop {
            match table.result(record) {
                Some(result) => break result,
                None => thread::yield_now(),
            }
        };
        table.release(record);
        assert_eq!(result, if offset == 0 { Err(Errno::IO) } else { Ok(offset as usize) });
    }

    fn two_readers(depth: u16) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let table = Arc::new(ReadTable::new(Kernel::default(), depth));
            let threads: Vec<_> = [0, 7]
                .map(|offset| {
                    let table = Arc::clone(&table);
                    thread::spawn(move || read(&table, offset))
                })
                .into();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(lock(&table.free).len(), usize::from(depth), "every record is free again");
        });
    }

    #[test]
    fn each_reader_gets_its_own_result() {
        two_readers(2);
    }

    #[test]
    fn record_is_used_again_after_its_result_was_taken() {
        two_readers(1);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::spinners;

    #[test]
    fn polling_leaves_half_of_the_processors_free() {
        assert_eq!([1, 2, 3, 4, 16].map(spinners), [0, 0, 0, 1, 7]);
    }
}
