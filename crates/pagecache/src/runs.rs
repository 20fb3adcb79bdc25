//! Runs of pages in ascending order, without common pages.

use std::ops::Range;

/// All pages of runs in any order.
pub(crate) fn union(mut runs: Vec<Range<u64>>) -> Vec<Range<u64>> {
    runs.retain(|run| !run.is_empty());
    runs.sort_unstable_by_key(|run| run.start);
    let mut all: Vec<Range<u64>> = Vec::new();
    for run in runs {
        match all.last_mut() {
            Some(last) if run.start <= last.end => last.end = last.end.max(run.end),
            _ => all.push(run),
        }
    }
    all
}

/// The pages that both have.
pub(crate) fn common(a: &[Range<u64>], b: &[Range<u64>]) -> Vec<Range<u64>> {
    let (mut both, mut a, mut b) = (Vec::new(), a.iter().peekable(), b.iter().peekable());
    while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
        let run = x.start.max(y.start)..x.end.min(y.end);
        if x.end < y.end {
            a.next()
        } else {
            b.next()
        };
        if !run.is_empty() {
            both.push(run);
        }
    }
    both
}

/// The pages of the first that the second has not.
pub(crate) fn without(runs: &[Range<u64>], others: &[Range<u64>]) -> Vec<Range<u64>> {
    let (mut left, mut others) = (Vec::new(), others.iter().peekable());
    for run in runs {
        let mut at = run.start;
        while let Some(other) = others.peek().filter(|other| other.start < run.end) {
            if at < other.start {
                left.push(at..other.start);
            }
            at = at.max(other.end);
            if other.end > run.end {
                break;
            }
            others.next();
        }
        if at < run.end {
            left.push(at..run.end);
        }
    }
    left
}

/// How many pages.
pub(crate) fn length(runs: &[Range<u64>]) -> u64 {
    runs.iter().map(|run| run.end - run.start).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_agree_with_sets_of_pages() {
        let runs = |bits: u32| union((0..8).filter(|page| bits >> page & 1 == 1).map(|page| page..page + 1).collect());
        for a in 0..256 {
            assert_eq!(length(&runs(a)), u64::from(a.count_ones()));
            for b in 0..256 {
                assert_eq!(union([runs(a), runs(b)].concat()), runs(a | b), "{a:b} {b:b}");
                assert_eq!(union(common(&runs(a), &runs(b))), runs(a & b), "{a:b} {b:b}");
                assert_eq!(without(&runs(a), &runs(b)), runs(a & !b), "{a:b} {b:b}");
            }
        }
    }
}
