//! Oracles for the planners: the cost of a plan, written as the objective is defined, and the best of all
//! plans, by trying each. Slow and simple on purpose; nothing here shares code with the planners.

use proptest::prelude::*;
use spinio_plan::*;

pub(crate) const PAGE: u64 = 4096;

pub(crate) fn extent(pages: u64, residency: Residency) -> Extent {
    Extent { len: pages * PAGE, residency }
}

/// Adjacent runs of one residency joined: a plan decides on these, not on the extents as they were split.
pub(crate) fn join(extents: &[Extent]) -> Vec<Extent> {
    let mut out: Vec<Extent> = Vec::new();
    for e in extents {
        match out.last_mut() {
            Some(last) if last.residency == e.residency => last.len += e.len,
            _ => out.push(*e),
        }
    }
    out
}

pub(crate) fn bytes(extents: &[Extent]) -> u64 {
    extents.iter().map(|e| e.len).sum()
}

/// The decision of a schedule for each run; a run split in two is a failure.
pub(crate) fn decisions(runs: &[Extent], schedule: &Schedule) -> Vec<bool> {
    let mut start = 0;
    runs.iter()
        .map(|run| {
            let end = start + run.len;
            let mut routes = schedule
                .segments
                .iter()
                .filter(|s| s.offset < end && s.offset + s.len > start)
                .map(|s| !s.route.from_cache());
            let first = routes.next().expect("covered");
            assert!(routes.all(|r| r == first), "a run is served from both sides");
            start = end;
            first
        })
        .collect()
}

/// Whether these decisions are allowed: absent runs from storage, unknown ones not.
fn allowed(runs: &[Extent], storage: &[bool]) -> bool {
    runs.iter().zip(storage).all(|(run, &s)| match run.residency {
        Residency::Absent => s,
        Residency::Unknown => !s,
        _ => true,
    })
}

fn cache_route(constraints: &RouteConstraints, run: &Extent) -> Route {
    match constraints.cache_large {
        Some((route, least)) if run.residency.is_cached() && run.len >= least => route,
        _ => constraints.cache,
    }
}

/// Lengths of the storage transfers, and the dirty bytes in them.
fn transfers(runs: &[Extent], storage: &[bool]) -> (Vec<u64>, u64) {
    let (mut lengths, mut dirty, mut open) = (Vec::new(), 0, false);
    for (run, &s) in runs.iter().zip(storage) {
        if s {
            if open {
                *lengths.last_mut().expect("open") += run.len;
            } else {
                lengths.push(run.len);
            }
            if run.residency == Residency::Dirty {
                dirty += run.len;
            }
        }
        open = s;
    }
    (lengths, dirty)
}

/// The paper's cost: everything one after another.
pub(crate) fn serial(runs: &[Extent], storage: &[bool], model: &Model, constraints: &RouteConstraints) -> f64 {
    let (lengths, dirty) = transfers(runs, storage);
    let cached = runs.iter().zip(storage).filter(|(_, s)| !**s).map(|(r, _)| r);
    lengths.iter().map(|&l| model.storage.time(l)).sum::<f64>()
        + dirty as f64 * model.writeback
        + cached.map(|r| model.cost(cache_route(constraints, r)).time(r.len)).sum::<f64>()
}

/// SPIN's cost: the slower of two sides.
pub(crate) fn concurrent(runs: &[Extent], storage: &[bool], model: &Model, constraints: &RouteConstraints) -> f64 {
    let (lengths, dirty) = transfers(runs, storage);
    let queue = &model.storage_queue;
    let mut disk = if lengths.is_empty() { 0.0 } else { queue.latency };
    disk += lengths.iter().map(|&l| queue.per_command + l as f64 * queue.per_byte).sum::<f64>();
    disk += dirty as f64 * model.writeback;
    let (mut cache, mut latency) = (0.0, 0.0);
    for (run, _) in runs.iter().zip(storage).filter(|(_, s)| !**s) {
        let route = cache_route(constraints, run);
        let flight = model.queue(route);
        latency = model.queue(constraints.cache).latency;
        if route == Route::Dma {
            cache += flight.latency;
        }
        cache += flight.per_command + run.len as f64 * flight.per_byte;
    }
    disk.max(cache + latency)
}

