//! The processes that use SPIN, found by their files of counters.
//!
//! ```text
//!   $XDG_RUNTIME_DIR/spinio/   /run/user/UID/spinio/   /dev/shm/spinio-UID/      for root: those of all users
//!        4711  ── locked by its process ──> a living one: its counters are read, never written
//! ```
//!
//! The files are read as bytes, never mapped: one that shrinks or has invalid content gives wrong figures, not a crash.
//!
//! Known flaw: a process in another PID namespace (a container) is listed with its PID there.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::process::geteuid;
use spinio_io::stats::trace::file;
use spinio_io::stats::{Snapshot, SnapshotError, default_dirs};

use crate::exit::{self, Exit};

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
    /// Opens and reads a file.
    pub fn open(path: &Path) -> Result<CounterFile, ReadError> {
        CounterFile::opened(path, OpenOptions::new().read(true))
    }

    /// The same, for writing, to switch tracing on.
    pub fn open_to_trace(path: &Path) -> Result<CounterFile, ReadError> {
        CounterFile::opened(path, OpenOptions::new().read(true).write(true))
    }

    fn opened(path: &Path, options: &mut OpenOptions) -> Result<CounterFile, ReadError> {
        // Root opens files in directories of other users: it must not follow a link, nor block on a FIFO.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = options.custom_flags(flags.bits() as i32).open(path).map_err(ReadError::Io)?;
        if !file.metadata().map_err(ReadError::Io)?.is_file() {
            return Err(ReadError::NoCounters);
        }
        let mut counters = CounterFile { path: path.to_owned(), file, snapshot: Snapshot::default() };
        counters.refresh()?;
        Ok(counters)
    }

    /// Reads the counters again.
    pub fn refresh(&mut self) -> Result<(), ReadError> {
        let mut bytes = vec![0; file::COUNTERS_BYTES];
        self.file.read_exact_at(&mut bytes, 0).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => ReadError::NoCounters,
            _ => ReadError::Io(e),
        })?;
        self.snapshot = Snapshot::from_bytes(&bytes).map_err(|e| match e {
            SnapshotError::OtherVersion => ReadError::OtherVersion,
            SnapshotError::NotCounters => ReadError::NoCounters,
        })?;
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
    list_in(&search_dirs())
}

fn list_in(places: &[PathBuf]) -> ProcessList {
    let mut found = ProcessList::default();
    let mut seen = HashSet::new();
    for place in places {
        for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
            let path = entry.path();
            let Ok(meta) = entry.metadata() else { continue };
            if !seen.insert((meta.dev(), meta.ino())) {
                continue;
            }
            match CounterFile::open(&path) {
                Ok(counters) if counters.is_alive() => found.processes.push(counters),
                Err(ReadError::OtherVersion)
                    if OpenOptions::new().read(true).open(&path).is_ok_and(|f| is_locked(&f)) =>
                {
                    found.other_versions += 1;
                }
                _ => {}
            }
        }
    }
    found.processes.sort_by_key(|c| c.snapshot.process.pid);
    found
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

/// Where processes keep their counters.
pub fn search_dirs() -> Vec<PathBuf> {
    let user = geteuid();
    let runtime = std::env::var("XDG_RUNTIME_DIR").ok();
    let mut places: Vec<PathBuf> =
        default_dirs(runtime.as_deref(), user.as_raw()).into_iter().map(PathBuf::from).collect();
    places.push(format!("/run/user/{}/spinio", user.as_raw()).into());
    if user.is_root() {
        for (folder, below) in [("/run/user", Some("spinio")), ("/dev/shm", None)] {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
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

    fn table(folder: &Path, name: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, vec![0u8; file::COUNTERS_BYTES]).unwrap();
        path
    }

    #[test]
    fn only_locked_files_are_live_processes() {
        let folder = tempfile::tempdir().unwrap();
        let (living, _dead) = (table(folder.path(), "1"), table(folder.path(), "2"));
        std::fs::write(folder.path().join("3"), "short").unwrap();
        std::os::unix::fs::symlink(&living, folder.path().join("4")).unwrap();
        std::fs::create_dir(folder.path().join("5")).unwrap();
        let holder = File::open(&living).unwrap();
        flock(&holder, FlockOperation::LockExclusive).unwrap();
        let places = [folder.path().to_owned(), folder.path().to_owned(), "/no/such".into()];
        let found = list_in(&places);
        assert_eq!(found.processes.iter().map(|c| &c.path).collect::<Vec<_>>(), [&living]);
        drop(holder);
        assert!(list_in(&places).processes.is_empty());
    }

    #[test]
    fn truncated_file_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = table(folder.path(), "1");
        let mut counters = CounterFile::open(&path).unwrap();
        std::fs::write(&path, "short").unwrap();
        assert!(matches!(counters.refresh(), Err(ReadError::NoCounters)));
    }
}
