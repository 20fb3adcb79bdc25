//! Coalesces ranges of a file into reads: duplicates are read once, neighbours together.
//!
//! ```text
//!   wanted       [a  ]   [b ]        [c     ]
//!                  [d]                  [e]          sorted by offset
//!   runs         [. . . . . .]   |  [. . . . . .]    widened to whole units of direct I/O, joined over small gaps
//!                 a d     b          c e
//! ```
//!
//! A gap is read too if that costs less than another command. No read is longer than a limit, so a span that overlaps
//! the end of one read begins another, and the bytes they share are read twice.
//!
//! Known flaw: a limit in the middle of many overlapping spans reads some bytes twice.

use std::ops::Range;

/// A wanted range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span {
    /// First byte in the file.
    pub offset: u64,
    /// Bytes, at least one.
    pub len: u64,
    /// The caller's index of it.
    pub tag: u32,
}

/// One read that serves several spans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoalescedRead {
    /// First byte in the file, a multiple of the unit.
    pub offset: u64,
    /// Bytes, a multiple of the unit.
    pub len: u64,
    /// The spans it serves: indexes into the sorted list.
    pub members: Range<usize>,
}

/// Limits of coalescing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoalesceRule {
    /// Reads begin and end at multiples of this; a power of two.
    pub unit: u64,
    /// Unwanted bytes between two spans that may be read too.
    pub gap: u64,
    /// Bytes of a read. A single span may need more, and gets it.
    pub max_len: u64,
    /// Spans of a read.
    pub max_members: usize,
}

/// Sorts the spans and coalesces them into reads, in file order. Every span belongs to exactly one read, which
/// contains all its bytes.
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
