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

pub(crate) mod ahead;
pub(crate) mod canary;
pub(crate) mod geometry;
pub(crate) mod residency;
pub(crate) mod streams;
pub(crate) mod stripes;
pub(crate) mod tables;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use spinio_plan::Reason;
use spinio_plan::geometry::Stack;
use spinio_sys::linux::fs_magic::{OVERLAYFS, RAMFS, TMPFS};
use spinio_sys::linux::{self, Advice, DirectAlign, Fd, FileKind, Stat};

use crate::crew::{Crew, PrivateFd};
use crate::file::ahead::Watched;
use crate::file::geometry::Stacks;
use crate::file::stripes::Stripes;
use crate::file::tables::Tables;
use crate::kernel::Kernel;
use crate::lock::lock;

const SEEK_END: i32 = 2;

/// Files remembered at once; the least recently used goes first.
const FILES: usize = 64;

/// Requests in a row that must have been served by the page cache before the next is presumed to be. A wrong guess
/// costs half as much again as a right one saves.
const STREAK: u64 = 4;

/// Seconds after which an unused file is let go of.
const KEEP: u64 = 1;

/// How the residency of a file may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rights {
    /// `cachestat` and `mincore` tell the truth.
    Owner,
    /// Only reading tells (RWF_NOWAIT).
    Stranger,
    /// The file lives in memory or has no page cache to ask.
    Resident,
}

/// A shared read-only mapping of a whole file.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
}

// SAFETY: a read-only mapping; nobody makes a reference into it, addresses go to the kernel and the driver.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reads in what is absent of a range of the file, and fills its page tables, in the kernel and without a lock of the
    /// driver; registering, which is one at a time there, then finds them filled. What cannot be, registering will refuse.
    pub(crate) fn populate(&self, range: Range<u64>) {
        let page = linux::PAGE as u64;
        let (from, to) = (range.start / page * page, range.end.next_multiple_of(page).min(self.len as u64));
        if from < to {
            // SAFETY: reading advice on a live mapping destroys nothing.
            let _ = unsafe {
                linux::madvise(self.ptr.wrapping_add(from as usize), (to - from) as usize, linux::MADV_POPULATE_READ)
            };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: a mapping is dropped when no request uses it, and every pin on it was given back before.
        let _ = unsafe { linux::munmap(self.ptr, self.len) };
    }
}

/// A file as SPIN remembers it.
pub(crate) struct File {
    key: (u64, u64),
    /// Reads through the page cache; for keepers.
    pub(crate) cached: PrivateFd,
    /// Reads around it; for keepers. The reason where there is none.
    pub(crate) direct: Result<PrivateFd, Reason>,
    /// Length of a block device; a regular file's is asked by every request.
    pub(crate) size: u64,
    /// Number of the block device, or of the file system: what P2P is trusted for.
    pub(crate) storage: u64,
    /// Magic number of the file system; 0 for a block device.
    pub(crate) file_system: u64,
    /// The block devices under it.
    stack: Arc<Stack>,
    /// Where it lies in the stripes of an array with parity.
    pub(crate) stripes: Stripes,
    /// They are NVMe, or several disks work side by side: it chooses the cost model.
    pub(crate) fast: bool,
    /// What O_DIRECT needs.
    pub(crate) align: DirectAlign,
    /// Whether a mapping may be kept, or made at all.
    mappable: bool,
    pub(crate) rights: Rights,
    /// How often in a row requests were served by the page cache alone.
    warm: AtomicU64,
    /// The driver refused to register pages of it.
    pub(crate) pins_refused: AtomicBool,
    mapping: Mutex<Option<Arc<Mapping>>>,
    /// What is known of its page tables.
    pub(crate) tables: Tables,
    /// What reads of it brought into the page cache, once somebody looks after that.
    pub(crate) ahead: Mutex<Option<Watched>>,
    /// The program has closed a descriptor of it.
    closed: AtomicBool,
    used: AtomicU64,
    born: Instant,
}

impl File {
    /// Opens the twins. Runs on a keeper.
    fn open(
        kernel: &dyn Kernel,
        stacks: &Stacks,
        crew: &Graves,
        tid: u32,
        fd: Fd,
        stat: Stat,
        born: Instant,
    ) -> Result<File, Reason> {
        let again = |flags: u32| {
            let twin = kernel.open_again(tid, fd, (linux::O_RDONLY | flags) as i32).map_err(|_| Reason::NoTwin)?;
            let twin = PrivateFd::new(twin, crew.clone());
            // A procfs of another pid namespace, or a descriptor reused meanwhile, would give another file.
            match kernel.fstat(twin.get()) {
                Ok(s) if (s.dev, s.ino, s.rdev) == (stat.dev, stat.ino, stat.rdev) => Ok(twin),
                _ => Err(Reason::NoTwin),
            }
        };
        let cached = again(0)?;
        let cached_fd = cached.get();
        // Probing by reading must not start the kernel's read-ahead.
        let _ = linux::fadvise(cached.get(), 0, 0, Advice::Random);
        let magic = kernel.file_system(cached.get()).unwrap_or(0);
        // A block device's node lies on devtmpfs; its bytes do not.
        let in_memory = matches!(magic, TMPFS | RAMFS) && stat.kind == FileKind::Regular;
        let told = kernel.direct_align(cached.get()).ok().flatten();
        let align = match told {
            Some(a) if a.offset > 0 => a,
            // Not told: what every block device can do.
            _ => DirectAlign { memory: 4096, offset: 4096 },
        };
        let refused = in_memory || told.is_some_and(|a| a.offset == 0) || align.offset as usize > linux::PAGE;
        let direct = match refused {
            true => Err(Reason::NoDirectIo),
            false => again(linux::O_DIRECT).map_err(|_| Reason::NoDirectIo),
        };
        let rights = if in_memory { Rights::Resident } else { residency::rights(kernel, cached_fd, stat.uid) };
        let storage = if stat.kind == FileKind::Block { stat.rdev } else { stat.dev };
        let stack = stacks.of(kernel, cached_fd, stat, magic);
        Ok(File {
            key: (stat.dev, stat.ino),
            cached,
            size: match stat.kind {
                FileKind::Block => kernel.lseek(cached_fd, 0, SEEK_END).unwrap_or(0),
                _ => stat.size,
            },
            storage,
            file_system: if stat.kind == FileKind::Block { 0 } else { magic },
            fast: stack.is_fast(),
            stripes: Stripes::new(&stack),
            stack,
            direct,
            align,
            // Populating a mapping of a sparse file in memory would allocate its holes.
            mappable: magic != OVERLAYFS && !in_memory && stat.kind == FileKind::Regular,
            rights,
            warm: AtomicU64::new(0),
            pins_refused: AtomicBool::new(false),
            mapping: Mutex::default(),
            tables: Tables::default(),
            ahead: Mutex::default(),
            closed: AtomicBool::new(false),
            used: AtomicU64::new(born.elapsed().as_secs()),
            born,
        })
    }

