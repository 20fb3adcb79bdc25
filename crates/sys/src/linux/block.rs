//! What files and file systems report about the storage under them, to every user.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::ffi::{CStr, CString};

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::files::{Fd, close, open, read, readlink};
use super::raw::syscall;
use super::types::FileKey;

pub use k::O_NOFOLLOW;

type Result<T> = core::result::Result<T, Errno>;

/// The first `most` bytes of a small file, such as those of sysfs and procfs.
pub fn read_file(path: &CStr, max_len: usize) -> Result<Vec<u8>> {
    let fd = open(path, (k::O_RDONLY | k::O_NONBLOCK) as i32, 0)?;
    let mut out = Vec::new();
    let mut buf = [0u8; 4096];
    let ended = loop {
        let want = buf.len().min(max_len - out.len());
        if want == 0 {
            break Ok(());
        }
        // SAFETY: `buf` has `want` bytes.
        match unsafe { read(fd, buf.as_mut_ptr(), want) } {
            Ok(0) => break Ok(()),
            Ok(got) => out.extend_from_slice(&buf[..got.min(want)]),
            Err(Errno::INTR) => {}
            Err(e) => break Err(e),
        }
    };
    let _ = close(fd);
    ended.map(|()| out)
}

/// The UUID of the btrfs that contains a descriptor's file.
pub fn btrfs_uuid(fd: Fd) -> Result<[u8; 16]> {
    /// `BTRFS_IOC_FS_INFO`: reading, 1024 bytes, type 0x94, number 31.
    const FS_INFO: u32 = 2 << 30 | 1024 << 16 | 0x94 << 8 | 31;
    // `struct btrfs_ioctl_fs_info_args`: max_id, num_devices, then the identity.
    let mut info = [0u64; 128];
    // SAFETY: `info` has the 1024 bytes that the request specifies, and lives across the call.
    unsafe { syscall(k::__NR_ioctl, [fd as usize, FS_INFO as usize, info.as_mut_ptr() as usize, 0, 0, 0]) }?;
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&info[2].to_ne_bytes());
    uuid[8..].copy_from_slice(&info[3].to_ne_bytes());
    Ok(uuid)
}

/// The position of bytes of a file on the device under its file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// First byte in the file.
    pub logical: u64,
    /// First byte on the device.
    pub physical: u64,
    /// Bytes.
    pub len: u64,
    /// `FIEMAP_EXTENT_*`: unwritten, inline, encoded, not allocated yet.
    pub flags: u32,
}

/// `FIEMAP_EXTENT_*` of an extent whose bytes are not stored unchanged at its `physical`.
pub const EXTENT_NOT_IN_PLACE: u32 = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400;

/// The first extents of a range (FIEMAP), at most `most` of them; holes are omitted. Does no I/O, and
/// does not make the file system write back first.
pub fn fiemap_extents(fd: Fd, offset: u64, len: u64, max_extents: usize) -> Result<Vec<FileExtent>> {
    /// `FS_IOC_FIEMAP`: reading and writing, 32 bytes, type 'f', number 11.
    const FIEMAP: u32 = 3 << 30 | 32 << 16 | 0x66 << 8 | 11;
    const HEADER_WORDS: usize = 4;
    const EXTENT_WORDS: usize = 7;
    // `struct fiemap`: start, length, flags and count mapped, capacity and a reserved word; then the extents.
    let mut words = vec![0u64; HEADER_WORDS + EXTENT_WORDS * max_extents];
    words[0] = offset;
    words[1] = len;
    words[3] = max_extents as u64;
    // SAFETY: the header contains the number of extents that fit after it, and `words` lives across the call.
    unsafe { syscall(k::__NR_ioctl, [fd as usize, FIEMAP as usize, words.as_mut_ptr() as usize, 0, 0, 0]) }?;
    let mapped = ((words[2] >> 32) as usize).min(max_extents);
    let extent = |w: &[u64]| FileExtent { logical: w[0], physical: w[1], len: w[2], flags: w[5] as u32 };
    Ok(words[HEADER_WORDS..].chunks_exact(EXTENT_WORDS).take(mapped).map(extent).collect())
}

