//! Properties of every schedule: it covers the request, satisfies the constraints, and gives reasons.

use crate::oracle::*;
use proptest::prelude::*;
use spinio_plan::*;

fn any_constraints() -> impl Strategy<Value = RouteConstraints> {
    let storage = prop_oneof![Just(None), Just(Some(Route::Direct)), Just(Some(Route::P2p))];
    let large = prop_oneof![Just(None), (1u64..4 << 20).prop_map(|least| Some((Route::Dma, least)))];
    let cache = prop_oneof![Just(Route::Copy), Just(Route::Store)];
    let align = prop_oneof![Just(1u64), Just(512), Just(4096), Just(65536)];
    (storage, large, cache, align, 0u64..1 << 40).prop_map(
        |(storage, cache_large, cache, storage_align, file_offset)| RouteConstraints {
            file_offset,
            cache,
            cache_large,
            storage,
            storage_align,
            refused: (storage != Some(Route::P2p)).then_some(Reason::P2pUnreachable),
            cache_refused: cache_large.is_none().then_some(Reason::PinRefused),
        },
    )
}

/// Extents of any number of bytes.
fn odd_extents() -> impl Strategy<Value = Vec<Extent>> {
    let len = prop_oneof![1u64..6000, 1u64..300_000];
    prop::collection::vec((len, any_residency()).prop_map(|(len, residency)| Extent { len, residency }), 1..60)
}

/// Bytes of a range by residency: absent, clean, dirty, unknown.
fn bytes_by_residency(extents: &[Extent], segment: &Segment) -> [u64; 4] {
    let (mut start, mut out) = (0, [0; 4]);
    for e in extents {
        let common = (start + e.len).min(segment.offset + segment.len).saturating_sub(start.max(segment.offset));
        out[e.residency as usize] += common;
        start += e.len;
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8000))]

    #[test]
    fn schedule_invariants_hold(extents in odd_extents(), constraints in any_constraints(), which in 0usize..3, model in 0usize..5) {
        let model = &models()[model];
        let mut out = Schedule::default();
        plan(Objective::ALL[which], &extents, model, &constraints, &mut out);

        let mut at = 0;
        for (i, s) in out.segments.iter().enumerate() {
            prop_assert_eq!(s.offset, at, "a gap or an overlap");
            prop_assert!(s.len > 0);
            at += s.len;
            prop_assert!(i == 0 || out.segments[i - 1].route != s.route, "neighbours of one route");

            let [absent, clean, dirty, unknown] = bytes_by_residency(&extents, s);
            let resident = clean + dirty;
            match s.route {
                Route::Direct | Route::P2p => {
                    prop_assert_eq!(Some(s.route), constraints.storage);
                    prop_assert_eq!(unknown, 0, "unknown bytes were taken from storage");
                    prop_assert_eq!(s.reason, if resident > 0 { Reason::Merged } else { Reason::Absent });
                    prop_assert_eq!(s.refused, constraints.refused);
                }
                Route::Dma => {
                    prop_assert!(constraints.cache_large.is_some_and(|(_, least)| s.len >= least));
                    prop_assert_eq!((absent, unknown), (0, 0), "pages that may be absent were registered");
                    prop_assert_eq!(s.reason, Reason::CachedLarge);
                }
                route => {
                    prop_assert_eq!(route, constraints.cache);
                    let fits = match s.reason {
                        Reason::Cached => clean > 0,
                        Reason::Dirty => dirty > 0,
                        Reason::Unknown => unknown > 0,
                        Reason::Absent => absent > 0 && constraints.storage.is_none(),
                        // An edge may be of a resident run that was merged.
                        Reason::Edge => absent + resident > 0 && constraints.storage == Some(Route::P2p),
                        _ => false,
                    };
                    prop_assert!(fits, "{:?} of {:?}", s, [absent, clean, dirty, unknown]);
                }
            }
            if s.route == Route::P2p {
                prop_assert_eq!((constraints.file_offset + s.offset) % constraints.storage_align, 0);
                prop_assert_eq!(s.len % constraints.storage_align, 0);
            }
        }
        prop_assert_eq!(at, bytes(&extents));
        prop_assert_eq!(out.len(), at);

        // A schedule that was used before gives the same plan.
        let mut again = out.clone();
        plan(Objective::Serial, &extents[..1], model, &constraints, &mut again);
        plan(Objective::ALL[which], &extents, model, &constraints, &mut again);
        prop_assert_eq!(&again, &out);

        let times = predict(Objective::ALL[which], &extents, &out, model);
        prop_assert_eq!(times.segments.len(), out.segments.len());
        let whole = times.storage + times.cache;
        prop_assert!(times.total <= whole && times.total >= whole / 2.0 && times.total.is_finite());
    }

    #[test]
    fn prediction_equals_minimised_cost(extents in any_extents(12), model in any_model()) {
        // Clean next to dirty is one segment but two runs: then the prediction is the lower.
        let (runs, constraints) = (join(&extents), constraints(Route::P2p));
        let mut out = Schedule::default();
        for objective in Objective::ALL {
            plan(objective, &extents, &model, &constraints, &mut out);
            let decided = decisions(&runs, &out);
            let cost = if objective == Objective::Concurrent { concurrent } else { serial };
            let (predicted, planned_cost) = (predict(objective, &extents, &out, &model).total, cost(&runs, &decided, &model, &constraints));
            prop_assert!(!exceeds(predicted, planned_cost), "{} predicted, {} planned", predicted, planned_cost);
            let alone = runs.windows(2).all(|r| r.iter().any(|e| e.residency == Residency::Absent));
            prop_assert!(!alone || !exceeds(planned_cost, predicted), "{} predicted, {} planned", predicted, planned_cost);
        }
    }
}

