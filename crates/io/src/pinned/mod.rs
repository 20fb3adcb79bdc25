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
//! Absent pages are read in as the file is registered: a held file is in memory, all of it, and `SPINIO_HOLD` bounds how
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

pub use self::map::Mapped;
pub use self::registered::Registered;
pub use self::safety::NotHeld;

use self::map::Maps;
use self::safety::Safety;
use self::users::Users;
use self::watch::Watch;
use spinio_files::FileTable;
use spinio_files::{File, Rights};
use spinio_host::lock;

/// A held file.
pub(crate) struct Hold {
    key: (u64, u64),
    /// The descriptor it was held by.
    fd: Fd,
    file: Arc<File>,
    pub(crate) size: u64,
    safety: Safety,
    /// The watch that tells of changes; 0: none.
    attended: AtomicI32,
    users: Users<Registered>,
    /// One device at a time.
    pinning: Mutex<()>,
}

/// Somebody who uses the pins: they stay as long.
pub struct Using {
    hold: Arc<Hold>,
    /// The registered pages.
    pub on: Arc<Registered>,
    map: bool,
}

impl Using {
    /// Length of the file.
    pub fn size(&self) -> u64 {
        self.hold.size
    }

    /// Whether what was read until now is what the file holds. `fd`: a descriptor of it, of this thread.
    pub fn is_good(&self, files: &Arc<FileTable>, fd: Fd) -> bool {
        self.hold.safety.holds(files, fd)
    }

    /// Counts as a map from now on.
    fn become_map(&mut self) {
        self.map = true;
        self.hold.users.become_map();
    }

    /// Whether the pages are wanted back.
    pub fn is_closing(&self) -> bool {
        self.hold.users.is_closing()
    }
}

impl Drop for Using {
    fn drop(&mut self) {
        self.hold.users.leave(self.map);
    }
}

impl Hold {
    /// The number of the lease in the keepers' table.
    fn lease(&self) -> Option<Fd> {
        match &self.safety {
            Safety::Lease(fd, _) => Some(fd.get()),
            _ => None,
        }
    }

    /// Waits until nobody uses the pins, and gives them back; how many bytes. By a thread that may call the device.
    fn strip(&self) -> u64 {
        let mut bytes = 0;
        for on in self.users.take() {
            bytes += on.bytes();
            on.give_back();
        }
        self.users.set_bare();
        bytes
    }
}

/// The held files of a runtime.
pub struct Holds {
    watch: Arc<Watch>,
    maps: Maps,
    files: Arc<FileTable>,
    /// Bytes that may be registered.
    limit: u64,
}

impl Holds {
    pub fn new(files: Arc<FileTable>, limit: u64) -> Holds {
        Holds { watch: Arc::default(), maps: Maps::default(), files, limit }
    }

