//! Stripes gathered in memory: bytes of downloads, and filler.

use std::collections::BTreeMap;
use std::ops::Range;

use rangemap::RangeSet;
use spinio_io::AlignedBuf;

/// Gathered bytes above which they are written before more are gathered.
pub(super) const MAX_GATHERED: u64 = 64 << 20;

/// One stripe in memory.
pub(super) struct Stripe {
    bytes: AlignedBuf,
    width: usize,
    /// Bytes that are known: in the file, or to be written to it; offsets in the stripe.
    known: RangeSet<u64>,
    /// Of these, bytes of downloads.
    new: RangeSet<u64>,
}

impl Stripe {
    fn new(width: u64) -> Stripe {
        let width = usize::try_from(width).unwrap_or(0);
        Stripe { bytes: AlignedBuf::zeroed(width), width, known: RangeSet::new(), new: RangeSet::new() }
    }

    /// All of it, in memory that is aligned for direct I/O.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Some of it, to be filled in.
    pub(super) fn slice_mut(&mut self, range: Range<u64>) -> &mut [u8] {
        &mut self.bytes[range.start as usize..range.end as usize]
    }

    /// Marks a range as filled with downloaded bytes.
    pub(super) fn mark_new(&mut self, range: Range<u64>) {
        self.known.insert(range.clone());
        self.new.insert(range);
    }

    /// Fills in old bytes, except where there are downloaded ones.
    pub(super) fn fill_preread(&mut self, at: u64, old: &[u8]) {
        let range = at..(at + old.len() as u64).min(self.width as u64);
        let gaps: Vec<_> = self.new.gaps(&range).collect();
        for gap in gaps {
            let from = &old[(gap.start - at) as usize..(gap.end - at) as usize];
            self.slice_mut(gap.clone()).copy_from_slice(from);
            self.known.insert(gap);
        }
    }

    /// Forgets the old bytes.
    fn drop_preread(&mut self) {
        self.known = self.new.clone();
    }

    fn covers(&self, set: &RangeSet<u64>) -> bool {
        set.gaps(&(0..self.width as u64)).next().is_none()
    }

    /// Whether every byte was downloaded.
    pub(super) fn is_all_new(&self) -> bool {
        self.covers(&self.new)
    }

    /// Whether every byte is known.
    pub(super) fn is_complete(&self) -> bool {
        self.covers(&self.known)
    }

    /// The downloaded ranges.
    pub(super) fn new_ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.new.iter().cloned()
    }

    /// The number of downloaded bytes.
    pub(super) fn new_bytes(&self) -> u64 {
        self.new.iter().map(|r| r.end - r.start).sum()
    }
}

/// Stripes by the offset in the file of their first byte.
#[derive(Default)]
pub(super) struct Stripes {
    by_start: BTreeMap<u64, Stripe>,
}

impl Stripes {
    /// The stripe that begins there; created if needed.
    pub(super) fn at(&mut self, start: u64, width: u64) -> &mut Stripe {
        self.by_start.entry(start).or_insert_with(|| Stripe::new(width))
    }

    /// Whether bytes of a range are in memory.
    pub(super) fn overlaps(&self, range: &Range<u64>) -> bool {
        self.by_start.range(..range.end).any(|(at, s)| at + s.width as u64 > range.start)
    }

    /// Whether a stripe crosses a border of a range.
    pub(super) fn straddles(&self, range: &Range<u64>) -> bool {
        let end = |(at, stripe): (&u64, &Stripe)| at + stripe.width as u64;
        let mut overlapping = self.by_start.range(..range.end).rev().take_while(|&entry| end(entry) > range.start);
        overlapping.any(|entry| *entry.0 < range.start || end(entry) > range.end)
    }

    /// Removes and returns the stripes that have bytes of some ranges.
    pub(super) fn take_overlapping(&mut self, ranges: &[Range<u64>]) -> Vec<(u64, Stripe)> {
        let overlaps = |at: u64, end: u64| ranges.iter().any(|range| at < range.end && end > range.start);
        let chosen = self.by_start.iter().filter(|(at, s)| overlaps(**at, **at + s.width as u64)).map(|(at, _)| *at);
        let chosen: Vec<u64> = chosen.collect();
        chosen.into_iter().filter_map(|at| self.by_start.remove_entry(&at)).collect()
    }

    /// Keeps the downloaded bytes of stripes that could not be written; others may have been written over their filler.
    pub(super) fn put_back(&mut self, stripes: impl IntoIterator<Item = (u64, Stripe)>) {
        for (at, mut stripe) in stripes {
            stripe.drop_preread();
            if stripe.new_bytes() > 0 {
                self.by_start.insert(at, stripe);
            }
        }
    }

