//! What the client knows of each page of a map.

use std::ops::Range;

use spinio_device::Fingerprint;
use spinio_pagecache::messages::Run;
use spinio_pagecache::page_runs::PageRuns;

/// Pages whose fingerprints are compared in one go.
const BLOCK: usize = 256;

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

/// The pages. What concerns all pages of a map costs by runs of pages, but for the comparison of fingerprints.
#[derive(Debug)]
pub(crate) struct PageStates {
    pages: usize,
    epochs: PageRuns<Epoch>,
    /// The fingerprint of head when the replica was last brought up to date, where it is known. Empty until one is: 4 MiB for each GiB,
    /// whose pages took longer to fill (2 ms) than the driver takes to map as much device memory.
    fingerprints: Vec<Fingerprint>,
    known: PageRuns<bool>,
    /// Pages of an epoch that were not fetched: changed, whatever their bytes are.
    kept: PageRuns<bool>,
    /// Pages that were acquired for reading, and not given up.
    reading: PageRuns<bool>,
    /// Blocks of the program that read them: as long as there is one, no call ends their reading.
    blocks: PageRuns<u32>,
    /// The last ones, for acquires again and again.
    last_read: Range<usize>,
    /// Pages whose memory was evicted, which the server was not told.
    evicted: PageRuns<bool>,
}

impl PageStates {
    pub(crate) fn new(pages: usize) -> PageStates {
        PageStates {
            pages,
            epochs: PageRuns::new(Epoch::Closed),
            fingerprints: Vec::new(),
            known: PageRuns::new(false),
            kept: PageRuns::new(false),
            reading: PageRuns::new(false),
            blocks: PageRuns::new(0),
            last_read: 0..0,
            evicted: PageRuns::new(false),
        }
    }

