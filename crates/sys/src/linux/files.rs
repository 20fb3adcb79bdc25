//! Files and descriptors, one function per system call.
//!
//! Functions that take a pointer are `unsafe`: the memory must stay valid
//! for the call until it returns. The Linux kernel checks that it is mapped.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::ffi::CStr;

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::process::getpid;
use super::raw::syscall;
use super::types::{DirectAlign, FileKind, Stat};

type Result<T> = core::result::Result<T, Errno>;

/// A descriptor number in the calling thread's table.
pub type Fd = i32;

pub use k::{O_ACCMODE, O_APPEND, O_CREAT, O_DIRECT, O_DSYNC, O_NONBLOCK, O_PATH, O_RDONLY, O_RDWR, O_SYNC, O_WRONLY};

/// The most bytes that Linux moves in one call.
pub const MAX_RW_COUNT: usize = 0x7fff_f000;

const CLOSE_RANGE_UNSHARE: usize = 2;

/// `pread64`.
///
/// # Safety
/// `buf` must be memory that the caller lets the kernel write, or an address it may refuse.
#[inline]
pub unsafe fn pread(fd: Fd, buf: *mut u8, len: usize, offset: u64) -> Result<usize> {
    // SAFETY: guaranteed by the caller.
    unsafe { syscall(k::__NR_pread64, [fd as usize, buf as usize, len, offset as usize, 0, 0]) }
}

/// `preadv2` with one vector and `RWF_*` flags.
///
/// # Safety
/// As [`pread`].
#[inline]
pub unsafe fn pread_flags(fd: Fd, buf: *mut u8, len: usize, offset: u64, flags: u32) -> Result<usize> {
    let iov = [buf as usize, len];
    // SAFETY: `iov` lives across the call and has the layout of `struct iovec`; the rest is the caller's.
    unsafe {
        syscall(
            k::__NR_preadv2,
            [fd as usize, iov.as_ptr() as usize, 1, offset as usize, (offset >> 32) as usize, flags as usize],
        )
    }
}

/// `preadv2`: vectors of address and length; offset -1 means the descriptor's own.
///
/// # Safety
/// As [`pread`], for each vector.
pub unsafe fn preadv(fd: Fd, vectors: &[[usize; 2]], offset: i64, flags: u32) -> Result<usize> {
    let (at, count) = (vectors.as_ptr() as usize, vectors.len());
    // SAFETY: an address and a length are a `struct iovec`, and the slice lives across the call; the rest is the
    // caller's. The kernel takes the whole offset from the fourth argument on 64-bit machines.
    unsafe { syscall(k::__NR_preadv2, [fd as usize, at, count, offset as usize, 0, flags as usize]) }
}

/// `read`, at the descriptor's own offset.
///
/// # Safety
/// As [`pread`].
#[inline]
pub unsafe fn read(fd: Fd, buf: *mut u8, len: usize) -> Result<usize> {
    // SAFETY: guaranteed by the caller.
    unsafe { syscall(k::__NR_read, [fd as usize, buf as usize, len, 0, 0, 0]) }
}

/// `pwrite64`.
///
/// # Safety
/// `buf` must be readable for `len` bytes, or an address the kernel may refuse.
pub unsafe fn pwrite(fd: Fd, buf: *const u8, len: usize, offset: u64) -> Result<usize> {
    // SAFETY: guaranteed by the caller.
    unsafe { syscall(k::__NR_pwrite64, [fd as usize, buf as usize, len, offset as usize, 0, 0]) }
}

/// `write`, at the descriptor's own offset.
///
/// # Safety
/// As [`pwrite`].
pub unsafe fn write(fd: Fd, buf: *const u8, len: usize) -> Result<usize> {
    // SAFETY: guaranteed by the caller.
    unsafe { syscall(k::__NR_write, [fd as usize, buf as usize, len, 0, 0, 0]) }
}

/// `writev`: vectors of address and length, at the descriptor's own offset.
///
/// # Safety
/// As [`pwrite`], for each vector.
pub unsafe fn writev(fd: Fd, vectors: &[[usize; 2]]) -> Result<usize> {
    let (at, count) = (vectors.as_ptr() as usize, vectors.len());
    // SAFETY: an address and a length are a `struct iovec`, and the slice lives across the call; the rest is the
    // caller's.
    unsafe { syscall(k::__NR_writev, [fd as usize, at, count, 0, 0, 0]) }
}

