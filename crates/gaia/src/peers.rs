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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use spinio_device::{DeviceAddr, DeviceId, PAGE_BYTES, PeerChunk, PeerError, PeerMemory, PeerPiece};
use spinio_host::lock;
use spinio_pagecache::leased_messages::PeerRefusal;
use spinio_pagecache::messages::{Fill, MAX_PEERS, MAX_RUNS, NO_PEERS, Peers, Run, Source as FillSource};

use crate::Result;
use crate::chunks::{Chunks, Hold};
use crate::lane::Lane;
use crate::map::Map;
use crate::queued_calls::Queue;
use crate::state::State;

/// The maps of this process from which pages can be copied.
static SOURCES: Mutex<Vec<Arc<Source>>> = Mutex::new(Vec::new());

/// What a server calls a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    /// The server's number.
    pub(crate) server: u64,
    pub(crate) owner: u64,
}

/// The name of a map now; `None` while no server is attached, and when it is unmapped.
pub(crate) type NameCell = Arc<Mutex<Option<Name>>>;

/// A map that others may copy from.
pub(crate) struct Source {
    name: NameCell,
    state: Weak<Mutex<State>>,
    queue: Arc<Queue>,
    memory: Arc<Chunks>,
    device: DeviceId,
    /// Pages of the file.
    pages: Range<u64>,
    /// Locked while a copy is made.
    copying: Mutex<()>,
}

/// A map that was named to the server, by the name that it had.
pub(crate) type Named = (Name, Arc<Source>);

/// Lets others copy from a map.
pub(crate) fn add(map: &Map) {
    let Some(memory) = map.replica.chunks() else { return };
    let state = Arc::downgrade(&map.state);
    let name = Arc::clone(&lock(&map.state).name);
    let pages = map.spec.first..map.spec.first + map.spec.pages as u64;
    let source = Source {
        name,
        state,
        queue: Arc::clone(&map.queue),
        memory: Arc::clone(memory),
        device: map.replica.device_id(),
        pages,
        copying: Mutex::default(),
    };
    lock(&SOURCES).push(Arc::new(source));
}

/// No other map copies from this one any more when this returns.
pub(crate) fn remove(map: &Map) {
    let state = Arc::downgrade(&map.state);
    let removed = {
        let mut sources = lock(&SOURCES);
        let at = sources.iter().position(|source| source.state.ptr_eq(&state));
        at.map(|at| sources.swap_remove(at))
    };
    if let Some(source) = removed {
        *lock(&source.name) = None;
        // One that has seen the name.
        drop(lock(&source.copying));
    }
}

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
        if self.spec.in_place || self.replica.device().peer_memory().is_none() {
            return Vec::new();
        }
        let first = self.spec.first;
        let pages = first + pages.start as u64..first + pages.end as u64;
        let own = self.replica.device_id();
        let is_useful = |source: &&Arc<Source>| {
            source.device != own
                && !state.inaccessible.contains(&source.device)
                && source.pages.start < pages.end
                && pages.start < source.pages.end
        };
        let sources = lock(&SOURCES);
        let named = sources.iter().filter(is_useful).filter_map(|source| {
            let its = (*lock(&source.name)).filter(|its| its.server == name.server)?;
            Some((its, Arc::clone(source)))
        });
        named.take(MAX_PEERS).collect()
    }

    /// Copies the fills of an acquire that other maps have.
    pub(crate) fn copy_from_peers(&self, state: &mut State, fills: &[Fill], peers: &[Named]) -> Result<Outcome> {
        let mut outcome = Outcome::default();
        if !fills.iter().any(|fill| matches!(fill.source, FillSource::Peer(_))) {
            return Ok(outcome);
        }
        // Kernels may still load what is replaced.
        self.replica.on_stream(|_| Ok(()))?;
        for (number, (name, source)) in peers.iter().enumerate() {
            let its = |fill: &&Fill| fill.source == FillSource::Peer(number as u8);
            let runs: Vec<Run> = fills.iter().filter(its).map(|fill| fill.run).collect();
            if runs.is_empty() {
                continue;
            }
            let parts = source.copy_to(self, *name, &runs);
            let (copied, refused, why) = match parts {
                Ok((copied, refused)) => (copied, refused, PeerRefusal::Unavailable),
                Err(why) => (Vec::new(), runs, why),
            };
            if matches!(why, PeerRefusal::NoDevice | PeerRefusal::NoAccess) {
                state.inaccessible.push(source.device);
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
            state.pages.forget(run.first as usize..run.first as usize + run.count as usize);
        }
        Ok(outcome)
    }
}

