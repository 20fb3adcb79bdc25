//! Files that SPIN opened itself, by path, and that stay open between requests.
//!
//! Their descriptors are in the shadow table, because the program owns every number in its own table: it may close or
//! reuse any, and closing a descriptor of SPIN there would drop every `fcntl` lock that the program has on that file.
//! But every part of a request, on the program's thread and on copy workers, refers to files by descriptor. So a shadow
//! file has a number that no table can contain, and the system calls of this runtime pass calls on it to a shadow
//! worker:
//!
//! ```text
//!   caller, copy worker ── pread(5) ─────────────> Linux               a descriptor of the program
//!                       ── pread(BASE + 3) ──┐
//!   shadow worker      <─────────────────────┘── pread(3) ──> Linux    in the shadow table
//!   shadow worker       ── pread(BASE + 3) ───── pread(3) ──> Linux
//! ```
//!
//! So everything that takes a descriptor also takes a shadow file: reads, writes, their routes, their statistics.
//!
//! Known flaw: a call that is passed on costs two wake-ups if the shadow workers sleep, about 10 us. Transfers are
//! large.

#![expect(unsafe_code, reason = "system calls into buffers, mappings")]

use std::ffi::{CStr, CString};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{
    self, Advice, CacheStat, DirectAlign, Fd, FdTableError, FdTableRoot, FileExtent, InotifyEvent, NewOwnRing, OwnRing,
    Ring, RingFile, SharedRing, Stat,
};

use spinio_host::is_cancelled;
use spinio_host::pool::Workers;
use spinio_host::shadow_fd::ShadowFd;
use spinio_host::shares::{OPENED_BY_NAME, ShareKey};
use spinio_host::syscalls::Syscalls;
use spinio_plan::geometry::BlockStack;

use crate::ctx::FilesCtx;
use crate::lease_watcher::LeaseWatcher;
use crate::table::FileTable;

/// Numbers from here on belong to the shadow table; above what a table can contain (`fs.nr_open`, 2^20, at most
/// 2^31 / 64).
const SHADOW_FD_BASE: Fd = 1 << 28;

type Result<T> = core::result::Result<T, Errno>;

/// Whether this number is a shadow file.
pub fn is_shadow(fd: Fd) -> bool {
    fd >= SHADOW_FD_BASE
}

/// A number that the program passes with a call: -1, for which the kernel has EBADF, if it would name a shadow file. Only
/// SPIN may name those, and the program's own table contains no such number.
pub fn program_fd(fd: Fd) -> Fd {
    if is_shadow(fd) { -1 } else { fd }
}

/// System calls on descriptors of two tables.
pub struct FdRouter {
    inner: &'static dyn Syscalls,
    workers: OnceLock<Weak<Workers>>,
}

impl FdRouter {
    /// A router that lives as long as the process, as its runtime does.
    pub fn leak(inner: &'static dyn Syscalls) -> &'static FdRouter {
        Box::leak(Box::new(FdRouter { inner, workers: OnceLock::new() }))
    }

    /// Sets the worker pools.
    pub fn attach(&self, workers: &Arc<Workers>) {
        let _ = self.workers.set(Arc::downgrade(workers));
    }

    /// Makes a call on a descriptor in the table that contains it.
    fn route<T: Send + 'static>(
        &self,
        fd: Fd,
        f: impl FnOnce(&dyn Syscalls, Fd) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let inner = self.inner;
        if fd < SHADOW_FD_BASE {
            return f(inner, fd);
        }
        let fd = fd - SHADOW_FD_BASE;
        if linux::in_shadow_table() {
            return f(inner, fd);
        }
        let workers = self.workers.get().and_then(Weak::upgrade).ok_or(Errno::BADF)?;
        workers
            .shadow()
            .and_then(|workers| workers.for_key(opened_share(fd)).run_blocking(move || f(inner, fd)))
            .unwrap_or(Err(Errno::IO))
    }
}

impl Syscalls for FdRouter {
    unsafe fn pread(&self, route: Route, fd: Fd, buf: *mut u8, len: usize, offset: u64, flags: u32) -> Result<usize> {
        let buf = buf as usize;
        self.route(fd, move |sys, fd| {
            // SAFETY: as the caller promises, which waits.
            unsafe { sys.pread(route, fd, buf as *mut u8, len, offset, flags) }
        })
    }

