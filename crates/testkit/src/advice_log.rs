//! Which pages a runtime has had the kernel drop.
//!
//! That a page is absent does not show that SPIN dropped it: Linux evicts pages for lack of memory, and where DAMON
//! runs with a `pageout` scheme it evicts unmapped ones at any time, whole folios or single pages. The log tells the
//! two apart.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use spinio_sys::linux::{self, Advice, Fd, FileKey};

/// A file; a range of it; and whether it was dropped (false: it was read in again).
type Entry = (FileKey, Range<u64>, bool);

/// The advice that a runtime has given on files, in the order in which the calls ended.
#[derive(Debug, Default)]
pub struct AdviceLog(Mutex<Vec<Entry>>);

impl AdviceLog {
    /// A call that has ended.
    pub fn record(&self, fd: Fd, offset: u64, len: u64, advice: Advice) {
        let Ok(stat) = linux::fstat(fd) else { return };
        let end = if len == 0 { u64::MAX } else { offset + len };
        if matches!(advice, Advice::DontNeed | Advice::WillNeed) {
            self.entries().push((stat.key(), offset..end, advice == Advice::DontNeed));
        }
    }

    /// Whether the byte at this offset was dropped, and not read in again since.
    pub fn is_dropped(&self, file: &File, at: u64) -> bool {
        let stat = linux::fstat(file.as_raw_fd()).expect("fstat");
        let entries = self.entries();
        let last = entries.iter().rev().find(|(key, range, _)| *key == stat.key() && range.contains(&at));
        last.is_some_and(|entry| entry.2)
    }

    /// Forgets everything.
    pub fn clear(&self) {
        self.entries().clear();
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
