//! Holding a file: its pages stay registered with the device, for reads that come again and again.
//!
//! ```text
//!   hold(fd) ── a lease, a seal ... says that nobody writes (safety.rs)
//!     │
//!     ├─ for each device: a mapping of the whole file, registered piece by piece         registered.rs
//!     │
//!     ├─ read      DMA straight out of the pages: no registering, no copy                read.rs
//!     ├─ batch     a kernel gathers the pieces straight out of the pages                 batch/
//!     └─ map       an address through which the program's own kernels read               map.rs
//!
//!   somebody opens it for writing ──> the kernel makes him wait, and tells the watcher (watch.rs)
//!     users leave ─ pins go ─ the lease goes back ──> he goes on
//! ```
//!
//! Registered pages cannot be reclaimed, and when a file is written around them, or truncated, they are orphans that show
//! the past. So a file is held only while something says that nobody writes it, and that is asked before each use and
//! after it: bytes that were read when it did not hold any more are read again on another route.
//!
//! Absent pages are read in as the file is registered: a held file is in memory, all of it, and `SPINIO_PIN_LIMIT` bounds how
//! much that may be.
//!
//! A forked child has no holds: it makes a runtime of its own. Its copy of the program's descriptors has no part in the
//! lease, which belongs to a descriptor of ours.
//!
//! Known flaws:
//! - Giving pages back waits for everything under way in the context (CUDA), so a kernel of the program that runs on
//!   makes a writer wait as long, up to the time at which the kernel breaks the lease by force.
//! - Who opens the file for writing with O_NONBLOCK gets EAGAIN meanwhile, as with any lease.
//! - A program that closes its last descriptor of a held file by a way that no hook sees keeps it held.

mod map;
mod read;
mod registered;
mod safety;
mod users;
mod watch;

#[cfg(all(test, loom))]
mod interleavings;

use std::sync::atomic::{
    AtomicI32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, Mutex};

use spinio_device::Device;
use spinio_sys::linux::{self, Fd, FileKind};

pub use self::map::DeviceMapping;
pub use self::registered::PinnedPages;
pub use self::safety::PinError;

use self::map::DeviceMappings;
use self::safety::WriteExclusion;
use self::users::RefGate;
use self::watch::LeaseWatcher;
use spinio_files::Files;
use spinio_files::{FileState, ResidencyAccess};
use spinio_host::lock;

/// A held file.
pub(crate) struct PinnedFile {
    key: (u64, u64),
    /// The descriptor it was held by.
    fd: Fd,
    file: Arc<FileState>,
    pub(crate) size: u64,
    exclusion: WriteExclusion,
    /// The watch that tells of changes; 0: none.
    inotify_wd: AtomicI32,
    gate: RefGate<PinnedPages>,
    /// One device at a time.
    pin_lock: Mutex<()>,
}

/// Somebody who uses the pins: they stay as long.
pub struct PinGuard {
    file: Arc<PinnedFile>,
    /// The registered pages.
    pub pages: Arc<PinnedPages>,
    is_mapping: bool,
}

impl PinGuard {
    /// Length of the file.
    pub fn size(&self) -> u64 {
        self.file.size
    }

    /// Whether what was read until now is what the file holds. `fd`: a descriptor of it, of this thread.
    pub fn is_still_valid(&self, files: &Arc<Files>, fd: Fd) -> bool {
        self.file.exclusion.still_excluded(files, fd)
    }

    /// Counts as a map from now on.
    fn mark_mapping(&mut self) {
        self.is_mapping = true;
        self.file.gate.mark_mapping();
    }

    /// Whether the pages are wanted back.
    pub fn is_closing(&self) -> bool {
        self.file.gate.is_closing()
    }
}

impl Drop for PinGuard {
    fn drop(&mut self) {
        self.file.gate.release(self.is_mapping);
    }
}

impl PinnedFile {
    /// The number of the lease in the keepers' table.
    fn lease(&self) -> Option<Fd> {
        match &self.exclusion {
            WriteExclusion::Lease(fd, _) => Some(fd.get()),
            _ => None,
        }
    }

    /// Waits until nobody uses the pins, and gives them back; how many bytes. By a thread that may call the device.
    fn unpin_all(&self) -> u64 {
        let mut bytes = 0;
        for pages in self.gate.wait_and_take() {
            bytes += pages.bytes();
            pages.unpin();
        }
        self.gate.set_unpinned();
        bytes
    }
}

/// The held files of a runtime.
pub struct PinnedFiles {
    watcher: Arc<LeaseWatcher>,
    mappings: DeviceMappings,
    files: Arc<Files>,
    /// Bytes that may be registered.
    limit: u64,
}

impl PinnedFiles {
    pub fn new(files: Arc<Files>, limit: u64) -> PinnedFiles {
        PinnedFiles { watcher: Arc::default(), mappings: DeviceMappings::default(), files, limit }
    }

