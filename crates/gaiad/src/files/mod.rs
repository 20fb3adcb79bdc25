//! The files that have a page table: those that a client has mapped, and those whose released pages are not written out.
//!
//! All other files are passed through, and nothing is known of their pages. So a file that gets a table must count
//! every page as one that the kernel may have, and no request of it may be half done: requests hold the lock of the
//! file's shard.
//!
//! Locks, in this order: shard > release of a file > pages of a file. The last is never held across an invalidation, nor
//! while a client is waited for. A handler takes all but the second. That of times.rs is held for its own calls only.

mod write_out;

use std::collections::HashMap;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use spinio_pagecache::change_counters::{self, FILE_WORDS};
use spinio_pagecache::messages::MapKind;
use spinio_pagecache::{FilePages, KernelPages, OwnerId, Recovered, Release, Slots};
use spinio_sys::injection_point;

use crate::admission::Peer;
use crate::arriving::Arriving;
use crate::backing::{Access, Backing};
use crate::file_backing::{FileBacking, errno};
use crate::invalidator::Invalidator;
use crate::late::ARRIVING;
use crate::lent::chunks::LentChunks;
use crate::lock::lock;
use crate::nodes::Nodes;
use crate::overwrites::Overwrites;
use crate::report::report;
use crate::shared_counters::SharedCounters;
use crate::small_writes::SmallWrites;
use crate::times::Times;

pub(crate) use write_out::Others;

/// Files of one shard wait for each other only while a table is made.
const SHARDS: usize = 64;
/// All pages of a file.
const ALL: Range<u64> = 0..u64::MAX;

type Shard = HashMap<u64, Arc<File>>;

/// A file with a page table.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) node: u64,
    /// Held during a release, from its commit until its pages are invalidated.
    release: Mutex<()>,
    pages: Mutex<FilePages>,
    /// Clients that have it mapped.
    users: AtomicUsize,
    holders: Mutex<HashMap<OwnerId, (Peer, MapKind)>>,
    /// The kernel has forgotten the node; its number may mean another file.
    gone: AtomicBool,
    /// When the oldest page was released that may not be written out.
    dirty_since: Mutex<Option<Instant>>,
    /// The last attempt to write out released pages has failed.
    stuck: AtomicBool,
    /// Once a client has it mapped.
    counters: OnceLock<SharedCounters>,
    /// Released pages whose bytes are on their way from device memory (arrivals.rs).
    arriving: Arriving,
    lent: LentChunks,
    overwrites: Overwrites,
    small_writes: SmallWrites,
}

/// The page table while it is locked. Clients are told of changes before the lock is released.
pub(crate) struct Pages<'a> {
    file: &'a File,
    pages: MutexGuard<'a, FilePages>,
    before: u64,
}

impl Deref for Pages<'_> {
    type Target = FilePages;

    fn deref(&self) -> &FilePages {
        &self.pages
    }
}

impl DerefMut for Pages<'_> {
    fn deref_mut(&mut self) -> &mut FilePages {
        &mut self.pages
    }
}

impl Drop for Pages<'_> {
    fn drop(&mut self) {
        if self.pages.changes() != self.before
            && let Some(counters) = self.file.counters.get()
        {
            change_counters::count_change(counters.words());
        }
    }
}

impl File {
    pub(crate) fn new(node: u64, pages: FilePages) -> File {
        File {
            node,
            release: Mutex::default(),
            pages: Mutex::new(pages),
            users: AtomicUsize::new(0),
            holders: Mutex::default(),
            gone: AtomicBool::new(false),
            dirty_since: Mutex::default(),
            stuck: AtomicBool::new(false),
            counters: OnceLock::new(),
            arriving: Arriving::default(),
            lent: LentChunks::default(),
            overwrites: Overwrites::default(),
            small_writes: SmallWrites::default(),
        }
    }

