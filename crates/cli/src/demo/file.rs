//! The file that the demo reads: it is created, put into a state, and checked for that state.
//!
//! ```text
//!   cold         flushed, then dropped from the page cache (POSIX_FADV_DONTNEED)
//!   half-cached  the same, then every other MiB read by an ordinary pread; of less than 32 MiB, every other 32nd part
//!   cached       all of it read by ordinary preads
//! ```
//!
//! Nothing is assumed: after each step the kernel is queried for the number of resident pages, and a state that could
//! not be produced (tmpfs never drops a page) is reported to the user.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::Context;
use spinio_sys::linux::{self, Advice, PAGE};

use crate::progress::Progress;

const MIB: u64 = 1 << 20;
/// Bytes written before a flush.
const FLUSH_EVERY: u64 = 64 * MIB;

/// A state of the page cache that the demo produces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Nothing resident.
    Cold,
    /// Every other MiB resident, or every other 32nd part.
    HalfCached,
    /// Everything resident.
    Cached,
}

impl State {
    /// In the order of the table.
    pub const ALL: [State; 3] = [State::Cold, State::HalfCached, State::Cached];

    /// The name in the table.
    pub fn name(self) -> &'static str {
        match self {
            State::Cold => "cold",
            State::HalfCached => "half-cached",
            State::Cached => "cached",
        }
    }

    /// Whether a share of resident pages is this state, within 2 %.
    pub fn matches(self, resident: f64) -> bool {
        let wanted = match self {
            State::Cold => 0.0,
            State::HalfCached => 0.5,
            State::Cached => 1.0,
        };
        (resident - wanted).abs() <= 0.02
    }
}

/// Fills a new file with words that differ at every offset, and flushes it to storage.
pub fn make(file: &File, path: &Path, size: u64) -> anyhow::Result<()> {
    let mut progress = Progress::bytes(size, "Making the file");
    let mut block = vec![0u8; MIB as usize];
    let cannot_flush = || format!("Cannot flush {} to storage", path.display());
    let mut out = file;
    let mut done = 0;
    while done < size {
        fill(&mut block, done);
        let n = (size - done).min(MIB) as usize;
        out.write_all(&block[..n]).with_context(|| format!("Cannot write {}", path.display()))?;
        done += n as u64;
        // At intervals, so that the bar moves until the end.
        if done.is_multiple_of(FLUSH_EVERY) {
            file.sync_data().with_context(cannot_flush)?;
        }
        progress.set(done);
    }
    file.sync_all().with_context(cannot_flush)
}

/// The bytes of the file at `offset`, a multiple of 8: every word is a hash of its own offset, so bytes at a wrong
/// offset are detected, and so are zeros.
fn fill(block: &mut [u8], offset: u64) {
    for (i, word) in block.chunks_exact_mut(8).enumerate() {
        let mut x = (offset + i as u64 * 8).wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word.copy_from_slice(&(x ^ (x >> 31)).to_le_bytes());
    }
}

/// Brings the file into a state; returns the share that is resident then, if the kernel reports it.
pub fn set_state(file: &File, path: &Path, size: u64, state: State) -> anyhow::Result<Option<f64>> {
    let cannot = || format!("Cannot read {}", path.display());
    match state {
        State::Cold => evict(file, size),
        State::HalfCached => {
            evict(file, size);
            advise(file, Advice::Random);
            // Of an odd number of MiB one more than half would be resident: of 5 MiB 60 %.
            let part = (size / 32 / PAGE as u64 * PAGE as u64).clamp(PAGE as u64, MIB);
            read_every(file, size, part, 2).with_context(cannot)?;
            advise(file, Advice::Normal);
        }
        State::Cached => read_every(file, size, MIB, 1).with_context(cannot)?,
    }
    Ok(resident_share(file, size))
}

/// Drops the resident pages. The kernel skips a page that is in a per-CPU list at that moment, or is being read from
/// storage: tries again, as long as that helps.
fn evict(file: &File, size: u64) {
    let (mut least, mut in_vain) = (f64::INFINITY, 0);
    while in_vain < 10 {
        advise(file, Advice::DontNeed);
        let Some(share) = resident_share(file, size).filter(|&share| share > 0.0) else { return };
        in_vain = if share < least { 0 } else { in_vain + 1 };
        least = least.min(share);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

fn advise(file: &File, advice: Advice) {
    // Refused advice shows in the residency that is queried afterwards.
    let _ = linux::fadvise(file.as_raw_fd(), 0, 0, advice);
}

/// Reads one part of every `every`.
fn read_every(file: &File, size: u64, part: u64, every: u64) -> std::io::Result<()> {
    let mut progress = Progress::bytes(size, "Reading it into the page cache");
    let mut block = vec![0u8; part as usize];
    let mut at = 0;
    while at < size {
        let n = (size - at).min(part) as usize;
        file.read_exact_at(&mut block[..n], at)?;
        at += every * part;
        progress.set(at.min(size));
    }
    Ok(())
}

/// The share of pages that is resident: 0 to 1. `None` if this kernel or file system does not report it.
pub fn resident_share(file: &File, size: u64) -> Option<f64> {
    let pages = size.div_ceil(PAGE as u64).max(1);
    if let Ok(stat) = linux::cachestat(file.as_raw_fd(), 0, size) {
        return Some(stat.cached as f64 / pages as f64);
    }
    // Before Linux 6.5. A read with RWF_NOWAIT would show it, too, but makes the kernel read the page in.
    linux::resident_pages(file.as_raw_fd(), size).ok().map(|found| found as f64 / pages as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk_file(size: u64) -> (tempfile::NamedTempFile, Option<String>) {
        let (dir, warning) = crate::scratch::disk_dir();
        let file = tempfile::NamedTempFile::new_in(dir).unwrap();
        make(file.as_file(), file.path(), size).unwrap();
        (file, warning)
    }

    #[test]
    fn states_match_kernel_residency() {
        for size in [8 << 20, 5 << 20, 3 << 20] {
            check_states(size);
        }
    }

    fn check_states(size: u64) {
        let (file, warning) = disk_file(size);
        if let Some(warning) = warning {
            eprintln!("skipped: {warning}");
            return;
        }
        for state in State::ALL {
            let share = set_state(file.as_file(), file.path(), size, state).unwrap();
            let Some(share) = share else {
                eprintln!("skipped: this kernel does not report what is resident");
                return;
            };
            assert!(state.matches(share), "{size} {}: {share}", state.name());
            // The same from an older interface of the kernel.
            let pages = linux::resident_pages(file.as_file().as_raw_fd(), size).unwrap();
            let by_mincore = pages as f64 / (size / PAGE as u64) as f64;
            assert!((by_mincore - share).abs() < 0.01, "cachestat {share}, mincore {by_mincore}");
        }
    }

    #[test]
    fn bytes_depend_on_offset() {
        let (file, _) = disk_file(3 * MIB + 100);
        let bytes = std::fs::read(file.path()).unwrap();
        assert_eq!(bytes.len() as u64, 3 * MIB + 100);
        let mut words: Vec<_> = bytes.chunks_exact(8).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), bytes.len() / 8);
    }
}
