//! Time to plan 8 MiB: 2048 pages at random residency, and all of one residency.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use spinio_plan::{Extent, Model, Objective, Reason, Residency, Route, RouteConstraints, Schedule, plan};

/// Pages that are resident with this probability in percent, joined as the residency survey returns them.
fn random(percent: u64, seed: u64) -> Vec<Extent> {
    let mut state = seed * 2 + 1;
    let mut extents: Vec<Extent> = Vec::new();
    for _ in 0..2048 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let residency = if (state >> 33) % 100 < percent { Residency::Clean } else { Residency::Absent };
        match extents.last_mut() {
            Some(last) if last.residency == residency => last.len += 4096,
            _ => extents.push(Extent { len: 4096, residency }),
        }
    }
    extents
}

fn planners(c: &mut Criterion) {
    let constraints = RouteConstraints {
        storage: Some(Route::Direct),
        refused: Some(Reason::NoP2pMapping),
        cache_large: Some((Route::Dma, 16 << 20)),
        ..RouteConstraints::cache_only(0, Route::Copy)
    };
    let mut out = Schedule::default();
    for (model_name, model) in [("nvme", Model::nvme()), ("virtual disk", Model::virtual_disk())] {
        for objective in Objective::ALL {
            for percent in [5, 50, 95] {
                // Other vectors each time: a branch predictor that has seen them all would give times that are too
                // short.
                let vectors: Vec<_> = (0..64).map(|seed| random(percent, seed)).collect();
                let mut next_random = 0;
                let name = format!("8 MiB/{model_name}/{}/{percent} % resident", objective.name());
                c.bench_function(&name, |b| {
                    b.iter(|| {
                        next_random = (next_random + 1) % vectors.len();
                        plan(objective, black_box(&vectors[next_random]), &model, &constraints, &mut out);
                        black_box(out.segments.len())
                    });
                });
            }
            for residency in [Residency::Absent, Residency::Clean] {
                let one = [Extent { len: 8 << 20, residency }];
                let name = format!("one extent/{model_name}/{}/{residency:?}", objective.name());
                c.bench_function(&name, |b| {
                    b.iter(|| {
                        plan(objective, black_box(&one), &model, &constraints, &mut out);
                        black_box(out.segments.len())
                    });
                });
            }
        }
    }
}

criterion_group!(benches, planners);
criterion_main!(benches);
