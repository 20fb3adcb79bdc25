//! Consecutive pages of a map.

use std::ops::Range;

/// Consecutive pages, counted from the first page of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first page.
    pub first: u64,
    /// How many; at least 1.
    pub count: u32,
}

impl Run {
    /// Its pages.
    pub fn pages(&self) -> Range<usize> {
        self.first as usize..self.first as usize + self.count as usize
    }

    /// The first page after it.
    pub fn end(&self) -> u64 {
        self.first + u64::from(self.count)
    }
}

/// How many pages are in a list of runs.
pub fn pages_in(runs: &[Run]) -> usize {
    runs.iter().map(|run| run.count as usize).sum()
}
