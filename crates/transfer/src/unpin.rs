//! Deferred unpinning: pinned pages whose transfers are done, unregistered later.
//!
//! CUDA unregisters pages only when all work in flight in the context is done, GPU kernels included (seen: 296 ms
//! during a kernel of 300 ms; calls of other threads wait too). So unpinning between two pieces would undo their
//! overlap, and unpinning before a call returns would make the caller wait for it:
//!
//! ```text
//!   request 1   pin ─ DMA ─ return
//!   request 2   pin ─ DMA, and meanwhile unpin 1 ─ return
//!   idle for 2 ms:   a copy worker unpins 2
//! ```
//!
//! A long request unpins nothing meanwhile, since much is pending then and its caller waits for the data, not for the
//! unpinning; but pins that overlap its own range are unpinned before it begins.
//!
//! The driver's lock is not fair: while one thread unpins range after range, work that another one queues waits until
//! nearly all is done (17 ms for 2 GiB; registering does the same, 50 ms). So a copy worker pauses at intervals, and
//! the other thread then waits for a millisecond (seen on an H200: benches/runs/2026-11-22-h200-registering).
//!
//! A program that keeps GPU kernels running during its reads would notice that wait. It is measured, and after the
//! second one that is far longer than the unpinning itself no more pages are pinned in this process: the `copy` route
//! replaces `dma`.
//!
//! No request ever uses a pin of another one: before a range is pinned again, an old pin of it is released, so every
//! request reads the pages that are in the page cache when it begins.
//!
//! A driver refuses to register a range twice. So a range that a thread is unregistering is listed until that is done, and a
//! thread that wants to pin some of it waits.
//!
//! Known flaws: with a GPU kernel that never ends, the first of these waits never ends either, as with `cudaFree`. Such
//! a program sets SPINIO_ROUTES without `dma`. A thread that gets no processor for long enough, on a busy machine, looks
//! the same as one that waits for the device.

#![expect(unsafe_code, reason = "memory that a device copies from or into")]

use std::ops::Range;
use std::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use spinio_device::{Device, Pin};

use spinio_sys::linux;

use spinio_host::lock;
use spinio_host::pool::{IdleTask, Workers};

use crate::mapping::Mapping;

/// The most bytes that may be pinned before a request stops to unpin; at most an eighth of the memory.
const MAX_PENDING: u64 = 16 << 30;

/// How much longer than at 10 GB/s unpinning may take before it counts as waiting for other work.
const STALL_THRESHOLD: Duration = Duration::from_millis(20);

/// Bytes that a copy worker unpins before it pauses, and for how long.
const YIELD_EVERY: u64 = 64 << 20;
const YIELD_TIME: Duration = Duration::from_micros(30);

/// How long no page must have been pinned before a copy worker unpins.
const IDLE_DELAY: Duration = Duration::from_millis(2);

struct PendingUnpin {
    device: &'static dyn Device,
    pin: Pin,
    // Unmapping before the pages are unpinned would leave the driver a dangling range.
    mapping: Arc<Mapping>,
}

// SAFETY: a pin is an address range and a number; any thread may release it.
unsafe impl Send for PendingUnpin {}

impl PendingUnpin {
    fn addresses(&self) -> Range<usize> {
        self.pin.ptr as usize..self.pin.ptr as usize + self.pin.len
    }
}

#[derive(Default)]
struct Pins {
    pending: Vec<PendingUnpin>,
    /// Addresses that threads are unregistering.
    unpinning: Vec<Range<usize>>,
    /// Threads that wait for some of these.
    waiting: usize,
}

/// The pins of all devices that are to be unpinned.
pub struct DeferredUnpin {
    pins: Mutex<Pins>,
    unpinned: Condvar,
    bytes: AtomicU64,
    last_deferred: AtomicU64,
    stall_count: AtomicU64,
    max_pending: u64,
    created: Instant,
    /// Large requests in flight.
    in_flight: AtomicUsize,
    /// A copy worker sleeps only until no page was pinned for long enough.
    reaper_armed: AtomicBool,
    workers: Arc<Workers>,
}

/// A large request in flight: while there is one, idle workers unpin nothing.
pub struct InFlightGuard<'a>(&'a DeferredUnpin);

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

/// Idle work of copy workers: unpin, which calls the driver.
struct UnpinReaper(std::sync::Weak<DeferredUnpin>);

