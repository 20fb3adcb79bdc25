//! The directory of a user's processes: one file for each process, which exists while the process runs, or a little
//! longer.
//!
//! ```text
//!   $XDG_RUNTIME_DIR/spinio/        else  /dev/shm/spinio-UID/          mode 0700, ours, not a link; else not used
//!      4711      locked by 4711     created without a name, filled, locked, then linked: never visible incomplete
//!      4712      not locked         4712 has ended, normally or not: the next process removes the file
//!      4711.1    locked             another 4711, of another PID namespace
//! ```
//!
//! The lock (`flock`) shows that the process runs. It belongs to a separate descriptor in the shadow table: the program
//! cannot close it, and its children do not inherit it. It is not the descriptor of the mapping, because a forked child
//! inherits mappings and would keep the lock after its parent has ended.
//!
//! An existing file is never opened for writing, and a file is removed only if it is a table of SPIN.

#![expect(unsafe_code, reason = "counters in shared memory")]

use std::ffi::{CStr, CString};
use std::sync::atomic::Ordering::Relaxed;

use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, SharedWords};

use super::layout::{MAGIC, header};
use super::table_file::{allocate_table, map_table, write_header};

/// The limit of files that one process removes.
const MAX_CLEANED: usize = 256;

/// The limit of names that a process tries.
const FS_NAMES: usize = 16;

/// The directories for the files of a user's processes, preferred first. `runtime`: XDG_RUNTIME_DIR.
pub fn default_dirs(runtime: Option<&str>, uid: u32) -> Vec<String> {
    let runtime = runtime.filter(|path| path.starts_with('/')).map(|path| format!("{path}/spinio"));
    runtime.into_iter().chain([format!("/dev/shm/spinio-{uid}")]).collect()
}

/// A table in a directory.
pub(super) struct StatsFile {
    pub(super) words: SharedWords,
    /// The descriptor with the lock, in the calling thread's table.
    pub(super) lock: Fd,
    pub(super) path: CString,
}

/// Creates the file of this process in a private directory, and removes stale files first. Called on a shadow worker.
pub(super) fn create_private(path: &CStr, trace: bool) -> Result<StatsFile, Errno> {
    match linux::mkdir(path, 0o700) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(e),
    }
    let dir = linux::open(path, (linux::O_RDONLY | linux::O_DIRECTORY | linux::O_NOFOLLOW) as i32, 0)?;
    let file = check_private(dir).and_then(|()| {
        remove_stale(dir);
        create(dir, path, trace)
    });
    let _ = linux::close(dir);
    file
}

/// Creates the file of this process in a directory that the user named. Called on a shadow worker.
pub(super) fn create_in(path: &CStr, trace: bool) -> Result<StatsFile, Errno> {
    let dir = linux::open(path, (linux::O_RDONLY | linux::O_DIRECTORY) as i32, 0)?;
    let file = create(dir, path, trace);
    let _ = linux::close(dir);
    file
}

/// Fails unless only this user can create files there.
pub(super) fn check_private(dir: Fd) -> Result<(), Errno> {
    let stat = linux::fstat(dir)?;
    if stat.uid == linux::geteuid() && stat.mode & 0o077 == 0 { Ok(()) } else { Err(Errno::PERM) }
}

fn create(dir: Fd, path: &CStr, trace: bool) -> Result<StatsFile, Errno> {
    let unnamed = linux::openat(dir, c".", (linux::O_RDWR | linux::O_TMPFILE) as i32, 0o600);
    let (fd, named) = match unnamed {
        Ok(fd) => (fd, None),
        // A file system without O_TMPFILE: this file is visible before it is ready, and is not a table until then.
        Err(_) => {
            let flags = linux::O_RDWR | linux::O_CREAT | linux::O_EXCL | linux::O_NOFOLLOW;
            let (name, fd) = with_free_name(|name| linux::openat(dir, name, flags as i32, 0o600))?;
            (fd, Some(name))
        }
    };
    let file = init_table(fd, trace).and_then(|(words, lock)| {
        let name = match named {
            Some(name) => Ok(name),
            None => with_free_name(|name| linux::link_tmpfile(dir, fd, name)).map(|(name, ())| name),
        };
        let path = name.and_then(|name| {
            let path = [path.to_bytes(), b"/", name.to_bytes()].concat();
            CString::new(path).map_err(|_| Errno::INVAL)
        });
        match path {
            Ok(path) => Ok(StatsFile { words, lock, path }),
            Err(e) => {
                let _ = linux::close(lock);
                Err(e)
            }
        }
    });
    let _ = linux::close(fd);
    file
}

