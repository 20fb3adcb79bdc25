//! The request as the planners see it, and their working memory.
//!
//! Neighbouring extents of one residency are joined first, so a planner may assume that
//! two neighbours differ. A decision is one bit per run: from storage, or from the page cache.

use crate::sliding_min::Candidate;
use crate::{Extent, Residency};

/// A maximal run of one residency.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) residency: Residency,
    /// The decision.
    pub(crate) from_storage: bool,
}

impl Run {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// Runs between two absent ones (or an end of the request), and the effect of moving them to storage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub(crate) first: u32,
    pub(crate) runs: u32,
    pub(crate) absent_before: bool,
    pub(crate) absent_after: bool,
    /// Nanoseconds added to storage if the only run moves; groups of several runs are computed each time.
    pub(crate) storage: f64,
    /// Nanoseconds added to the page cache, never above 0.
    pub(crate) cache: f64,
}

/// Memory of the planners, reused from plan to plan.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) runs: Vec<Run>,
    pub(crate) previous: Vec<u32>,
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) groups: Vec<Group>,
}

impl Scratch {
    /// Joins the extents into runs.
    pub(crate) fn fill(&mut self, extents: &[Extent]) {
        self.runs.clear();
        self.runs.reserve(extents.len());
        let mut start = 0;
        for extent in extents.iter().filter(|e| e.len > 0) {
            match self.runs.last_mut() {
                Some(last) if last.residency == extent.residency => last.len += extent.len,
                _ => self.runs.push(Run { start, len: extent.len, residency: extent.residency, from_storage: false }),
            }
            start += extent.len;
        }
    }
}
