//! The runtime: one a process, made at the first device request.

use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::*};
use std::time::Duration;

use spinio_device::{Allocation, DeviceAddr};
use spinio_sys::linux::{self, Fd};

use crate::core::Core;
use crate::file::{ahead, streams};
use spinio_host::syscalls::{Kernel, Linux};
use crate::own::Tables;
use crate::{Settings, stats};

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
    let mut made = Runtime::over(Settings::of_process().clone(), &Linux, true);
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
pub(crate) const PARTING: Duration = Duration::from_millis(20);

/// The program is about to close `fd` or has given its file away: lets go of what is kept beside it, so that the file
/// system can be unmounted and a deleted file's space is free. Costs one load while nothing is kept.
pub fn forget(fd: Fd) {
    let kept = |core: &&Arc<Core>| !core.files.is_empty() || !core.holds.is_empty();
    let Some(core) = current().map(|r| &r.core).filter(kept) else { return };
    if let Ok(stat) = core.kernel.fstat(fd) {
        core.holds.forget(fd, (stat.dev, stat.ino));
        if core.files.forget(stat.dev, stat.ino) {
            core.part(PARTING);
        }
    }
}

/// The program has advised the kernel about `fd`, and the kernel has taken it. Takes no lock: it may come before any
/// device read, and from anywhere.
pub fn note_advice(fd: Fd, advice: linux::Advice) {
    if let Ok(stat) = linux::fstat(fd) {
        streams::advised(fd, &stat, advice);
    }
}

/// What follows from advice about `len` bytes at `offset` (0: all behind it) for what is kept beside the file.
pub fn advised(fd: Fd, offset: u64, len: u64, advice: linux::Advice) {
    let Some(core) = current().map(|r| &r.core).filter(|core| !core.files.is_empty()) else { return };
    if let Ok(stat) = core.kernel.fstat(fd) {
        let end = if len == 0 { u64::MAX } else { offset.saturating_add(len) };
        ahead::advised(core, stat, offset..end, advice);
    }
}

/// As [`forget`], for descriptors that are closed by the range. Held files end with the very descriptor that they were held
/// by; everything else that is kept beside files is let go of, since it comes back with the next request.
pub fn forget_range(first: u32, last: u32) {
    let kept = |core: &&Arc<Core>| !core.files.is_empty() || !core.holds.is_empty();
    let Some(core) = current().map(|r| &r.core).filter(kept) else { return };
    core.holds.forget_range(first, last);
    core.files.forget_all();
    core.part(PARTING);
}

impl Runtime {
    /// A runtime of its own, for tests and tools.
    pub fn new(settings: Settings) -> Runtime {
        Runtime::over(settings, &Linux, false)
    }

    /// A runtime over another kernel, for fault injection.
    pub fn with_kernel(settings: Settings, kernel: &'static dyn Kernel) -> Runtime {
        Runtime::over(settings, kernel, false)
    }

    fn over(settings: Settings, kernel: &'static dyn Kernel, of_process: bool) -> Runtime {
        let tables = Tables::leaked(kernel);
        let core = Core::new(settings, tables);
        core.open_stats(of_process);
        tables.serve(&core);
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
        self.core.staging_bytes(of.device)
    }

    /// What the threads share.
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }
}
