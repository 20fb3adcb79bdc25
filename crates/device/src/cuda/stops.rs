//! Stops of streams: a host function reports that the stream has come there, and the stream waits for a word in host
//! memory.
//!
//! ```text
//!   program's stream   work │ host function │ wait: word >= n │ work
//!                                  │                ^
//!                                  └─> a thread of SPIN: copies and scans on a stream of its own, then stores n
//! ```
//!
//! A host function may not call the driver, and should not wait for anything that does: the driver runs the functions
//! of all streams on one thread, and may hold its locks. So it hands the stop over and returns, and the stream waits for
//! the word (`cuStreamWaitValue32`), which the CPU stores without a call of the driver. Where the driver has no such
//! wait, the host function itself waits: then host functions of other streams are late, but all still ends, because the
//! copies of the stop depend on no host function.
//!
//! **What could hang**: the driver does not know that work of our stream ends a wait of another one.
//! - Streams share channels of the hardware (`CUDA_DEVICE_MAX_CONNECTIONS`, 8), where the first entry blocks those
//!   behind it. Streams of different priorities do not share one, so ours has the highest priority, which programs use
//!   least.
//! - The legacy default stream waits for the program's streams: ours is non-blocking.
//! - To create a stream, to load code (at its first launch, with lazy loading), to register and to free memory may wait
//!   for all work of a device. All that a stop needs is made, and has run once, before the first stop.
//! - Copies of all streams may go through one copy engine, in order, where one that waits for a stopped stream blocks
//!   those after it. So what runs beside stops copies by kernels, from and to pinned memory.
//! - Many stopped streams together may occupy all channels: the caller bounds their number, and stops none where the
//!   program has less than 8 channels: on an H200 with 1 the first stop hung, with 2 four at a time.
//!
//! Known flaw: a program that frees memory (`cudaFree`) while a stream is stopped waits in the driver for that stream;
//! if the driver lets no other thread in meanwhile, both wait for each other. [`crate::StreamStop`] can be dropped by a
//! third thread then, which calls no driver.

#![expect(unsafe_code, reason = "driver calls and device memory")]

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering::Release};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use spinio_sys::cuda::{CuError, stream};
use spinio_sys::linux;

use super::capture::RelaxedCapture;
use super::device::Cuda;
use crate::{DeviceError, ErrorKind, PinnedBuffer, StreamId, StreamStop};

type Result<T> = core::result::Result<T, DeviceError>;
type Reached = Box<dyn FnOnce(StreamStop) + Send>;

/// Stops at the same time: one page of words.
const WORDS: usize = linux::PAGE / size_of::<u32>();

/// Channels of a program that has not set CUDA_DEVICE_MAX_CONNECTIONS.
const CHANNELS: u32 = 8;

/// Whether the program has channels for stopped streams and for ours.
pub(super) fn has_channels() -> bool {
    // The driver reads it once, when it is initialized, as does this.
    static CONNECTIONS: OnceLock<Option<u32>> = OnceLock::new();
    let read = || std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok()?.trim().parse().ok();
    CONNECTIONS.get_or_init(read).is_none_or(|channels| channels >= CHANNELS)
}

/// The words that stopped streams wait for; made at the first stop.
#[derive(Default)]
pub(super) struct Stops {
    words: OnceLock<Option<&'static Words>>,
    making: Mutex<()>,
    /// The stream of the copies, for queries whether work still runs.
    probe: OnceLock<StreamId>,
}

/// They are never unregistered: a stream may read one later than the stop has ended.
struct Words {
    memory: PinnedBuffer,
    /// What the device calls the first one.
    device_ptr: u64,
    /// Not in use, with the value that was stored last. It only grows, so that a stream that is late passes too.
    idle: Mutex<Vec<(usize, u32)>>,
}

impl Words {
    fn store(&self, at: usize, value: u32) {
        debug_assert!(at < WORDS);
        // SAFETY: inside the page, which stays mapped; all accesses of the CPU are atomic.
        let word = unsafe { AtomicU32::from_ptr(self.memory.ptr.cast::<u32>().add(at)) };
        word.store(value, Release);
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push((at, value));
    }
}

/// The argument of the host function.
struct HostCall {
    reached: Reached,
    stop: StreamStop,
    /// Where the function itself waits: set when the stop has ended.
    ended: Option<Arc<Ended>>,
}

#[derive(Default)]
struct Ended {
    done: Mutex<bool>,
    changed: Condvar,
}

