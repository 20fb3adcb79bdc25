//! A small generator of numbers that are the same every run.

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The same numbers every run, or those of another `SPINIO_TEST_SEED`: for long runs on a quiet machine.
    pub fn from_env(stream: u64) -> Rng {
        let seed = std::env::var("SPINIO_TEST_SEED").ok().and_then(|s| s.parse::<u64>().ok()).unwrap_or(0);
        Rng(seed.wrapping_mul(0xD134_2543_DE82_EF95).wrapping_add(stream))
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is at least 1.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next_u64() % end
    }

    /// Heads with probability `percent`.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of several.
    pub fn choose<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }

    /// A number below `end` that is often on, just before or just after a page.
    pub fn near_page_edge(&mut self, end: u64) -> u64 {
        let n = self.below(end);
        let page = n / 4096 * 4096;
        match self.below(4) {
            0 => page,
            1 => page.saturating_sub(1 + self.below(3)),
            2 => (page + 1 + self.below(3)).min(end - 1),
            _ => n,
        }
    }
}
