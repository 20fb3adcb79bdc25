//! The queues of a large read: pieces in, work out. Pure: no lock, no system call, no device.
//!
//! ```text
//!   ranges ──planned──┬─> cache    ──┐
//!                     ├─> dma      ──┼── next(role) ──> Work
//!                     └─> storage  ──┘
//!                            empty buffers ──> shadow workers ──> filled buffers ──> a thread with the device
//!                            or the caller, through the ring
//! ```

use std::collections::VecDeque;

use spinio_plan::Route;
use spinio_plan::geometry::Stripe;
use spinio_transfer::bounce::{BUFFER_SIZE, BounceBuffer};

use crate::read::prefault::Prefault;
use crate::read::work::{FilledBuffer, MAX_P2P_PIECE, Piece, PlanRange, Role, Work};

/// Bytes that are registered with the driver at once, at most. Half of this costs a twentieth of the speed.
const MAX_DMA_PIECE: u64 = 128 << 20;

/// How a request is cut into pieces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PieceSizes {
    /// Of the request, in its file.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) copy: u64,
    pub(crate) direct: u64,
    pub(crate) p2p: u64,
    /// Bytes that the device can register at once.
    pub(crate) max_pin: u64,
    /// Of the array under the file.
    pub(crate) stripe: Option<Stripe>,
}

impl PieceSizes {
    /// Of a request that `threads` threads may copy.
    pub(crate) fn new(offset: u64, len: u64, threads: u64, max_pin: u64, stripe: Option<Stripe>) -> PieceSizes {
        let part = |parts: u64| (len / parts).next_multiple_of(64 << 10).clamp(256 << 10, BUFFER_SIZE as u64);
        PieceSizes { offset, len, copy: part(2 * threads), direct: part(4), p2p: MAX_P2P_PIECE, max_pin, stripe }
    }
}

/// What waits to be done, and the buffers that the shadow workers have.
pub(crate) struct WorkQueues {
    pub(crate) sizes: PieceSizes,
    pub(crate) ranges: VecDeque<PlanRange>,
    pub(crate) cache: VecDeque<Piece>,
    pub(crate) dma: VecDeque<Piece>,
    pub(crate) storage: VecDeque<Piece>,
    /// Buffers for shadow workers to fill, buffers they filled, and how many are lent to the request in all.
    pub(crate) empty: Vec<BounceBuffer>,
    pub(crate) filled: VecDeque<FilledBuffer>,
    pub(crate) lent_out: usize,
    /// Threads that wait for a share of the buffers, and have filled ones to copy as soon as there are any.
    pub(crate) waiting_for_share: usize,
    /// Workers that were woken and have not finished.
    pub(crate) shadow_workers: usize,
    pub(crate) copy_workers: usize,
    /// The caller reads storage, through the ring; shadow workers do not.
    pub(crate) by_ring: bool,
    /// No thread begins anything more.
    pub(crate) closed: bool,
    /// Bytes that were given to the driver to register.
    registered: u64,
}

impl WorkQueues {
    pub(crate) fn new(sizes: PieceSizes) -> WorkQueues {
        WorkQueues {
            sizes,
            ranges: VecDeque::new(),
            cache: VecDeque::new(),
            dma: VecDeque::new(),
            storage: VecDeque::new(),
            empty: Vec::new(),
            filled: VecDeque::new(),
            lent_out: 0,
            waiting_for_share: 0,
            shadow_workers: 0,
            copy_workers: 0,
            by_ring: false,
            closed: false,
            registered: 0,
        }
    }

    /// From now on the caller reads storage through the ring. `max`: bytes of a read there, at which a kernel thread is
    /// still not needed.
    pub(crate) fn read_by_ring(&mut self, max: u64) {
        const MIN: u64 = 512 << 10;
        // Several, so that one is copied to the device while others are read; not short ones, because each costs 10 us, more
        // than a kernel thread does.
        let several = (self.sizes.len / 4).next_multiple_of(64 << 10);
        self.sizes.direct = several.clamp(MIN, max.clamp(MIN, BUFFER_SIZE as u64));
        self.sizes.p2p = MAX_P2P_PIECE.min(max);
        self.by_ring = true;
    }

    /// The queue of a route.
    pub(crate) fn for_route(&mut self, route: Route) -> &mut VecDeque<Piece> {
        match route {
            Route::Direct | Route::P2p => &mut self.storage,
            Route::Dma => &mut self.dma,
            Route::Copy | Route::Store | Route::Gather => &mut self.cache,
        }
    }

