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

use spinio_sys::linux::{self, Fd, News};

use super::Hold;
use spinio_files::FileTable;
use spinio_host::syscalls::Kernel;
use spinio_host::lock;

const STACK: usize = 1 << 20;

/// Milliseconds after which the watcher looks by itself while files are held: a seccomp filter may refuse the signal that
/// wakes it, and may come at any time.
const LOOK: u64 = 1000;

/// The same once the signal was refused.
const LOOK_DEAF: u64 = 10;

/// What the two threads and everybody else share.
#[derive(Default)]
pub(super) struct Watch {
    pub(super) holds: Mutex<Vec<Arc<Hold>>>,
    /// How many there are; one load tells that there is none.
    pub(super) count: AtomicUsize,
    /// Bytes registered, all devices together.
    pub(super) bytes: AtomicU64,
    closing: Mutex<VecDeque<Arc<Hold>>>,
    wake: Condvar,
    /// The watcher's thread id; 0 before it is made.
    watcher: AtomicU32,
    /// Brings news of changes; of the keepers' table. None where the user may have no more of them.
    notify: OnceLock<Fd>,
    dismissed: AtomicBool,
    /// The signal that wakes the watcher was refused.
    deaf: AtomicBool,
}

impl Watch {
    /// Makes the threads if there are none; the watcher's id.
    pub(super) fn start(self: &Arc<Self>, files: &Arc<FileTable>) -> Option<u32> {
        // Made under this lock, so that there is one of each.
        let _made = lock(&self.holds);
        match self.watcher.load(Acquire) {
            0 => {}
            tid => return Some(tid),
        }
        let (tell, told) = mpsc::channel();
        let watch = Arc::clone(self);
        let kernel = files.sys();
        let made = files.shadow_workers()?.beside("spinio-watch", move || {
            watch.listen(kernel);
            // Whether it can be woken at all. What this leaves pending is one look too many.
            if !linux::nudge(linux::gettid()) {
                watch.deaf.store(true, Release);
            }
            let _ = tell.send(linux::gettid());
            watch.watch(kernel);
        });
        let tid = made.then(|| told.recv().ok())??;
        let watch = Arc::clone(self);
        linux::spawn_quiet("spinio-hold", STACK, move || watch.give_back()).ok()?;
        self.watcher.store(tid, Release);
        Some(tid)
    }

    /// Lets a hold go: nobody comes in any more; its pins go when the last user has left, and then its lease.
    pub(super) fn close(&self, hold: &Arc<Hold>) {
        if hold.users.begin_closing() {
            lock(&self.closing).push_back(Arc::clone(hold));
            self.wake.notify_one();
        }
    }

    /// Has the watcher told of changes, too.
    fn listen(&self, kernel: &dyn Kernel) {
        let Ok(notify) = kernel.notify() else { return };
        match linux::tell_of_news(notify, linux::gettid()) {
            Ok(()) => drop(self.notify.set(notify)),
            Err(_) => kernel.close(notify),
        }
    }

    /// Sees to it that changes of a hold's file are told, if that can be. The hold is in the list.
    pub(super) fn attend(&self, files: &FileTable, hold: &Hold) {
        let Some(&notify) = self.notify.get() else { return };
        let (kernel, file) = (files.sys(), Arc::clone(&hold.file));
        let watch = files.shadow_workers().and_then(|crew| crew.call(move || kernel.watch_changes(notify, file.cached.get())));
        if let Some(Ok(watch)) = watch {
            hold.attended.store(watch, Release);
        }
    }

    /// The other way round. Two holds of a file have one watch between them, which the last one ends.
    fn neglect(&self, kernel: &dyn Kernel, hold: &Arc<Hold>) {
        // Under the lock: who comes into the list from here on attends afterwards.
        let holds = lock(&self.holds);
        let watch = hold.attended.load(Acquire);
        if let Some(&notify) = self.notify.get()
            && watch != 0
            && !holds.iter().any(|h| h.key == hold.key && !Arc::ptr_eq(h, hold))
        {
            kernel.unwatch(notify, watch);
        }
    }

    /// Closes what was changed.
    fn hear(&self, kernel: &dyn Kernel, holds: &[Arc<Hold>]) {
        let Some(&notify) = self.notify.get() else { return };
        // What cannot be heard may have happened.
        for event in kernel.news(notify).unwrap_or_else(|_| vec![News::Lost]) {
            let is_meant = |hold: &&Arc<Hold>| match event {
                News::Changed(watch) => hold.attended.load(Acquire) == watch,
                News::Lost => true,
                _ => false,
            };
            holds.iter().filter(is_meant).for_each(|hold| self.close(hold));
        }
    }

    /// The watcher.
    fn watch(&self, kernel: &dyn Kernel) {
        loop {
            let is_idle = self.count.load(Acquire) == 0 && !self.dismissed.load(Acquire);
            linux::await_break(match self.deaf.load(Acquire) {
                true => Some(LOOK_DEAF),
                false if is_idle => None,
                false => Some(LOOK),
            });
            let holds = lock(&self.holds).clone();
            self.hear(kernel, &holds);
            for hold in &holds {
                if hold.users.is_bare() {
                    // Before anybody writes: that is no news any more.
                    self.neglect(kernel, hold);
                    // Its pins are gone: who waits for the lease goes on.
                    if let Some(lease) = hold.lease() {
                        let _ = linux::drop_lease(lease);
                    }
                    self.remove(hold);
                } else if hold.lease().is_some_and(|lease| !kernel.has_lease(lease)) {
                    self.close(hold);
                }
            }
            drop(holds);
            if self.dismissed.load(Acquire) && self.count.load(Acquire) == 0 {
                self.notify.get().into_iter().for_each(|&notify| kernel.close(notify));
                return;
            }
        }
    }

    fn remove(&self, hold: &Arc<Hold>) {
        let mut holds = lock(&self.holds);
        holds.retain(|h| !Arc::ptr_eq(h, hold));
        self.count.store(holds.len(), Release);
        drop(holds);
        hold.users.set_gone();
    }

    /// The holder.
    fn give_back(&self) {
        loop {
            let mut closing = lock(&self.closing);
            let hold = loop {
                if let Some(hold) = closing.pop_front() {
                    break hold;
                }
                if self.dismissed.load(Acquire) && self.count.load(Acquire) == 0 {
                    return;
                }
                closing = self.wake.wait(closing).unwrap_or_else(PoisonError::into_inner);
            };
            drop(closing);
            let bytes = hold.strip();
            self.bytes.fetch_sub(bytes, Relaxed);
            self.wake_watcher();
        }
    }

    /// Has the watcher look now, or soon.
    pub(super) fn wake_watcher(&self) {
        if !linux::nudge(self.watcher.load(Acquire)) {
            self.deaf.store(true, Release);
        }
    }

    /// The runtime goes: lets everything go, and the threads end.
    pub(super) fn dismiss(&self) {
        self.dismissed.store(true, Release);
        let holds = lock(&self.holds).clone();
        holds.iter().for_each(|hold| self.close(hold));
        for hold in holds {
            hold.users.await_gone();
        }
        let tid = self.watcher.load(Acquire);
        if tid != 0 {
            self.wake_watcher();
            drop(lock(&self.closing));
            self.wake.notify_all();
        }
    }
}
