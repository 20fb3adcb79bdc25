//! WRITEs of few pages to large folios of the file below, which ext4 makes slow.
//!
//! CPU programs that store to single pages all over a mapped file have the Linux kernel send a WRITE for each. The file below is
//! in the page cache in folios as large as what was written or read at once, up to 2 MiB, and ext4 walks a list of all blocks of
//! a folio at each `pwrite`, with the lock of the file: 17 us for 4 KiB of a folio of 1 MiB, 2 us for a folio of 4 KiB
//! (benches/runs/2026-11-26-folios).
//!
//! ```text
//!   WRITE of few pages ── counts its region ── often? ── due ──> once a second: to storage, since a dirty folio stays as it
//!                                                                is; then the folio is split (spinio_sys::linux::split_folios)
//! ```
//!
//! To split a folio of 1 MiB takes as long as eight such WRITEs, so it is done after as many in one region, by a thread that
//! nothing waits for. Reading such a region later costs more a page.
//!
//! That thread must not wait with `sync_file_range`: this takes the error of a write-back that has failed from the descriptor,
//! and the fsync of a program, which comes by the same one, would succeed. So it looks at the page cache instead.
//!
//! Known flaws: whether a folio is large, and whether it was split, is not known. What is written again at once stays dirty, and
//! is tried again some times only. Folios that are read in again later may be large again, and are counted again only after
//! [`MOST`] other regions.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use spinio_pagecache::{PAGE, offset_of};
use spinio_sys::linux::{self, fs_magic};

use crate::lock::lock;

/// Pages of a WRITE that counts.
const FEW: usize = 4;
/// Pages of a region.
const REGION: u64 = 64;
/// WRITEs in a region until its folio is split.
const OFTEN: u8 = 8;
/// How often a folio is tried to be split.
const TRIES: u8 = 3;
/// Regions of a file that are counted.
const MOST: usize = 1 << 16;
/// Pages of the largest folio.
const FOLIO: u64 = 512;
/// How long a folio may take to be on storage, and the pauses between looks. A slower one is not split this time.
const WITHIN: Duration = Duration::from_secs(1);
const FIRST_LOOK: Duration = Duration::from_micros(200);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// Those of one file.
#[derive(Debug, Default)]
pub(crate) struct SmallWrites(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// WRITEs in each region, until its folio was tried to be split as often as it is.
    counts: HashMap<u64, u8>,
    /// Pages whose folios are to be split.
    due: Vec<u64>,
}

impl SmallWrites {
    /// Bytes were written from this offset.
    pub(crate) fn count(&self, offset: u64, len: usize) {
        if len > FEW * PAGE {
            return;
        }
        let page = offset / PAGE as u64;
        let mut state = lock(&self.0);
        if state.counts.len() >= MOST {
            state.counts.clear();
        }
        let count = state.counts.entry(page / REGION).or_default();
        if *count < OFTEN * TRIES {
            *count += 1;
            if count.is_multiple_of(OFTEN) {
                state.due.push(page);
            }
        }
    }

    /// The pages whose folios are to be split now, in ascending order.
    pub(crate) fn take_due(&self) -> Vec<u64> {
        let mut due = std::mem::take(&mut lock(&self.0).due);
        due.sort_unstable();
        due.dedup();
        due
    }
}

/// Splits the folios that have these pages, which ascend.
pub(crate) fn split(file: &OwnedFd, pages: &[u64]) {
    if !rustix::fs::fstatfs(file).is_ok_and(|on| on.f_type as u64 == fs_magic::EXT4) {
        return;
    }
    for near in pages.chunk_by(|page, next| page / FOLIO == next / FOLIO) {
        let first = near[0] / FOLIO * FOLIO;
        // A failure of either costs time only.
        let _ = linux::start_write_back(file.as_raw_fd(), offset_of(first), offset_of(FOLIO));
        wait_written(file, first);
        let _ = linux::split_folios(file.as_raw_fd(), near);
    }
}

/// Returns when no page of a folio is being written to storage, or after a while.
fn wait_written(file: &OwnedFd, first: u64) {
    let begun = Instant::now();
    let mut pause = FIRST_LOOK;
    while begun.elapsed() < WITHIN {
        match linux::cachestat(file.as_raw_fd(), offset_of(first), offset_of(FOLIO)) {
            Ok(now) if now.writeback == 0 => return,
            Ok(_) => std::thread::sleep(pause),
            // Before Linux 6.5, or a file of another user: most are written by then.
            Err(_) => return std::thread::sleep(LONGEST_PAUSE),
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_is_due_after_several_small_writes_and_not_for_ever() {
        let writes = SmallWrites::default();
        let at = |page: u64| page * PAGE as u64;
        let one = PAGE;
        for page in 0..u64::from(OFTEN) {
            assert_eq!(writes.take_due(), []);
            writes.count(at(1000 * REGION + page), one);
            writes.count(at(page), (FEW + 1) * one);
            writes.count(at(page * REGION), FEW * one);
        }
        assert_eq!(writes.take_due(), [1000 * REGION + u64::from(OFTEN) - 1]);
        (0..100).for_each(|_| writes.count(at(1000 * REGION), one));
        assert_eq!(writes.take_due(), [1000 * REGION]);
        (0..100).for_each(|_| writes.count(at(1000 * REGION), one));
        assert_eq!(writes.take_due(), [], "tried often enough");
        (0..MOST as u64).for_each(|region| writes.count(at(region * REGION), one));
        assert!(lock(&writes.0).counts.len() <= MOST);
    }
}
