//! Random residency: the pages of a request that are in the page cache.
//!
//! The paper specifies only 'random vectors', so there are two patterns to choose from.
//!
//! ```text
//!   pages   each page by itself is resident with probability p       █░█░░██░█░...
//!   runs    the same share, in runs of a mean length of r pages      ████░░░░░███████...
//! ```
//!
//! `p` is drawn for each vector, uniformly from 0 to 1; `r` uniformly on a logarithmic scale from 1 to 512 pages.

use spinio_plan::{Extent, Residency};

use crate::random::SplitMix64;

/// The pattern of the resident pages of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Pattern {
    /// In runs, as programs leave them.
    Runs,
    /// Each page by itself.
    Pages,
}

impl Pattern {
    /// As text.
    pub fn describe(self) -> &'static str {
        match self {
            Pattern::Runs => "resident share 0 to 100 %, in runs of 1 to 512 pages on average",
            Pattern::Pages => "resident share 0 to 100 %, each page by itself",
        }
    }
}

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Fills `out` with a vector of `pages` pages; neighbours differ in residency.
pub fn draw(random: &mut SplitMix64, pattern: Pattern, pages: u64, out: &mut Vec<Extent>) {
    out.clear();
    let share = random.unit();
    let length = match pattern {
        Pattern::Pages => 1.0,
        Pattern::Runs => (random.unit() * 512f64.ln()).exp(),
    };
    let (absent_ends, resident_ends) = match pattern {
        Pattern::Pages => (share, 1.0 - share),
        // The rarer kind is in runs of `length`; the other kind fills the share.
        Pattern::Runs if share <= 0.5 => (share / (1.0 - share) / length, 1.0 / length),
        Pattern::Runs => (1.0 / length, (1.0 - share) / share / length),
    };
    let mut resident = random.unit() < share;
    let mut at = 0;
    while at < pages {
        let ends = if resident { resident_ends } else { absent_ends };
        let run = run(random, ends).min(pages - at);
        let residency = if resident { Residency::Clean } else { Residency::Absent };
        out.push(Extent { len: run * PAGE, residency });
        at += run;
        resident = !resident;
    }
}

/// Length of a run that ends after each page with this probability; at least one page.
fn run(random: &mut SplitMix64, ends: f64) -> u64 {
    if ends >= 1.0 {
        return 1;
    }
    let steps = (1.0 - random.unit()).ln() / (1.0 - ends).ln();
    if steps.is_finite() { 1 + steps.min(1e15) as u64 } else { u64::MAX / 2 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_cover_size_and_share_is_uniform() {
        for pattern in [Pattern::Runs, Pattern::Pages] {
            let (mut sum, mut extents) = (0.0, Vec::new());
            for i in 0..2000 {
                draw(&mut SplitMix64::new(1, i), pattern, 2048, &mut extents);
                assert_eq!(extents.iter().map(|e| e.len).sum::<u64>(), 8 << 20);
                assert!(extents.windows(2).all(|e| e[0].residency != e[1].residency));
                let resident: u64 = extents.iter().filter(|e| e.residency == Residency::Clean).map(|e| e.len).sum();
                sum += resident as f64 / f64::from(8 << 20);
            }
            assert!((0.46..0.54).contains(&(sum / 2000.0)), "{pattern:?}: {}", sum / 2000.0);
        }
    }
}
