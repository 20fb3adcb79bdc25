//! Which slots are free: one bit each, so that those side by side are found as runs.
//!
//! The lowest ones are taken first. Memory that was used before is used again, and what is freed in any order is one run
//! again.

use std::ops::Range;

const BITS: u32 = u64::BITS;

/// A set of slots.
#[derive(Debug)]
pub(crate) struct FreeSlots {
    words: Vec<u64>,
    len: usize,
    /// No word before this one has a free slot.
    lowest: usize,
}

impl FreeSlots {
    /// None of so many.
    pub(crate) fn none(slots: u32) -> FreeSlots {
        FreeSlots { words: vec![0; slots.div_ceil(BITS) as usize], len: 0, lowest: 0 }
    }

    /// All of so many.
    pub(crate) fn all(slots: u32) -> FreeSlots {
        let mut free = FreeSlots::none(slots);
        free.insert(0..slots);
        free
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// These are free now, and were not.
    pub(crate) fn insert(&mut self, slots: Range<u32>) {
        for (word, mask) in masks(slots) {
            debug_assert!(self.words[word] & mask == 0, "a slot is freed twice");
            self.words[word] |= mask;
            self.len += mask.count_ones() as usize;
            self.lowest = self.lowest.min(word);
        }
    }

    /// Takes one.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let word = self.find(self.lowest)?;
        let bit = self.words[word].trailing_zeros();
        self.words[word] &= self.words[word] - 1;
        self.len -= 1;
        self.lowest = word;
        Some(word as u32 * BITS + bit)
    }

    /// Takes so many, in ascending order, as runs of at most `longest`; all or none.
    pub(crate) fn take_runs(&mut self, count: usize, longest: u32) -> Option<Vec<Range<u32>>> {
        if count > self.len {
            return None;
        }
        let (mut runs, mut left, mut word): (Vec<Range<u32>>, _, _) = (Vec::new(), count as u32, self.lowest);
        while left > 0 {
            word = self.find(word)?;
            let bits = self.words[word];
            let first = bits.trailing_zeros();
            let run = (bits >> first).trailing_ones().min(left);
            let start = word as u32 * BITS + first;
            for (word, mask) in masks(start..start + run) {
                self.words[word] &= !mask;
            }
            left -= run;
            match runs.last_mut() {
                Some(last) if last.end == start && last.end - last.start + run <= longest => last.end += run,
                _ => runs.push(start..start + run),
            }
        }
        self.len -= count;
        self.lowest = word;
        Some(runs)
    }

    /// The first word from this one on that has a free slot.
    fn find(&self, from: usize) -> Option<usize> {
        let rest = self.words.get(from..)?;
        rest.iter().position(|word| *word != 0).map(|at| from + at)
    }
}

/// The words of a range, with the bits in it.
fn masks(slots: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    let mut at = slots.start;
    std::iter::from_fn(move || {
        (at < slots.end).then(|| {
            let (word, bit) = (at / BITS, at % BITS);
            let len = (BITS - bit).min(slots.end - at);
            at += len;
            (word as usize, u64::MAX >> (BITS - len) << bit)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_taken_once_lowest_first_and_side_by_side() {
        let mut free = FreeSlots::all(300);
        assert_eq!(free.take_runs(301, 64), None);
        assert_eq!(free.take_runs(128, 64), Some(vec![0..64, 64..128]));
        assert_eq!((free.take(), free.take()), (Some(128), Some(129)));
        assert_eq!((free.take(), free.len()), (Some(130), 169));
        free.insert(5..6);
        free.insert(60..70);
        assert_eq!(free.take_runs(14, 1000), Some(vec![5..6, 60..70, 131..134]));
        assert_eq!(free.take_runs(166, 64), Some(vec![134..192, 192..256, 256..300]));
        assert_eq!((free.take(), free.take_runs(1, 1), free.len()), (None, None, 0));
        assert_eq!(free.take_runs(0, 1), Some(vec![]));
        free.insert(299..300);
        assert_eq!((free.take(), free.take()), (Some(299), None));
    }

    #[test]
    fn set_agrees_with_a_list() {
        let (mut free, mut list) = (FreeSlots::all(200), [true; 200]);
        let mut state = 1u64;
        for _ in 0..3000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let count = (state >> 33) % 40;
            if state >> 32 & 1 == 1 {
                let taken = free.take_runs(count as usize, 30);
                assert_eq!(taken.is_some(), list.iter().filter(|free| **free).count() >= count as usize);
                for slot in taken.into_iter().flatten().flatten() {
                    let lowest = list.iter().position(|free| *free);
                    assert_eq!(lowest, Some(slot as usize));
                    list[slot as usize] = false;
                }
            } else {
                let first = (state >> 40) as usize % (list.len() - count as usize);
                for (slot, is_free) in list.iter_mut().enumerate().skip(first).take(count as usize) {
                    if !std::mem::replace(is_free, true) {
                        free.insert(slot as u32..slot as u32 + 1);
                    }
                }
            }
            assert_eq!(free.len(), list.iter().filter(|free| **free).count());
        }
    }
}
