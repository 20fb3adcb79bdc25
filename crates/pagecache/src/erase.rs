//! Bytes that become zeros: SETATTR(size), FALLOCATE.
//!
//! ```text
//!   pages of the range with an entry, or a copy of an owner
//!     ├─ twin, old version, base of an open page, erased in part ── one by one ──> an entry each
//!     └─ all others ──────────────────────────────────────────────── as runs ────> one entry for pages side by side
//! ```
//!
//! A sparse file costs no disk space, and any user can make a large one and acquire all of it: to cut it must not take an
//! entry for each page.

use std::ops::Range;

use crate::entry_runs::Which;
use crate::error::{Error, Result};
use crate::file::{Backing, Entry, FilePages, add_page};
use crate::layout::{Kind, Label, Tag};
use crate::page::{PAGE, PageBytes, ZEROS, offset_of};
use crate::rules::{Rule, keep};
use crate::runs::{common, length, union, without};
use crate::slots::SlotRef;
use crate::source::Source;

/// Pages that the kernel may have dirty and whose bytes are read first, in case that `action` fails: the time and memory
/// for them must not grow with the range. What is lost for the others, if it does fail after it zeroed some of their
/// bytes: a program's write of the same bytes that were there, which the kernel has not written back yet, counts as no
/// change, and these bytes stay zeros.
const MAX_BEFORE: usize = 16;

/// Open pages that may be erased at a time, 16 GiB of them: more would take gigabytes of entries.
const MAX_BASES: u64 = 4 << 20;

/// Pages that are changed, as runs in ascending order.
struct Touched {
    /// Something has to be kept of these, or looked at.
    singles: Vec<Range<u64>>,
    plain: Vec<Range<u64>>,
}

impl FilePages {
    /// SETATTR(size).
    pub fn truncate(&mut self, backing: &dyn Backing, size: u64) -> Result<()> {
        self.tick();
        if size > backing.size()? {
            return Ok(backing.set_size(size)?);
        }
        self.erase(backing, size..u64::MAX, |backing| backing.set_size(size))?;
        if keep(Rule::PagesPastTheEnd) {
            let past_the_end = size.div_ceil(PAGE as u64);
            self.cached.insert_from(past_the_end);
            self.given.iter_mut().for_each(|given| given.insert_from(past_the_end));
        }
        Ok(())
    }

    /// FALLOCATE that changes no byte inside the file, by `action` in the backing file: the size may become larger.
    pub fn allocate<T>(&mut self, action: impl FnOnce() -> T) -> T {
        self.tick();
        action()
    }

    /// FALLOCATE that punches a hole or zeroes a range inside the file; the size stays.
    pub fn punch(&mut self, backing: &dyn Backing, bytes: Range<u64>) -> Result<()> {
        self.erase(backing, bytes.clone(), |backing| backing.punch(bytes))
    }

