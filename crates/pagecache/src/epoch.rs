//! Owners: acquire, and the end of an epoch without a commit.

use std::ops::Range;

use crate::entry_run::EntryRun;
use crate::error::{Error, Result};
use crate::file::{Backing, Entry, FilePages, OwnerId, add_page};
use crate::messages::Access;
use crate::owner::{Owner, Replica};
use crate::peer_copy::{PeerCopy, Peers};
use crate::rules::{Rule, keep};
use crate::runs::union;
use crate::source::{Copied, Source};

/// Pages that the client must fetch.
#[derive(Clone, Debug)]
pub struct Fill {
    /// One page, unless the bytes are in the backing file or in slots side by side.
    pub pages: Range<u64>,
    /// Names the version in messages.
    pub version: u64,
    /// Where its bytes are. The client may read those in the backing file itself.
    pub source: Source,
    /// For a page with stores that are not released: the bytes of its base, never in the backing file. Where the
    /// replica equals the base, the client replaces it by `source`; the other bytes are its own stores, and stay. It
    /// takes the fingerprint of `source`. Such a page is open at once; [`FilePages::filled`] ignores it.
    pub base: Option<Source>,
    /// False: the client fetches nothing. The bytes of the replica stay, and all of them are its own stores.
    pub fetch: bool,
    /// The client copies the pages from this owner's replica, and [`FilePages::filled_from`] checks them. If it does not,
    /// it says so by [`FilePages::not_filled`]; `source` is of no use.
    pub peer: Option<PeerCopy>,
}

impl Fill {
    /// Splits off the first pages, at most so many.
    pub fn split_to(&mut self, most: u64) -> Fill {
        let end = self.pages.end.min(self.pages.start + most);
        let first = Fill { pages: self.pages.start..end, ..self.clone() };
        self.source.skip(end - self.pages.start);
        self.pages.start = end;
        first
    }
}

/// What becomes of open pages that were not committed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// The scan found no store in them.
    Unchanged,
    /// They may have stores, which no reader will see: the pages are fetched again.
    Abandoned,
}

impl FilePages {
    /// Adds a write replica of these pages, which has none of them yet.
    pub fn add_owner(&mut self, owner: OwnerId, pages: Range<u64>) {
        self.owners.insert(owner, Owner::new(pages));
    }

    /// Whether the owner is known. One whose bases need more memory than [`crate::Slots::limit_copies`] allows is forgotten: its
    /// epochs are lost, as after a restart.
    pub fn is_owner(&self, owner: OwnerId) -> bool {
        self.owners.contains_key(&owner)
    }

    /// Forgets a replica: unmapped, or its client died. What it did not release is lost.
    pub fn drop_owner(&mut self, owner: OwnerId) {
        if let Some(gone) = self.owners.remove(&owner) {
            // Changes of its pages are not counted from now on: it must not take its copies for head.
            self.tick();
            self.tidy_all(gone.pages(), true);
        }
    }

    /// Acquire, after the client has flushed what the CPU stored: begins an epoch, and lists the pages to fetch.
    ///
    /// Pages of the list without a base count only after [`FilePages::filled`].
    pub fn open(
        &mut self,
        backing: &dyn Backing,
        owner: OwnerId,
        pages: Range<u64>,
        access: Access,
    ) -> Result<Vec<Fill>> {
        self.open_from(backing, owner, pages, access, Peers::default())
    }

