//! The functions of a runtime that batches add.

use spinio_device::Allocation;
use spinio_io::Runtime;
use spinio_sys::Errno;
use spinio_transfer::Error;

use crate::ctx::BatchCtx;
use crate::list::{List, Many, Piece};
use crate::run::{Done, begin};
use crate::ticket::Ticket;

/// Batches of a runtime.
pub trait Batches {
    /// Reads all pieces and waits for them; what became of each stands in its result.
    fn batch(&self, pieces: &mut [Piece]) -> Result<Done, Error> {
        self.batch_into(pieces, &[])
    }

    /// As [`Batches::batch`]; allocations that are known already are not asked for again.
    fn batch_into(&self, pieces: &mut [Piece], known: &[Allocation]) -> Result<Done, Error>;

    /// Many reads of one file. EINVAL where an array is shorter than the results.
    fn batch_file(&self, many: Many<'_>, known: &[Allocation]) -> Result<Done, Error>;

    /// Begins a batch, behind what this thread has queued so far; the ticket waits for it.
    ///
    /// # Safety
    /// Until [`Ticket::wait`] has returned the pieces must stay, and nobody else use them; descriptors must stay open and
    /// the memory allocated.
    unsafe fn submit(&self, pieces: *mut [Piece]) -> Result<Ticket, Error>;
}

impl Batches for Runtime {
    fn batch_into(&self, pieces: &mut [Piece], known: &[Allocation]) -> Result<Done, Error> {
        Ok(begin(&BatchCtx::of(self), List::of_pieces(pieces), known, true)?.run())
    }

    fn batch_file(&self, many: Many<'_>, known: &[Allocation]) -> Result<Done, Error> {
        let list = List::of_many(many).ok_or(Error::kernel(Errno::INVAL, "read a batch", 0, 0))?;
        Ok(begin(&BatchCtx::of(self), list, known, true)?.run())
    }

    unsafe fn submit(&self, pieces: *mut [Piece]) -> Result<Ticket, Error> {
        // SAFETY: passed on to the caller.
        let list = List::of_pieces(unsafe { &mut *pieces });
        let ctx = BatchCtx::of(self);
        Ok(Ticket::new(&ctx, begin(&ctx, list, &[], true)?))
    }
}