    /// Whether there is none: one load.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.watcher.count.load(Relaxed) == 0
    }

    /// How many files, and how many bytes registered.
    pub fn totals(&self) -> (u64, u64) {
        (self.watcher.count.load(Relaxed) as u64, self.watcher.bytes.load(Relaxed))
    }

    fn find(&self, key: (u64, u64)) -> Option<Arc<PinnedFile>> {
        lock(&self.watcher.files).iter().find(|h| h.key == key).map(Arc::clone)
    }

    /// Whether large reads of a file of this size come out of pins, as far as that can be told without a read.
    pub fn can_serve(&self, key: (u64, u64), size: u64, device: &dyn Device) -> bool {
        let pinned = if self.is_empty() { None } else { self.find(key) };
        device.capabilities().can_pin && pinned.is_some_and(|file| file.size == size && !file.gate.is_closing())
    }

    /// The pins of a held file on a device, made now if need be; `None` if it is not held, or not to be trusted.
    /// `fd`: a descriptor of the file, of this thread.
    pub fn acquire(&self, fd: Fd, key: (u64, u64), device: &'static dyn Device) -> Option<PinGuard> {
        if self.is_empty() {
            return None;
        }
        self.acquire_pinned(&self.files, fd, self.find(key)?, device).ok()
    }

    fn acquire_pinned(
        &self,
        files: &Arc<Files>,
        fd: Fd,
        file: Arc<PinnedFile>,
        device: &'static dyn Device,
    ) -> Result<PinGuard, PinError> {
        if !file.gate.acquire() {
            return Err(PinError::NotPinned);
        }
        // From here on the pins stay, and leaving is a drop.
        let unref = UnrefOnDrop(&file);
        if !file.exclusion.still_excluded(files, fd) {
            self.watcher.begin_unpin(&file);
            return Err(PinError::NotPinned);
        }
        let pages = self.pages_on(files, &file, device)?;
        std::mem::forget(unref);
        Ok(PinGuard { file, pages, is_mapping: false })
    }

    /// The pins on a device. The caller is counted as a user.
    fn pages_on(
        &self,
        files: &Arc<Files>,
        file: &Arc<PinnedFile>,
        device: &'static dyn Device,
    ) -> Result<Arc<PinnedPages>, PinError> {
        let find = || file.gate.find(|pages| core::ptr::addr_eq(pages.device, device));
        if let Some(pages) = find() {
            return Ok(pages);
        }
        let _pin_lock = lock(&file.pin_lock);
        if let Some(pages) = find() {
            return Ok(pages);
        }
        if !device.capabilities().can_pin {
            return Err(PinError::NoDevice);
        }
        // Counted before they are registered: others may be registering too.
        let reservation = BudgetReservation::new(&self.watcher.bytes, file.size, self.limit)?;
        let pages = Arc::new(PinnedPages::register(files, &file.file, file.size, device)?);
        reservation.commit(pages.bytes());
        file.gate.add(Arc::clone(&pages));
        Ok(pages)
    }

    /// Holds the file of a descriptor; once more if it is held.
    fn hold_file(&self, files: &Arc<Files>, fd: Fd, device: Option<&'static dyn Device>) -> Result<(), PinError> {
        let stat = files.sys().fstat(fd).map_err(PinError::BadFd)?;
        if stat.kind != FileKind::Regular || stat.size == 0 {
            return Err(PinError::NotRegularFile);
        }
        let key = (stat.dev, stat.ino);
        let workers = files.shadow_workers().ok_or(PinError::NoWorkers)?;
        let watcher_tid = self.watcher.start(files).ok_or(PinError::NoWorkers)?;
        let file = loop {
            match self.find(key) {
                None => break self.pin_new(files, workers, fd, stat, watcher_tid)?,
                Some(file) if file.gate.add_ref() => break file,
                // It is going: somebody waits to write it, which its end will show, or the descriptor that it was held by
                // was closed. A map may be this very thread's.
                Some(file) if file.gate.wait_released_unless_mapped() => {}
                Some(_) => return Err(PinError::OpenForWriting),
            }
        };
        if let Some(device) = device
            && let Err(refused) = self.acquire_pinned(files, fd, Arc::clone(&file), device).map(drop)
        {
            self.unpin(&file, false);
            // It was held a moment ago: whoever ended that has opened it for writing.
            return Err(if refused == PinError::NotPinned { PinError::OpenForWriting } else { refused });
        }
        Ok(())
    }

    fn pin_new(
        &self,
        files: &Arc<Files>,
        workers: &spinio_host::pool::WorkerPool,
        fd: Fd,
        stat: linux::Stat,
        watcher_tid: u32,
    ) -> Result<Arc<PinnedFile>, PinError> {
        let key = (stat.dev, stat.ino);
        let file = files.get(fd, stat).map_err(|reason| match reason {
            spinio_plan::Reason::NoWorkers => PinError::NoWorkers,
            _ => PinError::NotReopened,
        })?;
        // Of the two that have no mapping of their own one keeps its files in memory; the other shows old ones.
        if !file.is_mappable() && file.residency_access != ResidencyAccess::InMemory {
            return Err(PinError::NotMappable);
        }
        if stat.size > self.limit {
            return Err(PinError::LimitExceeded);
        }
        let exclusion = WriteExclusion::establish(files, fd, key, watcher_tid)?;
        // Only now does it stay as long as it is.
        let size = files.sys().fstat(fd).map_err(PinError::BadFd)?.size;
        let (inotify_wd, gate, pin_lock) = (AtomicI32::new(0), RefGate::new(), Mutex::new(()));
        let pinned = Arc::new(PinnedFile { key, fd, file, size, exclusion, inotify_wd, gate, pin_lock });
        let mut list = lock(&self.watcher.files);
        list.push(Arc::clone(&pinned));
        self.watcher.count.store(list.len(), Release);
        drop(list);
        // A break that came before the hold was in the list was told to a watcher who did not find it.
        self.watcher.wake_watcher();
        self.watcher.watch_inode(files, &pinned);
        // Cut off before anybody would have told.
        if files.sys().fstat(fd).map_or(0, |stat| stat.size) != size {
            self.watcher.begin_unpin(&pinned);
            return Err(PinError::OpenForWriting);
        }
        Ok(pinned)
    }

    /// One who asked for it needs it no more; the last one's pins go. `wait`: until they are gone.
    fn unpin(&self, file: &Arc<PinnedFile>, wait: bool) {
        let (last, mapped) = file.gate.unref();
        if last {
            self.watcher.begin_unpin(file);
            // A map may be this very thread's, and go later.
            if wait && !mapped {
                file.gate.wait_released();
            }
        }
    }

    /// The program closes the descriptor that a file was held by.
    pub fn on_close(&self, fd: Fd, key: (u64, u64)) {
        if let Some(hold) = self.find(key).filter(|h| h.fd == fd) {
            self.watcher.begin_unpin(&hold);
        }
    }

    /// The program closes descriptors by the range.
    pub fn on_close_range(&self, first: u32, last: u32) {
        let files = lock(&self.watcher.files).clone();
        let closed = files.iter().filter(|file| u32::try_from(file.fd).is_ok_and(|fd| (first..=last).contains(&fd)));
        closed.for_each(|file| self.watcher.begin_unpin(file));
    }
}

