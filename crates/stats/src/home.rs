//! Where the counters of a process live: in its own memory, in a file that the user named, or in a file of its own that
//! the tools find.
//!
//! ```text
//!   runtime of a process    SPINIO_STATS not set    folder.rs: a file for this process, made at its first request
//!                           PATH/                   likewise, in a folder that is there
//!                           PATH                    that file, for all processes that name it
//!                           off                     none: nothing is counted
//!   runtime of a test or tool, or where the above fails: memory
//! ```
//!
//! A keeper opens the file and maps it, so that no descriptor is ever in the program's table, and a host program,
//! which makes no device request, has none. A forked child that makes requests has a runtime of its own, so a file too.

use std::ffi::{CStr, CString};
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::folder::{self, StatsFile};
use super::layout::{FINGERPRINT, MAGIC, RING, TABLE_WORDS, header};
use super::words::SharedWords;
use super::{Gauge, Stats};
use spinio_host::Settings;
use spinio_host::pool::WorkerPool;
use spinio_host::shadow_fd::ShadowFd;

/// Where the counters are to live.
#[derive(Debug, PartialEq, Eq)]
pub enum StatsLocation {
    /// Nowhere.
    Off,
    /// In this process's memory.
    Memory,
    /// In this file, which others may share.
    File(CString),
    /// In a file of this process's, in this folder.
    Directory(CString),
    /// The same, in the first of these that is or can be made ours alone.
    PrivateDirs(Vec<CString>),
}

impl StatsLocation {
    /// What the settings say. `process`: for the runtime of the process, not one of many.
    pub fn from_settings(settings: &Settings, of_process: bool) -> StatsLocation {
        let text = |path: &str| CString::new(path).ok();
        let place = match settings.stats.as_deref() {
            Some("off") => Some(StatsLocation::Off),
            Some(path) if path.ends_with('/') => text(path.trim_end_matches('/')).map(StatsLocation::Directory),
            Some(path) => text(path).map(StatsLocation::File),
            None if of_process => {
                let dirs = folder::default_dirs(settings.runtime_dir.as_deref(), linux::geteuid());
                Some(StatsLocation::PrivateDirs(dirs.iter().filter_map(|f| text(f)).collect()))
            }
            None => None,
        };
        place.unwrap_or(StatsLocation::Memory)
    }
}

/// What a gauge shows now.
pub type GaugeSource = Box<dyn Fn() -> u64 + Send + Sync>;

/// The counters, and what they lie in.
pub struct StatsRegion {
    stats: Stats,
    gauges: OnceLock<Vec<(Gauge, GaugeSource)>>,
    /// Our file in a folder, and the descriptor whose lock says that we live.
    file: Option<(CString, ShadowFd)>,
}

impl StatsRegion {
    /// The table, made if need be; in memory if that fails.
    ///
    /// `crew`: the helpers, asked for only if there is a file. `trace`: from the first request on.
    pub fn new<'a>(place: StatsLocation, trace: bool, workers: impl FnOnce() -> Option<&'a WorkerPool>) -> StatsRegion {
        let (words, file) = match place {
            StatsLocation::Off => return StatsRegion { stats: Stats::new(None), file: None, gauges: OnceLock::new() },
            StatsLocation::Memory => (None, None),
            StatsLocation::File(path) => {
                // On a helper, so that the descriptor is never in the program's table.
                let words = match workers() {
                    Some(shadow) => shadow.run_blocking(move || open_named(&path, trace)).and_then(Result::ok),
                    None => open_named(&path, trace).ok(),
                };
                (words, None)
            }
            StatsLocation::Directory(path) => create_on_worker(workers(), move || folder::create_in(&path, trace).ok()),
            StatsLocation::PrivateDirs(paths) => {
                create_on_worker(workers(), move || paths.iter().find_map(|p| folder::create_private(p, trace).ok()))
            }
        };
        let words = words.inspect(|words| {
            if trace {
                words[header::TRACING].store(u64::MAX, Relaxed);
            }
        });
        StatsRegion {
            stats: Stats::new(words.or_else(|| SharedWords::anonymous(TABLE_WORDS).ok())),
            file,
            gauges: OnceLock::new(),
        }
    }

    /// Where gauges come from that are shown by [`Home::update_gauges`]. Once.
    pub fn set_gauges(&self, gauges: Vec<(Gauge, GaugeSource)>) {
        let _ = self.gauges.set(gauges);
    }

    /// Shows what is kept now to those who read the counters.
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

/// Has a keeper make a file.
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

/// Only runtimes of tests and tools go, and one that was made while another thread made it too.
impl Drop for StatsRegion {
    fn drop(&mut self) {
        if let Some((path, _)) = &self.file {
            let _ = linux::unlink(path);
        }
    }
}

/// The table in a file of the user's choice.
fn open_named(path: &CStr, trace: bool) -> Result<SharedWords, Errno> {
    let flags = (linux::O_RDWR | linux::O_CREAT) as i32;
    let fd = linux::open(path, flags, 0o600)?;
    let words = check_or_prepare(fd, trace).and_then(|()| SharedWords::from_file(TABLE_WORDS, fd));
    let _ = linux::close(fd);
    words.inspect(write_header)
}

/// Makes an empty file ours; takes a table of our own kind, and nothing else.
fn check_or_prepare(fd: Fd, trace: bool) -> Result<(), Errno> {
    match linux::fstat(fd)?.size {
        0 => allocate_table(fd, trace),
        size if size == TABLE_WORDS as u64 * 8 => {
            let mut found = [0u64; 2];
            // SAFETY: sixteen bytes are read into a local.
            unsafe { linux::pread(fd, found.as_mut_ptr().cast(), 16, 0) }?;
            if matches!(found, [0, 0] | [MAGIC, FINGERPRINT]) { Ok(()) } else { Err(Errno::EXIST) }
        }
        _ => Err(Errno::EXIST),
    }
}

/// Gives an empty file its length, with room on the disk for what will be written: that must not fail later.
pub(super) fn allocate_table(fd: Fd, trace: bool) -> Result<(), Errno> {
    linux::fallocate(fd, if trace { TABLE_WORDS } else { RING } as u64 * 8)?;
    linux::ftruncate(fd, TABLE_WORDS as u64 * 8)
}

/// Says what the words are, and whose, unless they are somebody's already.
pub(super) fn write_header(words: &SharedWords) {
    let mut name = [0u8; 16];
    if let Ok(fd) = linux::open(c"/proc/self/comm", linux::O_RDONLY as i32, 0) {
        // SAFETY: fifteen bytes at most are read into a local of sixteen.
        let len = unsafe { linux::read(fd, name.as_mut_ptr(), 15) }.unwrap_or(0);
        let _ = linux::close(fd);
        let end = name[..len].iter().position(|b| *b == b'\n').unwrap_or(len);
        name[end..].fill(0);
    }
    words[header::FINGERPRINT].store(FINGERPRINT, Relaxed);
    words[header::MAGIC].store(MAGIC, Relaxed);
    if words[header::PID].compare_exchange(0, linux::getpid().into(), Relaxed, Relaxed).is_ok() {
        words[header::STARTED].store(linux::monotonic_ns(), Relaxed);
        words[header::STARTED_WALL].store(linux::realtime_ns(), Relaxed);
        for (i, bytes) in name.chunks_exact(8).enumerate() {
            words[header::NAME + i].store(u64::from_le_bytes(bytes.try_into().unwrap_or_default()), Relaxed);
        }
    }
}
