//! The folder of a user's processes: one file each, that is there while its process lives, or a little longer.
//!
//! ```text
//!   $XDG_RUNTIME_DIR/spinio/        else  /dev/shm/spinio-UID/          0700, ours, no link: or it is not used
//!      4711      locked by 4711     made without a name, filled, locked, then named: nobody sees it half made
//!      4712      no lock            4712 is gone, however it ended: removed by the next process that comes
//!      4711.1    locked             another 4711, of another PID namespace
//! ```
//!
//! The lock (`flock`) tells who lives. It stands on a descriptor of its own, which lives in the keepers' table: it is
//! neither the program's to close nor inherited by its children. Nor is it the descriptor of the mapping, since a forked
//! child inherits mappings and would hold the lock for its dead parent.
//!
//! No file that is there already is ever opened for writing, and none is removed that does not look like one of ours.

use std::ffi::{CStr, CString};

use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::home::{allocate_table, write_header};
use super::layout::{MAGIC, TABLE_WORDS};
use super::words::SharedWords;

/// Files that one process looks at to remove what the dead left.
const MAX_CLEANED: usize = 256;

/// Names a process tries.
const FS_NAMES: usize = 16;

/// Where processes of a user put their files, best first. `runtime`: XDG_RUNTIME_DIR.
pub fn default_dirs(runtime: Option<&str>, uid: u32) -> Vec<String> {
    let runtime = runtime.filter(|path| path.starts_with('/')).map(|path| format!("{path}/spinio"));
    runtime.into_iter().chain([format!("/dev/shm/spinio-{uid}")]).collect()
}

/// A table in a folder.
pub(super) struct StatsFile {
    pub(super) words: SharedWords,
    /// Holds the lock; in the calling thread's table.
    pub(super) lock: Fd,
    pub(super) path: CString,
}

/// Makes a file for this process in a folder of its own, after the dead are cleared away. On a keeper.
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

/// Makes a file for this process in a folder that the user named. On a keeper.
pub(super) fn create_in(path: &CStr, trace: bool) -> Result<StatsFile, Errno> {
    let dir = linux::open(path, (linux::O_RDONLY | linux::O_DIRECTORY) as i32, 0)?;
    let file = create(dir, path, trace);
    let _ = linux::close(dir);
    file
}

/// Whether nobody but us can have put anything there.
fn check_private(dir: Fd) -> Result<(), Errno> {
    let stat = linux::fstat(dir)?;
    if stat.uid == linux::geteuid() && stat.mode & 0o077 == 0 { Ok(()) } else { Err(Errno::PERM) }
}

fn create(dir: Fd, path: &CStr, trace: bool) -> Result<StatsFile, Errno> {
    let unnamed = linux::openat(dir, c".", (linux::O_RDWR | linux::O_TMPFILE) as i32, 0o600);
    let (fd, named) = match unnamed {
        Ok(fd) => (fd, None),
        // A file system without files that have no name: this one is seen before it is ready, as no table at all.
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

/// A table in an empty file, and a descriptor that holds its lock. It is no table to others before it is locked.
fn init_table(fd: Fd, trace: bool) -> Result<(SharedWords, Fd), Errno> {
    allocate_table(fd, trace)?;
    let words = SharedWords::from_file(TABLE_WORDS, fd)?;
    let path = CString::new(format!("/proc/thread-self/fd/{fd}")).map_err(|_| Errno::INVAL)?;
    let lock = linux::open(&path, linux::O_RDONLY as i32, 0)?;
    match linux::try_lock_exclusive(lock) {
        Ok(true) => {
            write_header(&words);
            Ok((words, lock))
        }
        other => {
            let _ = linux::close(lock);
            Err(other.err().unwrap_or(Errno::WOULDBLOCK))
        }
    }
}

/// Does something with our number as a name, or with an addition where that is taken.
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

/// Removes files of the dead.
fn remove_stale(dir: Fd) {
    let names = linux::read_dirfd(dir).unwrap_or_default();
    for name in names.iter().filter(|n| is_stats_name(n)).take(MAX_CLEANED) {
        let flags = linux::O_RDONLY | linux::O_NOFOLLOW | linux::O_NONBLOCK;
        let Ok(fd) = linux::openat(dir, name, flags as i32, 0) else { continue };
        if is_table(fd) && linux::try_lock_exclusive(fd) == Ok(true) && names_same_file(dir, name, fd) {
            let _ = linux::unlinkat(dir, name);
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
    // Of any version: the low bytes are the same in all of them.
    got == Ok(8) && magic[..6] == MAGIC.to_le_bytes()[..6]
}

/// Whether the name still means the file that was looked at.
fn names_same_file(dir: Fd, name: &CStr, fd: Fd) -> bool {
    let Ok(reopened) = linux::openat(dir, name, (linux::O_RDONLY | linux::O_NOFOLLOW) as i32, 0) else { return false };
    let same = matches!((linux::fstat(fd), linux::fstat(reopened)), (Ok(a), Ok(b)) if (a.dev, a.ino) == (b.dev, b.ino));
    let _ = linux::close(reopened);
    same
}