/// The least cost of all plans.
pub(crate) fn brute_force(runs: &[Extent], cost: impl Fn(&[bool]) -> f64) -> f64 {
    assert!(runs.len() <= 16);
    let mut storage = vec![false; runs.len()];
    let mut best = f64::INFINITY;
    for bits in 0u32..1 << runs.len() {
        storage.iter_mut().enumerate().for_each(|(i, s)| *s = bits >> i & 1 == 1);
        if allowed(runs, &storage) {
            best = best.min(cost(&storage));
        }
    }
    best
}

pub(crate) fn constraints(route: Route) -> RouteConstraints {
    RouteConstraints { storage: Some(route), ..RouteConstraints::cache_only(0, Route::Copy) }
}

pub(crate) fn constraints_with_dma(route: Route, least: u64) -> RouteConstraints {
    RouteConstraints { cache_large: Some((Route::Dma, least)), ..constraints(route) }
}

/// Models with different cheapest routes.
pub(crate) fn models() -> Vec<Model> {
    let nvme = Model::nvme();
    let cost = |c, cutoff, bw| Cost::new(c, cutoff, bw).expect("a valid cost");
    vec![
        nvme,
        Model::virtual_disk(),
        // The paper's drive: 512 KiB, 584 us, and a cache that moves 249 pages meanwhile.
        Model { storage: cost(584e3, 512 << 10, 2.8e9), cache: cost(0.0, 0, 249.0 * 4096.0 / 584e-6), ..nvme },
        // A cache that is slower than storage, so that merging and balancing pay.
        Model {
            storage: cost(20e3, 16 << 10, 10e9),
            cache: cost(1e3, 4096, 5e9),
            storage_queue: QueueCost::new(15e3, 1e3, 10e9),
            cache_queue: QueueCost::new(2e3, 1e3, 3e9),
            ..nvme
        },
        // No fixed costs at all.
        Model {
            storage: cost(0.0, 0, 1e9),
            cache: cost(0.0, 0, 1e9),
            storage_queue: QueueCost::new(0.0, 0.0, 1e9),
            cache_queue: QueueCost::new(0.0, 0.0, 1e9),
            writeback: 0.0,
            ..nvme
        },
    ]
}

pub(crate) fn any_residency() -> impl proptest::strategy::Strategy<Value = Residency> {
    prop_oneof![
        5 => Just(Residency::Absent),
        5 => Just(Residency::Clean),
        2 => Just(Residency::Dirty),
        1 => Just(Residency::Unknown),
    ]
}

/// Extents of pages, short ones and long ones.
pub(crate) fn any_extents(max_runs: usize) -> impl proptest::strategy::Strategy<Value = Vec<Extent>> {
    let pages = prop_oneof![1u64..8, 1u64..300, 1u64..4000];
    prop::collection::vec((pages, any_residency()).prop_map(|(p, r)| extent(p, r)), 1..=max_runs)
}

/// A model whose parts are drawn independently.
pub(crate) fn any_model() -> impl proptest::strategy::Strategy<Value = Model> {
    let bandwidth = || prop_oneof![Just(1e9), 0.2e9..60e9];
    let cost = move || {
        (bandwidth(), 0u64..1 << 20, 1.0..8.0, prop_oneof![Just(0.0), 0.0..1e6]).prop_map(
            |(bw, cutoff, times, more)| {
                Cost::new(cutoff as f64 / bw * 1e9 * times + more, cutoff, bw).expect("at least cutoff / bandwidth")
            },
        )
    };
    let flight = move || (0.0..1e5, 0.0..2e4, bandwidth()).prop_map(|(l, c, bw)| QueueCost::new(l, c, bw));
    let writeback = prop_oneof![Just(0.0), 0.0..2.0];
    ((cost(), cost(), cost()), (flight(), flight(), flight()), writeback).prop_map(|(costs, flights, writeback)| {
        Model {
            cache: costs.0,
            cache_dma: costs.1,
            storage: costs.2,
            cache_queue: flights.0,
            cache_dma_queue: flights.1,
            storage_queue: flights.2,
            writeback,
            ..Model::nvme()
        }
    })
}

/// A small generator for the exhaustive tests and the large requests.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

/// Whether `a` is more than `b`, beyond rounding.
pub(crate) fn exceeds(a: f64, b: f64) -> bool {
    a > b * (1.0 + 1e-9) + 1e-6
}
