//! Pages that an owner gets from the replica of another owner, instead of from the file or the state memory.
//!
//! ```text
//!   open_from   a run that another owner has as head, without stores ──> Fill { peer: that owner, its losses, the clock }
//!   client      copies from one replica to the other; or does not, for whatever reason
//!   filled_from the owner has no later version, no stores, no more losses ──> valid or open, as any other fill
//!               else, and what was not copied (not_filled) ──────────> fetched again, from elsewhere
//! ```
//!
//! The copy is the version that was head when it was planned, as one from a slot is: an owner's bytes are a version while
//! it is valid. What the owner did in between shows in its word, since each thing that changes its bytes changes that:
//! - stores are released (a later stamp), dropped, or not over yet (open). Stores of an epoch that has begun and ended
//!   while the copy was made are excluded by the client, which copies pages in no epoch, and lets none begin meanwhile;
//! - a page that was dropped and fetched again may have the same stamp: so an owner counts what it has lost.

use std::ops::Range;

use crate::epoch::Fill;
use crate::error::{Error, Result};
use crate::file::{FilePages, OwnerId};
use crate::owner::{Owner, Replica};
use crate::peer_copy::{PeerCopy, Peers};
use crate::rules::{Rule, keep};
use crate::source::Source;

impl FilePages {
    /// Plans to fetch pages, from one of the peers where it has them.
    pub(crate) fn plan_fetch(
        &mut self,
        fills: &mut Vec<Fill>,
        owner: OwnerId,
        pages: Range<u64>,
        writing: bool,
        peers: Peers<'_>,
    ) {
        let Some((peer, rest)) = peers.owners.split_first() else {
            return self.plan_fills(fills, owner, pages, writing);
        };
        let rest = Peers { owners: rest, ..peers };
        let mut start = pages.start;
        for (run, copy) in self.copies_of(*peer, owner, pages.clone(), peers.least) {
            self.plan_fetch(fills, owner, start..run.start, writing, rest);
            start = run.end;
            let version = self.clock;
            self.set_replicas(owner, run.clone(), Replica::Filling { stamp: version, writing, backing: false });
            let (source, base) = (Source::Backing, None);
            fills.push(Fill { pages: run, version, source, base, fetch: true, peer: Some(copy) });
        }
        self.plan_fetch(fills, owner, start..pages.end, writing, rest);
    }

    /// Runs of at least so many pages of which a peer has head, and no stores.
    fn copies_of(&self, peer: OwnerId, owner: OwnerId, pages: Range<u64>, least: u64) -> Vec<(Range<u64>, PeerCopy)> {
        let Some(its) = self.owners.get(&peer).filter(|_| peer != owner) else { return Vec::new() };
        let copy = PeerCopy { owner: peer, planned: self.clock, losses: its.losses() };
        let mut found: Vec<Range<u64>> = Vec::new();
        for (run, replica) in its.runs(pages) {
            let Replica::Valid(stamp) = replica else { continue };
            let stale = if keep(Rule::PeerCurrent) { self.stale(run.clone(), stamp) } else { Vec::new() };
            let mut start = run.start;
            for stale in stale.into_iter().chain(std::iter::once(run.end..run.end)) {
                match found.last_mut() {
                    Some(last) if last.end == start => last.end = stale.start,
                    _ => found.push(start..stale.start),
                }
                start = stale.end;
            }
        }
        found.retain(|run| !run.is_empty() && run.end - run.start >= least);
        found.into_iter().map(|run| (run, copy)).collect()
    }

    /// [`FilePages::filled`] of pages that were copied from a peer. Returns those to fetch again, because the peer may have
    /// had other bytes.
    pub fn filled_from(&mut self, owner: OwnerId, pages: Range<u64>, copy: PeerCopy) -> Result<Vec<Fill>> {
        self.owners.get(&owner).ok_or(Error::NotOpen)?;
        let is_known = |peer: &&Owner| peer.losses() == copy.losses || !keep(Rule::CountLosses);
        let kept: Vec<Range<u64>> = match self.owners.get(&copy.owner).filter(is_known) {
            Some(peer) => {
                let is_same = |replica| matches!(replica, Replica::Valid(stamp) if stamp <= copy.planned);
                peer.runs(pages.clone()).filter(|(_, replica)| is_same(*replica)).map(|(run, _)| run).collect()
            }
            None => Vec::new(),
        };
        let kept = if keep(Rule::CheckPeer) { kept } else { vec![pages.clone()] };
        let (mut again, mut start) = (Vec::new(), pages.start);
        for run in kept {
            again.extend(self.not_filled(owner, start..run.start)?);
            start = run.end;
            let count = run.end - run.start;
            again.extend(self.filled(owner, run)?);
            if let Some(owner) = self.owners.get_mut(&owner) {
                owner.count_from_peers(count);
            }
        }
        again.extend(self.not_filled(owner, start..pages.end)?);
        Ok(again)
    }

    /// The client has not got the bytes of these pages, of those that it was to fetch: lists them again, from no peer.
    pub fn not_filled(&mut self, owner: OwnerId, pages: Range<u64>) -> Result<Vec<Fill>> {
        self.owners.get(&owner).ok_or(Error::NotOpen)?;
        let mut again = Vec::new();
        for (run, replica) in self.replicas(owner, pages) {
            if let Replica::Filling { writing, .. } = replica {
                self.plan_fills(&mut again, owner, run.clone(), writing);
                self.tidy_all(run, true);
            }
        }
        Ok(again)
    }

    /// Pages that an owner has got from peers.
    pub fn pages_from_peers(&self, owner: OwnerId) -> u64 {
        self.owners.get(&owner).map_or(0, Owner::copied_from_peers)
    }
}
