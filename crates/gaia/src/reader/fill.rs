//! The fillers: threads that read pages for kernels.
//!
//! ```text
//!   filler A: looks at the ring ── request ──> reads ── copies ── waits ──> done word
//!   filler B: waits for its turn to look ──> looks at the ring ...
//! ```
//!
//! One filler looks at a time, the others read or wait: without requests one thread wakes up, every 1 ms, and after a
//! while every 5 ms. A GPU cannot wake a thread.
//!
//! They share the program's descriptor table, as every thread that calls a device.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use spinio_device::{Device, DeviceAddr, StreamId, WaitMode, set_thread_stream};
use spinio_host::lock;
use spinio_sys::Errno;
use spinio_sys::linux::spawn_signals_blocked;

use super::words::{Request, Words};
use crate::file_reader::OpenFile;
use crate::{Error, Result};

/// Threads of a reader.
const FILLERS: usize = 4;
const STACK: usize = 512 << 10;
/// Looks without a pause, where there are processors for it.
const BUSY_LOOKS: u32 = 400;
const MANY_PROCESSORS: usize = 8;
const FIRST_SLEEP: Duration = Duration::from_micros(20);
const LONG_SLEEP: Duration = Duration::from_millis(1);
const IDLE_SLEEP: Duration = Duration::from_millis(5);
/// Long sleeps before it sleeps longer.
const LONG_SLEEPS: u32 = 1000;

/// Counters of a reader: `struct spinio_gaia_reader_stats`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ReaderStats {
    /// Pages that were read for kernels.
    pub fills: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Pages that could not be read.
    pub errors: u64,
}

pub(super) struct Fillers {
    file: Box<dyn OpenFile>,
    device: &'static dyn Device,
    frames_at: DeviceAddr,
    page: u64,
    frames: u64,
    pub(super) words: Words,
    /// The number of the next request; the thread that has it locked looks at the ring.
    next: Mutex<u64>,
    running: Mutex<usize>,
    ended: Condvar,
    busy_looks: u32,
    fills: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
}

impl Fillers {
    pub(super) fn new(
        file: Box<dyn OpenFile>,
        device: &'static dyn Device,
        frames_at: DeviceAddr,
        page: u64,
        frames: u64,
        words: Words,
    ) -> Fillers {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Fillers {
            file,
            device,
            frames_at,
            page,
            frames,
            words,
            next: Mutex::new(0),
            running: Mutex::new(0),
            ended: Condvar::new(),
            busy_looks: if processors >= MANY_PROCESSORS { BUSY_LOOKS } else { 0 },
            fills: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            errors: AtomicU64::new(0),
        }
    }

    /// Starts the threads; one is enough.
    pub(super) fn start(fillers: &Arc<Fillers>) -> Result<()> {
        let failed = |e| Error::device(e, "get a stream for a reader");
        for number in 0..FILLERS {
            let stream = match fillers.device.acquire_stream() {
                Ok(stream) => OwnStream(fillers.device, stream),
                Err(e) if number == 0 => return Err(failed(e)),
                Err(_) => break,
            };
            let this = Arc::clone(fillers);
            *lock(&fillers.running) += 1;
            if spawn_signals_blocked("spinio-reader", STACK, move || this.run(&stream)).is_err() {
                *lock(&fillers.running) -= 1;
                if number == 0 {
                    return Err(Error::of(Errno::AGAIN, "start a thread for a reader"));
                }
                break;
            }
        }
        Ok(())
    }

    /// Waits for the end of the threads, after the stop word was set.
    pub(super) fn join(&self) {
        let mut running = lock(&self.running);
        while *running > 0 {
            running = self.ended.wait(running).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn stats(&self) -> ReaderStats {
        ReaderStats {
            fills: self.fills.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            errors: self.errors.load(Relaxed),
        }
    }

    fn run(&self, stream: &OwnStream) {
        // Reads of this thread go there: the default stream waits for the kernels.
        set_thread_stream(stream.1);
        while let Some((ticket, request)) = self.next_request() {
            let result = self.fill(request, stream);
            let word = match result {
                Ok(bytes) => {
                    self.fills.fetch_add(1, Relaxed);
                    self.bytes.fetch_add(bytes, Relaxed);
                    bytes as i32
                }
                Err(e) => {
                    self.errors.fetch_add(1, Relaxed);
                    -e.errno.raw_os_error()
                }
            };
            if request.frame < self.frames {
                self.words.finish(ticket, request.frame, word);
            }
        }
        *lock(&self.running) -= 1;
        self.ended.notify_all();
    }

    /// The next request and its number; `None` once the reader is stopped.
    fn next_request(&self) -> Option<(u64, Request)> {
        let mut next = lock(&self.next);
        let (mut looks, mut sleep) = (0_u32, FIRST_SLEEP);
        while self.words.stop().load(Acquire) == 0 {
            if let Some(request) = self.words.request(*next) {
                let ticket = *next;
                *next += 1;
                return Some((ticket, request));
            }
            looks += 1;
            if looks <= self.busy_looks {
                std::hint::spin_loop();
                continue;
            }
            std::thread::sleep(sleep);
            let most = if looks < LONG_SLEEPS { LONG_SLEEP } else { IDLE_SLEEP };
            sleep = (sleep * 2).min(most);
        }
        None
    }

    /// Reads a page into its frame; when it returns, the bytes are there.
    fn fill(&self, request: Request, stream: &OwnStream) -> Result<u64> {
        if request.frame >= self.frames {
            return Err(Error::new(Errno::FAULT, "A kernel requests a frame that does not exist"));
        }
        let to = self.frames_at.offset(request.frame * self.page);
        // Past what a file can have: no bytes, as past its end.
        let offset = request.page.checked_mul(self.page).filter(|&at| i64::try_from(at + self.page).is_ok());
        let Some(offset) = offset else { return Ok(0) };
        let got = self.file.read(offset, self.device, to, self.page)?;
        let waited = self.device.synchronize(stream.1, WaitMode::Block);
        waited.map_err(|e| Error::device(e, "copy a page"))?;
        Ok(got)
    }
}

/// A stream that is released when it is dropped.
struct OwnStream(&'static dyn Device, StreamId);

impl Drop for OwnStream {
    fn drop(&mut self) {
        self.0.release_stream(self.1);
    }
}
