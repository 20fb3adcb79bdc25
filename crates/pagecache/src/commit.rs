//! Release: commit, and what follows when INVAL has returned.

use std::ops::Range;
use std::sync::Arc;

use crate::entry_runs::Which;
use crate::error::{Error, Result};
use crate::file::{Backing, CpuTwin, Entry, FilePages, OwnerId, add_page, is_base};
use crate::layout::{Kind, Label, Tag};
use crate::lookup::{Lookup, Members, Replicas};
use crate::owner::Replica;
use crate::page::{PAGE, PageBytes, ZEROS, bytes_inside, merge};
use crate::rules::{Rule, keep};
use crate::slot_run::SlotRun;
use crate::slots::{Release, SlotRef, Slots, StagedPage};
use crate::source::Source;

/// A release that was committed.
#[derive(Debug)]
pub struct Commit {
    /// Given to [`FilePages::invalidated`] after INVAL of `invalidate` has returned.
    pub release: Release,
    /// Pages that the kernel may have: INVAL them, without the file's lock.
    pub invalidate: Vec<Range<u64>>,
    /// Pages whose replica is not head: the client fetches them at its next acquire, by [`FilePages::open`].
    pub merged: Vec<Range<u64>>,
    /// Pages with a new version.
    pub published: u64,
}

/// A page that will be committed.
struct Change {
    page: u64,
    /// The new head, and the kernel's twin.
    slots: Option<(SlotRef, Option<SlotRef>)>,
    /// The replica equals head afterwards.
    same: bool,
}

/// What the table says of a page before the commit.
#[derive(Clone, Copy)]
struct Known {
    /// Of the owner's copy.
    stamp: u64,
    /// Bytes before the end of the file.
    inside: usize,
    has_twin: bool,
    /// The kernel may have it.
    cached: bool,
    /// What the owner has is head, but for its own stores.
    current: bool,
}

/// Copies of a page, for one page after the other: arrays that are moved would be copied each time.
struct Copies {
    /// What was staged, then what will be published.
    new: PageBytes,
    head: PageBytes,
    base: PageBytes,
    merged: PageBytes,
}

/// A release before its commit. Dropped, it leaves nothing.
struct Draft {
    slots: Arc<Slots>,
    release: Release,
    file: u64,
    version: u64,
    changes: Vec<Change>,
    committed: bool,
}

impl Draft {
    /// In a slot of the user whose page was staged.
    fn slot(&self, kind: Kind, page: u64, staged: &StagedPage, bytes: &PageBytes) -> Result<SlotRef> {
        let slot = staged.0.allocate_another()?;
        slot.write(0, bytes);
        Ok(self.publish(kind, page, slot))
    }

    fn publish(&self, kind: Kind, page: u64, slot: SlotRef) -> SlotRef {
        let record = Some((self.release.record, self.release.sequence));
        slot.publish(Tag { kind, record }, Label { file: self.file, page, count: 1, version: self.version });
        slot
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.committed {
            for (snapshot, twin) in self.changes.iter().filter_map(|change| change.slots.as_ref()) {
                snapshot.retire();
                twin.iter().for_each(SlotRef::retire);
            }
            self.slots.abort(self.release);
        }
    }
}

impl FilePages {
    /// Publishes pages that the owner changed, in ascending order, and ends their epoch: all of them, or none if this
    /// fails.
    ///
    /// `id` is the client's, for [`Slots::was_committed`].
    pub fn commit<'a>(
        &mut self,
        backing: &dyn Backing,
        owner: OwnerId,
        id: u64,
        pages: impl IntoIterator<Item = (u64, &'a PageBytes)>,
    ) -> Result<Commit> {
        let stage = |(page, bytes)| {
            let staged = self.slots.stage()?;
            staged.write(bytes);
            Ok((page, staged))
        };
        let pages = pages.into_iter().map(stage).collect::<Result<Vec<_>>>()?;
        self.commit_staged(backing, owner, id, &pages)
    }

    /// [`FilePages::commit`] of pages whose bytes are in slots already. If it fails the pages are as they were, for
    /// another attempt.
    pub fn commit_staged(
        &mut self,
        backing: &dyn Backing,
        owner: OwnerId,
        id: u64,
        pages: &[(u64, StagedPage)],
    ) -> Result<Commit> {
        self.commit_slots(backing, owner, id, pages)
    }

