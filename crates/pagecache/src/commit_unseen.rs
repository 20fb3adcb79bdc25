//! Commit of a release whose bytes come later: nothing of it is done page by page.
//!
//! ```text
//!   runs of pages ── each: no twin, kernel has none, all open, head unchanged, no base of others ── else: None
//!                       └ header of each run of slots ── record committed ── entries of runs
//! ```

use std::ops::Range;

use crate::commit::Commit;
use crate::error::Result;
use crate::file::{Backing, FilePages, OwnerId, add_run};
use crate::layout::{Kind, Tag};
use crate::owner::Replica;
use crate::page::bytes_inside;
use crate::rules::{Rule, keep};
use crate::slot_run::StagedRun;

impl FilePages {
    /// Publishes runs of pages, in ascending order, whose bytes will be in the slots later, and takes them; `None`, and nothing is done, if
    /// a page has to be looked at now: the kernel may have it, another version is head since the owner got it, or another
    /// owner has stores to it that are not released. Bytes past the end of the file must be zeros in the slots now.
    ///
    /// Until the bytes are there the caller lets nothing use the file's pages, but for what looks at no bytes:
    /// [`FilePages::invalidated`], [`FilePages::pending`], and calls that end epochs and drop copies and owners.
    pub fn commit_unseen(
        &mut self,
        backing: &dyn Backing,
        owner: OwnerId,
        id: u64,
        runs: &mut Vec<(u64, StagedRun)>,
    ) -> Result<Option<Commit>> {
        let size = backing.size()?;
        let mut pages: Vec<Range<u64>> = Vec::new();
        for (first, staged) in &*runs {
            let run = *first..*first + staged.0.count();
            let in_order = pages.last().is_none_or(|last| last.end <= run.start);
            if !in_order || bytes_inside(run.end - 1, size) == 0 {
                return Ok(None);
            }
            add_run(&mut pages, run);
        }
        if !pages.iter().all(|run| self.is_plain(owner, run)) {
            return Ok(None);
        }
        let (release, version) = (self.slots.begin(id, self.file)?, self.clock + 1);
        let tag = Tag { kind: Kind::Snapshot, record: Some((release.record, release.sequence)) };
        for (first, staged) in &*runs {
            staged.0.publish(tag, self.file, *first, version);
        }
        self.slots.commit(release);
        self.clock = version;
        let mut commit = Commit { release, invalidate: Vec::new(), merged: Vec::new(), published: 0 };
        let mut overwritten = 0;
        for run in &pages {
            self.set_replicas(owner, run.clone(), Replica::Valid(version));
            commit.published += run.end - run.start;
            overwritten = self.drop_heads(run.clone()).max(overwritten);
        }
        for (first, staged) in runs.drain(..) {
            self.put_run(first, staged.0, version, overwritten);
        }
        self.counters.commits += 1;
        self.counters.published += commit.published;
        self.releases.insert(release, pages);
        Ok(Some(commit))
    }

    /// Whether nothing has to look at the bytes of these pages, or keep the old ones, when the owner releases them.
    fn is_plain(&self, owner: OwnerId, pages: &Range<u64>) -> bool {
        let unchanged = |run: Range<u64>, replica| {
            let Replica::Open(stamp) = replica else { return false };
            let mut entries = self.entries.range(run.clone());
            entries.all(|(_, entry)| entry.twin.is_none() && entry.version <= stamp)
                && self.runs_at(run).all(|(_, run)| run.version <= stamp)
        };
        let inside = self.owners.get(&owner).is_some_and(|owner| {
            let its = owner.pages();
            its.start <= pages.start
                && pages.end <= its.end
                && owner.runs(pages.clone()).all(|(run, replica)| unchanged(run, replica))
        });
        let mut others = self.owners.iter().filter(|(id, _)| **id != owner);
        inside
            && (self.cached.runs(pages.clone()).is_empty() || !keep(Rule::RunsAreUncached))
            && !others.any(|(_, other)| other.runs(pages.clone()).any(|(_, replica)| replica.base().is_some()))
    }
}
