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
use spinio_transfer::bounce::BUFFER_SIZE;

/// Bytes that are registered at once where somebody copies beside it: he needs new blocks more often.
pub(crate) const MAX_REGISTERED: u64 = 64 << 20;

/// What the caller does sooner than a helper would.
const CALLER_TAIL: u64 = 8 << 20;

/// Blocks that a request may have lent for this: what a helper fills while so much is registered. A request that is soon
/// over has fewer, so that the ring need not grow for it.
pub(crate) fn max_buffers(len: u64) -> usize {
    (len / (64 << 20)).min(6) as usize
}

/// What the ring may grow to for this: as many blocks again are on their way to the device.
pub(crate) const POOL_LIMIT: u64 = 12 * BUFFER_SIZE as u64;

/// Whether there is anything for a helper.
pub(crate) fn has_tail(queue: &VecDeque<Piece>) -> bool {
    queue.len() > 1 || queue.back().is_some_and(|back| back.len > CALLER_TAIL)
}

/// The end of what is to be registered, for a helper to copy; `base` is where the request begins in its file.
pub(crate) fn split_tail(queue: &mut VecDeque<Piece>, base: u64) -> Option<Piece> {
    let back = queue.back().filter(|_| has_tail(queue))?;
    let end = base + back.offset + back.len;
    // Whole pages, so that the caller's last one is not in two hands.
    let from = end.saturating_sub(BUFFER_SIZE as u64).next_multiple_of(64 << 10).max(base + back.offset);
    let piece = Piece {
        offset: from - base,
        len: end - from,
        route: Route::Copy,
        reason: Reason::TailCopy,
        assumed_cached: back.assumed_cached,
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
        pieces.iter().map(|&(offset, len)| Piece { offset, len, route, reason, assumed_cached: false }).collect()
    }

    #[test]
    fn tail_copier_takes_end_and_caller_keeps_last_piece() {
        let base = 12_345;
        let mut remaining = queue(&[(0, 16 * MIB), (16 * MIB, 3 * MIB + 777)]);
        let first = split_tail(&mut remaining, base).unwrap();
        assert_eq!((first.offset + first.len, first.route), (19 * MIB + 777, Route::Copy));
        assert!(first.len <= BUFFER_SIZE as u64 && (base + first.offset).is_multiple_of(64 << 10), "{first:?}");
        let rest: Vec<_> = std::iter::from_fn(|| split_tail(&mut remaining, base)).collect();
        assert_eq!(remaining.len(), 1);
        assert!(
            remaining[0].offset == 0 && remaining[0].len <= CALLER_TAIL && remaining[0].route == Route::Dma,
            "{remaining:?}"
        );
        assert_eq!(rest.last().unwrap().offset, remaining[0].len);
        assert_eq!(split_tail(&mut VecDeque::new(), 0), None);
    }

    /// Whatever is taken from both ends, every byte is in one hand, and none in two.
    #[test]
    fn splits_from_both_ends_cover_every_byte_once() {
        let lens = [MIB, 5 * MIB + 1, 4095, 33 * MIB + 4097, 12 * MIB, 1];
        for base in [0, 1, 4096, 65_537, (1 << 40) + 12_345] {
            for front in [777, 64 << 10, 3 * MIB + 5, 64 * MIB] {
                for count in 1..=lens.len() {
                    split_both_ends(base, &lens[..count], front);
                }
            }
        }
    }

    /// Windows are planned by several threads, so the end of the queue may be the start of the file.
    #[test]
    fn last_queued_piece_may_start_the_file() {
        let mut remaining = queue(&[(16 * MIB, 16 * MIB), (0, 3 * MIB + 4096)]);
        let cuts: Vec<_> =
            std::iter::from_fn(|| split_tail(&mut remaining, 0)).map(|piece| (piece.offset, piece.len)).collect();
        assert_eq!(cuts[..2], [(MIB + (64 << 10), 2 * MIB - (60 << 10)), (0, MIB + (64 << 10))]);
        assert!(cuts[2..].iter().all(|&(offset, _)| offset >= 16 * MIB), "{cuts:?}");
    }

    fn split_both_ends(base: u64, lens: &[u64], front: u64) {
        let mut at = 0;
        let begins = lens.iter().map(|&len| {
            at += len;
            (at - len, len)
        });
        let mut remaining = queue(&begins.collect::<Vec<_>>());
        let mut taken = Vec::new();
        while let Some(piece) = remaining.front_mut() {
            let len = front.min(piece.len);
            taken.push((piece.offset, len));
            (piece.offset, piece.len) = (piece.offset + len, piece.len - len);
            if piece.len == 0 {
                remaining.pop_front();
            }
            if let Some(piece) = split_tail(&mut remaining, base) {
                assert!(piece.len > 0 && piece.len <= BUFFER_SIZE as u64, "{piece:?}");
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
