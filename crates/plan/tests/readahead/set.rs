//! The bounded set against a list of single pages.

use std::ops::Range;

use proptest::prelude::*;
use spinio_plan::readahead::Brought;

#[derive(Clone, Debug)]
enum Step {
    Add(u8, Range<u64>),
    Remove(u8, Range<u64>),
    Take(u8),
    Trim,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let range = (0u64..60, 0u64..20).prop_map(|(at, len)| at..at + len);
    let step = (0u8..10, 0u8..3, range).prop_map(|(what, file, range)| match what {
        0..6 => Step::Add(file, range),
        6 => Step::Remove(file, range),
        7 => Step::Take(file),
        _ => Step::Trim,
    });
    proptest::collection::vec(step, 0..60)
}

/// Pages, oldest first.
#[derive(Default)]
struct Model(Vec<(u8, u64)>);

impl Model {
    fn remove(&mut self, file: u8, range: &Range<u64>) {
        self.0.retain(|(f, page)| *f != file || !range.contains(page));
    }
}

fn pages(runs: impl IntoIterator<Item = (u8, Range<u64>)>) -> Vec<(u8, u64)> {
    runs.into_iter().flat_map(|(file, run)| run.map(move |page| (file, page))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn it_does_what_a_list_of_pages_does(steps in steps(), limit in 0u64..50) {
        let mut set = Brought::new(limit);
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Add(file, range) => {
                    set.add(file, range.clone());
                    model.remove(file, &range);
                    model.0.extend(range.map(|page| (file, page)));
                }
                Step::Remove(file, range) => {
                    set.remove(file, &range);
                    model.remove(file, &range);
                }
                Step::Take(file) => {
                    let taken = pages(set.take(file).into_iter().map(|run| (file, run)));
                    let theirs: Vec<_> = model.0.iter().filter(|(f, _)| *f == file).copied().collect();
                    prop_assert_eq!(taken, theirs);
                    model.0.retain(|(f, _)| *f != file);
                }
                Step::Trim => {
                    let gone = pages(set.take_over_limit());
                    let over = model.0.len().saturating_sub(limit as usize);
                    let theirs: Vec<_> = model.0.drain(..over).collect();
                    prop_assert_eq!(gone, theirs);
                    prop_assert!(set.bytes() <= limit);
                }
            }
            prop_assert_eq!(set.bytes(), model.0.len() as u64);
        }
    }
}

#[test]
fn the_limit_holds_whatever_the_ranges() {
    let mut set = Brought::new(2 << 20);
    set.add('a', 0..10 << 20);
    assert_eq!(set.take_over_limit(), [('a', 0..8 << 20)]);
    // Used again: the other goes first.
    set.add('b', 0..1 << 20);
    set.add('a', 8 << 20..9 << 20);
    assert_eq!(set.take_over_limit(), [('a', 9 << 20..10 << 20)]);
    assert_eq!(set.bytes(), 2 << 20);
    set.add('c', 0..0);
    assert_eq!(set.take('a'), vec![8 << 20..9 << 20]);
}
