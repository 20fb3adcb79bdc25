//! The units of a large read: what a thread takes from the queues, and what came of it.

use std::ops::Range;
use std::time::Instant;

use spinio_plan::{Reason, Route, Segment};
use spinio_transfer::Error;
use spinio_transfer::bounce::BounceBuffer;

/// Bytes of a request above which its caller sleeps while it waits, and leaves unregistering pages to other threads.
pub(crate) const LONG_REQUEST: u64 = 64 << 20;

/// Bytes of one P2P command at most.
pub(crate) const MAX_P2P_PIECE: u64 = 4 << 20;

/// The kind of a thread that works on a request: decides which descriptors it has, and whether it may call the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The thread of the program: its descriptor, and the device.
    Caller,
    /// A worker with the program's descriptor table: the same, while the caller waits in its call.
    CopyWorker,
    /// A worker with the shadow descriptor table: the shadow descriptors, and no device.
    ShadowWorker,
}

/// A segment, or part of one, that one thread moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// From the start of the request.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) route: Route,
    pub(crate) reason: Reason,
    /// Only assumed to be cached: read with RWF_NOWAIT, and survey again where that stops.
    pub(crate) assumed_cached: bool,
}

/// Segments as they are, a piece each.
pub(crate) fn pieces_of(segments: &[Segment]) -> Vec<Piece> {
    let piece = |s: &Segment| {
        let &Segment { offset, len, route, reason, .. } = s;
        Piece { offset, len, route, reason, assumed_cached: false }
    };
    segments.iter().map(piece).collect()
}

/// Bytes of the request that are not planned yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlanRange {
    /// From the start of the request.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// An assumption about it was wrong: survey all of it.
    pub(crate) recheck: bool,
}

/// A bounce buffer that a shadow worker filled, for a thread that may call the device.
pub(crate) struct FilledBuffer {
    pub(crate) piece: Piece,
    pub(crate) buffer: BounceBuffer,
    /// Where the bytes of the piece begin in the buffer, and how many arrived.
    pub(crate) skip: usize,
    pub(crate) len: u64,
    pub(crate) started: Instant,
}

/// A chunk whose page tables a worker fills: its range, from the start of the request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) index: usize,
    pub(crate) range: Range<u64>,
}

/// What a thread takes from the queues.
pub(crate) enum Work {
    Piece(Piece),
    PlanRange(PlanRange),
    /// Read a piece from storage into this buffer.
    FillBuffer(Piece, BounceBuffer),
    /// Queue the copy of what a shadow worker read.
    CopyToDevice(FilledBuffer),
    /// Fill page tables ahead of the caller.
    Prefault(Chunk),
}

/// What came of it. An engine returns these; the request applies them.
pub(crate) enum Outcome {
    /// `got` of `len` bytes arrived, and then `error` or the end of the file came.
    Done { offset: u64, len: u64, got: u64, error: Option<Error> },
    /// The bytes of a piece from `done` on take another route.
    Reroute { piece: Piece, done: u64, route: Route, reason: Reason },
    /// Bytes that were assumed to be cached are not.
    Resurvey { offset: u64, len: u64 },
    /// A buffer was filled from storage.
    Filled(FilledBuffer),
    /// A buffer that was lent to the shadow workers has left the request.
    BufferReturned,
    /// There is work for more threads.
    WakeWorkers,
}
