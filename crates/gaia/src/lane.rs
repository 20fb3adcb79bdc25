//! The lane of a device: the thread, the stream and the pinned memory of calls in stream order.
//!
//! While such a call runs, a stream of the program is stopped ([`spinio_device::StreamStop`]), so what the call does on
//! the device must not depend on anything that could wait for that stream. All is made before the first stop, and has
//! run once: a stream of its own, pinned memory, and the kernels that copy and scan. Files are read through host memory, not
//! by SPIN's routes, which use other streams and register memory.
//!
//! ```text
//!   streams of the program ── reached ──> jobs ──> thread ── window or file ── pinned memory ── lane's stream ── replica
//!                                                    │
//!                                          watch: a device call that takes too long ends the stop
//! ```
//!
//! A job waits for no stream but the lane's, and for no lock whose owner waits for a stream: [`crate::stream_order`].
//!
//! Known flaws: calls on all maps of a device run one after another. An acquire in stream order copies the file's pages
//! twice more than one that waits.

#![expect(unsafe_code, reason = "copies between the device and pinned memory")]

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use spinio_device::{
    DeviceAddr, DeviceError, Fingerprint, GatherEntry, KernelCopy, PAGE_BYTES, PinnedBuffer, ReplicaMemory, StreamId,
    StreamStop, WaitMode, set_thread_stream,
};
use spinio_host::lock;
use spinio_pagecache::messages::Run;
use spinio_sys::Errno;
use spinio_sys::linux::spawn_signals_blocked;

use crate::{Error, Result};

/// Pinned memory for copies.
const BUFFER: usize = 2 << 20;
/// The list of the kernel that copies, after the buffer.
const LIST: usize = (BUFFER / KernelCopy::PIECE * size_of::<GatherEntry>()).next_multiple_of(PAGE_BYTES);
const STACK: usize = 512 << 10;
/// A copy of a [`BUFFER`] or a scan takes milliseconds; if it takes this long, it waits for the stopped stream.
const LIMIT: Duration = Duration::from_secs(60);
/// Stops of a device at a time. Streams share channels of a GPU, and a stopped one blocks those after it in its channel.
/// On an H200 with 24 streams up to 8 stops at a time did not keep the lane's stream from running, 32 did, unless
/// CUDA_DEVICE_MAX_CONNECTIONS was 32 instead of 8 (tests/gpu/maps.c).
const MOST: usize = 4;
/// Between looks whether the device still works.
const LOOK: Duration = Duration::from_millis(100);

static LANES: Mutex<Vec<&'static Lane>> = Mutex::new(Vec::new());

thread_local! {
    /// On the lane's thread.
    static CURRENT: Cell<Option<&'static Lane>> = const { Cell::new(None) };
}

type Job = Box<dyn FnOnce() + Send>;

/// It lives as long as the process.
pub(crate) struct Lane {
    device: &'static dyn ReplicaMemory,
    stream: StreamId,
    buffer: PinnedBuffer,
    jobs: mpsc::Sender<Job>,
    gate: Mutex<Gate>,
    changed: Condvar,
    watch: &'static Watch,
}

/// Stops, and those who map or free memory: to free it, a driver may wait for all work.
#[derive(Default)]
struct Gate {
    pending: usize,
    freeing: usize,
}

