//! Entries of the page table for runs of pages: what a release of many pages side by side makes.
//!
//! ```text
//!   commit_unseen ──> run: slots ──write_out──> run: backing file ──> gone, once no owner has a copy
//!                       │ split at any page        │ joined with a neighbour of its version
//!                       └──────────┬───────────────┘
//!                          divide: an entry for each page, for what changes single pages
//! ```
//!
//! All pages of a run have one version, no twin, and no older version that is a base. What would change that (a WRITE, a
//! truncation, a release that copies pages) divides the run first, and only where it has to; an acquire and a READ do not.
//! No page has both an entry of its own and one in a run.

use std::ops::Range;

use crate::entry_run::EntryRun;
use crate::error::Result;
use crate::file::{Backing, Entry, FilePages};
use crate::page::{PAGE, PageBytes, ZEROS, offset_of};
use crate::slot_run::SlotRun;
use crate::source::Source;

/// Entries that are removed one by one: to take many out of the table at once takes as long as the table has entries.
const FEW: usize = 64;

/// Which runs are divided.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    All,
    /// Those whose head is in slots.
    InSlots,
}

impl FilePages {
    /// The runs that have a page of a range, each with all of its pages, in ascending order.
    pub(crate) fn runs_at(&self, pages: Range<u64>) -> impl Iterator<Item = (Range<u64>, &EntryRun)> {
        let before = self.runs.range(..pages.start).next_back().filter(|(_, run)| run.end > pages.start);
        let inside = self.runs.range(pages.start..pages.end.max(pages.start));
        before.filter(|_| !pages.is_empty()).into_iter().chain(inside).map(|(first, run)| (*first..run.end, run))
    }

    /// The run that a page is in.
    pub(crate) fn run_of(&self, page: u64) -> Option<&EntryRun> {
        let (_, run) = self.runs.range(..=page).next_back()?;
        (run.end > page).then_some(run)
    }

    /// Pages of a range that are in runs of which this is true, as runs.
    pub(crate) fn in_runs(&self, pages: Range<u64>, which: impl Fn(&EntryRun) -> bool) -> Vec<Range<u64>> {
        let found = self.runs_at(pages.clone()).filter(|(_, run)| which(run));
        found.map(|(run, _)| run.start.max(pages.start)..run.end.min(pages.end)).collect()
    }

    /// Pages of a range that are in runs whose head is in slots, which are held.
    pub(crate) fn hold_runs(&self, pages: &Range<u64>) -> Vec<(Range<u64>, Source)> {
        let held = |(run, entry): (Range<u64>, &EntryRun)| {
            let part = run.start.max(pages.start)..run.end.min(pages.end);
            let slots = entry.head.as_ref()?.hold(part.start - run.start..part.end - run.start);
            Some((part, Source::Slots(slots)))
        };
        self.runs_at(pages.clone()).filter_map(held).collect()
    }

    /// No run has pages both before this one and from it on.
    fn split_at(&mut self, page: u64) {
        let Some((first, run)) = self.runs.range_mut(..page).next_back() else { return };
        if run.end <= page {
            return;
        }
        let head = run.head.as_mut().map(|slots| slots.split_off(page - first));
        let rest = EntryRun { end: run.end, head, ..*run };
        run.end = page;
        self.runs.insert(page, rest);
    }

    /// Gives pages that are in runs an entry each.
    pub(crate) fn divide(&mut self, pages: Range<u64>, which: Which) {
        for part in self.in_runs(pages, |run| which == Which::All || run.head.is_some()) {
            self.split_at(part.start);
            self.split_at(part.end);
            let Some(EntryRun { version, overwritten, head, .. }) = self.runs.remove(&part.start) else { continue };
            let entry = |head| Entry { version, head, overwritten, ..Entry::new() };
            match head {
                Some(slots) => self.entries.extend(part.zip(slots.divide().map(|slot| entry(Source::Slot(slot))))),
                None => self.entries.extend(part.map(|page| (page, entry(Source::Backing)))),
            }
        }
    }

