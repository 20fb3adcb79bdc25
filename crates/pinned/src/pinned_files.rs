//! The pinned files of a runtime: pin, use, map, unpin.

use std::sync::atomic::{
    AtomicI32, AtomicU64,
    Ordering::{Acquire, Relaxed},
};
use std::sync::{Arc, Mutex};

use spinio_device::Device;
use spinio_files::{Files, ResidencyAccess};
use spinio_host::lock;
use spinio_host::pool::WorkerPool;
use spinio_plan::Reason;
use spinio_sys::linux::{Fd, FileKey, FileKind, Stat};

use crate::device_mapping::{DeviceMapping, DeviceMappings};
use crate::error::PinError;
use crate::pinned_file::{PinGuard, PinnedFile};
use crate::pinned_pages::PinnedPages;
use crate::ref_gate::RefGate;
use crate::unpinner::Unpinner;
use crate::write_exclusion::WriteExclusion;

/// The pinned files of a runtime.
pub struct PinnedFiles {
    unpinner: Arc<Unpinner>,
    mappings: DeviceMappings,
    files: Arc<Files>,
    /// Bytes that may be registered.
    limit: u64,
    /// The generation of the file that was pinned last.
    generation: AtomicU64,
}

impl PinnedFiles {
    /// None yet; up to `limit` bytes may be registered.
    pub fn new(files: Arc<Files>, limit: u64) -> PinnedFiles {
        let (unpinner, mappings, generation) = (Arc::default(), DeviceMappings::default(), AtomicU64::new(0));
        PinnedFiles { unpinner, mappings, files, limit, generation }
    }

    /// Whether there is none: one load.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.unpinner.files.count() == 0
    }

    /// Number of pinned files, and of bytes registered.
    pub fn totals(&self) -> (u64, u64) {
        (self.unpinner.files.count() as u64, self.unpinner.bytes.load(Relaxed))
    }

    /// Bytes of pinned files that are registered now.
    pub fn pinned_bytes(&self) -> u64 {
        self.unpinner.bytes.load(Acquire)
    }

    fn find(&self, key: FileKey) -> Option<Arc<PinnedFile>> {
        self.unpinner.files.find(|file| file.key == key)
    }
}

/// Uses.
impl PinnedFiles {
    /// Whether large reads of a file of this size use its pins, as far as can be determined without a read.
    pub fn can_serve(&self, key: FileKey, size: u64, device: &dyn Device) -> bool {
        let pinned = if self.is_empty() { None } else { self.find(key) };
        device.capabilities().can_pin && pinned.is_some_and(|file| file.size == size && !file.gate.is_closing())
    }

    /// The pins of a file on a device, registered now if needed; `None` if it is not pinned, or writers are no longer
    /// excluded. `fd`: a descriptor of the file, of this thread.
    pub fn acquire(&self, fd: Fd, key: FileKey, device: &'static dyn Device) -> Option<PinGuard> {
        if self.is_empty() {
            return None;
        }
        self.acquire_pinned(fd, self.find(key)?, device).ok()
    }

    fn acquire_pinned(&self, fd: Fd, file: Arc<PinnedFile>, device: &'static dyn Device) -> Result<PinGuard, PinError> {
        if !file.gate.acquire() {
            return Err(PinError::NotPinned);
        }
        // From here on the pins stay, and a drop releases the gate.
        let release = ReleaseOnDrop(&file);
        if !file.exclusion.still_excluded(&self.files, fd) {
            file.gate.begin_closing();
            return Err(PinError::NotPinned);
        }
        let pages = self.pages_on(&file, device)?;
        std::mem::forget(release);
        Ok(PinGuard::new(file, pages))
    }

    /// The pins on a device. The caller has acquired the gate.
    fn pages_on(&self, file: &Arc<PinnedFile>, device: &'static dyn Device) -> Result<Arc<PinnedPages>, PinError> {
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
        // Reserved before they are registered: other threads may be registering too.
        let reservation = BudgetReservation::new(&self.unpinner.bytes, file.size, self.limit)?;
        let pages = Arc::new(PinnedPages::register(&self.files, &file.file, file.size, device)?);
        reservation.commit(pages.bytes());
        file.gate.add(Arc::clone(&pages));
        Ok(pages)
    }
}

