//! What the threads of a runtime share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use spinio_device::{Device, DeviceId};
use spinio_plan::{Reason, Route};

use spinio_sys::linux;

use crate::crew::{Crew, Idle, Tidy};
use crate::file::ahead::ReadAhead;
use crate::file::streams::Streams;
use crate::file::{File, Files};
use crate::hold::Holds;
use crate::kernel::Kernel;
use crate::lock::lock;
use crate::model::Models;
use crate::own::{Leases, Uploads};
use crate::pins::{Pins, QUIET};
use crate::read::WaitBuffers;
use crate::staging::Staging;
use crate::stats::{self, Gauge};
use crate::{Settings, Target};

/// Threads a request from which copying beats registering.
const MANY: usize = 8;

/// Reads of storage in flight at once, however few the processors are.
pub(crate) const KEEPERS: usize = 8;

/// Whether storage may DMA into a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The canary read matched.
    Trusted,
    /// The kernel says that it cannot.
    Unreachable,
    /// The canary read did not match.
    Untrusted,
}

/// What keepers do while there is no work: let files go.
struct KeepFiles(Weak<Core>);

impl Tidy for KeepFiles {
    fn nap(&self) -> Option<Duration> {
        let core = self.0.upgrade()?;
        (!core.files.is_empty()).then_some(Duration::from_secs(1))
    }

    fn tidy(&self) {
        if let Some(core) = self.0.upgrade() {
            core.files.tidy();
            core.publish();
        }
    }
}

/// What mates do: give pins back, which takes the driver.
struct KeepPins(Weak<Core>);

impl Tidy for KeepPins {
    fn nap(&self) -> Option<Duration> {
        let core = self.0.upgrade()?;
        // Told before it is looked at: who pins from here on sees that nobody watches, and wakes somebody.
        core.watched.store(false, SeqCst);
        let wanted = !core.pins.is_empty();
        core.watched.store(wanted, SeqCst);
        wanted.then(|| if core.pins.is_hurried() { Duration::ZERO } else { QUIET })
    }

    fn tidy(&self) {
        // Giving back would stop the transfers of a request under way; it does so itself if it must.
        if let Some(core) = self.0.upgrade()
            && (core.requests() == 0 || core.pins.is_hurried())
        {
            core.pins.tidy();
            core.publish();
        }
    }
}

impl Verdict {
    /// Whether P2P may be used, or why not.
    pub(crate) fn allows(self) -> Result<(), Reason> {
        match self {
            Verdict::Trusted => Ok(()),
            Verdict::Unreachable => Err(Reason::P2pUnreachable),
            Verdict::Untrusted => Err(Reason::P2pUntrusted),
        }
    }
}

/// Shared by the callers, the helpers and the jobs of one runtime.
pub(crate) struct Core {
    pub(crate) kernel: &'static dyn Kernel,
    pub(crate) settings: Settings,
    pub(crate) files: Files,
    pub(crate) streams: Streams,
    pub(crate) ahead: Arc<ReadAhead>,
    pub(crate) pins: Pins,
    pub(crate) leases: Arc<Leases>,
    pub(crate) holds: Holds,
    pub(crate) models: Models,
    /// Some mate sleeps only until the pins have been quiet for long enough.
    watched: AtomicBool,
    stats: OnceLock<stats::Home>,
    keepers: OnceLock<Option<Crew>>,
    mates: OnceLock<Option<Crew>>,
    batchers: OnceLock<Option<Crew>>,
    readers: OnceLock<Option<Crew>>,
    /// The kernel offers no ring of asynchronous reads.
    pub(crate) ring_refused: AtomicBool,
    /// No thread gets at the descriptors of another one's table.
    pub(crate) sharing_refused: AtomicBool,
    stagings: Mutex<Vec<Arc<Staging>>>,
    /// Those of moves that wait for a queue of the program's.
    queued: Mutex<Vec<Arc<Staging>>>,
    pub(crate) uploads: Uploads,
    pub(crate) wait_buffers: WaitBuffers,
    verdicts: Mutex<HashMap<(u64, DeviceId), Verdict>>,
    threads: usize,
    me: Weak<Core>,
    requests: AtomicUsize,
    salt: AtomicU64,
    look: Duration,
}

/// A large request under way.
pub(crate) struct UnderWay<'a>(&'a Core);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Relaxed);
    }
}

