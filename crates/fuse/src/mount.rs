//! Mounts: making, finding, ending them; without the capability to mount, through `fusermount3` (helper.rs).
//!
//! The table of mounts (/proc/self/mountinfo) is used for all queries: a `stat` of a mount point whose server does not
//! answer would hang.
//!
//! A path may lead elsewhere from one moment to the next where users own directories on it. So what is allowed to mount names
//! the directory by its descriptor, and unmounts below a directory that was opened without following a link.

use std::ffi::{CString, OsString};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::thread::{CapabilitySet, capabilities};

use crate::failure::MountFailure;
use crate::helper;

/// Between two tries to unmount; each is twice the one before.
const BUSY_FIRST: Duration = Duration::from_millis(5);
const BUSY_LAST: Duration = Duration::from_millis(320);

/// A line of the table of mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Number of the mount, unique while it exists.
    pub id: u64,
    /// Minor device number: for FUSE, the number of the connection.
    pub minor: u32,
    /// Where.
    pub point: PathBuf,
    /// Type, as `fuse.spinio-gaia`.
    pub kind: String,
    /// For FUSE, the user who made it.
    pub user: Option<u32>,
}

/// Mounts of this mount namespace, oldest first.
///
/// # Errors
/// If /proc cannot be read.
pub fn mounts() -> std::io::Result<Vec<MountEntry>> {
    Ok(std::fs::read("/proc/self/mountinfo")?.split(|b| *b == b'\n').filter_map(parse).collect())
}

/// Mounts of the namespace of a process, as far as its root directory shows them; oldest first.
///
/// # Errors
/// If it has ended, or /proc cannot be read.
pub fn mounts_of(process: u32) -> std::io::Result<Vec<MountEntry>> {
    Ok(std::fs::read(format!("/proc/{process}/mountinfo"))?.split(|b| *b == b'\n').filter_map(parse).collect())
}

/// The topmost mount at exactly this path, which must be absolute and without symbolic links.
///
/// # Errors
/// If /proc cannot be read.
pub fn mount_at(point: &Path) -> std::io::Result<Option<MountEntry>> {
    Ok(mounts()?.into_iter().rfind(|m| m.point == point))
}

fn parse(line: &[u8]) -> Option<MountEntry> {
    // 36 35 98:0 /root /mount/point options tags ... - type source superoptions
    let mut fields = line.split(|b| *b == b' ');
    let text = |bytes| std::str::from_utf8(bytes).ok();
    let id = text(fields.next()?)?.parse().ok()?;
    let (_, minor) = text(fields.nth(1)?)?.split_once(':')?;
    let point = unescape(fields.nth(1)?);
    let mut after = fields.skip_while(|f| *f != b"-");
    let kind = text(after.nth(1)?)?.to_owned();
    let options = after.nth(1).and_then(text).unwrap_or_default();
    let user = options.split(',').find_map(|option| option.strip_prefix("user_id=")).and_then(|id| id.parse().ok());
    Some(MountEntry { id, minor: minor.parse().ok()?, point, kind, user })
}

/// Blank, tab, newline and backslash are written as three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        let code = tail.get(..3).filter(|_| *first == b'\\').and_then(|d| std::str::from_utf8(d).ok());
        match code.and_then(|d| u8::from_str_radix(d, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                rest = &tail[3..];
            }
            None => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(out))
}

