//! Latencies, counted in 96 buckets: four to every doubling, from 256 ns to 4.3 s.
//!
//! ```text
//!   256 ns   320   384   448   512        640       768       896       1024 ...
//!   |---0----|--1--|--2--|--3--|----4-----|----5----|----6----|----7----|
//! ```
//!
//! What is faster than 256 ns falls into the first, what is slower than 4.3 s into the last, which has no upper end. A
//! quantile is told by its place within its bucket, so it is off by a fifth at most, and by half of that as a rule; in the
//! last it is told as if that ended at 4.3 s.

pub(super) const BUCKETS: usize = 96;

/// Nanoseconds below which nothing is told apart.
const LEAST: u64 = 256;

/// The bucket of a latency.
pub(super) const fn bucket(nanos: u64) -> usize {
    let nanos = if nanos < LEAST { LEAST } else { nanos };
    let doublings = 63 - nanos.leading_zeros() as usize;
    let at = (doublings - 8) * 4 + (nanos >> (doublings - 2) & 3) as usize;
    if at < BUCKETS { at } else { BUCKETS - 1 }
}

/// The least latency of a bucket.
const fn floor(bucket: usize) -> u64 {
    (4 + bucket as u64 % 4) << (bucket / 4 + 6)
}

/// How many times each latency was seen.
#[derive(Clone, PartialEq, Eq)]
pub struct Histogram {
    pub(super) counts: [u64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { counts: [0; BUCKETS] }
    }
}

impl std::fmt::Debug for Histogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self.filled()).finish()
    }
}

impl Histogram {
    /// Nanoseconds from which on nothing is told apart.
    pub const MOST: u64 = floor(BUCKETS - 1);

    /// Counts a latency that stands for `weight` of them.
    pub fn add(&mut self, nanos: u64, weight: u64) {
        let count = &mut self.counts[bucket(nanos)];
        *count = count.wrapping_add(weight);
    }

    /// All that were counted.
    pub fn total(&self) -> u64 {
        self.counts.iter().fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// The latency, in nanoseconds, that a share `q` of them did not exceed; `None` if there are none.
    pub fn quantile(&self, q: f64) -> Option<u64> {
        let total = self.total();
        if total == 0 {
            return None;
        }
        let wanted = (q.clamp(0.0, 1.0) * total as f64).max(1.0);
        let mut below = 0.0;
        for (i, &n) in self.counts.iter().enumerate().filter(|(_, n)| **n > 0) {
            if below + n as f64 >= wanted {
                let (from, to) = (floor(i) as f64, floor(i + 1) as f64);
                return Some((from + (to - from) * (wanted - below) / n as f64) as u64);
            }
            below += n as f64;
        }
        self.counts.iter().rposition(|n| *n > 0).map(|i| floor(i + 1))
    }

    /// The buckets that hold anything: the least latency above it, none above the last, and how many.
    pub fn filled(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let above = |i| (i < BUCKETS - 1).then(|| floor(i + 1));
        self.counts.iter().enumerate().filter(|(_, n)| **n > 0).map(move |(i, n)| (above(i), *n))
    }

    /// Adds another one's.
    pub fn join(&mut self, other: &Histogram) {
        self.merge(other, u64::wrapping_add);
    }

    pub(super) fn merge(&mut self, other: &Histogram, with: fn(u64, u64) -> u64) {
        for (mine, theirs) in self.counts.iter_mut().zip(other.counts) {
            *mine = with(*mine, theirs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_latency_lies_in_its_bucket() {
        let mut last = 0;
        for exponent in 8..40 {
            for eighths in 8..16 {
                let nanos = (eighths << exponent) / 8;
                let at = bucket(nanos);
                assert!(at >= last, "{nanos} falls back to bucket {at}");
                last = at;
                if at < BUCKETS - 1 {
                    assert!(floor(at) <= nanos && nanos < floor(at + 1), "{nanos} is not in bucket {at}");
                }
            }
        }
        assert_eq!((bucket(0), bucket(255), bucket(u64::MAX)), (0, 0, BUCKETS - 1));
        assert_eq!((bucket(Histogram::MOST - 1), bucket(Histogram::MOST)), (BUCKETS - 2, BUCKETS - 1));
    }

    #[test]
    fn quantiles_are_near_the_truth() {
        let mut h = Histogram::default();
        assert_eq!(h.quantile(0.5), None);
        (1..=10_000u64).for_each(|n| h.add(n * 100, 1));
        for (q, truth) in [(0.5, 500_000.0), (0.99, 990_000.0), (1.0, 1_000_000.0)] {
            let told = h.quantile(q).unwrap() as f64;
            assert!((told / truth - 1.0).abs() < 0.1, "the {q} quantile is {truth}, told {told}");
        }
    }
}
