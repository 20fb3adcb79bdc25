//! Files in a directory: complete before they get a name, locked while their creator lives.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::ffi::{CStr, CString};

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::files::Fd;
use super::raw::syscall;
use super::read_dir::getdents;

type Result<T> = core::result::Result<T, Errno>;

/// `mkdir`.
pub fn mkdir(path: &CStr, mode: u32) -> Result<()> {
    // SAFETY: `path` is NUL-terminated and lives across the call.
    unsafe { syscall(k::__NR_mkdir, [path.as_ptr() as usize, mode as usize, 0, 0, 0, 0]) }.map(drop)
}

/// `openat` with O_CLOEXEC.
pub fn openat(dirfd: Fd, name: &CStr, flags: i32, mode: u32) -> Result<Fd> {
    let flags = flags | k::O_CLOEXEC as i32;
    let dirfd = dirfd as isize as usize;
    // SAFETY: `name` is NUL-terminated and lives across the call.
    unsafe { syscall(k::__NR_openat, [dirfd, name.as_ptr() as usize, flags as usize, mode as usize, 0, 0]) }
        .map(|v| v as Fd)
}

/// How a path is resolved from a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolve {
    /// Below it: EXDEV for an absolute path, and for `..` and symbolic links that lead out of it.
    Beneath,
    /// It is the root: an absolute path begins there, and `..` does not lead out of it.
    InRoot,
}

/// `openat2` with O_CLOEXEC, and without the magic links of /proc.
pub fn openat2(dirfd: Fd, path: &CStr, flags: i32, mode: u32, resolve: Resolve) -> Result<Fd> {
    let within = match resolve {
        Resolve::Beneath => k::RESOLVE_BENEATH,
        Resolve::InRoot => k::RESOLVE_IN_ROOT,
    };
    let how = k::open_how {
        flags: u64::from(flags as u32 | k::O_CLOEXEC),
        mode: mode.into(),
        resolve: u64::from(within | k::RESOLVE_NO_MAGICLINKS),
    };
    let (path, at, len) = (path.as_ptr() as usize, &raw const how as usize, size_of_val(&how));
    // SAFETY: `path` is NUL-terminated, `how` has the layout of the Linux kernel, and both live across the call.
    unsafe { syscall(k::__NR_openat2, [dirfd as isize as usize, path, at, len, 0, 0]) }.map(|v| v as Fd)
}

/// `unlinkat`.
pub fn unlinkat(dirfd: Fd, name: &CStr) -> Result<()> {
    // SAFETY: `name` is NUL-terminated and lives across the call.
    unsafe { syscall(k::__NR_unlinkat, [dirfd as isize as usize, name.as_ptr() as usize, 0, 0, 0, 0]) }.map(drop)
}

/// `unlink`.
pub fn unlink(path: &CStr) -> Result<()> {
    unlinkat(k::AT_FDCWD, path)
}

/// Gives a file without a name (O_TMPFILE) one, which must be free. `fd` is in the calling thread's table.
pub fn link_tmpfile(dirfd: Fd, fd: Fd, name: &CStr) -> Result<()> {
    let from = CString::new(format!("/proc/thread-self/fd/{fd}")).map_err(|_| Errno::INVAL)?;
    let at = k::AT_FDCWD as isize as usize;
    let (from, to) = (from.as_ptr() as usize, name.as_ptr() as usize);
    // SAFETY: both names are NUL-terminated and live across the call.
    unsafe { syscall(k::__NR_linkat, [at, from, dirfd as isize as usize, to, k::AT_SYMLINK_FOLLOW as usize, 0]) }
        .map(drop)
}

/// `flock(LOCK_EX | LOCK_NB)`: true if acquired, false if another process has it. It is released with the last
/// descriptor of this open file description, so at the latest with the process, however that ends.
pub fn try_lock_exclusive(fd: Fd) -> Result<bool> {
    let operation = k::LOCK_EX | k::LOCK_NB;
    // SAFETY: no memory is involved.
    match unsafe { syscall(k::__NR_flock, [fd as usize, operation as usize, 0, 0, 0, 0]) } {
        Ok(_) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(e),
    }
}

/// The names in an open directory, from the descriptor's position, without `.` and `..`.
pub fn read_dirfd(dirfd: Fd) -> Result<Vec<CString>> {
    getdents(dirfd)
}

pub use k::{O_DIRECTORY, O_EXCL, O_NOCTTY, O_TMPFILE, O_TRUNC};

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use k::O_NOFOLLOW;

    use super::super::files::{O_RDONLY, O_RDWR, close, open};
    use super::*;

    #[test]
    fn tmpfile_is_linked_when_ready_and_lock_ends_with_fd() {
        let dir_path = std::env::temp_dir().join(format!("spinio-folder-{}", std::process::id()));
        let path = CString::new(dir_path.as_os_str().as_bytes()).unwrap();
        mkdir(&path, 0o700).unwrap();
        assert_eq!(mkdir(&path, 0o700), Err(Errno::EXIST));
        let dir = open(&path, (O_RDONLY | O_DIRECTORY) as i32, 0).unwrap();
        match openat(dir, c".", (O_RDWR | O_TMPFILE) as i32, 0o600) {
            Ok(made) => {
                assert_eq!(try_lock_exclusive(made), Ok(true));
                link_tmpfile(dir, made, c"1").unwrap();
                assert_eq!(link_tmpfile(dir, made, c"1"), Err(Errno::EXIST));
                assert_eq!(read_dirfd(dir).unwrap(), [c"1".to_owned()]);
                let other_fd = openat(dir, c"1", (O_RDONLY | O_NOFOLLOW) as i32, 0).unwrap();
                assert_eq!(try_lock_exclusive(other_fd), Ok(false));
                close(made).unwrap();
                assert_eq!(try_lock_exclusive(other_fd), Ok(true));
                close(other_fd).unwrap();
                unlinkat(dir, c"1").unwrap();
            }
            Err(e) => eprintln!("skipped: no files without a name (O_TMPFILE) here: {e}"),
        }
        close(dir).unwrap();
        std::fs::remove_dir(&dir_path).unwrap();
    }

    #[test]
    fn path_that_leaves_the_directory_is_refused_or_stays_in_it() {
        let dir = std::env::temp_dir().join(format!("spinio-beneath-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("in")).unwrap();
        std::fs::write(dir.join("outside"), "x").unwrap();
        std::fs::write(dir.join("in/file"), "x").unwrap();
        std::os::unix::fs::symlink("../outside", dir.join("in/link")).unwrap();
        let path = CString::new(dir.join("in").as_os_str().as_bytes()).unwrap();
        let at = open(&path, (O_RDONLY | O_DIRECTORY) as i32, 0).unwrap();
        let opened = |path: &CStr, how| openat2(at, path, O_RDONLY as i32, 0, how).and_then(close);
        if opened(c"file", Resolve::Beneath) == Err(Errno::NOSYS) {
            return eprintln!("skipped: no openat2 here");
        }
        assert_eq!(opened(c"file", Resolve::Beneath), Ok(()));
        assert_eq!(opened(c"../in/file", Resolve::Beneath), Err(Errno::XDEV));
        assert_eq!(opened(c"link", Resolve::Beneath), Err(Errno::XDEV));
        assert_eq!(opened(c"/file", Resolve::Beneath), Err(Errno::XDEV));
        assert_eq!(opened(c"/file", Resolve::InRoot), Ok(()));
        assert_eq!(opened(c"../file", Resolve::InRoot), Ok(()));
        assert_eq!(opened(c"link", Resolve::InRoot), Err(Errno::NOENT));
        close(at).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
