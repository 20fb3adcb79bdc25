//! What the processes of the stress test know of each other: words of a file that all of them map. They survive a
//! SIGKILL, so the test knows how far a killed process came.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

use spinio_sys::linux::SharedWords;

/// Kinds of workers.
pub(crate) const WORKERS: usize = 6;
/// Lives of one kind at most: it is killed and started again.
pub(crate) const LIVES: usize = 128;

const HEADER: usize = 8;
const LIFE: usize = 8;
const STOP: usize = 0;

/// Counters of one life.
#[derive(Clone, Copy)]
pub(crate) enum Counter {
    /// The round that it has begun last. Its stores may be visible.
    Begun,
    /// The round that it has completed last. Its stores must be visible.
    Done,
    /// Epochs that a server took with it.
    Stale,
    /// Releases that were found committed after the server had died.
    Recovered,
    /// Pages merged.
    Merged,
    /// Pages patched inside an epoch.
    Patched,
    /// Cells compared.
    Compared,
    /// Loops of any sort: that it goes on.
    Alive,
}

/// The words.
pub(crate) struct Board(SharedWords);

/// What others have written at one time: rounds by worker and life.
pub(crate) struct Rounds(Vec<Vec<u64>>);

impl Rounds {
    pub(crate) fn get(&self, worker: usize, life: usize) -> u64 {
        self.0.get(worker).and_then(|lives| lives.get(life)).copied().unwrap_or(0)
    }
}

impl Board {
    pub(crate) fn create(path: &Path) -> Board {
        let file = File::create_new(path).unwrap();
        file.set_len(((HEADER + WORKERS * LIVES * LIFE) * 8) as u64).unwrap();
        Board::open(path)
    }

    pub(crate) fn open(path: &Path) -> Board {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        // SAFETY: `create` gave it this length, and no process cuts it.
        Board(unsafe { SharedWords::map(file.as_fd(), HEADER + WORKERS * LIVES * LIFE) }.unwrap())
    }

    pub(crate) fn is_over(&self) -> bool {
        self.0[STOP].load(SeqCst) != 0
    }

    pub(crate) fn stop(&self) {
        self.0[STOP].store(1, SeqCst);
    }

    /// Lives of a worker that were started.
    pub(crate) fn lives(&self, worker: usize) -> usize {
        self.0[1 + worker].load(SeqCst) as usize
    }

    pub(crate) fn begin_life(&self, worker: usize) -> usize {
        self.0[1 + worker].fetch_add(1, SeqCst) as usize
    }

    pub(crate) fn counter(&self, worker: usize, life: usize, counter: Counter) -> &AtomicU64 {
        assert!(worker < WORKERS && life < LIVES);
        &self.0[HEADER + (worker * LIVES + life) * LIFE + counter as usize]
    }

    /// Of all lives.
    pub(crate) fn rounds(&self, counter: Counter) -> Rounds {
        let of =
            |worker| (0..self.lives(worker)).map(|life| self.counter(worker, life, counter).load(SeqCst)).collect();
        Rounds((0..WORKERS).map(of).collect())
    }

    /// The sum of a counter over all lives of some workers.
    pub(crate) fn sum(&self, workers: std::ops::Range<usize>, counter: Counter) -> u64 {
        let lives = workers.flat_map(|worker| (0..self.lives(worker)).map(move |life| (worker, life)));
        lives.map(|(worker, life)| self.counter(worker, life, counter).load(SeqCst)).sum()
    }
}
