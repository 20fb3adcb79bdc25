//! The bounded set against a list of single pages.

use std::ops::Range;

use proptest::prelude::*;
use spinio_plan::readahead::OwnedPages;

#[derive(Clone, Debug)]
enum Step {
    Add(u8, Range<u64>),
    Remove(u8, Range<u64>),
    RemoveFile(u8),
    PopOverLimit,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let range = (0u64..60, 0u64..20).prop_map(|(at, len)| at..at + len);
    let step = (0u8..10, 0u8..3, range).prop_map(|(what, file, range)| match what {
        0..6 => Step::Add(file, range),
        6 => Step::Remove(file, range),
        7 => Step::RemoveFile(file),
        _ => Step::PopOverLimit,
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
    fn owned_pages_match_page_list(steps in steps(), limit in 0u64..50) {
        let mut set = OwnedPages::new(limit);
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
                Step::RemoveFile(file) => {
                    let taken = pages(set.remove_file(file).into_iter().map(|run| (file, run)));
                    let model_pages: Vec<_> = model.0.iter().filter(|(f, _)| *f == file).copied().collect();
                    prop_assert_eq!(taken, model_pages);
                    model.0.retain(|(f, _)| *f != file);
                }
                Step::PopOverLimit => {
                    let popped = pages(set.pop_over_limit());
                    let over = model.0.len().saturating_sub(limit as usize);
                    let model_pages: Vec<_> = model.0.drain(..over).collect();
                    prop_assert_eq!(popped, model_pages);
                    prop_assert!(set.bytes() <= limit);
                }
            }
            prop_assert_eq!(set.bytes(), model.0.len() as u64);
        }
    }
}

#[test]
fn limit_holds_for_any_ranges() {
    let mut set = OwnedPages::new(2 << 20);
    set.add('a', 0..10 << 20);
    assert_eq!(set.pop_over_limit(), [('a', 0..8 << 20)]);
    // Used again: the other is removed first.
    set.add('b', 0..1 << 20);
    set.add('a', 8 << 20..9 << 20);
    assert_eq!(set.pop_over_limit(), [('a', 9 << 20..10 << 20)]);
    assert_eq!(set.bytes(), 2 << 20);
    set.add('c', 0..0);
    assert_eq!(set.remove_file('a'), vec![8 << 20..9 << 20]);
}
