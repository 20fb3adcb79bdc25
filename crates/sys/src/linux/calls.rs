//! One function a system call.
//!
//! Functions that take a pointer are `unsafe`: the memory must stay what the
//! call needs it to be until it returns. The kernel checks that it is mapped.

use std::ffi::CStr;

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::raw::call;
use super::types::{Advice, CacheStat, DirectAlign, FileKind, Stat};

type Result<T> = core::result::Result<T, Errno>;

/// A descriptor as the kernel knows it: a number in the calling thread's table.
pub type Fd = i32;

const CLOSE_RANGE_UNSHARE: usize = 2;

/// `pread64`.
///
/// # Safety
/// `buf` must be memory that the caller lets the kernel write, or an address it may refuse.
#[inline]
pub unsafe fn pread(fd: Fd, buf: *mut u8, len: usize, offset: u64) -> Result<usize> {
    // SAFETY: passed on to the caller.
    unsafe { call(k::__NR_pread64, [fd as usize, buf as usize, len, offset as usize, 0, 0]) }
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
        call(
            k::__NR_preadv2,
            [fd as usize, iov.as_ptr() as usize, 1, offset as usize, (offset >> 32) as usize, flags as usize],
        )
    }
}

/// `preadv2`: vectors of address and length; offset -1 stands for the descriptor's own.
///
/// # Safety
/// As [`pread`], for each vector.
pub unsafe fn preadv(fd: Fd, vectors: &[[usize; 2]], offset: i64, flags: u32) -> Result<usize> {
    let (at, count) = (vectors.as_ptr() as usize, vectors.len());
    // SAFETY: an address and a length are a `struct iovec`, and the slice lives across the call; the rest is the
    // caller's. The kernel takes the whole offset from the fourth argument on 64-bit machines.
    unsafe { call(k::__NR_preadv2, [fd as usize, at, count, offset as usize, 0, flags as usize]) }
}

/// Whether `len` bytes from `addr` may be read. A kernel that will not say (seccomp) counts as yes.
pub fn readable(addr: *const u8, len: usize) -> bool {
    // A byte of each page, fetched by the kernel, which answers EFAULT where a load would be a crash.
    let mut first = addr as usize;
    let Some(end) = first.checked_add(len) else { return false };
    while first < end {
        let mut byte = 0u8;
        let (local, remote) = ([&raw mut byte as usize, 1], [first, 1]);
        let vectors = [local.as_ptr() as usize, remote.as_ptr() as usize];
        // SAFETY: both vectors and the byte live across the call; the kernel judges the remote address.
        let got = unsafe { call(k::__NR_process_vm_readv, [getpid() as usize, vectors[0], 1, vectors[1], 1, 0]) };
        if got == Err(Errno::FAULT) {
            return false;
        }
        first = (first / PAGE + 1) * PAGE;
    }
    true
}

/// `read`, at the descriptor's own offset.
///
/// # Safety
/// As [`pread`].
#[inline]
pub unsafe fn read(fd: Fd, buf: *mut u8, len: usize) -> Result<usize> {
    // SAFETY: passed on to the caller.
    unsafe { call(k::__NR_read, [fd as usize, buf as usize, len, 0, 0, 0]) }
}

/// `pwrite64`.
///
/// # Safety
/// `buf` must be readable for `len` bytes, or an address the kernel may refuse.
pub unsafe fn pwrite(fd: Fd, buf: *const u8, len: usize, offset: u64) -> Result<usize> {
    // SAFETY: passed on to the caller.
    unsafe { call(k::__NR_pwrite64, [fd as usize, buf as usize, len, offset as usize, 0, 0]) }
}

/// `write`, at the descriptor's own offset.
///
/// # Safety
/// As [`pwrite`].
pub unsafe fn write(fd: Fd, buf: *const u8, len: usize) -> Result<usize> {
    // SAFETY: passed on to the caller.
    unsafe { call(k::__NR_write, [fd as usize, buf as usize, len, 0, 0, 0]) }
}

/// `writev`: vectors of address and length, at the descriptor's own offset.
///
/// # Safety
/// As [`pwrite`], for each vector.
pub unsafe fn writev(fd: Fd, vectors: &[[usize; 2]]) -> Result<usize> {
    let (at, count) = (vectors.as_ptr() as usize, vectors.len());
    // SAFETY: an address and a length are a `struct iovec`, and the slice lives across the call; the rest is the
    // caller's.
    unsafe { call(k::__NR_writev, [fd as usize, at, count, 0, 0, 0]) }
}

