//! The runtime: one a process, made at the first device request.

use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::*};
use std::time::{Duration, Instant};

use spinio_device::{Allocation, DeviceAddr, QueueId, Wait};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKind};

use crate::core::Core;
use crate::kernel::{Kernel, Linux};
use crate::plain::Plain;
use crate::settings::{Ordering, SMALL};
use crate::staging::BLOCK;
use crate::{Error, Settings, large, small, stats};

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
    core: Arc<Core>,
    /// 1 in the process that made it, 0 in its forked children.
    alive: Option<&'static AtomicU64>,
}

static CURRENT: AtomicPtr<Runtime> = AtomicPtr::new(core::ptr::null_mut());

fn current() -> Option<&'static Runtime> {
    // SAFETY: what is stored there was leaked and is never freed.
    let runtime = unsafe { CURRENT.load(Acquire).as_ref() }?;
    runtime.alive.is_none_or(|word| word.load(Relaxed) == 1).then_some(runtime)
}

/// The runtime of this process. A forked child makes its own: the parent's threads did not come along, and its locks
/// may be held by them.
pub fn runtime() -> &'static Runtime {
    if let Some(runtime) = current() {
        return runtime;
    }
    let old = CURRENT.load(Acquire);
    let mut made = Runtime::new(Settings::of_process().clone());
    made.alive = linux::word_wiped_on_fork().ok();
    if let Some(word) = made.alive {
        word.store(1, Relaxed);
    }
    let made = Box::into_raw(Box::new(made));
    match CURRENT.compare_exchange(old, made, AcqRel, Acquire) {
        // SAFETY: leaked above, never freed.
        Ok(_) => unsafe { &*made },
        Err(_) => {
            // SAFETY: nobody else has seen it.
            drop(unsafe { Box::from_raw(made) });
            runtime()
        }
    }
}

/// How long a `close` waits for what is kept beside the file to be let go of. Longer only if a server is slow, or a
/// kernel of the program holds up the driver.
const PARTING: Duration = Duration::from_millis(20);

/// The program is about to close `fd` or has given its file away: lets go of what is kept beside it, so that the file
/// system can be unmounted and a deleted file's space is free. Costs one load while nothing is kept.
pub fn forget(fd: Fd) {
    let Some(core) = current().map(|r| &r.core).filter(|core| !core.files.is_empty()) else { return };
    if let Ok(stat) = core.kernel.fstat(fd)
        && core.files.forget(stat.dev, stat.ino)
    {
        core.part(PARTING);
    }
}

/// As [`forget`], for everything: descriptors are closed by the range.
pub fn forget_all() {
    let Some(core) = current().map(|r| &r.core).filter(|core| !core.files.is_empty()) else { return };
    core.files.forget_all();
    core.part(PARTING);
}

impl Runtime {
    /// A runtime of its own, for tests and tools.
    pub fn new(settings: Settings) -> Runtime {
        Runtime::with_kernel(settings, &Linux)
    }

    /// A runtime over another kernel, for fault injection.
    pub fn with_kernel(settings: Settings, kernel: &'static dyn Kernel) -> Runtime {
        let core = Core::new(settings, kernel);
        // Now, on the program's thread: the file of the counters is opened by a helper, which must not ask for itself.
        core.stats();
        Runtime { core, alive: None }
    }

    /// Its settings.
    pub fn settings(&self) -> &Settings {
        &self.core.settings
    }

    /// The counters now.
    pub fn stats(&self) -> stats::Snapshot {
        self.core.stats().snapshot()
    }

    /// Bytes of pinned staging memory held for the device of an allocation.
    pub fn staging_bytes(&self, of: &Allocation) -> u64 {
        self.core.staging(of.device).total()
    }