/// `pwritev2`, or `pwritev` where there are no flags; offset -1 means the descriptor's own, with flags only.
///
/// # Safety
/// As [`pwrite`], for each vector.
pub unsafe fn pwritev(fd: Fd, vectors: &[[usize; 2]], offset: i64, flags: u32) -> Result<usize> {
    let (at, count) = (vectors.as_ptr() as usize, vectors.len());
    let nr = if flags == 0 { k::__NR_pwritev } else { k::__NR_pwritev2 };
    // SAFETY: as for `writev`. The kernel takes the whole offset from the fourth argument on 64-bit machines.
    unsafe { syscall(nr, [fd as usize, at, count, offset as usize, 0, flags as usize]) }
}

/// `lseek`; returns the new offset.
pub fn lseek(fd: Fd, offset: i64, whence: i32) -> Result<u64> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_lseek, [fd as usize, offset as usize, whence as usize, 0, 0, 0]) }.map(|v| v as u64)
}

/// `fstat`.
pub fn fstat(fd: Fd) -> Result<Stat> {
    // SAFETY: all-zero is a valid `struct stat`.
    let mut raw: k::stat = unsafe { core::mem::zeroed() };
    // SAFETY: `raw` is a `struct stat` of this architecture, alive across the call.
    match unsafe { syscall(k::__NR_fstat, [fd as usize, &raw mut raw as usize, 0, 0, 0, 0]) } {
        Ok(_) => {}
        Err(Errno::BADF) => return Err(Errno::BADF),
        // A server that has lost the file (ENOENT, FUSE) still serves reads and writes of the descriptor, which do not
        // need its attributes: those cached by the Linux kernel are sufficient for the kind of file.
        Err(refused) => return known_stat(fd).map_err(|_| refused),
    }
    let kind = kind_of(raw.st_mode);
    Ok(Stat {
        dev: raw.st_dev,
        ino: raw.st_ino,
        rdev: raw.st_rdev,
        size: raw.st_size as u64,
        blocks: raw.st_blocks as u64,
        uid: raw.st_uid,
        unlinked: raw.st_nlink == 0,
        mode: raw.st_mode,
        mtime_ns: i128::from(raw.st_mtime as i64) * 1_000_000_000 + i128::from(raw.st_mtime_nsec),
        ctime_ns: i128::from(raw.st_ctime as i64) * 1_000_000_000 + i128::from(raw.st_ctime_nsec),
        kind,
    })
}

/// `fstat` from the Linux kernel's cache, without a request to a server.
pub fn known_stat(fd: Fd) -> Result<Stat> {
    const AT_STATX_DONT_SYNC: u32 = 0x4000;
    // SAFETY: all-zero is a valid `struct statx`.
    let mut raw: k::statx = unsafe { core::mem::zeroed() };
    let flags = k::AT_EMPTY_PATH | AT_STATX_DONT_SYNC;
    let path = c"".as_ptr() as usize;
    // SAFETY: the empty path is a NUL-terminated constant and `raw` is alive across the call.
    unsafe {
        syscall(
            k::__NR_statx,
            [fd as usize, path, flags as usize, k::STATX_BASIC_STATS as usize, &raw mut raw as usize, 0],
        )
    }?;
    let device = |major: u32, minor: u32| libc::makedev(major, minor);
    Ok(Stat {
        dev: device(raw.stx_dev_major, raw.stx_dev_minor),
        ino: raw.stx_ino,
        rdev: device(raw.stx_rdev_major, raw.stx_rdev_minor),
        size: raw.stx_size,
        blocks: raw.stx_blocks,
        uid: raw.stx_uid,
        unlinked: raw.stx_nlink == 0,
        mode: raw.stx_mode.into(),
        mtime_ns: i128::from(raw.stx_mtime.tv_sec) * 1_000_000_000 + i128::from(raw.stx_mtime.tv_nsec),
        ctime_ns: i128::from(raw.stx_ctime.tv_sec) * 1_000_000_000 + i128::from(raw.stx_ctime.tv_nsec),
        kind: kind_of(raw.stx_mode.into()),
    })
}

