//! A read all of whose bytes are absent and that one P2P segment moves: made by the calling thread, with one system call.
//!
//! ```text
//!   planned: one segment, p2p ──> the thread's ring (host/src/thread_rings.rs) ──> storage ──> device memory
//!                │ no ring, no slot, an error, a short read
//!                └────> the queues of a request, and shadow workers: request/
//! ```
//!
//! Handing such a read to another thread and back costs two wake-ups, which is more than all the rest. Here the caller waits
//! in the kernel, as in a `pread` of its own with O_DIRECT; a server that does not answer is never waited for in this way,
//! because only local disks are read so (`Files::thread_slot`). The program's signals are held meanwhile: a handler that left
//! by `longjmp` would leave storage writing into memory that the program uses again.
//!
//! The mask that `io_uring_enter` takes for its wait would save the two calls that hold them, and is not enough. The kernel
//! puts the old mask back before it returns: after the read a handler would find the ring, the file and the count of requests
//! in use, and jump away from them; and where the wait ends early, so that a signal without a handler can end the process, it
//! would find the read in flight.

#![expect(unsafe_code, reason = "the kernel reads into device memory")]

use std::time::Instant;

use spinio_host::thread_rings::ThreadRing;
use spinio_plan::Route;
use spinio_sys::linux;

use super::params::ReadParams;
use super::work::Piece;

/// The piece that is all of the request, if P2P moves it.
fn only_p2p(request: &ReadParams, pieces: &[Piece]) -> Option<Piece> {
    let &[piece] = pieces else { return None };
    let whole = piece.route == Route::P2p && piece.offset == 0 && piece.len == request.len;
    (whole && piece.len <= ThreadRing::MAX_READ as u64).then_some(piece)
}

/// The bytes of the request, all of them; `None`: nothing came of it, or the thread does not hold signals, and the request goes
/// the ordinary way.
pub(crate) fn read(request: &ReadParams, pieces: &[Piece]) -> Option<u64> {
    let piece = only_p2p(request, pieces).filter(|_| linux::holds_signals())?;
    let (ring, file) = request.ctx.files.thread_slot(&request.file)?;
    let (to, started) = (request.dest.addr.0 as *mut u8, Instant::now());
    let to = (to, piece.len as usize);
    let mut on_wait = linux::deliver_default_signals;
    // SAFETY: the range is device memory inside the target's allocation; the program's handlers do not run meanwhile.
    let got = unsafe { ring.read(Route::P2p, file, to, request.offset, &mut on_wait) }?;
    // An error or an early end is found again by the ordinary way, which takes what follows from it.
    if got != Ok(piece.len as usize) {
        return None;
    }
    request.ctx.files.stats().record_piece(&request.span, Route::P2p, piece.reason, 0, piece.len, started);
    Some(piece.len)
}