    /// The pages have no entry any more, of their own or in a run, and their slots are retired. Returns the counter when
    /// one of them was written to the backing file last.
    pub(crate) fn drop_heads(&mut self, pages: Range<u64>) -> u64 {
        let mut overwritten = 0;
        let few: Vec<u64> = self.entries.range(pages.clone()).map(|(page, _)| *page).take(FEW + 1).collect();
        let mut drop_head = |entry: Entry| {
            overwritten = entry.overwritten.max(overwritten);
            if let Source::Slot(slot) = &entry.head {
                slot.retire();
            }
        };
        if few.len() <= FEW {
            few.into_iter().filter_map(|page| self.entries.remove(&page)).for_each(drop_head);
        } else {
            let mut taken = self.entries.split_off(&pages.start);
            self.entries.append(&mut taken.split_off(&pages.end));
            taken.into_values().for_each(&mut drop_head);
        }
        for part in self.in_runs(pages, |_| true) {
            self.split_at(part.start);
            self.split_at(part.end);
            let Some(before) = self.runs.remove(&part.start) else { continue };
            overwritten = before.overwritten.max(overwritten);
            before.head.iter().for_each(SlotRun::retire);
        }
        overwritten
    }

    /// The head of pages without an entry is in slots.
    pub(crate) fn put_run(&mut self, first: u64, slots: SlotRun, version: u64, overwritten: u64) {
        let end = first + slots.count();
        self.runs.insert(first, EntryRun { end, version, overwritten, head: Some(slots) });
    }

    /// The bytes of pages in the backing file are a new version. Nothing of their versions before is needed: they have no
    /// twin, no old version and no base.
    pub(crate) fn run_in_backing(&mut self, pages: Range<u64>, clock: u64) {
        self.drop_heads(pages.clone());
        let run = EntryRun { end: pages.end, version: clock, overwritten: clock, head: None };
        self.runs.insert(pages.start, run);
        self.tidy_runs(pages);
    }

    /// The bytes of pages in the backing file have changed, but their heads, in slots, have not.
    pub(crate) fn set_overwritten(&mut self, pages: Range<u64>, clock: u64) {
        self.entries.range_mut(pages.clone()).for_each(|(_, entry)| entry.overwritten = clock);
        let firsts: Vec<u64> = self.runs_at(pages).map(|(run, _)| run.start).collect();
        for first in firsts {
            self.runs.entry(first).and_modify(|run| run.overwritten = clock);
        }
    }

    /// Writes pages of one run whose head is in slots to the backing file; with none of them, nothing is done.
    pub(crate) fn write_out_slots(
        &mut self,
        backing: &dyn Backing,
        pages: Range<u64>,
        buffer: &mut Vec<PageBytes>,
    ) -> Result<()> {
        let Some((run, EntryRun { head: Some(slots), .. })) = self.runs_at(pages.clone()).next() else { return Ok(()) };
        buffer.resize((pages.end - pages.start) as usize, ZEROS);
        for (page, bytes) in pages.clone().zip(&mut *buffer) {
            slots.read(page - run.start, bytes);
        }
        let inside = backing.size()?.saturating_sub(offset_of(pages.start)) as usize;
        let len = inside.min(buffer.len() * PAGE);
        let written = backing.write(offset_of(pages.start), &buffer.as_flattened()[..len]);
        self.split_at(pages.start);
        self.split_at(pages.end);
        let clock = self.tick();
        if let Some(run) = self.runs.get_mut(&pages.start) {
            // If that has failed, it may have written some of them.
            run.overwritten = clock;
            if written.is_ok() {
                run.head.take().iter().for_each(SlotRun::retire);
            }
        }
        written?;
        self.tidy_runs(pages);
        Ok(())
    }

    /// Drops runs with one of these pages that nothing needs, and joins those that are left.
    pub(crate) fn tidy_runs(&mut self, pages: Range<u64>) {
        for part in self.in_runs(pages, |run| run.head.is_none()) {
            let Some((first, run)) = self.runs.range(..=part.start).next_back() else { continue };
            let (first, end, version) = (*first, run.end, run.version);
            if !self.has_copies(&(first..end)) {
                self.runs.remove(&first);
                self.forgotten = self.clock;
                continue;
            }
            let before = self.runs.range_mut(..first).next_back().filter(|(_, before)| before.end == first);
            if let Some((_, before)) = before.filter(|(_, run)| run.head.is_none() && run.version == version) {
                before.end = end;
                let joined = self.runs.remove(&first).map_or(0, |run| run.overwritten);
                if let Some((_, before)) = self.runs.range_mut(..first).next_back() {
                    before.overwritten = before.overwritten.max(joined);
                }
            }
        }
    }
}
