//! A text about this process, for the tools: one thread writes it anew, others read it, and its process is asked nothing.
//!
//! ```text
//!   directory of the user's processes (directory.rs):   4711.net   4711.net.1 ...      locked while the process runs
//!   file:  magic 8 | bytes of the text 8 | checksum 8 | text
//! ```
//!
//! A text that is read while it is written has a wrong checksum: it is read again. The descriptor with the lock is in the
//! table of the thread that made it, so the program cannot close it and a forked child does not keep the lock.

#![expect(unsafe_code, reason = "system calls with buffers")]

use std::ffi::{CStr, CString};

use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::directory::{check_private, names_same_file};

const MAGIC: [u8; 8] = *b"spintxt\x01";
const HEADER: usize = 24;
/// Names that a process tries.
const FS_NAMES: usize = 64;
/// The most bytes of a text.
pub const LONGEST_TEXT: usize = 64 << 20;

/// The file of a text.
#[derive(Debug)]
pub struct PublishedText {
    fd: Fd,
    path: CString,
    bytes: Vec<u8>,
}

impl PublishedText {
    /// Makes a file `PID.KIND` in the first of these directories that is or can be made private, and removes those of
    /// processes that have ended. It is used and dropped on this thread's descriptor table alone.
    pub fn create(dirs: &[String], kind: &str) -> Option<PublishedText> {
        dirs.iter().find_map(|dir| create_in(&CString::new(dir.as_str()).ok()?, kind).ok())
    }

    /// Replaces the text; after an error it is empty.
    pub fn write(&mut self, text: &str) -> Result<(), Errno> {
        let fd = self.fd;
        // SAFETY: the bytes live across the call.
        self.write_by(text, |bytes, at| unsafe { linux::pwrite(fd, bytes.as_ptr(), bytes.len(), at) })
    }

    fn write_by(
        &mut self,
        text: &str,
        mut pwrite: impl FnMut(&[u8], u64) -> Result<usize, Errno>,
    ) -> Result<(), Errno> {
        self.encode(text);
        let written = write_all(&self.bytes, &mut pwrite);
        if written.is_err() {
            self.encode("");
            // On a full file system too: these bytes have been written before.
            let _ = write_all(&self.bytes, &mut pwrite);
        }
        written
    }

    fn encode(&mut self, text: &str) {
        self.bytes.clear();
        self.bytes.extend(MAGIC);
        self.bytes.extend((text.len() as u64).to_le_bytes());
        self.bytes.extend(checksum(text.as_bytes()).to_le_bytes());
        self.bytes.extend(text.as_bytes());
    }
}

impl Drop for PublishedText {
    fn drop(&mut self) {
        let _ = linux::unlink(&self.path);
        let _ = linux::close(self.fd);
    }
}

/// Writes all bytes from offset 0 on; a file system that is nearly full takes some of them.
fn write_all(bytes: &[u8], mut pwrite: impl FnMut(&[u8], u64) -> Result<usize, Errno>) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match pwrite(&bytes[done..], done as u64)? {
            0 => return Err(Errno::NOSPC),
            some => done += some,
        }
    }
    Ok(())
}

/// The text in the bytes of a file; `None` while it is written, or if this is another file.
pub fn published_text(bytes: &[u8]) -> Option<&str> {
    let (header, rest) = bytes.split_at_checked(HEADER)?;
    let word = |at: usize| header[at..].first_chunk().map(|word| u64::from_le_bytes(*word));
    let text = rest.get(..usize::try_from(word(8)?).ok()?)?;
    (header.starts_with(&MAGIC) && word(16) == Some(checksum(text))).then(|| std::str::from_utf8(text).ok())?
}

/// FNV-1a.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

fn create_in(path: &CStr, kind: &str) -> Result<PublishedText, Errno> {
    match linux::mkdir(path, 0o700) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(errno),
    }
    let dir = linux::open(path, (linux::O_RDONLY | linux::O_DIRECTORY | linux::O_NOFOLLOW) as i32, 0)?;
    let made = check_private(dir).and_then(|()| {
        remove_stale(dir, kind);
        (0..FS_NAMES).find_map(|n| create_named(dir, path, kind, n)).unwrap_or(Err(Errno::EXIST))
    });
    let _ = linux::close(dir);
    made
}

