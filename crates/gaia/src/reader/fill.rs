//! The fillers: threads that read pages for kernels.
//!
//! ```text
//!   filler A: looks at the ring ── request, free slot ──> pread into the slot ──> done word
//!   filler B: waits for its turn to look ──> looks at the ring ...
//! ```
//!
//! One filler looks at a time, the others read or wait: without requests one thread wakes up, every 1 ms, and after a
//! while every 5 ms. A GPU cannot wake a thread.
//!
//! They make no call of the driver: a copy by a copy engine takes 10 us, and milliseconds beside a kernel of which many warps
//! poll one word of host memory (benches/gpu/polling.cu). So they have the descriptor table of the shadow workers, where the file
//! is open.

#![expect(unsafe_code, reason = "reads into memory that kernels share")]

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use spinio_host::lock;
use spinio_ring::page_requests::PageRequest;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::words::Words;
use crate::file_reader::OpenFile;
use crate::{Error, Result};

/// Threads of a reader: one for each processor, but at least 4, since reads wait for storage, and at most 8.
const FILLERS: (usize, usize) = (4, 8);
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
    page: u64,
    frames: u64,
    pub(super) words: Words,
    /// The thread that has it locked looks at the ring.
    next: Mutex<Next>,
    running: Mutex<usize>,
    ended: Condvar,
    threads: usize,
    busy_looks: u32,
    fills: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
}

/// The number of the next request, and the slot that was taken last.
#[derive(Default)]
struct Next {
    ticket: u64,
    slot: usize,
}

/// A request and the slot for its bytes.
struct Fill {
    ticket: u64,
    request: PageRequest,
    slot: usize,
}

impl Fillers {
    pub(super) fn new(file: Box<dyn OpenFile>, page: u64, frames: u64, words: Words) -> Fillers {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Fillers {
            file,
            page,
            frames,
            words,
            next: Mutex::new(Next::default()),
            running: Mutex::new(0),
            ended: Condvar::new(),
            threads: processors.clamp(FILLERS.0, FILLERS.1),
            busy_looks: if processors >= MANY_PROCESSORS { BUSY_LOOKS } else { 0 },
            fills: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            errors: AtomicU64::new(0),
        }
    }

    /// Starts the threads; one is enough.
    pub(super) fn start(fillers: &Arc<Fillers>) -> Result<()> {
        for number in 0..fillers.threads {
            let this = Arc::clone(fillers);
            *lock(&fillers.running) += 1;
            if !fillers.file.spawn("spinio-reader", Box::new(move |fd| this.run(fd))) {
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

    fn run(&self, fd: Fd) {
        while let Some(fill) = self.next_fill() {
            let frame = fill.request.frame;
            if frame >= self.frames {
                // No kernel of ours stores that.
                self.words.requests().free_slot(fill.slot);
                self.errors.fetch_add(1, Relaxed);
                continue;
            }
            match self.read(fd, &fill) {
                Ok(bytes) => {
                    self.fills.fetch_add(1, Relaxed);
                    self.bytes.fetch_add(bytes as u64, Relaxed);
                    match bytes {
                        0 => self.words.requests().finish_empty(fill.ticket, frame, fill.slot, 0),
                        _ => self.words.requests().finish(fill.ticket, frame, fill.slot, bytes),
                    }
                }
                Err(e) => {
                    self.errors.fetch_add(1, Relaxed);
                    self.words.requests().finish_empty(fill.ticket, frame, fill.slot, -e.raw_os_error());
                }
            }
        }
        *lock(&self.running) -= 1;
        self.ended.notify_all();
    }

    /// The next request, with a slot; `None` once the reader is stopped.
    fn next_fill(&self) -> Option<Fill> {
        let mut next = lock(&self.next);
        let (mut looks, mut sleep) = (0_u32, FIRST_SLEEP);
        while self.words.stop().load(Acquire) == 0 {
            let ticket = next.ticket;
            if let Some(request) = self.words.requests().request(ticket)
                && let Some(slot) = self.words.requests().take_slot(ticket, next.slot)
            {
                *next = Next { ticket: ticket + 1, slot };
                return Some(Fill { ticket, request, slot });
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

    /// Reads a page into its slot. Fewer bytes than a page has only at the end of the file.
    fn read(&self, fd: Fd, fill: &Fill) -> core::result::Result<usize, Errno> {
        // Past what a file can have: no bytes, as past its end.
        let offset = fill.request.page.checked_mul(self.page).filter(|&at| i64::try_from(at + self.page).is_ok());
        let Some(offset) = offset else { return Ok(0) };
        let (to, len) = (self.words.slot(fill.slot), self.page as usize);
        let mut done = 0;
        while done < len {
            // SAFETY: the slot has that many bytes, and is this thread's until it says that it is filled.
            match unsafe { linux::pread(fd, to.add(done), len - done, offset + done as u64) } {
                Ok(0) => break,
                Ok(got) => done += got,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::mm::{MapFlags, ProtFlags};
    use spinio_device::emulated::{Config, Emulated};

    use super::super::words;
    use super::*;

    struct NoFile;

    impl OpenFile for NoFile {
        fn read(
            &self,
            _: u64,
            _: &'static dyn spinio_device::Device,
            _: spinio_device::DeviceAddr,
            _: u64,
        ) -> Result<u64> {
            unreachable!("read by fillers")
        }

        fn spawn(&self, _: &str, _: Box<dyn FnOnce(Fd) + Send>) -> bool {
            false
        }
    }

    #[test]
    fn error_in_the_middle_of_a_page_is_no_end_of_the_file() {
        const PAGE: u64 = 8192;
        let device = Emulated::start(Config::parse("size=1M").unwrap()).unwrap();
        let fillers = Fillers::new(Box::new(NoFile), PAGE, 8, words::Words::new(device, 8, PAGE).unwrap());
        // This process's own memory as the file: what is mapped past the end of a file cannot be read (EIO).
        let below = tempfile::tempfile().unwrap();
        // SAFETY: new memory at an address of the kernel's choice.
        let at =
            unsafe { rustix::mm::mmap(core::ptr::null_mut(), 4 * 4096, ProtFlags::READ, MapFlags::SHARED, &below, 0) };
        let at = at.unwrap() as u64;
        let first = at.next_multiple_of(PAGE);
        below.set_len(first - at + 4096).unwrap();
        let memory = std::fs::File::open("/proc/self/mem").unwrap();
        let fill = Fill { ticket: 0, request: PageRequest { frame: 0, page: first / PAGE }, slot: 0 };
        assert_eq!(fillers.read(memory.as_raw_fd(), &fill), Err(Errno::IO));
        below.set_len(first - at + PAGE).unwrap();
        assert_eq!(fillers.read(memory.as_raw_fd(), &fill), Ok(PAGE as usize));
        // SAFETY: nothing refers to it.
        unsafe { rustix::mm::munmap(at as *mut _, 4 * 4096) }.unwrap();
    }
}
