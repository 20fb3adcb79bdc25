//! `copy` and `store`: bytes of the page cache, moved by the CPU.
//!
//! ```text
//!   copy    page cache ──pread──> staging block ──DMA──> device
//!   store   page cache ──pread────────────────────────> host-mapped device memory
//! ```

use std::time::Instant;

use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::RWF_NOWAIT;

use super::Hands;
use spinio_transfer::Error;
use spinio_files::FdIdentity;
use crate::read::work::{Filled, Piece};
use spinio_transfer::bounce::Block;

/// How often a piece is read while its descriptor is given away and comes back.
const TRIES: usize = 4;

/// How reading a piece through the page cache ended.
enum Ended {
    /// All bytes are there.
    Full,
    /// The next byte is not in the page cache (only where the piece was presumed cached).
    NotCached,
    /// End of file, or the kernel's error.
    Short(Option<Errno>),
}

impl Hands<'_> {
    /// Reads a piece into memory, front to back.
    fn fill(&self, piece: Piece, into: *mut u8) -> (usize, Ended) {
        let (kernel, fd) = (self.job.ctx.files.sys(), self.cached_fd());
        let (len, offset) = (piece.len as usize, self.job.offset + piece.offset);
        let flags = if piece.presumed { RWF_NOWAIT } else { 0 };
        let mut got = 0;
        while got < len {
            // SAFETY: the caller lends `len` bytes at `into`.
            let n =
                unsafe { kernel.pread(piece.route, fd, into.wrapping_add(got), len - got, offset + got as u64, flags) };
            match n {
                // With RWF_NOWAIT a short read says nothing about the end of the file.
                Ok(0) if piece.presumed => return (got, Ended::NotCached),
                Ok(0) => return (got, Ended::Short(None)),
                Ok(n) if piece.presumed && got + n < len => return (got + n, Ended::NotCached),
                Ok(n) => got += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::OPNOTSUPP) if piece.presumed => return (got, Ended::NotCached),
                Err(errno) => return (got, Ended::Short(Some(errno))),
            }
        }
        (got, Ended::Full)
    }

    /// The same; `None` if the bytes may be those of another file: the program may have given the descriptor away under its
    /// own read, which the kernel would have gone on serving. Where it means the right file again the piece is read again.
    fn fill_from_the_file(&self, piece: Piece, into: *mut u8) -> Option<(usize, Ended)> {
        let (kernel, key) = (self.job.ctx.files.sys(), self.job.file.key());
        for _ in 0..TRIES {
            let identity = FdIdentity::of(self.job.fd);
            let filled = self.fill(piece, into);
            if !kernel.names(self.job.fd, key) {
                break;
            }
            if identity.is_unchanged() {
                return Some(filled);
            }
        }
        None
    }

    /// Reads the piece from the right file after all, through a twin.
    fn descriptor_went(&mut self, piece: Piece) {
        if self.job.file.direct.is_ok() && self.job.device().abilities().copies {
            return self.job.reroute(piece, 0, Route::Direct, Reason::FellBack);
        }
        let at = self.job.offset + piece.offset;
        self.fail(piece, 0, Error::kernel(Errno::BADF, "read", at, piece.len));
    }

    pub(super) fn copy(&mut self, piece: Piece) {
        let begun = Instant::now();
        let block = match self.block() {
            Ok(block) => block,
            Err(e) => return self.fail(piece, 0, self.device_error(e, piece)),
        };
        let Some((got, ended)) = self.fill_from_the_file(piece, block.ptr()) else {
            self.job.staging.give_back(block);
            return self.descriptor_went(piece);
        };
        let reason = if block.pinned { piece.reason } else { Reason::NoPinnedMemory };
        if let Err(error) = self.deliver(piece, block, 0, got) {
            return self.fail(piece, 0, error);
        }
        self.count(piece, Route::Copy, reason, got as u64, begun);
        self.cached_piece_ended(piece, got as u64, ended);
    }

    /// The first half of that, into a block that was lent; the caller does the second half. What did not come, or came from
    /// another file, is copied once more, and that says why.
    pub(super) fn copy_beside(&mut self, piece: Piece, block: Block) {
        let begun = Instant::now();
        let len = self.fill_from_the_file(piece, block.ptr()).map_or(0, |(got, _)| got as u64);
        self.job.hand_in(Filled { piece, block, skip: 0, len, begun });
    }

    pub(super) fn store(&mut self, piece: Piece) {
        let begun = Instant::now();
        let Some((got, ended)) = self.fill_from_the_file(piece, self.address(piece.offset).0 as *mut u8) else {
            return self.descriptor_went(piece);
        };
        self.count(piece, Route::Store, piece.reason, got as u64, begun);
        self.cached_piece_ended(piece, got as u64, ended);
    }

    fn cached_piece_ended(&mut self, piece: Piece, got: u64, ended: Ended) {
        match ended {
            Ended::Full => self.queued.push((piece.offset, piece.len, got, None)),
            Ended::NotCached => {
                if got > 0 {
                    self.queued.push((piece.offset, got, got, None));
                }
                self.job.look_again(piece.offset + got, piece.len - got);
                // Of somebody else's file only a keeper can ask.
                self.job.call_helpers();
            }
            Ended::Short(errno) => {
                let at = self.job.offset + piece.offset + got;
                let error = errno.map(|e| Error::kernel(e, "read", at, piece.len - got));
                self.queued.push((piece.offset, piece.len, got, error));
            }
        }
    }
}