impl Core {
    pub(crate) fn new(settings: Settings, kernel: &'static dyn Kernel) -> Arc<Core> {
        let processors = linux::processors();
        let threads = match settings.threads {
            0 => (processors / 4).clamp(2, 4),
            n => n,
        };
        Arc::new_cyclic(|me| Core {
            kernel,
            streams: Streams::new(&settings),
            ahead: ReadAhead::new(&settings),
            settings,
            files: Files::new(),
            pins: Pins::new(),
            leases: Arc::default(),
            holds: Holds::new(),
            models: Models::default(),
            watched: AtomicBool::new(false),
            stats: OnceLock::new(),
            keepers: OnceLock::new(),
            mates: OnceLock::new(),
            batchers: OnceLock::new(),
            readers: OnceLock::new(),
            ring_refused: AtomicBool::new(false),
            sharing_refused: AtomicBool::new(false),
            stagings: Mutex::default(),
            queued: Mutex::default(),
            uploads: Uploads::default(),
            wait_buffers: WaitBuffers::default(),
            verdicts: Mutex::default(),
            threads,
            me: me.clone(),
            requests: AtomicUsize::new(0),
            salt: AtomicU64::new(0),
            // Waking a sleeper costs more than copying 64 KiB; but where the processors are few, they have better to do.
            look: Duration::from_micros(if processors >= 8 { 60 } else { 0 }),
        })
    }

    /// Itself, for what outlives the call.
    pub(crate) fn me(&self) -> Option<Arc<Core>> {
        self.me.upgrade()
    }

    /// Threads that copy for one request, the caller included; keepers are not counted.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// How long to look for something that is about to happen before sleeping.
    pub(crate) fn look(&self) -> Duration {
        self.look
    }