    unsafe fn read(&self, fd: Fd, buf: *mut u8, len: usize) -> Result<usize> {
        let buf = buf as usize;
        self.route(fd, move |sys, fd| {
            // SAFETY: as the caller promises, which waits.
            unsafe { sys.read(fd, buf as *mut u8, len) }
        })
    }

    unsafe fn pwritev(
        &self,
        route: Route,
        fd: Fd,
        vectors: &[[usize; 2]],
        at: Option<u64>,
        flags: u32,
    ) -> Result<usize> {
        let vectors = vectors.to_vec();
        self.route(fd, move |sys, fd| {
            // SAFETY: as the caller promises, which waits.
            unsafe { sys.pwritev(route, fd, &vectors, at, flags) }
        })
    }

    fn lseek(&self, fd: Fd, offset: i64, whence: i32) -> Result<u64> {
        self.route(fd, move |sys, fd| sys.lseek(fd, offset, whence))
    }

    fn fstat(&self, fd: Fd) -> Result<Stat> {
        self.route(fd, |sys, fd| sys.fstat(fd))
    }

    fn status_flags(&self, fd: Fd) -> Result<i32> {
        self.route(fd, |sys, fd| sys.status_flags(fd))
    }

    fn reopen(&self, tid: u32, fd: Fd, flags: i32) -> Result<Fd> {
        match fd < SHADOW_FD_BASE {
            true => self.inner.reopen(tid, fd, flags),
            // Called by the shadow worker that opens a shadow descriptor: the number is of the shadow table.
            false => self.inner.reopen(linux::gettid(), fd - SHADOW_FD_BASE, flags),
        }
    }

    fn dup_from_thread(&self, tid: u32, fd: Fd) -> Result<Fd> {
        match fd < SHADOW_FD_BASE {
            true => self.inner.dup_from_thread(tid, fd),
            // As above.
            false => linux::dup_at_least(fd - SHADOW_FD_BASE, 0),
        }
    }

    fn same_fd_table(&self, tid: u32, other_tid: u32) -> Result<bool> {
        self.inner.same_fd_table(tid, other_tid)
    }

    fn is_leased(&self, fd: Fd) -> bool {
        self.route(fd, |sys, fd| Ok(sys.is_leased(fd))) == Ok(true)
    }

    fn close(&self, fd: Fd) {
        self.inner.close(fd);
    }

    fn direct_align(&self, fd: Fd) -> Result<Option<DirectAlign>> {
        self.route(fd, |sys, fd| sys.direct_align(fd))
    }

    fn file_system(&self, fd: Fd) -> Result<u64> {
        self.route(fd, |sys, fd| sys.file_system(fd))
    }

    fn extents(&self, fd: Fd, offset: u64, len: u64, max_count: usize) -> Result<Vec<FileExtent>> {
        self.route(fd, move |sys, fd| sys.extents(fd, offset, len, max_count))
    }

    fn read_sysfs(&self, path: &CStr, max_len: usize) -> Result<Vec<u8>> {
        self.inner.read_sysfs(path, max_len)
    }

    fn list_dir(&self, path: &CStr) -> Result<Vec<CString>> {
        self.inner.list_dir(path)
    }

    fn read_link(&self, path: &CStr) -> Result<Vec<u8>> {
        self.inner.read_link(path)
    }

    fn btrfs_uuid(&self, fd: Fd) -> Result<[u8; 16]> {
        self.route(fd, |sys, fd| sys.btrfs_uuid(fd))
    }

    fn storage_name(&self, dev: u64) -> String {
        self.inner.storage_name(dev)
    }

    fn advise(&self, fd: Fd, offset: u64, len: u64, advice: Advice) -> Result<()> {
        self.route(fd, move |sys, fd| sys.advise(fd, offset, len, advice))
    }

    fn inotify_init(&self) -> Result<Fd> {
        self.inner.inotify_init()
    }

    fn watch_opens(&self, inotify: Fd, fd: Fd) -> Result<i32> {
        self.inner.watch_opens(inotify, fd)
    }

