//! Page tables filled ahead of the thread that registers pages.
//!
//! ```text
//!   request   ── given to the driver ──┬── being registered ──┬── filled ──┬─ being filled ─┬── queued ──>
//!                                      │ caller, piece by piece            │ copy workers, a chunk each
//! ```
//!
//! Before pages can be registered, the kernel has to put each of them into the page tables of the mapping. Where the
//! page cache holds the file in large folios that is nothing, 1 to 4 ns a page. In folios of one page each it costs as
//! much as registering: 80 to 200 ns. A file gets such folios when it is read at random, and even when it is read in
//! sequence while one page in a hundred is there already. One thread at a time can register (the driver's lock);
//! several can fill page tables. So the caller measures how long the first pieces take, and if that is long, copy
//! workers fill page tables ahead of it, and only the driver's part is left to the caller.
//!
//! It is advice. A chunk that no worker has filled is filled by the caller, as is one that a worker is filling; one
//! whose file was truncated meanwhile stays empty, and registering it fails as it would have.
//!
//! Known flaw: where two segments meet within a chunk, filling the first marks the second as filled too; the driver
//! then fills it, under its lock.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};

use crate::read::work::{Chunk, Piece};

/// What a worker fills at a time, at a multiple of this in the file.
pub(crate) const CHUNK: u64 = 16 << 20;

/// More workers than this gain nothing: together they are faster than the driver.
const MAX_WORKERS: usize = 2;

const UNTOUCHED: u8 = 0;
const TAKEN: u8 = 1;
const DONE: u8 = 2;

/// The chunks of a request.
pub(crate) struct Prefault {
    /// Offset of the request in its file.
    base: u64,
    chunks: Box<[AtomicU8]>,
    /// It takes long here.
    slow: AtomicBool,
}

impl Prefault {
    /// For a request of `len` bytes at `base` of the file; requests up to `min_len` are over before a worker is awake.
    pub(crate) fn new(base: u64, len: u64, min_len: u64) -> Prefault {
        let chunks = if len > min_len { (base + len).div_ceil(CHUNK) - base / CHUNK } else { 0 };
        let chunks = (0..chunks).map(|_| AtomicU8::new(UNTOUCHED)).collect();
        Prefault { base, chunks, slow: AtomicBool::new(false) }
    }

    /// Filling takes the caller long; true at the first call, if there is work for workers.
    pub(crate) fn mark_slow(&self) -> bool {
        !self.chunks.is_empty() && !self.slow.swap(true, Relaxed)
    }

    /// The chunks of a range of the request, and what each has of it.
    fn chunks_of(&self, range: Range<u64>) -> impl Iterator<Item = Chunk> {
        let (first, base) = (self.base / CHUNK, self.base);
        let chunks = (base + range.start) / CHUNK..(base + range.end).div_ceil(CHUNK);
        chunks.map(move |chunk| {
            let start = (chunk * CHUNK).max(base + range.start) - base;
            let end = ((chunk + 1) * CHUNK).min(base + range.end) - base;
            Chunk { index: (chunk - first) as usize, range: start..end }
        })
    }

    fn untouched<'a>(&'a self, queued: &'a VecDeque<Piece>) -> impl Iterator<Item = Chunk> + 'a {
        let queued = queued.iter().filter(|_| self.slow.load(Relaxed));
        let chunks = queued.flat_map(|piece| self.chunks_of(piece.offset..piece.offset + piece.len));
        chunks.filter(|chunk| self.chunks[chunk.index].load(Relaxed) == UNTOUCHED)
    }

    /// The next chunk for a worker, of what is queued to be registered.
    pub(crate) fn take_chunk(&self, queued: &VecDeque<Piece>) -> Option<Chunk> {
        let chunk = self.untouched(queued).next()?;
        self.chunks[chunk.index].store(TAKEN, Relaxed);
        Some(chunk)
    }

    /// How many workers could fill something.
    pub(crate) fn useful_workers(&self, queued: &VecDeque<Piece>) -> usize {
        self.untouched(queued).take(MAX_WORKERS).count()
    }

    /// A worker has filled its chunk.
    pub(crate) fn mark_done(&self, chunk: &Chunk) {
        self.chunks[chunk.index].store(DONE, Relaxed);
    }

