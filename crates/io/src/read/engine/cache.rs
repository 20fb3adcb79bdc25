//! `copy` and `store`: bytes of the page cache, moved by the CPU.
//!
//! ```text
//!   copy    page cache ──pread──> bounce buffer ──DMA──> device
//!   store   page cache ──pread────────────────────────> host-mapped device memory
//! ```

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::time::Instant;

use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::RWF_NOWAIT;

use super::Engine;
use crate::read::work::{Outcome, Piece};
use spinio_files::FdIdentity;
use spinio_transfer::Error;
use spinio_transfer::bounce::BounceBuffer;

/// How often a piece is read while its descriptor is replaced and restored.
const TRIES: usize = 4;

/// How reading a piece through the page cache ended.
enum ReadEnd {
    /// All bytes are there.
    Full,
    /// The next byte is not in the page cache (only where the piece was assumed to be cached).
    NotCached,
    /// End of file, or the kernel's error.
    Short(Option<Errno>),
}

impl Engine<'_> {
    /// Reads a piece into memory, front to back.
    fn read_piece(&self, piece: Piece, into: *mut u8) -> (usize, ReadEnd) {
        let (kernel, fd) = (self.request.sys(), self.request.cached_fd(self.role));
        let (len, offset) = (piece.len as usize, self.request.offset + piece.offset);
        let flags = if piece.assumed_cached { RWF_NOWAIT } else { 0 };
        let mut got = 0;
        while got < len {
            // SAFETY: the caller lends `len` bytes at `into`.
            let n =
                unsafe { kernel.pread(piece.route, fd, into.wrapping_add(got), len - got, offset + got as u64, flags) };
            match n {
                // With RWF_NOWAIT a short read says nothing about the end of the file.
                Ok(0) if piece.assumed_cached => return (got, ReadEnd::NotCached),
                Ok(0) => return (got, ReadEnd::Short(None)),
                Ok(n) if piece.assumed_cached && got + n < len => return (got + n, ReadEnd::NotCached),
                Ok(n) => got += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::OPNOTSUPP) if piece.assumed_cached => return (got, ReadEnd::NotCached),
                Err(errno) => return (got, ReadEnd::Short(Some(errno))),
            }
        }
        (got, ReadEnd::Full)
    }

    /// The same; `None` if the bytes may be those of another file, because the program replaced the descriptor during
    /// its own read. The kernel would have finished a read with the first file. A piece is read again where the
    /// descriptor refers to the right file again.
    fn read_verified(&self, piece: Piece, into: *mut u8) -> Option<(usize, ReadEnd)> {
        let (sys, key) = (self.request.sys(), self.request.file.key());
        for _ in 0..TRIES {
            let identity = FdIdentity::of(self.request.fd);
            let read = self.read_piece(piece, into);
            if !sys.is_file(self.request.fd, key) {
                break;
            }
            if identity.is_unchanged() {
                return Some(read);
            }
        }
        None
    }

    /// The descriptor was replaced: reads the piece from the right file through a shadow descriptor, unless that has
    /// failed already.
    fn fd_replaced(&mut self, piece: Piece) {
        // Else the two routes would take turns for ever where storage fails, or its server is gone.
        let can_read_direct = self.request.file.direct_fd.is_ok() && piece.reason != Reason::Fallback;
        if can_read_direct && self.request.device().capabilities().has_dma_engine {
            return self.reroute(piece, 0, Route::Direct, Reason::Fallback);
        }
        let at = self.request.offset + piece.offset;
        self.fail_piece(piece, Error::kernel(Errno::BADF, "read", at, piece.len));
    }

    pub(crate) fn copy(&mut self, piece: Piece, buffer: BounceBuffer, started: Instant) {
        let Some((got, ended)) = self.read_verified(piece, buffer.ptr()) else {
            self.request.staging.release(buffer);
            return self.fd_replaced(piece);
        };
        let reason = if buffer.pinned { piece.reason } else { Reason::NoPinnedMemory };
        if let Err(error) = self.copy_to_device(piece, buffer, 0, got) {
            return self.fail_piece(piece, error);
        }
        self.record(piece, Route::Copy, reason, got as u64, started);
        self.finish_cached(piece, got as u64, ended);
    }

    pub(super) fn store(&mut self, piece: Piece, started: Instant) {
        let Some((got, ended)) = self.read_verified(piece, self.request.address(piece.offset).0 as *mut u8) else {
            return self.fd_replaced(piece);
        };
        self.record(piece, Route::Store, piece.reason, got as u64, started);
        self.finish_cached(piece, got as u64, ended);
    }

    fn finish_cached(&mut self, piece: Piece, got: u64, end: ReadEnd) {
        match end {
            ReadEnd::Full => self.pending.push((piece.offset, piece.len, got, None)),
            ReadEnd::NotCached => {
                if got > 0 {
                    self.pending.push((piece.offset, got, got, None));
                }
                self.outcomes.push(Outcome::Resurvey { offset: piece.offset + got, len: piece.len - got });
            }
            ReadEnd::Short(errno) => {
                let at = self.request.offset + piece.offset + got;
                let error = errno.map(|e| Error::kernel(e, "read", at, piece.len - got));
                self.pending.push((piece.offset, piece.len, got, error));
            }
        }
    }
}
