//! Finds leaks: descriptors of every table of the process, mappings of a file.

#![expect(unsafe_code, reason = "C calls of tests")]

use std::fs;
use std::path::Path;

/// What `/proc` reports about a descriptor: its target, and whether it is writable.
struct OpenFd {
    target: String,
    writable: bool,
}

/// The descriptor tables of this process, each once.
fn fd_tables() -> Vec<Vec<OpenFd>> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let mut checked: Vec<i32> = Vec::new();
    let mut tables = Vec::new();
    for task in tasks {
        let Some(tid) = task.file_name().to_str().and_then(|n| n.parse().ok()) else { continue };
        if checked.iter().any(|&other| same_table(tid, other)) {
            continue;
        }
        if let Some(table) = fd_table(&task.path()) {
            checked.push(tid);
            tables.push(table);
        }
    }
    tables
}

/// Whether two threads share a table, according to `kcmp`.
fn same_table(tid: i32, other_tid: i32) -> bool {
    const KCMP_FILES: i32 = 2;
    // SAFETY: no memory is involved.
    unsafe { libc::syscall(libc::SYS_kcmp, tid, other_tid, KCMP_FILES, 0, 0) == 0 }
}

/// The table of a thread; `thread` is its directory in `/proc`.
fn fd_table(thread: &Path) -> Option<Vec<OpenFd>> {
    let entries = fs::read_dir(thread.join("fd")).ok()?.flatten();
    let open = entries.filter_map(|e| {
        let target = fs::read_link(e.path()).ok()?.to_string_lossy().into_owned();
        let info = fs::read_to_string(thread.join("fdinfo").join(e.file_name())).unwrap_or_default();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok()).unwrap_or(0);
        Some(OpenFd { target, writable: flags & libc::O_ACCMODE != libc::O_RDONLY })
    });
    // The listing itself is open while it is made.
    Some(open.filter(|open| !open.target.starts_with("/proc/")).collect())
}

/// How many descriptors the process has, in all its tables.
pub fn descriptors() -> usize {
    fd_tables().iter().map(Vec::len).sum()
}

/// Whether a descriptor refers to the file.
fn refers_to(open: &OpenFd, path: &Path) -> bool {
    let name = path.to_string_lossy();
    open.target == name || open.target.strip_suffix(" (deleted)") == Some(&*name)
}

/// How many descriptors refer to the file, in all tables.
pub fn descriptors_of(path: &Path) -> usize {
    fd_tables().iter().flatten().filter(|open| refers_to(open, path)).count()
}

/// How many of them are writable.
pub fn writers_of(path: &Path) -> usize {
    fd_tables().iter().flatten().filter(|open| open.writable && refers_to(open, path)).count()
}

/// How many mappings the process has of a file.
pub fn mappings_of(path: &Path) -> usize {
    let name = path.to_string_lossy();
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().filter(|line| line.trim_end_matches(" (deleted)").ends_with(&*name)).count()
}

/// The descriptors of the calling thread's own table.
pub fn thread_descriptors() -> usize {
    fd_table(Path::new("/proc/thread-self")).map_or(0, |t| t.len())
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use spinio_sys::linux::FdTableRoot;

    use super::*;

    #[test]
    fn descriptors_of_all_tables_are_counted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let here = File::create(&path).unwrap();
        assert_eq!(descriptors_of(&path), 1);
        let (opened, ready) = std::sync::mpsc::channel();
        let (close, closing) = std::sync::mpsc::channel::<()>();
        let there = path.clone();
        let table_root = FdTableRoot::new().unwrap();
        assert!(table_root.spawn("other", move || {
            let _file = File::open(there).unwrap();
            opened.send(()).unwrap();
            let _ = closing.recv();
        }));
        ready.recv().unwrap();
        assert_eq!((descriptors_of(&path), writers_of(&path)), (2, 1));
        drop(here);
        assert_eq!((descriptors_of(&path), writers_of(&path)), (1, 0));
        drop(close);
    }
}
