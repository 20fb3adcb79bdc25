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
    /// Those, and the ones that a thread has taken out and is dropping.
    undropped: AtomicU64,
    created: Instant,
    block_stacks: Arc<BlockStackCache>,
}

impl Default for FileTable {
    fn default() -> FileTable {
        FileTable {
            files: Mutex::new(Vec::with_capacity(MAX_FILES)),
            count: AtomicU64::new(0),
            closed: AtomicU64::new(0),
            undropped: AtomicU64::new(0),
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
            let was_closed = file.closed.load(Relaxed);
            drop(file);
            // A thread that waits for this needs the shadow descriptors queued to be closed.
            self.undropped.fetch_sub(was_closed.into(), Release);
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
        self.undropped.fetch_add(1, Relaxed);
        file.closed.store(true, Relaxed);
    }

    /// Whether closed files wait to be dropped: one load.
    pub fn has_closed(&self) -> bool {
        self.closed.load(Relaxed) > 0
    }

    /// Whether all closed files are dropped: one load.
    pub fn has_dropped_closed(&self) -> bool {
        self.undropped.load(Acquire) == 0
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
