//! The ring of the trace: the latest records, written by many threads and read by another process.
//!
//! ```text
//!   writer   ticket = tickets + 1 ──> record[ticket mod 32768]: ticket, 14 words, checksum of them all
//!   reader   from its last ticket up to tickets: intact if ticket and checksum match, else lost
//! ```
//!
//! A writer never waits: a reader that is too slow loses the oldest records. Two writers use the same record only if
//! one of them slept while all other records were written; the checksum detects that. Nothing is written while tracing
//! is off, so the memory of the ring is not allocated.
//!
//! A tracer sets a time until which tracing stays on, and extends it while it runs; so a tracer that was killed costs
//! nothing two seconds later.
//!
//! Known flaw: if the file system of the table is full, a file that was created earlier has no space for the ring. So a
//! tracer allocates it first, and gets the error.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::Release};

use super::layout::{RECORD_WORDS, RECORDS, RING, header};

/// A record without its ticket and checksum.
pub(super) type Body = [u64; RECORD_WORDS - 2];

/// Writes a record and returns its ticket.
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

/// The body of the record with this ticket, if these words are that record, intact.
pub(super) fn read(record: &[u64; RECORD_WORDS], ticket: u64) -> Option<Body> {
    let mut body = Body::default();
    body.copy_from_slice(&record[1..RECORD_WORDS - 1]);
    let intact = record[0] == ticket.wrapping_add(1) && record[RECORD_WORDS - 1] == checksum(record[0], &body);
    intact.then_some(body)
}

fn checksum(ticket: u64, body: &Body) -> u64 {
    body.iter().fold(ticket, |sum, word| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29))
}
