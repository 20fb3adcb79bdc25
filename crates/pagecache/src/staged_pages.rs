//! The pages of a release whose bytes are in slots: by runs as long as nothing looks at single ones.
//!
//! ```text
//!   runs ── commit_unseen ── done: one header and one entry for each run
//!             └ None: a page that the kernel has, that another writer has changed, or the last one of a file
//!                └ a slot for each page ── commit_staged
//! ```

use std::ops::Range;

use crate::commit::Commit;
use crate::error::Result;
use crate::file::{Backing, FilePages, OwnerId, add_run};
use crate::page::offset_of;
use crate::slot_run::StagedRun;
use crate::slots::StagedPage;

/// Pages of a run on average from which an entry for each run is worth it: it is divided when one of them is read. The
/// file of the model has three pages.
const LONG: u64 = if cfg!(test) { 1 } else { 8 };

/// Pages in ascending order. If their release is not committed, they are there for another attempt.
#[derive(Debug, Default)]
pub struct StagedPages {
    runs: Vec<(u64, StagedRun)>,
    /// Instead, once they were divided.
    pages: Vec<(u64, StagedPage)>,
    /// All of them, as runs.
    all: Vec<Range<u64>>,
    /// How many they are: asked for with each message of a release.
    count: u64,
}

impl StagedPages {
    /// Adds pages after those that are there, before the first attempt.
    pub fn push(&mut self, first: u64, run: StagedRun) {
        let count = run.slots().len() as u64;
        add_run(&mut self.all, first..first + count);
        self.count += count;
        self.runs.push((first, run));
    }

    /// The pages.
    pub fn pages(&self) -> &[Range<u64>] {
        &self.all
    }

    /// How many they are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The pages from the first one to the last one.
    pub fn hull(&self) -> Range<u64> {
        self.all.first().map_or(0, |run| run.start)..self.all.last().map_or(0, |run| run.end)
    }

    fn are_long(&self) -> bool {
        self.pages.is_empty() && !self.runs.is_empty() && self.count() >= self.runs.len() as u64 * LONG
    }
}

impl FilePages {
    /// [`FilePages::commit`] of pages whose bytes are in slots already.
    pub fn commit_all(
        &mut self,
        backing: &dyn Backing,
        owner: OwnerId,
        id: u64,
        staged: &mut StagedPages,
    ) -> Result<Commit> {
        // What the owner has past the end of the file is no copy of head.
        let are_whole = offset_of(staged.hull().end) <= backing.size()?;
        if are_whole
            && staged.are_long()
            && let Some(commit) = self.commit_unseen(backing, owner, id, &mut staged.runs)?
        {
            return Ok(commit);
        }
        for (first, run) in staged.runs.drain(..) {
            staged.pages.extend((first..).zip(run.into_pages()));
        }
        self.commit_staged(backing, owner, id, &staged.pages)
    }
}