/// Opens /dev/fuse.
///
/// # Errors
/// ENOENT or ENODEV: no FUSE here; EACCES: not for this user.
pub fn open_device() -> Result<OwnedFd, Errno> {
    rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// Whether this process may call `mount(2)` itself.
pub fn is_privileged() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// A new connection, mounted over `directory`, which is at `point`, with the Linux kernel checking permissions
/// (`default_permissions`). Made by a process that [`is_privileged`] it is for all users (`allow_other`), else for programs
/// of this user only: then the helper takes the path, and checks what is there.
///
/// # Errors
/// [`MountFailure`]; nothing is mounted then.
pub fn make(point: &Path, directory: &File, name: &str, flags: MountFlags) -> Result<OwnedFd, MountFailure> {
    if !is_privileged() {
        return helper::mount(point, name, flags);
    }
    let device = open_device()?;
    mount_privileged(&device, directory, name, flags)?;
    Ok(device)
}

/// A path of a descriptor.
fn path_of(fd: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Whether a directory is at this path, which must be absolute and without symbolic links; also if a mount covers it.
pub fn is_at(directory: &File, point: &Path) -> bool {
    std::fs::read_link(path_of(directory)).is_ok_and(|path| path == point)
}

fn mount_privileged(device: &OwnedFd, directory: &File, name: &str, flags: MountFlags) -> Result<(), Errno> {
    let data = format!(
        "fd={},rootmode=40000,user_id={},group_id={},allow_other,default_permissions",
        device.as_raw_fd(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw()
    );
    let data = CString::new(data).map_err(|_| Errno::INVAL)?;
    rustix::mount::mount(name, path_of(directory), format!("fuse.{name}").as_str(), flags, data.as_c_str())
}

/// Unmounts if no process uses it.
///
/// It is tried again for about 0.6 s. The Linux kernel may use a mount after the last program that used it has ended, as a
/// worker of the kernel puts the files of an io_uring: on a machine with 16 processors for up to 45 ms, after 25 of 36 ends
/// of two programs, and no process had a file of it open.
///
/// # Errors
/// [`MountFailure::is_busy`]: in use.
pub fn unmount(point: &Path) -> Result<(), MountFailure> {
    let mut wait = BUSY_FIRST;
    loop {
        match end(point, UnmountFlags::empty()) {
            Err(failure) if failure.is_busy() && wait <= BUSY_LAST => std::thread::sleep(wait),
            result => return result,
        }
        wait *= 2;
    }
}

/// Removes it from the tree of directories now, and unmounts when no process uses it any more.
///
/// # Errors
/// [`MountFailure`].
pub fn detach(point: &Path) -> Result<(), MountFailure> {
    end(point, UnmountFlags::DETACH)
}

/// Fails every request of the mount, now and later, and removes it from the tree of directories; dirty pages are lost. A
/// process that may not unmount itself removes it only: requests fail when the last descriptor of the connection is
/// closed.
///
/// # Errors
/// [`MountFailure`].
pub fn abort(point: &Path) -> Result<(), MountFailure> {
    // Not through /sys/fs/fuse/connections: fusectl need not be mounted.
    end(point, UnmountFlags::FORCE | UnmountFlags::DETACH)
}

/// Detaches the topmost mount over a directory, wherever that is now. For a process that [`is_privileged`].
///
/// # Errors
/// The kernel's.
pub fn detach_over(directory: &File) -> Result<(), Errno> {
    // The link of the descriptor is followed, and from there mounts are.
    rustix::mount::unmount(path_of(directory), UnmountFlags::DETACH)
}

fn end(point: &Path, flags: UnmountFlags) -> Result<(), MountFailure> {
    let flags = flags | UnmountFlags::NOFOLLOW;
    if !is_privileged() {
        return match rustix::mount::unmount(point, flags) {
            Err(Errno::PERM) => helper::unmount(point, flags.contains(UnmountFlags::DETACH)),
            result => Ok(result?),
        };
    }
    let (Some(above), Some(name)) = (point.parent(), point.file_name()) else { return Err(Errno::INVAL.into()) };
    let open = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let above = rustix::fs::openat2(rustix::fs::CWD, above, open, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    Ok(rustix::mount::unmount(path_of(&above).join(name), flags)?)
}

/// Flags of the mount that `directory` is on, to be kept: what the administrator forbade there stays forbidden.
///
/// # Errors
/// The kernel's.
pub fn flags_of(directory: &File) -> Result<MountFlags, Errno> {
    use rustix::fs::StatVfsMountFlags as Has;
    let has = rustix::fs::fstatvfs(directory)?.f_flag;
    let pairs = [
        (Has::NOSUID, MountFlags::NOSUID),
        (Has::NODEV, MountFlags::NODEV),
        (Has::NOEXEC, MountFlags::NOEXEC),
        (Has::RDONLY, MountFlags::RDONLY),
    ];
    let kept = pairs.into_iter().filter(|(flag, _)| has.contains(*flag)).map(|(_, flag)| flag);
    Ok(kept.fold(MountFlags::empty(), |all, flag| all | flag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_of_the_mount_table_is_parsed() {
        let line =
            br"36 35 0:51 / /tmp/a\040b rw,noatime master:1 - fuse.spinio-gaia spinio-gaia rw,user_id=0,group_id=0";
        let entry = parse(line).unwrap();
        assert_eq!((entry.id, entry.minor, entry.kind.as_str()), (36, 51, "fuse.spinio-gaia"));
        assert_eq!((entry.point.as_path(), entry.user), (Path::new("/tmp/a b"), Some(0)));
        assert_eq!(parse(b""), None);
        assert_eq!(parse(b"36 35 x / / rw - t s"), None);
        assert_eq!(unescape(br"\0"), Path::new(r"\0"));
    }
}