impl IdleTask for UnpinReaper {
    fn sleep_timeout(&self) -> Option<Duration> {
        let pins = self.0.upgrade()?;
        // Cleared before the check: a thread that pins from here on sees that no worker watches, and wakes one.
        pins.reaper_armed.store(false, SeqCst);
        // Not `is_empty`: what another worker is unpinning is no work for this one, and may wait for a GPU kernel.
        let wanted = !lock(&pins.pins).pending.is_empty();
        pins.reaper_armed.store(wanted, SeqCst);
        wanted.then(|| if pins.flush_requested() { Duration::ZERO } else { IDLE_DELAY })
    }

    fn reap_idle(&self) {
        // Unpinning would stop the transfers of a request in flight; the request unpins itself if it must.
        if let Some(pins) = self.0.upgrade()
            && (pins.in_flight() == 0 || pins.flush_requested())
        {
            pins.reap_idle();
        }
    }
}

impl DeferredUnpin {
    /// Empty; idle copy workers will unpin.
    pub fn new(workers: Arc<Workers>) -> Arc<DeferredUnpin> {
        let pins = Arc::new(DeferredUnpin {
            pins: Mutex::default(),
            unpinned: Condvar::new(),
            bytes: AtomicU64::new(0),
            last_deferred: AtomicU64::new(0),
            stall_count: AtomicU64::new(0),
            max_pending: MAX_PENDING.min(linux::total_memory() / 8),
            created: Instant::now(),
            in_flight: AtomicUsize::new(0),
            reaper_armed: AtomicBool::new(false),
            workers,
        });
        pins.workers.set_copy_idle(UnpinReaper(Arc::downgrade(&pins)));
        pins
    }