impl Outcome {
    /// Which of the pages that were copied have to be fetched after all.
    pub(crate) fn count_again(&self, state: &mut State, fetched: impl Iterator<Item = Run>) {
        let both = |a: &Run, b: &Run| end_of(a).min(end_of(b)).saturating_sub(a.first.max(b.first));
        let again = fetched.map(|fetched| self.copied.iter().map(|run| both(run, &fetched)).sum::<u64>()).sum();
        state.info.bytes_from_peer -= again * PAGE_BYTES as u64;
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
            Some(last) if end_of(last) == run.first || is_full => {
                last.count = (end_of(&run) - last.first) as u32;
            }
            _ => joined.push(run),
        }
    }
    joined
}

fn end_of(run: &Run) -> u64 {
    run.first + u64::from(run.count)
}

/// The owners, for the server.
pub(crate) fn numbers(peers: &[Named]) -> Peers {
    let mut numbers = NO_PEERS;
    numbers.iter_mut().zip(peers).for_each(|(number, (name, _))| *number = name.owner);
    numbers
}

/// Pages to copy to, their chunk here, the pages here, and the copy.
type Part = (Run, usize, Range<usize>, PeerPiece);

/// What was copied, and what was not.
type Parts = (Vec<Run>, Vec<Run>);

impl Source {
    /// Copies runs of pages of `map`, but for those that this map does not have outside of an epoch.
    fn copy_to(&self, map: &Map, name: Name, runs: &[Run]) -> core::result::Result<Parts, PeerRefusal> {
        let Some(state) = self.state.upgrade() else { return Err(PeerRefusal::Unavailable) };
        let Some(state) = try_lock(&state) else { return Err(PeerRefusal::Busy) };
        let _copying = lock(&self.copying);
        if !self.queue.is_quiet() {
            return Err(PeerRefusal::Busy);
        }
        if *lock(&self.name) != Some(name) {
            return Err(PeerRefusal::Unavailable);
        }
        let Some(memory) = map.replica.device().peer_memory() else { return Err(PeerRefusal::NoAccess) };
        let (mut chunks, mut holds): (Vec<PeerChunk>, Vec<Hold>) = Default::default();
        let (mut copied, mut refused) = (Vec::new(), Vec::new());
        for run in runs {
            let Some(parts) = self.parts(map, *run) else {
                refused.push(*run);
                continue;
            };
            for (part, chunk, pages, piece) in parts {
                let settled = state.pages.are_settled(pages).then(|| self.memory.keep(chunk)).flatten();
                let Some(hold) = settled else {
                    refused.push(part);
                    continue;
                };
                copied.push(part);
                let at = self.memory.address(chunk);
                match chunks.last_mut() {
                    Some(last) if last.at == at => last.pieces.push(piece),
                    _ => {
                        chunks.push(PeerChunk { at, len: self.memory.len(chunk), pieces: vec![piece] });
                        holds.push(hold);
                    }
                }
            }
        }
        self.copy_chunks(memory, &chunks)?;
        Ok((copied, refused))
    }

    fn copy_chunks(&self, memory: &dyn PeerMemory, chunks: &[PeerChunk]) -> core::result::Result<(), PeerRefusal> {
        if chunks.is_empty() {
            return Ok(());
        }
        let uuid = self.memory.device_uuid().map_err(|_| PeerRefusal::NoDevice)?;
        memory.copy_from_chunks(uuid, chunks).map_err(|e| match e {
            PeerError::NoDevice => PeerRefusal::NoDevice,
            PeerError::NoAccess => PeerRefusal::NoAccess,
            PeerError::Import(_) => PeerRefusal::Import,
            PeerError::Copy(_) => PeerRefusal::Copy,
        })
    }

    /// The parts of a run of `map` in the chunks of this map. `None`: this map has other pages.
    fn parts(&self, map: &Map, run: Run) -> Option<Vec<Part>> {
        let first = (map.spec.first + run.first).checked_sub(self.pages.start)? as usize;
        let pages = first..first + run.count as usize;
        if pages.end as u64 > self.pages.end - self.pages.start {
            return None;
        }
        let to = DeviceAddr(map.replica.start());
        let parts = self.memory.of_pages(&pages).map(|chunk| {
            let its = self.memory.pages(chunk);
            let part = pages.start.max(its.start)..pages.end.min(its.end);
            let run = Run { first: run.first + (part.start - pages.start) as u64, count: part.len() as u32 };
            let piece = PeerPiece {
                from: ((part.start - its.start) * PAGE_BYTES) as u64,
                to: to.offset(run.first * PAGE_BYTES as u64),
                len: part.len() * PAGE_BYTES,
            };
            (run, chunk, part, piece)
        });
        Some(parts.collect())
    }
}

fn try_lock(state: &Mutex<State>) -> Option<MutexGuard<'_, State>> {
    match state.try_lock() {
        Ok(state) => Some(state),
        Err(TryLockError::Poisoned(state)) => Some(PoisonError::into_inner(state)),
        Err(TryLockError::WouldBlock) => None,
    }
}
