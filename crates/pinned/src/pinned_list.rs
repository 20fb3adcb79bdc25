//! The list of pinned files.
//!
//! A program may call `close` in a signal handler, which may have interrupted `malloc` on the same thread, and `close`
//! takes the lock of this list. So no thread allocates or frees with the lock: it could wait for the arena of the
//! interrupted thread. What is needed is allocated before, and what is left over is freed after.

use std::sync::atomic::{
    AtomicUsize,
    Ordering::{Acquire, Release},
};
use std::sync::{Arc, Mutex, MutexGuard};

use spinio_host::lock;

/// Entries that a list of none has room for.
const FIRST_ROOM: usize = 16;

pub(crate) struct PinnedList<T> {
    files: Mutex<Vec<Arc<T>>>,
    /// Number of entries: whether there is one costs one load.
    count: AtomicUsize,
}

impl<T> Default for PinnedList<T> {
    fn default() -> PinnedList<T> {
        PinnedList { files: Mutex::default(), count: AtomicUsize::new(0) }
    }
}

impl<T> PinnedList<T> {
    /// Number of entries: one load.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.count.load(Acquire)
    }

    /// The entries, which stay while the guard lives. Its owner neither allocates nor frees; a copy of an entry might be
    /// the last one.
    pub(crate) fn lock(&self) -> Entries<'_, T> {
        Entries(lock(&self.files))
    }

    /// An entry.
    pub(crate) fn find(&self, matches: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        lock(&self.files).iter().find(|file| matches(file)).map(Arc::clone)
    }

    /// A copy of the list.
    pub(crate) fn snapshot(&self) -> Vec<Arc<T>> {
        loop {
            let mut copy = Vec::with_capacity(self.count());
            let files = lock(&self.files);
            if files.len() <= copy.capacity() {
                copy.extend(files.iter().cloned());
                return copy;
            }
        }
    }

    pub(crate) fn add(&self, file: Arc<T>) {
        loop {
            let mut room = Vec::with_capacity(FIRST_ROOM.max(2 * self.count()));
            let mut files = lock(&self.files);
            if files.len() == files.capacity() && files.len() < room.capacity() {
                room.append(&mut files);
                std::mem::swap(&mut room, &mut files);
            }
            if files.len() < files.capacity() {
                files.push(file);
                self.count.store(files.len(), Release);
                return;
            }
        }
    }

    pub(crate) fn remove(&self, file: &Arc<T>) {
        let mut files = lock(&self.files);
        let removed = files.iter().position(|other| Arc::ptr_eq(other, file)).map(|at| files.remove(at));
        self.count.store(files.len(), Release);
        drop(files);
        drop(removed);
    }
}

/// The entries of a list, locked.
pub(crate) struct Entries<'a, T>(MutexGuard<'a, Vec<Arc<T>>>);

impl<T> Entries<'_, T> {
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<T>> {
        self.0.iter()
    }
}