    /// Bytes become zeros, by `action` in the backing file.
    ///
    /// Snapshots are dropped after, so that a restart in between shows bytes from before or after, never older ones. Those of
    /// pages that lie in the range only in part are replaced by others, which were published before: to write them out
    /// could take space on a full disk.
    ///
    /// After an error some of the bytes may be zeros: pages whose head is in the file have a new version then too.
    fn erase(
        &mut self,
        backing: &dyn Backing,
        bytes: Range<u64>,
        action: impl FnOnce(&dyn Backing) -> std::io::Result<()>,
    ) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let pages = bytes.start / PAGE as u64..bytes.end.div_ceil(PAGE as u64);
        let whole = |page: u64| bytes.start <= offset_of(page) && offset_of(page + 1) <= bytes.end;
        let within = |page: u64| {
            let start = offset_of(page);
            bytes.start.saturating_sub(start) as usize..(bytes.end - start).min(PAGE as u64) as usize
        };
        let (mut edges, mut snapshots) = (Vec::new(), Vec::new());
        for page in pages.clone().take(1).chain(pages.clone().skip(1).last()) {
            if !whole(page) {
                self.divide(page..page + 1, Which::InSlots);
                snapshots.extend(self.erased_snapshot(backing, page, within(page))?.map(|slot| (page, slot)));
                edges.push(page..page + 1);
            }
        }
        let Touched { singles, plain } = self.touched(backing, pages, edges)?;
        singles.iter().for_each(|run| self.divide(run.clone(), Which::All));
        let mut saved = Vec::with_capacity(length(&singles) as usize);
        let mut left = MAX_BEFORE;
        for page in singles.iter().cloned().flatten() {
            let before = match self.entries.get(&page) {
                Some(Entry { twin: Some(_), head: Source::Backing, .. }) if left > 0 => {
                    left -= 1;
                    // Also on a disk that cannot read a page it can be cut off.
                    self.fetch(backing, page, &Source::Backing).ok().map(Box::new)
                }
                _ => None,
            };
            saved.push((self.save_bases(backing, page)?, before));
        }
        let version = self.tick();
        for (page, slot) in &snapshots {
            let label = Label { file: self.file, page: *page, count: 1, version };
            slot.publish(Tag { kind: Kind::Snapshot, record: None }, label);
        }
        let done = action(backing);
        if done.is_err() && !keep(Rule::FailedErase) {
            return Ok(done?);
        }
        for (page, (saved, before)) in singles.into_iter().flatten().zip(saved) {
            let snapshot = snapshots.iter().find(|(of, _)| *of == page).map(|(_, slot)| slot.clone());
            let part = within(page);
            if done.is_err() {
                snapshot.iter().for_each(SlotRef::retire);
                self.may_be_erased(backing, page, part, saved, before.as_deref());
                continue;
            }
            // The kernel's copy gets the same zeros, with the reply. Until then the page waits for INVAL.
            let twin = self.entries.get(&page).and_then(|entry| entry.twin.as_ref());
            if let Some(twin) = twin
                && keep(Rule::TruncateTwin)
            {
                twin.slot.write(part.start, &ZEROS[part]);
            }
            match snapshot {
                Some(slot) => {
                    self.advance(page, Source::Slot(slot), version, saved);
                    self.set_overwritten(page..page + 1, version);
                    self.tidy(page);
                }
                None => self.now_in_backing(page, true, saved),
            }
        }
        let clock = self.tick();
        for run in plain {
            let in_slots = if done.is_err() { self.dirty_runs(run.clone()) } else { Vec::new() };
            for run in without(&[run], &in_slots) {
                self.run_in_backing(run, clock);
            }
            for run in in_slots {
                self.set_overwritten(run, clock);
            }
        }
        Ok(done?)
    }

    /// Head of a page, if it is in a slot, with zeros in this part, in another slot; `None`: head is in the backing file.
    fn erased_snapshot(&mut self, backing: &dyn Backing, page: u64, part: Range<usize>) -> Result<Option<SlotRef>> {
        let Source::Slot(head) = self.head(page) else { return Ok(None) };
        // Beyond the user's share too: the slot that it replaces is free at once.
        match head.allocate_another().or_else(|_| self.slots.stage().map(|staged| staged.0)) {
            Ok(slot) => {
                let mut bytes = ZEROS;
                head.read(&mut bytes);
                bytes[part].fill(0);
                slot.write(0, &bytes);
                Ok(Some(slot))
            }
            Err(Error::NoSpace) => self.write_out(backing, &[page]).map(|()| None),
            Err(error) => Err(error),
        }
    }

    /// Pages of a range that are changed when they are erased. `edges`: those of which a part stays.
    fn touched(&mut self, backing: &dyn Backing, pages: Range<u64>, edges: Vec<Range<u64>>) -> Result<Touched> {
        // Copies of pages past the end are zeros, and stay so.
        let inside = pages.start..pages.end.min(backing.size()?.div_ceil(PAGE as u64));
        let mut touched: Vec<Range<u64>> = self.owners.values().flat_map(|o| o.copied_runs(inside.clone())).collect();
        touched.extend(self.in_runs(pages.clone(), |_| true));
        let mut kept = edges;
        for (page, entry) in self.entries.range(pages.clone()) {
            add_page(&mut touched, *page);
            if entry.twin.is_some() || !entry.old.is_empty() {
                add_page(&mut kept, *page);
            }
        }
        let touched = union(touched);
        let mut bases = common(&touched, &self.bases(&pages));
        // A base that is a hole takes no copy, but an entry.
        if length(&bases) > (self.slots.most_copies() as u64).max(MAX_BASES) {
            self.lose_owners_with_bases(&pages);
            bases.clear();
        }
        kept.extend(bases);
        let singles = common(&touched, &union(kept));
        Ok(Touched { plain: without(&touched, &singles), singles })
    }

    /// Pages of a range that are open, as runs.
    pub(crate) fn bases(&self, pages: &Range<u64>) -> Vec<Range<u64>> {
        let runs = self.owners.values().flat_map(|owner| owner.runs(pages.clone()));
        union(runs.filter(|(_, replica)| replica.base().is_some()).map(|(run, _)| run).collect())
    }

    /// Some of these bytes of a page may be zeros in the backing file now, and the kernel's copy, if there is one, has got
    /// none of them. `before`: what they were, if the page has a twin and its head is there, and that was read.
    fn may_be_erased(
        &mut self,
        backing: &dyn Backing,
        page: u64,
        bytes: Range<usize>,
        saved: Option<Source>,
        before: Option<&PageBytes>,
    ) {
        let clock = self.clock + 1;
        if let Some(entry) = self.entries.get_mut(&page).filter(|entry| matches!(entry.head, Source::Slot(_))) {
            // Head is what it was, but a client that reads the file gets no older version there.
            entry.overwritten = clock;
            self.tick();
            return;
        }
        let twin = self.entries.get(&page).and_then(|entry| entry.twin.as_ref());
        if let (Some(twin), Some(before), Ok(after)) = (twin, before, self.fetch(backing, page, &Source::Backing)) {
            for at in bytes.filter(|at| before[*at] != after[*at]) {
                twin.slot.write(at, &after[at..=at]);
            }
        }
        self.now_in_backing(page, true, saved);
    }
}
