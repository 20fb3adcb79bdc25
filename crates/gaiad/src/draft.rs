//! A release while its messages arrive.

use std::ops::Range;

use spinio_pagecache::messages::ReleaseId;

/// A release of which not all messages have come.
pub(crate) struct Draft {
    pub(crate) id: ReleaseId,
    pub(crate) range: Range<u64>,
    /// Pages of the file that the client has changed.
    pub(crate) runs: Vec<Range<u64>>,
    /// How many these are; too many are counted, but not kept.
    pub(crate) count: u64,
    /// Where the next run may begin.
    next: u64,
    /// The first page past the end of the file, if some are.
    pub(crate) past: Option<u64>,
}

impl Draft {
    pub(crate) fn new(id: ReleaseId, range: Range<u64>) -> Draft {
        Draft { id, next: range.start, range, runs: Vec::new(), count: 0, past: None }
    }

    /// Adds pages; false if they are out of order or outside the release. `size`: that of the file, in pages.
    pub(crate) fn add(&mut self, pages: Range<u64>, size: u64, most: u64) -> bool {
        if pages.start < self.next || pages.end > self.range.end {
            return false;
        }
        self.next = pages.end;
        let inside = pages.start..pages.end.min(size);
        if inside.end < pages.end {
            self.past = Some(self.past.map_or(size, |past| past.min(size)));
        }
        self.count += inside.end.saturating_sub(inside.start);
        if self.count > most {
            self.runs = Vec::new();
        } else if !inside.is_empty() {
            self.runs.push(inside);
        }
        true
    }
}
