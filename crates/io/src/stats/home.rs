//! Where the counters of a process live: its own memory, or a file.

use std::ffi::{CStr, CString};
use std::sync::atomic::Ordering::Relaxed;

use spinio_sys::{Errno, linux};

use super::Stats;
use super::layout::{COUNTERS, FINGERPRINT, MAGIC, WORDS, header};
use super::words::Words;
use crate::crew::Crew;

/// The counters, and what they lie in.
pub(crate) struct Home {
    stats: Stats,
}

impl Home {
    /// The table in `path`, created if need be; in memory if that fails or there is no path; none where it says `off`.
    ///
    /// `crew`: the helpers, asked for only if there is a path.
    pub(crate) fn new<'a>(path: Option<&str>, crew: impl FnOnce() -> Option<&'a Crew>) -> Home {
        if path == Some("off") {
            return Home { stats: Stats::new(None) };
        }
        let shared = path.and_then(|path| {
            let path = CString::new(path).ok()?;
            // On a helper, so that the descriptor is never in the program's table.
            match crew() {
                Some(crew) => crew.call(move || named(&path))?.ok(),
                None => named(&path).ok(),
            }
        });
        Home { stats: Stats::new(shared.or_else(|| Words::private(WORDS).ok())) }
    }

    pub(crate) fn stats(&self) -> &Stats {
        &self.stats
    }
}

/// The table in a file of the user's choice.
fn named(path: &CStr) -> Result<Words, Errno> {
    let flags = (linux::O_RDWR | linux::O_CREAT) as i32;
    let fd = linux::open(path, flags, 0o600)?;
    let words = claim(fd).and_then(|()| Words::of_file(WORDS, fd));
    let _ = linux::close(fd);
    words.inspect(stamp)
}

/// Makes an empty file ours, with room on the disk for the counters; takes a table of our own kind, and nothing else.
fn claim(fd: linux::Fd) -> Result<(), Errno> {
    match linux::fstat(fd)?.size {
        0 => {
            linux::allocate(fd, COUNTERS as u64 * 8)?;
            linux::ftruncate(fd, WORDS as u64 * 8)
        }
        size if size == WORDS as u64 * 8 => {
            let mut found = [0u64; 2];
            // SAFETY: sixteen bytes are read into a local.
            unsafe { linux::pread(fd, found.as_mut_ptr().cast(), 16, 0) }?;
            if matches!(found, [0, 0] | [MAGIC, FINGERPRINT]) { Ok(()) } else { Err(Errno::EXIST) }
        }
        _ => Err(Errno::EXIST),
    }
}

/// Says what the words are.
fn stamp(words: &Words) {
    words[header::FINGERPRINT].store(FINGERPRINT, Relaxed);
    words[header::MAGIC].store(MAGIC, Relaxed);
}