    fn watch_changes(&self, inotify: Fd, fd: Fd) -> Result<i32> {
        self.inner.watch_changes(inotify, fd)
    }

    fn unwatch(&self, inotify: Fd, wd: i32) {
        self.inner.unwatch(inotify, wd);
    }

    fn inotify_events(&self, inotify: Fd) -> Result<Vec<InotifyEvent>> {
        self.inner.inotify_events(inotify)
    }

    fn cachestat(&self, fd: Fd, offset: u64, len: u64) -> Result<CacheStat> {
        self.route(fd, move |sys, fd| sys.cachestat(fd, offset, len))
    }

    fn map(&self, fd: Fd, len: usize) -> Result<*mut u8> {
        self.route(fd, move |sys, fd| sys.map(fd, len).map(|at| at as usize)).map(|at| at as *mut u8)
    }

    fn new_io_uring(&self, entries: u32) -> Result<Ring> {
        self.inner.new_io_uring(entries)
    }

    fn new_own_ring(&self, slots: u32) -> Result<NewOwnRing> {
        self.inner.new_own_ring(slots)
    }

    unsafe fn read_by_own_ring(
        &self,
        route: Route,
        ring: (&OwnRing, RingFile),
        to: (*mut u8, usize),
        offset: u64,
        on_wait: &mut dyn FnMut(),
    ) -> Result<usize> {
        // SAFETY: passed on to the caller.
        unsafe { self.inner.read_by_own_ring(route, ring, to, offset, on_wait) }
    }

    fn new_shared_ring(&self, entries: u32, slots: u32, idle: Duration) -> Result<SharedRing> {
        self.inner.new_shared_ring(entries, slots, idle)
    }

    fn on_completion(&self, result: Result<usize>) -> Result<usize> {
        self.inner.on_completion(result)
    }

    fn take_lease(&self, fd: Fd, tid: u32) -> Result<()> {
        self.inner.take_lease(fd, tid)
    }

    fn has_lease(&self, fd: Fd) -> bool {
        self.inner.has_lease(fd)
    }

    fn has_write_lease(&self, fd: Fd) -> bool {
        self.inner.has_write_lease(fd)
    }

    fn lease_break_time(&self) -> Option<u64> {
        self.inner.lease_break_time()
    }

    fn new_shadow_table(&self) -> core::result::Result<FdTableRoot, FdTableError> {
        self.inner.new_shadow_table()
    }
}

/// A file that SPIN opened itself. Closed when dropped.
pub struct ShadowFile {
    files: Arc<ShadowFiles>,
    shadow_fd: ShadowFd,
}

impl ShadowFile {
    /// The number that requests of this runtime use as its descriptor. It is invalid anywhere else.
    pub fn fd(&self) -> Fd {
        SHADOW_FD_BASE + self.shadow_fd.get()
    }

    /// The number in the shadow table, for a shadow worker.
    pub(crate) fn shadow_fd(&self) -> Fd {
        self.shadow_fd.get()
    }

    /// The share of the shadow workers that it has.
    pub fn share_key(&self) -> ShareKey {
        self.shadow_fd.share_key()
    }

    /// The files of its runtime.
    pub fn files(&self) -> &Arc<ShadowFiles> {
        &self.files
    }