    /// [`FilePages::open`]; pages that one of the peers has are fetched from it.
    pub fn open_from(
        &mut self,
        backing: &dyn Backing,
        owner: OwnerId,
        pages: Range<u64>,
        access: Access,
        peers: Peers<'_>,
    ) -> Result<Vec<Fill>> {
        let range = self.owners.get(&owner).ok_or(Error::NotOpen)?.pages();
        if pages.start < range.start || pages.end > range.end {
            return Err(Error::NotOpen);
        }
        let mut fills = Vec::new();
        for (run, replica) in self.replicas(owner, pages) {
            match replica {
                Replica::Valid(stamp) | Replica::Open(stamp) => {
                    let mut current = run.start;
                    for stale in self.stale(run.clone(), stamp) {
                        self.keep_copies(owner, current..stale.start, replica, access);
                        current = stale.end;
                        if let Replica::Open(_) = replica {
                            for page in stale {
                                let fill = self.patch(backing, owner, page, stamp)?;
                                fills.push(fill);
                            }
                        } else {
                            self.plan_fetch(&mut fills, owner, stale, access == Access::Write, peers);
                        }
                    }
                    self.keep_copies(owner, current..run.end, replica, access);
                }
                Replica::Absent => self.plan_fetch(&mut fills, owner, run, access == Access::Write, peers),
                Replica::Filling { writing, .. } => {
                    self.plan_fetch(&mut fills, owner, run, writing || access == Access::Write, peers);
                }
            }
        }
        Ok(fills)
    }

    /// Acquire for writing of pages that the client will overwrite: as [`FilePages::open`], but nothing is fetched.
    /// Pages of the list are open at once, and have to be committed whatever the client has there.
    pub fn open_overwritten(&mut self, owner: OwnerId, pages: Range<u64>) -> Result<Vec<Fill>> {
        let range = self.owners.get(&owner).ok_or(Error::NotOpen)?.pages();
        if pages.start < range.start || pages.end > range.end {
            return Err(Error::NotOpen);
        }
        let mut fills = Vec::new();
        for (run, replica) in self.replicas(owner, pages) {
            match replica {
                Replica::Open(_) => {}
                Replica::Valid(stamp) => {
                    let mut current = run.start;
                    for stale in self.stale(run.clone(), stamp) {
                        self.keep_copies(owner, current..stale.start, replica, Access::Write);
                        current = stale.end;
                        self.open_unfetched(&mut fills, owner, stale);
                    }
                    self.keep_copies(owner, current..run.end, replica, Access::Write);
                }
                Replica::Absent | Replica::Filling { .. } => self.open_unfetched(&mut fills, owner, run),
            }
        }
        Ok(fills)
    }

    /// The base of these pages is head: of a page that no other writer changes meanwhile, all bytes count.
    fn open_unfetched(&mut self, fills: &mut Vec<Fill>, owner: OwnerId, pages: Range<u64>) {
        let version = self.clock;
        self.set_replicas(owner, pages.clone(), Replica::Open(version));
        match fills.last_mut() {
            Some(last) if last.pages.end == pages.start => last.pages.end = pages.end,
            _ => fills.push(Fill { pages, version, source: Source::Backing, base: None, fetch: false, peer: None }),
        }
    }

    /// Where a part of these pages ends whose [`FilePages::open_from`] takes about `most` steps for each owner that is
    /// looked at: runs of pages of which the owner has the same, and pages with an entry.
    pub fn part(&self, owners: impl Iterator<Item = OwnerId>, pages: Range<u64>, most: usize) -> u64 {
        let entry = self.entries.range(pages.clone()).nth(most).map_or(pages.end, |(page, _)| *page);
        // Their slots are held until the client has their bytes.
        let in_slots = self.in_runs(pages.start..entry, |run| run.head.is_some());
        let entry = in_slots.first().map_or(entry, |run| entry.min(run.start + most as u64));
        let end_of = |owner: &Owner| owner.runs(pages.start..entry).nth(most).map_or(entry, |(run, _)| run.start);
        owners.filter_map(|owner| self.owners.get(&owner)).map(end_of).min().unwrap_or(entry)
    }

    /// Copies that are head.
    fn keep_copies(&mut self, owner: OwnerId, pages: Range<u64>, replica: Replica, access: Access) {
        if let (Replica::Valid(stamp), Access::Write) = (replica, access) {
            self.set_replicas(owner, pages, Replica::Open(stamp));
        }
    }

    /// Pages of which a copy with this stamp is not head, as runs.
    pub(crate) fn stale(&self, pages: Range<u64>, stamp: u64) -> Vec<Range<u64>> {
        // A page without an entry has not changed.
        self.where_entries(pages, |entry| entry.version > stamp, |run| run.version > stamp)
    }

