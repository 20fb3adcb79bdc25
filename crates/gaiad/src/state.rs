//! State memory: what a new server needs of a dead one.
//!
//! ```text
//!   ┌ header ┬ journal ──────────────────┬ nodes ─────────────────────────────┬ pages ───────────────────┐
//!   │ 4 KiB  │ 1024 x 512 bytes          │ 4 Mi x 256 bytes                   │ of the caller            │
//!   └────────┴───────────────────────────┴────────────────────────────────────┴──────────────────────────┘
//!     INIT     requests that change names   what the kernel's node numbers mean   snapshots and twins
//! ```
//!
//! A memory file that the supervisor makes and keeps. It is sparse: pages that were never written cost nothing. All of
//! it is accessed as atomic words, so that a crash between any two stores leaves a state that can be described, and
//! each part orders its stores for that (nodes.rs, journal.rs).

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use spinio_fuse::Negotiated;
use spinio_sys::linux::SharedWords;

const MAGIC: u64 = u64::from_le_bytes(*b"SPINgaia");
const VERSION: u64 = 1;

const HEADER_WORDS: usize = 512;
/// Words of a journal slot.
pub(crate) const SLOT_WORDS: usize = 64;
const SLOTS: usize = 1024;
/// Words of a node record.
pub(crate) const NODE_WORDS: usize = 32;
const NODES: usize = 4 << 20;

/// The page table's records and a few slots.
const PAGES_MIN: usize = 1 << 20;

const JOURNAL: Range<usize> = HEADER_WORDS..HEADER_WORDS + SLOTS * SLOT_WORDS;
const NODE_TABLE: Range<usize> = JOURNAL.end..JOURNAL.end + NODES * NODE_WORDS;

/// Words of the header.
mod header {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 1;
    pub(super) const PAGES_WORDS: usize = 2;
    pub(super) const NODES_USED: usize = 3;
    pub(super) const SERVERS: usize = 4;
    pub(super) const NODE_LIMIT: usize = 5;
    pub(super) const NEGOTIATED: usize = 8;
}

/// The mapped memory file.
#[derive(Debug)]
pub struct StateMemory {
    file: OwnedFd,
    words: SharedWords,
}

impl StateMemory {
    /// For tests of what is in it.
    #[cfg(test)]
    pub(crate) fn small() -> StateMemory {
        StateMemory::of(1 << 20)
    }

    /// The same with more pages.
    #[cfg(test)]
    pub(crate) fn of(pages_bytes: usize) -> StateMemory {
        let negotiated = Negotiated { minor: 31, max_write: 4096, max_readahead: 0, flags: 0 };
        StateMemory::create(negotiated, pages_bytes).unwrap()
    }

    /// Makes it, with at least `pages_bytes` bytes for the page table.
    ///
    /// # Errors
    /// The kernel's.
    pub fn create(negotiated: Negotiated, pages_bytes: usize) -> Result<StateMemory, Errno> {
        let words = NODE_TABLE.end + pages_bytes.max(PAGES_MIN).div_ceil(8);
        let file = rustix::fs::memfd_create("spinio-gaia-state", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, words as u64 * 8)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let state = StateMemory::map(file, words)?;
        for (i, word) in negotiated.to_words().into_iter().enumerate() {
            state.words[header::NEGOTIATED + i].store(word, Relaxed);
        }
        state.words[header::PAGES_WORDS].store((words - NODE_TABLE.end) as u64, Relaxed);
        state.words[header::VERSION].store(VERSION, Relaxed);
        state.words[header::MAGIC].store(MAGIC, Release);
        Ok(state)
    }

    /// Maps one that another process made.
    ///
    /// # Errors
    /// EINVAL: it is none of this version.
    pub fn attach(file: OwnedFd) -> Result<StateMemory, Errno> {
        let bytes = usize::try_from(rustix::fs::fstat(&file)?.st_size).map_err(|_| Errno::INVAL)?;
        if !rustix::fs::fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) || bytes / 8 < NODE_TABLE.end {
            return Err(Errno::INVAL);
        }
        let state = StateMemory::map(file, bytes / 8)?;
        let is = |i: usize, value: u64| state.words[i].load(Acquire) == value;
        let pages = (state.words.len() - NODE_TABLE.end) as u64;
        if is(header::MAGIC, MAGIC) && is(header::VERSION, VERSION) && is(header::PAGES_WORDS, pages) {
            Ok(state)
        } else {
            Err(Errno::INVAL)
        }
    }

    #[expect(unsafe_code, reason = "mapping a file that cannot shrink")]
    fn map(file: OwnedFd, words: usize) -> Result<StateMemory, Errno> {
        // SAFETY: the file has this length and is sealed against shrinking (checked by both callers).
        let words = unsafe { SharedWords::map(file.as_fd(), words) }?;
        Ok(StateMemory { file, words })
    }

    /// What INIT agreed on.
    pub fn negotiated(&self) -> Option<Negotiated> {
        Negotiated::from_words([0, 1, 2, 3].map(|i| self.words[header::NEGOTIATED + i].load(Relaxed)))
    }

    /// Limits the records of nodes, for tests that reach the end of the table.
    pub(crate) fn limit_nodes(&self, records: u64) {
        self.words[header::NODE_LIMIT].store(records, Release);
    }

    /// Records of nodes that may be used, with the first one, which never is.
    pub(crate) fn node_limit(&self) -> usize {
        match self.words[header::NODE_LIMIT].load(Acquire) as usize {
            0 => NODES,
            limit => limit.min(NODES),
        }
    }

    /// How many servers have called this before.
    pub(crate) fn count_server(&self) -> u64 {
        self.words[header::SERVERS].fetch_add(1, AcqRel)
    }

    /// The part for the page table.
    pub fn pages(&self) -> &[AtomicU64] {
        &self.words[NODE_TABLE.end..]
    }

    /// Where that part begins in the memory file.
    pub(crate) fn pages_offset(&self) -> u64 {
        NODE_TABLE.end as u64 * 8
    }

    pub(crate) fn journal(&self) -> &[AtomicU64] {
        &self.words[JOURNAL]
    }

    pub(crate) fn nodes(&self) -> &[AtomicU64] {
        &self.words[NODE_TABLE]
    }

    /// Records of the node table that were ever used: those below this number.
    pub(crate) fn nodes_used(&self) -> &AtomicU64 {
        &self.words[header::NODES_USED]
    }
}

impl AsFd for StateMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