    /// `pread` (with an offset) or `read` (at the descriptor's own) into device memory.
    /// Returns what POSIX says: bytes read, short at the end of the file or of the allocation.
    pub fn read(&self, fd: Fd, at: Option<u64>, to: Target, len: usize) -> Result<usize> {
        let room = to.allocation.room(to.addr);
        if room == 0 && len > 0 {
            return Err(Error::kernel(Errno::FAULT, "read", at.unwrap_or(0), len as u64));
        }
        let len = len.min(usize::try_from(room).unwrap_or(usize::MAX));
        if len <= SMALL {
            return small::read(&self.core, fd, at, to, len);
        }
        let begun = Instant::now();
        let got = large::read(&self.core, fd, at, to, len)?;
        self.core.stats().call(got as u64, begun.elapsed().as_nanos() as u64);
        Ok(got)
    }

    /// Reads the file now and queues the copies on `queue` (CUDA: a stream); returns the bytes that will be there
    /// once the queue gets that far. Waits only for staging memory: a read larger than the staging ring needs the
    /// queue to move.
    pub fn read_async(&self, fd: Fd, at: u64, to: Target, len: usize, queue: QueueId) -> Result<usize> {
        let begun = Instant::now();
        let len = len.min(usize::try_from(to.allocation.room(to.addr)).unwrap_or(usize::MAX));
        if to.allocation.device.is_captured(queue) {
            // Captured copies would read staging memory again at every launch of the graph, when it holds other bytes.
            return Err(Error::kernel(Errno::BUSY, "read into a captured queue", at, len as u64));
        }
        let plain = Plain { fd, at: Some(at), to, len, once: false, reason: Reason::Forced, queue: Some(queue) };
        let got = plain.read(&self.core)?;
        self.core.stats().call(got as u64, begun.elapsed().as_nanos() as u64);
        Ok(got)
    }

    /// Copies host bytes into device memory, in the order of a small read; the bytes may be reused at once.
    pub fn put(&self, to: Target, bytes: &[u8]) -> Result<()> {
        let begun = Instant::now();
        let len = bytes.len();
        let device = to.allocation.device;
        let fail = |e| Error::device(e, "copy to the device", 0, len as u64);
        if len as u64 > to.allocation.room(to.addr) {
            return Err(Error::kernel(Errno::FAULT, "copy to the device", 0, len as u64));
        }
        let staging = self.core.staging(device);
        let (queue, ours) = device.program_queue();
        let mut done = 0;
        while done < len {
            let n = (len - done).min(BLOCK);
            let block = staging.take().map_err(fail)?;
            // SAFETY: the block is ours alone and has `BLOCK` bytes.
            unsafe { core::ptr::copy_nonoverlapping(bytes[done..done + n].as_ptr(), block.ptr(), n) };
            // SAFETY: the block is retired behind the copy; the bytes lie inside the allocation.
            match unsafe { device.copy_in(queue, to.addr.offset(done as u64), block.ptr(), n) } {
                Ok(()) => staging.retire(block, queue),
                Err(e) => {
                    staging.give_back(block);
                    return Err(fail(e));
                }
            }
            done += n;
        }
        if len > 0 && (ours || len > SMALL || self.core.settings.ordering == Ordering::Strict) {
            device.drain(queue, Wait::Context).map_err(fail)?;
        }
        let nanos = begun.elapsed().as_nanos() as u64;
        self.core.stats().piece(Route::Copy, Reason::Stream, len as u64, nanos);
        self.core.stats().call(len as u64, nanos);
        Ok(())
    }

    /// Moves the offset of a descriptor forward by `len` for a read to come; where it stood.
    pub fn reserve(&self, fd: Fd, len: u64) -> core::result::Result<u64, Errno> {
        large::reserve(&self.core, fd, len)
    }

    /// Gives back what a reserved read did not use.
    pub fn unreserve(&self, fd: Fd, unused: u64) {
        large::unreserve(&self.core, fd, unused);
    }

    /// Whether what `fd` names can only be read as it comes: it has no offset, or its size says nothing.
    pub fn is_stream(&self, fd: Fd) -> core::result::Result<bool, Errno> {
        let stat = self.core.kernel.fstat(fd)?;
        Ok(match stat.kind {
            FileKind::Stream => true,
            FileKind::Regular => stat.size == 0 || self.core.kernel.lseek(fd, 0, 1).is_err(),
            FileKind::Block => false,
        })
    }

    /// What the threads share.
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }
}
