//! Any extents, costs and constraints: the schedule must cover the request and satisfy the constraints.
#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use spinio_plan::{
    Cost, Extent, Model, Objective, QueueCost, Reason, Residency, Route, RouteConstraints, Schedule, plan, predict,
};

#[derive(Arbitrary, Debug)]
struct Input {
    extents: Vec<(u32, u8)>,
    file_offset: u64,
    store: bool,
    large: Option<u32>,
    storage: Option<bool>,
    align: u8,
    fast: bool,
    slow: [u8; 6],
}

const RESIDENCIES: [Residency; 4] = [Residency::Absent, Residency::Clean, Residency::Dirty, Residency::Unknown];

fuzz_target!(|bytes: &[u8]| {
    let Ok(input) = Input::arbitrary(&mut Unstructured::new(bytes)) else { return };
    let extents: Vec<Extent> = input
        .extents
        .iter()
        .filter(|(len, _)| *len > 0)
        .map(|&(len, r)| Extent { len: u64::from(len), residency: RESIDENCIES[usize::from(r % 4)] })
        .collect();
    if extents.is_empty() {
        return;
    }
    let storage = input.storage.map(|p2p| if p2p { Route::P2p } else { Route::Direct });
    let constraints = RouteConstraints {
        file_offset: input.file_offset >> 2,
        cache: if input.store { Route::Store } else { Route::Copy },
        cache_large: input.large.map(|least| (Route::Dma, u64::from(least).max(1))),
        storage,
        storage_align: 1 << (input.align % 17),
        refused: (storage != Some(Route::P2p)).then_some(Reason::P2pUnreachable),
        cache_refused: input.large.is_none().then_some(Reason::PinRefused),
    };
    let mut model = if input.fast { Model::nvme() } else { Model::virtual_disk() };
    let slow = input.slow.map(|factor| 0.05 + f64::from(factor) / 8.0);
    let queue = |route: Route| QueueCost::new(1e5 * slow[route as usize], 1e3, 2e10 / slow[route as usize]);
    let cost = |route: Route| Cost::new(1e5 * slow[route as usize], 0, 1e10 / slow[route as usize]).unwrap();
    (model.cache, model.cache_queue) = (cost(Route::Copy), queue(Route::Copy));
    (model.cache_dma, model.cache_dma_queue) = (cost(Route::Dma), queue(Route::Dma));
    (model.cache_store, model.cache_store_queue) = (cost(Route::Store), queue(Route::Store));
    (model.storage, model.storage_queue) = (cost(Route::Direct), queue(Route::Direct));
    let whole: u64 = extents.iter().map(|e| e.len).sum();
    let mut schedule = Schedule::default();
    for objective in Objective::ALL {
        plan(objective, &extents, &model, &constraints, &mut schedule);
        let mut at = 0;
        for segment in &schedule.segments {
            assert_eq!(segment.offset, at, "a gap or an overlap");
            assert!(segment.len > 0);
            at += segment.len;
            match segment.route {
                Route::Direct | Route::P2p => assert_eq!(Some(segment.route), storage),
                Route::Dma => assert!(constraints.cache_large.is_some_and(|(_, least)| segment.len >= least)),
                route => assert_eq!(route, constraints.cache),
            }
            if segment.route == Route::P2p {
                assert_eq!((constraints.file_offset + segment.offset) % constraints.storage_align, 0);
                assert_eq!(segment.len % constraints.storage_align, 0);
            }
        }
        assert_eq!(at, whole, "the schedule and the request have different ends");
        let times = predict(objective, &extents, &schedule, &model);
        assert!(times.total.is_finite() && times.total >= 0.0);
    }
    let cost: &Cost = model.cost(Route::Copy);
    assert!(cost.time(whole).is_finite());
});