    /// Pages with an entry of which this is true, or in a run of which it is, as runs in ascending order.
    fn where_entries(
        &self,
        pages: Range<u64>,
        is_entry: impl Fn(&Entry) -> bool,
        is_run: impl Fn(&EntryRun) -> bool,
    ) -> Vec<Range<u64>> {
        let mut found = Vec::new();
        let entries = self.entries.range(pages.clone()).filter(|(_, entry)| is_entry(entry));
        entries.for_each(|(page, _)| add_page(&mut found, *page));
        let of_runs = self.in_runs(pages, is_run);
        if of_runs.is_empty() {
            return found;
        }
        found.extend(of_runs);
        // Neighbours of other versions are one run: what is too short is not fetched from a peer.
        union(found)
    }

    /// Plans to fetch pages. Those without an entry are in the backing file.
    pub(crate) fn plan_fills(&mut self, fills: &mut Vec<Fill>, owner: OwnerId, pages: Range<u64>, writing: bool) {
        let in_runs: u64 = self.in_runs(pages.clone(), |_| true).into_iter().map(|run| run.end - run.start).sum();
        let of_entries = self.entries.range(pages.clone());
        let changed = of_entries.clone().filter(|(_, entry)| entry.version != 0).count();
        self.counters.refreshed += in_runs + changed as u64;
        let mut known: Vec<(Range<u64>, Source)> =
            of_entries.map(|(page, entry)| (*page..page + 1, entry.head.clone())).collect();
        let in_slots = self.hold_runs(&pages);
        if !in_slots.is_empty() {
            known.extend(in_slots);
            known.sort_unstable_by_key(|(run, _)| run.start);
        }
        let mut start = pages.start;
        for (run, source) in known {
            self.plan_fill(fills, owner, start..run.start, Source::Backing, writing);
            start = run.end;
            self.plan_fill(fills, owner, run, source, writing);
        }
        self.plan_fill(fills, owner, start..pages.end, Source::Backing, writing);
    }

    /// The source is the same for all.
    fn plan_fill(&mut self, fills: &mut Vec<Fill>, owner: OwnerId, pages: Range<u64>, source: Source, writing: bool) {
        if pages.is_empty() {
            return;
        }
        let (version, backing) = (self.clock, matches!(source, Source::Backing));
        self.set_replicas(owner, pages.clone(), Replica::Filling { stamp: version, writing, backing });
        match fills.last_mut() {
            Some(last)
                if backing
                    && last.peer.is_none()
                    && matches!(last.source, Source::Backing)
                    && (last.pages.end, last.version) == (pages.start, version) =>
            {
                last.pages.end = pages.end;
            }
            _ => fills.push(Fill { pages, version, source, base: None, fetch: true, peer: None }),
        }
    }

    /// A page with stores that are not released, and head is newer.
    fn patch(&mut self, backing: &dyn Backing, owner: OwnerId, page: u64, stamp: u64) -> Result<Fill> {
        let base = self.base(page, stamp).ok_or(Error::NotOpen)?;
        let base = self.in_memory(backing, page, base)?;
        let source = self.in_memory(backing, page, self.head(page))?;
        let version = self.clock;
        self.counters.refreshed += 1;
        if keep(Rule::BasePatched) {
            self.set_replica(owner, page, Replica::Open(version));
            self.tidy(page);
        }
        Ok(Fill { pages: page..page + 1, version, source, base: Some(base), fetch: true, peer: None })
    }

    fn in_memory(&self, backing: &dyn Backing, page: u64, source: Source) -> Result<Source> {
        match source {
            Source::Backing => Ok(Source::Memory(Copied::new(self.fetch(backing, page, &source)?))),
            source => Ok(source),
        }
    }