    /// Counts a large request for as long as the answer lives.
    pub(crate) fn begin_request(&self) -> UnderWay<'_> {
        self.requests.fetch_add(1, Relaxed);
        UnderWay(self)
    }

    /// Another number at every call.
    pub(crate) fn salt(&self) -> u64 {
        self.salt.fetch_add(1, Relaxed)
    }

    /// Large requests under way.
    pub(crate) fn requests(&self) -> usize {
        self.requests.load(Relaxed)
    }

    /// Whether registering pages would pay now.
    pub(crate) fn may_register(&self) -> Result<(), Reason> {
        if !self.settings.allows(Route::Dma) {
            return Err(Reason::Forced);
        }
        // The driver registers for one thread at a time, and copies of others wait meanwhile.
        if self.requests() > 1 {
            return Err(Reason::Crowded);
        }
        // Registering moves about 36 GB/s in the long run, a copying thread 6: from here on copying is faster.
        if self.threads >= MANY {
            return Err(Reason::ManyThreads);
        }
        if self.pins.stalls() { Err(Reason::PinStalls) } else { Ok(()) }
    }

    /// Makes the table of the counters where the settings say. On the program's thread, before anybody counts: a helper
    /// opens its file, and must not wait for itself. `process`: for the runtime of the process, not one of many.
    pub(crate) fn open_stats(&self, process: bool) {
        let place = stats::Place::of(&self.settings, process);
        self.stats.get_or_init(|| stats::Home::new(place, self.settings.trace, || self.keepers()));
    }

    /// The counters.
    pub(crate) fn stats(&self) -> &stats::Stats {
        self.stats.get_or_init(|| stats::Home::new(stats::Place::Memory, false, || None)).stats()
    }

    /// Shows what is held now to those who read the counters.
    pub(crate) fn publish(&self) {
        let stats = self.stats();
        stats.set(Gauge::Pinned, self.pins.bytes());
        let bytes = |rings: &Mutex<Vec<Arc<Staging>>>| lock(rings).iter().map(|s| s.total()).sum::<u64>();
        stats.set(Gauge::Staging, bytes(&self.stagings) + bytes(&self.queued));
        stats.set(Gauge::KeptFiles, self.files.count());
        let (files, bytes) = self.holds.totals();
        stats.set(Gauge::HeldFiles, files);
        stats.set(Gauge::HeldBytes, bytes);
    }

    /// Sees to it that pins which are left are given back soon, although every mate may be asleep.
    pub(crate) fn watch_pins(&self) {
        if !self.pins.is_empty()
            && !self.watched.load(SeqCst)
            && let Some(mates) = self.mates()
        {
            mates.nudge();
        }
    }

    /// Sees what was forgotten go: twins are closed and pins given back by helpers, at once, and waited for a little.
    pub(crate) fn part(&self, limit: Duration) {
        let begun = Instant::now();
        if !self.pins.is_empty()
            && let Some(mates) = self.mates()
        {
            self.pins.hurry();
            mates.nudge();
            while !self.pins.is_empty() && begun.elapsed() < limit {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        if let Some(keepers) = self.keepers() {
            keepers.await_burials(limit.saturating_sub(begun.elapsed()));
        }
    }

    /// The threads that hold our descriptors, made at the first request that needs them.
    pub(crate) fn keepers(&self) -> Option<&Crew> {
        self.keepers.get_or_init(|| Crew::keepers(self.kernel, KEEPERS, self.look, KeepFiles(self.me.clone()))).as_ref()
    }

    /// The threads that copy beside the caller, likewise. First asked for by a thread of the program.
    pub(crate) fn mates(&self) -> Option<&Crew> {
        if linux::in_private_table() {
            return self.mates.get()?.as_ref();
        }
        self.mates
            .get_or_init(|| Crew::mates(self.kernel, self.threads - 1, self.look, KeepPins(self.me.clone())))
            .as_ref()
    }

    /// Threads that read the pieces of one batch, the caller included.
    pub(crate) fn batch_threads(&self) -> usize {
        match self.settings.batch_threads {
            0 => (linux::processors() * 3 / 4).clamp(2, 12),
            n => n,
        }
    }

    /// The threads that read the pieces of batches beside the caller, likewise.
    pub(crate) fn batchers(&self) -> Option<&Crew> {
        if linux::in_private_table() {
            return self.batchers.get()?.as_ref();
        }
        let made = || Crew::mates(self.kernel, self.batch_threads() - 1, self.look, Idle);
        self.batchers.get_or_init(made).as_ref()
    }

    /// The threads that read the pieces of large batches, and do nothing else.
    pub(crate) fn readers(&self) -> Option<&Crew> {
        let made = || Crew::readers(self.kernel, self.batch_threads() - 1, self.look);
        self.readers.get_or_init(made).as_ref()
    }

    /// The staging ring of a device.
    pub(crate) fn staging(&self, device: &'static dyn Device) -> Arc<Staging> {
        self.ring(&self.stagings, device)
    }

    /// The ring of what waits for a queue of the program's, which may wait for the program.
    pub(crate) fn staging_of_queued(&self, device: &'static dyn Device) -> Arc<Staging> {
        self.ring(&self.queued, device)
    }

    /// Bytes that both rings of a device have.
    pub(crate) fn staging_bytes(&self, device: &'static dyn Device) -> u64 {
        self.staging(device).total() + self.staging_of_queued(device).total()
    }

    fn ring(&self, rings: &Mutex<Vec<Arc<Staging>>>, device: &'static dyn Device) -> Arc<Staging> {
        let mut stagings = lock(rings);
        // By object, not by number: after a device reset a new object stands for the same device.
        if let Some(found) = stagings.iter().find(|s| core::ptr::addr_eq(s.device(), device)) {
            return Arc::clone(found);
        }
        let made = Arc::new(Staging::new(device, self.settings.staging));
        stagings.push(Arc::clone(&made));
        made
    }

    /// The route of cached bytes where nothing better can be had.
    pub(crate) fn cache_route(&self, to: Target) -> Route {
        if to.allocation.device.abilities().copies { Route::Copy } else { Route::Store }
    }

    /// Whether storage of the file may DMA into the device, if that is known.
    pub(crate) fn verdict(&self, file: &File, device: &dyn Device) -> Option<Verdict> {
        lock(&self.verdicts).get(&(file.storage, device.id())).copied()
    }

    /// Why P2P from the file's storage was refused before, to whichever device.
    pub(crate) fn known_refusal(&self, file: &File) -> Option<Reason> {
        let verdicts = lock(&self.verdicts);
        let mut of_file = verdicts.iter().filter(|((storage, _), _)| *storage == file.storage);
        of_file.find_map(|(_, verdict)| verdict.allows().err())
    }

    /// Remembers it for the file system and the device.
    pub(crate) fn set_verdict(&self, file: &File, device: &dyn Device, verdict: Verdict) {
        lock(&self.verdicts).insert((file.storage, device.id()), verdict);
    }
}