impl Drop for PinnedFiles {
    fn drop(&mut self) {
        self.mappings.clear();
        self.watcher.shut_down();
    }
}

/// Bytes that are counted against what may be held until it is known how many are registered: none, where that fails.
struct BudgetReservation<'a>(&'a AtomicU64, u64);

impl<'a> BudgetReservation<'a> {
    fn new(reserved: &'a AtomicU64, size: u64, limit: u64) -> Result<BudgetReservation<'a>, PinError> {
        let add = |held: u64| held.checked_add(size).filter(|all| *all <= limit);
        reserved.fetch_update(Relaxed, Relaxed, add).map_err(|_| PinError::LimitExceeded)?;
        Ok(BudgetReservation(reserved, size))
    }

    /// So many are registered.
    fn commit(mut self, bytes: u64) {
        // At once: nobody who looks meanwhile may find both.
        self.0.fetch_add(bytes.wrapping_sub(self.1), Relaxed);
        self.1 = 0;
    }
}

impl Drop for BudgetReservation<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Relaxed);
    }
}

/// Leaves a hold that could not be entered after all.
struct UnrefOnDrop<'a>(&'a Arc<PinnedFile>);

impl Drop for UnrefOnDrop<'_> {
    fn drop(&mut self) {
        self.0.gate.release(false);
    }
}

impl PinnedFiles {
    /// Holds the file of a descriptor: its pages are registered with `device` now (with any other at its first read), and
    /// stay so until [`Holds::release`], or until somebody opens it for writing. May be asked for more than once.
    pub fn pin(&self, fd: Fd, device: Option<&'static dyn Device>) -> Result<(), PinError> {
        self.hold_file(&self.files, fd, device)
    }

    /// Lets the file go, once for each time that it was held; after the last its pages are given
    /// back when this returns, unless it is mapped: then when it is unmapped.
    pub fn unpin_file(&self, fd: Fd) -> Result<(), PinError> {
        let stat = self.files.sys().fstat(fd).map_err(PinError::BadFd)?;
        let file = self.find((stat.dev, stat.ino)).ok_or(PinError::NotPinned)?;
        self.unpin(&file, true);
        Ok(())
    }

    /// Whether the file is held, and nobody wants it back.
    pub fn is_pinned(&self, fd: Fd) -> bool {
        let Ok(stat) = self.files.sys().fstat(fd) else { return false };
        self.find((stat.dev, stat.ino)).is_some_and(|file| !file.gate.is_closing())
    }

    /// Bytes of held files that are registered now.
    pub fn pinned_bytes(&self) -> u64 {
        self.watcher.bytes.load(Acquire)
    }
}
