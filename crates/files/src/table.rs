//! The files that SPIN remembers; the least recently used is evicted first.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
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
    files: Mutex<Vec<Arc<FileState>>>,
    count: AtomicU64,
    created: Instant,
    block_stacks: Arc<BlockStackCache>,
}

impl Default for FileTable {
    fn default() -> FileTable {
        FileTable {
            files: Mutex::default(),
            count: AtomicU64::new(0),
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
        let close_queue = shadow.for_key(share_key(&stat)).close_queue();
        let file = FileState::open(sys, &self.block_stacks, &close_queue, tid, fd, stat, self.created)?;
        Ok(self.insert(Arc::new(file)))
    }

    /// A remembered file.
    pub fn find(&self, key: FileKey) -> Option<Arc<FileState>> {
        let files = lock(&self.files);
        let file = files.iter().find(|f| f.key() == key)?;
        file.mark_used();
        Some(Arc::clone(file))
    }

    fn insert(&self, file: Arc<FileState>) -> Arc<FileState> {
        let mut files = lock(&self.files);
        if let Some(other) = files.iter().find(|f| f.key() == file.key()) {
            return Arc::clone(other);
        }
        let evicted = (files.len() >= MAX_FILES)
            .then(|| files.iter().enumerate().min_by_key(|(_, f)| f.last_used.load(Relaxed)).map(|(at, _)| at))
            .flatten()
            .map(|at| files.swap_remove(at));
        files.push(Arc::clone(&file));
        self.count.store(files.len() as u64, Relaxed);
        drop(files);
        drop(evicted);
        file
    }

    /// Whether no file is remembered: one load.
    pub fn is_empty(&self) -> bool {
        self.count.load(Relaxed) == 0
    }

    /// How many are remembered.
    pub fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Forgets one file; the file if it was remembered.
    pub fn forget(&self, key: FileKey) -> Option<Arc<FileState>> {
        let mut files = lock(&self.files);
        let removed = files.iter().position(|f| f.key() == key).map(|at| files.swap_remove(at));
        self.count.store(files.len() as u64, Relaxed);
        drop(files);
        removed.iter().for_each(|file| file.closed.store(true, Relaxed));
        removed
    }

    /// Forgets all files.
    pub fn forget_all(&self) {
        let removed = std::mem::take(&mut *lock(&self.files));
        removed.iter().for_each(|file| file.closed.store(true, Relaxed));
        self.count.store(0, Relaxed);
        drop(removed);
    }

    /// Forgets the files that were not used for [`IDLE_SECONDS`].
    pub fn expire(&self) {
        let now = self.created.elapsed().as_secs();
        let mut files = lock(&self.files);
        let (removed, remaining): (Vec<_>, Vec<_>) =
            files.drain(..).partition(|f| f.last_used.load(Relaxed) + IDLE_SECONDS < now && Arc::strong_count(f) == 1);
        *files = remaining;
        self.count.store(files.len() as u64, Relaxed);
        drop(files);
        drop(removed);
    }
}
