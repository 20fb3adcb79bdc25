//! A write replica as the home sees it: of each page of its range, which version it has.

use std::ops::Range;

use crate::page_runs::PageRuns;

/// What an owner has of a page. A stamp is the file's version counter when the copy was planned: the copy is the
/// version that was head then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Replica {
    /// Nothing, or bytes that are not a version (merged, clipped, abandoned).
    Absent,
    /// This version, and no stores.
    Valid(u64),
    /// This version and stores that are not released: the base of a merge.
    Open(u64),
    /// Being fetched.
    Filling {
        stamp: u64,
        /// For an epoch that writes: it will be open.
        writing: bool,
        /// The client reads the backing file, so its bytes must not be overwritten meanwhile.
        backing: bool,
    },
}

impl Replica {
    /// The stamp of the version that must be kept for a merge.
    pub(crate) fn base(self) -> Option<u64> {
        match self {
            Replica::Open(stamp) | Replica::Filling { stamp, writing: true, .. } => Some(stamp),
            _ => None,
        }
    }

    fn word(self) -> u64 {
        match self {
            Replica::Absent => 0,
            Replica::Valid(stamp) => stamp << 3 | 1,
            Replica::Open(stamp) => stamp << 3 | 2,
            Replica::Filling { stamp, writing, backing } => {
                stamp << 3 | 4 | u64::from(writing) | u64::from(backing) << 1
            }
        }
    }

    fn parse(word: u64) -> Replica {
        let stamp = word >> 3;
        match word & 7 {
            1 => Replica::Valid(stamp),
            2 => Replica::Open(stamp),
            code if code >= 4 => Replica::Filling { stamp, writing: code & 1 == 1, backing: code & 2 == 2 },
            _ => Replica::Absent,
        }
    }
}

/// One write replica.
#[derive(Debug)]
pub(crate) struct Owner {
    pages: Range<u64>,
    /// [`Replica::word`] of its pages, counted from the first.
    words: PageRuns<u64>,
    /// Times that it lost pages: a page that it has again may then be the same version, and was other bytes meanwhile.
    losses: u64,
    /// Pages that it has got from other owners.
    from_peers: u64,
}

impl Owner {
    pub(crate) fn new(pages: Range<u64>) -> Owner {
        Owner { pages, words: PageRuns::new(Replica::Absent.word()), losses: 0, from_peers: 0 }
    }

    pub(crate) fn pages(&self) -> Range<u64> {
        self.pages.clone()
    }

    /// What it has of a page, which may lie outside its range.
    pub(crate) fn get(&self, page: u64) -> Replica {
        if !self.pages.contains(&page) {
            return Replica::Absent;
        }
        Replica::parse(self.words.get(page - self.pages.start))
    }

    /// Sets pages of its range.
    pub(crate) fn set(&mut self, pages: Range<u64>, replica: Replica) {
        debug_assert!(self.pages.start <= pages.start && pages.end <= self.pages.end);
        let start = self.pages.start;
        self.losses += u64::from(replica == Replica::Absent);
        self.words.set(pages.start - start..pages.end - start, replica.word());
    }

    pub(crate) fn losses(&self) -> u64 {
        self.losses
    }

    pub(crate) fn count_from_peers(&mut self, pages: u64) {
        self.from_peers += pages;
    }

    pub(crate) fn copied_from_peers(&self) -> u64 {
        self.from_peers
    }

    /// What it has of the pages of a range that are its own, as runs.
    pub(crate) fn runs(&self, pages: Range<u64>) -> impl Iterator<Item = (Range<u64>, Replica)> + '_ {
        let start = self.pages.start;
        let begin = pages.start.clamp(start, self.pages.end);
        let end = pages.end.clamp(begin, self.pages.end);
        let runs = self.words.runs(begin - start..end - start);
        runs.map(move |(run, word)| (run.start + start..run.end + start, Replica::parse(word)))
    }

    /// The pages of a range of which it has a copy, or a part of one.
    pub(crate) fn copies(&self, pages: Range<u64>) -> impl Iterator<Item = u64> + '_ {
        self.copied_runs(pages).flatten()
    }

    /// The same as runs.
    pub(crate) fn copied_runs(&self, pages: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        self.runs(pages).filter(|(_, replica)| *replica != Replica::Absent).map(|(run, _)| run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_state_survives_its_word() {
        for stamp in [0, 1, 1 << 60] {
            for replica in [
                Replica::Absent,
                Replica::Valid(stamp),
                Replica::Open(stamp),
                Replica::Filling { stamp, writing: true, backing: false },
                Replica::Filling { stamp, writing: false, backing: true },
            ] {
                assert_eq!(Replica::parse(replica.word()), replica);
            }
        }
    }

    #[test]
    fn owner_lists_pages_it_has() {
        let mut owner = Owner::new(10..3000);
        owner.set(10..11, Replica::Valid(1));
        owner.set(2999..3000, Replica::Open(1));
        owner.set(11..12, Replica::Absent);
        assert_eq!(owner.get(5), Replica::Absent);
        assert_eq!(owner.copies(0..u64::MAX).collect::<Vec<_>>(), [10, 2999]);
        assert_eq!(owner.copies(11..2999).count(), 0);
        assert_eq!(
            owner.runs(2998..9000).collect::<Vec<_>>(),
            [(2998..2999, Replica::Absent), (2999..3000, Replica::Open(1))]
        );
        assert_eq!(owner.copies(0..5).count() + owner.copies(4000..5000).count(), 0);
    }
}
