//! The rings of a runtime: which storage has one, and why other reads of storage are left to shadow workers.
//!
//! ```text
//!   first read of a storage ──> a shadow worker makes its ring, while shadow workers read
//!   read, ring asleep       ──> a shadow worker wakes it, likewise
//!   read, ring awake        ──> the ring (storage_ring.rs)
//!   refused by the kernel   ──> shadow workers from then on; after a shortage it is tried again
//! ```

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use spinio_sys::Errno;

use crate::lock;
use crate::pool::WorkerPool;
use crate::settings::StorageEngine;
use crate::shares::ShareKey;
use crate::storage_ring::StorageRing;
use crate::syscalls::Syscalls;

/// Processors from which on the ring is used: with fewer, the kernel thread that polls takes them from those that wait and
/// copy (bench `absent_reads`, 2 and 3 processors: 128 KiB to 8 MiB as fast as workers or slower; 4: faster up to 1 MiB).
const RING_PROCESSORS: usize = 4;

/// The share of the shadow workers that making and waking rings takes. No device number has this bit.
pub(crate) const RING: ShareKey = 1 << 61;

/// Rings of a runtime: each has a kernel thread. Further storage is read by shadow workers.
const MAX_RINGS: usize = 4;

/// A ring, once it is made.
type LateRing = Arc<OnceLock<Result<Arc<StorageRing>, Refused>>>;

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
pub(crate) struct StorageRings {
    refused: Option<NoRing>,
    processors: usize,
    made: Mutex<Vec<(ShareKey, LateRing)>>,
}

impl StorageRings {
    /// No ring yet.
    pub(crate) fn new(engine: StorageEngine, processors: usize) -> StorageRings {
        let refused = match engine {
            StorageEngine::Auto if processors < RING_PROCESSORS => Some(NoRing::FewProcessors),
            StorageEngine::Workers => Some(NoRing::BySetting),
            StorageEngine::Auto | StorageEngine::Ring => None,
        };
        StorageRings { refused, processors, made: Mutex::default() }
    }

    /// The ring of the file system or block device with this key, if its kernel thread is awake; otherwise a worker of
    /// `shadow` makes or wakes it, for a later read.
    pub(crate) fn get<'a>(
        &self,
        key: ShareKey,
        sys: &'static dyn Syscalls,
        shadow: impl FnOnce() -> Option<&'a WorkerPool>,
    ) -> Result<Arc<StorageRing>, NoRing> {
        if let Some(refused) = self.refused {
            return Err(refused);
        }
        let mut made = lock(&self.made);
        if let Some((_, ring)) = made.iter().find(|(storage, _)| *storage == key) {
            let ring = Arc::clone(ring);
            match ring.get() {
                Some(Ok(ring)) => {
                    drop(made);
                    wake(ring, shadow);
                    return if ring.is_asleep() { Err(NoRing::NotAwake) } else { Ok(Arc::clone(ring)) };
                }
                Some(Err(refused)) if refused.is_to_be_tried_again() => {}
                Some(Err(refused)) => return Err(NoRing::Refused(refused.errno)),
                None => return Err(NoRing::NotAwake),
            }
        }
        made.retain(|(_, ring)| !matches!(ring.get(), Some(Err(refused)) if refused.is_to_be_tried_again()));
        if let Some(refused) = Self::refused(&made, |refused| !refused.may_pass()) {
            return Err(refused);
        }
        if made.len() >= MAX_RINGS {
            return Err(NoRing::OtherStorage);
        }
        let shadow = shadow().ok_or(NoRing::Refused(Errno::NOSYS))?.for_key(RING);
        let ring = LateRing::default();
        made.push((key, Arc::clone(&ring)));
        drop(made);
        let (processors, close_queue) = (self.processors, shadow.close_queue());
        shadow.spawn_detached(move || {
            let new = StorageRing::new(sys, close_queue, processors);
            let _ = ring.set(new.map(Arc::new).map_err(|errno| Refused { errno, at: Instant::now() }));
        });
        Err(NoRing::NotAwake)
    }

    /// Why there is no ring, as far as is known without a read; `None`: there is one, or there would be.
    pub(crate) fn refusal(&self) -> Option<NoRing> {
        self.refused.or_else(|| Self::refused(&lock(&self.made), |_| true))
    }

    /// Reads that the rings were given so far.
    pub(crate) fn reads(&self) -> u64 {
        let made = lock(&self.made);
        made.iter().filter_map(|(_, ring)| ring.get()?.as_ref().ok()).map(|ring| ring.reads()).sum()
    }

    /// What the kernel said when it refused one of these.
    fn refused(made: &[(ShareKey, LateRing)], counts: impl Fn(&Refused) -> bool) -> Option<NoRing> {
        let refused = made.iter().filter_map(|(_, ring)| ring.get()?.as_ref().err());
        refused.filter(|refused| counts(refused)).map(|refused| NoRing::Refused(refused.errno)).next()
    }
}

/// Has a worker of `shadow` wake the kernel thread of a ring, if it sleeps.
pub(crate) fn wake<'a>(ring: &Arc<StorageRing>, shadow: impl FnOnce() -> Option<&'a WorkerPool>) {
    if ring.needs_wake()
        && let Some(shadow) = shadow()
    {
        let ring = Arc::clone(ring);
        shadow.for_key(RING).spawn_detached(move || ring.wake());
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