fn kind_of(mode: u32) -> FileKind {
    match mode & k::S_IFMT {
        k::S_IFREG => FileKind::Regular,
        k::S_IFBLK => FileKind::Block,
        _ => FileKind::Other,
    }
}

/// The alignment that O_DIRECT needs on this file; `None` where the Linux kernel or file system does not report it
/// (before Linux 6.1) and `Some` with zeros where there is no direct I/O.
pub fn direct_io_align(fd: Fd) -> Result<Option<DirectAlign>> {
    const STATX_DIOALIGN: u32 = 0x2000;
    // SAFETY: all-zero is a valid `struct statx`.
    let mut raw: k::statx = unsafe { core::mem::zeroed() };
    // SAFETY: the empty path is a NUL-terminated constant and `raw` is alive across the call.
    unsafe {
        syscall(
            k::__NR_statx,
            [
                fd as usize,
                c"".as_ptr() as usize,
                k::AT_EMPTY_PATH as usize,
                STATX_DIOALIGN as usize,
                &raw mut raw as usize,
                0,
            ],
        )
    }?;
    Ok((raw.stx_mask & STATX_DIOALIGN != 0)
        .then_some(DirectAlign { memory: raw.stx_dio_mem_align, offset: raw.stx_dio_offset_align }))
}

/// `fcntl(F_GETFL)`: access mode and status flags.
pub fn status_flags(fd: Fd) -> Result<i32> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_fcntl, [fd as usize, k::F_GETFL as usize, 0, 0, 0, 0]) }.map(|v| v as i32)
}

/// `pidfd_getfd`: duplicates descriptor `fd` of thread `tid` of this process into the calling thread's table.
pub fn dup_from_thread(tid: u32, fd: Fd) -> Result<Fd> {
    const PIDFD_THREAD: usize = k::O_EXCL as usize;
    // SAFETY: no memory is involved in any of the three calls.
    unsafe {
        // Before Linux 6.9 only the first thread can be named; nearly always it has the same table.
        let pidfd = syscall(k::__NR_pidfd_open, [tid as usize, PIDFD_THREAD, 0, 0, 0, 0])
            .or_else(|_| syscall(k::__NR_pidfd_open, [getpid() as usize, 0, 0, 0, 0, 0]))?;
        let dup_fd = syscall(k::__NR_pidfd_getfd, [pidfd, fd as usize, 0, 0, 0, 0]).map(|fd| fd as Fd);
        let _ = close(pidfd as Fd);
        dup_fd
    }
}

/// `ioctl` that fills a buffer, whose length is part of `request`.
pub fn ioctl_read<const N: usize>(fd: Fd, request: u32, out: &mut [u8; N]) -> Result<()> {
    // The Linux kernel and a FUSE server write as many bytes as the number says.
    if (request >> 16 & 0x3fff) as usize != N {
        return Err(Errno::INVAL);
    }
    // SAFETY: `out` lives across the call and is as long as the request's number says.
    unsafe { syscall(k::__NR_ioctl, [fd as usize, request as usize, out.as_mut_ptr() as usize, 0, 0, 0]) }.map(drop)
}

/// `sync_file_range`, waiting before and after: dirty pages of the range are with the storage, or the FUSE server, when
/// it returns. `len` 0: to the end of the file.
pub fn write_back_range(fd: Fd, offset: u64, len: u64) -> Result<()> {
    let flags = k::SYNC_FILE_RANGE_WAIT_BEFORE | k::SYNC_FILE_RANGE_WRITE | k::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_sync_file_range, [fd as usize, offset as usize, len as usize, flags as usize, 0, 0]) }
        .map(drop)
}

/// `sync_file_range` without waiting: storage gets the dirty pages of the range now.
pub fn start_write_back(fd: Fd, offset: u64, len: u64) -> Result<()> {
    let flags = k::SYNC_FILE_RANGE_WRITE;
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_sync_file_range, [fd as usize, offset as usize, len as usize, flags as usize, 0, 0]) }
        .map(drop)
}

