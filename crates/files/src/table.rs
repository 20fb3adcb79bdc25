//! The files that SPIN remembers; the least recently used is evicted first.
//!
//! A program may call `close` in a signal handler, which may have interrupted `malloc` on the same thread. So what
//! `close` calls here only marks a file; it is dropped by a shadow worker, or by the next request:
//!
//! ```text
//!   close(fd) ── mark, wake a worker, wait a little        worker: take the marked files out, drop them
//! ```
//!
//! For the same reason no thread allocates or frees with the lock: it could wait for the arena of the interrupted thread.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use spinio_host::lock;
use spinio_host::pool::WorkerPool;
use spinio_host::syscalls::Syscalls;
use spinio_plan::Reason;
use spinio_sys::linux::{self, Fd, FileKey, Stat};

use crate::block_stack::BlockStackCache;
use crate::state::{FileState, share_key};

/// Files remembered at once.
const MAX_FILES: usize = 64;

/// Counters of files that wait to be dropped: with that many, a `close` rarely waits for files that other threads close.
const UNDROPPED_COUNTERS: usize = 64;

/// Seconds after which an unused file expires.
const IDLE_SECONDS: u64 = 1;

/// The files that SPIN remembers now.
pub struct FileTable {
    /// Never more than [`MAX_FILES`], for which there is room. Those that the program has closed are found no more.
    files: Mutex<Vec<Arc<FileState>>>,
    /// Of those, the ones that are found.
    count: AtomicU64,
    /// The others.
    closed: AtomicU64,
    /// Those, and the ones that a thread has taken out and is dropping; each in the counter of its key.
    undropped: [AtomicU64; UNDROPPED_COUNTERS],
    created: Instant,
    block_stacks: Arc<BlockStackCache>,
}

impl Default for FileTable {
    fn default() -> FileTable {
        FileTable {
            files: Mutex::new(Vec::with_capacity(MAX_FILES)),
            count: AtomicU64::new(0),
            closed: AtomicU64::new(0),
            undropped: [const { AtomicU64::new(0) }; UNDROPPED_COUNTERS],
            created: Instant::now(),
            block_stacks: Arc::default(),
        }
    }
}

impl FileTable {
    /// The stacks of block devices that were read recently.
    pub fn block_stacks(&self) -> Arc<BlockStackCache> {
        Arc::clone(&self.block_stacks)
    }

    /// The file of a descriptor of the calling thread; the reason if it cannot be reopened.
    pub fn get(
        &self,
        sys: &'static dyn Syscalls,
        shadow: &WorkerPool,
        fd: Fd,
        stat: Stat,
    ) -> Result<Arc<FileState>, Reason> {
        if let Some(file) = self.find(stat.key()) {
            return Ok(file);
        }
        // An older state of the same file ends before a new one begins.
        self.drop_closed();
        // To open the file would break the program's lease, and wait until it gives that back.
        if sys.has_write_lease(fd) {
            return Err(Reason::NoShadowFd);
        }
        let tid = linux::gettid();
        let shadow = shadow.for_key(share_key(&stat));
        let close_queue = shadow.close_queue();
        let created = self.created;
        let stacks = Arc::clone(&self.block_stacks);
        let file = shadow
            .run_blocking(move || FileState::open(sys, &stacks, &close_queue, tid, fd, stat, created))
            .unwrap_or(Err(Reason::NoWorkers))
            .map(Arc::new)?;
        Ok(self.insert(file))
    }

    /// The same on a shadow worker, for a descriptor of thread `tid`.
    pub fn get_here(
        &self,
        sys: &'static dyn Syscalls,
        shadow: &WorkerPool,
        tid: u32,
        fd: Fd,
        stat: Stat,
    ) -> Result<Arc<FileState>, Reason> {
        if let Some(file) = self.find(stat.key()) {
            return Ok(file);
        }
        self.drop_closed();
        let close_queue = shadow.for_key(share_key(&stat)).close_queue();
        let file = FileState::open(sys, &self.block_stacks, &close_queue, tid, fd, stat, self.created)?;
        Ok(self.insert(Arc::new(file)))
    }

    /// A remembered file.
    pub fn find(&self, key: FileKey) -> Option<Arc<FileState>> {
        let files = lock(&self.files);
        let file = files.iter().find(|f| is_open(f, key))?;
        file.mark_used();
        Some(Arc::clone(file))
    }

    fn insert(&self, file: Arc<FileState>) -> Arc<FileState> {
        let mut files = lock(&self.files);
        if let Some(other) = files.iter().find(|f| is_open(f, file.key())) {
            return Arc::clone(other);
        }
        let evicted = (files.len() >= MAX_FILES)
            .then(|| files.iter().enumerate().min_by_key(|(_, f)| f.last_used.load(Relaxed)).map(|(at, _)| at))
            .flatten()
            .map(|at| files.swap_remove(at));
        files.push(Arc::clone(&file));
        self.recount(&files);
        drop(files);
        self.drop_files(evicted);
        file
    }

    /// Called with the lock.
    fn recount(&self, files: &[Arc<FileState>]) {
        let closed = files.iter().filter(|f| f.closed.load(Relaxed)).count();
        self.count.store((files.len() - closed) as u64, Relaxed);
        self.closed.store(closed as u64, Relaxed);
    }

