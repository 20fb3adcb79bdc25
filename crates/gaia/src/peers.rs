//! Pages that an acquire copies from another map of this process, on another device, instead of from the file.
//!
//! ```text
//!   acquire ── the owners of such maps ──> server ── fills: Source::Peer(one of them) ──┐ the version it has, now head
//!      ┌───────────────────────────────────────────────────────────────────────────────┘
//!      │ its state locked, its chunks held: pages in no epoch for writing, none evicted ── device copies over the link
//!      └ FilledBut { what was not copied } ──> server: has that owner still this version? else: fetch again, elsewhere
//! ```
//!
//! While its state is locked no call on the other map begins or ends an epoch, so no kernel stores to the pages; what
//! happened to them before or after that shows in the server's page table (`spinio_pagecache`, peers.rs). The state is only
//! tried: two maps that copy from each other at the same time take the file. Before, this thread waits for its stream,
//! which may wait for another stream, and that for a call on the other map; the copy itself waits for no stream of the
//! program.
//!
//! Both maps are of one process, so no byte crosses a boundary of trust: a map for writing gets what this process could
//! store there itself. Which map an owner is, this process knows, and the server's word alone never names memory.
//!
//! Known flaws: a map of the same device is no source, nor is one of another process. Calls in stream order do not copy, and
//! a map with such calls queued, or of which one has failed, is no source. Of several maps that copy from one at the same
//! time, one does; the others take the file.

use std::ops::Range;

use spinio_device::{DeviceAddr, PAGE_BYTES};
use spinio_host::lock;
use spinio_pagecache::leased_messages::PeerRefusal;
use spinio_pagecache::messages::{Fill, MAX_PEERS, MAX_RUNS, NO_PEERS, Peers, Run, Source as FillSource};

use crate::Result;
use crate::lane::Lane;
use crate::map::Map;
use crate::overlapped_copies::Destination;
use crate::sources::{self, Named};
use crate::state::{State, timed};

/// What an acquire has copied, and what the server is told about the rest.
#[derive(Default)]
pub(crate) struct Outcome {
    pub(crate) refused: Vec<Run>,
    copied: Vec<Run>,
}

impl Map {
    /// The maps that an acquire of these pages may copy from.
    pub(crate) fn peers_of(&self, state: &State, pages: &Range<usize>) -> Vec<Named> {
        let name = *lock(&state.name);
        let (Some(name), None) = (name, Lane::current()) else { return Vec::new() };
        if self.spec.is_in_place() || self.replica.device().peer_memory().is_none() {
            return Vec::new();
        }
        let first = self.spec.first;
        let pages = first + pages.start as u64..first + pages.end as u64;
        let mut named = sources::of_file(name.file, self.replica.device_id(), &pages);
        named.retain(|(_, source)| !state.inaccessible.contains(&source.device()));
        named.truncate(MAX_PEERS);
        named
    }

    /// Copies the fills of an acquire that other maps have, to some of these pages, and grants access to their chunks.
    pub(crate) fn copy_from_peers(
        &self,
        state: &mut State,
        fills: &[Fill],
        peers: &[Named],
        pages: &Range<usize>,
    ) -> Result<Outcome> {
        let mut outcome = Outcome::default();
        let of_peers = |fill: &&Fill| matches!(fill.source, FillSource::Peer(_));
        if !fills.iter().any(|fill| of_peers(&fill)) {
            return Ok(outcome);
        }
        let Some(memory) = self.replica.device().peer_memory() else {
            outcome.refused = joined(fills.iter().filter(of_peers).map(|fill| fill.run).collect());
            return Ok(outcome);
        };
        let (device, start) = (self.replica.device_id(), DeviceAddr(self.replica.start()));
        let to = Destination { memory, device, chunks: self.replica.chunks(), first: self.spec.first, start };
        // Kernels may still load what is replaced.
        self.replica.on_stream(|_| Ok(()))?;
        for (number, (name, source)) in peers.iter().enumerate() {
            let its = |fill: &&Fill| fill.source == FillSource::Peer(number as u8);
            let runs: Vec<Run> = fills.iter().filter(its).map(|fill| fill.run).collect();
            if runs.is_empty() {
                continue;
            }
            // Streams are waited for before the other map is locked, not meanwhile.
            let copy = || self.replica.while_granting(pages, || source.copy_to(&to, *name, &runs));
            let parts = timed(&mut state.info.copy_ns, copy);
            let (copied, refused, why) = match parts {
                Ok((copied, refused)) => (copied, refused, PeerRefusal::Unavailable),
                Err(why) => (Vec::new(), runs, why),
            };
            if matches!(why, PeerRefusal::NoDevice | PeerRefusal::NoAccess) {
                state.inaccessible.push(source.device());
            }
            count_refused(state, refused.iter().map(|run| u64::from(run.count)).sum(), why);
            outcome.copied.extend(copied);
            outcome.refused.extend(refused);
        }
        // What no server sends.
        let unknown = |fill: &&Fill| matches!(fill.source, FillSource::Peer(n) if usize::from(n) >= peers.len());
        outcome.refused.extend(fills.iter().filter(unknown).map(|fill| fill.run));
        outcome.refused = joined(std::mem::take(&mut outcome.refused));
        for run in &outcome.copied {
            state.info.bytes_from_peer += u64::from(run.count) * PAGE_BYTES as u64;
            state.pages.forget(run.pages());
        }
        Ok(outcome)
    }
}

impl Outcome {
    /// Which of the pages that were copied have to be fetched after all.
    pub(crate) fn count_again(&self, state: &mut State, fetched: impl Iterator<Item = Run>) {
        let both = |a: &Run, b: &Run| a.end().min(b.end()).saturating_sub(a.first.max(b.first));
        let again = fetched.map(|fetched| self.copied.iter().map(|run| both(run, &fetched)).sum::<u64>()).sum();
        // A page may be listed twice.
        state.info.bytes_from_peer = state.info.bytes_from_peer.saturating_sub(again * PAGE_BYTES as u64);
        count_refused(state, again, PeerRefusal::Changed);
    }
}

fn count_refused(state: &mut State, pages: u64, why: PeerRefusal) {
    if pages > 0 {
        state.info.peer_refused = why.number();
        state.info.peer_bytes_refused += pages * PAGE_BYTES as u64;
    }
}

/// Runs in ascending order, few enough for a message: what lies between the last ones may be added, of which the server
/// takes only what was to be copied.
fn joined(mut runs: Vec<Run>) -> Vec<Run> {
    runs.sort_unstable_by_key(|run| run.first);
    let mut joined: Vec<Run> = Vec::new();
    for run in runs {
        let is_full = joined.len() == MAX_RUNS;
        match joined.last_mut() {
            Some(last) if last.end() == run.first || is_full => {
                last.count = (run.end() - last.first) as u32;
            }
            _ => joined.push(run),
        }
    }
    joined
}

/// The owners, for the server.
pub(crate) fn numbers(peers: &[Named]) -> Peers {
    let mut numbers = NO_PEERS;
    numbers.iter_mut().zip(peers).for_each(|(number, (name, _))| *number = name.owner);
    numbers
}
