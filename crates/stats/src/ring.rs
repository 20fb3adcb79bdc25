//! The ring of the trace: what happened last, written by many threads, read by another process.
//!
//! ```text
//!   writer   ticket = tickets + 1 ──> record[ticket mod 32768]: ticket, 14 words, checksum of them all
//!   reader   from its last ticket up to tickets: whole where ticket and checksum agree, else lost
//! ```
//!
//! A writer waits for nobody: a reader that is too slow loses the oldest. Two writers meet in one record only if one of
//! them slept while all others were written; the checksum tells. Nothing is written while nobody traces, so the memory of
//! the ring is not even there.
//!
//! Who traces sets a time up to which that holds, and moves it on while he lives; so a tracer that was killed costs
//! nothing two seconds later.
//!
//! Known flaw: if the file system of the table is full, a file made long ago has no room for the ring. Who traces
//! therefore allocates it first, and is told.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::Release};

use super::layout::{RECORD_WORDS, RECORDS, RING, header};

/// What a record says, but for its ticket and checksum.
pub(super) type Body = [u64; RECORD_WORDS - 2];

/// Writes a record; its ticket.
pub(super) fn write(words: &[AtomicU64], body: &Body) -> u64 {
    let ticket = words[header::TICKETS].fetch_add(1, Relaxed);
    let at = RING + (ticket % RECORDS as u64) as usize * RECORD_WORDS;
    let record = &words[at..at + RECORD_WORDS];
    for (word, value) in record[1..].iter().zip(body) {
        word.store(*value, Relaxed);
    }
    record[RECORD_WORDS - 1].store(checksum(ticket + 1, body), Relaxed);
    record[0].store(ticket + 1, Release);
    ticket
}

/// The body of the record with this ticket, if these words are that record, and whole.
pub(super) fn read(record: &[u64; RECORD_WORDS], ticket: u64) -> Option<Body> {
    let mut body = Body::default();
    body.copy_from_slice(&record[1..RECORD_WORDS - 1]);
    let intact = record[0] == ticket.wrapping_add(1) && record[RECORD_WORDS - 1] == checksum(record[0], &body);
    intact.then_some(body)
}

fn checksum(ticket: u64, body: &Body) -> u64 {
    body.iter().fold(ticket, |sum, word| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
}