    /// The page table, once the bytes of all pages are there.
    pub(crate) fn pages(&self) -> Pages<'_> {
        self.pages_of(&ALL)
    }

    /// The page table, once the bytes of these pages are there: for what looks at them, or frees their slots.
    pub(crate) fn pages_of(&self, pages: &Range<u64>) -> Pages<'_> {
        self.pages_for(|_| pages.clone()).0
    }

    /// The page table, once the bytes of those pages are there that it names itself.
    pub(crate) fn pages_for(&self, which: impl Fn(&FilePages) -> Range<u64>) -> (Pages<'_>, Range<u64>) {
        loop {
            match self.try_pages_for(&which) {
                Ok(found) => return found,
                Err(arriving) => self.arriving.wait(&arriving),
            }
        }
    }

    /// The page table, for what has the file held: `None` if bytes of these pages are on their way ([`Files::with`]).
    pub(crate) fn pages_if_there(&self, pages: &Range<u64>) -> Option<Pages<'_>> {
        self.try_pages_for(|_| pages.clone()).ok().map(|(table, _)| table)
    }

    /// Those pages, if bytes of them are on their way.
    fn try_pages_for(
        &self,
        which: impl Fn(&FilePages) -> Range<u64>,
    ) -> std::result::Result<(Pages<'_>, Range<u64>), Range<u64>> {
        // Until this has the lock: WRITEs that began without it meanwhile could go on for ever.
        let mut waits = None;
        loop {
            let table = self.pages_now();
            let pages = which(&table);
            if self.arriving.has(&pages) {
                return Err(pages);
            }
            if !self.overwrites.has(&pages) {
                return Ok((table, pages));
            }
            drop(table);
            waits.get_or_insert_with(|| self.overwrites.keep_the_lock());
            self.overwrites.wait(&pages);
        }
    }

    /// From now on the bytes of released pages are on their way: of one part of them. With the page table locked, or
    /// before it is used.
    pub(crate) fn begin_arrival(&self, part: u64, pages: Range<u64>) {
        self.arriving.begin(part, pages);
    }

    /// They are there; or lost ([`crate::nodes::Nodes::set_lost`]), and zeros.
    pub(crate) fn end_arrival(&self, part: u64) {
        self.arriving.end(part);
    }

    pub(crate) fn is_arriving(&self) -> bool {
        self.arriving.any()
    }

    /// WRITEs that go on without the lock.
    pub(crate) fn overwrites(&self) -> &Overwrites {
        &self.overwrites
    }

    /// WRITEs of few pages.
    pub(crate) fn small_writes(&self) -> &SmallWrites {
        &self.small_writes
    }

    /// The page table, also while bytes are on their way: for what looks at none.
    pub(crate) fn pages_now(&self) -> Pages<'_> {
        let pages = lock(&self.pages);
        Pages { file: self, before: pages.changes(), pages }
    }

    /// The page table, to change pages of the file with it.
    pub(crate) fn pages_to_change(&self, pages: &Range<u64>) -> Pages<'_> {
        let locked = self.pages_of(pages);
        self.lent.change(pages);
        locked
    }

    /// The same for what has the file held, as [`File::pages_if_there`].
    pub(crate) fn pages_to_change_if_there(&self, pages: &Range<u64>) -> Option<Pages<'_>> {
        let locked = self.pages_if_there(pages)?;
        self.lent.change(pages);
        Some(locked)
    }

    /// Chunks that clients have lent.
    pub(crate) fn lent(&self) -> &LentChunks {
        &self.lent
    }

    /// The counters for clients. After the first call [`Writers::tell`](crate::writers::Writers::tell) is due.
    pub(crate) fn counters(&self) -> Result<&SharedCounters, Errno> {
        if let Some(counters) = self.counters.get() {
            return Ok(counters);
        }
        let counters = SharedCounters::new(FILE_WORDS)?;
        // Until it is known.
        change_counters::set_writers(counters.words(), true);
        Ok(self.counters.get_or_init(|| counters))
    }

    /// Tells clients whether a program may have it open for writing.
    pub(crate) fn tell_writers(&self, any: bool) {
        if let Some(counters) = self.counters.get() {
            change_counters::set_writers(counters.words(), any);
        }
    }

    /// Serializes releases.
    pub(crate) fn lock_release(&self) -> MutexGuard<'_, ()> {
        lock(&self.release)
    }

    /// The processes of its owners, and how their kernels load the pages.
    pub(crate) fn holders(&self) -> MutexGuard<'_, HashMap<OwnerId, (Peer, MapKind)>> {
        lock(&self.holders)
    }

    /// Clients that have it mapped.
    pub(crate) fn maps(&self) -> usize {
        self.users.load(SeqCst)
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(SeqCst)
    }

    /// Whether released pages could not be written out the last time.
    pub(crate) fn is_stuck(&self) -> bool {
        self.stuck.load(SeqCst)
    }

    /// A release has made pages dirty.
    pub(crate) fn mark_dirty(&self) {
        lock(&self.dirty_since).get_or_insert_with(Instant::now);
    }
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Files {
    slots: Arc<Slots>,
    backing: Arc<Backing>,
    shards: [RwLock<Shard>; SHARDS],
    owners: AtomicU64,
    nonce: u64,
    times: Times,
    /// Whether a file may have a table, for threads that have nothing to do otherwise.
    any: Mutex<bool>,
    some: Condvar,
}

