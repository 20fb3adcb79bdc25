//! The requests to the members of an array, from their `stat` files.

use std::fs;
use std::ops::Sub;
use std::path::{Path, PathBuf};

use crate::case::{CaseError, fail};

/// Requests and bytes since boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DiskCounters {
    pub(super) reads: u64,
    pub(super) read_bytes: u64,
    pub(super) writes: u64,
    pub(super) written_bytes: u64,
}

impl Sub for DiskCounters {
    type Output = DiskCounters;

    fn sub(self, before: DiskCounters) -> DiskCounters {
        DiskCounters {
            reads: self.reads - before.reads,
            read_bytes: self.read_bytes - before.read_bytes,
            writes: self.writes - before.writes,
            written_bytes: self.written_bytes - before.written_bytes,
        }
    }
}

/// The disks, or partitions of disks, under a block device; the device itself, if it is one.
pub(super) struct Members(Vec<PathBuf>);

impl Members {
    pub(super) fn of(device: &Path) -> Result<Members, CaseError> {
        let block = Path::new("/sys/class/block").join(device.file_name().unwrap_or_default());
        let mut members = Vec::new();
        for slave in fs::read_dir(block.join("slaves")).into_iter().flatten() {
            members.push(slave?.path());
        }
        if members.is_empty() {
            members.push(block);
        }
        Ok(Members(members))
    }

    pub(super) fn count(&self) -> Result<DiskCounters, CaseError> {
        let mut sum = DiskCounters::default();
        for member in &self.0 {
            let path = member.join("stat");
            let text = fs::read_to_string(&path)?;
            let words: Vec<u64> = text.split_ascii_whitespace().map_while(|word| word.parse().ok()).collect();
            // Requests, merged ones, sectors, milliseconds: of reads, then of writes.
            let [reads, _, read_sectors, _, writes, _, written_sectors, ..] = words[..] else {
                return fail(format!("{}: {text}", path.display()));
            };
            sum.reads += reads;
            sum.read_bytes += read_sectors * 512;
            sum.writes += writes;
            sum.written_bytes += written_sectors * 512;
        }
        Ok(sum)
    }
}