impl Cuda {
    pub(super) fn enqueue_stop(&self, stream: StreamId, reached: Reached) -> Result<()> {
        let _entered = self.enter()?;
        if self.stream_captures(stream) {
            return Err(self.driver_error("cuLaunchHostFunc", CuError::STREAM_CAPTURE_UNSUPPORTED));
        }
        let Some(words) = self.stop_words() else { return self.stop_in_host_function(stream, reached) };
        let taken = words.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let (at, before) = taken.ok_or(DeviceError::new(ErrorKind::NoMemory, "stop of a stream"))?;
        let value = before.wrapping_add(1);
        let stop = StreamStop::new(move || words.store(at, value));
        // If this fails, the stop is dropped with the call.
        self.launch_reached(stream, HostCall { reached, stop, ended: None })?;
        // SAFETY: the stream belongs to this context, which lives; the words stay registered.
        unsafe { self.driver.stream_wait_value(Cuda::raw_stream(stream), words.address(at), value) }
            .map_err(|e| self.driver_error("cuStreamWaitValue32", e))
    }

    fn stop_in_host_function(&self, stream: StreamId, reached: Reached) -> Result<()> {
        let ended = Arc::new(Ended::default());
        let own = Arc::clone(&ended);
        let stop = StreamStop::new(move || {
            *own.done.lock().unwrap_or_else(PoisonError::into_inner) = true;
            own.changed.notify_all();
        });
        self.launch_reached(stream, HostCall { reached, stop, ended: Some(ended) })
    }

    /// Enqueues the host function. The context must be entered.
    fn launch_reached(&self, stream: StreamId, call: HostCall) -> Result<()> {
        let argument = Box::into_raw(Box::new(call));
        // SAFETY: the stream belongs to this context, which lives; the function is called at most once.
        let launched = unsafe { self.driver.launch_host_func(Cuda::raw_stream(stream), reach, argument.cast()) };
        launched.map_err(|e| {
            // SAFETY: made above, and the driver did not take it.
            drop(unsafe { Box::from_raw(argument) });
            self.driver_error("cuLaunchHostFunc", e)
        })
    }

    /// The words, if the driver lets streams wait for them. The context must be entered.
    fn stop_words(&self) -> Option<&'static Words> {
        if let Some(made) = self.stops.words.get() {
            return *made;
        }
        let _making = self.stops.making.lock().unwrap_or_else(PoisonError::into_inner);
        *self.stops.words.get_or_init(|| self.make_words().ok())
    }

    fn make_words(&self) -> Result<&'static Words> {
        let memory = self.alloc_pinned_host(linux::PAGE)?;
        let device_ptr = crate::Device::device_ptr(self, memory.ptr)?;
        let idle = Mutex::new((0..WORDS).map(|at| (at, 0)).rev().collect());
        let words = Words { memory, device_ptr, idle };
        // A wait that is over already, to see whether the driver has them.
        let stream = self.take_stream()?;
        let raw = Cuda::raw_stream(stream);
        // SAFETY: the stream is ours; the words are not freed after the wait was accepted, see below.
        let waits = unsafe { self.driver.stream_wait_value(raw, words.address(0), 0) };
        let waits = waits.and_then(|()| {
            let _relaxed = RelaxedCapture::enter(self.driver);
            // SAFETY: as above.
            unsafe { self.driver.stream_synchronize(raw) }
        });
        self.recycle_stream(stream);
        match waits {
            Ok(()) => Ok(Box::leak(Box::new(words))),
            Err(e) => Err(self.driver_error("cuStreamWaitValue32", e)),
        }
    }

    /// The context must be entered.
    pub(super) fn new_stream_beside_stops(&self) -> Result<StreamId> {
        let new = match self.driver.stream_create_first(stream::NON_BLOCKING) {
            Ok(new) => StreamId(new.0 as u64),
            Err(CuError::NO_SUCH_FUNCTION) => self.take_stream()?,
            Err(e) => return Err(self.driver_error("cuStreamCreateWithPriority", e)),
        };
        let _ = self.stops.probe.set(new);
        Ok(new)
    }

    /// Whether a GPU kernel has failed, after which the driver refuses all work.
    pub(super) fn has_failed(&self) -> bool {
        let Ok(_entered) = self.enter() else { return true };
        let Some(probe) = self.stops.probe.get() else { return false };
        let _relaxed = RelaxedCapture::enter(self.driver);
        // SAFETY: the stream is ours, and its context lives.
        unsafe { self.driver.stream_query(Cuda::raw_stream(*probe)) }.is_err()
    }
}

impl Words {
    fn address(&self, at: usize) -> u64 {
        self.device_ptr + (at * size_of::<u32>()) as u64
    }
}

/// # Safety
/// For the driver, once per [`HostCall`].
unsafe extern "C" fn reach(argument: *mut c_void) {
    // SAFETY: made by `Box::into_raw` for this call alone.
    let HostCall { reached, stop, ended } = *unsafe { Box::from_raw(argument.cast::<HostCall>()) };
    reached(stop);
    let Some(ended) = ended else { return };
    let mut done = ended.done.lock().unwrap_or_else(PoisonError::into_inner);
    while !*done {
        done = ended.changed.wait(done).unwrap_or_else(PoisonError::into_inner);
    }
}