    /// Whether there is none: one load.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.watch.count.load(Relaxed) == 0
    }

    /// How many files, and how many bytes registered.
    pub fn totals(&self) -> (u64, u64) {
        (self.watch.count.load(Relaxed) as u64, self.watch.bytes.load(Relaxed))
    }

    fn find(&self, key: (u64, u64)) -> Option<Arc<Hold>> {
        lock(&self.watch.holds).iter().find(|h| h.key == key).map(Arc::clone)
    }

    /// Whether large reads of a file of this size come out of pins, as far as that can be told without a read.
    pub fn serves(&self, key: (u64, u64), size: u64, device: &dyn Device) -> bool {
        let hold = if self.is_empty() { None } else { self.find(key) };
        device.abilities().pins && hold.is_some_and(|hold| hold.size == size && !hold.users.is_closing())
    }

    /// The pins of a held file on a device, made now if need be; `None` if it is not held, or not to be trusted.
    /// `fd`: a descriptor of the file, of this thread.
    pub fn enter(
        &self,
        fd: Fd,
        key: (u64, u64),
        device: &'static dyn Device,
    ) -> Option<Using> {
        if self.is_empty() {
            return None;
        }
        self.enter_hold(&self.files, fd, self.find(key)?, device).ok()
    }

    fn enter_hold(
        &self,
        files: &Arc<FileTable>,
        fd: Fd,
        hold: Arc<Hold>,
        device: &'static dyn Device,
    ) -> Result<Using, NotHeld> {
        if !hold.users.enter() {
            return Err(NotHeld::Gone);
        }
        // From here on the pins stay, and leaving is a drop.
        let leave = Leave(&hold);
        if !hold.safety.holds(files, fd) {
            self.watch.close(&hold);
            return Err(NotHeld::Gone);
        }
        let on = self.on(files, &hold, device)?;
        std::mem::forget(leave);
        Ok(Using { hold, on, map: false })
    }

    /// The pins on a device. The caller is counted as a user.
    fn on(&self, files: &Arc<FileTable>, hold: &Arc<Hold>, device: &'static dyn Device) -> Result<Arc<Registered>, NotHeld> {
        let find = || hold.users.find(|on| core::ptr::addr_eq(on.device, device));
        if let Some(on) = find() {
            return Ok(on);
        }
        let _one = lock(&hold.pinning);
        if let Some(on) = find() {
            return Ok(on);
        }
        if !device.abilities().pins {
            return Err(NotHeld::NoDevice);
        }
        // Counted before they are registered: others may be registering too.
        let counted = Counted::new(&self.watch.bytes, hold.size, self.limit)?;
        let on = Arc::new(Registered::make(files, &hold.file, hold.size, device)?);
        counted.stays(on.bytes());
        hold.users.add(Arc::clone(&on));
        Ok(on)
    }

    /// Holds the file of a descriptor; once more if it is held.
    fn hold_file(&self, files: &Arc<FileTable>, fd: Fd, device: Option<&'static dyn Device>) -> Result<(), NotHeld> {
        let stat = files.sys().fstat(fd).map_err(NotHeld::Descriptor)?;
        if stat.kind != FileKind::Regular || stat.size == 0 {
            return Err(NotHeld::NotAFile);
        }
        let key = (stat.dev, stat.ino);
        let crew = files.shadow_workers().ok_or(NotHeld::NoHelpers)?;
        let watcher = self.watch.start(files).ok_or(NotHeld::NoHelpers)?;
        let hold = loop {
            match self.find(key) {
                None => break self.new_hold(files, crew, fd, stat, watcher)?,
                Some(hold) if hold.users.ask() => break hold,
                // It is going: somebody waits to write it, which its end will show, or the descriptor that it was held by
                // was closed. A map may be this very thread's.
                Some(hold) if hold.users.await_gone_unless_mapped() => {}
                Some(_) => return Err(NotHeld::OpenForWriting),
            }
        };
        if let Some(device) = device
            && let Err(refused) = self.enter_hold(files, fd, Arc::clone(&hold), device).map(drop)
        {
            self.let_go(&hold, false);
            // It was held a moment ago: whoever ended that has opened it for writing.
            return Err(if refused == NotHeld::Gone { NotHeld::OpenForWriting } else { refused });
        }
        Ok(())
    }

    fn new_hold(
        &self,
        files: &Arc<FileTable>,
        crew: &spinio_host::pool::Crew,
        fd: Fd,
        stat: linux::Stat,
        watcher: u32,
    ) -> Result<Arc<Hold>, NotHeld> {
        let key = (stat.dev, stat.ino);
        let file = files.get(fd, stat).map_err(|reason| match reason {
            spinio_plan::Reason::NoHelpers => NotHeld::NoHelpers,
            _ => NotHeld::NotReopened,
        })?;
        // Of the two that have no mapping of their own one keeps its files in memory; the other shows old ones.
        if !file.is_mappable() && file.rights != Rights::Resident {
            return Err(NotHeld::NotMappable);
        }
        if stat.size > self.limit {
            return Err(NotHeld::TooLarge);
        }
        let safety = Safety::find(files, fd, key, watcher)?;
        // Only now does it stay as long as it is.
        let size = files.sys().fstat(fd).map_err(NotHeld::Descriptor)?.size;
        let (attended, users, pinning) = (AtomicI32::new(0), Users::new(), Mutex::new(()));
        let hold = Arc::new(Hold { key, fd, file, size, safety, attended, users, pinning });
        let mut holds = lock(&self.watch.holds);
        holds.push(Arc::clone(&hold));
        self.watch.count.store(holds.len(), Release);
        drop(holds);
        // A break that came before the hold was in the list was told to a watcher who did not find it.
        self.watch.wake_watcher();
        self.watch.attend(files, &hold);
        // Cut off before anybody would have told.
        if files.sys().fstat(fd).map_or(0, |stat| stat.size) != size {
            self.watch.close(&hold);
            return Err(NotHeld::OpenForWriting);
        }
        Ok(hold)
    }

    /// One who asked for it needs it no more; the last one's pins go. `wait`: until they are gone.
    fn let_go(&self, hold: &Arc<Hold>, wait: bool) {
        let (last, mapped) = hold.users.ask_less();
        if last {
            self.watch.close(hold);
            // A map may be this very thread's, and go later.
            if wait && !mapped {
                hold.users.await_gone();
            }
        }
    }

    /// The program closes the descriptor that a file was held by.
    pub fn forget(&self, fd: Fd, key: (u64, u64)) {
        if let Some(hold) = self.find(key).filter(|h| h.fd == fd) {
            self.watch.close(&hold);
        }
    }

    /// The program closes descriptors by the range.
    pub fn forget_range(&self, first: u32, last: u32) {
        let holds = lock(&self.watch.holds).clone();
        let gone = holds.iter().filter(|hold| u32::try_from(hold.fd).is_ok_and(|fd| (first..=last).contains(&fd)));
        gone.for_each(|hold| self.watch.close(hold));
    }
}