    /// Counts a large request for as long as the guard lives.
    pub fn begin_request(&self) -> InFlightGuard<'_> {
        self.in_flight.fetch_add(1, Relaxed);
        InFlightGuard(self)
    }

    /// The number of large requests in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Relaxed)
    }

    /// Ensures that pending pins are released soon, although every copy worker may be asleep.
    pub fn watch(&self) {
        if !self.is_empty()
            && !self.reaper_armed.load(SeqCst)
            && let Some(workers) = self.workers.copy()
        {
            workers.wake();
        }
    }

    /// Has copy workers unpin everything at once, and waits for that, but no longer than `limit`. For signal handlers too.
    pub fn drain(&self, limit: Duration) {
        let begun = Instant::now();
        if !self.is_empty()
            && let Some(workers) = self.workers.copy()
        {
            self.flush_soon();
            workers.try_wake(limit);
            while !self.is_empty() && begun.elapsed() < limit {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// Takes a pin whose transfers are done.
    pub fn defer(&self, device: &'static dyn Device, pin: Pin, mapping: Arc<Mapping>) {
        self.bytes.fetch_add(pin.len as u64, Relaxed);
        self.last_deferred.store(self.created.elapsed().as_micros() as u64 + 1, Relaxed);
        lock(&self.pins).pending.push(PendingUnpin { device, pin, mapping });
    }

    /// Whether unpinning has waited for the program's own work, more than once.
    pub fn unpin_stalls(&self) -> bool {
        self.stall_count.load(Relaxed) >= 2
    }

    /// Whether a request in flight must stop and unpin.
    pub fn is_full(&self) -> bool {
        self.bytes.load(Relaxed) > self.max_pending
    }

    /// The most bytes that may be pinned before a request stops to unpin.
    pub fn max_pending(&self) -> u64 {
        self.max_pending
    }

    /// Unpins pins that overlap a range of a mapping, after `before`, and waits for those that other threads are
    /// unpinning; whether there were any.
    pub fn unpin_overlapping(&self, ptr: *const u8, len: usize, before: impl FnOnce()) -> bool {
        let (from, to) = (ptr as usize, ptr as usize + len);
        let overlaps = |range: &Range<usize>| range.start < to && from < range.end;
        let any =
            |pins: &Pins| pins.pending.iter().any(|p| overlaps(&p.addresses())) || pins.unpinning.iter().any(overlaps);
        if self.is_empty() || !any(&lock(&self.pins)) {
            return false;
        }
        before();
        self.unpin_matching(|range| overlaps(range), false);
        let mut pins = lock(&self.pins);
        pins.waiting += 1;
        while pins.unpinning.iter().any(overlaps) {
            pins = self.unpinned.wait(pins).unwrap_or_else(PoisonError::into_inner);
        }
        pins.waiting -= 1;
        true
    }

    /// Unpins everything.
    pub fn unpin_all(&self) {
        self.unpin_matching(|_| true, false);
    }

    /// Whether no pin is pending.
    pub fn is_empty(&self) -> bool {
        self.bytes.load(Acquire) == 0
    }

    /// Bytes that are pinned and wait to be unpinned.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Until the next pin, no worker waits for the idle delay.
    pub fn flush_soon(&self) {
        self.last_deferred.store(0, Relaxed);
    }

    /// Whether a thread waits for the pins to be released.
    pub fn flush_requested(&self) -> bool {
        self.last_deferred.load(Relaxed) == 0
    }

    /// Unpins everything if nothing was pinned for a while.
    fn reap_idle(&self) {
        let now = self.created.elapsed().as_micros() as u64;
        if self.flush_requested()
            || now.saturating_sub(self.last_deferred.load(Relaxed)) >= IDLE_DELAY.as_micros() as u64
        {
            self.unpin_matching(|_| true, !self.flush_requested());
        }
    }

    fn unpin_matching(&self, matches: impl Fn(&Range<usize>) -> bool, yielding: bool) {
        let mut pins = lock(&self.pins);
        let (to_unpin, remaining): (Vec<_>, Vec<_>) = pins.pending.drain(..).partition(|p| matches(&p.addresses()));
        pins.pending = remaining;
        pins.unpinning.extend(to_unpin.iter().map(PendingUnpin::addresses));
        drop(pins);
        if to_unpin.is_empty() {
            return;
        }
        let (begun, mut unpinned, mut next_yield) = (Instant::now(), 0, YIELD_EVERY);
        for p in to_unpin {
            if yielding && unpinned >= next_yield {
                std::thread::sleep(YIELD_TIME);
                next_yield = unpinned + YIELD_EVERY;
            }
            let addresses = p.addresses();
            let PendingUnpin { device, pin, mapping } = p;
            let len = pin.len as u64;
            device.unpin(pin);
            // Before the memory is unmapped: the addresses may be those of another mapping then.
            self.end_unpinning(&addresses);
            drop(mapping);
            // Who waits until nothing is left needs the file unmapped, too.
            self.bytes.fetch_sub(len, Release);
            unpinned += len;
        }
        if begun.elapsed() > STALL_THRESHOLD + Duration::from_nanos(unpinned / 10) {
            self.stall_count.fetch_add(1, Relaxed);
        }
    }

    fn end_unpinning(&self, addresses: &Range<usize>) {
        let mut pins = lock(&self.pins);
        if let Some(at) = pins.unpinning.iter().position(|range| range == addresses) {
            pins.unpinning.swap_remove(at);
        }
        if pins.waiting > 0 {
            self.unpinned.notify_all();
        }
    }
}

impl Drop for DeferredUnpin {
    fn drop(&mut self) {
        self.unpin_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spinio_host::Settings;
    use spinio_host::syscalls::LinuxSyscalls;
    use spinio_testkit::deadline::eventually;

    #[test]
    fn range_that_another_thread_unpins_is_waited_for() {
        let pins = DeferredUnpin::new(Arc::new(Workers::new(&LinuxSyscalls, &Settings::default())));
        // As a thread that is in the driver.
        pins.bytes.fetch_add(4096, Relaxed);
        lock(&pins.pins).unpinning.push(0x10000..0x11000);
        let overlapping = |at: usize| pins.unpin_overlapping(at as *const u8, 4096, || ());
        assert!(!overlapping(0x11000) && !overlapping(0xf000));
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let waited = overlapping(0x10800);
                (waited, ended.load(SeqCst))
            });
            eventually("the thread waits, or has not waited", || waiter.is_finished() || lock(&pins.pins).waiting == 1);
            ended.store(true, SeqCst);
            pins.end_unpinning(&(0x10000..0x11000));
            assert_eq!(waiter.join().unwrap(), (true, true));
        });
        assert!(!overlapping(0x10800), "it is unpinned");
        pins.bytes.fetch_sub(4096, Relaxed);
    }
}
