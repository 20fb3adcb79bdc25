//! The exact optimum of the paper's cost, in one pass.
//!
//! The paper adds up: each storage transfer costs Eq. 1 of its length, each run from the page cache costs its own time,
//! and nothing overlaps. A resident run in the middle may be merged into a storage transfer, to save a second one.
//!
//! ```text
//!    absent  CLEAN  absent CLEAN absent  CLEAN        (capitals: may come from the cache)
//!   ├───────┤      ├───────────────────┤
//!            f(1)                       f(3) = own cost of run 3
//!                                            + min over earlier cache runs j: f(j) + T(bytes between)
//! ```
//!
//! `f(i)` is the least cost of everything up to run `i`, given that `i` comes from the cache. The
//! minimum over `j` is what `sliding_min.rs` finds in constant time, so the pass is linear. The paper
//! calls the exact solution too slow for every request; it is not, for a cost of this form.
//!
//! A dirty run that is merged is written back first. A run of unknown residency is never merged:
//! transfers cannot span it.
//!
//! Known flaws: two neighbouring cache runs (clean next to dirty) are counted as two, though they become one segment.
//! Bytes trimmed for alignment are not counted: two blocks per transfer at most.

use crate::constraints::RouteConstraints;
use crate::scratch::Scratch;
use crate::sliding_min::{Candidate, SlidingMin};
use crate::{Model, Residency};

const START: u32 = u32::MAX;

/// Decides every run; storage must be possible.
pub(crate) fn decide(scratch: &mut Scratch, model: &Model, constraints: &RouteConstraints) {
    let Scratch { runs, previous, candidates, .. } = scratch;
    let mut window = SlidingMin::new(candidates, &model.storage);
    previous.clear();
    previous.resize(runs.len(), START);

    // The last run that came from the cache. It is not in the window while no run follows it.
    let mut last = Candidate { end: 0.0, cost: 0.0, id: START };
    let mut contiguous = true;
    // Time to write back all dirty bytes so far.
    let mut writeback = 0.0;
    for (i, run) in runs.iter().enumerate() {
        if run.residency == Residency::Absent {
            window.push(last);
            contiguous = false;
            continue;
        }
        let start = run.start as f64;
        let (mut cost, mut from) = window.best(start);
        cost += writeback;
        if contiguous {
            let direct = last.cost + writeback;
            if direct <= cost {
                (cost, from) = (direct, last.id);
            }
            window.push(last);
        }
        previous[i] = from;
        cost += constraints.serial_cache_time(model, run.residency, run.len);
        if run.residency == Residency::Dirty {
            writeback += run.len as f64 * model.writeback;
        } else if run.residency == Residency::Unknown {
            window.clear();
        }
        last = Candidate { end: run.end() as f64, cost: cost - writeback, id: i as u32 };
        contiguous = true;
    }

    // The end is one more run from the cache, of no bytes.
    let end = runs.last().map_or(0, |r| r.end()) as f64;
    let (cost, from) = window.best(end);
    let mut from = if contiguous && last.cost <= cost { last.id } else { from };
    runs.iter_mut().for_each(|run| run.from_storage = true);
    while from != START {
        runs[from as usize].from_storage = false;
        from = previous[from as usize];
    }
}