impl Drop for Holds {
    fn drop(&mut self) {
        self.maps.forget();
        self.watch.dismiss();
    }
}

/// Bytes that are counted against what may be held until it is known how many are registered: none, where that fails.
struct Counted<'a>(&'a AtomicU64, u64);

impl<'a> Counted<'a> {
    fn new(held: &'a AtomicU64, size: u64, most: u64) -> Result<Counted<'a>, NotHeld> {
        let room = |held: u64| held.checked_add(size).filter(|all| *all <= most);
        held.fetch_update(Relaxed, Relaxed, room).map_err(|_| NotHeld::TooLarge)?;
        Ok(Counted(held, size))
    }

    /// So many are registered.
    fn stays(mut self, bytes: u64) {
        // At once: nobody who looks meanwhile may find both.
        self.0.fetch_add(bytes.wrapping_sub(self.1), Relaxed);
        self.1 = 0;
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Relaxed);
    }
}

/// Leaves a hold that could not be entered after all.
struct Leave<'a>(&'a Arc<Hold>);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.users.leave(false);
    }
}

impl Holds {
    /// Holds the file of a descriptor: its pages are registered with `device` now (with any other at its first read), and
    /// stay so until [`Holds::release`], or until somebody opens it for writing. May be asked for more than once.
    pub fn hold(&self, fd: Fd, device: Option<&'static dyn Device>) -> Result<(), NotHeld> {
        self.hold_file(&self.files, fd, device)
    }

    /// Lets the file go, once for each time that it was held; after the last its pages are given
    /// back when this returns, unless it is mapped: then when it is unmapped.
    pub fn release(&self, fd: Fd) -> Result<(), NotHeld> {
        let stat = self.files.sys().fstat(fd).map_err(NotHeld::Descriptor)?;
        let hold = self.find((stat.dev, stat.ino)).ok_or(NotHeld::Gone)?;
        self.let_go(&hold, true);
        Ok(())
    }

    /// Whether the file is held, and nobody wants it back.
    pub fn is_held(&self, fd: Fd) -> bool {
        let Ok(stat) = self.files.sys().fstat(fd) else { return false };
        self.find((stat.dev, stat.ino)).is_some_and(|hold| !hold.users.is_closing())
    }

    /// Bytes of held files that are registered now.
    pub fn held_bytes(&self) -> u64 {
        self.watch.bytes.load(Acquire)
    }
}
