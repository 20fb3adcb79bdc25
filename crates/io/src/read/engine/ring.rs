//! `direct` and `p2p` without another thread of the process: the caller starts its reads in the ring, and goes on.
//!
//! ```text
//!   caller: start ──> ring ──> kernel thread ──> storage        up to 16 pieces of a request in flight
//!           other work of the request
//!           poll <── completion ── direct: queue the copy; p2p: done
//! ```
//!
//! The ring and the slot of the file: host/src/storage_ring.rs, files/src/ring_slot.rs. Results are taken as those of
//! shadow workers are, in storage.rs.

#![expect(unsafe_code, reason = "the kernel reads into bounce buffers and device memory")]

use std::time::{Duration, Instant};

use spinio_host::storage_ring::ReadTicket;
use spinio_plan::Route;
use spinio_transfer::bounce::BounceBuffer;

use super::{Engine, RingPath, RingPiece};
use crate::read::work::Piece;

/// Pieces of one request in the ring.
const MAX_IN_FLIGHT: usize = 16;

impl Engine<'_> {
    /// Room for one more read.
    pub(crate) fn reserve(&self, path: &RingPath) -> Option<ReadTicket> {
        if self.in_ring.len() < MAX_IN_FLIGHT { path.ring.reserve() } else { None }
    }

    /// Pieces in the ring.
    pub(crate) fn reads_in_ring(&self) -> usize {
        self.in_ring.len()
    }

    /// Starts a `direct` piece.
    pub(crate) fn start_direct(&mut self, ticket: ReadTicket, slot: u32, piece: Piece, buffer: BounceBuffer) {
        let (range, _) = self.aligned_range(piece);
        // SAFETY: the aligned range fits the buffer, which `in_ring` has until the read is over.
        let read = unsafe { ticket.start(slot, buffer.ptr(), range.1 as u32, range.0) };
        self.in_ring.push(RingPiece { read, piece, buffer: Some(buffer), started: Instant::now() });
    }

    /// Starts a `p2p` piece.
    pub(crate) fn start_p2p(&mut self, ticket: ReadTicket, slot: u32, piece: Piece) {
        let to = self.request.address(piece.offset).0 as *mut u8;
        let from = self.request.offset + piece.offset;
        // SAFETY: the range is device memory inside the target's allocation.
        let read = unsafe { ticket.start(slot, to, piece.len as u32, from) };
        self.in_ring.push(RingPiece { read, piece, buffer: None, started: Instant::now() });
    }

    /// Takes the results that are there; false if there is none.
    pub(crate) fn poll_ring(&mut self) -> bool {
        let mut any = false;
        let mut at = 0;
        while at < self.in_ring.len() {
            let Some(result) = self.in_ring[at].read.poll() else {
                at += 1;
                continue;
            };
            any = true;
            let RingPiece { piece, buffer, started, .. } = self.in_ring.remove(at);
            let result = self.request.sys().on_completion(result);
            match buffer {
                Some(buffer) => {
                    let filled = self.filled(piece, buffer, result.unwrap_or(0), started);
                    self.copy_filled(filled);
                }
                None => {
                    debug_assert_eq!(piece.route, Route::P2p);
                    self.finish_p2p(piece, result, started);
                }
            }
        }
        any
    }

    /// Waits for all of them.
    pub(super) fn drain_ring(&mut self) {
        while !self.in_ring.is_empty() {
            if !self.poll_ring() {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }
}
