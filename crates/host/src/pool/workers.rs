//! The worker pools of a runtime, each made at the first request that needs it.
//!
//! ```text
//!   shadow         opens, owns and closes SPIN's own descriptors; reads storage         the shadow table
//!   copy           copies next to the caller, calls the device                          the program's table
//!   batch copy     the same for batches                                                 the program's table
//!   batch readers  read the small cached operations of large batches                    one table each
//! ```
//!
//! A pool that cannot be created (an old kernel, no more threads for this user) is `None` permanently: its callers have
//! a fallback.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use spinio_sys::linux;

use super::{IdleTask, NoIdleTask, WorkerPool};
use crate::copy_threads::CopyThreads;
use crate::processors::usable;
use crate::settings::{Settings, StorageEngine};
use crate::shares::ShareKey;
use crate::storage_ring::StorageRing;
use crate::storage_rings::{self, NoRing, RING, StorageRings};
use crate::syscalls::Syscalls;
use crate::thread_rings::{ThreadRing, ThreadRings};

/// Reads of one file system in flight at once, however few the processors are. The pool has twice as many threads, so
/// that a server that does not answer leaves half of them for others.
pub const SHADOW_WORKERS: usize = 8;

/// The idle task of a pool's workers, set after the pools are created: its owner needs them itself.
#[derive(Clone, Default)]
struct LateIdle(Arc<OnceLock<Box<dyn IdleTask>>>);

impl IdleTask for LateIdle {
    fn sleep_timeout(&self) -> Option<Duration> {
        self.0.get()?.sleep_timeout()
    }

    fn reap_idle(&self) {
        if let Some(task) = self.0.get() {
            task.reap_idle();
        }
    }
}

/// All pools of a runtime.
pub struct Workers {
    sys: &'static dyn Syscalls,
    copy_threads: CopyThreads,
    batch_threads: usize,
    spin: Duration,
    /// Before the pool: a worker closes its descriptor.
    storage_rings: StorageRings,
    /// Likewise; `None`: by setting.
    thread_rings: Option<ThreadRings>,
    shadow: OnceLock<Option<WorkerPool>>,
    shadow_idle: LateIdle,
    copy: OnceLock<Option<WorkerPool>>,
    copy_idle: LateIdle,
    batch_copy: OnceLock<Option<WorkerPool>>,
    batch_readers: OnceLock<Option<WorkerPool>>,
    /// The kernel offers no io_uring.
    pub io_uring_denied: AtomicBool,
    /// No thread may duplicate descriptors of another thread's table.
    pub pidfd_getfd_denied: AtomicBool,
}

impl Workers {
    /// No thread yet.
    pub fn new(sys: &'static dyn Syscalls, settings: &Settings) -> Workers {
        let processors = usable();
        let batch_threads = match settings.batch_threads {
            0 => (processors * 3 / 4).clamp(2, 12),
            set => set,
        };
        Workers {
            sys,
            copy_threads: CopyThreads::new(settings, processors),
            batch_threads,
            // Waking a sleeping thread costs more than copying 64 KiB; but with few processors spinning takes time from
            // other work.
            spin: Duration::from_micros(if processors >= 8 { 60 } else { 0 }),
            storage_rings: StorageRings::new(settings.storage_engine, processors),
            thread_rings: (settings.storage_engine == StorageEngine::Auto).then(ThreadRings::default),
            shadow: OnceLock::new(),
            shadow_idle: LateIdle::default(),
            copy: OnceLock::new(),
            copy_idle: LateIdle::default(),
            batch_copy: OnceLock::new(),
            batch_readers: OnceLock::new(),
            io_uring_denied: AtomicBool::new(false),
            pidfd_getfd_denied: AtomicBool::new(false),
        }
    }

    /// The idle task of shadow workers.
    pub fn set_shadow_idle(&self, task: impl IdleTask + 'static) {
        let _ = self.shadow_idle.0.set(Box::new(task));
    }

    /// The idle task of copy workers.
    pub fn set_copy_idle(&self, task: impl IdleTask + 'static) {
        let _ = self.copy_idle.0.set(Box::new(task));
    }

    /// How many threads copy for a request; shadow workers are not counted.
    pub fn copy_threads(&self) -> &CopyThreads {
        &self.copy_threads
    }

    /// Threads that read the operations of one batch, the caller included.
    pub fn batch_threads(&self) -> usize {
        self.batch_threads
    }

    /// How long to spin for an event that is expected soon before sleeping.
    pub fn spin(&self) -> Duration {
        self.spin
    }

    /// The threads with the shadow table.
    pub fn shadow(&self) -> Option<&WorkerPool> {
        let make = || WorkerPool::shadow_workers(self.sys, 2 * SHADOW_WORKERS, self.spin, self.shadow_idle.clone());
        self.shadow.get_or_init(make).as_ref()
    }

    /// The ring of the file system or block device with this key, if its kernel thread is awake; otherwise it is made or
    /// woken, for a later read.
    pub fn storage_ring(&self, key: ShareKey) -> Result<Arc<StorageRing>, NoRing> {
        self.storage_rings.get(key, self.sys, || self.shadow())
    }

    /// Why there is no ring, as far as is known without a read; `None`: there is one, or there would be.
    pub fn ring_refusal(&self) -> Option<NoRing> {
        self.storage_rings.refusal()
    }

    /// Reads that the rings were given so far.
    pub fn ring_reads(&self) -> u64 {
        self.storage_rings.reads()
    }

    /// The ring of the calling thread, by which it reads storage itself; made at its first call. `None`: it has none.
    pub fn thread_ring(&self) -> Option<Arc<ThreadRing>> {
        if linux::in_shadow_table() {
            return None;
        }
        self.thread_rings.as_ref()?.get(self.sys, &self.shadow()?.for_key(RING))
    }

    /// Has a shadow worker wake the kernel thread of the ring, if it sleeps.
    pub fn wake_ring(&self, ring: &Arc<StorageRing>) {
        storage_rings::wake(ring, || self.shadow());
    }

    /// The threads that copy concurrently with the caller. First called by a thread of the program, whose table they
    /// get.
    pub fn copy(&self) -> Option<&WorkerPool> {
        if linux::in_shadow_table() {
            return self.copy.get()?.as_ref();
        }
        self.copy
            .get_or_init(|| {
                let (few, many) = (self.copy_threads.few() - 1, self.copy_threads.most() - 1);
                WorkerPool::copy_workers(self.sys, few, many, self.spin, self.copy_idle.clone())
            })
            .as_ref()
    }

    /// The threads that read operations of batches concurrently with the caller, likewise.
    pub fn batch_copy(&self) -> Option<&WorkerPool> {
        if linux::in_shadow_table() {
            return self.batch_copy.get()?.as_ref();
        }
        self.batch_copy
            .get_or_init(|| {
                let threads = self.batch_threads - 1;
                WorkerPool::copy_workers(self.sys, threads, threads, self.spin, NoIdleTask)
            })
            .as_ref()
    }

    /// The threads that read the operations of large batches, and nothing else.
    pub fn batch_readers(&self) -> Option<&WorkerPool> {
        self.batch_readers
            .get_or_init(|| WorkerPool::batch_readers(self.sys, self.batch_threads - 1, self.spin))
            .as_ref()
    }
}