    fn epochs(&self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, Epoch)> + '_ {
        self.epochs.runs(wide(range)).map(|(run, epoch)| (narrow(run), epoch))
    }

    fn known(&self, range: Range<usize>) -> impl Iterator<Item = (Range<usize>, bool)> + '_ {
        self.known.runs(wide(range)).map(|(run, known)| (narrow(run), known))
    }

    /// The least favourable state of a range: lost, then closed, then open.
    pub(crate) fn epoch_of(&self, range: Range<usize>) -> Epoch {
        let worse = |a: Epoch, b: Epoch| match (a, b) {
            (Epoch::Lost, _) | (_, Epoch::Lost) => Epoch::Lost,
            (Epoch::Closed, _) | (_, Epoch::Closed) => Epoch::Closed,
            (Epoch::Open, Epoch::Open) => Epoch::Open,
        };
        self.epochs(range).fold(Epoch::Open, |worst, (_, epoch)| worse(worst, epoch))
    }

    pub(crate) fn set_epoch(&mut self, range: Range<usize>, epoch: Epoch) {
        if epoch != Epoch::Open {
            self.kept.set(wide(range.clone()), false);
        }
        self.epochs.set(wide(range), epoch);
    }

    /// The runs of a range that are in epochs for writing; `None` if a page is in no epoch.
    pub(crate) fn open_runs(&self, range: Range<usize>) -> Option<Vec<Range<usize>>> {
        let mut open = Vec::new();
        for (run, epoch) in self.epochs(range) {
            if epoch == Epoch::Open {
                open.push(run);
            } else if self.reading.runs(wide(run)).any(|(_, reading)| !reading) {
                return None;
            }
        }
        Some(open)
    }

    /// Kernels may load them from now on.
    pub(crate) fn begin_reading(&mut self, range: Range<usize>) {
        if range.start < self.last_read.start || range.end > self.last_read.end {
            self.reading.set(wide(range.clone()), true);
            self.last_read = range;
        }
    }

    /// Kernels no longer use them, unless they are in an epoch for writing, or a block reads them.
    pub(crate) fn end_reading(&mut self, range: Range<usize>) {
        end_reading_without_block(&mut self.reading, &self.blocks, wide(range));
        self.last_read = 0..0;
    }

    /// Their memory is given back, whatever reads them.
    pub(crate) fn stop_reading(&mut self, range: Range<usize>) {
        self.reading.set(wide(range), false);
        self.last_read = 0..0;
    }

    /// A block begins, which will acquire them for reading.
    pub(crate) fn begin_block(&mut self, range: Range<usize>) {
        count_blocks(&mut self.blocks, wide(range), |blocks| blocks.saturating_add(1));
    }

    /// A block has ended; with the last one the reading.
    pub(crate) fn end_block(&mut self, range: Range<usize>) {
        count_blocks(&mut self.blocks, wide(range.clone()), |blocks| blocks.saturating_sub(1));
        self.end_reading(range);
    }

    /// Whether a block reads some of them.
    pub(crate) fn has_block(&self, range: Range<usize>) -> bool {
        self.blocks.runs(wide(range)).any(|(_, blocks)| blocks > 0)
    }

    /// Whether kernels may use a page of the range.
    pub(crate) fn is_in_use(&self, range: Range<usize>) -> bool {
        self.epochs(range.clone()).any(|(_, epoch)| epoch != Epoch::Closed)
            || self.reading.runs(wide(range)).any(|(_, reading)| reading)
    }

    /// Whether no page of the range is in an epoch for writing, also one that was lost, and none has lost its memory.
    pub(crate) fn are_settled(&self, range: Range<usize>) -> bool {
        self.epochs(range.clone()).all(|(_, epoch)| epoch == Epoch::Closed) && self.evicted(range).is_empty()
    }

    /// The memory of these pages is taken away.
    pub(crate) fn lose_memory(&mut self, range: Range<usize>) {
        self.forget(range.clone());
        self.evicted.set(wide(range), true);
    }

    /// The runs of a range whose memory was taken away since the server was told last.
    pub(crate) fn evicted(&self, range: Range<usize>) -> Vec<Run> {
        let runs = self.evicted.runs(wide(range)).filter(|(_, evicted)| *evicted);
        runs.map(|(run, _)| Run { first: run.start, count: (run.end - run.start) as u32 }).collect()
    }

    /// The server was told.
    pub(crate) fn told(&mut self, range: Range<usize>) {
        self.evicted.set(wide(range), false);
    }

    /// Whether a page of the range is in an epoch.
    pub(crate) fn has_open(&self, range: Range<usize>) -> bool {
        self.epochs(range).any(|(_, epoch)| epoch == Epoch::Open)
    }

    /// The stores of open pages were dropped, as those of lost ones are.
    pub(crate) fn discard(&mut self, range: Range<usize>) {
        let runs: Vec<_> = self.epochs(range).filter(|(_, epoch)| *epoch != Epoch::Closed).collect();
        for (run, _) in runs {
            self.forget(run.clone());
            self.set_epoch(run, Epoch::Closed);
        }
    }

    /// Forgets that epochs were lost.
    pub(crate) fn settle(&mut self, range: Range<usize>) {
        let lost: Vec<_> = self.epochs(range).filter(|(_, epoch)| *epoch == Epoch::Lost).collect();
        lost.into_iter().for_each(|(run, _)| self.set_epoch(run, Epoch::Closed));
    }

    /// Ends all epochs without a release: no base is known any more. Returns whether there was one.
    pub(crate) fn lose_all(&mut self) -> bool {
        self.forget(0..self.pages);
        let open: Vec<_> = self.epochs(0..self.pages).filter(|(_, epoch)| *epoch == Epoch::Open).collect();
        let any = !open.is_empty();
        open.into_iter().for_each(|(run, _)| self.set_epoch(run, Epoch::Lost));
        any
    }

    pub(crate) fn forget(&mut self, range: Range<usize>) {
        self.known.set(wide(range), false);
    }

    /// The epoch begins with whatever bytes these pages have.
    pub(crate) fn keep(&mut self, range: Range<usize>) {
        self.forget(range.clone());
        self.kept.set(wide(range), true);
    }

    /// Whether all of these pages began their epoch with whatever bytes they had.
    pub(crate) fn are_kept(&self, range: Range<usize>) -> bool {
        self.kept.runs(wide(range)).all(|(_, kept)| kept)
    }

    /// Those of all pages, to be set.
    fn all_fingerprints(&mut self) -> &mut [Fingerprint] {
        if self.fingerprints.is_empty() {
            self.fingerprints.resize(self.pages, Fingerprint::default());
        }
        &mut self.fingerprints
    }

    pub(crate) fn set_fingerprint(&mut self, page: usize, fingerprint: Fingerprint) {
        self.all_fingerprints()[page] = fingerprint;
        self.known.set(wide(page..page + 1), true);
    }

    /// [`PageStates::set_fingerprint`] of all pages of a run.
    pub(crate) fn set_fingerprints(&mut self, run: Range<usize>, now: &[Fingerprint]) {
        self.all_fingerprints()[run.clone()].copy_from_slice(now);
        self.known.set(wide(run), true);
    }

    /// Sets the fingerprints of the pages of a run that are not known.
    pub(crate) fn complete_fingerprints(&mut self, first: usize, now: &[Fingerprint]) {
        let range = first..first + now.len();
        let unknown: Vec<_> = self.known(range.clone()).filter(|(_, known)| !known).collect();
        for (run, _) in unknown {
            self.all_fingerprints()[run.clone()].copy_from_slice(&now[run.start - first..run.end - first]);
        }
        self.known.set(wide(range), true);
    }

    /// Runs that contain the pages of the range whose fingerprint is not known, and gaps of at most `gap` pages between
    /// them.
    pub(crate) fn without_fingerprint(&self, range: Range<usize>, gap: u64) -> Vec<Run> {
        let mut joined: Vec<Run> = Vec::new();
        for (run, _) in self.known(range).filter(|(_, known)| !known) {
            let run = Run { first: run.start as u64, count: run.len() as u32 };
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
        let mut changed = Vec::new();
        for (run, known) in self.known(first..first + now.len()) {
            for (run, kept) in self.kept.runs(wide(run)).map(|(run, kept)| (narrow(run), kept)) {
                if kept || !known {
                    add_run(&mut changed, run);
                    continue;
                }
                // Most pages have not changed: many are compared at once.
                let (before, now) = (&self.fingerprints[run.clone()], &now[run.start - first..run.end - first]);
                for (at, (before, now)) in (0..).zip(before.chunks(BLOCK).zip(now.chunks(BLOCK))) {
                    if before != now {
                        let pages = (run.start + at * BLOCK..).zip(before.iter().zip(now));
                        let differ = pages.filter(|(_, (before, now))| before != now);
                        differ.for_each(|(page, _)| add_run(&mut changed, page..page + 1));
                    }
                }
            }
        }
        changed
    }
}

