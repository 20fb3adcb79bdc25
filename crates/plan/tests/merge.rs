//! Joining pieces to reads, against what must hold for any pieces.

use proptest::prelude::*;
use spinio_plan::{Joining, Run, Wanted, merge};

fn wanted() -> impl Strategy<Value = Vec<Wanted>> {
    let piece = (0u64..1 << 16, 1u64..9000);
    prop::collection::vec(piece, 0..200).prop_map(|all| {
        let tagged = all.into_iter().enumerate();
        tagged.map(|(i, (offset, len))| Wanted { offset, len, tag: i as u32 }).collect()
    })
}

fn joining() -> impl Strategy<Value = Joining> {
    (0u32..13, 0u64..9000, 1u64..1 << 17, 1usize..50).prop_map(|(unit, gap, most, members)| Joining {
        unit: 1 << unit,
        gap,
        most,
        members,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_piece_lies_in_exactly_one_run(mut pieces in wanted(), how in joining()) {
        let before = {
            let mut sorted = pieces.clone();
            sorted.sort();
            sorted
        };
        let runs = merge(&mut pieces, &how);
        prop_assert_eq!(&pieces, &before, "sorted, and none lost");
        let mut next = 0;
        for run in &runs {
            prop_assert_eq!(run.members.start, next);
            prop_assert!(!run.members.is_empty() && run.members.len() <= how.members);
            next = run.members.end;
            prop_assert!(run.offset % how.unit == 0 && run.len % how.unit == 0);
            for piece in &pieces[run.members.clone()] {
                prop_assert!(run.offset <= piece.offset && piece.offset + piece.len <= run.offset + run.len);
            }
            prop_assert!(run.len <= how.most || run.members.len() == 1);
        }
        prop_assert_eq!(next, pieces.len());
        prop_assert!(runs.is_sorted_by_key(|r| r.offset));
    }

    #[test]
    fn what_is_read_is_wanted_or_a_small_gap(mut pieces in wanted(), how in joining()) {
        let runs = merge(&mut pieces, &how);
        for run in &runs {
            // Walk over the run: nowhere is there more between two members than the gap, whole units counted.
            let mut reached = run.offset;
            for piece in &pieces[run.members.clone()] {
                let start = piece.offset / how.unit * how.unit;
                prop_assert!(start <= reached + how.gap, "{start} {reached}");
                reached = reached.max((piece.offset + piece.len).next_multiple_of(how.unit));
            }
            prop_assert_eq!(reached, run.offset + run.len);
        }
    }

    #[test]
    fn duplicates_are_read_once(offset in 0u64..1 << 40, len in 1u64..5000, times in 1u32..40) {
        let mut pieces: Vec<_> = (0..times).map(|tag| Wanted { offset, len, tag }).collect();
        let how = Joining { unit: 512, gap: 0, most: 1 << 20, members: 100 };
        let runs = merge(&mut pieces, &how);
        let start = offset / 512 * 512;
        let end = (offset + len).next_multiple_of(512);
        prop_assert_eq!(runs, vec![Run { offset: start, len: end - start, members: 0..times as usize }]);
    }
}
