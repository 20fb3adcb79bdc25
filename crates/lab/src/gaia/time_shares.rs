//! The time of an experiment, shared evenly among its cells.
//!
//! ```text
//!   first    cell: an even share of what is left for its runs; twice as much until it must have ended
//!               └─ no figures by then? ── later                 what it did not need is the others'
//!   again    those, one after the other: an even share of what all have left over
//! ```
//!
//! So a method that is slow, or whose program hangs, takes no time from those after it but one share.

use std::time::{Duration, Instant};

/// How often a cell may have its share, until it must have ended: so that one that needs more for two runs gets it.
const MOST: u32 = 2;

/// The time of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Runs begin within this time.
    pub runs: Duration,
    /// It must have ended after this time.
    pub all: Duration,
    /// It is not tried again.
    pub is_last: bool,
}

/// Measures cells until `end`. `measure` returns false if there was no time for a figure.
pub fn share<T: Copy>(
    cells: Vec<T>,
    end: Instant,
    now: impl Fn() -> Instant,
    mut measure: impl FnMut(T, Share) -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let mut cells = cells;
    for is_last in [false, true] {
        let (count, mut late) = (cells.len(), Vec::new());
        for (before, cell) in cells.into_iter().enumerate() {
            let left = end.saturating_duration_since(now());
            let runs = left / u32::try_from(count - before).unwrap_or(u32::MAX);
            let all = if is_last { runs } else { (runs * MOST).min(left) };
            if !measure(cell, Share { runs, all, is_last })? {
                late.push(cell);
            }
        }
        cells = late;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Cells that need so many seconds each, 0: for ever, within `limit`: when each had its figures.
    fn run(needs: &[u64], limit: u64) -> Vec<Option<u64>> {
        let (begun, passed) = (Instant::now(), Cell::new(0.0));
        let mut done = vec![None; needs.len()];
        let now = || begun + Duration::from_secs_f64(passed.get());
        share((0..needs.len()).collect(), begun + Duration::from_secs(limit), now, |cell, share| {
            let need = needs[cell] as f64;
            let ends = need > 0.0 && need <= share.all.as_secs_f64();
            passed.set(passed.get() + if ends { need } else { share.all.as_secs_f64() });
            if ends {
                done[cell] = Some(passed.get().round() as u64);
            }
            Ok(ends)
        })
        .unwrap();
        assert!(passed.get() <= limit as f64 + 1e-6, "{needs:?} took {}", passed.get());
        done
    }

    #[test]
    fn cell_that_hangs_takes_no_time_from_the_others_but_its_share() {
        assert_eq!(run(&[1, 0, 1, 1, 1], 50).iter().filter(|done| done.is_none()).count(), 1);
        assert_eq!(run(&[0, 0, 5, 5, 5, 5], 60)[2..].iter().filter(|done| done.is_some()).count(), 4);
        assert_eq!(run(&[0], 10), [None]);
    }

    #[test]
    fn cell_that_needs_more_gets_what_others_have_left_over() {
        // Within twice its share at once; with more when the others have run.
        assert_eq!(run(&[6, 1, 1, 1], 16), [Some(6), Some(7), Some(8), Some(9)]);
        assert_eq!(run(&[9, 1, 1, 1], 16), [None, Some(9), Some(10), Some(11)]);
        let slow = run(&[30, 1, 1, 1, 1, 1, 1, 1, 1, 1], 100);
        assert_eq!((slow[0], slow[1], slow[9]), (Some(59), Some(21), Some(29)));
    }
}
