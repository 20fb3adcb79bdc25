//! Latencies, counted in 96 buckets: four per doubling, from 256 ns to 4.3 s.
//!
//! ```text
//!   256 ns   320   384   448   512        640       768       896       1024 ...
//!   |---0----|--1--|--2--|--3--|----4-----|----5----|----6----|----7----|
//! ```
//!
//! Latencies below 256 ns are counted in the first bucket, those above 4.3 s in the last, which has no upper bound. A
//! quantile is interpolated within its bucket, so its error is a fifth at most, and usually half of that; in the last
//! bucket it is interpolated as if the bucket ended at 4.3 s.

pub(super) const BUCKETS: usize = 96;

/// Nanoseconds below which latencies are not distinguished.
const MIN_NANOS: u64 = 256;

/// The bucket of a latency.
pub(super) const fn bucket(nanos: u64) -> usize {
    let nanos = if nanos < MIN_NANOS { MIN_NANOS } else { nanos };
    let doublings = 63 - nanos.leading_zeros() as usize;
    let at = (doublings - 8) * 4 + (nanos >> (doublings - 2) & 3) as usize;
    if at < BUCKETS { at } else { BUCKETS - 1 }
}

/// The smallest latency of a bucket.
const fn lower_bound(bucket: usize) -> u64 {
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
        f.debug_map().entries(self.nonempty()).finish()
    }
}

impl Histogram {
    /// Nanoseconds from which on latencies are not distinguished.
    pub const MAX_NANOS: u64 = lower_bound(BUCKETS - 1);

    /// Counts a latency `weight` times.
    pub fn add(&mut self, nanos: u64, weight: u64) {
        let count = &mut self.counts[bucket(nanos)];
        *count = count.wrapping_add(weight);
    }

    /// The number of latencies counted.
    pub fn total(&self) -> u64 {
        self.counts.iter().fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// The latency, in nanoseconds, that a fraction `q` of them did not exceed; `None` if there are none.
    pub fn quantile(&self, q: f64) -> Option<u64> {
        let total = self.total();
        if total == 0 {
            return None;
        }
        let rank = (q.clamp(0.0, 1.0) * total as f64).max(1.0);
        let mut cumulative = 0.0;
        for (i, &n) in self.counts.iter().enumerate().filter(|(_, n)| **n > 0) {
            if cumulative + n as f64 >= rank {
                let (from, to) = (lower_bound(i) as f64, lower_bound(i + 1) as f64);
                return Some((from + (to - from) * (rank - cumulative) / n as f64) as u64);
            }
            cumulative += n as f64;
        }
        self.counts.iter().rposition(|n| *n > 0).map(|i| lower_bound(i + 1))
    }

    /// The buckets that are not empty: upper bound (`None` for the last bucket) and count.
    pub fn nonempty(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let upper_bound = |i| (i < BUCKETS - 1).then(|| lower_bound(i + 1));
        self.counts.iter().enumerate().filter(|(_, n)| **n > 0).map(move |(i, n)| (upper_bound(i), *n))
    }

    /// Adds the counts of another histogram.
    pub fn merge(&mut self, other: &Histogram) {
        self.combine(other, u64::wrapping_add);
    }

    pub(super) fn combine(&mut self, other: &Histogram, with: fn(u64, u64) -> u64) {
        for (mine, theirs) in self.counts.iter_mut().zip(other.counts) {
            *mine = with(*mine, theirs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_maps_to_its_bucket() {
        let mut last = 0;
        for exponent in 8..40 {
            for eighths in 8..16 {
                let nanos = (eighths << exponent) / 8;
                let at = bucket(nanos);
                assert!(at >= last, "{nanos} falls back to bucket {at}");
                last = at;
                if at < BUCKETS - 1 {
                    assert!(lower_bound(at) <= nanos && nanos < lower_bound(at + 1), "{nanos} is not in bucket {at}");
                }
            }
        }
        assert_eq!((bucket(0), bucket(255), bucket(u64::MAX)), (0, 0, BUCKETS - 1));
        assert_eq!((bucket(Histogram::MAX_NANOS - 1), bucket(Histogram::MAX_NANOS)), (BUCKETS - 2, BUCKETS - 1));
    }

    #[test]
    fn quantiles_are_accurate() {
        let mut h = Histogram::default();
        assert_eq!(h.quantile(0.5), None);
        (1..=10_000u64).for_each(|n| h.add(n * 100, 1));
        for (q, exact) in [(0.5, 500_000.0), (0.99, 990_000.0), (1.0, 1_000_000.0)] {
            let estimate = h.quantile(q).unwrap() as f64;
            assert!((estimate / exact - 1.0).abs() < 0.1, "the {q} quantile is {exact}, estimated {estimate}");
        }
    }
}
