//! What SPIN keeps about a file between requests, and for how long.
//!
//! ```text
//!   (device, inode) ──> File: twin for the page cache, twin for O_DIRECT (crew's table)
//!                             alignment, residency rights, a mapping, what was learnt
//! ```
//!
//! The program's descriptor is the truth and is asked afresh by every request (`fstat`,
//! F_GETFL); a `File` is only what can be kept beside it. A twin holds the inode, so its
//! number cannot be given to another file meanwhile. But a twin also keeps a file system
//! busy and a deleted file's space in use, so a `File` is let go of when the program
//! closes a descriptor of it, and at the latest a second or two after its last request.
//!
//! Known flaw: opening a twin is an open like any other, so a program that holds a write
//! lease on the file itself gets a lease break, and fanotify listeners see it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use spinio_plan::Reason;
use spinio_plan::geometry::BlockStack;
use spinio_sys::linux::fs_magic::{OVERLAYFS, RAMFS, TMPFS};
use spinio_sys::linux::{self, Advice, DirectAlign, Fd, FileKind, Stat};

use spinio_host::lock;
use spinio_host::shadow_fd::{CloseQueue, PreCloseHook, ShadowFd};
use spinio_host::syscalls::Syscalls;
use spinio_transfer::Mapping;

use crate::block_stack::BlockStackCache;
use crate::residency::{self, ResidencyAccess};
use crate::stripes::FileStripes;
use crate::tables::PrefaultState;

const SEEK_END: i32 = 2;

/// Requests in a row that must have been served by the page cache before the next is presumed to be. A wrong guess
/// costs half as much again as a right one saves.
const HIT_STREAK: u64 = 4;

/// Called when a file goes, with whether the program has closed a descriptor of it.
pub(crate) type BeforeClose = Box<dyn FnOnce(bool) -> PreCloseHook + Send + Sync>;

/// A file as SPIN remembers it.
pub struct FileState {
    key: (u64, u64),
    /// Reads through the page cache; for keepers.
    pub cached: Arc<ShadowFd>,
    /// Reads around it; for keepers. The reason where there is none.
    pub direct_fd: Result<ShadowFd, Reason>,
    /// Length of a block device; a regular file's is asked by every request.
    pub size: u64,
    /// Number of the block device, or of the file system: what P2P is trusted for.
    pub storage: u64,
    /// Magic number of the file system; 0 for a block device.
    pub file_system: u64,
    /// The block devices under it.
    block_stack: Arc<BlockStack>,
    /// Where it lies in the stripes of an array with parity.
    pub stripes: FileStripes,
    /// They are NVMe, or several disks work side by side: it chooses the cost model.
    pub fast: bool,
    /// What O_DIRECT needs.
    pub direct_align: DirectAlign,
    /// Whether a mapping may be kept, or made at all.
    mappable: bool,
    /// How its residency may be asked.
    pub residency_access: ResidencyAccess,
    /// How often in a row requests were served by the page cache alone.
    hit_streak: AtomicU64,
    /// The driver refused to register pages of it.
    pub pin_refused: AtomicBool,
    mapping: Mutex<Option<Arc<Mapping>>>,
    /// What is known of its page tables.
    pub prefault: PrefaultState,
    /// What is to be done with the descriptor before it is closed, once something is.
    before_close: Mutex<Option<BeforeClose>>,
    /// The program has closed a descriptor of it.
    pub(crate) closed: AtomicBool,
    pub(crate) last_used: AtomicU64,
    created: Instant,
}

