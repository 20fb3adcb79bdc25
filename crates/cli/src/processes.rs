//! The processes that use SPIN, found by their files of counters.
//!
//! ```text
//!   directories of tables (table_dirs.rs)
//!        4711  ── locked by its process ──> a living one: its counters are read, never written
//! ```
//!
//! The files are read as bytes, never mapped: one that shrinks or has invalid content gives wrong figures, not a crash.
//!
//! Known flaw: a process in another PID namespace (a container) is listed with its PID there, and not at
//! all if a process of another user has that number here.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::{FlockOperation, OFlags, flock};
use spinio_io::stats::trace::file;
use spinio_io::stats::{Snapshot, SnapshotError};

use crate::exit::{self, Exit};
use crate::table_dirs::{self, TableFile};

/// A file of counters.
pub struct CounterFile {
    /// Its path.
    pub path: PathBuf,
    file: File,
    /// The counters when it was last read.
    pub snapshot: Snapshot,
}

/// What was found.
#[derive(Default)]
pub struct ProcessList {
    /// Living processes, by PID.
    pub processes: Vec<CounterFile>,
    /// Living processes that run another build of SPIN, whose counters cannot be read.
    pub other_versions: usize,
}

/// Why a file was not read.
#[derive(Debug)]
pub enum ReadError {
    /// Another build of SPIN wrote it.
    OtherVersion,
    /// It holds no counters.
    NoCounters,
    /// The system call failed.
    Io(io::Error),
}

impl CounterFile {
    /// Opens and reads a file that the user named; through links, as the library opens it.
    pub fn open(path: &Path) -> Result<CounterFile, ReadError> {
        CounterFile::opened(path, path, OpenOptions::new().read(true))
    }

    /// The same, for writing, to switch tracing on.
    pub fn open_to_trace(path: &Path) -> Result<CounterFile, ReadError> {
        CounterFile::opened(path, path, OpenOptions::new().read(true).write(true))
    }

    /// The same file, for writing. Its name may be another file's by now.
    pub fn reopen_to_trace(&self) -> Result<CounterFile, ReadError> {
        let descriptor = PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        CounterFile::opened(&self.path, &descriptor, OpenOptions::new().read(true).write(true))
    }

    /// The same file, with what was read of it.
    pub fn try_clone(&self) -> io::Result<CounterFile> {
        let (path, snapshot) = (self.path.clone(), self.snapshot.clone());
        self.file.try_clone().map(|file| CounterFile { path, file, snapshot })
    }

    fn opened(name: &Path, path: &Path, options: &mut OpenOptions) -> Result<CounterFile, ReadError> {
        // It must not block on a FIFO.
        let file = options.custom_flags(OFlags::NONBLOCK.bits() as i32).open(path).map_err(ReadError::Io)?;
        if !file.metadata().map_err(ReadError::Io)?.is_file() {
            return Err(ReadError::NoCounters);
        }
        let snapshot = read_counters(&file)?;
        Ok(CounterFile { path: name.to_owned(), file, snapshot })
    }

    /// Reads the counters again.
    pub fn refresh(&mut self) -> Result<(), ReadError> {
        self.snapshot = read_counters(&self.file)?;
        Ok(())
    }

    /// Whether its process is alive: the process keeps the file locked until it ends.
    pub fn is_alive(&self) -> bool {
        is_locked(&self.file)
    }

    /// The open file, to read the ring or to switch tracing on.
    pub fn file(&self) -> &File {
        &self.file
    }
}

fn read_counters(file: &File) -> Result<Snapshot, ReadError> {
    let mut bytes = vec![0; file::COUNTERS_BYTES];
    file.read_exact_at(&mut bytes, 0).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => ReadError::NoCounters,
        _ => ReadError::Io(e),
    })?;
    Snapshot::from_bytes(&bytes).map_err(|e| match e {
        SnapshotError::OtherVersion => ReadError::OtherVersion,
        SnapshotError::NotCounters => ReadError::NoCounters,
    })
}

