//! Files that SPIN opened itself, by their names, and that stay open between requests.
//!
//! Their descriptors live in the table of the keepers, because the program owns every number in its own: it may close or
//! reuse any, and were a descriptor of SPIN's closed there, every `fcntl` lock that the program holds on that file would be
//! dropped. But every part of a request, on the program's thread and on mates, speaks of files by descriptor. So an own
//! file has a number that no table can have, and the kernel calls of this runtime pass such calls to a keeper:
//!
//! ```text
//!   caller, mate ── pread(5) ──────────> kernel                      a descriptor of the program's
//!                ── pread(OWN + 3) ──┐
//!   keeper      <────────────────────┘── pread(3) ──> kernel         in the table that has it
//!   keeper      ── pread(OWN + 3) ───── pread(3) ──> kernel
//! ```
//!
//! Everything that takes a descriptor so takes an own file: reads, writes, their routes, their statistics.
//!
//! Known flaw: a call that is passed on costs two wake-ups where keepers sleep, some 10 us. Moves are large.

use std::ffi::{CStr, CString};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Advice, CacheStat, DirectAlign, Fd, News, Placed, Private, PrivateError, Ring, Stat};

use spinio_plan::geometry::Stack;
use spinio_host::shadow_fd::PrivateFd;
use spinio_host::is_interrupted;
use spinio_host::pool::Workers;
use spinio_host::syscalls::Kernel;

use crate::ctx::FilesCtx;
use crate::lease_watcher::Leases;
use crate::table::Files;

/// Numbers from here on are a keeper's; far above the most that a table can hold (`fs.nr_open`, 2^20, at most 2^31 / 64).
const OWN: Fd = 1 << 28;

type Result<T> = core::result::Result<T, Errno>;

/// Whether a request means a file of SPIN's own by this number.
pub fn is_own(fd: Fd) -> bool {
    fd >= OWN
}

/// A kernel, for descriptors of two tables.
pub struct Tables {
    under: &'static dyn Kernel,
    workers: OnceLock<Weak<Workers>>,
}

impl Tables {
    /// One that lives as long as the process, as the runtime does that it is made for.
    pub fn leaked(under: &'static dyn Kernel) -> &'static Tables {
        Box::leak(Box::new(Tables { under, workers: OnceLock::new() }))
    }

    /// Who has the keepers.
    pub fn serve(&self, workers: &Arc<Workers>) {
        let _ = self.workers.set(Arc::downgrade(workers));
    }

    /// Makes a call on a descriptor where it means something.
    fn on<T: Send + 'static>(
        &self,
        fd: Fd,
        f: impl FnOnce(&dyn Kernel, Fd) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let under = self.under;
        if fd < OWN {
            return f(under, fd);
        }
        let fd = fd - OWN;
        if linux::in_private_table() {
            return f(under, fd);
        }
        let workers = self.workers.get().and_then(Weak::upgrade).ok_or(Errno::BADF)?;
        workers.shadow().and_then(|keepers| keepers.call(move || f(under, fd))).unwrap_or(Err(Errno::IO))
    }
}

impl Kernel for Tables {
    unsafe fn pread(&self, route: Route, fd: Fd, buf: *mut u8, len: usize, offset: u64, flags: u32) -> Result<usize> {
        let buf = buf as usize;
        self.on(fd, move |kernel, fd| {
            // SAFETY: passed on to the caller, who waits.
            unsafe { kernel.pread(route, fd, buf as *mut u8, len, offset, flags) }
        })
    }