/// A file during a request, with or without a table.
pub(crate) struct Held<'a> {
    shard: RwLockReadGuard<'a, Shard>,
    node: u64,
}

impl Held<'_> {
    pub(crate) fn file(&self) -> Option<&Arc<File>> {
        self.shard.get(&self.node)
    }
}

/// A file that a client has mapped; it keeps its table until this is dropped.
#[derive(Debug)]
pub(crate) struct Use(Arc<File>);

impl Use {
    /// The same, for a guard that is held while the client changes.
    pub(crate) fn share(&self) -> Arc<File> {
        self.0.clone()
    }
}

impl std::ops::Deref for Use {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, SeqCst);
    }
}

impl Files {
    /// With what an earlier server left.
    ///
    /// # Errors
    /// A file cannot be opened now: its released pages wait for the next server.
    pub(crate) fn new(slots: Arc<Slots>, recovered: Vec<Recovered>, backing: Arc<Backing>) -> Result<Files, Errno> {
        let shards = std::array::from_fn(|_| RwLock::default());
        let mut nonce = [0; 8];
        rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())?;
        let nonce = u64::from_ne_bytes(nonce);
        let (times, any, some) = (Times::default(), Mutex::new(!recovered.is_empty()), Condvar::new());
        let files = Files { slots, backing, shards, owners: 1.into(), nonce, times, any, some };
        // All leases are broken at the same time: each takes up to 45 s.
        for recovered in &recovered {
            let _ = files.backing.open(recovered.file(), Access::Write);
        }
        for recovered in recovered {
            let node = recovered.file();
            let opened = files.backing.open_waiting(node, Access::Write).or_else(|error| match error {
                Errno::STALE | Errno::NOENT => Err(error),
                // One file that cannot be written now (EROFS, ETXTBSY) must not end the mount. Its pages wait.
                _ => files.backing.open_waiting(node, Access::Read),
            });
            let fd = match opened {
                Ok(fd) => fd,
                // It does not exist any more.
                Err(Errno::STALE | Errno::NOENT) => {
                    recovered.discard(&files.slots);
                    continue;
                }
                Err(error) => {
                    report!("cannot open node {node}, which has released pages: {error}");
                    return Err(error);
                }
            };
            match FilePages::recover(files.slots.clone(), recovered, &FileBacking(fd.as_fd())) {
                Ok(pages) => {
                    let file = File::new(node, pages);
                    file.mark_dirty();
                    write(files.shard(node)).insert(node, Arc::new(file));
                }
                Err(error) => {
                    report!("cannot read node {node}, which has released pages: {error}");
                    return Err(errno(&error));
                }
            }
        }
        Ok(files)
    }

    pub(crate) fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }

    /// The nodes.
    pub(crate) fn nodes(&self) -> &Nodes {
        self.backing.nodes()
    }

    pub(crate) fn times(&self) -> &Times {
        &self.times
    }

    /// A number that no owner had before.
    pub(crate) fn new_owner(&self) -> OwnerId {
        OwnerId(self.owners.fetch_add(1, SeqCst))
    }

    /// A number that no other server has: owners are told apart by both.
    pub(crate) fn nonce(&self) -> u64 {
        self.nonce
    }

    fn shard(&self, node: u64) -> &RwLock<Shard> {
        &self.shards[node as usize % SHARDS]
    }

    /// Runs a call on a file that is held. `None` from the call: a release has begun to hand over pages meanwhile. Nothing is
    /// waited for here: other files of the shard would, too, and there are few workers.
    ///
    /// # Errors
    /// [`ARRIVING`]: bytes of these pages are on their way; the request is tried again when they are there (late.rs).
    pub(crate) fn with<T>(
        &self,
        node: u64,
        pages: &Range<u64>,
        call: impl FnOnce(Option<&Arc<File>>) -> Result<Option<T>, Errno>,
    ) -> Result<T, Errno> {
        let held = self.hold_now(node);
        if held.file().is_some_and(|file| file.arriving.has(pages)) {
            return Err(ARRIVING);
        }
        call(held.file())?.ok_or(ARRIVING)
    }

    /// What the end of a node would wait for, if so: [`ARRIVING`], or EAGAIN, a client with a lease.
    pub(crate) fn forget_waits(&self, node: u64) -> Option<Errno> {
        let file = self.hold_now(node).file().cloned()?;
        if file.is_arriving() {
            return Some(ARRIVING);
        }
        let is_dirty = file.pages_now().dirty().next().is_some();
        let opened = is_dirty.then(|| self.backing.open(node, Access::Write))?;
        opened.err().filter(|error| *error == Errno::AGAIN)
    }

    /// Returns when bytes of the file have arrived, if some are on their way, or after this time.
    pub(crate) fn wait_for_arrival(&self, node: u64, within: Duration) {
        let file = self.hold_now(node).file().cloned();
        if let Some(file) = file {
            file.arriving.wait_for_change(within);
        }
    }

    /// A guard to be held during a request: meanwhile the file of the node neither gets a table nor loses it. Its bytes may be
    /// on their way.
    pub(crate) fn hold_now(&self, node: u64) -> Held<'_> {
        Held { shard: read(self.shard(node)), node }
    }

    /// The file of a node for a client; it gets a table if it has none.
    pub(crate) fn enter(&self, node: u64) -> Use {
        let mut shard = write(self.shard(node));
        // The size does not matter, since the kernel may have all pages.
        let make = || Arc::new(File::new(node, FilePages::new(self.slots.clone(), node, KernelPages::Any, 0)));
        let file = shard.entry(node).or_insert_with(make).clone();
        file.users.fetch_add(1, SeqCst);
        drop(shard);
        let mut any = lock(&self.any);
        if !*any {
            *any = true;
            self.some.notify_all();
        }
        drop(any);
        Use(file)
    }

    /// Returns when a file has a table. Without one nothing is released or counted, and the threads that look every second
    /// need not.
    pub(crate) fn wait_for_some(&self) {
        let any = lock(&self.any);
        drop(self.some.wait_while(any, |any| !*any).unwrap_or_else(PoisonError::into_inner));
    }

    /// Notes that no file has a table, if it is so.
    fn note_none(&self) {
        let mut any = lock(&self.any);
        // With the lock: a file that gets a table after this look sets it afterwards.
        *any = self.shards.iter().any(|shard| !read(shard).is_empty());
    }

    /// Those with a table.
    pub(crate) fn all(&self) -> Vec<Arc<File>> {
        self.shards.iter().flat_map(|shard| read(shard).values().cloned().collect::<Vec<_>>()).collect()
    }

    /// The kernel has forgotten a node: it has none of its pages. Waits for bytes on their way, and for a lease.
    pub(crate) fn forget(&self, node: u64) {
        let file = self.hold_now(node).file().cloned();
        let Some(file) = file else { return self.times.forget(node) };
        file.arriving.wait(&ALL);
        // The kernel has no open descriptor of it, so no client can come, and those that are still there have died.
        let Some(file) = write(self.shard(node)).remove(&node) else { return };
        file.gone.store(true, SeqCst);
        injection_point!("server: file gone");
        if let Err(error) = self.write_out(&file) {
            report!("released pages of node {node} are lost: {error}");
        }
        let empty = FilePages::new(self.slots.clone(), node, KernelPages::None, 0);
        std::mem::replace(&mut *file.pages(), empty).discard();
        self.times.forget(node);
    }

    /// Invalidates what releases of an earlier server have left, so that no program sees older bytes.
    pub(crate) fn settle_all(&self, kernel: &Invalidator) {
        for file in self.all() {
            let _release = file.lock_release();
            settle(&file, kernel);
            injection_point!("server: file settled");
        }
    }
}

