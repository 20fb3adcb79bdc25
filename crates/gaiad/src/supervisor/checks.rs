//! What must be true before a mount, and a clear sentence for each thing that is not.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, OpenTreeFlags};
use spinio_fuse::MountFailure;
use spinio_fuse::mount::{self, MountEntry};
use spinio_sys::linux::{handle_of, make_mount_read_only, open_by_handle};

use super::MountError;
use crate::report::report;

/// Source of the mount; its type is `fuse.` and this.
pub const NAME: &str = "spinio-gaia";

const FUSE_SUPER_MAGIC: u64 = 0x6573_5546;

/// A directory that can be mounted over.
pub(super) struct Checked {
    pub(super) point: PathBuf,
    /// What was checked, in the mount that the caller sees.
    pub(super) target: File,
    /// The same in a mount of its own.
    pub(super) directory: OwnedFd,
    /// The same, through a mount that is for reading only.
    pub(super) for_clients: Option<OwnedFd>,
    pub(super) flags: MountFlags,
}

/// The type of a mount in /proc/self/mountinfo.
pub(super) fn kind() -> String {
    format!("fuse.{NAME}")
}

pub(super) fn check(directory: &Path) -> Result<Checked, MountError> {
    let error = |words: String| MountError::new(format!("{}: {words}", directory.display()));
    let point = mount_point(directory).map_err(|e| error(e.to_string()))?;
    if let Some(old) = connection_of(&point).map_err(|e| error(e.to_string()))? {
        // Left by a supervisor that was killed: every request fails with ENOTCONN. The kernel answers `stat` from its
        // cache, but not this.
        if rustix::fs::statfs(&point).err() != Some(Errno::NOTCONN) {
            return Err(error("GAIA is already mounted here".into()));
        }
        mount::detach(&point).map_err(|e| error(format!("cannot remove the dead mount {old}: {e}")))?;
    }
    if point == Path::new("/") {
        return Err(error("the root directory cannot be mounted over".into()));
    }
    let opened = File::open(&point).map_err(|e| error(e.to_string()))?;
    let metadata = opened.metadata().map_err(|e| error(e.to_string()))?;
    if !metadata.is_dir() {
        return Err(error("not a directory".into()));
    }
    let privileged = mount::is_privileged();
    if !privileged {
        // Programs of other users could not use it any more.
        if metadata.uid() != rustix::process::geteuid().as_raw() {
            return Err(error("belongs to another user: only root may mount over it".into()));
        }
        rustix::fs::accessat(rustix::fs::CWD, &point, Access::WRITE_OK, AtFlags::EACCESS).map_err(|e| match e {
            Errno::ACCESS | Errno::PERM | Errno::ROFS => {
                error("is not writable for its owner, which fusermount3 requires".into())
            }
            e => error(e.to_string()),
        })?;
    }
    let on = rustix::fs::fstatfs(&opened).map_err(|e| error(e.to_string()))?;
    if on.f_type as u64 & 0xffff_ffff == FUSE_SUPER_MAGIC {
        return Err(error("is on a FUSE file system, whose files cannot be found again after a crash".into()));
    }
    let handle = handle_of(opened.as_fd()).map_err(|e| match e {
        Errno::OPNOTSUPP => error("its file system has no file handles (name_to_handle_at), which GAIA needs".into()),
        e => error(format!("name_to_handle_at: {e}")),
    })?;
    if privileged {
        open_by_handle(opened.as_fd(), &handle, OFlags::PATH.bits()).map_err(|e| match e {
            Errno::PERM => error("mounting for all users takes CAP_DAC_READ_SEARCH besides CAP_SYS_ADMIN".into()),
            e => error(format!("open_by_handle_at: {e}")),
        })?;
    }
    let flags = mount::flags_of(&opened).map_err(|e| error(e.to_string()))?;
    let for_clients = privileged.then(|| private_view(&opened, true)).transpose().unwrap_or_else(|e| {
        report!("programs with maps get descriptors that they can open for writing: {e}");
        None
    });
    let directory = private_view(&opened, false).or_else(|_| opened.try_clone().map(OwnedFd::from));
    let directory = directory.map_err(|e| error(e.to_string()))?;
    Ok(Checked { point, target: opened, directory, for_clients, flags })
}

/// Mounts over what was checked, and nothing else: another user may have moved it, and put a link in its place.
pub(super) fn mount_over(point: &Path, target: &File, flags: MountFlags) -> Result<(OwnedFd, MountEntry), MountError> {
    let device = mount::make(point, target, NAME, flags).map_err(|e| no_mount(point, &e))?;
    let privileged = mount::is_privileged();
    let is_here = !privileged || mount::is_at(target, point);
    let entry = mount::mount_at(point).ok().flatten().filter(|entry| is_here && is_gaia(entry));
    if let Some(entry) = entry {
        return Ok((device, entry));
    }
    if privileged {
        let _ = mount::detach_over(target);
    } else {
        let _ = mount::detach(point);
    }
    let why = if is_here { "the mount is not in /proc/self/mountinfo" } else { "the directory was moved meanwhile" };
    Err(MountError::new(format!("{}: {why}", point.display())))
}