/// A stop that is enqueued or runs.
pub(crate) struct Pending(&'static Lane);

impl Drop for Pending {
    fn drop(&mut self) {
        lock(&self.0.gate).pending -= 1;
        self.0.changed.notify_all();
    }
}

impl Lane {
    /// The lane of a device. Made now, if this is the first call in stream order.
    pub(crate) fn of(device: &'static dyn ReplicaMemory) -> Result<&'static Lane> {
        let mut lanes = lock(&LANES);
        if let Some(lane) = lanes.iter().find(|lane| core::ptr::addr_eq(lane.device, device)) {
            return Ok(lane);
        }
        let lane = Lane::start(device)?;
        lanes.push(lane);
        Ok(lane)
    }

    /// The lane whose thread this is.
    pub(crate) fn current() -> Option<&'static Lane> {
        CURRENT.get()
    }

    fn start(device: &'static dyn ReplicaMemory) -> Result<&'static Lane> {
        let failed = |e| Error::device(e, "prepare calls in stream order");
        let stream = device.acquire_stream_beside_stops().map_err(failed)?;
        // A program may try again and again while the device is full.
        let give_back = |e| {
            device.release_stream(stream);
            failed(e)
        };
        // Not freed later: that would wait for all work of the device.
        let page = device.alloc_replica(PAGE_BYTES as u64).map_err(give_back)?;
        let buffer = device.alloc_pinned(BUFFER + LIST).map_err(|e| {
            let _ = device.free_replica(page);
            give_back(e)
        })?;
        // SAFETY: the buffer and the page are the lane's, and stay.
        unsafe {
            let copy = |into_device| copy_of(&buffer, into_device, page, PAGE_BYTES);
            device
                .copy_beside_stops(stream, copy(true))
                .and_then(|()| device.fingerprint_pages_beside_stops(stream, page, 1, buffer.ptr.cast()))
                .and_then(|()| device.copy_beside_stops(stream, copy(false)))
        }
        .map_err(failed)?;
        let no_thread = |_| Error::of(Errno::AGAIN, "start a thread");
        let (jobs, queue) = mpsc::channel::<Job>();
        let watch: &Watch = Box::leak(Box::new(Watch::new(LIMIT)));
        spawn_signals_blocked("spinio-gaia-lim", STACK, || watch.run()).map_err(no_thread)?;
        let (gate, changed) = (Mutex::default(), Condvar::new());
        let lane: &Lane = Box::leak(Box::new(Lane { device, stream, buffer, jobs, gate, changed, watch }));
        let body = move || {
            CURRENT.set(Some(lane));
            set_thread_stream(stream);
            // The buffer is in use until then. The caller does not wait: a kernel of the program may occupy the device.
            let _ = lane.wait();
            queue.into_iter().for_each(|job| job());
        };
        spawn_signals_blocked("spinio-gaia-ord", STACK, body).map_err(no_thread)?;
        Ok(lane)
    }

    /// Announces a stop, after those who free memory, and when there are not too many.
    pub(crate) fn announce(&'static self) -> Pending {
        let mut gate = self.wait_while(lock(&self.gate), |gate| gate.freeing > 0 || gate.pending >= MOST);
        gate.pending += 1;
        Pending(self)
    }

    /// Waits, but not for stops of a device that runs no work any more: they never come.
    fn wait_while<'a>(&self, mut gate: MutexGuard<'a, Gate>, must: impl Fn(&Gate) -> bool) -> MutexGuard<'a, Gate> {
        while must(&gate) {
            let waited = self.changed.wait_timeout(gate, LOOK).unwrap_or_else(PoisonError::into_inner);
            gate = waited.0;
            if waited.1.timed_out() && self.device.is_lost() {
                break;
            }
        }
        gate
    }

    /// Runs work that was counted, so that no stop begins.
    fn free<T>(&self, work: impl FnOnce() -> T) -> T {
        let done = work();
        lock(&self.gate).freeing -= 1;
        self.changed.notify_all();
        done
    }

    /// For a thread that must not wait: runs a job on the lane's thread.
    pub(crate) fn send(&self, job: Job) {
        let _ = self.jobs.send(job);
    }

    /// The stream of its copies.
    pub(crate) fn stream(&self) -> StreamId {
        self.stream
    }

    /// Runs `work`, which uses the device, on the lane's thread while a stream is stopped. Ends the stop.
    pub(crate) fn beside<T>(&self, stop: StreamStop, work: impl FnOnce() -> T) -> T {
        self.watch.begin(stop);
        let done = work();
        self.watch.end();
        done
    }

    /// Makes a call that waits for the lane's stream.
    fn watched<T>(&self, call: impl FnOnce() -> core::result::Result<T, DeviceError>) -> Result<T> {
        let late = || {
            let sentence = "The device ran no copies while the stream waited for them, and the stream went on without \
                            (did the program free or register memory meanwhile?)";
            Error::new(Errno::DEADLK, sentence)
        };
        if !self.watch.arm() {
            return Err(late());
        }
        let done = call();
        if !self.watch.disarm() {
            return Err(late());
        }
        done.map_err(|e| Error::device(e, "copy pages of a map"))
    }

    fn wait(&self) -> core::result::Result<(), DeviceError> {
        self.device.synchronize(self.stream, WaitMode::Context)
    }

    /// Copies into the device, and waits.
    ///
    /// # Safety
    /// `from` must be readable for `len` bytes, and `to` allocated.
    pub(crate) unsafe fn copy_in(&self, to: DeviceAddr, from: *const u8, len: usize) -> Result<()> {
        for done in (0..len).step_by(BUFFER) {
            let part = (len - done).min(BUFFER);
            // SAFETY: readable by the contract; the buffer is this thread's, and no copy uses it.
            unsafe { copy_shared(self.buffer.ptr, from.add(done), part) };
            self.watched(|| {
                // SAFETY: waited for here; the rest is the caller's.
                unsafe {
                    self.device
                        .copy_beside_stops(self.stream, copy_of(&self.buffer, true, to.offset(done as u64), part))
                }?;
                self.wait()
            })?;
        }
        Ok(())
    }

    /// Copies out of the device, and waits.
    ///
    /// # Safety
    /// `to` must be writable for `len` bytes, and `from` allocated.
    pub(crate) unsafe fn copy_out(&self, to: *mut u8, from: DeviceAddr, len: usize) -> Result<()> {
        for done in (0..len).step_by(BUFFER) {
            let part = (len - done).min(BUFFER);
            self.watched(|| {
                // SAFETY: waited for here; the rest is the caller's.
                unsafe {
                    self.device
                        .copy_beside_stops(self.stream, copy_of(&self.buffer, false, from.offset(done as u64), part))
                }?;
                self.wait()
            })?;
            // SAFETY: writable by the contract; the copy into the buffer is over.
            unsafe { copy_shared(to.add(done), self.buffer.ptr, part) };
        }
        Ok(())
    }

    /// Appends the fingerprints of a run of pages from `at`.
    pub(crate) fn fingerprints(&self, at: DeviceAddr, run: Run, list: &mut Vec<Fingerprint>) -> Result<()> {
        const MOST: usize = BUFFER / size_of::<Fingerprint>();
        let count = run.count as usize;
        let out = self.buffer.ptr.cast::<Fingerprint>();
        for done in (0..count).step_by(MOST) {
            let part = (count - done).min(MOST);
            self.watched(|| {
                let from = at.offset((done * PAGE_BYTES) as u64);
                // SAFETY: the buffer has room for them, and is used by nothing else until they are waited for.
                unsafe { self.device.fingerprint_pages_beside_stops(self.stream, from, part, out) }?;
                self.wait()
            })?;
            // SAFETY: the device has stored them; the buffer is page-aligned.
            list.extend_from_slice(unsafe { core::slice::from_raw_parts(out, part) });
        }
        Ok(())
    }
}

