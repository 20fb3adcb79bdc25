//! A write replica as the home sees it: of each page of its range, which version it has.

use std::ops::Range;

/// Pages of one chunk of the table.
const CHUNK: u64 = 512;

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

/// One write replica: 8 bytes for each page of the chunks that were acquired.
#[derive(Debug)]
pub(crate) struct Owner {
    pages: Range<u64>,
    chunks: Vec<Option<Box<[u64; CHUNK as usize]>>>,
}

impl Owner {
    pub(crate) fn new(pages: Range<u64>) -> Owner {
        Owner { pages, chunks: Vec::new() }
    }

    pub(crate) fn pages(&self) -> Range<u64> {
        self.pages.clone()
    }

    /// What it has of a page, which may lie outside its range.
    pub(crate) fn get(&self, page: u64) -> Replica {
        if !self.pages.contains(&page) {
            return Replica::Absent;
        }
        let at = page - self.pages.start;
        match self.chunks.get((at / CHUNK) as usize) {
            Some(Some(chunk)) => Replica::parse(chunk[(at % CHUNK) as usize]),
            _ => Replica::Absent,
        }
    }

    /// Sets a page of its range.
    pub(crate) fn set(&mut self, page: u64, replica: Replica) {
        debug_assert!(self.pages.contains(&page));
        let at = page - self.pages.start;
        let chunk = (at / CHUNK) as usize;
        if chunk >= self.chunks.len() {
            if replica == Replica::Absent {
                return;
            }
            self.chunks.resize(chunk + 1, None);
        }
        let chunk = self.chunks[chunk].get_or_insert_with(|| Box::new([0; CHUNK as usize]));
        chunk[(at % CHUNK) as usize] = replica.word();
    }

    /// The pages of a range of which it has a copy, or a part of one.
    pub(crate) fn copies(&self, pages: Range<u64>) -> impl Iterator<Item = u64> + '_ {
        let pages = pages.start.max(self.pages.start)..pages.end.min(self.pages.end);
        let first = (pages.start - self.pages.start) / CHUNK;
        let chunks = self.chunks.iter().enumerate().skip(first as usize).filter(|(_, chunk)| chunk.is_some());
        let begins = chunks.map(|(chunk, _)| self.pages.start + chunk as u64 * CHUNK);
        begins
            .take_while({
                let end = pages.end;
                move |begin| *begin < end
            })
            .flat_map(move |begin| begin.max(pages.start)..(begin + CHUNK).min(pages.end))
            .filter(|page| self.get(*page) != Replica::Absent)
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
        owner.set(10, Replica::Valid(1));
        owner.set(2999, Replica::Open(1));
        owner.set(11, Replica::Absent);
        assert_eq!(owner.get(5), Replica::Absent);
        assert_eq!(owner.copies(0..u64::MAX).collect::<Vec<_>>(), [10, 2999]);
        assert_eq!(owner.copies(11..2999).count(), 0);
        assert_eq!(owner.copies(0..5).count() + owner.copies(4000..5000).count(), 0);
    }
}
