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

use super::{Gauge, Stats};
use super::folder::{self, Made};
use super::layout::{FINGERPRINT, MAGIC, RING, WORDS, header};
use super::words::Words;
use spinio_host::Settings;
use spinio_host::pool::Crew;
use spinio_host::shadow_fd::PrivateFd;

/// Where the counters are to live.
#[derive(Debug, PartialEq, Eq)]
pub enum Place {
    /// Nowhere.
    Off,
    /// In this process's memory.
    Memory,
    /// In this file, which others may share.
    File(CString),
    /// In a file of this process's, in this folder.
    Folder(CString),
    /// The same, in the first of these that is or can be made ours alone.
    Own(Vec<CString>),
}

impl Place {
    /// What the settings say. `process`: for the runtime of the process, not one of many.
    pub fn of(settings: &Settings, process: bool) -> Place {
        let text = |path: &str| CString::new(path).ok();
        let place = match settings.stats.as_deref() {
            Some("off") => Some(Place::Off),
            Some(path) if path.ends_with('/') => text(path.trim_end_matches('/')).map(Place::Folder),
            Some(path) => text(path).map(Place::File),
            None if process => {
                let folders = folder::folders(settings.runtime_folder.as_deref(), linux::geteuid());
                Some(Place::Own(folders.iter().filter_map(|f| text(f)).collect()))
            }
            None => None,
        };
        place.unwrap_or(Place::Memory)
    }
}

/// What a gauge shows now.
pub type GaugeSource = Box<dyn Fn() -> u64 + Send + Sync>;

/// The counters, and what they lie in.
pub struct Home {
    stats: Stats,
    gauges: OnceLock<Vec<(Gauge, GaugeSource)>>,
    /// Our file in a folder, and the descriptor whose lock says that we live.
    file: Option<(CString, PrivateFd)>,
}

impl Home {
    /// The table, made if need be; in memory if that fails.
    ///
    /// `crew`: the helpers, asked for only if there is a file. `trace`: from the first request on.
    pub fn new<'a>(place: Place, trace: bool, crew: impl FnOnce() -> Option<&'a Crew>) -> Home {
        let (words, file) = match place {
            Place::Off => return Home { stats: Stats::new(None), file: None, gauges: OnceLock::new() },
            Place::Memory => (None, None),
            Place::File(path) => {
                // On a helper, so that the descriptor is never in the program's table.
                let words = match crew() {
                    Some(crew) => crew.call(move || named(&path, trace)).and_then(Result::ok),
                    None => named(&path, trace).ok(),
                };
                (words, None)
            }
            Place::Folder(path) => made(crew(), move || folder::make_in(&path, trace).ok()),
            Place::Own(paths) => made(crew(), move || paths.iter().find_map(|p| folder::make_own(p, trace).ok())),
        };
        let words = words.inspect(|words| {
            if trace {
                words[header::TRACING].store(u64::MAX, Relaxed);
            }
        });
        Home { stats: Stats::new(words.or_else(|| Words::private(WORDS).ok())), file, gauges: OnceLock::new() }
    }

    /// Where gauges come from that are shown by [`Home::update_gauges`]. Once.
    pub fn set_gauges(&self, gauges: Vec<(Gauge, GaugeSource)>) {
        let _ = self.gauges.set(gauges);
    }

    /// Shows what is kept now to those who read the counters.
    pub fn update_gauges(&self) {
        for (gauge, now) in self.gauges.get().into_iter().flatten() {
            self.stats.set(*gauge, now());
        }
    }

    /// The counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }
}

/// Has a keeper make a file.
fn made(
    crew: Option<&Crew>,
    make: impl FnOnce() -> Option<Made> + Send + 'static,
) -> (Option<Words>, Option<(CString, PrivateFd)>) {
    let Some(crew) = crew else { return (None, None) };
    match crew.call(make).flatten() {
        Some(Made { words, lock, path }) => (Some(words), Some((path, PrivateFd::new(lock, crew.graveyard())))),
        None => (None, None),
    }
}

/// Only runtimes of tests and tools go, and one that was made while another thread made it too.
impl Drop for Home {
    fn drop(&mut self) {
        if let Some((path, _)) = &self.file {
            let _ = linux::remove(path);
        }
    }
}

/// The table in a file of the user's choice.
fn named(path: &CStr, trace: bool) -> Result<Words, Errno> {
    let flags = (linux::O_RDWR | linux::O_CREAT) as i32;
    let fd = linux::open(path, flags, 0o600)?;
    let words = claim(fd, trace).and_then(|()| Words::of_file(WORDS, fd));
    let _ = linux::close(fd);
    words.inspect(stamp)
}

/// Makes an empty file ours; takes a table of our own kind, and nothing else.
fn claim(fd: Fd, trace: bool) -> Result<(), Errno> {
    match linux::fstat(fd)?.size {
        0 => prepare(fd, trace),
        size if size == WORDS as u64 * 8 => {
            let mut found = [0u64; 2];
            // SAFETY: sixteen bytes are read into a local.
            unsafe { linux::pread(fd, found.as_mut_ptr().cast(), 16, 0) }?;
            if matches!(found, [0, 0] | [MAGIC, FINGERPRINT]) { Ok(()) } else { Err(Errno::EXIST) }
        }
        _ => Err(Errno::EXIST),
    }
}

/// Gives an empty file its length, with room on the disk for what will be written: that must not fail later.
pub(super) fn prepare(fd: Fd, trace: bool) -> Result<(), Errno> {
    linux::allocate(fd, if trace { WORDS } else { RING } as u64 * 8)?;
    linux::ftruncate(fd, WORDS as u64 * 8)
}

/// Says what the words are, and whose, unless they are somebody's already.
pub(super) fn stamp(words: &Words) {
    let mut name = [0u8; 16];
    if let Ok(fd) = linux::open(c"/proc/self/comm", linux::O_RDONLY as i32, 0) {
        // SAFETY: fifteen bytes at most are read into a local of sixteen.
        let got = unsafe { linux::read(fd, name.as_mut_ptr(), 15) }.unwrap_or(0);
        let _ = linux::close(fd);
        let end = name[..got].iter().position(|b| *b == b'\n').unwrap_or(got);
        name[end..].fill(0);
    }
    words[header::FINGERPRINT].store(FINGERPRINT, Relaxed);
    words[header::MAGIC].store(MAGIC, Relaxed);
    if words[header::PID].compare_exchange(0, linux::getpid().into(), Relaxed, Relaxed).is_ok() {
        words[header::BORN].store(linux::monotonic(), Relaxed);
        words[header::BORN_WALL].store(linux::wall_clock(), Relaxed);
        for (i, bytes) in name.chunks_exact(8).enumerate() {
            words[header::NAME + i].store(u64::from_le_bytes(bytes.try_into().unwrap_or_default()), Relaxed);
        }
    }
}
