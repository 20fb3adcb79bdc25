//! WRITEs whose bytes go to the file without the lock of its pages, so that those of a write-back run side by side.
//!
//! ```text
//!   lock ─ no page has to be looked at? ── yes: new versions, pages are on their way ─ unlock ─ pwrite ─ there
//!             └ no: merge, copy bases, pwrite ─ unlock            └ what looks at their bytes waits (arriving.rs)
//! ```
//!
//! The Linux kernel sends a WRITE for each run of dirty pages, up to 64 at a time. With the lock held over each pwrite the
//! threads that handle them slept and woke one after the other.
//!
//! What waits for pages must not wait for ever: as long as something does, WRITEs keep the lock.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::arriving::{Arriving, Waits};

/// Pages of a file that are overwritten now.
#[derive(Debug, Default)]
pub(crate) struct Overwrites {
    pages: Arriving,
    numbers: AtomicU64,
}

/// A WRITE without the lock, until this is dropped.
pub(crate) struct Overwrite<'a>(&'a Arriving, u64);

impl Overwrites {
    /// Whether one of these pages is being overwritten.
    pub(crate) fn has(&self, pages: &Range<u64>) -> bool {
        self.pages.has(pages)
    }

    /// Returns when none is. Without the lock of the file's pages.
    pub(crate) fn wait(&self, pages: &Range<u64>) {
        self.pages.wait(pages);
    }

    /// WRITEs that begin keep the lock until this is dropped.
    pub(crate) fn keep_the_lock(&self) -> Waits<'_> {
        self.pages.count_waiting()
    }

    /// Whether something waits.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.pages.is_waited_for()
    }

    /// Those that were begun so far.
    #[cfg(test)]
    pub(crate) fn count(&self) -> u64 {
        self.numbers.load(Relaxed)
    }

    /// With the lock of the file's pages.
    pub(crate) fn begin(&self, pages: &Range<u64>) -> Overwrite<'_> {
        let number = self.numbers.fetch_add(1, Relaxed);
        self.pages.begin(number, pages.clone());
        Overwrite(&self.pages, number)
    }
}

impl Drop for Overwrite<'_> {
    fn drop(&mut self) {
        self.0.end(self.1);
    }
}