    fn commit_slots(
        &mut self,
        backing: &dyn Backing,
        owner: OwnerId,
        id: u64,
        pages: &[(u64, StagedPage)],
    ) -> Result<Commit> {
        let size = backing.size()?;
        let mut rest = pages;
        while let Some((first, _)) = rest.first() {
            let len = rest.iter().zip(*first..).take_while(|((page, _), expected)| page == expected).count();
            self.divide(*first..*first + len as u64, Which::All);
            rest = &rest[len..];
        }
        let mut draft = Draft {
            release: self.slots.begin(id, self.file)?,
            slots: Arc::clone(&self.slots),
            file: self.file,
            version: self.clock + 1,
            changes: Vec::new(),
            committed: false,
        };
        draft.changes.reserve(pages.len());
        let mut counters = self.counters;
        let (mut entries, mut cached) = (Lookup::new(&self.entries), Members::new(&self.cached));
        let mut replicas = Replicas::new(self.owners.get(&owner));
        let mut copies = Copies { new: ZEROS, head: ZEROS, base: ZEROS, merged: ZEROS };
        for (page, staged) in pages {
            let page = *page;
            let in_order = draft.changes.last().is_none_or(|last| last.page < page);
            let Replica::Open(stamp) = replicas.get(page) else { return Err(Error::NotOpen) };
            if !in_order {
                return Err(Error::NotOpen);
            }
            let entry = entries.get(page);
            let known = Known {
                stamp,
                inside: bytes_inside(page, size),
                has_twin: entry.is_some_and(|entry| entry.twin.is_some()),
                cached: cached.contains(page),
                current: entry.is_none_or(|entry| entry.version <= stamp),
            };
            let change = self.prepare(backing, &draft, page, staged, known, &mut copies)?;
            match &change.slots {
                Some((_, twin)) => {
                    counters.published += 1;
                    counters.twins += u64::from(twin.is_some());
                }
                None => counters.unchanged += u64::from(change.same),
            }
            counters.merged += u64::from(!known.current);
            draft.changes.push(change);
        }
        counters.commits += 1;
        self.counters = counters;
        self.slots.commit(draft.release);
        draft.committed = true;
        self.clock = draft.version;
        Ok(self.apply(owner, &mut draft))
    }

    /// Writes the slots of one page. Nothing counts before the record is committed.
    fn prepare(
        &self,
        backing: &dyn Backing,
        draft: &Draft,
        page: u64,
        staged: &StagedPage,
        known: Known,
        copies: &mut Copies,
    ) -> Result<Change> {
        let Known { stamp, inside, has_twin, cached, current } = known;
        if has_twin && keep(Rule::OneRelease) {
            return Err(Error::Busy);
        }
        if inside == 0 {
            return Ok(Change { page, slots: None, same: false });
        }
        if !cached && current && inside == PAGE {
            // Most pages are whole, and nothing else has changed them: their bytes are not looked at.
            let snapshot = draft.publish(Kind::Snapshot, page, staged.0.clone());
            return Ok(Change { page, slots: Some((snapshot, None)), same: true });
        }
        let Copies { new, head, base, merged } = copies;
        let (mut new, mut merged) = (new, merged);
        staged.0.read(new);
        // Whether what was staged is what will be published.
        let mut as_staged = new[inside..].iter().all(|byte| *byte == 0);
        new[inside..].fill(0);
        let mut same = as_staged;
        let has_head = cached || !current;
        if has_head {
            self.fetch_into(backing, page, &self.head(page), head)?;
        }
        if !current {
            let source = self.base(page, stamp).ok_or(Error::NotOpen)?;
            self.fetch_into(backing, page, &source, base)?;
            merged.copy_from_slice(head);
            merge(merged, base, new);
            if merged != new {
                as_staged = false;
                same &= !keep(Rule::FetchMerged);
                std::mem::swap(&mut merged, &mut new);
            }
        }
        if has_head && head == new {
            return Ok(Change { page, slots: None, same });
        }
        // What was staged stays as it is: a commit that fails may be tried again, with another head.
        let snapshot = match as_staged {
            true => draft.publish(Kind::Snapshot, page, staged.0.clone()),
            false => draft.slot(Kind::Snapshot, page, staged, new)?,
        };
        let mut slots = (snapshot, None);
        if cached && keep(Rule::CpuTwin) {
            match draft.slot(Kind::Twin, page, staged, head) {
                Ok(twin) => slots.1 = Some(twin),
                Err(error) => {
                    slots.0.retire();
                    return Err(error);
                }
            }
        }
        Ok(Change { page, slots: Some(slots), same })
    }