    /// Drops the stripes that have bytes of a range.
    pub(super) fn drop_overlapping(&mut self, range: &Range<u64>) {
        self.by_start.retain(|at, s| *at >= range.end || at + s.width as u64 <= range.start);
    }

    /// Removes and returns the stripes that satisfy `predicate`, in the order of the file.
    pub(super) fn take(&mut self, predicate: impl Fn(&Stripe) -> bool) -> Vec<(u64, Stripe)> {
        let chosen: Vec<u64> = self.by_start.iter().filter(|(_, s)| predicate(s)).map(|(at, _)| *at).collect();
        chosen.into_iter().filter_map(|at| self.by_start.remove_entry(&at)).collect()
    }

    /// The old bytes are no longer those of the file.
    pub(super) fn drop_preread(&mut self) {
        self.by_start.values_mut().for_each(Stripe::drop_preread);
        self.by_start.retain(|_, stripe| stripe.new_bytes() > 0);
    }

    /// The number of downloaded bytes that are not in the file yet.
    pub(super) fn new_bytes(&self) -> u64 {
        self.by_start.values().map(Stripe::new_bytes).sum()
    }

    /// The size of the memory.
    pub(super) fn memory(&self) -> u64 {
        self.by_start.values().map(|s| s.width as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripe_is_complete_when_old_and_new_bytes_cover_it() {
        let mut stripes = Stripes::default();
        let stripe = stripes.at(100, 8192);
        assert_eq!(stripe.bytes().as_ptr() as usize % 4096, 0);
        stripe.slice_mut(10..20).fill(1);
        stripe.mark_new(10..20);
        stripe.fill_preread(0, &[2; 8000]);
        assert!(!stripe.is_complete());
        stripe.fill_preread(7000, &[3; 5000]);
        assert!(stripe.is_complete() && !stripe.is_all_new());
        assert_eq!((stripe.bytes()[9], stripe.bytes()[10], stripe.bytes()[19], stripe.bytes()[20]), (2, 1, 1, 2));
        assert_eq!((stripe.bytes()[6999], stripe.bytes()[7000], stripe.bytes()[8191]), (2, 3, 3));
        assert_eq!(stripes.new_bytes(), 10);
        stripes.drop_preread();
        let stripe = stripes.at(100, 8192);
        assert!(!stripe.is_complete());
        stripe.mark_new(0..8192);
        assert!(stripe.is_all_new());
        assert_eq!(stripes.take(Stripe::is_all_new).len(), 1);
        assert_eq!(stripes.memory(), 0);
    }

    #[test]
    fn stripe_straddles_range_border() {
        let mut stripes = Stripes::default();
        stripes.at(8192, 8192).mark_new(0..1);
        stripes.at(32_768, 8192).mark_new(0..1);
        for (range, crosses) in [
            (0..8192, false),
            (0..8193, true),
            (8192..16_384, false),
            (8192..16_383, true),
            (12_288..20_480, true),
            (16_384..32_768, false),
            (0..65_536, false),
            (36_864..65_536, true),
        ] {
            assert_eq!(stripes.straddles(&range), crosses, "{range:?}");
        }
    }

    #[test]
    fn stripe_without_new_bytes_is_dropped_with_old_bytes() {
        let mut stripes = Stripes::default();
        stripes.at(0, 4096).fill_preread(0, &[1; 4096]);
        stripes.at(4096, 4096).mark_new(5..6);
        stripes.drop_preread();
        assert_eq!(stripes.memory(), 4096);
        assert!(!stripes.overlaps(&(0..4096)) && stripes.overlaps(&(8191..9000)) && !stripes.overlaps(&(8192..9000)));
        stripes.drop_overlapping(&(0..4096));
        assert_eq!(stripes.memory(), 4096);
        stripes.drop_overlapping(&(4000..5000));
        assert_eq!(stripes.memory(), 0);
    }

    #[test]
    fn only_new_bytes_of_stripes_are_put_back() {
        let mut stripes = Stripes::default();
        for at in [0, 4096, 8192, 12_288] {
            stripes.at(at, 4096).fill_preread(0, &[1; 4096]);
        }
        stripes.at(4096, 4096).mark_new(5..6);
        let taken = stripes.take_overlapping(&[4095..4097, 12_288..12_289]);
        assert_eq!(taken.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [0, 4096, 12_288]);
        stripes.put_back(taken);
        assert_eq!((stripes.memory(), stripes.new_bytes()), (8192, 1));
        assert!(!stripes.at(4096, 4096).is_complete() && stripes.at(8192, 4096).is_complete());
    }
}
