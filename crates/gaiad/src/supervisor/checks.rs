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
    let directory = private_view(&opened, false).unwrap_or_else(|_| opened.into());
    Ok(Checked { point, directory, for_clients, flags })
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
pub(super) fn no_mount(point: &Path, failure: &MountFailure) -> MountError {
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