    unsafe fn read(&self, fd: Fd, buf: *mut u8, len: usize) -> Result<usize> {
        let buf = buf as usize;
        self.on(fd, move |kernel, fd| {
            // SAFETY: passed on to the caller, who waits.
            unsafe { kernel.read(fd, buf as *mut u8, len) }
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
        self.on(fd, move |kernel, fd| {
            // SAFETY: passed on to the caller, who waits.
            unsafe { kernel.pwritev(route, fd, &vectors, at, flags) }
        })
    }

    fn lseek(&self, fd: Fd, offset: i64, whence: i32) -> Result<u64> {
        self.on(fd, move |kernel, fd| kernel.lseek(fd, offset, whence))
    }

    fn fstat(&self, fd: Fd) -> Result<Stat> {
        self.on(fd, |kernel, fd| kernel.fstat(fd))
    }

    fn flags(&self, fd: Fd) -> Result<i32> {
        self.on(fd, |kernel, fd| kernel.flags(fd))
    }

    fn open_again(&self, tid: u32, fd: Fd, flags: i32) -> Result<Fd> {
        match fd < OWN {
            true => self.under.open_again(tid, fd, flags),
            // Called by the keeper that opens a twin: the number is one of its own table.
            false => self.under.open_again(linux::gettid(), fd - OWN, flags),
        }
    }

    fn share(&self, tid: u32, fd: Fd) -> Result<Fd> {
        match fd < OWN {
            true => self.under.share(tid, fd),
            // As above.
            false => linux::duplicate_from(fd - OWN, 0),
        }
    }

    fn have_one_table(&self, one: u32, other: u32) -> Result<bool> {
        self.under.have_one_table(one, other)
    }

    fn is_leased(&self, fd: Fd) -> bool {
        self.on(fd, |kernel, fd| Ok(kernel.is_leased(fd))) == Ok(true)
    }

    fn close(&self, fd: Fd) {
        self.under.close(fd);
    }

    fn direct_align(&self, fd: Fd) -> Result<Option<DirectAlign>> {
        self.on(fd, |kernel, fd| kernel.direct_align(fd))
    }

    fn file_system(&self, fd: Fd) -> Result<u64> {
        self.on(fd, |kernel, fd| kernel.file_system(fd))
    }

    fn extents(&self, fd: Fd, offset: u64, len: u64, most: usize) -> Result<Vec<Placed>> {
        self.on(fd, move |kernel, fd| kernel.extents(fd, offset, len, most))
    }

    fn text(&self, path: &CStr, most: usize) -> Result<Vec<u8>> {
        self.under.text(path, most)
    }

    fn list(&self, path: &CStr) -> Result<Vec<CString>> {
        self.under.list(path)
    }

    fn link(&self, path: &CStr) -> Result<Vec<u8>> {
        self.under.link(path)
    }

    fn btrfs_uuid(&self, fd: Fd) -> Result<[u8; 16]> {
        self.on(fd, |kernel, fd| kernel.btrfs_uuid(fd))
    }

    fn storage_name(&self, dev: u64) -> String {
        self.under.storage_name(dev)
    }

    fn advise(&self, fd: Fd, offset: u64, len: u64, advice: Advice) -> Result<()> {
        self.on(fd, move |kernel, fd| kernel.advise(fd, offset, len, advice))
    }

    fn touch(&self, fd: Fd, offset: u64) -> Result<()> {
        self.on(fd, move |kernel, fd| kernel.touch(fd, offset))
    }

    fn notify(&self) -> Result<Fd> {
        self.under.notify()
    }

    fn watch(&self, notify: Fd, fd: Fd) -> Result<i32> {
        self.under.watch(notify, fd)
    }

    fn watch_changes(&self, notify: Fd, fd: Fd) -> Result<i32> {
        self.under.watch_changes(notify, fd)
    }

    fn unwatch(&self, notify: Fd, watch: i32) {
        self.under.unwatch(notify, watch);
    }

    fn news(&self, notify: Fd) -> Result<Vec<News>> {
        self.under.news(notify)
    }

    fn cachestat(&self, fd: Fd, offset: u64, len: u64) -> Result<CacheStat> {
        self.on(fd, move |kernel, fd| kernel.cachestat(fd, offset, len))
    }

    fn map(&self, fd: Fd, len: usize) -> Result<*mut u8> {
        self.on(fd, move |kernel, fd| kernel.map(fd, len).map(|at| at as usize)).map(|at| at as *mut u8)
    }

    fn ring(&self, entries: u32) -> Result<Ring> {
        self.under.ring(entries)
    }

    fn landed(&self, result: Result<usize>) -> Result<usize> {
        self.under.landed(result)
    }

    fn take_lease(&self, fd: Fd, tid: u32) -> Result<()> {
        self.under.take_lease(fd, tid)
    }

    fn has_lease(&self, fd: Fd) -> bool {
        self.under.has_lease(fd)
    }

    fn has_write_lease(&self, fd: Fd) -> bool {
        self.under.has_write_lease(fd)
    }

    fn lease_break_time(&self) -> Option<u64> {
        self.under.lease_break_time()
    }

    fn private(&self) -> core::result::Result<Private, PrivateError> {
        self.under.private()
    }
}

/// A file that SPIN opened itself. Closed when it goes.
pub struct OwnFile {
    files: Arc<ShadowFiles>,
    twin: PrivateFd,
}

impl OwnFile {
    /// What the requests of this runtime take for its descriptor. It means nothing to anybody else.
    pub fn fd(&self) -> Fd {
        OWN + self.twin.get()
    }

    /// The number in the shadow table, for a shadow worker.
    pub(crate) fn shadow_fd(&self) -> Fd {
        self.twin.get()
    }

    /// The files of its runtime.
    pub fn files(&self) -> &Arc<ShadowFiles> {
        &self.files
    }

    /// Runs something on a keeper, which is given the descriptor as it is there, and waits for the answer.
    pub fn call<T: Send + 'static>(&self, f: impl FnOnce(Fd) -> Result<T> + Send + 'static) -> Result<T> {
        let fd = self.twin.get();
        self.files.ctx.workers.shadow().and_then(|keepers| keepers.call(move || f(fd))).unwrap_or(Err(Errno::IO))
    }

    /// As [`OwnFile::call`], without waiting; `f` gives the answer to whom it likes. `false`: it will never run.
    pub fn start(self: &Arc<Self>, f: impl FnOnce(Fd) + Send + 'static) -> bool {
        let open = Arc::clone(self);
        self.files.ctx.workers.shadow().is_some_and(|keepers| {
            keepers.start(move || f(open.twin.get()));
            true
        })
    }

    /// The block devices under it. Unlike `Runtime::storage` this leaves no further opening behind.
    pub fn storage(&self) -> Result<Arc<Stack>> {
        let (kernel, stacks) = (self.files.ctx.sys, self.files.kept.stacks());
        self.call(move |fd| {
            let stat = kernel.fstat(fd)?;
            Ok(stacks.of(kernel, fd, stat, kernel.file_system(fd).unwrap_or(0)))
        })
    }

    /// Lets go of what is kept beside the file because it was read.
    pub fn forget(&self) {
        if let Ok(stat) = self.files.ctx.sys.fstat(self.fd()) {
            if self.files.kept.forget(stat.dev, stat.ino) {
                self.files.ctx.drain_for_close();
            }
        }
    }
}

/// What shadow files need of their runtime.
pub struct ShadowFiles {
    /// The host.
    pub ctx: Arc<FilesCtx>,
    /// The files that are remembered.
    pub kept: Arc<Files>,
    /// Their write leases.
    pub leases: Arc<Leases>,
}

impl ShadowFiles {
    /// Opens a file by its name, outside the program's descriptor table. `flags` and `mode` as for `open`.
    /// ENOSYS: this kernel gives no thread a table of its own.
    ///
    /// A lease of somebody's is waited for here, on the caller's thread: keepers are few, and whoever holds the lease, a
    /// session of this process perhaps, needs them to give it back. EINTR: that was interrupted ([`spinio_host::interruptible`]).
    /// Nor does a named pipe wait for its other end.
    pub fn open(self: &Arc<Self>, path: &CStr, flags: u32, mode: u32) -> Result<OwnFile> {
        let keepers = self.ctx.workers.shadow().ok_or(Errno::NOSYS)?;
        let begun = Instant::now();
        let fd = loop {
            let name = path.to_owned();
            let opened = keepers.call(move || open_at_once(&name, flags as i32, mode)).unwrap_or(Err(Errno::IO));
            // Asked now: the time may be changed while it is waited for.
            let is_leased =
                || linux::lease_break_time().is_none_or(|s| begun.elapsed() < LATEST + Duration::from_secs(s));
            match opened {
                Err(Errno::AGAIN) if is_interrupted() => return Err(Errno::INTR),
                Err(Errno::AGAIN) if is_leased() => std::thread::sleep(LOOK_AGAIN),
                opened => break opened?,
            }
        };
        Ok(OwnFile { files: Arc::clone(self), twin: PrivateFd::new(fd, keepers.graveyard()) })
    }
}

/// How long a lease is waited for, beyond the time after which the kernel takes it away; how often it is asked for.
const LATEST: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// As `open`, but EAGAIN while somebody has a lease on the file, who is told that it is wanted.
fn open_at_once(path: &CStr, flags: i32, mode: u32) -> Result<Fd> {
    let fd = linux::open(path, flags | linux::O_NONBLOCK as i32, mode)?;
    let plain = linux::flags(fd).and_then(|all| linux::set_flags(fd, all & !(linux::O_NONBLOCK as i32)));
    if plain.is_err() {
        let _ = linux::close(fd);
    }
    plain.map(|()| fd)
}
