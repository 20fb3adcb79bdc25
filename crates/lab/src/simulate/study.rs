//! The study: every strategy on every vector, by two measures of cost.
//!
//! ```text
//!   vector ──┬─> all-storage   one transfer of everything
//!            ├─> all-cache     each resident run from the page cache, each absent one by its own transfer
//!            ├─> greedy        the paper's rule
//!            ├─> serial        the optimum of the paper's cost
//!            └─> concurrent    SPIN's planner
//!                  │
//!                  └─> its time if one transfer follows another (the paper's measure)
//!                      its time if both sides work at once, commands in flight (SPIN's)
//! ```

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spinio_plan::{
    Extent, Model, Objective, Reason, Residency, Route, RouteConstraints, Schedule, Segment, plan, predict,
};

use super::vectors::{self, Pattern};
use crate::random::SplitMix64;

/// A strategy for serving a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchStrategy {
    /// Everything in one transfer from storage.
    AllStorage,
    /// Every resident run from the page cache.
    AllCache,
    /// A planner.
    Planned(Objective),
}

impl BatchStrategy {
    /// In the order of the table.
    pub const ALL: [BatchStrategy; 5] = [
        BatchStrategy::AllStorage,
        BatchStrategy::AllCache,
        BatchStrategy::Planned(Objective::SerialGreedy),
        BatchStrategy::Planned(Objective::Serial),
        BatchStrategy::Planned(Objective::Concurrent),
    ];

    /// Its name in tables and charts.
    pub fn name(self) -> &'static str {
        match self {
            BatchStrategy::AllStorage => "all-storage",
            BatchStrategy::AllCache => "all-cache",
            BatchStrategy::Planned(Objective::SerialGreedy) => "greedy",
            BatchStrategy::Planned(Objective::Serial) => "optimal, serial",
            BatchStrategy::Planned(Objective::Concurrent) => "optimal, concurrent",
        }
    }

    /// Its schedule for one vector.
    pub fn schedule(self, extents: &[Extent], model: &Model, possible: &RouteConstraints, out: &mut Schedule) {
        let storage = possible.storage.unwrap_or(possible.cache);
        match self {
            BatchStrategy::Planned(objective) => plan(objective, extents, model, possible, out),
            BatchStrategy::AllStorage => {
                out.segments.clear();
                let len = extents.iter().map(|e| e.len).sum();
                let merged = extents.iter().any(|e| e.residency.is_cached());
                let reason = if merged { Reason::Merged } else { Reason::Absent };
                out.segments.push(Segment { offset: 0, len, route: storage, reason, refused: None });
            }
            BatchStrategy::AllCache => {
                out.segments.clear();
                let mut offset = 0;
                for e in extents {
                    let (route, reason) = match e.residency {
                        Residency::Absent => (storage, Reason::Absent),
                        _ => (possible.cache, Reason::Cached),
                    };
                    out.segments.push(Segment { offset, len: e.len, route, reason, refused: None });
                    offset += e.len;
                }
            }
        }
    }
}

/// Sums for one strategy by one measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sum {
    /// Nanoseconds.
    pub nanos: f64,
    /// Sum of best / own: divided by the number of vectors, the paper's 'within 98.9 % of the optimum'.
    pub nearness: f64,
    /// The least of these ratios.
    pub worst: f64,
}

impl Default for Sum {
    fn default() -> Sum {
        Sum { nanos: 0.0, nearness: 0.0, worst: 1.0 }
    }
}

/// Shares of resident pages by which the chart groups results.
pub const SHARES: usize = 20;

/// The result.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Study {
    /// The number of vectors.
    pub vectors: u64,
    /// By strategy, in the order of [`BatchStrategy::ALL`]; the paper's measure.
    pub serial: [Sum; 5],
    /// The same; SPIN's measure.
    pub concurrent: [Sum; 5],
    /// Vectors by resident share.
    pub count: [u64; SHARES],
    /// Sum of best / own by the paper's measure, by resident share and strategy.
    pub by_share: [[f64; 5]; SHARES],
    /// The same; SPIN's measure.
    pub by_share_concurrent: [[f64; 5]; SHARES],
}

impl Study {
    fn add_vector(&mut self, share: f64, serial: [f64; 5], concurrent: [f64; 5]) {
        let bin = ((share * SHARES as f64) as usize).min(SHARES - 1);
        self.vectors += 1;
        self.count[bin] += 1;
        // The serial planner is exact. SPIN's is not: another strategy may find a better schedule.
        let best = serial[3];
        let best_concurrent = concurrent.iter().copied().fold(f64::INFINITY, f64::min);
        let one = |sum: &mut Sum, bin: &mut f64, best: f64, own: f64| {
            let near = if own > 0.0 { best / own } else { 1.0 };
            *sum = Sum { nanos: sum.nanos + own, nearness: sum.nearness + near, worst: sum.worst.min(near) };
            *bin += near;
        };
        for i in 0..5 {
            one(&mut self.serial[i], &mut self.by_share[bin][i], best, serial[i]);
            one(&mut self.concurrent[i], &mut self.by_share_concurrent[bin][i], best_concurrent, concurrent[i]);
        }
    }

