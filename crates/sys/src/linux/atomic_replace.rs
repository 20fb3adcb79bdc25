//! Reads and replaces a small file as a whole: a concurrent reader sees the old contents or the new ones.
//!
//! Its directory may be writable by other users. So a file is trusted only if no other user can have written it, and an
//! existing file is never written into.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::ffi::{CStr, CString};

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::files::{close, fstat, open, pwrite, read};
use super::process::{geteuid, getpid, gettid};
use super::raw::syscall;
use super::types::{FileKind, Stat};

type Result<T> = core::result::Result<T, Errno>;

/// The bytes of a file of at most `most`, owned by this user or root, that no other user may write. EPERM: not trusted.
pub fn read_trusted(path: &CStr, max_len: usize) -> Result<Vec<u8>> {
    let fd = open(path, (k::O_RDONLY | k::O_NONBLOCK | k::O_NOFOLLOW) as i32, 0)?;
    if let Err(errno) = fstat(fd).and_then(|stat| check_owner(&stat)) {
        let _ = close(fd);
        return Err(errno);
    }
    let mut bytes = vec![0u8; max_len + 1];
    let mut got = 0;
    let ended = loop {
        // SAFETY: the bytes from `got` on are ours.
        match unsafe { read(fd, bytes[got..].as_mut_ptr(), bytes.len() - got) } {
            Ok(0) => break Ok(()),
            Ok(n) => got += n,
            Err(Errno::INTR) => {}
            Err(errno) => break Err(errno),
        }
    };
    let _ = close(fd);
    ended?;
    if got > max_len {
        return Err(Errno::FBIG);
    }
    bytes.truncate(got);
    Ok(bytes)
}

fn check_owner(stat: &Stat) -> Result<()> {
    let trusted = stat.kind == FileKind::Regular && (stat.uid == geteuid() || stat.uid == 0);
    if trusted && stat.mode & 0o022 == 0 { Ok(()) } else { Err(Errno::PERM) }
}

/// Creates a file with these contents, or none, readable by its owner alone; missing directories are created.
pub fn atomic_replace(path: &CStr, bytes: &[u8]) -> Result<()> {
    let name = path.to_bytes();
    for (at, _) in name.iter().enumerate().filter(|(at, b)| **b == b'/' && *at > 0) {
        let parent = CString::new(&name[..at]).map_err(|_| Errno::INVAL)?;
        // SAFETY: NUL-terminated and alive across the call.
        let _ = unsafe { syscall(k::__NR_mkdir, [parent.as_ptr() as usize, 0o700, 0, 0, 0, 0]) };
    }
    let temp_path = CString::new([name, format!(".{}-{}", getpid(), gettid()).as_bytes()].concat());
    let temp_path = temp_path.map_err(|_| Errno::INVAL)?;
    // A file that a process with this PID has left, or that another user has created for this process to write into.
    // SAFETY: NUL-terminated and alive across the call.
    let _ = unsafe { syscall(k::__NR_unlink, [temp_path.as_ptr() as usize, 0, 0, 0, 0, 0]) };
    let fd = open(&temp_path, (k::O_WRONLY | k::O_CREAT | k::O_EXCL | k::O_NOFOLLOW) as i32, 0o600)?;
    let mut done = 0;
    let mut written = Ok(());
    while done < bytes.len() {
        let rest = &bytes[done..];
        // SAFETY: a slice of that length.
        match unsafe { pwrite(fd, rest.as_ptr(), rest.len(), done as u64) } {
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(errno) => {
                written = Err(errno);
                break;
            }
        }
    }
    let _ = close(fd);
    let (from, to) = (temp_path.as_ptr() as usize, path.as_ptr() as usize);
    // SAFETY: both are NUL-terminated and alive across the call.
    let renamed = written.and_then(|()| unsafe { syscall(k::__NR_rename, [from, to, 0, 0, 0, 0]) }.map(drop));
    if renamed.is_err() {
        // SAFETY: as above.
        let _ = unsafe { syscall(k::__NR_unlink, [from, 0, 0, 0, 0, 0]) };
    }
    renamed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaced_file_is_read_back_and_oversized_file_is_refused() {
        let directory = std::env::temp_dir().join(format!("spinio-replace-{}", std::process::id()));
        let path = CString::new(format!("{}/a/b/file", directory.display())).unwrap();
        assert_eq!(read_trusted(&path, 10), Err(Errno::NOENT));
        atomic_replace(&path, b"one").unwrap();
        atomic_replace(&path, b"three").unwrap();
        assert_eq!(read_trusted(&path, 5).unwrap(), b"three");
        assert_eq!(read_trusted(&path, 4), Err(Errno::FBIG));
        assert_eq!(std::fs::read_dir(directory.join("a/b")).unwrap().count(), 1, "no temporary file is left");
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn file_writable_by_others_is_refused_and_never_written_into() {
        use std::os::unix::fs::{PermissionsExt, chown, symlink};
        let directory = std::env::temp_dir().join(format!("spinio-others-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        let path_of = |name: &str| CString::new(format!("{}/{name}", directory.display())).unwrap();
        atomic_replace(&path_of("file"), b"ours").unwrap();
        let set_mode =
            |mode| std::fs::set_permissions(directory.join("file"), PermissionsExt::from_mode(mode)).unwrap();
        for (mode, expected) in [(0o644, Ok(b"ours".to_vec())), (0o664, Err(Errno::PERM)), (0o602, Err(Errno::PERM))] {
            set_mode(mode);
            assert_eq!(read_trusted(&path_of("file"), 10), expected, "{mode:o}");
        }
        set_mode(0o600);
        symlink("file", directory.join("link")).unwrap();
        assert_eq!(read_trusted(&path_of("link"), 10), Err(Errno::LOOP));
        let temp_path = directory.join(format!("file.{}-{}", getpid(), gettid()));
        std::fs::hard_link(directory.join("file"), &temp_path).unwrap();
        std::fs::hard_link(directory.join("file"), directory.join("other")).unwrap();
        atomic_replace(&path_of("file"), b"new").unwrap();
        assert_eq!(
            (read_trusted(&path_of("other"), 10), read_trusted(&path_of("file"), 10)),
            (Ok(b"ours".to_vec()), Ok(b"new".to_vec()))
        );
        match chown(directory.join("file"), Some(65_533), None) {
            Ok(()) => assert_eq!(read_trusted(&path_of("file"), 10), Err(Errno::PERM)),
            Err(e) => eprintln!("skipped: cannot give files away: {e}"),
        }
        std::fs::remove_dir_all(directory).unwrap();
    }
}