/// A copy of `len` bytes from or to the begin of the buffer.
fn copy_of(buffer: &PinnedBuffer, into_device: bool, device: DeviceAddr, len: usize) -> KernelCopy {
    debug_assert!(len <= BUFFER);
    let list = buffer.ptr.wrapping_add(BUFFER).cast();
    KernelCopy { into_device, device, host: buffer.ptr, len, list }
}

/// Maps or frees memory of a device when no stream of it is stopped; meanwhile no stop begins.
pub(crate) fn between_stops<T>(device: &'static dyn ReplicaMemory, work: impl FnOnce() -> T) -> T {
    let Some(lane) = lane_of(device) else { return work() };
    let mut gate = lock(&lane.gate);
    gate.freeing += 1;
    drop(lane.wait_while(gate, |gate| gate.pending > 0));
    lane.free(work)
}

/// As [`between_stops`], if no stream is stopped now; else nothing is done.
pub(crate) fn unless_stopped<T>(device: &'static dyn ReplicaMemory, work: impl FnOnce() -> T) -> Option<T> {
    let Some(lane) = lane_of(device) else { return Some(work()) };
    let mut gate = lock(&lane.gate);
    if gate.pending > 0 {
        return None;
    }
    gate.freeing += 1;
    drop(gate);
    Some(lane.free(work))
}

