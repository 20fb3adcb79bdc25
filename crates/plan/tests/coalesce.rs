//! Coalescing spans to reads: properties that hold for any spans.

use proptest::prelude::*;
use spinio_plan::{CoalesceRule, CoalescedRead, Span, coalesce};

fn any_spans() -> impl Strategy<Value = Vec<Span>> {
    let piece = (0u64..1 << 16, 1u64..9000);
    prop::collection::vec(piece, 0..200).prop_map(|all| {
        let tagged = all.into_iter().enumerate();
        tagged.map(|(i, (offset, len))| Span { offset, len, tag: i as u32 }).collect()
    })
}

fn any_rule() -> impl Strategy<Value = CoalesceRule> {
    (0u32..13, 0u64..9000, 1u64..1 << 17, 1usize..50).prop_map(|(unit, gap, most, members)| CoalesceRule {
        unit: 1 << unit,
        gap,
        max_len: most,
        max_members: members,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_span_is_in_exactly_one_read(mut spans in any_spans(), rule in any_rule()) {
        let before = {
            let mut sorted = spans.clone();
            sorted.sort();
            sorted
        };
        let runs = coalesce(&mut spans, &rule);
        prop_assert_eq!(&spans, &before, "sorted, and none lost");
        let mut next = 0;
        for run in &runs {
            prop_assert_eq!(run.members.start, next);
            prop_assert!(!run.members.is_empty() && run.members.len() <= rule.max_members);
            next = run.members.end;
            prop_assert!(run.offset % rule.unit == 0 && run.len % rule.unit == 0);
            for piece in &spans[run.members.clone()] {
                prop_assert!(run.offset <= piece.offset && piece.offset + piece.len <= run.offset + run.len);
            }
            prop_assert!(run.len <= rule.max_len || run.members.len() == 1);
        }
        prop_assert_eq!(next, spans.len());
        prop_assert!(runs.is_sorted_by_key(|r| r.offset));
    }

    #[test]
    fn reads_cover_spans_and_small_gaps_only(mut spans in any_spans(), rule in any_rule()) {
        let runs = coalesce(&mut spans, &rule);
        for run in &runs {
            // Between two members there is never more than the gap, in whole units.
            let mut covered_to = run.offset;
            for piece in &spans[run.members.clone()] {
                let start = piece.offset / rule.unit * rule.unit;
                prop_assert!(start <= covered_to + rule.gap, "{start} {covered_to}");
                covered_to = covered_to.max((piece.offset + piece.len).next_multiple_of(rule.unit));
            }
            prop_assert_eq!(covered_to, run.offset + run.len);
        }
    }

    #[test]
    fn duplicates_are_read_once(offset in 0u64..1 << 40, len in 1u64..5000, times in 1u32..40) {
        let mut spans: Vec<_> = (0..times).map(|tag| Span { offset, len, tag }).collect();
        let rule = CoalesceRule { unit: 512, gap: 0, max_len: 1 << 20, max_members: 100 };
        let runs = coalesce(&mut spans, &rule);
        let start = offset / 512 * 512;
        let end = (offset + len).next_multiple_of(512);
        prop_assert_eq!(runs, vec![CoalescedRead { offset: start, len: end - start, members: 0..times as usize }]);
    }
}