/// Pin and unpin.
impl PinnedFiles {
    /// Pins the file of a descriptor: its pages are registered with `device` now (with any other device at its first
    /// read), and stay registered until [`PinnedFiles::unpin_file`], or until a process opens the file for writing. May
    /// be called more than once for a file. Returns the generation of the pins, for [`PinnedFiles::unpin_generation`].
    pub fn pin(&self, fd: Fd, device: Option<&'static dyn Device>) -> Result<u64, PinError> {
        let stat = self.files.sys().fstat(fd).map_err(PinError::BadFd)?;
        if stat.kind != FileKind::Regular || stat.size == 0 {
            return Err(PinError::NotRegularFile);
        }
        let key = stat.key();
        let workers = self.files.shadow_workers().ok_or(PinError::NoWorkers)?;
        let watcher_tid = self.unpinner.start(&self.files).ok_or(PinError::NoWorkers)?;
        let file = loop {
            match self.find(key) {
                None => break self.pin_new(workers, fd, stat, watcher_tid)?,
                Some(file) if file.gate.add_ref() => break file,
                // It is being unpinned: a process waits to write it, which is known once unpinning ends, or the
                // descriptor that it was pinned with was closed. A mapping may belong to this very thread.
                Some(file) if file.gate.wait_released_unless_mapped() => {}
                Some(_) => return Err(PinError::OpenForWriting),
            }
        };
        if let Some(device) = device
            && let Err(refused) = self.acquire_pinned(fd, Arc::clone(&file), device).map(drop)
        {
            self.unpin(&file, false);
            // It was pinned a moment ago: a process has opened it for writing since.
            return Err(if refused == PinError::NotPinned { PinError::OpenForWriting } else { refused });
        }
        Ok(file.generation)
    }

    fn pin_new(&self, workers: &WorkerPool, fd: Fd, stat: Stat, watcher_tid: u32) -> Result<Arc<PinnedFile>, PinError> {
        let (files, key) = (&self.files, stat.key());
        let file = files.get(fd, stat).map_err(|reason| match reason {
            Reason::NoWorkers => PinError::NoWorkers,
            _ => PinError::NotReopened,
        })?;
        // There are two kinds of file without mappings of their own. One keeps its files in memory; a mapping of the
        // other shows old bytes.
        if !file.is_mappable() && file.residency_access != ResidencyAccess::InMemory {
            return Err(PinError::NotMappable);
        }
        if stat.size > self.limit {
            return Err(PinError::LimitExceeded);
        }
        let exclusion = WriteExclusion::establish(files, workers, fd, key, watcher_tid)?;
        // The length is constant only from now on.
        let size = files.sys().fstat(fd).map_err(PinError::BadFd)?.size;
        let generation = 1 + self.generation.fetch_add(1, Relaxed);
        let (inotify_wd, gate, pin_lock) =
            (AtomicI32::new(0), RefGate::new(Arc::clone(&self.unpinner.signal)), Mutex::new(()));
        let pinned = Arc::new(PinnedFile { key, generation, fd, file, size, exclusion, inotify_wd, gate, pin_lock });
        self.unpinner.files.add(Arc::clone(&pinned));
        // A lease break before the file was in the list was signalled to a watcher that did not find the file.
        self.unpinner.watcher.wake();
        self.unpinner.watch_inode(files, &pinned, watcher_tid);
        // Truncated before inotify could report it.
        if files.sys().fstat(fd).map_or(0, |stat| stat.size) != size {
            pinned.gate.begin_closing();
            return Err(PinError::OpenForWriting);
        }
        Ok(pinned)
    }

    /// Unpins the file, once for each time that it was pinned. After the last its pages are unpinned when this returns,
    /// or when it is unmapped, if it is mapped.
    pub fn unpin_file(&self, fd: Fd) -> Result<(), PinError> {
        self.unpin_if(fd, |_| true)
    }

    /// The same, unless the file was unpinned since, whether or not it was pinned again.
    pub fn unpin_generation(&self, fd: Fd, generation: u64) -> Result<(), PinError> {
        self.unpin_if(fd, |file| file.generation == generation)
    }

    fn unpin_if(&self, fd: Fd, may: impl Fn(&PinnedFile) -> bool) -> Result<(), PinError> {
        let key = self.files.sys().fstat(fd).map_err(PinError::BadFd)?.key();
        let file = self.unpinner.files.find(|file| file.key == key && may(file)).ok_or(PinError::NotPinned)?;
        self.unpin(&file, true);
        Ok(())
    }

    /// Drops one reference; after the last the pages are unpinned. `wait`: until they are.
    fn unpin(&self, file: &Arc<PinnedFile>, wait: bool) {
        if file.gate.unref() {
            file.gate.begin_closing();
            if wait {
                // A mapping may belong to this very thread, which unmaps it later.
                file.gate.wait_released_unless_mapped();
            }
        }
    }

