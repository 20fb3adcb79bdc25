//! Owners: acquire, and the end of an epoch without a commit.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::file::{Backing, FilePages, OwnerId};
use crate::owner::{Owner, Replica};
use crate::rules::{Rule, keep};
use crate::source::{Copied, Source};

/// What an epoch does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Kernels load only.
    Read,
    /// Kernels load and store.
    Write,
}

/// Pages that the client must fetch.
#[derive(Debug)]
pub struct Fill {
    /// One page, unless the bytes are in the backing file.
    pub pages: Range<u64>,
    /// Names the version in messages.
    pub version: u64,
    /// Where its bytes are. The client may read those in the backing file itself.
    pub source: Source,
    /// For a page with stores that are not released: the bytes of its base, never in the backing file. Where the
    /// replica equals the base, the client replaces it by `source`; the other bytes are its own stores, and stay. It
    /// takes the fingerprint of `source`. Such a page is open at once; [`FilePages::filled`] ignores it.
    pub base: Option<Source>,
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
            let pages: Vec<u64> = self.entries.range(gone.pages()).map(|(page, _)| *page).collect();
            pages.into_iter().for_each(|page| self.tidy(page));
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
        let range = self.owners.get(&owner).ok_or(Error::NotOpen)?.pages();
        if pages.start < range.start || pages.end > range.end {
            return Err(Error::NotOpen);
        }
        let mut fills = Vec::new();
        for page in pages {
            match self.replica(owner, page) {
                Replica::Valid(stamp) if self.is_current(page, stamp) => {
                    if access == Access::Write {
                        self.set_replica(owner, page, Replica::Open(stamp));
                    }
                }
                Replica::Open(stamp) if self.is_current(page, stamp) => {}
                Replica::Open(stamp) => {
                    let fill = self.patch(backing, owner, page, stamp)?;
                    fills.push(fill);
                }
                Replica::Absent | Replica::Valid(_) => {
                    self.plan_fill(&mut fills, owner, page, access == Access::Write);
                }
                Replica::Filling { writing, .. } => {
                    self.plan_fill(&mut fills, owner, page, writing || access == Access::Write);
                }
            }
        }
        Ok(fills)
    }

    fn plan_fill(&mut self, fills: &mut Vec<Fill>, owner: OwnerId, page: u64, writing: bool) {
        let (version, source) = (self.clock, self.head(page));
        let backing = matches!(source, Source::Backing);
        self.counters.refreshed += u64::from(self.version(page) != 0);
        self.set_replica(owner, page, Replica::Filling { stamp: version, writing, backing });
        if let Some(last) = fills.last_mut()
            && backing
            && matches!(last.source, Source::Backing)
            && (last.pages.end, last.version) == (page, version)
        {
            last.pages.end += 1;
        } else {
            fills.push(Fill { pages: page..page + 1, version, source, base: None });
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
        Ok(Fill { pages: page..page + 1, version, source, base: Some(base) })
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
        for page in pages {
            let Replica::Filling { stamp, writing, backing } = self.replica(owner, page) else { continue };
            let overwritten = self.entries.get(&page).is_some_and(|entry| entry.overwritten > stamp);
            if backing && overwritten && keep(Rule::CheckFill) {
                self.plan_fill(&mut again, owner, page, writing);
                self.tidy(page);
            } else {
                let replica = if writing { Replica::Open(stamp) } else { Replica::Valid(stamp) };
                self.set_replica(owner, page, replica);
            }
        }
        Ok(again)
    }

    /// Ends the epoch of pages that were not committed.
    ///
    /// A release calls this with all its pages and [`Ended::Unchanged`] before it replies. [`Error::Busy`]: another
    /// release of one of them is not invalidated yet. This owner may have seen it, and the CPU must not see less once
    /// this release has returned: the caller waits for the other one and calls again.
    pub fn end_epoch(&mut self, owner: OwnerId, pages: Range<u64>, ended: Ended) -> Result<()> {
        let range = self.owners.get(&owner).ok_or(Error::NotOpen)?.pages();
        let mut entries = self.entries.range(pages.clone());
        let waits = ended == Ended::Unchanged && keep(Rule::WaitForOthers);
        if waits && entries.any(|(_, entry)| entry.twin.is_some()) {
            return Err(Error::Busy);
        }
        for page in pages.start.max(range.start)..pages.end.min(range.end) {
            let after = match self.replica(owner, page) {
                Replica::Open(stamp) if ended == Ended::Unchanged => Replica::Valid(stamp),
                Replica::Open(stamp) if !keep(Rule::FetchAbandoned) => Replica::Valid(stamp),
                Replica::Open(_) | Replica::Filling { .. } => Replica::Absent,
                _ => continue,
            };
            self.set_replica(owner, page, after);
            self.tidy(page);
        }
        Ok(())
    }

    /// Forgets the owner's copies of pages that are not open: they are fetched again. Open pages stay as they are.
    pub fn drop_copies(&mut self, owner: OwnerId, pages: Range<u64>) -> Result<()> {
        let range = self.owners.get(&owner).ok_or(Error::NotOpen)?.pages();
        for page in pages.start.max(range.start)..pages.end.min(range.end) {
            if matches!(self.replica(owner, page), Replica::Valid(_)) {
                self.set_replica(owner, page, Replica::Absent);
                self.tidy(page);
            }
        }
        Ok(())
    }

    pub(crate) fn replica(&self, owner: OwnerId, page: u64) -> Replica {
        self.owners.get(&owner).map_or(Replica::Absent, |owner| owner.get(page))
    }

    pub(crate) fn set_replica(&mut self, owner: OwnerId, page: u64, replica: Replica) {
        if let Some(owner) = self.owners.get_mut(&owner) {
            owner.set(page, replica);
        }
    }
}
