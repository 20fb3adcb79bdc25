//! Where the pages of a file are, for people: head, and which owners have copies.

use std::ops::Range;

use crate::file::{FilePages, OwnerId};
use crate::owner::{Owner, Replica};
use crate::source::Source;

/// What an owner has of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyState {
    /// Head.
    Current,
    /// An older version: the next acquire refreshes it.
    Stale,
    /// In an epoch for writing.
    Open,
    /// Being fetched.
    Filling,
}

/// Pages of which all of this is the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PageInfo {
    /// Head is released bytes that are not in the backing file yet.
    pub unwritten: bool,
    /// The kernel may have bytes from before a release, and is being told to drop them.
    pub invalidating: bool,
    /// Owners with a copy, in ascending order.
    pub copies: Vec<(OwnerId, CopyState)>,
}

impl FilePages {
    /// Describes pages from the first on, in about `most` steps, and returns the page at which that ends. Runs have
    /// different neighbours.
    pub fn explain(&self, pages: Range<u64>, most: usize) -> (Vec<(Range<u64>, PageInfo)>, u64) {
        let mut runs: Vec<(Range<u64>, PageInfo)> = Vec::new();
        let mut at = pages.start;
        for _ in 0..most {
            if at >= pages.end {
                break;
            }
            let (end, info) = self.explain_run(at, pages.end);
            match runs.last_mut() {
                Some((run, last)) if *last == info => run.end = end,
                _ => runs.push((at..end, info)),
            }
            at = end;
        }
        (runs, at)
    }

    /// The pages of an owner's map, if it is known.
    pub fn pages_of(&self, owner: OwnerId) -> Option<Range<u64>> {
        self.owners.get(&owner).map(Owner::pages)
    }

    /// The pages from this one on that are like it without a look at each, and how they are.
    fn explain_run(&self, first: u64, limit: u64) -> (u64, PageInfo) {
        let entry = self.entries.get(&first);
        let run = self.run_of(first);
        let next_entry = self.entries.range(first + 1..limit).next().map_or(limit, |(page, _)| *page);
        let next_run = self.runs.range(first + 1..limit).next().map_or(limit, |(page, _)| *page);
        let mut end = match (entry, run) {
            (Some(_), _) => first + 1,
            (_, Some(run)) => run.end.min(limit),
            _ => next_entry.min(next_run),
        };
        let mut copies = Vec::new();
        for (id, owner) in &self.owners {
            let its = owner.pages();
            if !its.contains(&first) {
                if its.start > first {
                    end = end.min(its.start);
                }
                continue;
            }
            let Some((run, replica)) = owner.runs(first..end).next() else { continue };
            end = end.min(run.end);
            let copy = match replica {
                Replica::Absent => continue,
                Replica::Valid(stamp) if self.is_current(first, stamp) => CopyState::Current,
                Replica::Valid(_) => CopyState::Stale,
                Replica::Open(_) => CopyState::Open,
                Replica::Filling { .. } => CopyState::Filling,
            };
            copies.push((*id, copy));
        }
        let unwritten = entry.is_some_and(|entry| matches!(entry.head, Source::Slot(_)))
            || run.is_some_and(|run| run.head.is_some());
        let invalidating = entry.is_some_and(|entry| entry.twin.is_some());
        (end, PageInfo { unwritten, invalidating, copies })
    }
}
