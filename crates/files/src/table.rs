//! The files that SPIN remembers, least recently used out first.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use spinio_host::lock;
use spinio_host::pool::WorkerPool;
use spinio_host::syscalls::Syscalls;
use spinio_plan::Reason;
use spinio_sys::linux::{self, Fd, Stat};

use crate::block_stack::BlockStackCache;
use crate::state::FileState;

/// Files remembered at once; the least recently used goes first.
const MAX_FILES: usize = 64;

/// Seconds after which an unused file is let go of.
const IDLE_SECONDS: u64 = 1;

/// The files that SPIN remembers now.
pub struct FileTable {
    kept: Mutex<Vec<Arc<FileState>>>,
    count: AtomicU64,
    created: Instant,
    block_stacks: Arc<BlockStackCache>,
}

impl Default for FileTable {
    fn default() -> FileTable {
        FileTable {
            kept: Mutex::default(),
            count: AtomicU64::new(0),
            created: Instant::now(),
            block_stacks: Arc::default(),
        }
    }
}

impl FileTable {
    /// The stacks of block devices that were read lately.
    pub fn block_stacks(&self) -> Arc<BlockStackCache> {
        Arc::clone(&self.block_stacks)
    }

    /// The file behind a descriptor of the calling thread; the reason if it cannot be opened again.
    pub fn get(
        &self,
        kernel: &'static dyn Syscalls,
        crew: &WorkerPool,
        fd: Fd,
        stat: Stat,
    ) -> Result<Arc<FileState>, Reason> {
        if let Some(file) = self.find((stat.dev, stat.ino)) {
            return Ok(file);
        }
        let tid = linux::gettid();
        let close_queue = crew.close_queue();
        let created = self.created;
        let stacks = Arc::clone(&self.block_stacks);
        let file = crew
            .run_blocking(move || FileState::open(kernel, &stacks, &close_queue, tid, fd, stat, created))
            .unwrap_or(Err(Reason::NoWorkers))
            .map(Arc::new)?;
        Ok(self.insert(file))
    }

    /// The same on a keeper, for a descriptor of thread `tid`.
    pub fn get_here(
        &self,
        kernel: &'static dyn Syscalls,
        crew: &WorkerPool,
        tid: u32,
        fd: Fd,
        stat: Stat,
    ) -> Result<Arc<FileState>, Reason> {
        if let Some(file) = self.find((stat.dev, stat.ino)) {
            return Ok(file);
        }
        let file = FileState::open(kernel, &self.block_stacks, &crew.close_queue(), tid, fd, stat, self.created)?;
        Ok(self.insert(Arc::new(file)))
    }

    /// A file that is remembered.
    pub fn find(&self, key: (u64, u64)) -> Option<Arc<FileState>> {
        let kept = lock(&self.kept);
        let file = kept.iter().find(|f| f.key() == key)?;
        file.mark_used();
        Some(Arc::clone(file))
    }

    fn insert(&self, file: Arc<FileState>) -> Arc<FileState> {
        let mut kept = lock(&self.kept);
        if let Some(other) = kept.iter().find(|f| f.key() == file.key()) {
            return Arc::clone(other);
        }
        let evicted = (kept.len() >= MAX_FILES)
            .then(|| kept.iter().enumerate().min_by_key(|(_, f)| f.last_used.load(Relaxed)).map(|(at, _)| at))
            .flatten()
            .map(|at| kept.swap_remove(at));
        kept.push(Arc::clone(&file));
        self.count.store(kept.len() as u64, Relaxed);
        drop(kept);
        drop(evicted);
        file
    }

    /// Whether anything is remembered at all: one load.
    pub fn is_empty(&self) -> bool {
        self.count.load(Relaxed) == 0
    }

    /// How many are remembered.
    pub fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Lets go of one file; true if it was remembered.
    pub fn forget(&self, dev: u64, ino: u64) -> bool {
        let mut kept = lock(&self.kept);
        let gone = kept.iter().position(|f| f.key() == (dev, ino)).map(|at| kept.swap_remove(at));
        self.count.store(kept.len() as u64, Relaxed);
        drop(kept);
        gone.iter().for_each(|file| file.closed.store(true, Relaxed));
        gone.is_some()
    }

    /// Lets go of everything.
    pub fn forget_all(&self) {
        let gone = std::mem::take(&mut *lock(&self.kept));
        gone.iter().for_each(|file| file.closed.store(true, Relaxed));
        self.count.store(0, Relaxed);
        drop(gone);
    }

    /// Lets go of what was not used for a while.
    pub fn tidy(&self) {
        let now = self.created.elapsed().as_secs();
        let mut kept = lock(&self.kept);
        let (gone, stay): (Vec<_>, Vec<_>) =
            kept.drain(..).partition(|f| f.last_used.load(Relaxed) + IDLE_SECONDS < now && Arc::strong_count(f) == 1);
        *kept = stay;
        self.count.store(kept.len() as u64, Relaxed);
        drop(kept);
        drop(gone);
    }
}