    /// Runs `f` on a shadow worker with the descriptor of the shadow table, and waits for the result.
    pub fn run_blocking<T: Send + 'static>(&self, f: impl FnOnce(Fd) -> Result<T> + Send + 'static) -> Result<T> {
        let fd = self.shadow_fd.get();
        self.files
            .ctx
            .workers
            .shadow()
            .and_then(|workers| workers.for_key(opened_share(fd)).run_blocking(move || f(fd)))
            .unwrap_or(Err(Errno::IO))
    }

    /// As [`ShadowFile::run_blocking`], without waiting. `false`: `f` will never run.
    pub fn spawn(self: &Arc<Self>, f: impl FnOnce(Fd) + Send + 'static) -> bool {
        let file = Arc::clone(self);
        self.files.ctx.workers.shadow().is_some_and(|workers| {
            let share = workers.for_key(opened_share(file.shadow_fd.get()));
            share.spawn(move || f(file.shadow_fd.get()));
            true
        })
    }

    /// Runs `f` on a new thread with the descriptor of the shadow table; the caller keeps the file open until it has ended.
    /// `false`: there is no such thread.
    pub fn spawn_dedicated(&self, name: &str, f: impl FnOnce(Fd) + Send + 'static) -> bool {
        let fd = self.shadow_fd.get();
        self.files.ctx.workers.shadow().is_some_and(|workers| workers.spawn_dedicated(name, move || f(fd)))
    }

    /// The block devices under it. Unlike `Runtime::storage` this leaves no other descriptor open.
    pub fn block_stack(&self) -> Result<Arc<BlockStack>> {
        let (sys, block_stacks) = (self.files.ctx.sys, self.files.table.block_stacks());
        self.run_blocking(move |fd| {
            let stat = sys.fstat(fd)?;
            Ok(block_stacks.get(sys, fd, stat, sys.file_system(fd).unwrap_or(0)))
        })
    }

    /// Drops the state that reads of the file created.
    pub fn evict_state(&self) {
        if let Ok(stat) = self.files.ctx.sys.fstat(self.fd())
            && let Some(file) = self.files.table.forget(stat.key())
        {
            let key = file.storage;
            drop(file);
            self.files.ctx.drain_for_close(|| true, Some(key));
        }
    }
}

/// The parts of their runtime that shadow files use.
pub struct ShadowFiles {
    /// The host.
    pub ctx: Arc<FilesCtx>,
    /// The files that are remembered.
    pub table: Arc<FileTable>,
    /// The watcher of their write leases.
    pub lease_watcher: Arc<LeaseWatcher>,
}

impl ShadowFiles {
    /// Opens a file by its name, outside the program's descriptor table. `flags` and `mode` as for `open`.
    /// ENOSYS: threads cannot have an unshared descriptor table here.
    ///
    /// If another process has a lease, the wait is here, on the caller's thread: shadow workers are few, and the owner
    /// of the lease, perhaps a session of this process, needs them to release it. EINTR: the wait was interrupted
    /// ([`spinio_host::cancel`]). Opening a named pipe does not wait for its other end.
    pub fn open(self: &Arc<Self>, path: &CStr, flags: u32, mode: u32) -> Result<ShadowFile> {
        let shadow = self.ctx.workers.shadow().ok_or(Errno::NOSYS)?;
        let begun = Instant::now();
        let fd = loop {
            let name = path.to_owned();
            let opened = shadow
                .for_key(OPENED_BY_NAME)
                .run_blocking(move || open_nonblocking(&name, flags as i32, mode))
                .unwrap_or(Err(Errno::IO));
            // Read again each time: the setting may change during the wait.
            let may_be_leased = || {
                linux::lease_break_time().is_none_or(|s| begun.elapsed() < LEASE_WAIT_EXTRA + Duration::from_secs(s))
            };
            match opened {
                Err(Errno::AGAIN) if is_cancelled() => return Err(Errno::INTR),
                Err(Errno::AGAIN) if may_be_leased() => std::thread::sleep(LEASE_POLL),
                opened => break opened?,
            }
        };
        Ok(ShadowFile {
            files: Arc::clone(self),
            shadow_fd: ShadowFd::new(fd, shadow.for_key(opened_share(fd)).close_queue()),
        })
    }
}

/// Each file that is opened by path has its own share of the shadow workers.
fn opened_share(fd: Fd) -> ShareKey {
    OPENED_BY_NAME | fd as ShareKey
}

/// How long to wait for a lease beyond the time after which Linux breaks it; how often to try.
const LEASE_WAIT_EXTRA: Duration = Duration::from_secs(10);
const LEASE_POLL: Duration = Duration::from_millis(1);

/// As `open`, but EAGAIN while another process has a lease on the file; its owner is notified of the break.
fn open_nonblocking(path: &CStr, flags: i32, mode: u32) -> Result<Fd> {
    let fd = linux::open(path, flags | linux::O_NONBLOCK as i32, mode)?;
    let blocking =
        linux::status_flags(fd).and_then(|all| linux::set_status_flags(fd, all & !(linux::O_NONBLOCK as i32)));
    if blocking.is_err() {
        let _ = linux::close(fd);
    }
    blocking.map(|()| fd)
}