/// Completes releases of an earlier server. With the release lock of the file.
pub(crate) fn settle(file: &File, kernel: &Invalidator) {
    let pending = file.pages_now().pending();
    for (release, runs) in pending {
        invalidate(file, kernel, release, runs);
    }
}

/// Invalidates the pages of a release until it is over. With the release lock of the file, and not that of its pages.
pub(crate) fn invalidate(file: &File, kernel: &Invalidator, release: Release, runs: Vec<Range<u64>>) {
    let mut runs = runs;
    loop {
        kernel.invalidate(file.node, &runs);
        runs = file.pages_now().invalidated(release);
        injection_point!("server: twins dropped");
        if runs.is_empty() {
            return;
        }
    }
}

fn read(shard: &RwLock<Shard>) -> RwLockReadGuard<'_, Shard> {
    shard.read().unwrap_or_else(PoisonError::into_inner)
}

fn write(shard: &RwLock<Shard>) -> std::sync::RwLockWriteGuard<'_, Shard> {
    shard.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::path::Path;

    use rustix::fs::{Mode, OFlags};
    use spinio_pagecache::{Access as Want, PAGE, SlotMemory};
    use spinio_sys::linux;

    use super::*;
    use crate::handlers::{identity, stat};
    use crate::link::Link;
    use crate::slot_memory::PageSlots;
    use crate::state::StateMemory;

    const NEW: [u8; PAGE] = [7; PAGE];

    fn open(path: &Path, flags: OFlags) -> OwnedFd {
        rustix::fs::open(path, flags, Mode::empty()).unwrap()
    }

    /// The files below a directory; `flags` opens it.
    fn backing(dir: &Path, state: &Arc<StateMemory>, flags: OFlags) -> Arc<Backing> {
        backing_in(open(dir, flags), state)
    }

    fn backing_in(directory: OwnedFd, state: &Arc<StateMemory>) -> Arc<Backing> {
        let (supervisor, _) = Link::pair().unwrap();
        Arc::new(Backing::new(directory, Arc::new(Nodes::attach(state.clone())), supervisor, 16, 4))
    }

    /// A file with one released page, as during a write-out by another thread: it is not marked dirty.
    fn with_released_page(dir: &Path) -> Option<(Arc<StateMemory>, Files)> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: not root");
            return None;
        }
        std::fs::write(dir.join("file"), [1; PAGE]).unwrap();
        Some(with_released_pages(open(dir, OFlags::RDONLY), open(&dir.join("file"), OFlags::RDWR), 1))
    }

    /// The same of a file of that directory, with its first pages.
    fn with_released_pages(directory: OwnedFd, fd: OwnedFd, pages: u64) -> (Arc<StateMemory>, Files) {
        let state = Arc::new(StateMemory::of(4 << 20));
        let identity = identity(&fd, &stat(&fd).unwrap()).unwrap();
        let node = Nodes::attach(state.clone()).look_up(&identity).unwrap();
        let memory: Arc<dyn SlotMemory> = Arc::new(PageSlots::new(state.clone()));
        let backing = backing_in(directory, &state);
        let files = Files::new(Slots::format(memory).unwrap(), Vec::new(), backing).unwrap();
        let (file, owner) = (files.enter(node), files.new_owner());
        let below = FileBacking(fd.as_fd());
        file.pages().add_owner(owner, 0..pages);
        file.pages().open(&below, owner, 0..pages, Want::Write).unwrap();
        file.pages().filled(owner, 0..pages).unwrap();
        file.pages().commit(&below, owner, 1, (0..pages).map(|page| (page, &NEW))).unwrap();
        drop(file);
        (state, files)
    }

    #[test]
    fn error_of_some_pages_is_told_although_bytes_of_others_are_on_their_way() {
        use rustix::mount::{
            FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
        };
        // A file system that has no space left.
        let Ok(context) = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC) else { return eprintln!("skipped: no mounts") };
        fsconfig_set_string(&context, "size", "64k").unwrap();
        fsconfig_create(&context).unwrap();
        let directory = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).unwrap();
        let make = |name: &str| {
            rustix::fs::openat(&directory, name, OFlags::CREATE | OFlags::RDWR, Mode::RUSR | Mode::WUSR).unwrap()
        };
        // Two calls that write.
        let (file, pages) = (make("file"), 130);
        rustix::fs::ftruncate(&file, pages * PAGE as u64).unwrap();
        let others = make("others");
        while rustix::io::write(&others, &[1; PAGE]).is_ok() {}
        let root = rustix::fs::openat(&directory, c".", OFlags::RDONLY, Mode::empty()).unwrap();
        let (_state, files) = with_released_pages(root, file, pages);
        let file = files.all().pop().unwrap();
        file.begin_arrival(1, 0..1);
        assert_eq!(files.write_out_now(&file), Err(Errno::NOSPC));
        assert!(file.is_stuck());
        rustix::fs::ftruncate(&others, 0).unwrap();
        assert_eq!(files.write_out_now(&file), Err(ARRIVING));
        assert!(!file.is_stuck());
        file.end_arrival(1);
        // Of the other call, and as many as there is space for.
        assert_eq!(files.write_out_now(&file), Err(Errno::NOSPC));
    }

    #[test]
    fn end_of_the_mount_writes_what_another_thread_has_begun_to_write() {
        let dir = tempfile::tempdir().unwrap();
        let Some((_, files)) = with_released_page(dir.path()) else { return };
        files.finish();
        assert!(std::fs::read(dir.path().join("file")).unwrap() == NEW);
    }

    #[test]
    fn released_pages_survive_a_server_that_cannot_open_their_file() {
        let dir = tempfile::tempdir().unwrap();
        let Some((state, first)) = with_released_page(dir.path()) else { return };
        drop(first);
        let attach = |flags| {
            let memory: Arc<dyn SlotMemory> = Arc::new(PageSlots::new(state.clone()));
            let (slots, recovered) = Slots::recover(memory).unwrap();
            assert_eq!(recovered.len(), 1);
            Files::new(slots, recovered, backing(dir.path(), &state, flags))
        };
        // A descriptor that handles cannot be opened with.
        assert_eq!(attach(OFlags::PATH).map(drop), Err(Errno::BADF));
        attach(OFlags::RDONLY).unwrap().finish();
        assert!(std::fs::read(dir.path().join("file")).unwrap() == NEW);
    }

    #[test]
    fn file_that_cannot_be_written_for_a_while_keeps_its_released_pages() {
        let dir = tempfile::tempdir().unwrap();
        let Some((state, first)) = with_released_page(dir.path()) else { return };
        drop(first);
        let clone = rustix::mount::OpenTreeFlags::OPEN_TREE_CLONE;
        let Ok(tree) = rustix::mount::open_tree(rustix::fs::CWD, dir.path(), clone) else {
            return eprintln!("skipped: no mounts");
        };
        linux::make_mount_read_only(tree.as_fd()).unwrap();
        let read_only = rustix::fs::openat(&tree, c".", OFlags::RDONLY, Mode::empty()).unwrap();
        let attach = |directory| {
            let memory: Arc<dyn SlotMemory> = Arc::new(PageSlots::new(state.clone()));
            let (slots, recovered) = Slots::recover(memory).unwrap();
            Files::new(slots, recovered, backing_in(directory, &state)).unwrap()
        };
        let files = attach(read_only);
        let file = files.all().pop().unwrap();
        assert_eq!(files.write_out(&file), Err(Errno::ROFS));
        drop((file, files));
        attach(open(dir.path(), OFlags::RDONLY)).finish();
        assert!(std::fs::read(dir.path().join("file")).unwrap() == NEW);
    }
}
