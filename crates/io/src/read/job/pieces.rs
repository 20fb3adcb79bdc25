//! What there is to do next, and how much of it at a time.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;

use spinio_plan::Route;

use super::Job;
use spinio_host::lock;
use crate::read::beside;
use crate::read::work::{P2P_PIECE, Piece, Who, Work};
use spinio_transfer::bounce::BLOCK;

/// Bytes that are registered with the driver at once, at most. Half of this costs a twentieth of the speed.
const DMA_PIECE: u64 = 128 << 20;

impl Job {
    /// The next thing for `who` to do.
    pub(crate) fn take(&self, who: Who) -> Option<Work> {
        let mut queues = lock(&self.queues);
        if queues.closed {
            return None;
        }
        if who == Who::Beside {
            // He never waits for a block: when there is one he is called again.
            if self.beside.load(Relaxed)
                && let Some(block) = queues.empty.pop()
            {
                if let Some(piece) = beside::cut(&mut queues.dma, self.offset) {
                    self.registered.fetch_add(piece.len, Relaxed);
                    return Some(Work::Fill(piece, block));
                }
                queues.empty.push(block);
            }
            // He goes, and with the lock in hand, so that who finds something for him from now on calls him again.
            queues.beside = false;
            return None;
        }
        if who == Who::Keeper {
            // A keeper never waits for a block: it may be wanted elsewhere, and is called again when there is one.
            match queues.storage.front().map(|p| p.route) {
                Some(Route::Direct) => {
                    if let Some(block) = queues.empty.pop()
                        && let Some(piece) = self.cut(&mut queues.storage)
                    {
                        return Some(Work::Fill(piece, block));
                    }
                }
                Some(_) => return self.cut(&mut queues.storage).map(Work::Piece),
                None => {}
            }
        } else {
            // Who registers gets at the device, and nobody else does until he has done.
            if (who == Who::Caller || queues.dma.is_empty())
                && let Some(filled) = queues.filled.pop_front()
            {
                return Some(Work::Deliver(filled));
            }
            // The driver registers one range at a time, so one thread does it: the caller, who waits anyway.
            if who == Who::Caller
                && let Some(piece) = self.cut(&mut queues.dma)
            {
                return Some(Work::Piece(piece));
            }
            if let Some(piece) = self.cut(&mut queues.cache) {
                return Some(Work::Piece(piece));
            }
        }
        if (who == Who::Keeper || self.may_survey())
            && let Some((offset, len, again)) = queues.windows.pop_front()
        {
            return Some(Work::Window(offset, len, again));
        }
        if who == Who::Mate
            && let Some(chunk) = self.populate.take(&queues.dma)
        {
            return Some(Work::Populate(chunk));
        }
        if who == Who::Keeper {
            // It goes, and with the lock in hand, so that who finds something for it from now on calls it again.
            queues.keepers -= 1;
        }
        None
    }

    /// Whether callers and mates can ask the residency: a stranger's question needs a twin.
    pub(super) fn may_survey(&self) -> bool {
        self.file.rights != spinio_files::Rights::Stranger
    }

    fn cut(&self, queue: &mut VecDeque<Piece>) -> Option<Piece> {
        let front = queue.front_mut()?;
        let at = self.offset + front.offset;
        let to_boundary = |unit: u64| (at / unit + 1) * unit - at;
        let most = match front.route {
            // Short requests are cut finer: several commands in flight hide each other's latency.
            Route::Direct => self.whole_chunks(at, self.direct_piece.min(to_boundary(BLOCK as u64))),
            Route::P2p => self.whole_chunks(at, to_boundary(P2P_PIECE)),
            Route::Dma => self.dma_piece(front.len, at),
            Route::Copy | Route::Store | Route::Gather => self.copy_piece.min(to_boundary(BLOCK as u64)),
        };
        if front.len <= most {
            return queue.pop_front();
        }
        let piece = Piece { len: most, ..*front };
        front.offset += most;
        front.len -= most;
        Some(piece)
    }

    /// A command of an array ends with a chunk.
    fn whole_chunks(&self, at: u64, most: u64) -> u64 {
        self.stripe.map_or(most, |stripe| stripe.whole_chunks(at, most) - at)
    }

    /// Bytes of the next DMA: short ones at both ends of the request, because the first DMA waits for the first
    /// registration and the caller waits for the last DMA.
    fn dma_piece(&self, left: u64, at: u64) -> u64 {
        let begun = self.registered.load(Relaxed);
        let to_come = self.len.saturating_sub(begun);
        let most = if self.beside.load(Relaxed) { beside::REGISTERED } else { DMA_PIECE };
        let most = most.min(self.device().abilities().max_pin);
        let piece = match to_come {
            short if short <= 16 << 20 => (short / 2).max(4 << 20),
            _ => begun.min(to_come / 2).max(8 << 20),
        };
        // Whole pages of the file, so that no page is registered twice.
        let end = ((at + piece.min(most)) / (64 << 10) * (64 << 10)).max(at + (64 << 10));
        let piece = (end - at).min(left);
        self.registered.fetch_add(piece, Relaxed);
        piece
    }
}
