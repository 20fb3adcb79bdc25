//! The maps of this process from which pages can be copied to a map on another device ([`crate::peers`]).
//!
//! ```text
//!   map made ── add ──> list ──> named by an acquire ──> copy_to: state tried, name as it was, chunks held, device copies
//!   unmapped ── remove: no name any more; waits for a copy that has seen it
//! ```

use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use spinio_device::{DeviceId, PAGE_BYTES, PeerPiece};
use spinio_host::{lock, try_lock};
use spinio_pagecache::leased_messages::PeerRefusal;
use spinio_pagecache::messages::Run;

use crate::chunks::{Chunks, Hold};
use crate::overlapped_copies::{self, ChunkPiece, Destination};
use crate::owner_name::{Name, NameCell};
use crate::queued_calls::Queue;
use crate::replica::Replica;
use crate::state::State;

/// The maps of this process from which pages can be copied.
static SOURCES: Mutex<Vec<Arc<Source>>> = Mutex::new(Vec::new());

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

/// Lets others copy from a map that begins at this page of the file; if the device has no memory in chunks, they cannot.
pub(crate) fn add(state: &Arc<Mutex<State>>, queue: &Arc<Queue>, replica: &Replica, first: u64, pages: usize) {
    let Some(memory) = replica.chunks() else { return };
    let source = Source {
        name: Arc::clone(&lock(state).name),
        state: Arc::downgrade(state),
        queue: Arc::clone(queue),
        memory: Arc::clone(memory),
        device: replica.device_id(),
        pages: first..first + pages as u64,
        copying: Mutex::default(),
    };
    lock(&SOURCES).push(Arc::new(source));
}

/// No other map copies from this one any more when this returns.
pub(crate) fn remove(state: &Arc<Mutex<State>>) {
    let state = Arc::downgrade(state);
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

/// The maps of a file, on other devices than this one, that have some of these pages.
pub(crate) fn of_file(file: u64, device: DeviceId, pages: &Range<u64>) -> Vec<Named> {
    let is_useful = |source: &&Arc<Source>| {
        source.device != device && source.pages.start < pages.end && pages.start < source.pages.end
    };
    let sources = lock(&SOURCES);
    let named = sources.iter().filter(is_useful).filter_map(|source| {
        let its = (*lock(&source.name)).filter(|its| its.file == file)?;
        Some((its, Arc::clone(source)))
    });
    named.collect()
}

/// Pages to copy to, the pages here, and the copy.
type Part = (Run, Range<usize>, ChunkPiece);

/// What was copied, and what was not.
pub(crate) type Parts = (Vec<Run>, Vec<Run>);

impl Source {
    pub(crate) fn device(&self) -> DeviceId {
        self.device
    }

    /// Copies runs of pages, counted from the first one there, but for those that this map does not have outside of an
    /// epoch.
    pub(crate) fn copy_to(&self, to: &Destination<'_>, name: Name, runs: &[Run]) -> Result<Parts, PeerRefusal> {
        let Some(state) = self.state.upgrade() else { return Err(PeerRefusal::Unavailable) };
        let Some(state) = try_lock(&state) else { return Err(PeerRefusal::Busy) };
        let _copying = lock(&self.copying);
        // Until the copies are made: a call that is queued meanwhile may stop a stream that they wait for, and wait for the
        // state.
        let Some(_turn) = self.queue.turn_if_quiet() else { return Err(PeerRefusal::Busy) };
        if *lock(&self.name) != Some(name) {
            return Err(PeerRefusal::Unavailable);
        }
        // The chunks stay until the copies are made.
        let (mut pieces, mut holds): (Vec<ChunkPiece>, Vec<Hold>) = Default::default();
        let (mut copied, mut refused) = (Vec::new(), Vec::new());
        for run in runs {
            let Some(parts) = self.parts(to, *run) else {
                refused.push(*run);
                continue;
            };
            for (part, pages, piece) in parts {
                let settled = state.pages.are_settled(pages).then(|| self.memory.keep(piece.chunk)).flatten();
                let Some(hold) = settled else {
                    refused.push(part);
                    continue;
                };
                copied.push(part);
                if pieces.last().is_none_or(|last| last.chunk != piece.chunk) {
                    holds.push(hold);
                }
                pieces.push(piece);
            }
        }
        if !pieces.is_empty() {
            overlapped_copies::copy(&self.memory, to, &pieces).map_err(overlapped_copies::refusal)?;
        }
        Ok((copied, refused))
    }

    /// The parts of a run in the chunks of this map. `None`: this map has other pages.
    fn parts(&self, destination: &Destination<'_>, run: Run) -> Option<Vec<Part>> {
        let first = (destination.first + run.first).checked_sub(self.pages.start)? as usize;
        let pages = first..first + run.count as usize;
        if pages.end as u64 > self.pages.end - self.pages.start {
            return None;
        }
        let parts = self.memory.of_pages(&pages).map(|chunk| {
            let its = self.memory.pages(chunk);
            let part = pages.start.max(its.start)..pages.end.min(its.end);
            let run = Run { first: run.first + (part.start - pages.start) as u64, count: part.len() as u32 };
            let piece = PeerPiece {
                from: self.memory.address(chunk).offset(((part.start - its.start) * PAGE_BYTES) as u64),
                to: destination.start.offset(run.first * PAGE_BYTES as u64),
                len: part.len() * PAGE_BYTES,
            };
            (run, part, ChunkPiece { chunk, piece })
        });
        Some(parts.collect())
    }
}