fn lane_of(device: &'static dyn ReplicaMemory) -> Option<&'static Lane> {
    lock(&LANES).iter().copied().find(|lane| core::ptr::addr_eq(lane.device, device))
}

/// Copies memory that another process may change meanwhile.
///
/// # Safety
/// Both must be valid for `len` bytes.
unsafe fn copy_shared(to: *mut u8, from: *const u8, len: usize) {
    let words = if to.addr().is_multiple_of(8) && from.addr().is_multiple_of(8) { len / 8 } else { 0 };
    for at in 0..words {
        // SAFETY: inside of both, and aligned.
        unsafe { to.cast::<u64>().add(at).write_volatile(from.cast::<u64>().add(at).read_volatile()) };
    }
    for at in words * 8..len {
        // SAFETY: inside of both.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
    }
}

/// Ends the stop of a job whose call of the device takes too long: the driver may wait for the stopped stream with a
/// lock held that the call needs.
struct Watch {
    limit: Duration,
    state: Mutex<Watched>,
    changed: Condvar,
}

#[derive(Default)]
struct Watched {
    stop: Option<StreamStop>,
    /// When the present call of the device is late.
    deadline: Option<Instant>,
    /// The stop was ended.
    late: bool,
    /// Its thread sleeps without a limit.
    idle: bool,
}

impl Watch {
    fn new(limit: Duration) -> Watch {
        Watch { limit, state: Mutex::default(), changed: Condvar::new() }
    }

    fn begin(&self, stop: StreamStop) {
        let mut state = lock(&self.state);
        (state.stop, state.deadline, state.late) = (Some(stop), None, false);
    }

    fn end(&self) {
        let stop = lock(&self.state).stop.take();
        drop(stop);
    }

    /// A call begins; false if one was late.
    fn arm(&self) -> bool {
        let mut state = lock(&self.state);
        state.deadline = Some(Instant::now() + self.limit);
        if state.idle {
            state.idle = false;
            self.changed.notify_one();
        }
        !state.late
    }

    /// It has ended; false if it was late.
    fn disarm(&self) -> bool {
        let mut state = lock(&self.state);
        state.deadline = None;
        !state.late
    }

    fn run(&self) -> ! {
        let mut state = lock(&self.state);
        loop {
            let Some(deadline) = state.deadline else {
                state.idle = true;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.late = true;
                state.deadline = None;
                let stop = state.stop.take();
                drop(state);
                drop(stop);
                state = lock(&self.state);
            } else {
                // The deadlines of later calls are later: none has to wake this thread.
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use spinio_device::emulated::{Config, Emulated};
    use spinio_device::{Device, StreamId, WaitMode};

    use super::*;

    #[test]
    fn stop_of_a_late_call_is_ended_and_the_next_job_starts_afresh() {
        let device = Emulated::start(Config::parse("size=1M").unwrap()).unwrap();
        const LIMIT: Duration = Duration::from_millis(400);
        let watch: &Watch = Box::leak(Box::new(Watch::new(LIMIT)));
        std::thread::spawn(|| watch.run());
        let (sender, stops) = mpsc::channel();
        let next = || {
            let sender = sender.clone();
            device.stop_stream(StreamId(0), Box::new(move |stop| sender.send(stop).unwrap())).unwrap();
            stops.recv().unwrap()
        };
        // Calls in time, together longer than the limit. If the machine is so busy that one of them is late: again.
        let call = || {
            let begun = Instant::now();
            let is_armed = watch.arm();
            std::thread::sleep(Duration::from_millis(60));
            let in_time = is_armed && watch.disarm();
            assert!(in_time || begun.elapsed() >= LIMIT, "a call in time is ended");
            in_time
        };
        let all_in_time = || {
            watch.begin(next());
            (0..10).all(|_| call()) || {
                watch.end();
                false
            }
        };
        assert!((0..100).any(|_| all_in_time()), "never in time");
        assert!(watch.arm());
        // The call ends because the stream went on.
        device.synchronize(StreamId(0), WaitMode::Block).unwrap();
        assert!(!watch.disarm() && !watch.arm());
        watch.end();
        let is_in_time = || {
            watch.begin(next());
            call() || {
                watch.end();
                false
            }
        };
        assert!((0..100).any(|_| is_in_time()), "never in time");
        std::thread::sleep(Duration::from_millis(500));
        let fence = device.fence(StreamId(0)).unwrap();
        assert_eq!(device.query(&fence), Ok(false), "no call was late");
        let started = Instant::now();
        watch.end();
        device.wait(&fence, WaitMode::Block).unwrap();
        device.release_fence(fence);
        assert!(started.elapsed() < Duration::from_secs(300));
    }
}
