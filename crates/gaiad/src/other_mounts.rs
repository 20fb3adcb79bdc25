//! Where else the file system of a mount is mounted: its daemon serves until it is mounted nowhere.
//!
//! ```text
//!   spinio gaia umount data  ──>  data        gone
//!                                 elsewhere   a bind mount of it stays
//!                                 data        of a mount namespace that was made meanwhile (`unshare --mount`, a
//!                                             container, a service of systemd) stays as long as that namespace
//! ```
//!
//! A new mount namespace begins with a copy of each mount. Unmounting reaches the copies only where mounts propagate,
//! which they do below a `shared` root directory to namespaces that have not refused it.
//!
//! Known flaw: a namespace without a process, and one whose processes have another root directory, are not found.

use std::collections::HashSet;
use std::fmt;
use std::path::PathBuf;

use spinio_fuse::mount::{self, MountEntry};

/// A further mount of the same connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OtherMount {
    /// Where, for the process.
    point: PathBuf,
    /// One of its namespace, and its name; `None`: this process's namespace.
    process: Option<(u32, String)>,
}

impl fmt::Display for OtherMount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let point = self.point.display();
        match &self.process {
            None => write!(f, "it is also mounted at {point}"),
            Some((pid, name)) => write!(f, "process {pid} ({name}) has it in another mount namespace, at {point}"),
        }
    }
}

/// All mounts of a connection but one, those that this process sees first. `kind`: their type; a disk may have the number.
pub(crate) fn other_mounts(kind: &str, connection: u32, without: u64) -> Vec<OtherMount> {
    let mut seen = HashSet::from([without]);
    let mut new = |table: std::io::Result<Vec<MountEntry>>| {
        // A process that has ended meanwhile has none.
        let mut found = table.unwrap_or_default();
        found.retain(|entry| entry.minor == connection && entry.kind == kind && seen.insert(entry.id));
        found
    };
    let own = new(mount::mounts()).into_iter();
    let mut others: Vec<_> = own.map(|entry| OtherMount { point: entry.point, process: None }).collect();
    for pid in processes() {
        others.extend(new(mount::mounts_of(pid)).into_iter().map(|entry| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            OtherMount { point: entry.point, process: Some((pid, name.trim_end().to_owned())) }
        }));
    }
    others
}

/// In order of their numbers: mostly the one that has made a namespace comes before its children.
fn processes() -> Vec<u32> {
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut all: Vec<u32> = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    all.sort_unstable();
    all
}
