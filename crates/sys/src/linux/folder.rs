//! Files that come and go by name in a folder: made whole before anybody sees them, locked while their maker lives.

use std::ffi::{CStr, CString};

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::files::Fd;
use super::list::entries;
use super::raw::call;

type Result<T> = core::result::Result<T, Errno>;

/// `mkdir`.
pub fn make_folder(path: &CStr, mode: u32) -> Result<()> {
    // SAFETY: `path` is NUL-terminated and lives across the call.
    unsafe { call(k::__NR_mkdir, [path.as_ptr() as usize, mode as usize, 0, 0, 0, 0]) }.map(drop)
}

/// `openat` with O_CLOEXEC.
pub fn open_in(folder: Fd, name: &CStr, flags: i32, mode: u32) -> Result<Fd> {
    let flags = flags | k::O_CLOEXEC as i32;
    let folder = folder as isize as usize;
    // SAFETY: `name` is NUL-terminated and lives across the call.
    unsafe { call(k::__NR_openat, [folder, name.as_ptr() as usize, flags as usize, mode as usize, 0, 0]) }
        .map(|v| v as Fd)
}

/// `unlinkat`.
pub fn remove_from(folder: Fd, name: &CStr) -> Result<()> {
    // SAFETY: `name` is NUL-terminated and lives across the call.
    unsafe { call(k::__NR_unlinkat, [folder as isize as usize, name.as_ptr() as usize, 0, 0, 0, 0]) }.map(drop)
}

/// `unlink`.
pub fn remove(path: &CStr) -> Result<()> {
    remove_from(k::AT_FDCWD, path)
}

/// Gives a file without a name (O_TMPFILE) one, which must be free. `fd` is in the calling thread's table.
pub fn name_in(folder: Fd, fd: Fd, name: &CStr) -> Result<()> {
    let from = CString::new(format!("/proc/thread-self/fd/{fd}")).map_err(|_| Errno::INVAL)?;
    let at = k::AT_FDCWD as isize as usize;
    let (from, to) = (from.as_ptr() as usize, name.as_ptr() as usize);
    // SAFETY: both names are NUL-terminated and live across the call.
    unsafe { call(k::__NR_linkat, [at, from, folder as isize as usize, to, k::AT_SYMLINK_FOLLOW as usize, 0]) }
        .map(drop)
}

/// `flock(LOCK_EX | LOCK_NB)`: true if it is ours now, false if somebody else has it. It goes with the last descriptor of
/// this opening, so at the latest with the process, however that ends.
pub fn lock_alone(fd: Fd) -> Result<bool> {
    let how = k::LOCK_EX | k::LOCK_NB;
    // SAFETY: no memory is involved.
    match unsafe { call(k::__NR_flock, [fd as usize, how as usize, 0, 0, 0, 0]) } {
        Ok(_) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(e),
    }
}

/// The names in an open folder, from where its descriptor stands, without `.` and `..`.
pub fn names_in(folder: Fd) -> Result<Vec<CString>> {
    entries(folder)
}

/// Nanoseconds of CLOCK_MONOTONIC, which all processes share.
pub fn monotonic() -> u64 {
    clock(libc::CLOCK_MONOTONIC)
}

/// Nanoseconds since 1970.
pub fn wall_clock() -> u64 {
    clock(libc::CLOCK_REALTIME)
}

fn clock(which: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is alive across the call; libc answers without a system call where the kernel lets it.
    unsafe { libc::clock_gettime(which, &raw mut now) };
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

pub use k::{O_DIRECTORY, O_EXCL, O_TMPFILE};

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use k::O_NOFOLLOW;

    use super::super::files::{O_RDONLY, O_RDWR, close, open};
    use super::*;

    #[test]
    fn a_file_gets_its_name_when_it_is_ready_and_its_lock_goes_with_it() {
        let folder = std::env::temp_dir().join(format!("spinio-folder-{}", std::process::id()));
        let path = CString::new(folder.as_os_str().as_bytes()).unwrap();
        make_folder(&path, 0o700).unwrap();
        assert_eq!(make_folder(&path, 0o700), Err(Errno::EXIST));
        let dir = open(&path, (O_RDONLY | O_DIRECTORY) as i32, 0).unwrap();
        match open_in(dir, c".", (O_RDWR | O_TMPFILE) as i32, 0o600) {
            Ok(made) => {
                assert_eq!(lock_alone(made), Ok(true));
                name_in(dir, made, c"1").unwrap();
                assert_eq!(name_in(dir, made, c"1"), Err(Errno::EXIST));
                assert_eq!(names_in(dir).unwrap(), [c"1".to_owned()]);
                let other = open_in(dir, c"1", (O_RDONLY | O_NOFOLLOW) as i32, 0).unwrap();
                assert_eq!(lock_alone(other), Ok(false));
                close(made).unwrap();
                assert_eq!(lock_alone(other), Ok(true));
                close(other).unwrap();
                remove_from(dir, c"1").unwrap();
            }
            Err(e) => eprintln!("skipped: no files without a name here: {e}"),
        }
        close(dir).unwrap();
        std::fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn clocks_go_forward() {
        let (a, b) = (monotonic(), monotonic());
        assert!(a > 0 && b >= a && wall_clock() > 1_600_000_000_000_000_000);
    }
}
