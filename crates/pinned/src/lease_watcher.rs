//! The two threads that serve pinned files.
//!
//! ```text
//!   lease watcher   shadow table: has the leases    signal: a lease is being broken ──> closing begins
//!                       ▲                                                                          │
//!                       │ unpinned: the lease is released, and the writer's open returns           ▼
//!   unpinner        the program's table, for calls of the driver    waits for uses, unregisters
//! ```
//!
//! Both start with the first pinned file, and end with the runtime.
//!
//! Some changes break no lease: `open` with O_RDONLY and O_TRUNC, and writes after the attribute or the mount that
//! excluded writers was changed. inotify reports these to the watcher, by the same signal, once they have happened.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, mpsc};

use spinio_files::Files;
use spinio_host::lock;
use spinio_host::syscalls::Syscalls;
use spinio_sys::linux::{self, Fd, InotifyEvent};

use crate::pinned_file::PinnedFile;

const STACK_SIZE: usize = 1 << 20;

/// Milliseconds after which the watcher polls while files are pinned: a seccomp filter may refuse the signal that wakes
/// it, and may be installed at any time.
const POLL_MS: u64 = 1000;

/// The same once the signal was refused.
const POLL_MS_NO_SIGNAL: u64 = 10;

/// State that the two threads share with all others.
#[derive(Default)]
pub(crate) struct LeaseWatcher {
    pub(crate) files: Mutex<Vec<Arc<PinnedFile>>>,
    /// Number of pinned files: whether there is one costs one load.
    pub(crate) count: AtomicUsize,
    /// Bytes registered, all devices together.
    pub(crate) bytes: AtomicU64,
    closing: Mutex<VecDeque<Arc<PinnedFile>>>,
    wake: Condvar,
    /// The watcher's TID; 0 before it starts.
    watcher_tid: AtomicU32,
    /// Reports changes; a descriptor of the shadow table. None where the user may have no more of them.
    inotify: OnceLock<Fd>,
    shutdown: AtomicBool,
    /// The signal that wakes the watcher was refused.
    signal_refused: AtomicBool,
}

impl LeaseWatcher {
    /// Starts the threads if they do not run; the watcher's TID.
    pub(crate) fn start(self: &Arc<Self>, files: &Arc<Files>) -> Option<u32> {
        // Under this lock, so that each thread is started once.
        let _start_lock = lock(&self.files);
        match self.watcher_tid.load(Acquire) {
            0 => {}
            tid => return Some(tid),
        }
        let (tid_sender, tid_receiver) = mpsc::channel();
        let watcher = Arc::clone(self);
        let sys = files.sys();
        let spawned = files.shadow_workers()?.spawn_dedicated("spinio-lease", move || {
            watcher.init_inotify(sys);
            // Tests whether it can be woken at all. The signal that this leaves pending causes one superfluous poll.
            if !linux::wake_thread(linux::gettid()) {
                watcher.signal_refused.store(true, Release);
            }
            let _ = tid_sender.send(linux::gettid());
            watcher.run_watcher(sys);
        });
        let tid = spawned.then(|| tid_receiver.recv().ok())??;
        let watcher = Arc::clone(self);
        linux::spawn_signals_blocked("spinio-unpin", STACK_SIZE, move || watcher.run_unpinner()).ok()?;
        self.watcher_tid.store(tid, Release);
        Some(tid)
    }

    /// Begins to unpin a file: no use begins any more; after the last active one its pages are unpinned, and then its
    /// lease is released.
    pub(crate) fn begin_unpin(&self, file: &Arc<PinnedFile>) {
        if file.gate.begin_closing() {
            lock(&self.closing).push_back(Arc::clone(file));
            self.wake.notify_one();
        }
    }

    /// Makes inotify signal the watcher, too.
    fn init_inotify(&self, sys: &dyn Syscalls) {
        let Ok(inotify) = sys.inotify_init() else { return };
        match linux::inotify_signal(inotify, linux::gettid()) {
            Ok(()) => drop(self.inotify.set(inotify)),
            Err(_) => sys.close(inotify),
        }
    }

