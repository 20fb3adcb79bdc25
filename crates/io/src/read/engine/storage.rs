//! `direct` and `p2p`: bytes that are not in the page cache, fetched around it, by shadow workers, or by the caller through the
//! ring (ring.rs).
//!
//! ```text
//!   direct   storage ──O_DIRECT──> bounce buffer ──DMA──> device
//!   p2p      storage ──O_DIRECT─────────────────────────> P2P-mapped device memory
//! ```
//!
//! `direct` reads the aligned range around its piece, so it takes any offset and length.
//! `p2p` has nowhere to put the surplus, so the planner cuts edges off first.
//!
//! A read that comes back short, or fails, is finished through the page cache: there the result is that of a plain
//! `pread`.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::time::Instant;

use spinio_plan::{Reason, Route};
use spinio_sys::Errno;

use super::Engine;
use crate::decide::cache_route;
use crate::read::work::{FilledBuffer, Outcome, Piece};
use spinio_files::P2pTrust;
use spinio_host::syscalls::pread_full;
use spinio_transfer::bounce::BounceBuffer;

impl Engine<'_> {
    pub(crate) fn direct(&mut self, piece: Piece, buffer: BounceBuffer, started: Instant) {
        let Ok(shadow) = &self.request.file.direct_fd else {
            return self.outcomes.push(Outcome::Filled(FilledBuffer { piece, buffer, skip: 0, len: 0, started }));
        };
        let (range, unit) = self.aligned_range(piece);
        // What fails here is read again through the page cache, which reports the error.
        // SAFETY: the aligned range fits the buffer.
        let (got, _) =
            unsafe { pread_full(self.request.sys(), Route::Direct, shadow.get(), buffer.ptr(), range, unit as usize) };
        self.outcomes.push(Outcome::Filled(self.filled(piece, buffer, got, started)));
    }

    /// The range of the file that direct I/O reads for a piece, its start and its length, and the unit of both. It fits a
    /// buffer: pieces end at block boundaries of the file.
    pub(super) fn aligned_range(&self, piece: Piece) -> ((u64, usize), u64) {
        let unit = u64::from(self.request.file.direct_align.offset);
        let from = self.request.offset + piece.offset;
        let first = from / unit * unit;
        ((first, ((from + piece.len).next_multiple_of(unit) - first) as usize), unit)
    }

    /// A buffer into which `got` bytes of the aligned range were read.
    pub(super) fn filled(&self, piece: Piece, buffer: BounceBuffer, got: usize, started: Instant) -> FilledBuffer {
        let skip = self.request.offset + piece.offset - self.aligned_range(piece).0.0;
        let len = (got as u64).saturating_sub(skip).min(piece.len);
        FilledBuffer { piece, buffer, skip: skip as usize, len, started }
    }

    /// Queues the copy of what a shadow worker read; what it could not read takes the page cache.
    pub(crate) fn copy_filled(&mut self, filled: FilledBuffer) {
        let FilledBuffer { piece, buffer, skip, len, started } = filled;
        let delivered = self.copy_to_device(piece, buffer, skip, len as usize);
        self.outcomes.push(Outcome::BufferReturned);
        if let Err(error) = delivered {
            return self.fail_piece(piece, error);
        }
        if len > 0 {
            self.record(piece, piece.route, piece.reason, len, started);
            self.pending.push((piece.offset, len, len, None));
        }
        if len < piece.len {
            self.reroute(piece, len, Route::Copy, Reason::Fallback);
        }
    }

    pub(super) fn p2p(&mut self, piece: Piece, started: Instant) {
        let Ok(shadow) = &self.request.file.direct_fd else {
            return self.reroute(piece, 0, cache_route(self.request.device().capabilities()), Reason::NoDirectIo);
        };
        let from = self.request.offset + piece.offset;
        // SAFETY: the range is device memory inside the target's allocation.
        let read = unsafe {
            self.request.sys().pread(
                Route::P2p,
                shadow.get(),
                self.request.address(piece.offset).0 as *mut u8,
                piece.len as usize,
                from,
                0,
            )
        };
        self.finish_p2p(piece, read, started);
    }

    /// What came of reading a piece into device memory.
    pub(super) fn finish_p2p(&mut self, piece: Piece, read: Result<usize, Errno>, started: Instant) {
        let cached = cache_route(self.request.device().capabilities());
        match read {
            Ok(n) if n as u64 >= piece.len => {
                self.record(piece, Route::P2p, piece.reason, piece.len, started);
                self.done(piece.offset, piece.len, piece.len, None);
            }
            // Short: how much of the rest was written cannot be known, so all of it is read again.
            Ok(n) => {
                let n = (n as u64) / 512 * 512;
                if n > 0 {
                    self.record(piece, Route::P2p, piece.reason, n, started);
                    self.done(piece.offset, n, n, None);
                }
                self.reroute(piece, n, cached, Reason::Fallback);
            }
            Err(errno) => {
                let reason = match errno {
                    Errno::REMOTEIO | Errno::INVAL => {
                        self.request.ctx.files.p2p_trust.set(
                            self.request.file.storage,
                            self.request.device(),
                            P2pTrust::Unreachable,
                        );
                        Reason::P2pUnreachable
                    }
                    _ => Reason::Fallback,
                };
                self.reroute(piece, 0, cached, reason);
            }
        }
    }
}