/// `fallocate` of a range: allocates its storage, and extends the file to its end if `grow`.
pub fn preallocate(fd: Fd, offset: u64, len: u64, grow: bool) -> Result<()> {
    const KEEP_SIZE: usize = 1;
    let mode = if grow { 0 } else { KEEP_SIZE };
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_fallocate, [fd as usize, mode, offset as usize, len as usize, 0, 0]) }.map(drop)
}

/// `fcntl(F_SETFL)`: the status flags of an open file, such as O_DIRECT.
pub fn set_status_flags(fd: Fd, flags: i32) -> Result<()> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_fcntl, [fd as usize, k::F_SETFL as usize, flags as usize, 0, 0, 0]) }.map(drop)
}

/// Reads from an offset until `into` is full or the file ends; the bytes read.
pub fn read_fully_at(fd: Fd, buf: &mut [u8], offset: u64) -> Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        let rest = &mut buf[done..];
        // SAFETY: `rest` is writable for its length.
        match unsafe { super::files::pread(fd, rest.as_mut_ptr(), rest.len(), offset + done as u64) } {
            Ok(0) => break,
            Ok(got) => done += got,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// `fdatasync`.
pub fn fdatasync(fd: Fd) -> Result<()> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_fdatasync, [fd as usize, 0, 0, 0, 0, 0]) }.map(drop)
}

/// The file that a path names now, which opening it would give.
pub fn key_of_path(path: &CStr) -> Result<FileKey> {
    // SAFETY: all-zero is a valid `struct stat`.
    let mut raw: k::stat = unsafe { core::mem::zeroed() };
    // SAFETY: the path is NUL-terminated, `raw` is a `struct stat` of this architecture; both live across the call.
    unsafe { syscall(k::__NR_stat, [path.as_ptr() as usize, &raw mut raw as usize, 0, 0, 0, 0]) }?;
    Ok(FileKey { dev: raw.st_dev, ino: raw.st_ino })
}

/// The name of the storage under a device number. The calling thread opens files of sysfs.
pub fn storage_name(dev: u64) -> String {
    let (major, minor) = (super::files::major(dev), super::files::minor(dev));
    let base = format!("/sys/dev/block/{major}:{minor}");
    let text = |leaf: &str| {
        let path = CString::new(format!("{base}/{leaf}")).ok()?;
        let read = String::from_utf8(read_file(&path, 4096).ok()?).ok()?;
        let read = read.split_whitespace().collect::<Vec<_>>().join(" ");
        (!read.is_empty()).then_some(read)
    };
    let up = if text("partition").is_some() { "../" } else { "" };
    for leaf in ["dm/uuid", "md/uuid", "wwid", "device/wwid", "device/serial", "serial"] {
        if let Some(name) = text(&format!("{up}{leaf}")) {
            return name;
        }
    }
    let mut target = [0u8; 512];
    let link = CString::new(base).ok().and_then(|path| readlink(&path, &mut target).ok());
    let link = String::from_utf8_lossy(&target[..link.unwrap_or(0)]).into_owned();
    let mut parts = link.rsplit('/').filter(|p| !p.is_empty());
    let own = parts.next();
    let name = if up.is_empty() { own } else { parts.next().or(own) };
    name.map_or_else(|| "no block device".to_owned(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn read_file_stops_at_limit() {
        let all = read_file(c"/proc/self/maps", 1 << 20).unwrap();
        assert!(all.len() > 100);
        assert_eq!(read_file(c"/proc/self/maps", 100).unwrap().len(), 100);
        assert_eq!(read_file(c"/proc/self/no-such-file", 100), Err(Errno::NOENT));
    }

    #[test]
    fn fiemap_covers_written_file() {
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        match fiemap_extents(file.as_raw_fd(), 0, u64::MAX, 64) {
            Ok(found) => {
                assert!(!found.is_empty(), "a program has bytes");
                assert_eq!(found[0].logical, 0);
                assert!(found.windows(2).all(|w| w[0].logical + w[0].len <= w[1].logical), "{found:?}");
            }
            Err(e) => eprintln!("skipped: no FIEMAP here: {e}"),
        }
        // A btrfs or not: never a wrong result.
        if let Ok(uuid) = btrfs_uuid(file.as_raw_fd()) {
            assert_ne!(uuid, [0; 16]);
        }
    }
}