/// Counts blocks that read pages.
pub(crate) fn count_blocks(blocks: &mut PageRuns<u32>, pages: Range<u64>, count: impl Fn(u32) -> u32) {
    let runs: Vec<_> = blocks.runs(pages).collect();
    runs.into_iter().for_each(|(run, of_run)| blocks.set(run, count(of_run)));
}

/// Of the pages that no block reads.
pub(crate) fn end_reading_without_block(reading: &mut PageRuns<bool>, blocks: &PageRuns<u32>, pages: Range<u64>) {
    blocks.runs(pages).filter(|(_, blocks)| *blocks == 0).for_each(|(run, _)| reading.set(run, false));
}

fn wide(range: Range<usize>) -> Range<u64> {
    range.start as u64..range.end as u64
}

fn narrow(range: Range<u64>) -> Range<usize> {
    range.start as usize..range.end as usize
}

/// Adds pages to runs that ascend.
fn add_run(runs: &mut Vec<Run>, pages: Range<usize>) {
    let (first, count) = (pages.start as u64, pages.len() as u32);
    match runs.last_mut() {
        Some(run) if run.first + u64::from(run.count) == first && run.count.checked_add(count).is_some() => {
            run.count += count;
        }
        _ => runs.push(Run { first, count }),
    }
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
        pages.complete_fingerprints(0, &[Fingerprint { low: 100, high: 0 }; 10]);
        assert_eq!(pages.changed(0, &[Fingerprint { low: 100, high: 0 }; 10]), [run(1, 2), run(5, 4)]);
    }

    #[test]
    fn pages_become_runs() {
        let run = |first, count| Run { first, count };
        let mut runs = Vec::new();
        for pages in [0..1, 1..3, 5..6, 7..9] {
            add_run(&mut runs, pages);
        }
        assert_eq!(runs, [run(0, 3), run(5, 1), run(7, 2)]);
    }

    #[test]
    fn changed_pages_agree_with_a_comparison_of_each() {
        const PAGES: usize = 3 * BLOCK + 17;
        let mut pages = PageStates::new(PAGES + 5);
        let print = |n: usize| Fingerprint { low: n as u64, high: 0 };
        (0..PAGES + 5).for_each(|page| pages.set_fingerprint(page, print(page)));
        pages.forget(40..43);
        pages.keep(BLOCK - 1..BLOCK + 2);
        let differs = |page: usize| page % 97 == 3 || (2 * BLOCK..2 * BLOCK + 9).contains(&page) || page == PAGES + 4;
        let now: Vec<_> = (5..PAGES + 5).map(|page| if differs(page) { print(0) } else { print(page) }).collect();
        let is_changed = |page| differs(page) || (40..43).contains(&page) || (BLOCK - 1..BLOCK + 2).contains(&page);
        let listed = pages.changed(5, &now).into_iter().flat_map(|run| run.first..run.first + u64::from(run.count));
        let expected = (5..PAGES + 5).filter(|page| is_changed(*page)).map(|page| page as u64);
        assert!(listed.eq(expected));
        pages.set_fingerprints(5..PAGES + 5, &now);
        pages.set_epoch(0..PAGES, Epoch::Closed);
        assert_eq!(pages.changed(5, &now), []);
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
    fn kept_page_is_changed_until_its_epoch_ends() {
        let mut pages = PageStates::new(4);
        let prints = [Fingerprint { low: 5, high: 0 }; 4];
        pages.complete_fingerprints(0, &prints);
        pages.set_epoch(0..4, Epoch::Open);
        pages.keep(1..3);
        // An acquire inside the epoch.
        pages.complete_fingerprints(0, &prints);
        assert_eq!(pages.changed(0, &prints), [Run { first: 1, count: 2 }]);
        assert_eq!(pages.changed(2, &prints[2..]), [Run { first: 2, count: 1 }]);
        pages.set_epoch(1..2, Epoch::Closed);
        assert_eq!(pages.changed(0, &prints), [Run { first: 2, count: 1 }]);
        pages.discard(2..3);
        pages.complete_fingerprints(0, &prints);
        assert_eq!(pages.changed(0, &prints), []);
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
    fn pages_are_in_use_until_they_are_given_up() {
        let mut pages = PageStates::new(8);
        assert_eq!(pages.open_runs(0..1), None);
        pages.begin_reading(0..4);
        pages.begin_reading(1..2);
        pages.set_epoch(2..6, Epoch::Open);
        assert_eq!(pages.open_runs(0..6), Some(std::iter::once(2..6).collect()));
        assert_eq!((pages.open_runs(0..2), pages.open_runs(5..7)), (Some(vec![]), None));
        pages.end_reading(1..4);
        assert!(!pages.is_in_use(1..2) && pages.is_in_use(0..2) && pages.is_in_use(2..3) && !pages.is_in_use(6..8));
        pages.begin_reading(1..2);
        assert!(pages.is_in_use(1..2), "also after the same was read before");
        pages.set_epoch(2..6, Epoch::Lost);
        assert!(pages.is_in_use(5..8), "kernels of a lost epoch may still run");
    }

    #[test]
    fn pages_of_a_block_stay_in_use_whatever_ends_their_reading() {
        let mut pages = PageStates::new(8);
        let in_use = |pages: &PageStates| (0..8).filter(|page| pages.is_in_use(*page..page + 1)).collect::<Vec<_>>();
        pages.begin_block(0..4);
        assert_eq!(in_use(&pages), [0; 0], "not before it has acquired them");
        pages.begin_reading(0..4);
        pages.begin_block(2..6);
        pages.begin_reading(2..6);
        pages.end_reading(0..8);
        assert_eq!(in_use(&pages), [0, 1, 2, 3, 4, 5]);
        assert!(pages.has_block(5..8) && !pages.has_block(6..8));
        pages.end_block(0..4);
        assert_eq!(in_use(&pages), [2, 3, 4, 5]);
        pages.stop_reading(2..3);
        assert_eq!(in_use(&pages), [3, 4, 5]);
        pages.end_block(2..6);
        assert_eq!(in_use(&pages), [0; 0]);
        pages.begin_reading(3..4);
        pages.end_reading(3..4);
        assert!(!pages.is_in_use(0..8) && !pages.has_block(0..8));
    }

    #[test]
    fn evicted_pages_are_forgotten_until_the_server_is_told() {
        let run = |first, count| Run { first, count };
        let mut pages = PageStates::new(8);
        pages.complete_fingerprints(0, &[Fingerprint::default(); 8]);
        pages.lose_memory(2..6);
        assert_eq!(pages.without_fingerprint(0..8, 0), [run(2, 4)]);
        assert_eq!((pages.evicted(0..4), pages.evicted(6..8)), (vec![run(2, 2)], vec![]));
        pages.told(0..4);
        assert_eq!(pages.evicted(0..8), [run(4, 2)]);
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
