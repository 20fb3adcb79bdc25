//! The two threads behind held files.
//!
//! ```text
//!   watcher   keepers' table: the leases live there     signal: a lease is being broken ──> it closes the hold
//!                 ▲                                                                            │
//!                 │ pins are gone: the lease goes back, and the writer goes on                 ▼
//!   holder    the program's table: the driver is called from there      waits for users, unregisters
//! ```
//!
//! Both are made with the first hold, and end with the runtime.
//!
//! Some changes break no lease: `open` with O_RDONLY and O_TRUNC, and writes after an attribute or a mount that vouched for
//! the file was taken away. inotify tells the watcher of these, by the same signal, once they have happened.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, mpsc};

use spinio_sys::linux::{self, Fd, InotifyEvent};

use super::PinnedFile;
use spinio_files::Files;
use spinio_host::lock;
use spinio_host::syscalls::Syscalls;

const STACK_SIZE: usize = 1 << 20;

/// Milliseconds after which the watcher looks by itself while files are held: a seccomp filter may refuse the signal that
/// wakes it, and may come at any time.
const LOOK: u64 = 1000;

/// The same once the signal was refused.
const LOOK_DEAF: u64 = 10;

/// What the two threads and everybody else share.
#[derive(Default)]
pub(super) struct LeaseWatcher {
    pub(super) files: Mutex<Vec<Arc<PinnedFile>>>,
    /// How many there are; one load tells that there is none.
    pub(super) count: AtomicUsize,
    /// Bytes registered, all devices together.
    pub(super) bytes: AtomicU64,
    closing: Mutex<VecDeque<Arc<PinnedFile>>>,
    wake: Condvar,
    /// The watcher's thread id; 0 before it is made.
    watcher_tid: AtomicU32,
    /// Brings news of changes; of the keepers' table. None where the user may have no more of them.
    inotify: OnceLock<Fd>,
    shutdown: AtomicBool,
    /// The signal that wakes the watcher was refused.
    deaf: AtomicBool,
}

impl LeaseWatcher {
    /// Makes the threads if there are none; the watcher's id.
    pub(super) fn start(self: &Arc<Self>, files: &Arc<Files>) -> Option<u32> {
        // Made under this lock, so that there is one of each.
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
            // Whether it can be woken at all. What this leaves pending is one look too many.
            if !linux::wake_thread(linux::gettid()) {
                watcher.deaf.store(true, Release);
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

    /// Lets a hold go: nobody comes in any more; its pins go when the last user has left, and then its lease.
    pub(super) fn begin_unpin(&self, file: &Arc<PinnedFile>) {
        if file.gate.begin_closing() {
            lock(&self.closing).push_back(Arc::clone(file));
            self.wake.notify_one();
        }
    }

    /// Has the watcher told of changes, too.
    fn init_inotify(&self, sys: &dyn Syscalls) {
        let Ok(inotify) = sys.inotify_init() else { return };
        match linux::inotify_signal(inotify, linux::gettid()) {
            Ok(()) => drop(self.inotify.set(inotify)),
            Err(_) => sys.close(inotify),
        }
    }

    /// Sees to it that changes of a hold's file are told, if that can be. The hold is in the list.
    pub(super) fn watch_inode(&self, files: &Files, pinned: &PinnedFile) {
        let Some(&inotify) = self.inotify.get() else { return };
        let (sys, file) = (files.sys(), Arc::clone(&pinned.file));
        let wd = files
            .shadow_workers()
            .and_then(|workers| workers.run_blocking(move || sys.watch_changes(inotify, file.cached.get())));
        if let Some(Ok(wd)) = wd {
            pinned.inotify_wd.store(wd, Release);
        }
    }

    /// The other way round. Two holds of a file have one watch between them, which the last one ends.
    fn unwatch_inode(&self, sys: &dyn Syscalls, file: &Arc<PinnedFile>) {
        // Under the lock: who comes into the list from here on attends afterwards.
        let files = lock(&self.files);
        let wd = file.inotify_wd.load(Acquire);
        if let Some(&inotify) = self.inotify.get()
            && wd != 0
            && !files.iter().any(|h| h.key == file.key && !Arc::ptr_eq(h, file))
        {
            sys.unwatch(inotify, wd);
        }
    }

    /// Closes what was changed.
    fn drain_events(&self, sys: &dyn Syscalls, files: &[Arc<PinnedFile>]) {
        let Some(&inotify) = self.inotify.get() else { return };
        // What cannot be heard may have happened.
        for event in sys.inotify_events(inotify).unwrap_or_else(|_| vec![InotifyEvent::Overflow]) {
            let is_affected = |file: &&Arc<PinnedFile>| match event {
                InotifyEvent::Modified(wd) => file.inotify_wd.load(Acquire) == wd,
                InotifyEvent::Overflow => true,
                _ => false,
            };
            files.iter().filter(is_affected).for_each(|file| self.begin_unpin(file));
        }
    }

    /// The watcher.
    fn run_watcher(&self, sys: &dyn Syscalls) {
        loop {
            let is_idle = self.count.load(Acquire) == 0 && !self.shutdown.load(Acquire);
            linux::wait_lease_break(match self.deaf.load(Acquire) {
                true => Some(LOOK_DEAF),
                false if is_idle => None,
                false => Some(LOOK),
            });
            let files = lock(&self.files).clone();
            self.drain_events(sys, &files);
            for file in &files {
                if file.gate.is_unpinned() {
                    // Before anybody writes: that is no news any more.
                    self.unwatch_inode(sys, file);
                    // Its pins are gone: who waits for the lease goes on.
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
                self.inotify.get().into_iter().for_each(|&notify| sys.close(notify));
                return;
            }
        }
    }

    fn remove(&self, file: &Arc<PinnedFile>) {
        let mut files = lock(&self.files);
        files.retain(|h| !Arc::ptr_eq(h, file));
        self.count.store(files.len(), Release);
        drop(files);
        file.gate.set_released();
    }

    /// The holder.
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

    /// Has the watcher look now, or soon.
    pub(super) fn wake_watcher(&self) {
        if !linux::wake_thread(self.watcher_tid.load(Acquire)) {
            self.deaf.store(true, Release);
        }
    }

    /// The runtime goes: lets everything go, and the threads end.
    pub(super) fn shut_down(&self) {
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