impl FileState {
    /// Opens the twins. Runs on a keeper.
    pub(crate) fn open(
        sys: &dyn Syscalls,
        block_stacks: &BlockStackCache,
        graves: &CloseQueue,
        tid: u32,
        fd: Fd,
        stat: Stat,
        created: Instant,
    ) -> Result<FileState, Reason> {
        let reopen = |flags: u32| {
            let shadow_fd = sys.reopen(tid, fd, (linux::O_RDONLY | flags) as i32).map_err(|_| Reason::NoShadowFd)?;
            let shadow_fd = ShadowFd::new(shadow_fd, graves.clone());
            // A procfs of another pid namespace, or a descriptor reused meanwhile, would give another file.
            match sys.fstat(shadow_fd.get()) {
                Ok(s) if (s.dev, s.ino, s.rdev) == (stat.dev, stat.ino, stat.rdev) => Ok(shadow_fd),
                _ => Err(Reason::NoShadowFd),
            }
        };
        let cached = reopen(0)?;
        let cached_fd = cached.get();
        // Probing by reading must not start the kernel's read-ahead.
        let _ = linux::fadvise(cached.get(), 0, 0, Advice::Random);
        let magic = sys.file_system(cached.get()).unwrap_or(0);
        // A block device's node lies on devtmpfs; its bytes do not.
        let in_memory = matches!(magic, TMPFS | RAMFS) && stat.kind == FileKind::Regular;
        let reported = sys.direct_align(cached.get()).ok().flatten();
        let align = match reported {
            Some(a) if a.offset > 0 => a,
            // Not told: what every block device can do.
            _ => DirectAlign { memory: 4096, offset: 4096 },
        };
        let refused = in_memory || reported.is_some_and(|a| a.offset == 0) || align.offset as usize > linux::PAGE;
        let direct = match refused {
            true => Err(Reason::NoDirectIo),
            false => reopen(linux::O_DIRECT).map_err(|_| Reason::NoDirectIo),
        };
        let residency_access =
            if in_memory { ResidencyAccess::InMemory } else { residency::residency_access(sys, cached_fd, stat.uid) };
        let storage = if stat.kind == FileKind::Block { stat.rdev } else { stat.dev };
        let block_stack = block_stacks.get(sys, cached_fd, stat, magic);
        Ok(FileState {
            key: (stat.dev, stat.ino),
            cached: Arc::new(cached),
            size: match stat.kind {
                FileKind::Block => sys.lseek(cached_fd, 0, SEEK_END).unwrap_or(0),
                _ => stat.size,
            },
            storage,
            file_system: if stat.kind == FileKind::Block { 0 } else { magic },
            fast: block_stack.is_fast(),
            stripes: FileStripes::new(&block_stack),
            block_stack,
            direct_fd: direct,
            direct_align: align,
            // Populating a mapping of a sparse file in memory would allocate its holes.
            mappable: magic != OVERLAYFS && !in_memory && stat.kind == FileKind::Regular,
            residency_access,
            hit_streak: AtomicU64::new(0),
            pin_refused: AtomicBool::new(false),
            mapping: Mutex::default(),
            prefault: PrefaultState::default(),
            before_close: Mutex::default(),
            closed: AtomicBool::new(false),
            last_used: AtomicU64::new(created.elapsed().as_secs()),
            created,
        })
    }

    /// Whether the next request is probably served by the page cache alone, as the last ones were.
    pub fn likely_cached(&self) -> bool {
        self.hit_streak.load(Relaxed) >= HIT_STREAK
    }

    /// How a request of `len` bytes went.
    pub fn record_residency(&self, len: u64, was_cached: bool) {
        let streak = self.hit_streak.load(Relaxed) + if len >= 64 << 20 { HIT_STREAK } else { 1 };
        self.hit_streak.store(if was_cached { streak } else { 0 }, Relaxed);
    }

    /// Device number and inode.
    pub fn key(&self) -> (u64, u64) {
        self.key
    }

    /// The block devices under it, as they were a second or two ago.
    pub fn block_stack(&self) -> &Arc<BlockStack> {
        &self.block_stack
    }

    /// Whether [`File::mapping`] can work.
    pub fn is_mappable(&self) -> bool {
        self.mappable
    }

    /// The kept mapping, if it has at least `len` bytes.
    pub fn cached_mapping(&self, len: u64) -> Option<Arc<Mapping>> {
        lock(&self.mapping).as_ref().filter(|m| m.len as u64 >= len).map(Arc::clone)
    }

    /// A mapping of at least `len` bytes. Runs on a keeper, whose descriptor it needs.
    pub fn mapping(&self, sys: &dyn Syscalls, len: u64) -> Option<Arc<Mapping>> {
        if !self.mappable {
            return None;
        }
        self.cached_mapping(len).or_else(|| {
            // The whole file, so that the next request finds room in it too.
            let size = sys.fstat(self.cached.get()).map_or(len, |s| s.size.max(len));
            let len = usize::try_from(size).ok()?.next_multiple_of(linux::PAGE);
            let mapping = sys.map(self.cached.get(), len).ok().map(|ptr| Arc::new(Mapping { ptr, len }))?;
            *lock(&self.mapping) = Some(Arc::clone(&mapping));
            Some(mapping)
        })
    }

    pub(crate) fn mark_used(&self) {
        self.last_used.store(self.created.elapsed().as_secs(), Relaxed);
    }
}

impl FileState {
    /// Has `before` called when the file goes, with whether the program has closed a descriptor of it; what it answers is
    /// done with the descriptor before that is closed. The first one stays.
    pub(crate) fn set_before_close(&self, before: BeforeClose) {
        lock(&self.before_close).get_or_insert(before);
    }
}

impl Drop for FileState {
    fn drop(&mut self) {
        if let Some(before) = lock(&self.before_close).take() {
            let farewell = before(self.closed.load(Relaxed));
            if let Some(cached) = Arc::get_mut(&mut self.cached) {
                cached.set_pre_close(farewell);
            }
        }
    }
}
