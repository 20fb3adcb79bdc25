//! The end of a long request is copied while its front is registered.
//!
//! ```text
//!   request    ── at the device ──┬── registered ──┬───── queued ─────┬── in blocks ──┬── at the device ──
//!                                 │ caller ──>                        <── helper      │
//!                                 └──── lends empty blocks, queues the copies of full ones, between two pieces
//! ```
//!
//! Registering is for one thread at a time and moves about 50 GB/s, while the link carries 55. A thread that copies beside
//! it adds 5 to 8 GB/s and hardly slows it down; a second one takes from registering about what it adds, and a third
//! more (seen on an H200; benches/runs/2026-11-22-h200-registering measures it). So there is one.
//!
//! This helper calls no device. While one thread registers piece after piece, a copy that another one queues waits until
//! nearly all is registered, 40 ms and more: the driver's lock is not fair. So the caller queues for him.
//!
//! Bytes that this process registered a moment ago are read without him. Such a program reads the same again and again,
//! and another processor would gain it little: giving back the old pages comes first anyway. It had better hold the file.
//!
//! Known flaw: the first long request of a process makes the ring grow, by the caller.

use std::collections::VecDeque;

use spinio_plan::{Reason, Route};

use crate::read::work::Piece;
use spinio_transfer::bounce::BLOCK;

/// Bytes that are registered at once where somebody copies beside it: he needs new blocks more often.
pub(crate) const REGISTERED: u64 = 64 << 20;

/// What the caller does sooner than a helper would.
const LAST: u64 = 8 << 20;

/// Blocks that a request may have lent for this: what a helper fills while so much is registered. A request that is soon
/// over has fewer, so that the ring need not grow for it.
pub(crate) fn blocks(len: u64) -> usize {
    (len / (64 << 20)).min(6) as usize
}

/// What the ring may grow to for this: as many blocks again are on their way to the device.
pub(crate) const RING: u64 = 12 * BLOCK as u64;

/// Whether there is anything for a helper.
pub(crate) fn is_worth(queue: &VecDeque<Piece>) -> bool {
    queue.len() > 1 || queue.back().is_some_and(|back| back.len > LAST)
}

/// The end of what is to be registered, for a helper to copy; `base` is where the request begins in its file.
pub(crate) fn cut(queue: &mut VecDeque<Piece>, base: u64) -> Option<Piece> {
    let back = queue.back().filter(|_| is_worth(queue))?;
    let end = base + back.offset + back.len;
    // Whole pages, so that the caller's last one is not in two hands.
    let from = end.saturating_sub(BLOCK as u64).next_multiple_of(64 << 10).max(base + back.offset);
    let piece = Piece {
        offset: from - base,
        len: end - from,
        route: Route::Copy,
        reason: Reason::Beside,
        presumed: back.presumed,
    };
    if piece.len == back.len {
        queue.pop_back();
    } else {
        queue.back_mut()?.len -= piece.len;
    }
    Some(piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn queue(pieces: &[(u64, u64)]) -> VecDeque<Piece> {
        let (route, reason) = (Route::Dma, Reason::CachedLarge);
        pieces.iter().map(|&(offset, len)| Piece { offset, len, route, reason, presumed: false }).collect()
    }

    #[test]
    fn a_helper_takes_the_end_and_the_caller_keeps_the_last() {
        let base = 12_345;
        let mut left = queue(&[(0, 16 * MIB), (16 * MIB, 3 * MIB + 777)]);
        let first = cut(&mut left, base).unwrap();
        assert_eq!((first.offset + first.len, first.route), (19 * MIB + 777, Route::Copy));
        assert!(first.len <= BLOCK as u64 && (base + first.offset).is_multiple_of(64 << 10), "{first:?}");
        let rest: Vec<_> = std::iter::from_fn(|| cut(&mut left, base)).collect();
        assert_eq!(left.len(), 1);
        assert!(left[0].offset == 0 && left[0].len <= LAST && left[0].route == Route::Dma, "{left:?}");
        assert_eq!(rest.last().unwrap().offset, left[0].len);
        assert_eq!(cut(&mut VecDeque::new(), 0), None);
    }

    /// Whatever is taken from both ends, every byte is in one hand, and none in two.
    #[test]
    fn nothing_is_lost_between_both_ends() {
        let lens = [MIB, 5 * MIB + 1, 4095, 33 * MIB + 4097, 12 * MIB, 1];
        for base in [0, 1, 4096, 65_537, (1 << 40) + 12_345] {
            for front in [777, 64 << 10, 3 * MIB + 5, 64 * MIB] {
                for count in 1..=lens.len() {
                    meet(base, &lens[..count], front);
                }
            }
        }
    }

    /// Windows are planned by several threads, so the end of the queue may be the start of the file.
    #[test]
    fn what_was_planned_last_may_be_the_start_of_the_file() {
        let mut left = queue(&[(16 * MIB, 16 * MIB), (0, 3 * MIB + 4096)]);
        let cuts: Vec<_> = std::iter::from_fn(|| cut(&mut left, 0)).map(|piece| (piece.offset, piece.len)).collect();
        assert_eq!(cuts[..2], [(MIB + (64 << 10), 2 * MIB - (60 << 10)), (0, MIB + (64 << 10))]);
        assert!(cuts[2..].iter().all(|&(offset, _)| offset >= 16 * MIB), "{cuts:?}");
    }

    fn meet(base: u64, lens: &[u64], front: u64) {
        let mut at = 0;
        let begins = lens.iter().map(|&len| {
            at += len;
            (at - len, len)
        });
        let mut left = queue(&begins.collect::<Vec<_>>());
        let mut taken = Vec::new();
        while let Some(piece) = left.front_mut() {
            let len = front.min(piece.len);
            taken.push((piece.offset, len));
            (piece.offset, piece.len) = (piece.offset + len, piece.len - len);
            if piece.len == 0 {
                left.pop_front();
            }
            if let Some(piece) = cut(&mut left, base) {
                assert!(piece.len > 0 && piece.len <= BLOCK as u64, "{piece:?}");
                taken.push((piece.offset, piece.len));
            }
        }
        taken.sort_unstable();
        let end = taken.iter().fold(0, |end, &(offset, len)| {
            assert_eq!(offset, end, "base {base}, {lens:?}, {front} at a time");
            offset + len
        });
        assert_eq!(end, at);
    }
}