/// `pwritev2`, or `pwritev` where there are no flags; offset -1 stands for the descriptor's own with flags only.
///
/// # Safety
/// As [`pwrite`], for each vector.
pub unsafe fn pwritev(fd: Fd, vectors: &[[usize; 2]], offset: i64, flags: u32) -> Result<usize> {
    let (at, count) = (vectors.as_ptr() as usize, vectors.len());
    let nr = if flags == 0 { k::__NR_pwritev } else { k::__NR_pwritev2 };
    // SAFETY: as for `writev`. The kernel takes the whole offset from the fourth argument on 64-bit machines.
    unsafe { call(nr, [fd as usize, at, count, offset as usize, 0, flags as usize]) }
}

/// `lseek`; returns the new offset.
pub fn lseek(fd: Fd, offset: i64, whence: i32) -> Result<u64> {
    // SAFETY: no memory is involved.
    unsafe { call(k::__NR_lseek, [fd as usize, offset as usize, whence as usize, 0, 0, 0]) }.map(|v| v as u64)
}

/// `fstat`.
pub fn fstat(fd: Fd) -> Result<Stat> {
    // SAFETY: all-zero is a valid `struct stat`.
    let mut raw: k::stat = unsafe { core::mem::zeroed() };
    // SAFETY: `raw` is a `struct stat` of this architecture, alive across the call.
    unsafe { call(k::__NR_fstat, [fd as usize, &raw mut raw as usize, 0, 0, 0, 0]) }?;
    let kind = match raw.st_mode & k::S_IFMT {
        k::S_IFREG => FileKind::Regular,
        k::S_IFBLK => FileKind::Block,
        _ => FileKind::Stream,
    };
    Ok(Stat {
        dev: raw.st_dev,
        ino: raw.st_ino,
        rdev: raw.st_rdev,
        size: raw.st_size as u64,
        blocks: raw.st_blocks as u64,
        uid: raw.st_uid,
        nameless: raw.st_nlink == 0,
        mode: raw.st_mode,
        mtime_ns: i128::from(raw.st_mtime as i64) * 1_000_000_000 + i128::from(raw.st_mtime_nsec),
        ctime_ns: i128::from(raw.st_ctime as i64) * 1_000_000_000 + i128::from(raw.st_ctime_nsec),
        kind,
    })
}

