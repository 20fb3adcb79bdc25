//! The file, and what each byte of it may be.
//!
//! ```text
//!   pages  0 .. 8    cells: a byte of one life of one worker; lives of all workers lie side by side
//!          8 .. 16   kept: all write, the puncher makes holes
//!         16 .. 24   cut: all write, the puncher makes holes, the truncater cuts and extends
//! ```
//!
//! **Cells** decide whether a byte was lost or came from nowhere. A worker counts rounds. Round `r` stores the number of
//! the round (its low byte) into some of its cells; so a cell shows exactly one round, the last one that touches it. A
//! round of a GPU process touches several pages: release is all or nothing, also where the process was killed.
//!
//! **In the other pages** bytes at certain places of each 16 belong to the truncater or to the puncher, which therefore
//! know what they must read; at the other places a byte is zero or what some worker stores at this offset.

use crate::board::{Board, Counter, Rounds};

pub(crate) const PAGE: usize = 4096;
/// Pages with cells.
pub(crate) const CELL_PAGES: usize = 8;
/// Where the truncater cuts from.
pub(crate) const CUT_FROM: usize = 16 * PAGE;
/// Bytes before it that are not cells begin here.
pub(crate) const KEPT_FROM: usize = CELL_PAGES * PAGE;
/// The longest that the file becomes.
pub(crate) const LEN: usize = 24 * PAGE;
/// Workers with cells: two GPU processes, a mapping, `write`.
pub(crate) const WRITERS: usize = 4;
/// GPU processes are the first.
pub(crate) const GPUS: usize = 2;

/// Places of each 16 bytes.
pub(crate) const TRUNCATERS: usize = 5;
pub(crate) const PUNCHERS: usize = 9;

/// Where a cell is.
pub(crate) fn cell(worker: usize, life: usize, number: usize) -> usize {
    number * PAGE + ((life * WRITERS + worker) * 3 + number * 501) % PAGE
}

/// Every so many rounds a cell is touched.
fn period(worker: usize) -> u64 {
    if worker < GPUS { 3 } else { CELL_PAGES as u64 }
}

/// Whether a round touches a cell.
pub(crate) fn touches(worker: usize, number: usize, round: u64) -> bool {
    value(worker, number, round) == round && round > 0
}

/// What a cell shows after a round, before its low byte is taken.
pub(crate) fn value(worker: usize, number: usize, round: u64) -> u64 {
    let period = period(worker);
    let since = (round + period - number as u64 % period) % period;
    round.saturating_sub(since)
}

/// Compares the cells of all lives, where `bytes` are the first of the file. `done` was taken before they were read,
/// `begun` after it.
pub(crate) fn compare(bytes: &dyn Fn(usize) -> u8, done: &Rounds, board: &Board, own: Option<(usize, usize)>) -> u64 {
    let mut seen = Vec::new();
    for worker in 0..WRITERS {
        for life in 0..board.lives(worker) {
            if own != Some((worker, life)) {
                (0..CELL_PAGES).for_each(|number| seen.push((worker, life, number, bytes(cell(worker, life, number)))));
            }
        }
    }
    let begun = board.rounds(Counter::Begun);
    let mut compared = 0;
    for (worker, life, number, byte) in seen {
        let (from, to) = (done.get(worker, life), begun.get(worker, life));
        // Beyond that, two rounds have the same low byte.
        if to - from > 200 {
            continue;
        }
        let possible = (from..=to).any(|round| value(worker, number, round) as u8 == byte);
        assert!(
            possible,
            "worker {worker}, life {life}, cell {number}: {byte} (low byte of the round), between rounds {from} and {to}"
        );
        compared += 1;
    }
    compared
}

/// What a writer stores at an offset after the cells.
pub(crate) fn wild(worker: usize, offset: usize) -> u8 {
    (1 + 60 * worker + (offset * 31 + offset / PAGE * 17) % 59) as u8
}

/// An offset for such a store.
pub(crate) fn wild_offset(random: u64, end: usize) -> usize {
    let offset = KEPT_FROM + random as usize % (end - KEPT_FROM);
    match offset % 16 {
        TRUNCATERS | PUNCHERS => offset + 1,
        _ => offset,
    }
}

/// Whether programs store to this page through mappings.
pub(crate) fn is_for_mappings(offset: usize) -> bool {
    (offset / PAGE).is_multiple_of(2)
}

/// The same offset in such a page.
pub(crate) fn for_mappings(offset: usize) -> usize {
    if is_for_mappings(offset) { offset } else { offset - PAGE }
}

/// Whether a byte after the cells can be there.
pub(crate) fn is_possible(offset: usize, byte: u8) -> bool {
    matches!(offset % 16, TRUNCATERS | PUNCHERS) || byte == 0 || (0..WRITERS).any(|worker| wild(worker, offset) == byte)
}

/// Compares all bytes after the cells; `bytes` are of the file from `from`.
pub(crate) fn compare_wild(bytes: &[u8], from: usize) {
    for (offset, byte) in (from..).zip(bytes).skip(KEPT_FROM.saturating_sub(from)) {
        assert!(is_possible(offset, *byte), "nobody stores {byte} at {offset} (page {})", offset / PAGE);
    }
}

/// Where bytes are not what they must be: how many, and of the first the offset, what it is, and what it must be.
pub(crate) fn first_difference(bytes: &[u8], wanted: &[u8]) -> Option<(usize, usize, u8, u8)> {
    let wrong: Vec<_> = bytes.iter().zip(wanted).enumerate().filter(|(_, (is, must))| is != must).collect();
    wrong.first().map(|(at, (is, must))| (wrong.len(), *at, **is, **must))
}

/// What cells must show at the end: of each life all cells of one round, which is its last or the one that it was killed
/// in. Returns how many were killed in a round that is there.
pub(crate) fn final_state(bytes: &[u8], board: &Board) -> u64 {
    let mut rest = bytes[..KEPT_FROM].to_vec();
    let mut after_death = 0;
    for worker in 0..WRITERS {
        for life in 0..board.lives(worker) {
            let [done, begun] = [Counter::Done, Counter::Begun]
                .map(|c| board.counter(worker, life, c).load(std::sync::atomic::Ordering::SeqCst));
            let shown: Vec<u8> = (0..CELL_PAGES).map(|number| bytes[cell(worker, life, number)]).collect();
            let of = |round: u64| (0..CELL_PAGES).map(|number| value(worker, number, round) as u8).collect::<Vec<_>>();
            assert!(
                shown == of(done) || shown == of(begun),
                "worker {worker}, life {life}: {shown:?} after round {done} of {begun}: {:?} or {:?}",
                of(done),
                of(begun)
            );
            after_death += u64::from(done != begun && shown == of(begun));
            (0..CELL_PAGES).for_each(|number| rest[cell(worker, life, number)] = 0);
        }
    }
    let stray = rest.iter().position(|byte| *byte != 0);
    assert_eq!(stray, None, "a byte that nobody has stored");
    after_death
}
