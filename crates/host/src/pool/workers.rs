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
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use spinio_sys::{Errno, linux};

use super::{IdleTask, NoIdleTask, WorkerPool};
use crate::copy_threads::CopyThreads;
use crate::lock::lock;
use crate::processors::usable;
use crate::settings::{Settings, StorageEngine};
use crate::shares::ShareKey;
use crate::storage_ring::StorageRing;
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

/// Processors from which on the ring is used: with fewer, the kernel thread that polls takes them from those that wait and
/// copy (bench `absent_reads`, 2 and 3 processors: 128 KiB to 8 MiB as fast as workers or slower; 4: faster up to 1 MiB).
const RING_PROCESSORS: usize = 4;

/// The share of the shadow workers that making and waking the ring takes. No device number has this bit.
const RING: ShareKey = 1 << 61;

/// Rings of a runtime: each has a kernel thread. Further storage is read by shadow workers.
const MAX_RINGS: usize = 4;

/// A ring, once it is made.
type LateRing = Arc<OnceLock<core::result::Result<Arc<StorageRing>, Refused>>>;

/// What the kernel said when it refused a ring.
#[derive(Clone, Copy, Debug)]
struct Refused {
    errno: Errno,
    at: Instant,
}

impl Refused {
    /// A shortage of descriptors or memory passes; anything else it would say again.
    fn may_pass(&self) -> bool {
        matches!(self.errno, Errno::MFILE | Errno::NFILE | Errno::NOMEM)
    }

    fn is_to_be_tried_again(&self) -> bool {
        self.may_pass() && self.at.elapsed() > TRY_AGAIN
    }
}

/// Between two tries to make a ring during a shortage.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// The rings, by storage; each is made in the background once a read could use it.
struct Rings {
    refused: Option<NoRing>,
    processors: usize,
    made: Mutex<Vec<(ShareKey, LateRing)>>,
}

impl Rings {
    fn new(engine: StorageEngine, processors: usize) -> Rings {
        let refused = match engine {
            StorageEngine::Auto if processors < RING_PROCESSORS => Some(NoRing::FewProcessors),
            StorageEngine::Workers => Some(NoRing::BySetting),
            StorageEngine::Auto | StorageEngine::Ring => None,
        };
        Rings { refused, processors, made: Mutex::default() }
    }

    /// What the kernel said when it refused one of these.
    fn refused(made: &[(ShareKey, LateRing)], counts: impl Fn(&Refused) -> bool) -> Option<NoRing> {
        let refused = made.iter().filter_map(|(_, ring)| ring.get()?.as_ref().err());
        refused.filter(|refused| counts(refused)).map(|refused| NoRing::Refused(refused.errno)).next()
    }
}

/// Why shadow workers make a read of storage, and not the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRing {
    /// `SPINIO_STORAGE_ENGINE=workers`.
    BySetting,
    /// Polling would take a processor that the program needs.
    FewProcessors,
    /// The kernel refused it.
    Refused(Errno),
    /// It does not exist yet, or its kernel thread sleeps.
    NotAwake,
    /// Reads of this file system wait in the kernel (io-wq) for a thread, and may wait for a server.
    FileSystem,
    /// The file is not in it yet, or there is no room.
    NotRegistered,
    /// Files of other storage were read first, and these have rings.
    OtherStorage,
}

impl std::fmt::Display for NoRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NoRing::BySetting => f.write_str("SPINIO_STORAGE_ENGINE=workers"),
            NoRing::FewProcessors => write!(f, "fewer than {RING_PROCESSORS} processors: polling would take one away"),
            NoRing::Refused(errno) => write!(f, "the kernel refuses io_uring with SQPOLL: {errno}"),
            NoRing::NotAwake => f.write_str("its kernel thread sleeps: the next read finds it awake"),
            NoRing::FileSystem => {
                f.write_str("not ext4, XFS or a block device: the kernel would leave such reads to threads of its own")
            }
            NoRing::NotRegistered => f.write_str("the file is not in it yet"),
            NoRing::OtherStorage => write!(f, "the {MAX_RINGS} storages that were read first have rings"),
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
    rings: Rings,
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
            rings: Rings::new(settings.storage_engine, processors),
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
    pub fn storage_ring(&self, key: ShareKey) -> core::result::Result<Arc<StorageRing>, NoRing> {
        if let Some(refused) = self.rings.refused {
            return Err(refused);
        }
        let mut made = lock(&self.rings.made);
        if let Some((_, ring)) = made.iter().find(|(storage, _)| *storage == key) {
            let ring = Arc::clone(ring);
            match ring.get() {
                Some(Ok(ring)) => {
                    drop(made);
                    self.wake_ring(ring);
                    return if ring.is_asleep() { Err(NoRing::NotAwake) } else { Ok(Arc::clone(ring)) };
                }
                Some(Err(refused)) if refused.is_to_be_tried_again() => {}
                Some(Err(refused)) => return Err(NoRing::Refused(refused.errno)),
                None => return Err(NoRing::NotAwake),
            }
        }
        made.retain(|(_, ring)| !matches!(ring.get(), Some(Err(refused)) if refused.is_to_be_tried_again()));
        if let Some(refused) = Rings::refused(&made, |refused| !refused.may_pass()) {
            return Err(refused);
        }
        if made.len() >= MAX_RINGS {
            return Err(NoRing::OtherStorage);
        }
        let shadow = self.shadow().ok_or(NoRing::Refused(Errno::NOSYS))?;
        let ring = LateRing::default();
        made.push((key, Arc::clone(&ring)));
        drop(made);
        let (sys, processors) = (self.sys, self.rings.processors);
        let close_queue = shadow.for_key(RING).close_queue();
        shadow.for_key(RING).spawn_detached(move || {
            let new = StorageRing::new(sys, close_queue, processors);
            let _ = ring.set(new.map(Arc::new).map_err(|errno| Refused { errno, at: Instant::now() }));
        });
        Err(NoRing::NotAwake)
    }

    /// Why there is no ring, as far as is known without a read; `None`: there is one, or there would be.
    pub fn ring_refusal(&self) -> Option<NoRing> {
        self.rings.refused.or_else(|| Rings::refused(&lock(&self.rings.made), |_| true))
    }

    /// Reads that the rings were given so far.
    pub fn ring_reads(&self) -> u64 {
        let made = lock(&self.rings.made);
        made.iter().filter_map(|(_, ring)| ring.get()?.as_ref().ok()).map(|ring| ring.reads()).sum()
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
        if ring.needs_wake()
            && let Some(shadow) = self.shadow()
        {
            let ring = Arc::clone(ring);
            shadow.for_key(RING).spawn_detached(move || ring.wake());
        }
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