    /// Drops files that were taken out of the list.
    fn drop_files(&self, files: impl IntoIterator<Item = Arc<FileState>>) {
        for file in files {
            let (key, was_closed) = (file.key(), file.closed.load(Relaxed));
            drop(file);
            // A thread that waits for this needs the shadow descriptors queued to be closed.
            self.undropped_of(key).fetch_sub(was_closed.into(), Release);
        }
    }

    /// Whether no file is remembered: one load.
    pub fn is_empty(&self) -> bool {
        self.count.load(Relaxed) == 0
    }

    /// How many are remembered.
    pub fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Forgets one file; the file if it was remembered. Its caller drops it.
    pub fn forget(&self, key: FileKey) -> Option<Arc<FileState>> {
        let mut files = lock(&self.files);
        let removed = files.iter().position(|f| is_open(f, key)).map(|at| files.swap_remove(at));
        self.recount(&files);
        drop(files);
        removed.iter().for_each(|file| file.closed.store(true, Relaxed));
        removed
    }

    /// Forgets one file, which [`FileTable::drop_closed`] is to drop; its storage if it was remembered. Allocates and frees
    /// nothing.
    pub fn close(&self, key: FileKey) -> Option<u64> {
        let files = lock(&self.files);
        let file = files.iter().find(|f| is_open(f, key))?;
        self.mark_closed(file);
        self.recount(&files);
        Some(file.storage)
    }

    /// As [`FileTable::close`] of all files.
    pub fn close_all(&self) {
        let files = lock(&self.files);
        files.iter().filter(|f| !f.closed.load(Relaxed)).for_each(|file| self.mark_closed(file));
        self.recount(&files);
    }

    /// Called with the lock.
    fn mark_closed(&self, file: &FileState) {
        self.undropped_of(file.key()).fetch_add(1, Relaxed);
        file.closed.store(true, Relaxed);
    }

    /// Whether closed files wait to be dropped: one load.
    pub fn has_closed(&self) -> bool {
        self.closed.load(Relaxed) > 0
    }

    /// The counter of closed files that has this one, and perhaps others.
    fn undropped_of(&self, key: FileKey) -> &AtomicU64 {
        // Inodes of files made together are consecutive.
        &self.undropped[(key.ino ^ key.dev) as usize % UNDROPPED_COUNTERS]
    }

    /// Whether this file is dropped, if it was closed: one load.
    pub fn has_dropped(&self, key: FileKey) -> bool {
        self.undropped_of(key).load(Acquire) == 0
    }

    /// Whether all closed files are dropped.
    pub fn has_dropped_closed(&self) -> bool {
        self.undropped.iter().all(|count| count.load(Acquire) == 0)
    }

    /// Drops the closed files. Not for signal handlers.
    pub fn drop_closed(&self) {
        if self.has_closed() {
            self.drop_matching(|file| file.closed.load(Relaxed));
        }
    }

    /// Drops all files.
    pub fn forget_all(&self) {
        self.close_all();
        self.drop_closed();
    }

    /// Drops the files that were not used for [`IDLE_SECONDS`].
    pub fn expire(&self) {
        let now = self.created.elapsed().as_secs();
        self.drop_matching(|f| {
            let is_idle = f.last_used.load(Relaxed) + IDLE_SECONDS < now && Arc::strong_count(f) == 1;
            is_idle && !f.closed.load(Relaxed)
        });
    }

    fn drop_matching(&self, matches: impl Fn(&Arc<FileState>) -> bool) {
        let mut removed = Vec::with_capacity(MAX_FILES);
        let mut files = lock(&self.files);
        removed.extend(files.extract_if(.., |file| matches(file)));
        self.recount(&files);
        drop(files);
        self.drop_files(removed);
    }
}

/// Whether it is this file, and the program has not closed it.
fn is_open(file: &FileState, key: FileKey) -> bool {
    file.key() == key && !file.closed.load(Relaxed)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    use spinio_host::pool::NoIdleTask;
    use spinio_host::syscalls::LinuxSyscalls;

    use super::*;

    #[test]
    fn closed_file_is_dropped_although_another_one_is_not() {
        let shadow = WorkerPool::shadow_workers(&LinuxSyscalls, 2, Duration::ZERO, NoIdleTask).expect("workers");
        let table = FileTable::default();
        let open = || tempfile::tempfile().expect("a file");
        let remember = |file: &std::fs::File| {
            let stat = linux::fstat(file.as_raw_fd()).expect("an open file");
            table.get(&LinuxSyscalls, &shadow, file.as_raw_fd(), stat).expect("it can be opened again").key()
        };
        // Enough that one has another counter than the first.
        let files: Vec<_> = (0..8).map(|_| open()).collect();
        let keys: Vec<FileKey> = files.iter().map(remember).collect();
        let mine = keys[0];
        let other =
            *keys.iter().find(|&&key| !std::ptr::eq(table.undropped_of(key), table.undropped_of(mine))).unwrap();
        assert!(table.close(mine).is_some() && table.close(other).is_some());
        assert!(!table.has_dropped(mine) && !table.has_dropped(other));
        table.drop_matching(|file| file.key() == mine);
        assert!(table.has_dropped(mine) && !table.has_dropped(other) && !table.has_dropped_closed());
        table.drop_closed();
        assert!(table.has_dropped(other) && table.has_dropped_closed());
    }
}
