//! A reader and a model of the page cache, page by page.

use std::collections::BTreeSet;
use std::ops::Range;

use proptest::prelude::*;
use spinio_plan::readahead::{
    CACHED_SURVEY_STEP, SURVEY_STEP, SurveyWindow, max_buffered_request, max_profitable_request, survey_distance,
};
use spinio_plan::{Cost, Model, QueueCost, Route};

const PAGE: u64 = 4096;

/// Absent runs of a range, as the Linux kernel reports them.
fn absent(resident: &BTreeSet<u64>, range: &Range<u64>) -> Vec<Range<u64>> {
    let mut out: Vec<Range<u64>> = Vec::new();
    for page in range.start / PAGE..range.end.div_ceil(PAGE) {
        if resident.contains(&page) {
            continue;
        }
        match out.last_mut() {
            Some(last) if last.end == page * PAGE => last.end += PAGE,
            _ => out.push(page * PAGE..(page + 1) * PAGE),
        }
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Readers read ahead, jump, and share the cache with another process whose pages must never be claimed.
    #[test]
    fn only_absent_pages_become_owned(
        foreign in proptest::collection::btree_set(0u64..2000, 0..200),
        moves in proptest::collection::vec((0u64..300_000, prop::bool::weighted(0.1), 0u64..8_000_000), 1..80),
    ) {
        let window = 128 << 10;
        let far = survey_distance(window, false, SURVEY_STEP);
        let mut resident = foreign.clone();
        let mut ours = BTreeSet::new();
        let mut ahead = SurveyWindow::default();
        let mut at = 0u64;
        for (len, jumps, to) in moves {
            at = if jumps { to } else { at + len };
            for run in ahead.advance(at, far) {
                prop_assert!(run.start.is_multiple_of(PAGE) && run.end.is_multiple_of(PAGE) && !run.is_empty());
                ours.extend(run.start / PAGE..run.end / PAGE);
            }
            while let Some(range) = ahead.next_survey(at, far) {
                let runs = absent(&resident, &range);
                ahead.record_survey(range, runs);
            }
            prop_assert!(ahead.next_survey(at, far).is_none());
            // The kernel reads as far ahead as it may.
            resident.extend(at / PAGE..(at + 2 * window) / PAGE);
        }
        ours.extend(ahead.finish(far, 0).into_iter().flat_map(|run| run.start / PAGE..run.end / PAGE));
        prop_assert!(ours.is_disjoint(&foreign), "{:?}", ours.intersection(&foreign).collect::<Vec<_>>());
    }

    #[test]
    fn stream_owns_all_it_passed(steps in proptest::collection::vec(1u64..1 << 20, 1..100)) {
        let far = survey_distance(0, false, SURVEY_STEP);
        let mut ahead = SurveyWindow::default();
        let (mut at, mut owned_bytes) = (0, 0);
        for step in steps {
            while let Some(range) = ahead.next_survey(at, far) {
                ahead.record_survey(range.clone(), [range]);
            }
            at += step;
            let runs = ahead.advance(at, far);
            owned_bytes += runs.iter().map(|r| r.end - r.start).sum::<u64>();
            prop_assert_eq!(owned_bytes, at / PAGE * PAGE);
        }
    }
}

#[test]
fn forgotten_range_is_never_owned() {
    let mut ahead = SurveyWindow::default();
    let next = ahead.next_survey(0, 1 << 20).expect("no survey yet");
    ahead.record_survey(next.clone(), [next]);
    ahead.forget(&(4096..8192));
    assert_eq!(ahead.advance(16384, 1 << 20), [0..4096, 8192..16384]);
    assert_eq!((ahead.all_cached(), ahead.survey_step()), (false, SURVEY_STEP));
    ahead.forget(&(0..u64::MAX));
    assert_eq!((ahead.all_cached(), ahead.survey_step()), (true, CACHED_SURVEY_STEP));
    assert!(ahead.finish(1 << 20, 0).is_empty());
}

#[test]
fn buffered_request_limit_is_clamped_window() {
    assert_eq!(max_buffered_request(0, false), 512 << 10);
    assert_eq!(max_buffered_request(128 << 10, true), 512 << 10);
    assert_eq!(max_buffered_request(512 << 10, false), 512 << 10);
    assert_eq!(max_buffered_request(512 << 10, true), 1 << 20);
    assert_eq!(max_buffered_request(8 << 20, false), 1 << 20);
    assert_eq!(max_buffered_request(u64::MAX, true), 1 << 20);
    assert!(survey_distance(8 << 20, false, SURVEY_STEP) >= (16 << 20) + SURVEY_STEP);
}

#[test]
fn readahead_needs_page_cache_as_fast_as_storage() {
    for model in [Model::nvme(), Model::virtual_disk()] {
        assert_eq!(max_profitable_request(1 << 20, &model, Route::Copy), 1 << 20);
        assert_eq!(max_profitable_request(0, &model, Route::Copy), 0);
    }
    // A processor that copies 0.5 GB/s with storage of 3.7 GB/s and 100 us: at 64 KiB 131 against 118 us.
    let slow = Model {
        cache: Cost::new(0.0, 0, 0.5e9).unwrap(),
        storage: Cost::new(100_000.0, 0, 3.7e9).unwrap(),
        storage_queue: QueueCost::new(100_000.0, 0.0, 3.7e9),
        ..Model::nvme()
    };
    assert_eq!(max_profitable_request(512 << 10, &slow, Route::Copy), 0);
    // 0.8 GB/s: 164 against 135 us at 128 KiB, and 82 against 118 us at 64 KiB.
    let middling = Model { cache: Cost::new(0.0, 0, 0.8e9).unwrap(), ..slow };
    assert_eq!(max_profitable_request(512 << 10, &middling, Route::Copy), 64 << 10);
    assert_eq!(
        max_profitable_request(512 << 10, &middling, Route::Store),
        512 << 10,
        "another way out of the page cache"
    );
}
