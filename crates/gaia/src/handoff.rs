//! A release that hands device memory over instead of copying pages ([`Map::release_handing_over`]).
//!
//! ```text
//!   release   scan ─ changed pages ─ all in whole chunks of the range?  no: as any other release
//!                └ yes: descriptors of these chunks ── server: commits, answers ─ unmapped, as if they were evicted
//!                                                         └ copies the pages later, from the chunks
//! ```
//!
//! The memory of a chunk lives as long as a descriptor of it, so the pages are there until the server has copied them,
//! even if this process ends. The next acquire maps new memory and fetches the pages.
//!
//! That it cannot be done is no error: the server refuses, nothing has changed, and the pages are copied.

use spinio_device::PAGE_BYTES;
use spinio_pagecache::messages::{HandOver, MAX_CHUNKS, MAX_RUNS, ReleaseId, Run};
use spinio_sys::linux;

use crate::Result;
use crate::lane::Lane;
use crate::link::Committed;
use crate::map::Map;

impl Map {
    /// [`Map::release`], which may hand the chunks of device memory that lie wholly in the range over to the server. Their
    /// pages are then fetched by the next acquire; kernels must not use them before.
    pub fn release_handing_over(&self, offset: u64, len: u64) -> Result<u64> {
        let range = self.pages_of(offset, len)?;
        let published = self.release_range(offset, len, true)?;
        if let Some(published) = published.handed_over {
            // No state is locked now; what cannot be unmapped has pages that the next acquire fetches.
            self.replica.give_back(&range);
            return Ok(published);
        }
        Ok(published.bytes)
    }

    /// Hands the chunks of a release over; `None`: that cannot be done, and nothing has changed.
    pub(crate) fn hand_over(&self, id: ReleaseId, range: Run, changed: &[Run]) -> Result<Option<Committed>> {
        let pages = range.pages();
        let Some((memory, chunks)) = self.replica.chunks_inside(&pages) else { return Ok(None) };
        let (first, last) = (memory.pages(chunks.start).start, chunks.end.saturating_sub(1));
        let inside = |run: &Run| {
            let run = run.pages();
            run.start >= first && run.end <= memory.pages(last).end
        };
        let is_possible = (1..=MAX_CHUNKS).contains(&chunks.len())
            && (1..=MAX_RUNS).contains(&changed.len())
            && Lane::current().is_none()
            && memory.missing(chunks.clone()).is_empty();
        if !is_possible || !changed.iter().all(inside) {
            return Ok(None);
        }
        let exported: std::result::Result<Vec<_>, _> = chunks.clone().map(|chunk| memory.export(chunk)).collect();
        let (Ok(exported), Ok(device)) = (exported, memory.device_uuid()) else { return Ok(None) };
        let pages_of = |chunk: usize| (memory.len(chunk) / PAGE_BYTES as u64) as u32;
        let part = HandOver {
            id,
            first: range.first,
            pages: range.count,
            device,
            chunk: first as u64,
            chunks: chunks.len() as u32,
            chunk_pages: pages_of(chunks.start),
            last_pages: pages_of(last),
        };
        let (tid, fds, runs) =
            (linux::gettid(), exported.iter().map(|fd| fd.get()).collect::<Vec<_>>(), changed.to_vec());
        match self.link.run(move |link| link.hand_over(part, &runs, tid, &fds)) {
            Ok(committed) => Ok(Some(committed)),
            Err(e) if e.is_refused() => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// What a release has published.
pub(crate) struct Published {
    pub(crate) bytes: u64,
    /// The same, if its chunks were handed over.
    pub(crate) handed_over: Option<u64>,
}
