//! The files, and their allowed contents.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use spinio_testkit::file;

use crate::versioned::{self, EDITIONS};

/// Files whose bytes never change, though their pages are evicted and read again.
pub(crate) const STEADY: u64 = 6;
/// Files that the mutator rewrites and truncates.
pub(crate) const CHANGING: u64 = 4;
/// Versions of a changing file: few, so that any other byte is detected.
pub(crate) const VERSIONS: u8 = 6;

/// Bytes of a steady file: from less than a page to more than a window.
pub(crate) fn steady_len(n: u64) -> u64 {
    [3_000, 70_000, 1 << 20, (5 << 20) + 123, 16 << 20, (40 << 20) + 4096][n as usize % 6]
}

/// Bytes of a changing file.
pub(crate) const CHANGING_LEN: u64 = (3 << 20) + 777;

pub(crate) fn steady(folder: &Path, n: u64) -> PathBuf {
    folder.join(format!("steady-{n}"))
}

pub(crate) fn changing(folder: &Path, n: u64) -> PathBuf {
    folder.join(format!("changing-{n}"))
}

pub(crate) fn log(folder: &Path) -> PathBuf {
    folder.join("log")
}

/// Creates all of them.
pub(crate) fn make(folder: &Path) -> Result<()> {
    for n in 0..STEADY {
        file::create_filled(&steady(folder, n), steady_len(n));
    }
    for n in 0..CHANGING {
        file::create_filled(&changing(folder, n), CHANGING_LEN);
    }
    for n in 0..EDITIONS {
        file::create_filled(&versioned::path(folder, n), versioned::len(n));
    }
    File::create(log(folder))?;
    Ok(())
}

pub(crate) fn open(path: &Path, write: bool) -> Result<File> {
    let file = OpenOptions::new().read(true).write(write).open(path);
    file.with_context(|| format!("cannot open {}", path.display()))
}

/// The first byte that differs from the steady file's.
pub(crate) fn first_bad_steady(offset: u64, seen: &[u8]) -> Option<u64> {
    (offset..).zip(seen).find(|&(at, &b)| b != file::byte(at, 0)).map(|(at, _)| at)
}

/// The first byte that no version of a changing file has; zeros are of a file that was truncated and extended again.
pub(crate) fn first_bad_changing(offset: u64, seen: &[u8]) -> Option<u64> {
    (offset..).zip(seen).find(|&(at, &b)| b != 0 && b.wrapping_sub(file::byte(at, 0)) >= VERSIONS).map(|(at, _)| at)
}

/// Bytes before a record's payload.
const HEADER: usize = 24;

/// A record of the log: writer, sequence number, length; then one byte repeated.
pub(crate) fn record(writer: u64, sequence: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![(writer ^ sequence) as u8; HEADER + len];
    bytes[..8].copy_from_slice(&writer.to_le_bytes());
    bytes[8..16].copy_from_slice(&sequence.to_le_bytes());
    bytes[16..24].copy_from_slice(&(len as u64).to_le_bytes());
    bytes
}

/// Reads the whole log: the number of complete records of each writer, in sequence.
pub(crate) fn read_log(path: &Path) -> Result<std::collections::HashMap<u64, u64>> {
    let bytes = std::fs::read(path)?;
    let mut counts = std::collections::HashMap::new();
    let mut at = 0;
    while at < bytes.len() {
        let word = |i: usize| {
            let from = at + 8 * i;
            bytes.get(from..from + 8).map(|b| u64::from_le_bytes(b.try_into().expect("eight bytes")))
        };
        let (Some(writer), Some(sequence), Some(len)) = (word(0), word(1), word(2)) else {
            anyhow::bail!("the log ends in the middle of a header, at {at}");
        };
        let end = at + HEADER + usize::try_from(len).context("a torn header in the log")?;
        let payload = bytes.get(at + HEADER..end);
        let payload = payload.with_context(|| format!("a torn record in the log, at {at}"))?;
        anyhow::ensure!(payload.iter().all(|&b| b == (writer ^ sequence) as u8), "a mixed record in the log, at {at}");
        let count = counts.entry(writer).or_insert(0);
        anyhow::ensure!(sequence == *count, "record {sequence} of writer {writer} follows {count}, at {at}");
        *count += 1;
        at = end;
    }
    Ok(counts)
}
