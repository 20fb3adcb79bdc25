//! What the client knows of each page of a map.

use std::ops::Range;

use spinio_device::Fingerprint;
use spinio_pagecache::messages::Run;

/// Whether a page is in an epoch for writing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Epoch {
    /// It is not.
    #[default]
    Closed,
    /// It is.
    Open,
    /// It was when the server ended.
    Lost,
}

/// The pages.
#[derive(Debug)]
pub(crate) struct PageStates {
    epochs: Vec<Epoch>,
    /// The fingerprint of head when the replica was last brought up to date.
    fingerprints: Vec<Option<Fingerprint>>,
    open: usize,
}

impl PageStates {
    pub(crate) fn new(pages: usize) -> PageStates {
        PageStates { epochs: vec![Epoch::Closed; pages], fingerprints: vec![None; pages], open: 0 }
    }

    /// The least favourable state of a range: lost, then closed, then open.
    pub(crate) fn epoch_of(&self, range: Range<usize>) -> Epoch {
        let epochs = &self.epochs[range];
        let any = |wanted| epochs.contains(&wanted);
        if any(Epoch::Lost) {
            Epoch::Lost
        } else if any(Epoch::Closed) {
            Epoch::Closed
        } else {
            Epoch::Open
        }
    }

    pub(crate) fn set_epoch(&mut self, range: Range<usize>, epoch: Epoch) {
        for page in &mut self.epochs[range] {
            self.open -= usize::from(*page == Epoch::Open);
            self.open += usize::from(epoch == Epoch::Open);
            *page = epoch;
        }
    }

    /// Whether a page of the range is in an epoch.
    pub(crate) fn has_open(&self, range: Range<usize>) -> bool {
        self.epochs[range].contains(&Epoch::Open)
    }

    /// The stores of open pages were dropped, as those of lost ones are.
    pub(crate) fn discard(&mut self, range: Range<usize>) {
        for page in range {
            if self.epochs[page] != Epoch::Closed {
                self.fingerprints[page] = None;
                self.set_epoch(page..page + 1, Epoch::Closed);
            }
        }
    }

    /// Forgets that an epoch was lost.
    pub(crate) fn settle(&mut self, page: usize) {
        if self.epochs[page] == Epoch::Lost {
            self.epochs[page] = Epoch::Closed;
        }
    }

    /// Ends all epochs without a release: no base is known any more. Returns whether there was one.
    pub(crate) fn lose_all(&mut self) -> bool {
        self.fingerprints.fill(None);
        let any = self.open > 0;
        self.open = 0;
        self.epochs.iter_mut().filter(|e| **e == Epoch::Open).for_each(|e| *e = Epoch::Lost);
        any
    }

    pub(crate) fn forget(&mut self, range: Range<usize>) {
        self.fingerprints[range].fill(None);
    }

    pub(crate) fn set_fingerprint(&mut self, page: usize, fingerprint: Fingerprint) {
        self.fingerprints[page] = Some(fingerprint);
    }

    /// Sets the fingerprint of a page whose fingerprint is not known.
    pub(crate) fn complete_fingerprint(&mut self, page: usize, fingerprint: Fingerprint) {
        self.fingerprints[page].get_or_insert(fingerprint);
    }

    /// Runs that contain the pages of the range whose fingerprint is not known, and gaps of at most `gap` pages between
    /// them.
    pub(crate) fn without_fingerprint(&self, range: Range<usize>, gap: u64) -> Vec<Run> {
        let mut joined: Vec<Run> = Vec::new();
        for run in runs(range.filter(|&page| self.fingerprints[page].is_none())) {
            match joined.last_mut() {
                Some(last) if run.first - (last.first + u64::from(last.count)) <= gap => {
                    last.count = (run.first + u64::from(run.count) - last.first) as u32;
                }
                _ => joined.push(run),
            }
        }
        joined
    }

    /// Runs of pages whose fingerprints differ from `now`, which begins at page `first`.
    pub(crate) fn changed(&self, first: usize, now: &[Fingerprint]) -> Vec<Run> {
        let changed = |&page: &usize| self.fingerprints[page] != Some(now[page - first]);
        runs((first..first + now.len()).filter(changed))
    }
}

/// Ascending pages as runs.
fn runs(pages: impl Iterator<Item = usize>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for page in pages {
        match runs.last_mut() {
            Some(run) if run.first + u64::from(run.count) == page as u64 && run.count < u32::MAX => run.count += 1,
            _ => runs.push(Run { first: page as u64, count: 1 }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_gaps_are_scanned_too_and_keep_their_fingerprints() {
        let mut pages = PageStates::new(20);
        for known in [1, 2, 5, 6, 7, 8] {
            pages.set_fingerprint(known, Fingerprint { low: known as u64, high: 0 });
        }
        let run = |first, count| Run { first, count };
        assert_eq!(pages.without_fingerprint(0..10, 0), [run(0, 1), run(3, 2), run(9, 1)]);
        assert_eq!(pages.without_fingerprint(0..10, 2), [run(0, 5), run(9, 1)]);
        assert_eq!(pages.without_fingerprint(0..10, 4), [run(0, 10)]);
        (0..10).for_each(|page| pages.complete_fingerprint(page, Fingerprint { low: 100, high: 0 }));
        assert_eq!(pages.changed(0, &[Fingerprint { low: 100, high: 0 }; 10]), [run(1, 2), run(5, 4)]);
    }

    #[test]
    fn pages_become_runs() {
        let run = |first, count| Run { first, count };
        assert_eq!(runs([0, 1, 2, 5, 7, 8].into_iter()), [run(0, 3), run(5, 1), run(7, 2)]);
        assert_eq!(runs([].into_iter()), []);
    }

    #[test]
    fn changed_pages_are_those_with_another_fingerprint() {
        let print = |n| Fingerprint { low: n, high: 0 };
        let mut pages = PageStates::new(4);
        assert_eq!(pages.without_fingerprint(0..4, 0), [Run { first: 0, count: 4 }]);
        (0..4).for_each(|n| pages.set_fingerprint(n, print(n as u64)));
        assert_eq!(pages.changed(1, &[print(1), print(9), print(3)]), [Run { first: 2, count: 1 }]);
        pages.forget(3..4);
        assert_eq!(pages.changed(2, &[print(2), print(3)]), [Run { first: 3, count: 1 }]);
    }

    #[test]
    fn discard_ends_open_and_lost_epochs_only() {
        let mut pages = PageStates::new(4);
        (0..4).for_each(|n| pages.set_fingerprint(n, Fingerprint::default()));
        pages.set_epoch(0..1, Epoch::Lost);
        pages.set_epoch(1..2, Epoch::Open);
        pages.set_epoch(3..4, Epoch::Open);
        pages.discard(0..3);
        assert_eq!((pages.epoch_of(0..3), pages.epoch_of(3..4)), (Epoch::Closed, Epoch::Open));
        assert_eq!((pages.has_open(0..3), pages.has_open(2..4)), (false, true));
        assert_eq!(pages.without_fingerprint(0..4, 0), [Run { first: 0, count: 2 }]);
        assert!(pages.lose_all());
    }

    #[test]
    fn lost_epoch_outweighs_closed_and_open() {
        let mut pages = PageStates::new(4);
        pages.set_epoch(0..2, Epoch::Open);
        assert_eq!((pages.epoch_of(0..2), pages.epoch_of(1..3)), (Epoch::Open, Epoch::Closed));
        assert!(pages.lose_all());
        assert!(!pages.lose_all());
        assert_eq!((pages.epoch_of(1..3), pages.epoch_of(2..4)), (Epoch::Lost, Epoch::Closed));
    }
}
