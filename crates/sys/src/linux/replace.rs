//! A small file, read whole and replaced whole: who reads it beside sees the old one or the new one.

use std::ffi::{CStr, CString};

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::calls::{close, getpid, gettid, open, pwrite, read};
use super::raw::call;

type Result<T> = core::result::Result<T, Errno>;

/// The bytes of a file of at most `most`.
pub fn read_whole(path: &CStr, most: usize) -> Result<Vec<u8>> {
    let fd = open(path, (k::O_RDONLY | k::O_NONBLOCK) as i32, 0)?;
    let mut bytes = vec![0u8; most + 1];
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
    if got > most {
        return Err(Errno::FBIG);
    }
    bytes.truncate(got);
    Ok(bytes)
}

/// Puts a file there, whole or not at all, readable by its owner alone; folders on the way are made.
pub fn replace(path: &CStr, bytes: &[u8]) -> Result<()> {
    let name = path.to_bytes();
    for (at, _) in name.iter().enumerate().filter(|(at, b)| **b == b'/' && *at > 0) {
        let folder = CString::new(&name[..at]).map_err(|_| Errno::INVAL)?;
        // SAFETY: NUL-terminated and alive across the call.
        let _ = unsafe { call(k::__NR_mkdir, [folder.as_ptr() as usize, 0o700, 0, 0, 0, 0]) };
    }
    let aside = CString::new([name, format!(".{}-{}", getpid(), gettid()).as_bytes()].concat());
    let aside = aside.map_err(|_| Errno::INVAL)?;
    let fd = open(&aside, (k::O_WRONLY | k::O_CREAT | k::O_TRUNC | k::O_NOFOLLOW) as i32, 0o600)?;
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
    let (from, to) = (aside.as_ptr() as usize, path.as_ptr() as usize);
    // SAFETY: both are NUL-terminated and alive across the call.
    let moved = written.and_then(|()| unsafe { call(k::__NR_rename, [from, to, 0, 0, 0, 0]) }.map(drop));
    if moved.is_err() {
        // SAFETY: as above.
        let _ = unsafe { call(k::__NR_unlink, [from, 0, 0, 0, 0, 0]) };
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_is_read_and_what_is_too_long_is_refused() {
        let folder = std::env::temp_dir().join(format!("spinio-replace-{}", std::process::id()));
        let path = CString::new(format!("{}/a/b/file", folder.display())).unwrap();
        assert_eq!(read_whole(&path, 10), Err(Errno::NOENT));
        replace(&path, b"one").unwrap();
        replace(&path, b"three").unwrap();
        assert_eq!(read_whole(&path, 5).unwrap(), b"three");
        assert_eq!(read_whole(&path, 4), Err(Errno::FBIG));
        assert_eq!(std::fs::read_dir(folder.join("a/b")).unwrap().count(), 1, "nothing is left beside it");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
