//! Pieces of a file joined to reads: duplicates are read once, neighbours together.
//!
//! ```text
//!   wanted       [a  ]   [b ]        [c     ]
//!                  [d]                  [e]          sorted by offset
//!   runs         [. . . . . .]   |  [. . . . . .]    widened to whole units of direct I/O, joined over small gaps
//!                 a d     b          c e
//! ```
//!
//! A gap is read along where that costs less than another command. No run is longer than a bound, so a piece that
//! overlaps the end of one begins another, and what they share is read twice.
//!
//! Known flaw: a bound that falls in the middle of a crowd of overlapping pieces reads some bytes twice.

use std::ops::Range;

/// Bytes of a file that somebody wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span {
    /// First byte in the file.
    pub offset: u64,
    /// Bytes, at least one.
    pub len: u64,
    /// Who wants them.
    pub tag: u32,
}

/// One read that serves several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoalescedRead {
    /// First byte in the file, a multiple of the unit.
    pub offset: u64,
    /// Bytes, a multiple of the unit.
    pub len: u64,
    /// Whom it serves: places in the sorted list.
    pub members: Range<usize>,
}

/// What may be joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoalesceRule {
    /// Reads begin and end at multiples of this; a power of two.
    pub unit: u64,
    /// Unwanted bytes between two pieces that may be read along.
    pub gap: u64,
    /// Bytes of a run. A single piece may need more, and gets it.
    pub max_len: u64,
    /// Pieces of a run.
    pub max_members: usize,
}

/// Sorts what is wanted and joins it to runs, in the order of the file. Every piece is a member of exactly one run, which
/// holds all its bytes.
pub fn coalesce(spans: &mut [Span], rule: &CoalesceRule) -> Vec<CoalescedRead> {
    spans.sort_unstable();
    let round_down = |at: u64| at & !(rule.unit - 1);
    let mut runs: Vec<CoalescedRead> = Vec::new();
    for (index, span) in spans.iter().enumerate() {
        let start = round_down(span.offset);
        let end = round_down(span.offset + span.len + rule.unit - 1);
        if let Some(last) = runs.last_mut() {
            let joined = end.max(last.offset + last.len) - last.offset;
            let within_gap = start <= last.offset + last.len + rule.gap;
            if within_gap && joined <= rule.max_len && last.members.len() < rule.max_members {
                last.len = joined;
                last.members.end = index + 1;
                continue;
            }
        }
        runs.push(CoalescedRead { offset: start, len: end - start, members: index..index + 1 });
    }
    runs
}
