//! The offset of each number. Everything is a 64-bit word, so one offset means the same to the process that counts, to
//! a process that reads the bytes of its file, and to a program in another language.
//!
//! ```text
//!   word   0  header: magic, fingerprint, process, clocks, name, trace switch, head of the ring
//!         64  slots    [256 threads, 16]      a cache line each: small reads, their bytes; small writes, their bytes;
//!                                         two words that nothing uses; small reads and small writes begun
//!       2240  calls    [direction]            calls, failed, bytes, nanoseconds, latency[96]
//!       2540  pages    [residency]            pages surveyed
//!       2544  refused  [reason]               count, bytes
//!       2672  gauges   [gauge]                now, maximum
//!       2704  cells    [96, found by key]     key, pieces, bytes, nanoseconds, latency[96]
//!      12304  end of the counters
//!      12800  ring     [32768]                ticket, fourteen words, checksum (trace/)
//! ```
//!
//! A small call reads the trace switch and writes its slot: for the first 56 threads both are in one page.
//!
//! The words are little-endian, as are all supported machines. The fingerprint is a hash of these offsets and of the
//! names of routes and reasons, so a file of another build is rejected instead of misread.

use spinio_plan::{Reason, Route};

use super::histogram::BUCKETS;

pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"spinio\x02\0");

/// Words of the header.
pub(super) mod header {
    pub(crate) const MAGIC: usize = 0;
    pub(crate) const FINGERPRINT: usize = 1;
    pub(crate) const PID: usize = 2;
    /// CLOCK_MONOTONIC and wall clock when the table was made, nanoseconds.
    pub(crate) const STARTED: usize = 3;
    pub(crate) const STARTED_WALL: usize = 4;
    /// The name of the process, two words, zero-padded.
    pub(crate) const NAME: usize = 5;
    /// Pieces for which no cell was free.
    pub(crate) const OVERFLOW: usize = 7;
    /// Slots that threads have claimed; larger than the number of slots if there were more threads.
    pub(crate) const SLOTS_TAKEN: usize = 8;
    /// The monotonic time until which requests are traced, 0 for never. In a separate cache line: every request reads
    /// it.
    pub(crate) const TRACING: usize = 16;
    /// The next ticket of the ring, and the last request number.
    pub(crate) const TICKETS: usize = 24;
    pub(crate) const REQUESTS: usize = 25;
}

pub(super) const THREAD_SLOTS: usize = 64;
/// Slots with one writer each, followed by the slots that all other threads share, by processor.
pub(super) const EXCLUSIVE_SLOTS: usize = 256;
pub(super) const SHARED_SLOTS: usize = 16;
pub(super) const SLOT_COUNT: usize = EXCLUSIVE_SLOTS + SHARED_SLOTS;
pub(super) const SLOT_WORDS: usize = 8;
/// Words of a slot: small reads begun, and small writes.
pub(super) const SLOT_BEGUN: usize = 6;

/// The words of one direction's calls, or of one cell from its second word on.
pub(super) const CALLS: usize = THREAD_SLOTS + SLOT_COUNT * SLOT_WORDS;
pub(super) const CALL_WORDS: usize = 4 + BUCKETS;
pub(super) const DIRECTIONS: usize = 3;

pub(super) const PAGES: usize = CALLS + DIRECTIONS * CALL_WORDS;
pub(super) const RESIDENCIES: usize = 4;

pub(super) const REFUSALS: usize = PAGES + RESIDENCIES;
/// The most reasons that fit.
pub(super) const REASONS: usize = 64;

pub(super) const GAUGES: usize = REFUSALS + REASONS * 2;
pub(super) const GAUGE_SLOTS: usize = 16;

pub(super) const CELLS: usize = GAUGES + GAUGE_SLOTS * 2;
pub(super) const CELL_COUNT: usize = 96;
/// Key, pieces, bytes, nanoseconds, latency.
pub(super) const CELL_WORDS: usize = 4 + BUCKETS;

/// Words of the counters.
pub(super) const COUNTERS: usize = CELLS + CELL_COUNT * CELL_WORDS;

/// The ring begins at a page boundary.
pub(super) const RING: usize = COUNTERS.next_multiple_of(512);
pub(super) const RECORDS: usize = 32768;
pub(super) const RECORD_WORDS: usize = 16;

/// All words of a table.
pub(super) const TABLE_WORDS: usize = RING + RECORDS * RECORD_WORDS;

const _: () = {
    assert!(Reason::ALL.len() <= REASONS && Route::ALL.len() <= 8);
    assert!(THREAD_SLOTS.is_multiple_of(8), "a slot is a cache line");
};

/// Identifies the layout and the names of its numbers.
pub(super) const FINGERPRINT: u64 = {
    let mut hash = 0xcbf2_9ce4_8422_2325;
    let numbers = [CALLS, PAGES, REFUSALS, GAUGES, THREAD_SLOTS, CELLS, COUNTERS, RING, RECORDS, BUCKETS];
    let mut i = 0;
    while i < numbers.len() {
        hash = mix(hash, &(numbers[i] as u64).to_le_bytes());
        i += 1;
    }
    let mut i = 0;
    while i < Route::ALL.len() {
        hash = mix(hash, Route::ALL[i].name().as_bytes());
        i += 1;
    }
    let mut i = 0;
    while i < Reason::ALL.len() {
        hash = mix(hash, Reason::ALL[i].text().as_bytes());
        i += 1;
    }
    hash
};

/// FNV-1a.
const fn mix(mut hash: u64, bytes: &[u8]) -> u64 {
    let mut i = 0;
    while i < bytes.len() {
        hash = (hash ^ bytes[i] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        i += 1;
    }
    hash
}

/// The key of a cell; never 0, which marks a free one.
pub(super) const fn key(direction: usize, route: Route, reason: Reason) -> u64 {
    1 << 32 | (direction as u64) << 16 | (route as u64) << 8 | reason as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_matches_documentation() {
        assert_eq!(
            [CALLS, PAGES, REFUSALS, GAUGES, THREAD_SLOTS, CELLS, COUNTERS, RING],
            [2240, 2540, 2544, 2672, 64, 2704, 12304, 12800]
        );
    }
}