    /// The next thing for a thread of this role to do. `can_survey`: it can survey residency; `ring_room`: it can start a
    /// read in the ring. A shadow worker that gets nothing counts as finished from here on.
    pub(crate) fn next(&mut self, role: Role, can_survey: bool, ring_room: bool, prefault: &Prefault) -> Option<Work> {
        if self.closed {
            return None;
        }
        // Storage first: what it takes longest to bring is under way while the rest is moved.
        let reads_storage = if role == Role::ShadowWorker { !self.by_ring } else { ring_room };
        let moved = if reads_storage { self.next_from_storage() } else { None };
        let moved = if role == Role::ShadowWorker { moved } else { moved.or_else(|| self.next_with_device(role)) };
        if moved.is_some() {
            return moved;
        }
        if can_survey && let Some(range) = self.ranges.pop_front() {
            return Some(Work::PlanRange(range));
        }
        if role == Role::CopyWorker
            && let Some(chunk) = prefault.take_chunk(&self.dma)
        {
            return Some(Work::Prefault(chunk));
        }
        // Under the lock of the queues, so that a thread which adds work for it from now on wakes it again.
        match role {
            Role::ShadowWorker => self.shadow_workers -= 1,
            Role::CopyWorker => self.copy_workers -= 1,
            Role::Caller => {}
        }
        None
    }

    /// A shadow worker never waits for a buffer: other requests may need it, and it is woken when there is one.
    fn next_from_storage(&mut self) -> Option<Work> {
        match self.storage.front()?.route {
            Route::Direct => {
                let buffer = self.empty.pop()?;
                self.split_storage().map(|piece| Work::FillBuffer(piece, buffer))
            }
            _ => self.split_storage().map(Work::Piece),
        }
    }

    fn next_with_device(&mut self, role: Role) -> Option<Work> {
        // While the caller registers pages the driver lets no other thread reach the device.
        if (role == Role::Caller || self.dma.is_empty())
            && let Some(filled) = self.filled.pop_front()
        {
            return Some(Work::CopyToDevice(filled));
        }
        // The driver registers one range at a time, so one thread does it: the caller, which waits anyway.
        if role == Role::Caller
            && let Some(piece) = self.split_dma()
        {
            return Some(Work::Piece(piece));
        }
        let sizes = self.sizes;
        split(&mut self.cache, sizes.offset, |_, at| sizes.copy.min(to_boundary(at, BUFFER_SIZE as u64)))
            .map(Work::Piece)
    }

    fn split_storage(&mut self) -> Option<Piece> {
        let sizes = self.sizes;
        // A command of an array ends with a chunk.
        let to_chunk = |at, most| sizes.stripe.map_or(most, |stripe| stripe.end_at_chunk(at, most) - at);
        split(&mut self.storage, sizes.offset, |piece, at| match piece.route {
            // Short requests are cut finer: several commands in flight hide each other's latency.
            Route::Direct => to_chunk(at, sizes.direct.min(to_boundary(at, BUFFER_SIZE as u64))),
            _ => to_chunk(at, to_boundary(at, sizes.p2p)),
        })
    }

    /// Short pieces at both ends of the request, because the first DMA waits for the first registration and the caller
    /// waits for the last DMA.
    fn split_dma(&mut self) -> Option<Piece> {
        let (sizes, registered) = (self.sizes, self.registered);
        let piece = split(&mut self.dma, sizes.offset, |_, at| {
            let remaining = sizes.len.saturating_sub(registered);
            let len = match remaining {
                short if short <= 16 << 20 => (short / 2).max(4 << 20),
                _ => registered.min(remaining / 2).max(8 << 20),
            };
            // Whole pages of the file, so that no page is registered twice.
            let end = (at + len.min(MAX_DMA_PIECE.min(sizes.max_pin))) / (64 << 10) * (64 << 10);
            end.max(at + (64 << 10)) - at
        })?;
        self.registered += piece.len;
        Some(piece)
    }

    /// Pieces that wait for a buffer.
    pub(crate) fn direct_pieces(&self) -> usize {
        let direct = self.storage.iter().filter(|p| p.route == Route::Direct);
        direct.map(|p| p.len.div_ceil(self.sizes.direct) as usize).sum()
    }

    /// Whether pieces wait for a buffer and none is lent, so that none will come back.
    pub(crate) fn is_starved(&self) -> bool {
        self.lent_out == 0 && self.storage.iter().any(|p| p.route == Route::Direct)
    }

    /// Whether the caller could start a read in the ring, had it room.
    pub(crate) fn waits_for_ring(&self) -> bool {
        self.by_ring && self.storage.front().is_some_and(|p| p.route != Route::Direct || !self.empty.is_empty())
    }