/// The directory in a mount of its own, which no other mount covers, now or later.
fn private_view(directory: &File, read_only: bool) -> Result<OwnedFd, Errno> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let tree = rustix::mount::open_tree(directory, c"", flags)?;
    if read_only {
        make_mount_read_only(tree.as_fd())?;
    }
    rustix::fs::openat(&tree, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// The connection number of the GAIA mount at exactly this path.
///
/// # Errors
/// If /proc cannot be read.
pub fn connection_of(point: &Path) -> std::io::Result<Option<u32>> {
    Ok(mount_of(point)?.map(|m| m.minor))
}

/// The GAIA mount at exactly this path.
pub(crate) fn mount_of(point: &Path) -> std::io::Result<Option<MountEntry>> {
    Ok(mount::mount_at(point)?.filter(is_gaia))
}

/// Whether this process may trust what the mount's daemon says, and the files beside its socket: root's, or its own user's.
/// Root asks no daemon of another user.
pub(crate) fn is_trusted(mount: &MountEntry) -> bool {
    mount.user.is_none_or(|user| user == 0 || user == rustix::process::geteuid().as_raw())
}

/// Whether a mount is one of GAIA.
pub(crate) fn is_gaia(mount: &MountEntry) -> bool {
    mount.kind == kind()
}

/// The absolute path of a directory, without touching the directory itself: it may be a mount that does not answer.
pub(crate) fn mount_point(directory: &Path) -> std::io::Result<PathBuf> {
    let absolute = std::path::absolute(directory)?;
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => {
            let path = parent.canonicalize()?.join(name);
            let is_mount = mount::mount_at(&path)?.is_some();
            // A symbolic link is followed; a mount point is none.
            if is_mount { Ok(path) } else { path.canonicalize() }
        }
        _ => absolute.canonicalize(),
    }
}

/// Why there is no mount, with the first cause: `fusermount3` names none of these.
fn no_mount(point: &Path, failure: &MountFailure) -> MountError {
    let point = point.display();
    MountError::new(match (failure, mount::open_device().err()) {
        (MountFailure::NoHelper | MountFailure::HelperNotSetuid(..), _) => format!("{point}: {failure}"),
        (_, Some(Errno::NOENT | Errno::NODEV | Errno::NXIO)) => {
            "this system has no FUSE (/dev/fuse): modprobe fuse".to_owned()
        }
        (_, Some(Errno::ACCESS | Errno::PERM)) => {
            "/dev/fuse is not accessible for this user: `ls -l /dev/fuse` shows for whom it is".to_owned()
        }
        (_, Some(error)) => format!("/dev/fuse: {error}"),
        (failure, None) => format!("{point}: cannot mount: {failure}"),
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn files_of_clients_can_be_neither_written_nor_executed() {
        if !mount::is_privileged() {
            return eprintln!("skipped: not root");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        std::fs::copy("/bin/true", &path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let view = private_view(&File::open(dir.path()).unwrap(), true).unwrap();
        let file = rustix::fs::openat(&view, c"program", OFlags::RDONLY, Mode::empty()).unwrap();
        let own = format!("/proc/self/fd/{}", file.as_raw_fd());
        let refused = |result: std::io::Result<()>| Errno::from_io_error(&result.unwrap_err());
        assert_eq!(refused(File::options().write(true).open(&own).map(drop)), Some(Errno::ROFS));
        assert_eq!(refused(std::process::Command::new(&own).status().map(drop)), Some(Errno::ACCESS));
    }

    #[test]
    fn mount_lands_on_the_directory_that_was_checked_or_nowhere() {
        if !mount::is_privileged() || mount::open_device().is_err() {
            return eprintln!("skipped: not root, or no FUSE");
        }
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let [dir, moved, other] = ["dir", "moved", "other"].map(|name| root.join(name));
        std::fs::create_dir(&dir).unwrap();
        std::fs::create_dir(&other).unwrap();
        let Checked { point, target, flags, .. } = check(&dir).unwrap();
        std::fs::rename(&dir, &moved).unwrap();
        std::os::unix::fs::symlink(&other, &dir).unwrap();
        let refused = mount_over(&point, &target, flags).unwrap_err().to_string();
        let mounted = || mount::mounts().unwrap().into_iter().filter(|mount| mount.point.starts_with(&root)).count();
        let left = mounted();
        // Else it stays, since its connection has no server.
        for path in [&moved, &other] {
            let _ = mount::detach(path);
        }
        assert_eq!(left, 0);
        assert!(refused.ends_with("the directory was moved meanwhile"), "{refused}");
        // Where nothing was moved.
        std::fs::remove_file(&dir).unwrap();
        std::fs::rename(&moved, &dir).unwrap();
        let (device, entry) = mount_over(&point, &target, flags).unwrap();
        assert_eq!((entry.point, mounted()), (dir.clone(), 1));
        // No link on the way is followed.
        let link = root.join("link");
        std::os::unix::fs::symlink(&root, &link).unwrap();
        assert!(mount::detach(&link.join("dir")).is_err());
        assert_eq!(mounted(), 1);
        mount::detach(&dir).unwrap();
        assert_eq!(mounted(), 0);
        drop(device);
    }
}