/// A table in an empty file, and a descriptor with its lock. Other processes see no table before the file is locked.
fn init_table(fd: Fd, trace: bool) -> Result<(SharedWords, Fd), Errno> {
    allocate_table(fd, trace)?;
    let words = map_table(fd)?;
    let path = CString::new(format!("/proc/thread-self/fd/{fd}")).map_err(|_| Errno::INVAL)?;
    let lock = linux::open(&path, linux::O_RDONLY as i32, 0)?;
    match linux::try_lock_exclusive(lock) {
        Ok(true) => {
            // Before the header: a tracer that sees a table may clear the switch, and no later store may set it again.
            if trace {
                words[header::TRACING].store(u64::MAX, Relaxed);
            }
            write_header(&words);
            Ok((words, lock))
        }
        other => {
            let _ = linux::close(lock);
            Err(other.err().unwrap_or(Errno::WOULDBLOCK))
        }
    }
}

/// Calls `operation` with the PID of this process as the name, or with a suffix if that name is taken.
fn with_free_name<T>(mut operation: impl FnMut(&CStr) -> Result<T, Errno>) -> Result<(CString, T), Errno> {
    let pid = linux::getpid();
    for n in 0..FS_NAMES {
        let text = if n == 0 { pid.to_string() } else { format!("{pid}.{n}") };
        let name = CString::new(text).map_err(|_| Errno::INVAL)?;
        match operation(&name) {
            Ok(done) => return Ok((name, done)),
            Err(Errno::EXIST) => {}
            Err(e) => return Err(e),
        }
    }
    Err(Errno::EXIST)
}

/// Removes the files of processes that have ended.
fn remove_stale(dir: Fd) {
    let names = linux::read_dirfd(dir).unwrap_or_default();
    let mut removed = 0;
    for name in names.iter().filter(|n| is_stats_name(n)) {
        if removed == MAX_CLEANED {
            break;
        }
        let flags = linux::O_RDONLY | linux::O_NOFOLLOW | linux::O_NONBLOCK;
        let Ok(fd) = linux::openat(dir, name, flags as i32, 0) else { continue };
        if is_table(fd) && linux::try_lock_exclusive(fd) == Ok(true) && names_same_file(dir, name, fd) {
            let _ = linux::unlinkat(dir, name);
            removed += 1;
        }
        let _ = linux::close(fd);
    }
}

/// `4711` or `4711.1`.
fn is_stats_name(name: &CStr) -> bool {
    let mut parts = name.to_bytes().split(|b| *b == b'.');
    let digits = |part: &[u8]| !part.is_empty() && part.iter().all(u8::is_ascii_digit);
    parts.next().is_some_and(digits) && parts.next().is_none_or(digits) && parts.next().is_none()
}

fn is_table(fd: Fd) -> bool {
    let mut magic = [0u8; 8];
    // SAFETY: eight bytes are read into a local.
    let got = unsafe { linux::pread(fd, magic.as_mut_ptr(), 8, 0) };
    // Of any version: the low bytes are the same in all versions.
    got == Ok(8) && magic[..6] == MAGIC.to_le_bytes()[..6]
}

/// Whether the name still refers to the file that was checked.
pub(super) fn names_same_file(dir: Fd, name: &CStr, fd: Fd) -> bool {
    let Ok(reopened) = linux::openat(dir, name, (linux::O_RDONLY | linux::O_NOFOLLOW) as i32, 0) else { return false };
    let same = matches!((linux::fstat(fd), linux::fstat(reopened)), (Ok(a), Ok(b)) if a.key() == b.key());
    let _ = linux::close(reopened);
    same
}
