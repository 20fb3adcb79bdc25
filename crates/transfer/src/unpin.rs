//! DeferredUnpin that have done their work and wait to be given back.
//!
//! CUDA takes pages back only when everything under way in the context is done, kernels
//! included (seen: 296 ms beside a kernel of 300 ms; calls of other threads wait too). So
//! doing it between two pieces would undo their overlap, and doing it before a call
//! returns would make the caller wait for it:
//!
//! ```text
//!   request 1   pin ─ DMA ─ return
//!   request 2   pin ─ DMA, and meanwhile give back 1 ─ return
//!   quiet for 2 ms:  a mate gives back 2
//! ```
//!
//! A long request gives nothing back meanwhile, since much is pending then and its caller waits for
//! the data, not for that; but what overlaps its own range goes before it begins.
//!
//! The driver's lock is not fair: while one thread gives back range after range, what another one queues waits until nearly all
//! is done (17 ms for 2 GiB; registering does the same, 50 ms). So a mate pauses now and then, and then it waits for a
//! millisecond (seen on an H200: benches/runs/2026-11-22-h200-registering).
//!
//! A program that keeps kernels running beside its reads would feel that wait. It is
//! measured, and after the second one that is far longer than the work itself no more
//! pages are pinned in this process: the `copy` route takes over.
//!
//! No request ever uses a pin of another one: before a range is pinned again, an old pin of
//! it is given back, so every request reads the pages that are in the page cache when it begins.
//!
//! Known flaw: beside a kernel that never ends, the first of these waits never ends either,
//! as with `cudaFree`. Such a program sets SPINIO_ROUTES without `dma`.

use std::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use spinio_device::{Device, Pin};

use spinio_sys::linux;

use spinio_host::lock;
use spinio_host::pool::{Tidy, Workers};

use crate::mapping::Mapping;

/// Bytes that may be pinned at all before a request stops to give back; at most an eighth of the memory.
const HARD: u64 = 16 << 30;

/// What giving back may take beyond 10 GB/s before it counts as waiting for somebody else.
const PATIENCE: Duration = Duration::from_millis(20);

/// What a mate gives back before he pauses, and how long.
const BREATH: u64 = 64 << 20;
const PAUSE: Duration = Duration::from_micros(30);

/// How long nothing must have been pinned before a mate gives back.
pub const QUIET: Duration = Duration::from_millis(2);

struct Pending {
    device: &'static dyn Device,
    pin: Pin,
    // Unmapping before the pages are given back would leave the driver a dangling range.
    _mapping: Arc<Mapping>,
}

// SAFETY: a pin is an address range and a number; any thread may give it back.
unsafe impl Send for Pending {}

/// The pins that wait, of all devices.
pub struct DeferredUnpin {
    pending: Mutex<Vec<Pending>>,
    bytes: AtomicU64,
    last: AtomicU64,
    stalls: AtomicU64,
    most: u64,
    born: Instant,
    /// Large requests under way.
    requests: AtomicUsize,
    /// Some copy worker sleeps only until the pins have been quiet for long enough.
    watched: AtomicBool,
    workers: Arc<Workers>,
}

/// A large request under way: while one is, idle workers give nothing back.
pub struct UnderWay<'a>(&'a DeferredUnpin);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Relaxed);
    }
}

/// What idle copy workers do: give pins back, which takes the driver.
struct UnpinReaper(std::sync::Weak<DeferredUnpin>);

impl Tidy for UnpinReaper {
    fn nap(&self) -> Option<Duration> {
        let pins = self.0.upgrade()?;
        // Told before it is looked at: who pins from here on sees that nobody watches, and wakes somebody.
        pins.watched.store(false, SeqCst);
        let wanted = !pins.is_empty();
        pins.watched.store(wanted, SeqCst);
        wanted.then(|| if pins.is_hurried() { Duration::ZERO } else { QUIET })
    }

    fn tidy(&self) {
        // Giving back would stop the transfers of a request under way; it does so itself if it must.
        if let Some(pins) = self.0.upgrade()
            && (pins.requests() == 0 || pins.is_hurried())
        {
            pins.tidy();
        }
    }
}