/// What O_DIRECT needs on this file; `None` where the kernel or file system does not say
/// (before Linux 6.1) and `Some` with zeros where there is no direct I/O.
pub fn direct_align(fd: Fd) -> Result<Option<DirectAlign>> {
    const STATX_DIOALIGN: u32 = 0x2000;
    // SAFETY: all-zero is a valid `struct statx`.
    let mut raw: k::statx = unsafe { core::mem::zeroed() };
    // SAFETY: the empty path is a NUL-terminated constant and `raw` is alive across the call.
    unsafe {
        call(
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
pub fn flags(fd: Fd) -> Result<i32> {
    // SAFETY: no memory is involved.
    unsafe { call(k::__NR_fcntl, [fd as usize, k::F_GETFL as usize, 0, 0, 0, 0]) }.map(|v| v as i32)
}

/// `fcntl(F_GETLEASE)`: whether the descriptor holds a lease on its file.
pub fn has_lease(fd: Fd) -> bool {
    const F_GETLEASE: usize = 1025;
    const F_UNLCK: usize = 2;
    // SAFETY: no memory is involved.
    unsafe { call(k::__NR_fcntl, [fd as usize, F_GETLEASE, 0, 0, 0, 0]) }.is_ok_and(|held| held != F_UNLCK)
}

/// RLIMIT_FSIZE: the length that this process may give to a file; `u64::MAX` for any.
pub fn file_size_limit() -> u64 {
    const RLIMIT_FSIZE: usize = 1;
    let mut limits = [0u64; 2];
    // SAFETY: `limits` has the layout of `struct rlimit64` and lives across the call.
    let asked = unsafe { call(k::__NR_prlimit64, [0, RLIMIT_FSIZE, 0, limits.as_mut_ptr() as usize, 0, 0]) };
    if asked.is_ok() { limits[0] } else { u64::MAX }
}

/// `pidfd_getfd`: the very descriptor `fd` of thread `tid` of this process, on a number of the calling thread's table.
pub fn descriptor_of(tid: u32, fd: Fd) -> Result<Fd> {
    const PIDFD_THREAD: usize = k::O_EXCL as usize;
    // SAFETY: no memory is involved in any of the three calls.
    unsafe {
        // Before Linux 6.9 only the first thread can be named; nearly always it has the same table.
        let thread = call(k::__NR_pidfd_open, [tid as usize, PIDFD_THREAD, 0, 0, 0, 0])
            .or_else(|_| call(k::__NR_pidfd_open, [getpid() as usize, 0, 0, 0, 0, 0]))?;
        let got = call(k::__NR_pidfd_getfd, [thread, fd as usize, 0, 0, 0, 0]).map(|fd| fd as Fd);
        let _ = close(thread as Fd);
        got
    }
}

/// `openat(AT_FDCWD)` with O_CLOEXEC.
pub fn open(path: &CStr, flags: i32, mode: u32) -> Result<Fd> {
    let flags = flags | k::O_CLOEXEC as i32;
    // SAFETY: `path` is NUL-terminated and lives across the call.
    unsafe {
        call(
            k::__NR_openat,
            [k::AT_FDCWD as isize as usize, path.as_ptr() as usize, flags as usize, mode as usize, 0, 0],
        )
    }
    .map(|v| v as Fd)
}

/// `close`.
pub fn close(fd: Fd) -> Result<()> {
    // SAFETY: no memory is involved; which table the number lives in is the caller's business.
    unsafe { call(k::__NR_close, [fd as usize, 0, 0, 0, 0, 0]) }.map(drop)
}

/// `fcntl(F_DUPFD_CLOEXEC)`: the same on the lowest free number from `least` up.
pub fn duplicate_from(fd: Fd, least: Fd) -> Result<Fd> {
    // SAFETY: no memory is involved.
    unsafe { call(k::__NR_fcntl, [fd as usize, k::F_DUPFD_CLOEXEC as usize, least as usize, 0, 0, 0]) }.map(|v| v as Fd)
}

/// `close_range` of everything from `first` up, in a descriptor table of this thread alone
/// (CLOSE_RANGE_UNSHARE): the rest of the process keeps its descriptors.
pub fn leave_descriptor_table(first: u32) -> Result<()> {
    // SAFETY: no memory is involved.
    unsafe { call(k::__NR_close_range, [first as usize, u32::MAX as usize, CLOSE_RANGE_UNSHARE, 0, 0, 0]) }.map(drop)
}

/// `mmap`; `addr` is a hint unless MAP_FIXED is among the flags.
///
/// # Safety
/// With MAP_FIXED the range must be the caller's to replace.
pub unsafe fn mmap(addr: *mut u8, len: usize, prot: u32, flags: u32, fd: Fd, offset: u64) -> Result<*mut u8> {
    // SAFETY: passed on to the caller.
    unsafe {
        call(k::__NR_mmap, [addr as usize, len, prot as usize, flags as usize, fd as isize as usize, offset as usize])
    }
    .map(|v| v as *mut u8)
}

/// `munmap`.
///
/// # Safety
/// Nothing may use the range any more.
pub unsafe fn munmap(addr: *mut u8, len: usize) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { call(k::__NR_munmap, [addr as usize, len, 0, 0, 0, 0]) }.map(drop)
}

/// `madvise`.
///
/// # Safety
/// The advice must not destroy what somebody else still needs.
pub unsafe fn madvise(addr: *mut u8, len: usize, advice: u32) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { call(k::__NR_madvise, [addr as usize, len, advice as usize, 0, 0, 0]) }.map(drop)
}

/// `mincore`: one byte a page, bit 0 set when the page is resident.
///
/// Believe it only on files that the caller owns or may write: for anybody else
/// the kernel answers that all is resident.
///
/// # Safety
/// `addr` must be the page-aligned start of a mapping of at least `out.len()` pages.
pub unsafe fn mincore(addr: *const u8, out: &mut [u8]) -> Result<()> {
    // SAFETY: `out` holds a byte for each page asked about.
    unsafe { call(k::__NR_mincore, [addr as usize, out.len() * PAGE, out.as_mut_ptr() as usize, 0, 0, 0]) }.map(drop)
}

/// How many of a file's first `len` bytes' pages are in the page cache, as [`mincore`] knows it: of one's own files, on any
/// kernel, and nothing is brought in by the question.
pub fn resident_pages(fd: Fd, len: u64) -> Result<u64> {
    const ASKED: usize = 1 << 16;
    let pages = (len as usize).div_ceil(PAGE);
    if pages == 0 {
        return Ok(0);
    }
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let start = unsafe { mmap(core::ptr::null_mut(), pages * PAGE, PROT_READ, MAP_SHARED, fd, 0) }?;
    let mut out = vec![0u8; pages.min(ASKED)];
    let (mut asked, mut resident) = (0, Ok(0));
    while asked < pages && resident.is_ok() {
        let part = &mut out[..(pages - asked).min(ASKED)];
        // SAFETY: as many pages are mapped from there on.
        let told = unsafe { mincore(start.wrapping_add(asked * PAGE), part) };
        let found = part.iter().filter(|&&page| page & 1 != 0).count() as u64;
        resident = told.and_then(|()| resident.map(|before| before + found));
        asked += part.len();
    }
    // SAFETY: mapped above, and used by nobody else.
    unsafe { munmap(start, pages * PAGE) }?;
    resident
}

/// `cachestat` (Linux 6.5): how much of a range is in the page cache. EPERM for who may not write the file.
pub fn cachestat(fd: Fd, offset: u64, len: u64) -> Result<CacheStat> {
    const NR_CACHESTAT: u32 = 451;
    let range = [offset, len];
    let mut out = CacheStat::default();
    // SAFETY: `range` and `out` have the layouts of the kernel's structures and live across the call.
    unsafe { call(NR_CACHESTAT, [fd as usize, range.as_ptr() as usize, &raw mut out as usize, 0, 0, 0]) }?;
    Ok(out)
}

/// `fadvise64`; length 0 means to the end of the file.
pub fn fadvise(fd: Fd, offset: u64, len: u64, advice: Advice) -> Result<()> {
    // SAFETY: no memory is involved.
    unsafe { call(k::__NR_fadvise64, [fd as usize, offset as usize, len as usize, advice as usize, 0, 0]) }.map(drop)
}

/// Magic number of the file system (`fstatfs`).
pub fn file_system(fd: Fd) -> Result<u64> {
    // SAFETY: all-zero is a valid `struct statfs`.
    let mut raw: k::statfs64 = unsafe { core::mem::zeroed() };
    // SAFETY: `raw` has the layout of this architecture's `struct statfs` and is alive across the call.
    unsafe { call(k::__NR_fstatfs, [fd as usize, &raw mut raw as usize, 0, 0, 0, 0]) }?;
    Ok(raw.f_type as u64)
}

/// The processor this thread runs on now.
pub fn cpu() -> usize {
    // SAFETY: no memory is involved; libc answers from memory the kernel shares, without a system call.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}

/// Processors that this thread may run on.
pub fn processors() -> usize {
    // SAFETY: all-zero is a valid set.
    let mut set: libc::cpu_set_t = unsafe { core::mem::zeroed() };
    let bytes = size_of::<libc::cpu_set_t>();
    // SAFETY: `set` is alive across the call and `bytes` long.
    let got = unsafe { call(k::__NR_sched_getaffinity, [0, bytes, &raw mut set as usize, 0, 0, 0]) };
    // SAFETY: only counts the bits of a set that was initialised above.
    if got.is_ok() { (unsafe { libc::CPU_COUNT(&set) } as usize).max(1) } else { 1 }
}

/// Bytes of memory of this machine.
pub fn memory() -> u64 {
    // SAFETY: all-zero is a valid `struct sysinfo`.
    let mut info: libc::sysinfo = unsafe { core::mem::zeroed() };
    // SAFETY: `info` is alive across the call and has the kernel's layout.
    match unsafe { call(k::__NR_sysinfo, [&raw mut info as usize, 0, 0, 0, 0, 0]) } {
        Ok(_) => info.totalram * u64::from(info.mem_unit),
        Err(_) => 0,
    }
}

/// Effective user of this thread.
pub fn geteuid() -> u32 {
    // SAFETY: no memory is involved, and the call cannot fail.
    unsafe { call(k::__NR_geteuid, [0; 6]) }.unwrap_or(0) as u32
}

/// Whether this program has gained rights by being executed (setuid, setgid, file capabilities).
pub fn has_gained_rights() -> bool {
    // SAFETY: reads a vector that the kernel has laid out before the program began.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// `gettid`.
pub fn gettid() -> u32 {
    // SAFETY: no memory is involved, and the call cannot fail.
    unsafe { call(k::__NR_gettid, [0; 6]) }.unwrap_or(0) as u32
}

/// Whether a thread of this process has this number now.
pub fn is_thread(tid: u32) -> bool {
    // SAFETY: no memory is involved, and signal 0 is none.
    unsafe { call(k::__NR_tgkill, [getpid() as usize, tid as usize, 0, 0, 0, 0]) }.is_ok()
}

/// `getpid`, asked from the kernel each time.
pub fn getpid() -> u32 {
    // SAFETY: no memory is involved, and the call cannot fail.
    unsafe { call(k::__NR_getpid, [0; 6]) }.unwrap_or(0) as u32
}

/// Size of a page; x86-64 has no other for the page cache.
pub const PAGE: usize = 4096;

pub use k::{
    MADV_DONTNEED, MADV_POPULATE_READ, MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, O_ACCMODE, O_APPEND, O_CREAT, O_DIRECT,
    O_DSYNC, O_NONBLOCK, O_PATH, O_RDONLY, O_RDWR, O_SYNC, O_WRONLY, PROT_NONE, PROT_READ, PROT_WRITE,
};

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
    unsafe { call(k::__NR_readlink, [path.as_ptr() as usize, out.as_mut_ptr() as usize, out.len(), 0, 0, 0]) }
}
