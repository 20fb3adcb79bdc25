//! The allocator of the device's memory: first fit, in whole pages.
//!
//! ```text
//!   0                                      size
//!   [ A ][ B ]      [ C ]
//!             └ gap: the next allocation that fits
//! ```
//!
//! A map of the allocations, by offset; gaps are between them. Linear in the number of allocations, which is small; a
//! program that allocates a million buffers needs its own pool, as on a GPU.

use std::collections::BTreeMap;
use std::ops::Range;

use spinio_sys::linux::PAGE;

/// Allocations by offset.
#[derive(Debug, Default)]
pub(super) struct FirstFit {
    allocated: BTreeMap<u64, u64>,
}

impl FirstFit {
    /// Allocates `len` bytes, at least one, inside `within`; both ends of it on a page.
    pub(super) fn alloc(&mut self, within: Range<u64>, len: u64) -> Option<u64> {
        let room = round_up_to_pages(len)?;
        let mut at = within.start;
        for (&start, &taken) in self.allocated.range(within.clone()) {
            if start - at >= room {
                break;
            }
            at = start + round_up_to_pages(taken)?;
        }
        if at.checked_add(room)? > within.end {
            return None;
        }
        self.allocated.insert(at, len);
        Some(at)
    }

    /// Frees an allocation: its length, or `None` if none starts there.
    pub(super) fn free(&mut self, start: u64) -> Option<u64> {
        self.allocated.remove(&start)
    }

    /// The allocation that contains a byte: its start and length.
    pub(super) fn find(&self, at: u64) -> Option<(u64, u64)> {
        let (&start, &len) = self.allocated.range(..=at).next_back()?;
        (at - start < len).then_some((start, len))
    }

    /// The room of all allocations.
    pub(super) fn bytes(&self) -> u64 {
        self.allocated.values().filter_map(|len| round_up_to_pages(*len)).sum()
    }

    /// The number of allocations.
    pub(super) fn count(&self) -> usize {
        self.allocated.len()
    }
}

/// Rounded up to pages; `None` on overflow.
pub(super) fn round_up_to_pages(len: u64) -> Option<u64> {
    len.max(1).checked_next_multiple_of(PAGE as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE: u64 = 64 << 12;

    #[derive(Clone, Debug)]
    enum Step {
        Alloc(u64),
        Free(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![(1..40_000u64).prop_map(Step::Alloc), (0..64usize).prop_map(Step::Free)];
        prop::collection::vec(step, 0..200)
    }

    proptest! {
        #[test]
        fn allocations_never_overlap_and_freed_space_is_reused(steps in steps()) {
            let mut fit = FirstFit::default();
            let mut model: Vec<(u64, u64)> = Vec::new();
            for step in steps {
                match step {
                    Step::Alloc(len) => {
                        let room = round_up_to_pages(len).unwrap();
                        let free = |at: u64| model.iter().all(|&(s, l)| {
                            at + room <= s || s + round_up_to_pages(l).unwrap() <= at
                        });
                        let expected = (0..SIZE / 4096).map(|p| p * 4096).find(|&at| at + room <= SIZE && free(at));
                        let got = fit.alloc(0..SIZE, len);
                        prop_assert_eq!(got, expected);
                        model.extend(got.map(|at| (at, len)));
                    }
                    Step::Free(n) if !model.is_empty() => {
                        let (start, len) = model.swap_remove(n % model.len());
                        prop_assert_eq!(fit.free(start), Some(len));
                        prop_assert_eq!(fit.free(start), None);
                    }
                    Step::Free(_) => {}
                }
                prop_assert_eq!(fit.count(), model.len());
                for at in (0..SIZE).step_by(1021) {
                    let expected = model.iter().copied().find(|&(s, l)| s <= at && at < s + l);
                    prop_assert_eq!(fit.find(at), expected);
                }
            }
        }
    }

    #[test]
    fn allocation_stays_in_region() {
        let mut fit = FirstFit::default();
        assert_eq!(fit.alloc(8192..16384, 8192), Some(8192));
        assert_eq!(fit.alloc(8192..16384, 1), None);
        assert_eq!(fit.alloc(0..8192, 8192), Some(0));
        assert_eq!(fit.alloc(16384..16384, 1), None);
        assert_eq!(fit.alloc(16384..32768, u64::MAX), None);
    }

    #[test]
    fn allocation_end_is_exact() {
        let mut fit = FirstFit::default();
        fit.alloc(0..SIZE, 5);
        assert_eq!(fit.find(4), Some((0, 5)));
        assert_eq!(fit.find(5), None);
    }
}
