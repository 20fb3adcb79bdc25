//! `direct` and `p2p`: bytes that are not in the page cache, fetched around it, by keepers.
//!
//! ```text
//!   direct   storage ──O_DIRECT──> staging block ──DMA──> device
//!   p2p      storage ──O_DIRECT─────────────────────────> P2P-mapped device memory
//! ```
//!
//! `direct` reads the aligned range around its piece, so it takes any offset and length.
//! `p2p` has nowhere to put the surplus, so the router cuts edges off first.
//!
//! A read that comes back short, or fails, is finished through the page cache: there the
//! kernel says what a plain `pread` says.

use std::time::Instant;

use spinio_plan::{Reason, Route};
use spinio_sys::Errno;

use super::Hands;
use spinio_files::Verdict;
use crate::read::work::{Filled, Piece};
use crate::ctx::cache_route;
use spinio_transfer::bounce::Block;

impl Hands<'_> {
    pub(super) fn direct(&mut self, piece: Piece, block: Block) {
        let begun = Instant::now();
        let Ok(twin) = &self.job.file.direct else {
            return self.job.hand_in(Filled { piece, block, skip: 0, len: 0, begun });
        };
        let unit = u64::from(self.job.file.align.offset);
        let from = self.job.offset + piece.offset;
        let first = from / unit * unit;
        let wanted = (from + piece.len).next_multiple_of(unit) - first;
        let mut got = 0;
        while got < wanted {
            // SAFETY: pieces end at block boundaries of the file, so the aligned range fits the block.
            let n = unsafe {
                self.job.ctx.files.sys().pread(
                    Route::Direct,
                    twin.get(),
                    block.ptr().wrapping_add(got as usize),
                    (wanted - got) as usize,
                    first + got,
                    0,
                )
            };
            match n {
                Ok(0) => break,
                Ok(n) => {
                    got += n as u64;
                    if !got.is_multiple_of(unit) {
                        break;
                    }
                }
                Err(Errno::INTR) => {}
                Err(_) => break,
            }
        }
        let arrived = got.saturating_sub(from - first).min(piece.len);
        self.job.hand_in(Filled { piece, block, skip: (from - first) as usize, len: arrived, begun });
    }

    /// Queues what a helper without a device read; what it could not read takes the page cache.
    pub(super) fn deliver_filled(&mut self, filled: Filled) {
        let Filled { piece, block, skip, len, begun } = filled;
        let copied = piece.route == Route::Copy && !block.pinned;
        let reason = if copied { Reason::NoPinnedMemory } else { piece.reason };
        let delivered = self.deliver(piece, block, skip, len as usize);
        self.job.block_gone();
        if let Err(error) = delivered {
            return self.fail(piece, 0, error);
        }
        if len > 0 {
            self.count(piece, piece.route, reason, len, begun);
            self.queued.push((piece.offset, len, len, None));
        }
        if len < piece.len {
            self.job.reroute(piece, len, Route::Copy, Reason::FellBack);
        }
    }

    pub(super) fn p2p(&mut self, piece: Piece) {
        let begun = Instant::now();
        let Ok(twin) = &self.job.file.direct else {
            return self.job.reroute(piece, 0, cache_route(self.job.to), Reason::NoDirectIo);
        };
        let from = self.job.offset + piece.offset;
        // SAFETY: the range is device memory inside the target's allocation.
        let read = unsafe {
            self.job.ctx.files.sys().pread(
                Route::P2p,
                twin.get(),
                self.address(piece.offset).0 as *mut u8,
                piece.len as usize,
                from,
                0,
            )
        };
        let cached = cache_route(self.job.to);
        match read {
            Ok(n) if n as u64 >= piece.len => {
                self.count(piece, Route::P2p, piece.reason, piece.len, begun);
                self.job.arrived(piece.offset, piece.len, piece.len, None);
            }
            // Short: how much of the rest was written cannot be known, so all of it is read again.
            Ok(n) => {
                let n = (n as u64) / 512 * 512;
                if n > 0 {
                    self.count(piece, Route::P2p, piece.reason, n, begun);
                    self.job.arrived(piece.offset, n, n, None);
                }
                self.job.reroute(piece, n, cached, Reason::FellBack);
            }
            Err(errno) => {
                let reason = match errno {
                    Errno::REMOTEIO | Errno::INVAL => {
                        self.job.ctx.files.p2p.set(self.job.file.storage, self.job.device(), Verdict::Unreachable);
                        Reason::P2pUnreachable
                    }
                    _ => Reason::FellBack,
                };
                self.job.reroute(piece, 0, cached, reason);
            }
        }
    }
}
