//! Where the counters of a process are stored: in its memory, in a file that the user named, or in a file of the
//! process that the tools find.
//!
//! ```text
//!   runtime of a process    SPINIO_STATS not set    directory.rs: a file of this process, created at its first request
//!                           PATH/                   likewise, in an existing directory
//!                           PATH                    that file, shared by all processes that name it
//!                           off                     none: nothing is counted
//!   runtime of a test or tool, or if the above fails: memory
//! ```
//!
//! A shadow worker opens the file and maps it, so that no descriptor is ever in the program's table. A program that
//! makes no device request has no file. A forked child that makes requests has a separate runtime, and so a separate
//! file.

#![expect(unsafe_code, reason = "counters in shared memory")]

use std::ffi::{CStr, CString};
use std::sync::OnceLock;

use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, SharedWords};

use super::directory::{self, StatsFile};
use super::layout::{FINGERPRINT, MAGIC, TABLE_WORDS};
use super::table_file::{allocate_table, map_table, write_header};
use super::{Gauge, Stats};
use spinio_host::Settings;
use spinio_host::pool::WorkerPool;
use spinio_host::shadow_fd::ShadowFd;

/// Where the counters are stored.
#[derive(Debug, PartialEq, Eq)]
pub enum StatsLocation {
    /// Nowhere.
    Off,
    /// In this process's memory.
    Memory,
    /// In this file, which other processes may share.
    File(CString),
    /// In a file of this process, in this directory.
    Directory(CString),
    /// The same, in the first of these directories that is or can be made private.
    PrivateDirs(Vec<CString>),
}

impl StatsLocation {
    /// The location that the settings ask for. `of_process`: for the runtime of the process, not of a test or tool.
    pub fn from_settings(settings: &Settings, of_process: bool) -> StatsLocation {
        let text = |path: &str| CString::new(path).ok();
        let location = match settings.stats.as_deref() {
            Some("off") => Some(StatsLocation::Off),
            Some(path) if path.ends_with('/') => text(path.trim_end_matches('/')).map(StatsLocation::Directory),
            Some(path) => text(path).map(StatsLocation::File),
            None if of_process => {
                let dirs = directory::default_dirs(settings.runtime_dir.as_deref(), linux::geteuid());
                Some(StatsLocation::PrivateDirs(dirs.iter().filter_map(|f| text(f)).collect()))
            }
            None => None,
        };
        location.unwrap_or(StatsLocation::Memory)
    }
}

/// Returns the current value of a gauge.
pub type GaugeSource = Box<dyn Fn() -> u64 + Send + Sync>;

/// The counters, and where they are stored.
pub struct StatsRegion {
    stats: Stats,
    gauges: OnceLock<Vec<(Gauge, GaugeSource)>>,
    /// The file of this process in a directory, and the descriptor whose lock shows that this process runs.
    pub(super) file: Option<(CString, ShadowFd)>,
}

impl StatsRegion {
    /// Opens or creates the table; in memory if that fails.
    ///
    /// `workers`: returns the shadow workers, called only if there is a file. `trace`: trace from the first request on,
    /// if the table is in a file: no tool reads the ring of one in memory. In a file of this process the switch says so,
    /// and a tracer can clear it. In a file that others share only this process traces: it may have no disk space for
    /// what the others would trace.
    pub fn new<'a>(
        location: StatsLocation,
        trace: bool,
        workers: impl FnOnce() -> Option<&'a WorkerPool>,
    ) -> StatsRegion {
        let mut always_traces = false;
        let (words, file) = match location {
            StatsLocation::Off => return StatsRegion { stats: Stats::new(None), file: None, gauges: OnceLock::new() },
            StatsLocation::Memory => (None, None),
            StatsLocation::File(path) => {
                // On a shadow worker, so that the descriptor is never in the program's table.
                let words = match workers() {
                    Some(shadow) => shadow.run_blocking(move || open_named(&path, trace)).and_then(Result::ok),
                    None => open_named(&path, trace).ok(),
                };
                always_traces = trace && words.is_some();
                (words, None)
            }
            StatsLocation::Directory(path) => {
                create_on_worker(workers(), move || directory::create_in(&path, trace).ok())
            }
            StatsLocation::PrivateDirs(paths) => {
                create_on_worker(workers(), move || paths.iter().find_map(|p| directory::create_private(p, trace).ok()))
            }
        };
        let words = words.or_else(|| SharedWords::anonymous(TABLE_WORDS).ok());
        StatsRegion { stats: Stats::new(words).with_tracing(always_traces), file, gauges: OnceLock::new() }
    }

    /// Sets the sources of the gauges that [`StatsRegion::update_gauges`] updates. Only the first call has an effect.
    pub fn set_gauges(&self, gauges: Vec<(Gauge, GaugeSource)>) {
        let _ = self.gauges.set(gauges);
    }

    /// Updates the gauges that have a source.
    pub fn update_gauges(&self) {
        for (gauge, now) in self.gauges.get().into_iter().flatten() {
            self.stats.set_gauge(*gauge, now());
        }
    }

    /// The counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }
}

/// Creates a file on a shadow worker.
fn create_on_worker(
    workers: Option<&WorkerPool>,
    make: impl FnOnce() -> Option<StatsFile> + Send + 'static,
) -> (Option<SharedWords>, Option<(CString, ShadowFd)>) {
    let Some(workers) = workers else { return (None, None) };
    match workers.run_blocking(make).flatten() {
        Some(StatsFile { words, lock, path }) => {
            (Some(words), Some((path, ShadowFd::new(lock, workers.close_queue()))))
        }
        None => (None, None),
    }
}

/// Only runtimes of tests and tools are dropped, and one that lost the race to be the runtime of the process.
impl Drop for StatsRegion {
    fn drop(&mut self) {
        if let Some((path, _)) = &self.file {
            let _ = linux::unlink(path);
        }
    }
}

/// The table in a file that the user named.
fn open_named(path: &CStr, trace: bool) -> Result<SharedWords, Errno> {
    let flags = (linux::O_RDWR | linux::O_CREAT) as i32;
    let fd = linux::open(path, flags, 0o600)?;
    let words = check_or_prepare(fd, trace).and_then(|()| map_table(fd));
    let _ = linux::close(fd);
    words.inspect(write_header)
}

/// Prepares an empty file and accepts a table of the same layout; fails for anything else.
fn check_or_prepare(fd: Fd, trace: bool) -> Result<(), Errno> {
    match linux::fstat(fd)?.size {
        0 => allocate_table(fd, trace),
        size if size == TABLE_WORDS as u64 * 8 => {
            if trace {
                // A process that does not trace has allocated the counters only.
                linux::fallocate(fd, size)?;
            }
            let mut found = [0u64; 2];
            // SAFETY: sixteen bytes are read into a local.
            unsafe { linux::pread(fd, found.as_mut_ptr().cast(), 16, 0) }?;
            if matches!(found, [0, 0] | [MAGIC, FINGERPRINT]) { Ok(()) } else { Err(Errno::EXIST) }
        }
        _ => Err(Errno::EXIST),
    }
}
