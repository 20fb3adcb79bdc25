//! Counters: bytes, pieces and time by route and reason.
//!
//! A fixed table of atomics. With `SPINIO_STATS` it lies in a mapped file, so that another
//! process reads it while we run, and it outlives us. Several processes may add to one file.
//!
//! ```text
//!   header  magic, version, device reads, small reads
//!   cell    [route][reason]: pieces, bytes, nanoseconds
//! ```

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use spinio_plan::{Reason, Route};
use spinio_sys::{Errno, linux};

use crate::crew::Crew;

const MAGIC: u64 = u64::from_le_bytes(*b"spinio\x01\0");
const REASONS: usize = Reason::ALL.len();
const ROUTES: usize = Route::ALL.len();

/// One route for one reason.
#[derive(Default)]
#[repr(C)]
struct Cell {
    pieces: AtomicU64,
    bytes: AtomicU64,
    nanos: AtomicU64,
}

/// The table. All-zero is a valid, empty one.
#[derive(Default)]
#[repr(C)]
pub struct Table {
    magic: AtomicU64,
    reads: AtomicU64,
    read_bytes: AtomicU64,
    read_nanos: AtomicU64,
    cells: [[Cell; REASONS]; ROUTES],
}

/// One small read in this many is timed, and stands for all of them.
const SAMPLED: u64 = 64;

/// The time of a small read, if it is one that is timed.
pub(crate) struct Stopwatch(Option<Instant>);

impl Stopwatch {
    /// Nanoseconds to be counted.
    pub(crate) fn nanos(&self) -> u64 {
        self.0.map_or(0, |begun| begun.elapsed().as_nanos() as u64 * SAMPLED)
    }
}

/// One line of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// How the bytes travelled.
    pub route: Route,
    /// Why.
    pub reason: Reason,
    /// Pieces moved.
    pub pieces: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Time spent on them, added up over threads.
    pub nanos: u64,
}

/// The counters at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Device reads that returned.
    pub reads: u64,
    /// Bytes they returned.
    pub read_bytes: u64,
    /// Time inside them, added up over threads; of small reads one in 64 is timed and stands for the others.
    pub read_nanos: u64,
    /// Routes and reasons that moved anything.
    pub lines: Vec<Line>,
}

impl Table {
    /// Bytes of a table, for who maps one.
    pub const SIZE: usize = size_of::<Table>();

    /// Adds a piece.
    pub fn piece(&self, route: Route, reason: Reason, bytes: u64, nanos: u64) {
        if bytes == 0 {
            return;
        }
        let cell = &self.cells[route as usize][reason as usize];
        cell.pieces.fetch_add(1, Relaxed);
        cell.bytes.fetch_add(bytes, Relaxed);
        cell.nanos.fetch_add(nanos, Relaxed);
    }

    /// Times a small read, or leaves it to one of its neighbours: on a virtual machine reading the clock twice can cost
    /// as much as the read.
    pub(crate) fn stopwatch(&self) -> Stopwatch {
        Stopwatch(self.reads.load(Relaxed).is_multiple_of(SAMPLED).then(Instant::now))
    }

    /// Adds a call that returned.
    pub fn call(&self, bytes: u64, nanos: u64) {
        self.magic.store(MAGIC, Relaxed);
        self.reads.fetch_add(1, Relaxed);
        self.read_bytes.fetch_add(bytes, Relaxed);
        self.read_nanos.fetch_add(nanos, Relaxed);
    }

    /// The counters now. Taken while others count, a line may be a piece behind another.
    pub fn snapshot(&self) -> Snapshot {
        let mut lines = Vec::new();
        for (route, row) in Route::ALL.into_iter().zip(&self.cells) {
            for (&reason, cell) in Reason::ALL.iter().zip(row) {
                let pieces = cell.pieces.load(Relaxed);
                if pieces > 0 {
                    let (bytes, nanos) = (cell.bytes.load(Relaxed), cell.nanos.load(Relaxed));
                    lines.push(Line { route, reason, pieces, bytes, nanos });
                }
            }
        }
        Snapshot {
            reads: self.reads.load(Relaxed),
            read_bytes: self.read_bytes.load(Relaxed),
            read_nanos: self.read_nanos.load(Relaxed),
            lines,
        }
    }
}

/// Where the counters of a process live: its own memory, or a shared file.
pub(crate) struct Home {
    table: &'static Table,
}

