//! A range of fragments taken from both ends: by the caller from the front, by copying threads from the back.
//!
//! ```text
//!   fragments   0 ······· low ─────────────────── high ······· n
//!               registered ──>   not taken yet   <── copied
//!                   back_limit: below it none is copied
//! ```
//!
//! Both ends are in one word, so taking is one compare-and-exchange, and no fragment is taken twice or left. The word
//! orders nothing else: the fragments were written before any thread saw the range, and only the thread that takes a
//! fragment uses it.

#![cfg_attr(loom, expect(unsafe_code, reason = "loom hands out raw pointers"))]

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use spinio_host::sync::AtomicU64;

/// Fragments that no thread has taken yet: a contiguous range of indices.
pub(crate) struct SplitRange {
    /// Low half: the first one. High half: the end.
    ends: AtomicU64,
    back_limit: u32,
}

fn unpack(ends: u64) -> (u32, u32) {
    (ends as u32, (ends >> 32) as u32)
}

fn pack(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

impl SplitRange {
    /// `fragments` fragments, of which those below `back_limit` are only taken from the front.
    pub(crate) fn new(items: u32, back_limit: u32) -> SplitRange {
        SplitRange { ends: AtomicU64::new(pack(0, items)), back_limit: back_limit.min(items) }
    }

    /// Takes from the front what is below `end`; `None` if nothing is left there.
    pub(crate) fn take_front(&self, end: usize) -> Option<Range<usize>> {
        let mut ends = self.ends.load(Relaxed);
        loop {
            let (low, high) = unpack(ends);
            let up_to = u32::try_from(end).unwrap_or(u32::MAX).min(high);
            if low >= up_to {
                return None;
            }
            match self.ends.compare_exchange_weak(ends, pack(up_to, high), Relaxed, Relaxed) {
                Ok(_) => return Some(low as usize..up_to as usize),
                Err(now) => ends = now,
            }
        }
    }

    /// Whether nothing is left that may be taken from the back.
    pub(crate) fn is_empty(&self) -> bool {
        self.remaining() == 0
    }

    /// How many may be taken from the back.
    pub(crate) fn remaining(&self) -> u32 {
        let (low, high) = unpack(self.ends.load(Relaxed));
        high.saturating_sub(low.max(self.back_limit))
    }

    /// Takes up to `max` from the back; `None` if nothing is left above the limit.
    pub(crate) fn take_back(&self, max: u32) -> Option<Range<usize>> {
        let mut ends = self.ends.load(Relaxed);
        loop {
            let (low, high) = unpack(ends);
            let down_to = high.saturating_sub(max).max(low).max(self.back_limit);
            if down_to >= high {
                return None;
            }
            match self.ends.compare_exchange_weak(ends, pack(low, down_to), Relaxed, Relaxed) {
                Ok(_) => return Some(down_to as usize..high as usize),
                Err(now) => ends = now,
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn both_ends_take_each_fragment_once() {
        let range = SplitRange::new(10, 0);
        assert_eq!((range.take_front(3), range.remaining()), (Some(0..3), 7));
        assert_eq!(range.take_front(3), None);
        assert_eq!(range.take_back(4), Some(6..10));
        assert_eq!(range.take_front(9), Some(3..6));
        assert_eq!((range.take_back(4), range.take_front(10)), (None, None));
        assert_eq!(SplitRange::new(0, 0).take_back(4), None);
    }

    #[test]
    fn back_never_passes_limit() {
        let range = SplitRange::new(10, 7);
        assert_eq!((range.remaining(), range.is_empty()), (3, false));
        assert_eq!((range.take_back(8), range.take_back(8)), (Some(7..10), None));
        assert!(range.is_empty());
        assert_eq!(range.take_front(100), Some(0..7));
        let past_limit = SplitRange::new(10, 3);
        assert_eq!(past_limit.take_front(5), Some(0..5));
        assert_eq!((past_limit.take_back(8), past_limit.take_back(1)), (Some(5..10), None));
    }
}

/// Under a model checker: one thread takes parts from the front, another one steps from the back, in every order that
/// needs at most two preemptions.
#[cfg(all(test, loom))]
mod interleavings {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    struct Model {
        range: SplitRange,
        /// How often each fragment was taken. Loom fails if two threads access one without an order.
        items: Vec<UnsafeCell<u32>>,
    }

    // SAFETY: the cells are what is being checked; loom reports an access that the protocol does not order.
    unsafe impl Sync for Model {}
    // SAFETY: as above.
    unsafe impl Send for Model {}

    impl Model {
        fn take(&self, range: Range<usize>) {
            for item in &self.items[range] {
                // SAFETY: loom checks that no other thread accesses the cell.
                item.with_mut(|times| unsafe { *times += 1 });
            }
        }
    }

    fn check(items: u32, limit: u32, parts: &'static [usize], step: u32) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(move || {
            let model = Arc::new(Model {
                range: SplitRange::new(items, limit),
                items: (0..items).map(|_| UnsafeCell::new(0)).collect(),
            });
            let copier = {
                let model = Arc::clone(&model);
                thread::spawn(move || {
                    while let Some(range) = model.range.take_back(step) {
                        assert!(range.start >= limit as usize);
                        model.take(range);
                    }
                })
            };
            for &end in parts {
                let Some(range) = model.range.take_front(end) else { break };
                model.take(range);
            }
            // Then the caller takes from the back, too.
            while let Some(range) = model.range.take_back(step) {
                model.take(range);
            }
            copier.join().unwrap();
            for item in &model.items {
                // SAFETY: the threads are gone.
                item.with(|times| unsafe { assert_eq!(*times, 1) });
            }
        });
    }

    #[test]
    fn each_item_is_taken_once() {
        check(5, 0, &[2, 4], 2);
        check(3, 0, &[1, 2, 3], 1);
    }

    #[test]
    fn range_below_limit_is_taken_from_front() {
        check(4, 2, &[1, 2, 3], 1);
    }
}