/// Whether a process keeps it locked.
pub fn is_locked(file: &File) -> bool {
    match flock(file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {
            let _ = flock(file, FlockOperation::Unlock);
            false
        }
        Err(_) => true,
    }
}

/// Every living process that this user may see.
pub fn list() -> ProcessList {
    let mut found = ProcessList::default();
    table_dirs::visit(|_| true, |table| add(&mut found, table));
    found.processes.sort_by_key(|c| c.snapshot.process.pid);
    found
}

fn add(found: &mut ProcessList, table: TableFile) {
    match read_counters(&table.file) {
        Ok(snapshot) if table.may_speak_for(snapshot.process.pid) && is_locked(&table.file) => {
            found.processes.push(CounterFile { path: table.path, file: table.file, snapshot });
        }
        Err(ReadError::OtherVersion) if is_locked(&table.file) => found.other_versions += 1,
        _ => {}
    }
}

/// The living process with this PID.
pub fn find(pid: u32) -> anyhow::Result<CounterFile> {
    let found = list();
    let others = found.other_versions;
    found.processes.into_iter().find(|c| c.snapshot.process.pid == pid).ok_or_else(|| {
        let why = if !Path::new("/proc").join(pid.to_string()).exists() {
            "there is no such process".to_owned()
        } else if others > 0 {
            format!("it made no device request yet, or is one of {others} that run another version of SPIN")
        } else {
            "it made no device request yet, runs without SPIN, keeps its counters elsewhere (SPINIO_STATS), or \
             belongs to another user"
                .to_owned()
        };
        exit::error(Exit::Failed, format!("No counters of process {pid}: {why}"))
    })
}

/// The file that the user named.
pub fn open_path(path: &Path) -> anyhow::Result<CounterFile> {
    CounterFile::open(path).map_err(anyhow::Error::from).with_context(|| format!("Cannot read {}", path.display()))
}

impl std::fmt::Display for ReadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ReadError::OtherVersion => f.write_str("these are counters of another version of SPIN"),
            ReadError::NoCounters => f.write_str("it holds no counters of SPIN"),
            ReadError::Io(e) => e.fmt(f),
        }
    }
}

impl std::error::Error for ReadError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(directory: &Path, name: &str) -> PathBuf {
        let path = directory.join(name);
        std::fs::write(&path, vec![0u8; file::COUNTERS_BYTES]).unwrap();
        path
    }

    #[test]
    fn only_locked_files_are_live_processes() {
        let directory = table_dirs::private_dir();
        let (living, _dead) = (table(directory.path(), "1"), table(directory.path(), "2"));
        std::fs::write(directory.path().join("3"), "short").unwrap();
        std::os::unix::fs::symlink(&living, directory.path().join("4")).unwrap();
        std::fs::create_dir(directory.path().join("5")).unwrap();
        let holder = File::open(&living).unwrap();
        flock(&holder, FlockOperation::LockExclusive).unwrap();
        let places = [directory.path().to_owned(), directory.path().to_owned(), "/no/such".into()];
        let list_in = |places: &[PathBuf]| {
            let mut found = ProcessList::default();
            table_dirs::visit_in(places, |_| true, |table| add(&mut found, table));
            found
        };
        let found = list_in(&places);
        assert_eq!(found.processes.iter().map(|c| &c.path).collect::<Vec<_>>(), [&living]);
        drop(holder);
        assert!(list_in(&places).processes.is_empty());
    }

    #[test]
    fn named_file_is_read_through_a_link_and_reopened_without_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let (path, link) = (table(directory.path(), "1"), directory.path().join("link"));
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let counters = CounterFile::open(&link).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "another").unwrap();
        let traced = counters.reopen_to_trace().unwrap();
        traced.file().write_all_at(b"x", 0).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"another");
        let mut byte = [0];
        counters.file().read_exact_at(&mut byte, 0).unwrap();
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn truncated_file_is_rejected() {
        let directory = tempfile::tempdir().unwrap();
        let path = table(directory.path(), "1");
        let mut counters = CounterFile::open(&path).unwrap();
        std::fs::write(&path, "short").unwrap();
        assert!(matches!(counters.refresh(), Err(ReadError::NoCounters)));
    }
}