    /// Shadow workers that would find something to do. `surveys`: only they can survey.
    pub(crate) fn shadow_workers_needed(&self, surveys: bool) -> usize {
        let p2p = self.storage.iter().filter(|p| p.route == Route::P2p);
        let p2p: usize = p2p.map(|p| p.len.div_ceil(MAX_P2P_PIECE) as usize).sum();
        let storage = if self.by_ring { 0 } else { self.direct_pieces().min(self.empty.len()) + p2p };
        storage + if surveys { self.ranges.len() } else { 0 }
    }

    /// Copy workers that would find something to do beside the caller. `surveys`: they can survey.
    pub(crate) fn copy_workers_needed(&self, surveys: bool, prefault: &Prefault) -> usize {
        let unplanned = if surveys { self.ranges.iter().map(|range| range.len).sum() } else { 0 };
        let bytes = self.cache.iter().map(|p| p.len).sum::<u64>() + unplanned;
        (bytes.div_ceil(self.sizes.copy) as usize).saturating_sub(1).max(prefault.useful_workers(&self.dma))
    }

    /// Whether there is anything that no thread has begun.
    pub(crate) fn has_pending(&self) -> bool {
        !(self.ranges.is_empty() && self.cache.is_empty() && self.dma.is_empty() && self.storage.is_empty())
    }

    /// Whether there is something that the caller could do.
    pub(crate) fn has_work_for_caller(&self, can_survey: bool) -> bool {
        !(self.filled.is_empty() && self.dma.is_empty() && self.cache.is_empty())
            || self.is_starved()
            || self.waits_for_ring()
            || (can_survey && !self.ranges.is_empty())
    }

    /// Takes out what no thread has begun: offsets and lengths.
    pub(crate) fn drain_pending(&mut self) -> Vec<(u64, u64)> {
        let ranges = self.ranges.drain(..).map(|range| (range.offset, range.len));
        let queues = [&mut self.cache, &mut self.dma, &mut self.storage];
        ranges.chain(queues.into_iter().flat_map(|queue| queue.drain(..)).map(|p| (p.offset, p.len))).collect()
    }
}

fn to_boundary(at: u64, unit: u64) -> u64 {
    (at / unit + 1) * unit - at
}