    /// What the caller has to fill of a range that it is about to register.
    pub(crate) fn missing(&self, range: Range<u64>) -> Vec<Range<u64>> {
        if self.chunks.is_empty() {
            return vec![range];
        }
        let mut out: Vec<Range<u64>> = Vec::new();
        for chunk in self.chunks_of(range) {
            match out.last_mut() {
                _ if self.chunks[chunk.index].load(Relaxed) == DONE => {}
                Some(last) if last.end == chunk.range.start => last.end = chunk.range.end,
                _ => out.push(chunk.range),
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use spinio_plan::{Reason, Route};

    use super::*;

    /// Slow from the start.
    fn slow_prefault(base: u64, len: u64) -> Prefault {
        let prefault = Prefault::new(base, len, CHUNK);
        prefault.mark_slow();
        prefault
    }

    fn queued(ranges: &[(u64, u64)]) -> VecDeque<Piece> {
        let (route, reason) = (Route::Dma, Reason::Cached);
        let piece =
            |&(from, to): &(u64, u64)| Piece { offset: from, len: to - from, route, reason, assumed_cached: false };
        ranges.iter().map(piece).collect()
    }

    fn ends(ranges: impl IntoIterator<Item = Range<u64>>) -> Vec<(u64, u64)> {
        ranges.into_iter().map(|range| (range.start, range.end)).collect()
    }

    #[test]
    fn workers_take_each_chunk_once_and_caller_fills_rest() {
        // From the middle of a chunk of the file to the middle of the fourth after it.
        let (base, len) = (CHUNK / 2 + 4096, 4 * CHUNK);
        let prefault = slow_prefault(base, len);
        let first = CHUNK / 2 - 4096;
        let all = queued(&[(0, len)]);
        assert_eq!(prefault.useful_workers(&all), MAX_WORKERS);
        let chunks: Vec<Chunk> = std::iter::from_fn(|| prefault.take_chunk(&all)).collect();
        let edges = [0, first, first + CHUNK, first + 2 * CHUNK, first + 3 * CHUNK, len];
        let expected: Vec<_> = edges.windows(2).map(|w| (w[0], w[1])).collect();
        assert_eq!(ends(chunks.iter().map(|chunk| chunk.range.clone())), expected);
        assert_eq!(prefault.useful_workers(&all), 0);
        assert_eq!(ends(prefault.missing(0..len)), [(0, len)], "taken is not filled");
        prefault.mark_done(&chunks[1]);
        prefault.mark_done(&chunks[3]);
        assert_eq!(ends(prefault.missing(0..len)), [(0, first), (edges[2], edges[3]), (edges[4], len)]);
        assert_eq!(ends(prefault.missing(first..edges[2])), []);
        assert_eq!(ends(prefault.missing(first + 4096..edges[2] + 1)), [(edges[2], edges[2] + 1)]);
    }

    #[test]
    fn only_queued_ranges_are_prefaulted() {
        let prefault = slow_prefault(0, 8 * CHUNK);
        let some = [(CHUNK + 8192, CHUNK + 12288), (5 * CHUNK, 6 * CHUNK)];
        let pieces = queued(&some);
        assert_eq!(prefault.useful_workers(&pieces), 2);
        assert_eq!(ends(std::iter::from_fn(|| prefault.take_chunk(&pieces)).map(|chunk| chunk.range)), some);
        assert_eq!(prefault.take_chunk(&VecDeque::new()), None);
    }

    #[test]
    fn short_requests_use_no_workers() {
        let prefault = slow_prefault(0, CHUNK);
        let all = queued(&[(0, CHUNK)]);
        assert_eq!((prefault.useful_workers(&all), prefault.take_chunk(&all)), (0, None));
        assert_eq!(ends(prefault.missing(5..77)), [(5, 77)]);
    }

    #[test]
    fn workers_start_only_when_prefault_is_slow() {
        let prefault = Prefault::new(0, 8 * CHUNK, CHUNK);
        let all = queued(&[(0, 8 * CHUNK)]);
        assert_eq!((prefault.useful_workers(&all), prefault.take_chunk(&all)), (0, None));
        assert!(prefault.mark_slow());
        assert!(!prefault.mark_slow(), "once");
        assert_eq!(prefault.useful_workers(&all), MAX_WORKERS);
        assert!(prefault.take_chunk(&all).is_some());
    }
}
