//! The runtime: one a process, made at the first device request.

use std::sync::OnceLock;
use std::time::Instant;

use spinio_device::{Allocation, DeviceAddr, QueueId, Wait};
use spinio_plan::{Reason, Route};
use spinio_sys::linux::{self, Fd};

use crate::{Error, Settings, stats};

type Result<T> = core::result::Result<T, Error>;

/// Where a read goes.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The allocation that holds the address.
    pub allocation: Allocation,
    /// First byte to write.
    pub addr: DeviceAddr,
}

/// Everything SPIN keeps in a process.
pub struct Runtime {
    settings: Settings,
    stats: stats::Table,
}

/// The runtime of this process.
pub fn runtime() -> &'static Runtime {
    static ONE: OnceLock<Runtime> = OnceLock::new();
    ONE.get_or_init(|| Runtime::new(Settings::from_env().0))
}

impl Runtime {
    /// A runtime of its own, for tests and tools.
    pub fn new(settings: Settings) -> Runtime {
        Runtime { settings, stats: stats::Table::default() }
    }

    /// Its settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The counters now.
    pub fn stats(&self) -> stats::Snapshot {
        self.stats.snapshot()
    }

    /// `pread` (with an offset) or `read` (at the descriptor's own) into device memory.
    /// Returns what POSIX says: bytes read, short at the end of the file or of the allocation.
    pub fn read(&self, fd: Fd, at: Option<u64>, to: Target, len: usize) -> Result<usize> {
        let begun = Instant::now();
        let len = len.min(to.allocation.room(to.addr) as usize);
        let mut bounce = vec![0u8; len];
        let offset = at.unwrap_or(0);
        // SAFETY: `bounce` holds `len` bytes.
        let got = unsafe {
            match at {
                Some(offset) => linux::pread(fd, bounce.as_mut_ptr(), len, offset),
                None => linux::read(fd, bounce.as_mut_ptr(), len),
            }
        }
        .map_err(|e| Error::kernel(e, "read", offset, len as u64))?;
        self.put(to, bounce.as_ptr(), got)?;
        let nanos = begun.elapsed().as_nanos() as u64;
        self.stats.piece(Route::Copy, Reason::Small, got as u64, nanos);
        self.stats.call(got as u64, nanos);
        Ok(got)
    }

    /// Reads the file now and queues the copies on `queue` (CUDA: a stream); returns the bytes that will be there
    /// once the queue gets that far.
    pub fn read_async(&self, fd: Fd, at: u64, to: Target, len: usize, queue: QueueId) -> Result<usize> {
        let _ = queue;
        self.read(fd, Some(at), to, len)
    }

    /// Copies host bytes into device memory and waits, in the order of a small read.
    pub fn put(&self, to: Target, src: *const u8, len: usize) -> Result<()> {
        let device = to.allocation.device;
        let fail = |e| Error::device(e, "copy to the device", 0, len as u64);
        let (queue, _) = device.program_queue();
        // SAFETY: the caller's bytes stay until the drain below returns.
        unsafe { device.copy_in(queue, to.addr, src, len) }.map_err(fail)?;
        device.drain(queue, Wait::Context).map_err(fail)
    }
}