/// `None` if the name is taken.
fn create_named(dir: Fd, path: &CStr, kind: &str, n: usize) -> Option<Result<PublishedText, Errno>> {
    let pid = linux::getpid();
    let name = CString::new(if n == 0 { format!("{pid}.{kind}") } else { format!("{pid}.{kind}.{n}") }).ok()?;
    let flags = linux::O_RDWR | linux::O_CREAT | linux::O_EXCL | linux::O_NOFOLLOW;
    let fd = match linux::openat(dir, &name, flags as i32, 0o600) {
        Ok(fd) => fd,
        Err(Errno::EXIST) => return None,
        Err(errno) => return Some(Err(errno)),
    };
    let path = CString::new([path.to_bytes(), b"/", name.to_bytes()].concat()).ok()?;
    // Its drop removes and closes the file. One that waits for its lock may be taken for a stale one and removed.
    let mut text = PublishedText { fd, path, bytes: Vec::new() };
    match linux::try_lock_exclusive(fd) {
        Ok(true) if names_same_file(dir, &name, fd) => Some(text.write("").map(|()| text)),
        _ => Some(Err(Errno::AGAIN)),
    }
}

/// Removes the files of processes that have ended.
fn remove_stale(dir: Fd, kind: &str) {
    for name in linux::read_dirfd(dir).unwrap_or_default() {
        let is_ours = name.to_str().is_ok_and(|name| pid_of(name, kind).is_some());
        let flags = linux::O_RDONLY | linux::O_NOFOLLOW | linux::O_NONBLOCK;
        let Some(Ok(fd)) = is_ours.then(|| linux::openat(dir, &name, flags as i32, 0)) else { continue };
        if linux::try_lock_exclusive(fd) == Ok(true) && names_same_file(dir, &name, fd) {
            let _ = linux::unlinkat(dir, &name);
        }
        let _ = linux::close(fd);
    }
}

/// The process of a file's name, if it is of this kind.
pub fn pid_of(name: &str, kind: &str) -> Option<u32> {
    let mut parts = name.splitn(3, '.');
    let pid = parts.next()?.parse().ok()?;
    let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    (parts.next() == Some(kind) && parts.next().is_none_or(number)).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_as_it_was_written_and_a_torn_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let dir = format!("{}/private", directory.path().display());
        let dirs = ["/proc/no-such-folder".to_owned(), dir.clone()];
        let (mut one, two) =
            (PublishedText::create(&dirs, "net").unwrap(), PublishedText::create(&dirs, "net").unwrap());
        let path = |text: &PublishedText| text.path.to_str().unwrap().to_owned();
        let name = |text: &PublishedText| path(text).rsplit('/').next().unwrap().to_owned();
        let pid = std::process::id();
        assert_eq!([name(&one), name(&two)], [format!("{pid}.net"), format!("{pid}.net.1")]);
        for text in ["longer than the next one", "short", ""] {
            one.write(text).unwrap();
            assert_eq!(published_text(&std::fs::read(path(&one)).unwrap()), Some(text));
        }
        one.write("abc").unwrap();
        let mut torn = std::fs::read(path(&one)).unwrap();
        torn[HEADER] ^= 1;
        assert!(published_text(&torn).is_none() && published_text(&torn[..20]).is_none());
        let (first, second) = (path(&one), path(&two));
        drop(one);
        assert!(!std::fs::exists(first).unwrap() && std::fs::exists(&second).unwrap());
        // One of a process that was killed; and files that are no texts of this kind stay.
        std::fs::write(format!("{dir}/99.net"), "").unwrap();
        std::fs::write(format!("{dir}/99.nets"), "").unwrap();
        let three = PublishedText::create(&dirs, "net").unwrap();
        assert!(!std::fs::exists(format!("{dir}/99.net")).unwrap());
        assert!(std::fs::exists(format!("{dir}/99.nets")).unwrap() && std::fs::exists(second).unwrap());
        assert_eq!(name(&three), format!("{pid}.net"));
    }

    #[test]
    fn text_that_finds_no_space_is_empty() {
        let directory = tempfile::tempdir().unwrap();
        let mut text = PublishedText::create(&[format!("{}/private", directory.path().display())], "net").unwrap();
        let (path, fd) = (text.path.to_str().unwrap().to_owned(), text.fd);
        // A disk of 100 bytes, of which each write fills 30 at most.
        let pwrite = |bytes: &[u8], at: u64| {
            let len = bytes.len().min(30).min(100 - at as usize);
            // SAFETY: the bytes live across the call.
            if len == 0 { Err(Errno::NOSPC) } else { unsafe { linux::pwrite(fd, bytes.as_ptr(), len, at) } }
        };
        let read = || published_text(&std::fs::read(&path).unwrap()).map(str::to_owned);
        text.write_by(&"a".repeat(70), pwrite).unwrap();
        assert_eq!(read(), Some("a".repeat(70)), "in parts");
        assert_eq!(text.write_by(&"b".repeat(90), pwrite), Err(Errno::NOSPC));
        assert_eq!(read().as_deref(), Some(""));
    }

    #[test]
    fn names_tell_the_process() {
        assert_eq!(
            ["7.net", "7.net.12", "7.nets", "x.net", "7.net.x", "7"].map(|name| pid_of(name, "net")),
            [Some(7), Some(7), None, None, None, None]
        );
    }
}
