//! What there is to do next, and how much of it at a time.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;

use spinio_plan::Route;

use super::ReadRequest;
use crate::read::work::{MAX_P2P_PIECE, Piece, Role, Work};
use spinio_host::lock;
use spinio_transfer::bounce::BUFFER_SIZE;

/// Bytes that are registered with the driver at once, at most. Half of this costs a twentieth of the speed.
const MAX_DMA_PIECE: u64 = 128 << 20;

impl ReadRequest {
    /// The next thing for `who` to do.
    pub(crate) fn next_work(&self, role: Role) -> Option<Work> {
        let mut queues = lock(&self.queues);
        if queues.closed {
            return None;
        }
        if role == Role::ShadowWorker {
            // A keeper never waits for a block: it may be wanted elsewhere, and is called again when there is one.
            match queues.storage.front().map(|p| p.route) {
                Some(Route::Direct) => {
                    if let Some(block) = queues.empty.pop()
                        && let Some(piece) = self.split(&mut queues.storage)
                    {
                        return Some(Work::FillBuffer(piece, block));
                    }
                }
                Some(_) => return self.split(&mut queues.storage).map(Work::Piece),
                None => {}
            }
        } else {
            // Who registers gets at the device, and nobody else does until he has done.
            if (role == Role::Caller || queues.dma.is_empty())
                && let Some(filled) = queues.filled.pop_front()
            {
                return Some(Work::CopyToDevice(filled));
            }
            // The driver registers one range at a time, so one thread does it: the caller, who waits anyway.
            if role == Role::Caller
                && let Some(piece) = self.split(&mut queues.dma)
            {
                return Some(Work::Piece(piece));
            }
            if let Some(piece) = self.split(&mut queues.cache) {
                return Some(Work::Piece(piece));
            }
        }
        if (role == Role::ShadowWorker || self.can_survey())
            && let Some((offset, len, recheck)) = queues.ranges.pop_front()
        {
            return Some(Work::PlanRange(offset, len, recheck));
        }
        if role == Role::CopyWorker
            && let Some(chunk) = self.prefault.take_chunk(&queues.dma)
        {
            return Some(Work::Prefault(chunk));
        }
        if role == Role::ShadowWorker {
            // It goes, and with the lock in hand, so that who finds something for it from now on calls it again.
            queues.shadow_workers -= 1;
        }
        None
    }

    /// Whether callers and mates can ask the residency: a stranger's question needs a twin.
    pub(super) fn can_survey(&self) -> bool {
        self.file.residency_access != spinio_files::ResidencyAccess::NotPermitted
    }

    fn split(&self, queue: &mut VecDeque<Piece>) -> Option<Piece> {
        let front = queue.front_mut()?;
        let at = self.offset + front.offset;
        let to_boundary = |unit: u64| (at / unit + 1) * unit - at;
        let max = match front.route {
            // Short requests are cut finer: several commands in flight hide each other's latency.
            Route::Direct => self.align_to_chunks(at, self.direct_piece.min(to_boundary(BUFFER_SIZE as u64))),
            Route::P2p => self.align_to_chunks(at, to_boundary(MAX_P2P_PIECE)),
            Route::Dma => self.dma_piece_len(front.len, at),
            Route::Copy | Route::Store | Route::Gather => self.copy_piece.min(to_boundary(BUFFER_SIZE as u64)),
        };
        if front.len <= max {
            return queue.pop_front();
        }
        let piece = Piece { len: max, ..*front };
        front.offset += max;
        front.len -= max;
        Some(piece)
    }

    /// A command of an array ends with a chunk.
    fn align_to_chunks(&self, at: u64, most: u64) -> u64 {
        self.stripe.map_or(most, |stripe| stripe.end_at_chunk(at, most) - at)
    }

    /// Bytes of the next DMA: short ones at both ends of the request, because the first DMA waits for the first
    /// registration and the caller waits for the last DMA.
    fn dma_piece_len(&self, available: u64, at: u64) -> u64 {
        let registered = self.registered.load(Relaxed);
        let remaining = self.len.saturating_sub(registered);
        let most = MAX_DMA_PIECE.min(self.device().capabilities().max_pin);
        let piece = match remaining {
            short if short <= 16 << 20 => (short / 2).max(4 << 20),
            _ => registered.min(remaining / 2).max(8 << 20),
        };
        // Whole pages of the file, so that no page is registered twice.
        let end = ((at + piece.min(most)) / (64 << 10) * (64 << 10)).max(at + (64 << 10));
        let piece = (end - at).min(available);
        self.registered.fetch_add(piece, Relaxed);
        piece
    }
}
