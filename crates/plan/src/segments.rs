//! From decisions to segments: merge, cut at alignment, and record the reason.
//!
//! ```text
//!   runs         absent  CLEAN  absent │ CLEAN  DIRTY │ absent
//!   decisions      storage, together   │    cache     │ storage
//!   segments     edge│    p2p     │edge│  copy or dma │ p2p ...
//! ```
//!
//! Neighbours of one route become one segment; where their reasons differ, a cache
//! segment keeps that of its longest part, and a storage segment reports `Merged` as soon as any byte
//! of it was resident: `Absent` guarantees that none was.
//!
//! Known flaws: a merged segment cannot report how many of its bytes were resident.

use crate::constraints::RouteConstraints;
use crate::scratch::{Run, Scratch};
use crate::{Reason, Residency, Route, Segment};

/// Neighbouring runs that are served together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Storage,
    Resident,
    /// From the page cache, which has to read some of it from storage.
    NeedsStorage,
}

/// Writes the segments of the decided runs.
pub(crate) fn build_segments(scratch: &Scratch, constraints: &RouteConstraints, segments: &mut Vec<Segment>) {
    segments.clear();
    let mut out = SegmentBuilder { segments, constraints, longest: 0 };
    for runs in scratch.runs.chunk_by(|a, b| kind_of(a) == kind_of(b)) {
        out.add_stretch(kind_of(&runs[0]), runs);
    }
}

#[inline]
fn kind_of(run: &Run) -> Kind {
    match (run.residency, run.from_storage) {
        (_, true) => Kind::Storage,
        (Residency::Clean | Residency::Dirty, _) => Kind::Resident,
        (Residency::Absent | Residency::Unknown, _) => Kind::NeedsStorage,
    }
}

/// For neighbouring runs from the cache: the reason and length of the longest part.
#[inline]
fn main_reason(runs: &[Run]) -> (Reason, u64) {
    let mut longest = &runs[0];
    for run in &runs[1..] {
        longest = if run.len > longest.len { run } else { longest };
    }
    let reason = match longest.residency {
        Residency::Absent => Reason::Absent,
        Residency::Unknown => Reason::Unknown,
        Residency::Dirty => Reason::Dirty,
        Residency::Clean => Reason::Cached,
    };
    (reason, longest.len)
}

struct SegmentBuilder<'a> {
    segments: &'a mut Vec<Segment>,
    constraints: &'a RouteConstraints,
    /// Of the parts of the last segment.
    longest: u64,
}

impl SegmentBuilder<'_> {
    #[inline]
    fn add_stretch(&mut self, kind: Kind, runs: &[Run]) {
        let constraints = self.constraints;
        let (start, end) = (runs[0].start, runs[runs.len() - 1].end());
        match (kind, constraints.storage) {
            (Kind::Storage, Some(route)) => {
                let (from, to) = self.aligned_blocks(route, start, end);
                self.add_cached(start, from, Reason::Edge, from - start, None);
                if from < to {
                    let len = to - from;
                    let resident = |r: &Run| r.residency != Residency::Absent && r.start < to && r.end() > from;
                    let reason = if runs.iter().any(resident) { Reason::Merged } else { Reason::Absent };
                    self.push(Segment { offset: from, len, route, reason, refused: constraints.refused }, len);
                }
                self.add_cached(to, end, Reason::Edge, end - to, None);
            }
            (Kind::Resident, _) => {
                let (reason, longest) = main_reason(runs);
                let route = constraints.resident_route(end - start);
                let reason = if route == constraints.cache { reason } else { Reason::CachedLarge };
                let refused = constraints.cache_refused;
                self.push(Segment { offset: start, len: end - start, route, reason, refused }, longest);
            }
            (Kind::NeedsStorage, _) | (Kind::Storage, None) => {
                let (reason, longest) = main_reason(runs);
                // Absent bytes preferred storage, unknown ones did not.
                let refused = if reason == Reason::Absent { constraints.refused } else { constraints.cache_refused };
                self.add_cached(start, end, reason, longest, refused);
            }
        }
    }

    fn add_cached(&mut self, start: u64, end: u64, reason: Reason, longest: u64, refused: Option<Reason>) {
        if start < end {
            self.push(
                Segment { offset: start, len: end - start, route: self.constraints.cache, reason, refused },
                longest,
            );
        }
    }

    #[inline]
    fn push(&mut self, segment: Segment, longest: u64) {
        match self.segments.last_mut() {
            Some(last) if last.route == segment.route => {
                last.len += segment.len;
                if longest > self.longest {
                    (last.reason, last.refused) = (segment.reason, segment.refused);
                    self.longest = longest;
                }
            }
            _ => {
                self.segments.push(segment);
                self.longest = longest;
            }
        }
    }

    /// The part that the route can move; empty, at its start, if there is none.
    #[inline]
    fn aligned_blocks(&self, route: Route, start: u64, end: u64) -> (u64, u64) {
        let (align, offset) = (self.constraints.storage_align, self.constraints.file_offset);
        if route != Route::P2p || align <= 1 {
            return (start, end);
        }
        // Residency has page granularity and blocks are rarely larger, so these are the ends of the
        // request in all but rare cases.
        let from = (offset + start).next_multiple_of(align);
        let to = (offset + end) / align * align;
        if from < to { (from - offset, to - offset) } else { (start, start) }
    }
}