impl Home {
    /// The table in `path`, created if need be; in memory if that fails or there is no path.
    ///
    /// `crew`: the helpers, asked for only if there is a path.
    pub(crate) fn new<'a>(path: Option<&str>, crew: impl FnOnce() -> Option<&'a Crew>) -> Home {
        let shared = path.and_then(|path| {
            let path = std::ffi::CString::new(path).ok()?;
            // On a helper, so that the descriptor is never in the program's table.
            match crew() {
                Some(crew) => crew.call(move || Home::map(&path))?,
                None => Home::map(&path),
            }
        });
        Home { table: shared.unwrap_or_else(|| Box::leak(Box::default())) }
    }

    fn map(path: &std::ffi::CStr) -> Option<&'static Table> {
        let flags = (linux::O_RDWR | linux::O_CREAT) as i32;
        let fd = linux::open(path, flags, 0o600).ok()?;
        let protection = linux::PROT_READ | linux::PROT_WRITE;
        let mapped = Home::claim(fd).and_then(|()| {
            // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
            unsafe { linux::mmap(core::ptr::null_mut(), Table::SIZE, protection, linux::MAP_SHARED, fd, 0) }
        });
        let _ = linux::close(fd);
        // SAFETY: the mapping is page-aligned, as long as a table, never unmapped, and every bit pattern is a valid
        // table of atomics.
        mapped.ok().map(|ptr| unsafe { &*ptr.cast::<Table>() })
    }

    /// Makes an empty file ours, with room on the disk for all of it; takes a table of our own kind, and nothing else.
    fn claim(fd: linux::Fd) -> Result<(), Errno> {
        match linux::fstat(fd)?.size {
            0 => linux::allocate(fd, Table::SIZE as u64),
            size if size == Table::SIZE as u64 => {
                let mut magic = [0u8; 8];
                // SAFETY: eight bytes are read into a local.
                unsafe { linux::pread(fd, magic.as_mut_ptr(), 8, 0) }?;
                if matches!(u64::from_le_bytes(magic), 0 | MAGIC) { Ok(()) } else { Err(Errno::EXIST) }
            }
            _ => Err(Errno::EXIST),
        }
    }

    pub(crate) fn table(&self) -> &'static Table {
        self.table
    }
}

impl Snapshot {
    /// Reads the table another process left in a file; `None` if it holds no table of this version.
    pub fn from_bytes(bytes: &[u8]) -> Option<Snapshot> {
        let word = |i: usize| Some(u64::from_le_bytes(bytes.get(i * 8..i * 8 + 8)?.try_into().ok()?));
        if bytes.len() < Table::SIZE || !matches!(word(0)?, MAGIC | 0) {
            return None;
        }
        let mut lines = Vec::new();
        for (r, route) in Route::ALL.into_iter().enumerate() {
            for (c, &reason) in Reason::ALL.iter().enumerate() {
                let at = 4 + (r * REASONS + c) * 3;
                let (pieces, moved, nanos) = (word(at)?, word(at + 1)?, word(at + 2)?);
                if pieces > 0 {
                    lines.push(Line { route, reason, pieces, bytes: moved, nanos });
                }
            }
        }
        Some(Snapshot { reads: word(1)?, read_bytes: word(2)?, read_nanos: word(3)?, lines })
    }

    /// What was counted since `earlier`.
    pub fn since(&self, earlier: &Snapshot) -> Snapshot {
        let mut out = self.clone();
        out.reads -= earlier.reads;
        out.read_bytes -= earlier.read_bytes;
        out.read_nanos -= earlier.read_nanos;
        for old in &earlier.lines {
            if let Some(line) = out.lines.iter_mut().find(|l| (l.route, l.reason) == (old.route, old.reason)) {
                line.pieces -= old.pieces;
                line.bytes -= old.bytes;
                line.nanos -= old.nanos;
            }
        }
        out.lines.retain(|l| l.pieces > 0);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_tells_what_was_counted_and_when() {
        let table = Table::default();
        table.piece(Route::Copy, Reason::Cached, 10, 5);
        let before = table.snapshot();
        table.piece(Route::Copy, Reason::Cached, 7, 1);
        table.piece(Route::Direct, Reason::Absent, 4096, 9);
        table.call(4103, 11);
        let delta = table.snapshot().since(&before);
        assert_eq!(delta.read_bytes, 4103);
        assert_eq!(
            delta.lines,
            [
                Line { route: Route::Copy, reason: Reason::Cached, pieces: 1, bytes: 7, nanos: 1 },
                Line { route: Route::Direct, reason: Reason::Absent, pieces: 1, bytes: 4096, nanos: 9 },
            ]
        );
    }

    #[test]
    fn a_short_or_foreign_file_is_no_table() {
        assert_eq!(Snapshot::from_bytes(&[0; 16]), None);
        assert_eq!(Snapshot::from_bytes(&vec![7; Table::SIZE]), None);
        assert_eq!(Snapshot::from_bytes(&vec![0; Table::SIZE]), Some(Snapshot::default()));
    }
}