const ABSENT: Extent = Extent { len: 100_000, residency: Residency::Absent };
const CLEAN: Extent = Extent { len: 32 << 20, residency: Residency::Clean };

fn plan_of(extents: &[Extent], constraints: &RouteConstraints) -> Vec<(u64, u64, Route, Reason, Option<Reason>)> {
    let mut out = Schedule::default();
    plan(Objective::Concurrent, extents, &Model::virtual_disk(), constraints, &mut out);
    out.segments.iter().map(|s| (s.offset, s.len, s.route, s.reason, s.refused)).collect()
}

#[test]
fn misaligned_ends_use_page_cache_for_p2p_only() {
    let p2p = RouteConstraints { file_offset: 1000, storage_align: 512, ..constraints(Route::P2p) };
    assert_eq!(
        plan_of(&[ABSENT], &p2p),
        [
            (0, 24, Route::Copy, Reason::Edge, None),
            (24, 99_840, Route::P2p, Reason::Absent, None),
            (99_864, 136, Route::Copy, Reason::Edge, None),
        ]
    );
    let direct = RouteConstraints { storage: Some(Route::Direct), ..p2p };
    assert_eq!(plan_of(&[ABSENT], &direct), [(0, 100_000, Route::Direct, Reason::Absent, None)]);
    let tiny = [Extent { len: 300, ..ABSENT }];
    assert_eq!(plan_of(&tiny, &p2p), [(0, 300, Route::Copy, Reason::Edge, None)]);
}

#[test]
fn every_refusal_is_reported() {
    let none = RouteConstraints { refused: Some(Reason::NoDirectIo), ..RouteConstraints::cache_only(0, Route::Copy) };
    let refused = Some(Reason::NoDirectIo);
    assert_eq!(plan_of(&[ABSENT], &none), [(0, 100_000, Route::Copy, Reason::Absent, refused)]);

    let direct = RouteConstraints { refused: Some(Reason::P2pUnreachable), ..constraints(Route::Direct) };
    let refused = Some(Reason::P2pUnreachable);
    assert_eq!(plan_of(&[ABSENT], &direct), [(0, 100_000, Route::Direct, Reason::Absent, refused)]);

    let pin = RouteConstraints { cache_refused: Some(Reason::PinRefused), ..direct };
    let refused = Some(Reason::PinRefused);
    assert_eq!(plan_of(&[CLEAN], &pin), [(0, 32 << 20, Route::Copy, Reason::Cached, refused)]);
}

#[test]
fn long_resident_runs_use_dma() {
    let large = constraints_with_dma(Route::Direct, 16 << 20);
    let plan = plan_of(&[CLEAN, ABSENT], &large);
    assert_eq!(plan[0], (0, 32 << 20, Route::Dma, Reason::CachedLarge, None));
    let small = [Extent { len: 1 << 20, ..CLEAN }, ABSENT];
    assert_eq!(plan_of(&small, &large)[0], (0, 1 << 20, Route::Copy, Reason::Cached, None));
}

#[test]
fn dirty_bytes_stay_cached_if_writeback_costs_more() {
    let dirty = Extent { len: 16 << 10, residency: Residency::Dirty };
    let clean = Extent { len: 16 << 10, residency: Residency::Clean };
    let routes = |middle| plan_of(&[ABSENT, middle, ABSENT], &constraints(Route::Direct)).len();
    // Four pages cost less to read than a second command; written back first, they cost more.
    assert_eq!((routes(clean), routes(dirty)), (1, 3));
}

#[test]
fn empty_request_and_empty_extents() {
    assert!(plan_of(&[], &constraints(Route::P2p)).is_empty());
    let empty = Extent { len: 0, ..CLEAN };
    assert_eq!(plan_of(&[empty, ABSENT, empty], &constraints(Route::P2p)).len(), 1);
}
