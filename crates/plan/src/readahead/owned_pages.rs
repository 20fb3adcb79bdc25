//! The pages that only SPIN read into the page cache: a bounded set, least recently used first.
//!
//! ```text
//!   oldest                                newest
//!   [file 7: 0..2M] [file 9: 4M..5M] [file 7: 8M..9M]  <── add: removed from its old position, appended here
//!    └─ over the limit: its front part is removed, and dropped
//! ```

use std::collections::VecDeque;
use std::ops::Range;

use super::survey_window::subtract;

/// Ranges of files, in the order of their last use. `F` identifies a file.
#[derive(Clone, Debug)]
pub struct OwnedPages<F> {
    runs: VecDeque<(F, Range<u64>)>,
    bytes: u64,
    limit: u64,
}

impl<F: Copy + Eq> OwnedPages<F> {
    /// An empty set of at most `limit` bytes.
    pub fn new(limit: u64) -> OwnedPages<F> {
        OwnedPages { runs: VecDeque::new(), bytes: 0, limit }
    }

    /// Bytes in the set.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Marks a range as used: it is the newest now.
    pub fn add(&mut self, file: F, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        self.remove(file, &range);
        self.bytes += range.end - range.start;
        match self.runs.back_mut() {
            Some((last, run)) if *last == file && run.end == range.start => run.end = range.end,
            _ => self.runs.push_back((file, range)),
        }
    }

    /// Removes the excess, oldest first; the caller drops it from the page cache.
    pub fn pop_over_limit(&mut self) -> Vec<(F, Range<u64>)> {
        let mut out = Vec::new();
        while self.bytes > self.limit
            && let Some((file, run)) = self.runs.front_mut()
        {
            let part = run.start..run.end.min(run.start.saturating_add(self.bytes - self.limit));
            self.bytes -= part.end - part.start;
            out.push((*file, part.clone()));
            run.start = part.end;
            if run.is_empty() {
                self.runs.pop_front();
            }
        }
        out
    }

    /// Removes a range of a file.
    pub fn remove(&mut self, file: F, range: &Range<u64>) {
        if !self.runs.iter().any(|(f, run)| *f == file && run.start < range.end && range.start < run.end) {
            return;
        }
        let runs = std::mem::take(&mut self.runs);
        let remaining = runs.into_iter().flat_map(|(f, run)| {
            let hole = if f == file { range.clone() } else { 0..0 };
            subtract(run, &hole).map(move |part| (f, part))
        });
        self.runs = remaining.collect();
        self.bytes = self.runs.iter().map(|(_, run)| run.end - run.start).sum();
    }

    /// Removes all ranges of a file.
    pub fn remove_file(&mut self, file: F) -> Vec<Range<u64>> {
        let (removed, remaining): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.runs).into_iter().partition(|(f, _)| *f == file);
        self.runs = remaining;
        self.bytes = self.runs.iter().map(|(_, run)| run.end - run.start).sum();
        removed.into_iter().map(|(_, run)| run).collect()
    }
}