/// `openat(AT_FDCWD)` with O_CLOEXEC.
pub fn open(path: &CStr, flags: i32, mode: u32) -> Result<Fd> {
    let flags = flags | k::O_CLOEXEC as i32;
    // SAFETY: `path` is NUL-terminated and lives across the call.
    unsafe {
        syscall(
            k::__NR_openat,
            [k::AT_FDCWD as isize as usize, path.as_ptr() as usize, flags as usize, mode as usize, 0, 0],
        )
    }
    .map(|v| v as Fd)
}

/// `close`.
pub fn close(fd: Fd) -> Result<()> {
    // SAFETY: no memory is involved; the caller is responsible for which table the number is in.
    unsafe { syscall(k::__NR_close, [fd as usize, 0, 0, 0, 0, 0]) }.map(drop)
}

/// Whether `dup2(old, new)` would replace `new`: `old` is open, and `new` is below the limit of this process, which
/// may be lower than when `new` was opened.
pub fn may_dup_to(old: Fd, new: Fd) -> bool {
    // SAFETY: no memory is involved.
    let flags = unsafe { syscall(k::__NR_fcntl, [old as usize, k::F_GETFD as usize, 0, 0, 0, 0]) };
    let mut limit = k::rlimit64 { rlim_cur: u64::MAX, rlim_max: u64::MAX };
    let out = &raw mut limit as usize;
    // SAFETY: the kernel writes one struct, which lives across the call.
    let _ = unsafe { syscall(k::__NR_prlimit64, [0, k::RLIMIT_NOFILE as usize, 0, out, 0, 0]) };
    flags.is_ok() && u64::try_from(new).is_ok_and(|new| new < limit.rlim_cur)
}

/// `fcntl(F_DUPFD_CLOEXEC)`: a duplicate on the lowest free number from `least` up.
pub fn dup_at_least(fd: Fd, min_fd: Fd) -> Result<Fd> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_fcntl, [fd as usize, k::F_DUPFD_CLOEXEC as usize, min_fd as usize, 0, 0, 0]) }
        .map(|v| v as Fd)
}

/// `close_range` of all descriptors from `first` up, in an unshared descriptor table of this thread
/// (CLOSE_RANGE_UNSHARE): the rest of the process keeps its descriptors.
pub fn close_range_unshare(first_fd: u32) -> Result<()> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_close_range, [first_fd as usize, u32::MAX as usize, CLOSE_RANGE_UNSHARE, 0, 0, 0]) }
        .map(drop)
}

fn fstatfs(fd: Fd) -> Result<k::statfs64> {
    // SAFETY: all-zero is a valid `struct statfs`.
    let mut raw: k::statfs64 = unsafe { core::mem::zeroed() };
    // SAFETY: `raw` has the layout of this architecture's `struct statfs` and is alive across the call.
    unsafe { syscall(k::__NR_fstatfs, [fd as usize, &raw mut raw as usize, 0, 0, 0, 0]) }?;
    Ok(raw)
}

/// Magic number of the file system (`fstatfs`).
pub fn file_system_magic(fd: Fd) -> Result<u64> {
    fstatfs(fd).map(|raw| raw.f_type as u64)
}

/// Bytes that the file system has available for users other than root (`fstatfs`).
pub fn available_bytes(fd: Fd) -> Result<u64> {
    fstatfs(fd).map(|raw| raw.f_bavail.saturating_mul(raw.f_frsize as u64))
}

/// Major number of a device.
pub const fn major(dev: u64) -> u64 {
    (dev >> 8 & 0xfff) | (dev >> 32 & !0xfff)
}

/// Minor number of a device.
pub const fn minor(dev: u64) -> u64 {
    (dev & 0xff) | (dev >> 12 & !0xff)
}

/// `readlink`; the bytes of the target, cut at the length of `out`.
pub fn readlink(path: &CStr, out: &mut [u8]) -> Result<usize> {
    // SAFETY: `path` is NUL-terminated and `out` is alive across the call.
    unsafe { syscall(k::__NR_readlink, [path.as_ptr() as usize, out.as_mut_ptr() as usize, out.len(), 0, 0, 0]) }
}
