//! What SPIN stores about a file between requests, and for how long.
//!
//! ```text
//!   (device, inode) ──> FileState: shadow descriptor for the page cache, one for O_DIRECT (shadow table)
//!                                  alignment, residency access, a mapping, statistics of past requests
//! ```
//!
//! The program's descriptor is authoritative and is queried again by every request (`fstat`, F_GETFL); a `FileState`
//! holds only what can be cached. A shadow descriptor keeps the inode in use, so its number cannot be given to another
//! file meanwhile. But it also keeps a file system busy and the space of a deleted file allocated, so a `FileState` is
//! dropped when the program closes a descriptor of the file, and at the latest a second or two after its last request.
//!
//! Known flaw: opening a shadow descriptor is an ordinary open, so a program that has a write lease on the file itself
//! gets a lease break, and fanotify listeners see the open.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use spinio_plan::Reason;
use spinio_plan::geometry::BlockStack;
use spinio_sys::Errno;
use spinio_sys::linux::fs_magic::{self, OVERLAYFS, RAMFS, TMPFS};
use spinio_sys::linux::{self, Advice, DirectAlign, Fd, FileKey, FileKind, Stat};

use spinio_host::lock;
use spinio_host::shadow_fd::{CloseQueue, PreCloseHook, ShadowFd};
use spinio_host::shares::ShareKey;
use spinio_host::syscalls::Syscalls;
use spinio_transfer::Mapping;

use crate::block_stack::BlockStackCache;
use crate::prefault_state::PrefaultState;
use crate::residency::{self, ResidencyAccess};
use crate::ring_slot::{RingSlot, is_issued_at_once};
use crate::stripes::FileStripes;

const SEEK_END: i32 = 2;

/// The size of what `fd` refers to. The status of a block device has none; asking for it moves the descriptor's offset.
pub fn size_of(sys: &dyn Syscalls, fd: Fd, stat: &Stat) -> Result<u64, Errno> {
    match stat.kind {
        FileKind::Block => sys.lseek(fd, 0, SEEK_END),
        _ => Ok(stat.size),
    }
}

/// Consecutive requests that must have been served by the page cache before the next is assumed to be. A wrong guess
/// costs 1.5 times as much as a right one saves.
const HIT_STREAK: u64 = 4;

/// Called when a file is dropped, with whether the program has closed a descriptor of it.
pub(crate) type BeforeClose = Box<dyn FnOnce(bool) -> PreCloseHook + Send + Sync>;

/// A file as SPIN remembers it.
pub struct FileState {
    key: FileKey,
    /// Reads through the page cache; for shadow workers.
    pub cached: Arc<ShadowFd>,
    /// Reads with O_DIRECT; for shadow workers. The reason if there is none.
    pub direct_fd: Result<ShadowFd, Reason>,
    /// Where that one is in the ring.
    pub(crate) ring_slot: Arc<RingSlot>,
    /// Length of a block device; the length of a regular file is queried by every request.
    pub size: u64,
    /// Number of the block device or of the file system, for which P2P is trusted or not.
    pub storage: u64,
    /// Magic number of the file system; 0 for a block device.
    pub file_system: u64,
    /// The block devices under it.
    block_stack: Arc<BlockStack>,
    /// Its position in the stripes of an array with parity.
    pub stripes: FileStripes,
    /// They are NVMe, or several disks in parallel: selects the cost model.
    pub fast: bool,
    /// The alignment that O_DIRECT needs.
    pub direct_align: DirectAlign,
    /// Whether the file may be mapped.
    mappable: bool,
    /// How its residency may be queried.
    pub residency_access: ResidencyAccess,
    /// Consecutive requests that were served by the page cache alone.
    hit_streak: AtomicU64,
    /// How often the program has given advice that makes pages its own.
    pub(crate) advices: AtomicU64,
    /// The driver refused to register its pages.
    pub pin_refused: AtomicBool,
    mapping: Mutex<Option<Arc<Mapping>>>,
    /// The state of prefaulting its mapping.
    pub prefault: PrefaultState,
    /// Returns what to do with the descriptor before it is closed.
    before_close: Mutex<Option<BeforeClose>>,
    /// The program has closed a descriptor of it.
    pub(crate) closed: AtomicBool,
    pub(crate) last_used: AtomicU64,
    created: Instant,
}

/// The share of the shadow workers that work on a file takes: its file system's, or its block device's.
pub fn share_key(stat: &Stat) -> ShareKey {
    if stat.kind == FileKind::Block { stat.rdev } else { stat.dev }
}

/// Whether the regular files of this file system are in memory. Its other nodes need not be: devtmpfs has the same number.
pub(crate) fn is_memory(file_system: u64) -> bool {
    matches!(file_system, TMPFS | RAMFS)
}

impl FileState {
    /// Whether its reads end without a server's help: it is on a disk of this machine, or in memory.
    pub fn is_local(&self) -> bool {
        is_issued_at_once(self.file_system) || is_memory(self.file_system)
    }

