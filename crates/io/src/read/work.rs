//! What there is to do in a job, and what waits for it.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use spinio_plan::{Reason, Route};

use spinio_transfer::bounce::BounceBuffer;

/// Bytes of a request above which its caller sleeps while it waits, and leaves giving back pins to others.
pub(crate) const LONG_REQUEST: u64 = 64 << 20;

/// Bytes of one P2P command at most.
pub(crate) const MAX_P2P_PIECE: u64 = 4 << 20;

/// Who works: it decides which descriptors exist, and whether the device may be called (`crew` says why).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The program's thread: its descriptor, and the device.
    Caller,
    /// A helper with the program's descriptor table: the same, while the caller waits in its call.
    CopyWorker,
    /// A helper with our own table: the twins, and no device.
    ShadowWorker,
}

/// A block that a helper without a device filled and that somebody who may call the device has to deliver.
pub(crate) struct FilledBuffer {
    pub(crate) piece: Piece,
    pub(crate) block: BounceBuffer,
    /// Where the piece's bytes begin in the block, and how many arrived.
    pub(crate) skip: usize,
    pub(crate) len: u64,
    pub(crate) started: Instant,
}

/// A segment, or part of one, that a thread took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// From the start of the request.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) route: Route,
    pub(crate) reason: Reason,
    /// Only believed cached: read with RWF_NOWAIT, and look again where that stops.
    pub(crate) assumed_cached: bool,
}

/// A chunk that was taken: what is to be filled of it, from the start of the request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) index: usize,
    pub(crate) range: Range<u64>,
}

/// What there is to do next.
pub(crate) enum Work {
    Piece(Piece),
    /// Survey and plan these bytes. `true`: look properly, the presumption was wrong.
    PlanRange(u64, u64, bool),
    /// Read a piece from storage into this buffer.
    FillBuffer(Piece, BounceBuffer),
    /// Queue the copy of what a shadow worker read.
    CopyToDevice(FilledBuffer),
    /// Fill page tables ahead of the caller.
    Prefault(Chunk),
}

/// The queues of a job, and the blocks that helpers have in hand.
#[derive(Default)]
pub(crate) struct WorkQueues {
    pub(crate) ranges: VecDeque<(u64, u64, bool)>,
    pub(crate) cache: VecDeque<Piece>,
    pub(crate) dma: VecDeque<Piece>,
    pub(crate) storage: VecDeque<Piece>,
    /// Blocks for keepers to fill, blocks they filled, and how many are lent to the job in all.
    pub(crate) empty: Vec<BounceBuffer>,
    pub(crate) filled: VecDeque<FilledBuffer>,
    pub(crate) lent_out: usize,
    /// Keepers that were called and have not gone.
    pub(crate) shadow_workers: usize,
    /// Nobody begins anything any more.
    pub(crate) closed: bool,
}

impl WorkQueues {
    /// Pieces that wait for a block.
    pub(crate) fn direct_pieces(&self, piece: u64) -> usize {
        let direct = self.storage.iter().filter(|p| p.route == Route::Direct);
        direct.map(|p| p.len.div_ceil(piece) as usize).sum()
    }

    /// Whether pieces wait for a block and none is in anybody's hands, so that nobody will bring one back.
    pub(crate) fn is_starved(&self) -> bool {
        self.lent_out == 0 && self.storage.iter().any(|p| p.route == Route::Direct)
    }

    /// Keepers that would find something to do.
    pub(crate) fn shadow_workers_needed(&self, piece: u64, needs_shadow: bool) -> usize {
        let p2p: usize =
            self.storage.iter().filter(|p| p.route == Route::P2p).map(|p| p.len.div_ceil(MAX_P2P_PIECE) as usize).sum();
        let surveys = if needs_shadow { self.ranges.len() } else { 0 };
        self.direct_pieces(piece).min(self.empty.len()) + p2p + surveys
    }

    /// The queue of a route.
    pub(crate) fn for_route(&mut self, route: Route) -> &mut VecDeque<Piece> {
        match route {
            Route::Direct | Route::P2p => &mut self.storage,
            Route::Dma => &mut self.dma,
            Route::Copy | Route::Store | Route::Gather => &mut self.cache,
        }
    }
}