    /// Has changes of the file reported, if that is possible. The file is in the list.
    pub(crate) fn watch_inode(&self, files: &Files, pinned: &PinnedFile) {
        let Some(&inotify) = self.inotify.get() else { return };
        let (sys, file) = (files.sys(), Arc::clone(&pinned.file));
        let wd = files.shadow_workers().and_then(|workers| {
            workers.for_key(pinned.file.storage).run_blocking(move || sys.watch_changes(inotify, file.cached.get()))
        });
        if let Some(Ok(wd)) = wd {
            pinned.inotify_wd.store(wd, Release);
        }
    }

    /// Ends that. Two entries of one file share a watch; the last one removes it.
    fn unwatch_inode(&self, sys: &dyn Syscalls, file: &Arc<PinnedFile>) {
        // Under the lock: an entry that is added to the list later watches the inode after this.
        let files = lock(&self.files);
        let wd = file.inotify_wd.load(Acquire);
        if let Some(&inotify) = self.inotify.get()
            && wd != 0
            && !files.iter().any(|other| other.key == file.key && !Arc::ptr_eq(other, file))
        {
            sys.unwatch(inotify, wd);
        }
    }

    /// Unpins what was changed.
    fn drain_events(&self, sys: &dyn Syscalls, files: &[Arc<PinnedFile>]) {
        let Some(&inotify) = self.inotify.get() else { return };
        // If events cannot be read, any file may have changed.
        for event in sys.inotify_events(inotify).unwrap_or_else(|_| vec![InotifyEvent::Overflow]) {
            let is_affected = |file: &&Arc<PinnedFile>| match event {
                InotifyEvent::Modified(wd) => file.inotify_wd.load(Acquire) == wd,
                InotifyEvent::Overflow => true,
                _ => false,
            };
            files.iter().filter(is_affected).for_each(|file| self.begin_unpin(file));
        }
    }

    /// The lease watcher's thread.
    fn run_watcher(&self, sys: &dyn Syscalls) {
        loop {
            let is_idle = self.count.load(Acquire) == 0 && !self.shutdown.load(Acquire);
            linux::wait_lease_break(match self.signal_refused.load(Acquire) {
                true => Some(POLL_MS_NO_SIGNAL),
                false if is_idle => None,
                false => Some(POLL_MS),
            });
            let files = lock(&self.files).clone();
            self.drain_events(sys, &files);
            for file in &files {
                if file.gate.is_unpinned() {
                    // Before a writer can continue: its changes are of no interest.
                    self.unwatch_inode(sys, file);
                    if let Some(lease) = file.lease() {
                        let _ = linux::release_lease(lease);
                    }
                    self.remove(file);
                } else if file.lease().is_some_and(|lease| !sys.has_lease(lease)) {
                    self.begin_unpin(file);
                }
            }
            drop(files);
            if self.shutdown.load(Acquire) && self.count.load(Acquire) == 0 {
                self.inotify.get().into_iter().for_each(|&inotify| sys.close(inotify));
                return;
            }
        }
    }

    fn remove(&self, file: &Arc<PinnedFile>) {
        let mut files = lock(&self.files);
        files.retain(|other| !Arc::ptr_eq(other, file));
        self.count.store(files.len(), Release);
        drop(files);
        file.gate.set_released();
    }

    /// The unpinner's thread.
    fn run_unpinner(&self) {
        loop {
            let mut closing = lock(&self.closing);
            let file = loop {
                if let Some(file) = closing.pop_front() {
                    break file;
                }
                if self.shutdown.load(Acquire) && self.count.load(Acquire) == 0 {
                    return;
                }
                closing = self.wake.wait(closing).unwrap_or_else(PoisonError::into_inner);
            };
            drop(closing);
            let bytes = file.unpin_all();
            self.bytes.fetch_sub(bytes, Relaxed);
            self.wake_watcher();
        }
    }

    /// Makes the watcher poll now, or soon.
    pub(crate) fn wake_watcher(&self) {
        if !linux::wake_thread(self.watcher_tid.load(Acquire)) {
            self.signal_refused.store(true, Release);
        }
    }

    /// At the end of the runtime: unpins all files, and ends the threads.
    pub(crate) fn shut_down(&self) {
        self.shutdown.store(true, Release);
        let files = lock(&self.files).clone();
        files.iter().for_each(|file| self.begin_unpin(file));
        for file in files {
            file.gate.wait_released();
        }
        let tid = self.watcher_tid.load(Acquire);
        if tid != 0 {
            self.wake_watcher();
            drop(lock(&self.closing));
            self.wake.notify_all();
        }
    }
}
