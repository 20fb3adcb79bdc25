//! The distance from the optimum of the planner for overlapping sides.

use crate::oracle::*;
use proptest::prelude::*;
use spinio_plan::*;

fn cost(runs: &[Extent], model: &Model, constraints: &RouteConstraints, out: &mut Schedule) -> f64 {
    plan(Objective::Concurrent, runs, model, constraints, out);
    concurrent(runs, &decisions(runs, out), model, constraints)
}

/// The planner's cost divided by the best.
fn ratio_to_optimum(extents: &[Extent], model: &Model, constraints: &RouteConstraints, out: &mut Schedule) -> f64 {
    let runs = join(extents);
    let ours = cost(&runs, model, constraints, out);
    let best = brute_force(&runs, |s| concurrent(&runs, s, model, constraints));
    assert!(!exceeds(best, ours), "{ours} beats the best, {best}: {extents:?}");
    if best > 0.0 { ours / best } else { 1.0 }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6000))]

    #[test]
    fn optimal_up_to_ten_resident_runs(
        extents in any_extents(10),
        model in any_model(),
        least in prop_oneof![Just(u64::MAX), 1u64..8 << 20],
    ) {
        let far = ratio_to_optimum(&extents, &model, &constraints_with_dma(Route::P2p, least), &mut Schedule::default());
        prop_assert!(far <= 1.0 + 1.1e-3, "{far} times the optimum");
    }

    #[test]
    fn never_worse_than_uniform_plan(extents in any_extents(40), model in any_model()) {
        let (runs, constraints) = (join(&extents), constraints(Route::Direct));
        let ours = cost(&runs, &model, &constraints, &mut Schedule::default());
        let resident: Vec<bool> = runs.iter().map(|r| r.residency == Residency::Absent).collect();
        prop_assert!(!exceeds(ours, concurrent(&runs, &resident, &model, &constraints)));
        if runs.iter().all(|r| r.residency != Residency::Unknown) {
            let storage = vec![true; runs.len()];
            prop_assert!(!exceeds(ours, concurrent(&runs, &storage, &model, &constraints)));
        }
    }
}

#[test]
fn optimal_for_six_resident_runs_among_absent() {
    let mut random = Random(7);
    let mut out = Schedule::default();
    for (which, model) in models().into_iter().enumerate() {
        for _ in 0..500 {
            let extents: Vec<Extent> = (0..12)
                .map(|i| extent(1 + random.below(500), if i % 2 == 0 { Residency::Absent } else { Residency::Clean }))
                .collect();
            let far = ratio_to_optimum(&extents, &model, &constraints(Route::P2p), &mut out);
            assert!(far <= 1.0 + 1.1e-3, "model {which}: {far} times the optimum");
        }
    }
}

#[test]
fn near_optimal_with_many_resident_runs() {
    let mut random = Random(8);
    let mut out = Schedule::default();
    for (which, model) in models().into_iter().enumerate() {
        let (mut sum, cases) = (0.0, 60);
        for _ in 0..cases {
            // Clean next to dirty, so that there are 14 decisions and no absent run between them.
            let extents: Vec<Extent> = (0..14)
                .map(|i| extent(1 + random.below(2000), if i % 2 == 0 { Residency::Clean } else { Residency::Dirty }))
                .collect();
            let far = ratio_to_optimum(&extents, &model, &constraints(Route::P2p), &mut out);
            assert!(far < 1.3, "model {which}: {far} times the optimum");
            sum += far;
        }
        assert!(sum / f64::from(cases) < 1.03, "model {which}: {} on average", sum / f64::from(cases));
    }
}

/// Two decisions per group, and a group may be divided: no plan is faster than this.
fn divisible_bound(runs: &[Extent], model: &Model) -> f64 {
    let (s, c) = (&model.storage_queue, &model.cache_queue);
    let (mut storage, mut cache) = (s.latency, c.latency);
    let mut moves = Vec::new();
    for (i, run) in runs.iter().enumerate() {
        let bytes = run.len as f64;
        if run.residency == Residency::Absent {
            storage += s.per_command + bytes * s.per_byte;
        } else {
            let neighbours = usize::from(i > 0) + usize::from(i + 1 < runs.len());
            let command = [1.0, 0.0, -1.0][neighbours] * s.per_command;
            cache += c.per_command + bytes * c.per_byte;
            moves.push((command + bytes * s.per_byte, c.per_command + bytes * c.per_byte));
        }
    }
    moves.sort_by(|a, b| (a.0 / a.1).total_cmp(&(b.0 / b.1)));
    for (more, less) in moves {
        if more <= 0.0 {
            (storage, cache) = (storage + more, cache - less);
        } else if cache > storage {
            let part = ((cache - storage) / (more + less)).min(1.0);
            (storage, cache) = (storage + part * more, cache - part * less);
        }
    }
    storage.max(cache)
}

#[test]
fn random_8_mib_is_balanced() {
    let mut random = Random(9);
    let mut out = Schedule::default();
    for (which, model) in models().into_iter().enumerate() {
        let mut worst = 1.0_f64;
        for _ in 0..200 {
            let resident = 1 + random.below(99);
            let extents: Vec<Extent> = (0..2048)
                .map(|_| extent(1, if random.below(100) < resident { Residency::Clean } else { Residency::Absent }))
                .collect();
            let runs = join(&extents);
            let ours = cost(&runs, &model, &constraints(Route::P2p), &mut out);
            worst = worst.max(ours / divisible_bound(&runs, &model));
        }
        assert!(worst < 1.04, "model {which}: {worst} times the bound");
    }
}