impl DeferredUnpin {
    /// None yet; idle copy workers will give them back.
    pub fn new(workers: Arc<Workers>) -> Arc<DeferredUnpin> {
        let pins = Arc::new(DeferredUnpin {
            pending: Mutex::default(),
            bytes: AtomicU64::new(0),
            last: AtomicU64::new(0),
            stalls: AtomicU64::new(0),
            most: HARD.min(linux::memory() / 8),
            born: Instant::now(),
            requests: AtomicUsize::new(0),
            watched: AtomicBool::new(false),
            workers,
        });
        pins.workers.set_copy_idle(UnpinReaper(Arc::downgrade(&pins)));
        pins
    }

    /// Counts a large request for as long as the answer lives.
    pub fn begin_request(&self) -> UnderWay<'_> {
        self.requests.fetch_add(1, Relaxed);
        UnderWay(self)
    }

    /// Large requests under way.
    pub fn requests(&self) -> usize {
        self.requests.load(Relaxed)
    }

    /// Sees to it that pins which are left are given back soon, although every copy worker may be asleep.
    pub fn watch(&self) {
        if !self.is_empty()
            && !self.watched.load(SeqCst)
            && let Some(mates) = self.workers.copy()
        {
            mates.nudge();
        }
    }

    /// Has copy workers give everything back at once, and waits for that, but no longer than `limit`.
    pub fn drain(&self, limit: Duration) {
        let begun = Instant::now();
        if !self.is_empty()
            && let Some(mates) = self.workers.copy()
        {
            self.hurry();
            mates.nudge();
            while !self.is_empty() && begun.elapsed() < limit {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// Takes a pin whose transfers are done.
    pub fn retire(&self, device: &'static dyn Device, pin: Pin, mapping: Arc<Mapping>) {
        self.bytes.fetch_add(pin.len as u64, Relaxed);
        self.last.store(self.born.elapsed().as_micros() as u64 + 1, Relaxed);
        lock(&self.pending).push(Pending { device, pin, _mapping: mapping });
    }

    /// Whether giving back was seen to wait for the program's own work, more than once.
    pub fn stalls(&self) -> bool {
        self.stalls.load(Relaxed) >= 2
    }

    /// Whether a request under way must stop and give back.
    pub fn is_full(&self) -> bool {
        self.bytes.load(Relaxed) > self.most
    }

    /// Bytes that may be pinned at all before a request stops to give back.
    pub fn most(&self) -> u64 {
        self.most
    }

    /// Gives back what overlaps a range of a mapping; whether there was anything.
    pub fn give_back_overlap(&self, ptr: *const u8, len: usize) -> bool {
        if self.is_empty() {
            return false;
        }
        let (from, to) = (ptr as usize, ptr as usize + len);
        self.give_back(|p| (p.ptr as usize) < to && from < p.ptr as usize + p.len, false)
    }

    /// Gives everything back.
    pub fn give_back_all(&self) {
        self.give_back(|_| true, false);
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.bytes.load(Relaxed) == 0
    }

    /// Bytes that are pinned and wait to be given back.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// From now until the next pin nobody waits for quiet.
    pub fn hurry(&self) {
        self.last.store(0, Relaxed);
    }

    /// Whether somebody waits for the pins to go.
    pub fn is_hurried(&self) -> bool {
        self.last.load(Relaxed) == 0
    }

    /// Gives everything back if nothing was pinned for a while.
    pub fn tidy(&self) {
        let now = self.born.elapsed().as_micros() as u64;
        if self.is_hurried() || now.saturating_sub(self.last.load(Relaxed)) >= QUIET.as_micros() as u64 {
            self.give_back(|_| true, !self.is_hurried());
        }
    }

    fn give_back(&self, which: impl Fn(&Pin) -> bool, gently: bool) -> bool {
        let mut pending = lock(&self.pending);
        let (go, stay): (Vec<_>, Vec<_>) = pending.drain(..).partition(|p| which(&p.pin));
        *pending = stay;
        drop(pending);
        if go.is_empty() {
            return false;
        }
        let (begun, mut given, mut breath) = (Instant::now(), 0, BREATH);
        for p in go {
            if gently && given >= breath {
                std::thread::sleep(PAUSE);
                breath = given + BREATH;
            }
            given += p.pin.len as u64;
            self.bytes.fetch_sub(p.pin.len as u64, Relaxed);
            p.device.unpin(p.pin);
        }
        if begun.elapsed() > PATIENCE + Duration::from_nanos(given / 10) {
            self.stalls.fetch_add(1, Relaxed);
        }
        true
    }
}

impl Drop for DeferredUnpin {
    fn drop(&mut self) {
        self.give_back_all();
    }
}
