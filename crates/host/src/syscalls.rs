//! Every system call of an engine, in one trait.
//!
//! Each function of the trait makes the system call by default, and [`LinuxSyscalls`] overrides none. So a new call is
//! added once, here. A test that injects faults overrides the calls that are to fail, and passes the others to
//! `LinuxSyscalls`: short reads and writes, EINTR, EIO, ENOSPC, EREMOTEIO in the middle of a P2P transfer, files that
//! cannot be reopened.

#![expect(unsafe_code, reason = "threads, shared words and descriptors of other tables")]

use std::ffi::{CStr, CString};
use std::time::Duration;

use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{
    self, Advice, CacheStat, DirectAlign, Fd, FdTableError, FdTableRoot, FileExtent, FileKey, InotifyEvent, NewOwnRing,
    OwnRing, Ring, RingFile, SharedRing, Stat,
};

type Result<T> = core::result::Result<T, Errno>;

/// A path to the file of a descriptor of the calling thread.
fn proc_fd_path(fd: Fd) -> Result<CString> {
    CString::new(format!("/proc/thread-self/fd/{fd}")).map_err(|_| Errno::INVAL)
}

/// The system calls of engines. Signatures follow the system calls; each default is that call.
pub trait Syscalls: Send + Sync + 'static {
    /// `preadv2` with `RWF_*` flags, plain `pread` when there are none. `_route`: the route it serves.
    ///
    /// # Safety
    /// `buf` must be memory that the caller lets the kernel write, or an address it may refuse.
    unsafe fn pread(&self, _route: Route, fd: Fd, buf: *mut u8, len: usize, offset: u64, flags: u32) -> Result<usize> {
        // SAFETY: passed on to the caller.
        unsafe {
            match flags {
                0 => linux::pread(fd, buf, len, offset),
                flags => linux::pread_flags(fd, buf, len, offset, flags),
            }
        }
    }

    /// `read` at the descriptor's own offset.
    ///
    /// # Safety
    /// As [`Syscalls::pread`].
    unsafe fn read(&self, fd: Fd, buf: *mut u8, len: usize) -> Result<usize> {
        // SAFETY: passed on to the caller.
        unsafe { linux::read(fd, buf, len) }
    }

    /// `pwritev2` with `RWF_*` flags, at the descriptor's own offset if none is given: one system call, the simplest
    /// that is sufficient. `_route`: the route it serves.
    ///
    /// # Safety
    /// Each vector must be memory that stays readable for the call, or an address that the kernel may refuse.
    unsafe fn pwritev(
        &self,
        _route: Route,
        fd: Fd,
        vectors: &[[usize; 2]],
        at: Option<u64>,
        flags: u32,
    ) -> Result<usize> {
        // SAFETY: passed on to the caller.
        unsafe {
            match (vectors, at, flags) {
                (&[[buf, len]], Some(at), 0) => linux::pwrite(fd, buf as *const u8, len, at),
                (&[[buf, len]], None, 0) => linux::write(fd, buf as *const u8, len),
                (_, None, 0) => linux::writev(fd, vectors),
                (_, Some(at), flags) => linux::pwritev(fd, vectors, at as i64, flags),
                (_, None, flags) => linux::pwritev(fd, vectors, -1, flags),
            }
        }
    }

    /// `lseek`.
    fn lseek(&self, fd: Fd, offset: i64, whence: i32) -> Result<u64> {
        linux::lseek(fd, offset, whence)
    }

    /// `fstat`.
    fn fstat(&self, fd: Fd) -> Result<Stat> {
        linux::fstat(fd)
    }

    /// The file of a descriptor, without asking a server, which may not answer.
    fn known_key(&self, fd: Fd) -> Result<FileKey> {
        linux::known_stat(fd).map(|s| s.key())
    }

    /// Whether a descriptor refers to this file.
    fn is_file(&self, fd: Fd, key: FileKey) -> bool {
        self.fstat(fd).is_ok_and(|s| s.key() == key)
    }

    /// Access mode and status flags.
    fn status_flags(&self, fd: Fd) -> Result<i32> {
        linux::status_flags(fd)
    }

    /// Opens the file of descriptor `fd` of thread `tid` again, in the calling thread's table.
    fn reopen(&self, tid: u32, fd: Fd, flags: i32) -> Result<Fd> {
        let path = CString::new(format!("/proc/{tid}/fd/{fd}")).map_err(|_| Errno::INVAL)?;
        linux::open(&path, flags, 0)
    }

    /// A duplicate of descriptor `fd` of thread `tid`, in the calling thread's table.
    fn dup_from_thread(&self, tid: u32, fd: Fd) -> Result<Fd> {
        linux::dup_from_thread(tid, fd)
    }

    /// Whether two threads of this process share a descriptor table.
    fn same_fd_table(&self, tid: u32, other_tid: u32) -> Result<bool> {
        linux::same_fd_table(tid, other_tid)
    }

    /// Whether the open file holds a lease of any kind.
    fn is_leased(&self, fd: Fd) -> bool {
        linux::has_lease(fd)
    }

    /// `close`.
    fn close(&self, fd: Fd) {
        let _ = linux::close(fd);
    }

    /// The alignment that O_DIRECT needs.
    fn direct_align(&self, fd: Fd) -> Result<Option<DirectAlign>> {
        linux::direct_io_align(fd)
    }

    /// Magic number of the file system.
    fn file_system(&self, fd: Fd) -> Result<u64> {
        linux::file_system_magic(fd)
    }

    /// The first extents of a range (FIEMAP), at most `most` of them.
    fn extents(&self, fd: Fd, offset: u64, len: u64, max_count: usize) -> Result<Vec<FileExtent>> {
        linux::fiemap_extents(fd, offset, len, max_count)
    }

    /// The contents of a small file (sysfs, procfs), its first `most` bytes.
    fn read_sysfs(&self, path: &CStr, max_len: usize) -> Result<Vec<u8>> {
        linux::read_file(path, max_len)
    }

    /// The names in a directory.
    fn list_dir(&self, path: &CStr) -> Result<Vec<CString>> {
        linux::read_dir(path)
    }

    /// The target of a symbolic link.
    fn read_link(&self, path: &CStr) -> Result<Vec<u8>> {
        let mut target = vec![0; 4096];
        let len = linux::readlink(path, &mut target)?;
        target.truncate(len);
        Ok(target)
    }

    /// The identity of a btrfs file system.
    fn btrfs_uuid(&self, fd: Fd) -> Result<[u8; 16]> {
        linux::btrfs_uuid(fd)
    }

    /// A name for the storage under a device number that survives a reboot: the key of a calibration.
    fn storage_name(&self, dev: u64) -> String {
        linux::storage_name(dev)
    }

    /// `posix_fadvise`; length 0 means to the end of the file.
    fn advise(&self, fd: Fd, offset: u64, len: u64, advice: Advice) -> Result<()> {
        linux::fadvise(fd, offset, len, advice)
    }

    /// A descriptor for events of watched files.
    fn inotify_init(&self) -> Result<Fd> {
        linux::inotify_init()
    }

    /// Watches opens and closes of the file of a descriptor of the calling thread.
    fn watch_opens(&self, inotify: Fd, fd: Fd) -> Result<i32> {
        linux::watch_opens(inotify, &proc_fd_path(fd)?)
    }

    /// Watches changes of the file of a descriptor of the calling thread.
    fn watch_changes(&self, inotify: Fd, fd: Fd) -> Result<i32> {
        linux::watch_modifications(inotify, &proc_fd_path(fd)?)
    }

    /// Ends a watch.
    fn unwatch(&self, inotify: Fd, wd: i32) {
        let _ = linux::remove_watch(inotify, wd);
    }

    /// The pending events of watched files.
    fn inotify_events(&self, inotify: Fd) -> Result<Vec<InotifyEvent>> {
        linux::inotify_events(inotify)
    }

    /// `cachestat`.
    fn cachestat(&self, fd: Fd, offset: u64, len: u64) -> Result<CacheStat> {
        linux::cachestat(fd, offset, len)
    }

    /// A shared read-only mapping of the first `len` bytes.
    fn map(&self, fd: Fd, len: usize) -> Result<*mut u8> {
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        unsafe { linux::mmap(core::ptr::null_mut(), len, linux::PROT_READ, linux::MAP_SHARED, fd, 0) }
    }

    /// A ring of asynchronous reads, in the calling thread's table.
    fn new_io_uring(&self, entries: u32) -> Result<Ring> {
        Ring::new(entries)
    }

    /// A ring that all threads of the process fill; its descriptor is in the calling thread's table.
    fn new_shared_ring(&self, entries: u32, slots: u32, idle: Duration) -> Result<SharedRing> {
        SharedRing::new(entries, slots, idle)
    }

    /// A ring for reads of the calling thread; its descriptor is in the calling thread's table until it is adopted.
    fn new_own_ring(&self, slots: u32) -> Result<NewOwnRing> {
        NewOwnRing::new(slots)
    }

    /// A read of a file in the calling thread's ring. `_route`: the route it serves.
    ///
    /// # Safety
    /// As [`OwnRing::read`].
    unsafe fn read_by_own_ring(
        &self,
        _route: Route,
        (ring, file): (&OwnRing, RingFile),
        (buf, len): (*mut u8, usize),
        offset: u64,
        on_wait: &mut dyn FnMut(),
    ) -> Result<usize> {
        // SAFETY: passed on to the caller.
        unsafe { ring.read(file, buf, len, offset, on_wait) }
    }

    /// The result of a read of a ring.
    fn on_completion(&self, result: Result<usize>) -> Result<usize> {
        result
    }

    /// Takes a read lease on a descriptor; a thread is signalled when it is broken.
    fn take_lease(&self, fd: Fd, tid: u32) -> Result<()> {
        linux::take_read_lease(fd, tid)
    }

    /// Whether the lease exists and is not being broken.
    fn has_lease(&self, fd: Fd) -> bool {
        linux::has_read_lease(fd)
    }

    /// Whether the write lease exists and is not being broken.
    fn has_write_lease(&self, fd: Fd) -> bool {
        linux::has_write_lease(fd)
    }

    /// Seconds after which the kernel breaks a lease by force; `None`: never.
    fn lease_break_time(&self) -> Option<u64> {
        linux::lease_break_time()
    }

    /// A new descriptor table, and threads that share it.
    fn new_shadow_table(&self) -> core::result::Result<FdTableRoot, FdTableError> {
        FdTableRoot::new()
    }
}

/// The system calls of Linux.
#[derive(Debug)]
pub struct LinuxSyscalls;

impl Syscalls for LinuxSyscalls {}

/// Reads `len` bytes at `offset`, in as many calls as it takes; the bytes read, and the error that ended it. Fewer
/// bytes without an error: the end of the file. After a call that ends inside a block of `unit` bytes it stops: with
/// O_DIRECT the next call would be misaligned.
///
/// # Safety
/// `buf` must have `len` bytes that the kernel may write, or be an address that it may refuse.
pub unsafe fn pread_full(
    sys: &dyn Syscalls,
    route: Route,
    fd: Fd,
    buf: *mut u8,
    (offset, len): (u64, usize),
    unit: usize,
) -> (usize, Option<Errno>) {
    let mut got = 0;
    while got < len && got.is_multiple_of(unit) {
        // SAFETY: passed on to the caller.
        match unsafe { sys.pread(route, fd, buf.wrapping_add(got), len - got, offset + got as u64, 0) } {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(Errno::INTR) => {}
            Err(errno) => return (got, Some(errno)),
        }
    }
    (got, None)
}