/// Takes the front of a queue, at most `max` bytes of it. `max` gets the piece and where it begins in the file.
fn split(queue: &mut VecDeque<Piece>, base: u64, max: impl FnOnce(&Piece, u64) -> u64) -> Option<Piece> {
    let front = queue.front_mut()?;
    let max = max(front, base + front.offset);
    if front.len <= max {
        return queue.pop_front();
    }
    let piece = Piece { len: max, ..*front };
    front.offset += max;
    front.len -= max;
    Some(piece)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use spinio_plan::Reason;

    use super::*;

    const ROUTES: [Route; 4] = [Route::Copy, Route::Dma, Route::Direct, Route::P2p];

    fn queues(offset: u64, len: u64, stripe: Option<Stripe>) -> WorkQueues {
        WorkQueues::new(PieceSizes::new(offset, len, 4, 64 << 20, stripe))
    }

    fn piece(offset: u64, len: u64, route: Route) -> Piece {
        Piece { offset, len, route, reason: Reason::Cached, assumed_cached: false }
    }

    /// All pieces that a thread of this role is given; what needs a buffer is left.
    fn taken(queues: &mut WorkQueues, role: Role) -> Vec<Piece> {
        let prefault = Prefault::new(0, 0, 0);
        (queues.shadow_workers, queues.copy_workers) = (1, 1);
        std::iter::from_fn(|| match queues.next(role, false, false, &prefault) {
            Some(Work::Piece(piece)) => Some(piece),
            _ => None,
        })
        .collect()
    }

    proptest! {
        /// Every byte of the segments is given out once, by route, in order, in pieces that an engine takes.
        #[test]
        fn pieces_cover_segments_once(
            offset in 0_u64..1 << 33,
            segments in proptest::collection::vec((1_u64..300 << 20, 0_usize..4), 1..8),
        ) {
            let len = segments.iter().map(|s| s.0).sum();
            let mut all = queues(offset, len, None);
            let mut at = 0;
            for &(len, route) in &segments {
                all.for_route(ROUTES[route]).push_back(piece(at, len, ROUTES[route]));
                at += len;
            }
            let direct: u64 = segments.iter().filter(|s| ROUTES[s.1] == Route::Direct).map(|s| s.0).sum();
            let mut pieces = taken(&mut all, Role::Caller);
            // Without a buffer the shadow worker stops at the first direct piece.
            pieces.extend(std::iter::from_fn(|| all.split_storage()));
            prop_assert_eq!(pieces.iter().map(|p| p.len).sum::<u64>(), len);
            prop_assert_eq!(pieces.iter().filter(|p| p.route == Route::Direct).map(|p| p.len).sum::<u64>(), direct);
            let mut sorted = pieces.clone();
            sorted.sort_by_key(|p| p.offset);
            prop_assert!(sorted.windows(2).all(|w| w[0].offset + w[0].len == w[1].offset));
            for p in &pieces {
                let (first, last) = (offset + p.offset, offset + p.offset + p.len - 1);
                match p.route {
                    Route::Copy | Route::Direct => prop_assert_eq!(first / BUFFER_SIZE as u64, last / BUFFER_SIZE as u64),
                    Route::P2p => prop_assert_eq!(first / MAX_P2P_PIECE, last / MAX_P2P_PIECE),
                    _ => prop_assert!(p.len <= 64 << 20),
                }
            }
            prop_assert!(!all.has_pending());
        }
    }

    /// Reads in a ring are as short as the storage takes them, but not so short that copies cost more, and in order.
    #[test]
    fn pieces_in_a_ring_fit_a_request_of_the_storage() {
        let kib = 1 << 10;
        for (max, direct, p2p) in [
            (64 * kib, 512 * kib, 64 * kib),
            (512 * kib, 512 * kib, 512 * kib),
            (1024 * kib, 1024 * kib, 1024 * kib),
            (u64::MAX, 2048 * kib, 4096 * kib),
        ] {
            for (route, longest) in [(Route::Direct, direct), (Route::P2p, p2p)] {
                let (offset, len) = (3 * 4096, 32 << 20);
                let mut all = queues(offset, len, None);
                all.read_by_ring(max);
                all.storage.push_back(piece(0, len, route));
                let pieces: Vec<Piece> = std::iter::from_fn(|| all.split_storage()).collect();
                assert_eq!(pieces.iter().map(|p| p.len).max(), Some(longest), "{route:?} by {max}");
                assert_eq!(pieces.iter().fold(0, |at, p| if p.offset == at { at + p.len } else { 0 }), len);
            }
        }
        // A short one is several reads all the same.
        let mut all = queues(0, 1024 * kib, None);
        all.read_by_ring(u64::MAX);
        assert_eq!((all.sizes.direct, all.sizes.p2p), (512 * kib, 4096 * kib));
    }

    #[test]
    fn caller_registers_and_copy_workers_only_copy() {
        let mut all = queues(0, 4 << 20, None);
        all.dma.push_back(piece(0, 2 << 20, Route::Dma));
        all.cache.push_back(piece(2 << 20, 2 << 20, Route::Copy));
        let copied = taken(&mut all, Role::CopyWorker);
        assert_eq!(all.copy_workers, 0, "it left");
        assert!(!copied.is_empty() && copied.iter().all(|p| p.route == Route::Copy));
        assert!(taken(&mut all, Role::Caller).iter().all(|p| p.route == Route::Dma));
        assert!(!all.has_pending());
    }

    #[test]
    fn direct_piece_waits_for_a_buffer_and_counts_as_starved() {
        let mut all = queues(0, 4 << 20, None);
        all.storage.push_back(piece(0, 4 << 20, Route::Direct));
        assert_eq!(taken(&mut all, Role::ShadowWorker), []);
        assert!(all.is_starved() && all.has_pending() && all.has_work_for_caller(false));
        assert_eq!((all.shadow_workers, all.shadow_workers_needed(false)), (0, 0), "no buffer, nothing to wake it for");
        all.lent_out = 1;
        assert!(!all.is_starved() && !all.has_work_for_caller(false));
    }

    #[test]
    fn closed_queues_give_nothing() {
        let mut all = queues(0, 1 << 20, None);
        all.cache.push_back(piece(0, 1 << 20, Route::Copy));
        all.closed = true;
        assert_eq!(taken(&mut all, Role::Caller), []);
        assert_eq!(all.drain_pending(), [(0, 1 << 20)]);
    }

    #[test]
    fn ranges_go_to_threads_that_can_survey() {
        let prefault = Prefault::new(0, 0, 0);
        let mut all = queues(0, 1 << 20, None);
        all.ranges.push_back(PlanRange { offset: 0, len: 1 << 20, recheck: false });
        assert!(all.next(Role::Caller, false, false, &prefault).is_none());
        assert_eq!((all.shadow_workers_needed(true), all.copy_workers_needed(false, &prefault)), (1, 0));
        assert!(
            matches!(all.next(Role::Caller, true, false, &prefault), Some(Work::PlanRange(range)) if range.len == 1 << 20)
        );
    }
}
