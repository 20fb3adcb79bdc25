//! Pseudo-random numbers that are the same in every run (splitmix64).

/// A generator.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// One of a family: generators of consecutive numbers and one seed are independent.
    pub fn new(seed: u64, number: u64) -> SplitMix64 {
        let mut first = SplitMix64(seed);
        let mut second = SplitMix64(first.next_u64() ^ number);
        SplitMix64(second.next_u64())
    }

    /// 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// In 0 <= x < 1.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Below `bound`, which must not be 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(limit)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_depends_on_seed_only() {
        let few = |seed, number| {
            let mut r = SplitMix64::new(seed, number);
            [r.next_u64(), r.next_u64(), r.next_u64()]
        };
        assert_eq!(few(1, 2), few(1, 2));
        assert_ne!(few(1, 2), few(1, 3));
        assert_ne!(few(1, 2), few(2, 2));
    }

    #[test]
    fn numbers_are_uniform_and_bounded() {
        let mut r = SplitMix64::new(7, 0);
        let mean = (0..10_000).map(|_| r.unit()).sum::<f64>() / 10_000.0;
        assert!((0.48..0.52).contains(&mean), "{mean}");
        assert!((0..1000).all(|_| r.below(3) < 3));
    }
}