    /// The client has the bytes of these pages. Returns those to fetch again, because the backing file was written
    /// meanwhile; the others belong to the epoch.
    pub fn filled(&mut self, owner: OwnerId, pages: Range<u64>) -> Result<Vec<Fill>> {
        self.owners.get(&owner).ok_or(Error::NotOpen)?;
        let mut again = Vec::new();
        for (run, replica) in self.replicas(owner, pages) {
            let Replica::Filling { stamp, writing, backing } = replica else { continue };
            let overwritten = match backing && keep(Rule::CheckFill) {
                true => {
                    self.where_entries(run.clone(), |entry| entry.overwritten > stamp, |run| run.overwritten > stamp)
                }
                false => Vec::new(),
            };
            let replica = if writing { Replica::Open(stamp) } else { Replica::Valid(stamp) };
            let mut fetched = run.start;
            for pages in overwritten {
                self.set_replicas(owner, fetched..pages.start, replica);
                fetched = pages.end;
                self.plan_fills(&mut again, owner, pages.clone(), writing);
                self.tidy_all(pages, true);
            }
            self.set_replicas(owner, fetched..run.end, replica);
        }
        Ok(again)
    }

    /// Ends the epoch of pages that were not committed.
    ///
    /// A release calls this with all its pages and [`Ended::Unchanged`] before it replies. [`Error::Busy`]: another
    /// release of one of them is not invalidated yet. This owner may have seen it, and the CPU must not see less once
    /// this release has returned: the caller waits for the other one and calls again.
    pub fn end_epoch(&mut self, owner: OwnerId, pages: Range<u64>, ended: Ended) -> Result<()> {
        self.owners.get(&owner).ok_or(Error::NotOpen)?;
        let mut entries = self.entries.range(pages.clone());
        let waits = ended == Ended::Unchanged && keep(Rule::WaitForOthers);
        if waits && entries.any(|(_, entry)| entry.twin.is_some()) {
            return Err(Error::Busy);
        }
        for (run, replica) in self.replicas(owner, pages) {
            let after = match replica {
                Replica::Open(stamp) if ended == Ended::Unchanged => Replica::Valid(stamp),
                Replica::Open(stamp) if !keep(Rule::FetchAbandoned) => Replica::Valid(stamp),
                Replica::Open(_) | Replica::Filling { .. } => Replica::Absent,
                _ => continue,
            };
            self.set_replicas(owner, run.clone(), after);
            self.tidy_all(run, after == Replica::Absent);
        }
        Ok(())
    }

    /// Forgets the owner's copies of pages that are not open: they are fetched again. Open pages stay as they are.
    pub fn drop_copies(&mut self, owner: OwnerId, pages: Range<u64>) -> Result<()> {
        self.owners.get(&owner).ok_or(Error::NotOpen)?;
        for (run, replica) in self.replicas(owner, pages) {
            if let Replica::Valid(_) = replica {
                self.set_replicas(owner, run.clone(), Replica::Absent);
                self.tidy_all(run, true);
            }
        }
        Ok(())
    }

    /// What the owner has of these pages, now.
    pub(crate) fn replicas(&self, owner: OwnerId, pages: Range<u64>) -> Vec<(Range<u64>, Replica)> {
        self.owners.get(&owner).map_or_else(Vec::new, |owner| owner.runs(pages).collect())
    }

    /// Tidies pages of which an owner has another replica than before. `absent`: it has none now; else their entries stay.
    pub(crate) fn tidy_all(&mut self, pages: Range<u64>, absent: bool) {
        // Of a release most pages have an entry to which nothing can happen: no search for each.
        let entries = self.entries.range(pages.clone());
        let untidy = entries.filter(|(_, entry)| !entry.old.is_empty() || absent && entry.is_clean());
        let untidy: Vec<u64> = untidy.map(|(page, _)| *page).collect();
        untidy.into_iter().for_each(|page| self.tidy(page));
        if absent {
            self.tidy_runs(pages);
        }
    }

    pub(crate) fn set_replica(&mut self, owner: OwnerId, page: u64, replica: Replica) {
        self.set_replicas(owner, page..page + 1, replica);
    }

    pub(crate) fn set_replicas(&mut self, owner: OwnerId, pages: Range<u64>, replica: Replica) {
        if let Some(owner) = self.owners.get_mut(&owner) {
            owner.set(pages, replica);
        }
    }
}
