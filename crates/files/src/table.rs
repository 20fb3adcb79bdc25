//! The files that SPIN remembers, least recently used out first.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use spinio_host::lock;
use spinio_host::pool::Crew;
use spinio_host::syscalls::Kernel;
use spinio_plan::Reason;
use spinio_sys::linux::{self, Fd, Stat};

use crate::block_stack::Stacks;
use crate::state::File;

/// Files remembered at once; the least recently used goes first.
const FILES: usize = 64;

/// Seconds after which an unused file is let go of.
const KEEP: u64 = 1;

/// The files that SPIN remembers now.
pub struct Files {
    kept: Mutex<Vec<Arc<File>>>,
    count: AtomicU64,
    born: Instant,
    stacks: Arc<Stacks>,
}

impl Default for Files {
    fn default() -> Files {
        Files { kept: Mutex::default(), count: AtomicU64::new(0), born: Instant::now(), stacks: Arc::default() }
    }
}

impl Files {
    /// The stacks of block devices that were read lately.
    pub fn stacks(&self) -> Arc<Stacks> {
        Arc::clone(&self.stacks)
    }

    /// The file behind a descriptor of the calling thread; the reason if it cannot be opened again.
    pub fn get(
        &self,
        kernel: &'static dyn Kernel,
        crew: &Crew,
        fd: Fd,
        stat: Stat,
    ) -> Result<Arc<File>, Reason> {
        if let Some(file) = self.find((stat.dev, stat.ino)) {
            return Ok(file);
        }
        let tid = linux::gettid();
        let graves = crew.graveyard();
        let born = self.born;
        let stacks = Arc::clone(&self.stacks);
        let file = crew
            .call(move || File::open(kernel, &stacks, &graves, tid, fd, stat, born))
            .unwrap_or(Err(Reason::NoHelpers))
            .map(Arc::new)?;
        Ok(self.remember(file))
    }

    /// The same on a keeper, for a descriptor of thread `tid`.
    pub fn get_here(
        &self,
        kernel: &'static dyn Kernel,
        crew: &Crew,
        tid: u32,
        fd: Fd,
        stat: Stat,
    ) -> Result<Arc<File>, Reason> {
        if let Some(file) = self.find((stat.dev, stat.ino)) {
            return Ok(file);
        }
        let file = File::open(kernel, &self.stacks, &crew.graveyard(), tid, fd, stat, self.born)?;
        Ok(self.remember(Arc::new(file)))
    }

    /// A file that is remembered.
    pub fn find(&self, key: (u64, u64)) -> Option<Arc<File>> {
        let kept = lock(&self.kept);
        let file = kept.iter().find(|f| f.key() == key)?;
        file.touch();
        Some(Arc::clone(file))
    }

    fn remember(&self, file: Arc<File>) -> Arc<File> {
        let mut kept = lock(&self.kept);
        if let Some(other) = kept.iter().find(|f| f.key() == file.key()) {
            return Arc::clone(other);
        }
        let dropped = (kept.len() >= FILES)
            .then(|| kept.iter().enumerate().min_by_key(|(_, f)| f.used.load(Relaxed)).map(|(at, _)| at))
            .flatten()
            .map(|at| kept.swap_remove(at));
        kept.push(Arc::clone(&file));
        self.count.store(kept.len() as u64, Relaxed);
        drop(kept);
        drop(dropped);
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
        let now = self.born.elapsed().as_secs();
        let mut kept = lock(&self.kept);
        let (gone, stay): (Vec<_>, Vec<_>) =
            kept.drain(..).partition(|f| f.used.load(Relaxed) + KEEP < now && Arc::strong_count(f) == 1);
        *kept = stay;
        self.count.store(kept.len() as u64, Relaxed);
        drop(kept);
        drop(gone);
    }
}