    fn join(&mut self, other: &Study) {
        self.vectors += other.vectors;
        let sums = |ours: &mut [Sum; 5], theirs: &[Sum; 5]| {
            for (a, b) in ours.iter_mut().zip(theirs) {
                *a = Sum { nanos: a.nanos + b.nanos, nearness: a.nearness + b.nearness, worst: a.worst.min(b.worst) };
            }
        };
        sums(&mut self.serial, &other.serial);
        sums(&mut self.concurrent, &other.concurrent);
        for bin in 0..SHARES {
            self.count[bin] += other.count[bin];
            for i in 0..5 {
                self.by_share[bin][i] += other.by_share[bin][i];
                self.by_share_concurrent[bin][i] += other.by_share_concurrent[bin][i];
            }
        }
    }
}

/// The parameters of the study.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The number of vectors.
    pub vectors: u64,
    /// Pages of each.
    pub pages: u64,
    /// Their pattern.
    pub pattern: Pattern,
    /// Their seed.
    pub seed: u64,
    /// Threads.
    pub threads: usize,
    /// The cost model.
    pub model: Model,
}

/// The routes of a request: both sides, and no registration of pages, which the paper does not have.
pub fn constraints() -> RouteConstraints {
    RouteConstraints { storage: Some(Route::P2p), ..RouteConstraints::cache_only(0, Route::Copy) }
}

/// Vectors that a thread takes at once; sums are made per chunk, so the result does not depend on the number of
/// threads.
const CHUNK: u64 = 500;

/// Runs the study; `done` counts vectors.
pub fn run(study: &Plan, done: &AtomicU64) -> Study {
    let chunks = study.vectors.div_ceil(CHUNK);
    let next = AtomicU64::new(0);
    let mut parts: Vec<(u64, Study)> = std::thread::scope(|scope| {
        let work = || {
            let mut parts = Vec::new();
            loop {
                let chunk = next.fetch_add(1, Relaxed);
                if chunk >= chunks {
                    return parts;
                }
                let (from, to) = (chunk * CHUNK, ((chunk + 1) * CHUNK).min(study.vectors));
                parts.push((chunk, part(study, from..to)));
                done.fetch_add(to - from, Relaxed);
            }
        };
        // The caller works too: the study completes, more slowly, if no thread can be started. More threads than chunks
        // would have no work.
        let more = study.threads.saturating_sub(1).min(chunks.saturating_sub(1) as usize);
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, work).ok();
        let threads: Vec<_> = (0..more).map_while(spawn).collect();
        let own = work();
        own.into_iter().chain(threads.into_iter().flat_map(|t| t.join().unwrap_or_default())).collect()
    });
    parts.sort_unstable_by_key(|(chunk, _)| *chunk);
    let mut out = Study::default();
    parts.iter().for_each(|(_, part)| out.join(part));
    out
}

fn part(study: &Plan, numbers: std::ops::Range<u64>) -> Study {
    let (mut out, mut extents, mut schedule) = (Study::default(), Vec::new(), Schedule::default());
    let possible = constraints();
    for number in numbers {
        vectors::draw(&mut SplitMix64::new(study.seed, number), study.pattern, study.pages, &mut extents);
        let resident: u64 = extents.iter().filter(|e| e.residency.is_cached()).map(|e| e.len).sum();
        let (mut serial, mut concurrent) = ([0.0; 5], [0.0; 5]);
        for (i, strategy) in BatchStrategy::ALL.into_iter().enumerate() {
            strategy.schedule(&extents, &study.model, &possible, &mut schedule);
            serial[i] = predict(Objective::Serial, &extents, &schedule, &study.model).total;
            concurrent[i] = predict(Objective::Concurrent, &extents, &schedule, &study.model).total;
        }
        out.add_vector(resident as f64 / (study.pages * vectors::PAGE) as f64, serial, concurrent);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan_of(vectors: u64, threads: usize) -> Plan {
        Plan { vectors, pages: 256, pattern: Pattern::Runs, seed: 1, threads, model: super::super::paper() }
    }

    #[test]
    fn result_depends_on_seed_not_threads() {
        let study = |plan: &Plan| run(plan, &AtomicU64::new(0));
        let one = study(&plan_of(2000, 1));
        assert_eq!(study(&plan_of(2000, 4)), one);
        assert_ne!(study(&Plan { seed: 2, ..plan_of(2000, 1) }), one);
        assert_eq!(one.vectors, 2000);
        assert_eq!(one.count.iter().sum::<u64>(), 2000);
    }

    #[test]
    fn no_strategy_beats_optimum() {
        let study = run(&plan_of(1000, 2), &AtomicU64::new(0));
        for sum in &study.serial {
            assert!(sum.nearness <= 1000.0 * (1.0 + 1e-9), "{study:?}");
        }
        assert!((study.serial[3].nearness - 1000.0).abs() < 1e-6);
        assert!(
            study.serial[2].nearness > study.serial[0].nearness && study.serial[2].nearness > study.serial[1].nearness
        );
        assert!(study.concurrent[4].nearness > 990.0, "{:?}", study.concurrent);
    }
}
