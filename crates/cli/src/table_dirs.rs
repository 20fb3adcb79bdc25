//! The directories in which processes publish tables (counters, nets), and which of these files are believed.
//!
//! ```text
//!   $XDG_RUNTIME_DIR/spinio/   /run/user/UID/spinio/   /dev/shm/spinio-UID/      for root: those of all users
//! ```
//!
//! Any user may make `/dev/shm/spinio-zz` and write there what it likes, which root then reads. A file is believed if its
//! directory is no link, is open to its owner only, and has the same owner, and what it says of a process if that is one
//! of its owner's. Nothing is opened twice by its name, which another file may have by then.

use std::collections::HashSet;
use std::ffi::CStr;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Dir, Mode, OFlags, fstat, openat};
use rustix::process::geteuid;
use spinio_io::stats::default_dirs;

/// A file in one of the directories, open for reading.
pub struct TableFile {
    pub path: PathBuf,
    pub file: File,
    owner: u32,
}

impl TableFile {
    /// Whether its owner may say what this process does.
    pub fn may_speak_for(&self, pid: u32) -> bool {
        may_speak_for(self.owner, pid)
    }
}

/// Calls `visit` for every file whose name is `wanted`, each once, however its directory is spelled.
pub fn visit(wanted: impl Fn(&str) -> bool, visit: impl FnMut(TableFile)) {
    visit_in(&search_dirs(), wanted, visit);
}

/// The same in these directories.
pub fn visit_in(places: &[PathBuf], wanted: impl Fn(&str) -> bool, mut visit: impl FnMut(TableFile)) {
    let mut seen = HashSet::new();
    for place in places {
        let Some((dir, owner)) = open_private(place) else { continue };
        for entry in Dir::read_from(&dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if !name.to_str().is_ok_and(&wanted) {
                continue;
            }
            let Some(file) = open_file(&dir, name) else { continue };
            let Ok(meta) = file.metadata() else { continue };
            if meta.is_file() && meta.uid() == owner && seen.insert((meta.dev(), meta.ino())) {
                let path = place.join(std::ffi::OsStr::from_bytes(name.to_bytes()));
                visit(TableFile { path, file, owner });
            }
        }
    }
}

/// A directory that only its owner can use: this user, or for root any.
fn open_private(place: &Path) -> Option<(OwnedFd, u32)> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = openat(CWD, place, flags, Mode::empty()).ok()?;
    let stat = fstat(&dir).ok()?;
    let user = geteuid();
    let is_private = stat.st_mode & 0o077 == 0 && (user.is_root() || stat.st_uid == user.as_raw());
    is_private.then_some((dir, stat.st_uid))
}

/// It must not block on a FIFO.
fn open_file(dir: impl AsFd, name: &CStr) -> Option<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    openat(dir, name, flags, Mode::empty()).ok().map(File::from)
}

/// Root may for any process, and any user for one that has ended or that is in another PID namespace, where it has a
/// number that no process has here.
fn may_speak_for(owner: u32, pid: u32) -> bool {
    // Not the owner of /proc/PID, which is root for a process that must not be dumped.
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { return true };
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    owner == 0 || users.split_whitespace().any(|user| user.parse() == Ok(owner))
}

/// Where processes publish tables.
fn search_dirs() -> Vec<PathBuf> {
    let user = geteuid();
    let runtime = std::env::var("XDG_RUNTIME_DIR").ok();
    let mut places: Vec<PathBuf> =
        default_dirs(runtime.as_deref(), user.as_raw()).into_iter().map(PathBuf::from).collect();
    places.push(format!("/run/user/{}/spinio", user.as_raw()).into());
    if user.is_root() {
        for (directory, below) in [("/run/user", Some("spinio")), ("/dev/shm", None)] {
            for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
                match below {
                    Some(name) => places.push(entry.path().join(name)),
                    None if entry.file_name().to_string_lossy().starts_with("spinio-") => places.push(entry.path()),
                    None => {}
                }
            }
        }
    }
    places
}

/// A directory as the library makes them.
#[cfg(test)]
pub fn private_dir() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    tempfile::Builder::new().permissions(std::fs::Permissions::from_mode(0o700)).tempdir().unwrap()
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn names(places: &[PathBuf]) -> Vec<PathBuf> {
        let mut found = Vec::new();
        visit_in(places, |_| true, |table| found.push(table.path));
        found.sort();
        found
    }

    #[test]
    fn file_is_listed_once_however_its_directory_is_spelled() {
        let directory = private_dir();
        let spelled = directory.path().join("../").join(directory.path().file_name().unwrap());
        std::fs::write(directory.path().join("1"), "").unwrap();
        assert_eq!(names(&[directory.path().to_owned(), spelled]), [directory.path().join("1")]);
    }

    #[test]
    fn only_files_of_a_private_directorys_owner_are_believed() {
        let directory = tempfile::tempdir().unwrap();
        let dir = directory.path().join("spinio-zz");
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("1"), "").unwrap();
        symlink(dir.join("1"), dir.join("2")).unwrap();
        symlink(&dir, directory.path().join("link")).unwrap();
        let here = || names(std::slice::from_ref(&dir));
        std::fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        assert!(here().is_empty(), "others can use the directory");
        std::fs::set_permissions(&dir, Permissions::from_mode(0o700)).unwrap();
        assert_eq!(here(), [dir.join("1")], "neither a link nor `.` is a table");
        assert!(names(&[directory.path().join("link")]).is_empty(), "the directory is a link");
        if !geteuid().is_root() {
            eprintln!("skipped: not root, who can give files away");
            return;
        }
        chown(dir.join("1"), Some(65534), None).unwrap();
        assert!(here().is_empty(), "the file has another owner");
        chown(&dir, Some(65534), None).unwrap();
        assert_eq!(here(), [dir.join("1")], "root reads those of any user");
    }

    #[test]
    fn user_may_speak_for_its_own_processes_only() {
        let (own, other) = (geteuid().as_raw(), 4_000_000);
        assert!(may_speak_for(own, std::process::id()) && may_speak_for(0, std::process::id()));
        assert!(!may_speak_for(other, std::process::id()) && !may_speak_for(other, 1));
        assert!(may_speak_for(other, u32::MAX), "there is no such process");
    }
}