    /// The release is committed: brings the table up to date. Cannot fail.
    fn apply(&mut self, owner: OwnerId, draft: &mut Draft) -> Commit {
        let (release, version) = (draft.release, draft.version);
        let mut commit = Commit { release, invalidate: Vec::new(), merged: Vec::new(), published: 0 };
        let changes = std::mem::take(&mut draft.changes);
        self.end_epochs(owner, version, &changes);
        let (mut pages, mut untidy, mut cached) = (Vec::new(), Vec::new(), Members::new(&self.cached));
        for Change { page, slots, same } in &changes {
            if !same {
                add_page(&mut commit.merged, *page);
            }
            if slots.is_none() {
                untidy.push(*page);
                continue;
            }
            commit.published += 1;
            add_page(&mut pages, *page);
            if cached.contains(*page) {
                add_page(&mut commit.invalidate, *page);
            }
        }
        commit.invalidate.iter().for_each(|run| self.cached.remove_all(run.clone()));
        let mut heads = changes.into_iter().filter_map(|change| Some((change.page, change.slots?)));
        let mut absent = Vec::new();
        for run in &pages {
            let mut entries = self.entries.range_mut(run.clone()).peekable();
            for (page, (snapshot, twin)) in heads.by_ref().take((run.end - run.start) as usize) {
                let mut new = None;
                let entry = match entries.next_if(|(at, _)| **at == page) {
                    Some((_, entry)) => entry,
                    None => new.insert(Entry::new()),
                };
                let is_base = is_base(&self.owners, page, entry.version..version);
                entry.advance(Source::Slot(snapshot), version, is_base, None);
                entry.drop_twin();
                entry.twin = twin.map(|slot| CpuTwin { slot, release, again: false });
                if !keep(Rule::TwinUntilInvalidated) {
                    entry.drop_twin();
                }
                // Others have a snapshot, and nothing that could be dropped.
                if !entry.old.is_empty() {
                    untidy.push(page);
                }
                absent.extend(new.map(|entry| (page, entry)));
            }
        }
        // To build a table of many takes less time than to search for the place of each.
        match absent.len() > self.entries.len() / 4 {
            true => self.entries.append(&mut absent.into_iter().collect()),
            false => self.entries.extend(absent),
        }
        untidy.into_iter().for_each(|page| self.tidy(page));
        self.releases.insert(release, pages);
        commit
    }

    /// What the owner has of the pages afterwards.
    fn end_epochs(&mut self, owner: OwnerId, version: u64, changes: &[Change]) {
        let mut rest = changes;
        while let Some(first) = rest.first() {
            let next = rest.iter().zip(first.page..);
            let len = next.take_while(|(change, page)| change.page == *page && change.same == first.same).count();
            let replica = if first.same { Replica::Valid(version) } else { Replica::Absent };
            self.set_replicas(owner, first.page..first.page + len as u64, replica);
            rest = &rest[len..];
        }
    }

    /// INVAL of a release's pages has returned. Returns pages that must be invalidated again, after which this is
    /// called again; once there are none, the release is over.
    pub fn invalidated(&mut self, release: Release) -> Vec<Range<u64>> {
        let mut again = Vec::new();
        let Some(runs) = self.releases.get(&release) else { return again };
        for run in runs {
            for (page, entry) in self.entries.range_mut(run.clone()) {
                match &mut entry.twin {
                    Some(twin) if twin.release == release && twin.again => {
                        twin.again = false;
                        add_page(&mut again, *page);
                    }
                    Some(twin) if twin.release == release => entry.drop_twin(),
                    _ => {}
                }
            }
        }
        if again.is_empty() {
            self.settle(release);
        }
        again
    }

    /// Detaches the snapshots from the record, which is then free to be used again.
    fn settle(&mut self, release: Release) {
        let (record, mut untidy) = (Some((release.record, release.sequence)), Vec::new());
        for run in self.releases.remove(&release).unwrap_or_default() {
            for (page, entry) in self.entries.range(run.clone()) {
                let slot = match &entry.head {
                    Source::Slot(slot) => Some(slot),
                    _ => None,
                };
                if let Some(slot) = slot.filter(|slot| slot.tag().and_then(|tag| tag.record) == record) {
                    slot.set_tag(Tag { kind: Kind::Snapshot, record: None });
                }
                if slot.is_none() || !entry.old.is_empty() {
                    untidy.push(*page);
                }
            }
            let in_slots = self.runs_at(run).filter_map(|(_, run)| run.head.as_ref());
            in_slots.filter(|slots| slots.tag().and_then(|tag| tag.record) == record).for_each(SlotRun::settle);
        }
        untidy.into_iter().for_each(|page| self.tidy(page));
        self.slots.done(release);
    }

    /// Releases that wait for INVAL, and their pages: after a restart the caller invalidates these.
    pub fn pending(&self) -> Vec<(Release, Vec<Range<u64>>)> {
        let waiting = |release: &Release, runs: &[Range<u64>]| {
            let mut waiting = Vec::new();
            for (page, entry) in runs.iter().flat_map(|run| self.entries.range(run.clone())) {
                if entry.twin.as_ref().is_some_and(|twin| twin.release == *release) {
                    add_page(&mut waiting, *page);
                }
            }
            waiting
        };
        self.releases.iter().map(|(release, runs)| (*release, waiting(release, runs))).collect()
    }
}