    /// Whether the next request is probably served by the page cache alone, as the last ones were.
    pub(crate) fn is_warm(&self) -> bool {
        self.warm.load(Relaxed) >= STREAK
    }

    /// How a request of `len` bytes went.
    pub(crate) fn learn(&self, len: u64, was_cached: bool) {
        let streak = self.warm.load(Relaxed) + if len >= 64 << 20 { STREAK } else { 1 };
        self.warm.store(if was_cached { streak } else { 0 }, Relaxed);
    }

    /// Device number and inode.
    pub(crate) fn key(&self) -> (u64, u64) {
        self.key
    }

    /// The block devices under it, as they were a second or two ago.
    pub(crate) fn geometry(&self) -> &Arc<Stack> {
        &self.stack
    }

    /// Whether [`File::mapping`] can work.
    pub(crate) fn is_mappable(&self) -> bool {
        self.mappable
    }

    /// The kept mapping, if it has at least `len` bytes.
    pub(crate) fn kept_mapping(&self, len: u64) -> Option<Arc<Mapping>> {
        lock(&self.mapping).as_ref().filter(|m| m.len as u64 >= len).map(Arc::clone)
    }

    /// A mapping of at least `len` bytes. Runs on a keeper, whose descriptor it needs.
    pub(crate) fn mapping(&self, kernel: &dyn Kernel, len: u64) -> Option<Arc<Mapping>> {
        if !self.mappable {
            return None;
        }
        self.kept_mapping(len).or_else(|| {
            // The whole file, so that the next request finds room in it too.
            let size = kernel.fstat(self.cached.get()).map_or(len, |s| s.size.max(len));
            let len = usize::try_from(size).ok()?.next_multiple_of(linux::PAGE);
            let made = kernel.map(self.cached.get(), len).ok().map(|ptr| Arc::new(Mapping { ptr, len }))?;
            *lock(&self.mapping) = Some(Arc::clone(&made));
            Some(made)
        })
    }

    fn touch(&self) {
        self.used.store(self.born.elapsed().as_secs(), Relaxed);
    }
}

impl Drop for File {
    fn drop(&mut self) {
        self.part_from_pages();
    }
}

type Graves = crate::crew::Graveyard;

/// The files that SPIN remembers now.
pub(crate) struct Files {
    kept: Mutex<Vec<Arc<File>>>,
    count: AtomicU64,
    born: Instant,
    stacks: Arc<Stacks>,
}

impl Files {
    pub(crate) fn new() -> Files {
        Files { kept: Mutex::default(), count: AtomicU64::new(0), born: Instant::now(), stacks: Arc::default() }
    }

    /// The stacks of block devices that were read lately.
    pub(crate) fn stacks(&self) -> Arc<Stacks> {
        Arc::clone(&self.stacks)
    }

    /// The file behind a descriptor of the calling thread; the reason if it cannot be opened again.
    pub(crate) fn get(
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
    pub(crate) fn get_here(
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
    pub(crate) fn find(&self, key: (u64, u64)) -> Option<Arc<File>> {
        let kept = lock(&self.kept);
        let file = kept.iter().find(|f| f.key == key)?;
        file.touch();
        Some(Arc::clone(file))
    }

    fn remember(&self, file: Arc<File>) -> Arc<File> {
        let mut kept = lock(&self.kept);
        if let Some(other) = kept.iter().find(|f| f.key == file.key) {
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
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Relaxed) == 0
    }

    /// How many are remembered.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Lets go of one file; true if it was remembered.
    pub(crate) fn forget(&self, dev: u64, ino: u64) -> bool {
        let mut kept = lock(&self.kept);
        let gone = kept.iter().position(|f| f.key == (dev, ino)).map(|at| kept.swap_remove(at));
        self.count.store(kept.len() as u64, Relaxed);
        drop(kept);
        gone.iter().for_each(|file| file.closed.store(true, Relaxed));
        gone.is_some()
    }

    /// Lets go of everything.
    pub(crate) fn forget_all(&self) {
        let gone = std::mem::take(&mut *lock(&self.kept));
        gone.iter().for_each(|file| file.closed.store(true, Relaxed));
        self.count.store(0, Relaxed);
        drop(gone);
    }

    /// Lets go of what was not used for a while.
    pub(crate) fn tidy(&self) {
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
