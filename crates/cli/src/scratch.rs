//! A directory for files that must be on a disk.

use std::path::{Path, PathBuf};

/// A directory on a real disk for the demo's files: O_DIRECT and eviction mean nothing on a file system in memory.
/// The first of the usual places that has one; else the first of them, with the problem.
pub fn disk_dir() -> (PathBuf, Option<String>) {
    let mut places = vec![std::env::temp_dir(), PathBuf::from("/var/tmp")];
    places.extend(std::env::current_dir());
    if let Some(real) = places.iter().find(|p| p.is_dir() && !is_in_memory(p)) {
        return (real.clone(), None);
    }
    let first = places.swap_remove(0);
    let warning = format!(
        "{} and the other directories tried are file systems in memory: they are always cached. Name a file on a disk \
         with --path",
        first.display()
    );
    (first, Some(warning))
}

/// Whether the file system has no storage under it.
pub fn is_in_memory(path: &Path) -> bool {
    const TMPFS: u64 = 0x0102_1994;
    const RAMFS: u64 = 0x8584_58f6;
    rustix::fs::statfs(path).is_ok_and(|s| matches!(s.f_type as u64, TMPFS | RAMFS))
}