    /// Whether the file is pinned, and is not being unpinned.
    pub fn is_pinned(&self, fd: Fd) -> bool {
        let Ok(stat) = self.files.sys().fstat(fd) else { return false };
        self.find(stat.key()).is_some_and(|file| !file.gate.is_closing())
    }

    /// The program closes a descriptor, perhaps the one that a file was pinned with. For signal handlers too, if the
    /// thread holds no lock of SPIN's: it allocates and frees nothing.
    pub fn on_close(&self, fd: Fd, key: FileKey) {
        let files = self.unpinner.files.lock();
        files.iter().filter(|file| file.key == key && file.fd == fd).for_each(|file| file.gate.begin_closing());
    }

    /// The program closes a range of descriptors. For signal handlers too, likewise.
    pub fn on_close_range(&self, first: u32, last: u32) {
        let files = self.unpinner.files.lock();
        let closed = files.iter().filter(|file| u32::try_from(file.fd).is_ok_and(|fd| (first..=last).contains(&fd)));
        closed.for_each(|file| file.gate.begin_closing());
    }
}

/// Mappings.
impl PinnedFiles {
    /// Maps a range of a file for a device. If the file is not pinned, it is pinned now, until the runtime ends or a
    /// process opens it for writing.
    pub fn map(
        self: &Arc<Self>,
        fd: Fd,
        offset: u64,
        len: u64,
        device: &'static dyn Device,
    ) -> Result<DeviceMapping, PinError> {
        Ok(self.new_mapping(fd, offset, len, device)?.owned_by(Arc::clone(self) as _))
    }

    /// As [`PinnedFiles::map`], until [`PinnedFiles::unmap`] of the address that it returns.
    pub fn map_until_unmap(&self, fd: Fd, offset: u64, len: u64, device: &'static dyn Device) -> Result<u64, PinError> {
        Ok(self.mappings.add(self.new_mapping(fd, offset, len, device)?))
    }

    fn new_mapping(
        &self,
        fd: Fd,
        offset: u64,
        len: u64,
        device: &'static dyn Device,
    ) -> Result<DeviceMapping, PinError> {
        let stat = self.files.sys().fstat(fd).map_err(PinError::BadFd)?;
        let inside = |size: u64| len > 0 && offset.checked_add(len).is_some_and(|end| end <= size);
        // Checked first, so that the file is not pinned in vain.
        if !inside(stat.size) {
            return Err(PinError::OutOfRange);
        }
        if self.find(stat.key()).is_none_or(|file| file.gate.is_closing()) {
            self.pin(fd, Some(device))?;
        }
        let file = self.find(stat.key()).ok_or(PinError::NotPinned)?;
        let mut guard = self.acquire_pinned(fd, file, device)?;
        guard.mark_mapping();
        if !inside(guard.size()) {
            return Err(PinError::OutOfRange);
        }
        let address = guard.pages.contiguous(offset, len).ok_or(PinError::NoDevice)?;
        Ok(DeviceMapping::new(guard, address, len))
    }

    /// Ends a mapping; false if there is none at this address.
    pub fn unmap(&self, address: u64) -> bool {
        self.mappings.remove(address)
    }

    /// Whether a process waits to write the file of a mapping; `None` if there is none at this address.
    pub fn revoke_requested(&self, address: u64) -> Option<bool> {
        self.mappings.revoke_requested(address)
    }
}

impl Drop for PinnedFiles {
    fn drop(&mut self) {
        self.mappings.clear();
        self.unpinner.shut_down();
    }
}

/// Bytes counted against the limit until the number of registered bytes is known: none, if that fails.
struct BudgetReservation<'a>(&'a AtomicU64, u64);

impl<'a> BudgetReservation<'a> {
    fn new(reserved: &'a AtomicU64, size: u64, limit: u64) -> Result<BudgetReservation<'a>, PinError> {
        let add = |bytes: u64| bytes.checked_add(size).filter(|all| *all <= limit);
        reserved.fetch_update(Relaxed, Relaxed, add).map_err(|_| PinError::LimitExceeded)?;
        Ok(BudgetReservation(reserved, size))
    }

    /// `bytes` are registered.
    fn commit(mut self, bytes: u64) {
        // One addition: no thread that reads meanwhile may count both.
        self.0.fetch_add(bytes.wrapping_sub(self.1), Relaxed);
        self.1 = 0;
    }
}

impl Drop for BudgetReservation<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Relaxed);
    }
}

/// Releases the gate of a file that could not be used after all.
struct ReleaseOnDrop<'a>(&'a Arc<PinnedFile>);

impl Drop for ReleaseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.gate.release(false);
    }
}
