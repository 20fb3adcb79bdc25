//! The two threads that serve pinned files.
//!
//! ```text
//!   lease watcher   shadow table: has the leases    signal: a lease is being broken ──> closing begins
//!                       ▲                                                                          │
//!                       │ unpinned: the lease is released, and the writer's open returns           ▼
//!   unpinner        the program's table, for calls of the driver    unregisters once no use is active
//! ```
//!
//! Both start with the first pinned file, and end with the runtime.
//!
//! Some changes break no lease: `open` with O_RDONLY and O_TRUNC, and writes after the attribute or the mount that
//! excluded writers was changed. inotify reports these to the watcher, by the same signal, once they have happened.
//!
//! `close` begins to unpin too, also in a signal handler, so that allocates nothing: it marks the file, and the unpinner
//! finds it in the list.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex, OnceLock};

use spinio_files::{Files, LeaseWatch, LeaseWatcher};
use spinio_host::lock;
use spinio_host::syscalls::Syscalls;
use spinio_sys::linux::{self, Fd, InotifyEvent};

use crate::pinned_file::PinnedFile;
use crate::pinned_list::PinnedList;
use crate::ref_gate::UnpinSignal;

const STACK_SIZE: usize = 1 << 20;

/// State that the two threads share with all others.
#[derive(Default)]
pub(crate) struct Unpinner {
    pub(crate) files: PinnedList<PinnedFile>,
    /// Bytes registered, all devices together.
    pub(crate) bytes: AtomicU64,
    pub(crate) signal: Arc<UnpinSignal>,
    pub(crate) watcher: Arc<LeaseWatcher>,
    /// Keeps the watcher from the first pinned file on.
    watch: Mutex<Option<LeaseWatch>>,
    /// Reports changes; a descriptor of the shadow table. None where the user may have no more of them.
    inotify: OnceLock<Option<Fd>>,
    shutdown: AtomicBool,
}

impl Unpinner {
    /// Starts the threads if they do not run; the watcher's id.
    pub(crate) fn start(self: &Arc<Self>, files: &Arc<Files>) -> Option<u32> {
        let mut watch = lock(&self.watch);
        if watch.is_none() {
            let (unpinner, sys) = (Arc::clone(self), files.sys());
            let started = self.watcher.watch(files.shadow_workers()?, move || unpinner.poll_leases(sys))?;
            let unpinner = Arc::clone(self);
            linux::spawn_signals_blocked("spinio-unpin", STACK_SIZE, move || unpinner.run_unpinner()).ok()?;
            *watch = Some(started);
        }
        watch.as_ref().map(|watch| watch.tid)
    }

    fn inotify(&self) -> Option<Fd> {
        self.inotify.get().copied().flatten()
    }

    /// Has changes of the file reported, if that is possible, by a signal to the watcher. The file is in the list.
    pub(crate) fn watch_inode(self: &Arc<Self>, files: &Files, pinned: &PinnedFile, watcher_tid: u32) {
        let (unpinner, sys, file) = (Arc::clone(self), files.sys(), Arc::clone(&pinned.file));
        let init = move || {
            let inotify = sys.inotify_init().ok()?;
            let refused = linux::inotify_signal(inotify, watcher_tid).inspect_err(|_| sys.close(inotify));
            refused.is_ok().then_some(inotify)
        };
        let watch = move || sys.watch_changes((*unpinner.inotify.get_or_init(init))?, file.cached.get()).ok();
        let wd = files.shadow_workers().and_then(|w| w.for_key(pinned.file.storage).run_blocking(watch));
        if let Some(wd) = wd.flatten() {
            pinned.inotify_wd.store(wd, Release);
        }
    }

    /// Ends that. Two entries of one file share a watch; the last one removes it.
    fn unwatch_inode(&self, sys: &dyn Syscalls, file: &Arc<PinnedFile>) {
        // Under the lock: an entry that is added to the list later watches the inode after this.
        let files = self.files.lock();
        let wd = file.inotify_wd.load(Acquire);
        if let Some(inotify) = self.inotify()
            && wd != 0
            && !files.iter().any(|other| other.key == file.key && !Arc::ptr_eq(other, file))
        {
            sys.unwatch(inotify, wd);
        }
    }

    /// Unpins what was changed.
    fn drain_events(&self, sys: &dyn Syscalls, files: &[Arc<PinnedFile>]) {
        let Some(inotify) = self.inotify() else { return };
        // If events cannot be read, any file may have changed.
        for event in sys.inotify_events(inotify).unwrap_or_else(|_| vec![InotifyEvent::Overflow]) {
            let is_affected = |file: &&Arc<PinnedFile>| match event {
                InotifyEvent::Modified(wd) => file.inotify_wd.load(Acquire) == wd,
                InotifyEvent::Overflow => true,
                _ => false,
            };
            files.iter().filter(is_affected).for_each(|file| file.gate.begin_closing());
        }
    }

    /// On the watcher: whether any file is pinned still.
    fn poll_leases(&self, sys: &dyn Syscalls) {
        let files = self.files.snapshot();
        self.drain_events(sys, &files);
        for file in &files {
            if file.gate.is_unpinned() {
                // Before a writer can go on: its changes are of no interest.
                self.unwatch_inode(sys, file);
                if let Some(lease) = file.lease() {
                    let _ = linux::release_lease(lease);
                }
                self.files.remove(file);
                file.gate.set_released();
            } else if file.lease().is_some_and(|lease| !sys.has_lease(lease)) {
                file.gate.begin_closing();
            }
        }
        if self.files.count() == 0 && self.shutdown.load(Acquire) {
            self.inotify().into_iter().for_each(|inotify| sys.close(inotify));
            drop(lock(&self.watch).take());
            self.watcher.wake();
        }
    }

    /// The unpinner's thread.
    fn run_unpinner(&self) {
        while !(self.shutdown.load(Acquire) && self.files.count() == 0) {
            self.signal.wait();
            let mut files = self.files.snapshot();
            // Files that are unpinned already are released meanwhile: a copy of the list must not keep them open.
            files.retain(|file| file.gate.is_closing() && !file.gate.is_unpinned());
            for file in files {
                if let Some(bytes) = file.unpin_unused() {
                    self.bytes.fetch_sub(bytes, Relaxed);
                    self.watcher.wake();
                }
            }
        }
    }

    /// At the end of the runtime: unpins all files, and ends the threads.
    pub(crate) fn shut_down(&self) {
        self.shutdown.store(true, Release);
        let files = self.files.snapshot();
        files.iter().for_each(|file| file.gate.begin_closing());
        for file in files {
            file.gate.wait_released();
        }
        self.watcher.wake();
        self.signal.send();
    }
}