    /// Opens the shadow descriptors. Runs on a shadow worker.
    pub(crate) fn open(
        sys: &dyn Syscalls,
        block_stacks: &BlockStackCache,
        close_queue: &CloseQueue,
        tid: u32,
        fd: Fd,
        stat: Stat,
        created: Instant,
    ) -> Result<FileState, Reason> {
        let reopen = |flags: u32| {
            // A lease that another descriptor holds is not waited for.
            let wanted = linux::O_RDONLY | flags;
            let shadow_fd = sys.reopen(tid, fd, (wanted | linux::O_NONBLOCK) as i32).map_err(|_| Reason::NoShadowFd)?;
            let shadow_fd = ShadowFd::new(shadow_fd, close_queue.clone());
            // Else io_uring would not wait for storage.
            linux::set_status_flags(shadow_fd.get(), wanted as i32).map_err(|_| Reason::NoShadowFd)?;
            // A procfs of another PID namespace, or a descriptor reused meanwhile, would open another file.
            match sys.fstat(shadow_fd.get()) {
                Ok(s) if (s.key(), s.rdev) == (stat.key(), stat.rdev) => Ok(shadow_fd),
                _ => Err(Reason::NoShadowFd),
            }
        };
        let cached = reopen(0)?;
        let cached_fd = cached.get();
        // Probing by reading must not start the Linux kernel's read-ahead.
        let _ = linux::fadvise(cached.get(), 0, 0, Advice::Random);
        let magic = sys.file_system(cached.get()).unwrap_or(fs_magic::UNKNOWN);
        // The node of a block device is on devtmpfs; its bytes are not.
        let in_memory = is_memory(magic) && stat.kind == FileKind::Regular;
        let reported = sys.direct_align(cached.get()).ok().flatten();
        let align = match reported {
            Some(a) if a.offset > 0 => a,
            // Not reported: an alignment that every block device accepts.
            _ => DirectAlign { memory: 4096, offset: 4096 },
        };
        let refused = in_memory || reported.is_some_and(|a| a.offset == 0) || align.offset as usize > linux::PAGE;
        let direct = match refused {
            true => Err(Reason::NoDirectIo),
            false => reopen(linux::O_DIRECT).map_err(|_| Reason::NoDirectIo),
        };
        let ring_slot = Arc::<RingSlot>::default();
        let direct = direct.map(|mut direct| {
            let ring_slot = Arc::clone(&ring_slot);
            direct.set_pre_close(Box::new(move |_| ring_slot.release()));
            direct
        });
        let residency_access =
            if in_memory { ResidencyAccess::InMemory } else { residency::residency_access(sys, cached_fd, stat.uid) };
        let storage = share_key(&stat);
        let block_stack = block_stacks.get(sys, cached_fd, stat, magic);
        Ok(FileState {
            key: stat.key(),
            cached: Arc::new(cached),
            size: size_of(sys, cached_fd, &stat).unwrap_or(0),
            storage,
            file_system: if stat.kind == FileKind::Block { 0 } else { magic },
            fast: block_stack.is_fast(),
            stripes: FileStripes::new(&block_stack),
            block_stack,
            direct_fd: direct,
            ring_slot,
            direct_align: align,
            // Prefaulting a mapping of a sparse file in memory would allocate its holes.
            mappable: magic != OVERLAYFS && !in_memory && stat.kind == FileKind::Regular,
            residency_access,
            hit_streak: AtomicU64::new(0),
            advices: AtomicU64::new(0),
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

    /// Records whether a request of `len` bytes was served by the page cache alone.
    pub fn record_residency(&self, len: u64, was_cached: bool) {
        let streak = self.hit_streak.load(Relaxed) + if len >= 64 << 20 { HIT_STREAK } else { 1 };
        self.hit_streak.store(if was_cached { streak } else { 0 }, Relaxed);
    }

    /// Which file it is.
    pub fn key(&self) -> FileKey {
        self.key
    }

    /// The block devices under it, as they were a second or two ago.
    pub fn block_stack(&self) -> &Arc<BlockStack> {
        &self.block_stack
    }

    /// Bytes of a read in a ring at most that the kernel begins by itself.
    pub fn max_ring_read(&self) -> usize {
        usize::try_from(self.block_stack.max_ring_read()).unwrap_or(usize::MAX)
    }

    /// Whether [`FileState::mapping`] can work.
    pub fn is_mappable(&self) -> bool {
        self.mappable
    }

    /// The cached mapping, if it has at least `len` bytes.
    pub fn cached_mapping(&self, len: u64) -> Option<Arc<Mapping>> {
        lock(&self.mapping).as_ref().filter(|m| m.len as u64 >= len).map(Arc::clone)
    }

    /// A mapping of at least `len` bytes. Runs on a shadow worker, whose descriptor it needs.
    pub fn mapping(&self, sys: &dyn Syscalls, len: u64) -> Option<Arc<Mapping>> {
        if !self.mappable {
            return None;
        }
        self.cached_mapping(len).or_else(|| {
            // The whole file, so that the next request can use it too.
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
    /// Sets the function called when the file is dropped, with whether the program has closed a descriptor of it; the
    /// hook that it returns runs before the descriptor is closed. Only the first call has an effect.
    pub(crate) fn set_before_close(&self, before: BeforeClose) {
        lock(&self.before_close).get_or_insert(before);
    }
}

impl Drop for FileState {
    fn drop(&mut self) {
        if let Some(before) = lock(&self.before_close).take() {
            let hook = before(self.closed.load(Relaxed));
            if let Some(cached) = Arc::get_mut(&mut self.cached) {
                cached.set_pre_close(hook);
            }
        }
    }
}
