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
//! Whoever waits for pages must not wait for ever: as long as something does, WRITEs keep the lock.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spinio_pagecache::{self as pagecache, Backing as _, WriteFrom};

use crate::arriving::Arriving;
use crate::file_backing::FileBacking;
use crate::files::File;

/// Pages of a file that are overwritten now.
#[derive(Debug, Default)]
pub(crate) struct Overwrites {
    pages: Arriving,
    numbers: AtomicU64,
}

/// A WRITE without the lock, until this is dropped.
struct Overwrite<'a>(&'a Arriving, u64);

impl Overwrites {
    /// Whether one of these pages is being overwritten.
    pub(crate) fn has(&self, pages: &Range<u64>) -> bool {
        self.pages.has(pages)
    }

    /// Returns when none is. Without the lock of the file's pages.
    pub(crate) fn wait(&self, pages: &Range<u64>) {
        self.pages.wait(pages);
    }

    /// With the lock of the file's pages.
    fn begin(&self, pages: &Range<u64>) -> Overwrite<'_> {
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

impl File {
    /// A WRITE of these pages.
    pub(crate) fn write(
        &self,
        backing: FileBacking<'_>,
        pages: &Range<u64>,
        offset: u64,
        bytes: &[u8],
        from: WriteFrom,
    ) -> pagecache::Result<()> {
        let mut table = self.pages_to_change(pages);
        if self.overwrites().pages.is_waited_for() || !table.begin_overwrite(offset, bytes.len()) {
            return table.write(&backing, offset, bytes, from);
        }
        let _overwrite = self.overwrites().begin(pages);
        drop(table);
        Ok(backing.write(offset, bytes)?)
    }
}
