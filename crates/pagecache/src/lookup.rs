//! Look-ups of pages that ascend: of pages side by side only the first one takes a search.
//!
//! A release has hundreds of thousands of pages, and a search of the table for each of its steps took most of its time.

use std::collections::{BTreeMap, btree_map};

use std::ops::Range;

use crate::owner::{Owner, Replica};
use crate::page_set::PageSet;

/// In a table.
pub(crate) struct Lookup<'a, T> {
    table: &'a BTreeMap<u64, T>,
    rest: btree_map::Range<'a, u64, T>,
    /// The first one of `rest`, taken out.
    next: Option<(u64, &'a T)>,
    /// The page after the last one; `next` is it, or one after it.
    expected: Option<u64>,
}

impl<'a, T> Lookup<'a, T> {
    pub(crate) fn new(table: &'a BTreeMap<u64, T>) -> Lookup<'a, T> {
        Lookup { table, rest: table.range(0..0), next: None, expected: None }
    }

    pub(crate) fn get(&mut self, page: u64) -> Option<&'a T> {
        if self.expected != Some(page) {
            self.rest = self.table.range(page..);
            self.advance();
        }
        self.expected = page.checked_add(1);
        let (_, found) = self.next.filter(|(at, _)| *at == page)?;
        self.advance();
        Some(found)
    }

    fn advance(&mut self) {
        self.next = self.rest.next().map(|(at, value)| (*at, value));
    }
}

/// In a set.
pub(crate) struct Members<'a> {
    set: &'a PageSet,
    /// A word of the set, and its number.
    word: Option<(u64, u64)>,
}

impl<'a> Members<'a> {
    pub(crate) fn new(set: &'a PageSet) -> Members<'a> {
        Members { set, word: None }
    }

    pub(crate) fn contains(&mut self, page: u64) -> bool {
        let number = page / 64;
        let word = match self.word {
            Some((known, word)) if known == number => word,
            _ => {
                let word = self.set.word(number);
                self.word = Some((number, word));
                word
            }
        };
        word >> (page % 64) & 1 == 1
    }
}

/// Of what an owner has.
pub(crate) struct Replicas<'a> {
    owner: Option<&'a Owner>,
    /// Pages that are known to have one replica.
    run: Range<u64>,
    replica: Replica,
}

impl<'a> Replicas<'a> {
    /// Pages that are looked at in one go.
    const SPAN: u64 = 4096;

    pub(crate) fn new(owner: Option<&'a Owner>) -> Replicas<'a> {
        Replicas { owner, run: 0..0, replica: Replica::Absent }
    }

    pub(crate) fn get(&mut self, page: u64) -> Replica {
        if !self.run.contains(&page) {
            // Of a page outside of the owner's range the first run begins elsewhere, or there is none.
            let found = self.owner.and_then(|owner| owner.runs(page..page.saturating_add(Self::SPAN)).next());
            let Some((run, replica)) = found.filter(|(run, _)| run.start == page) else { return Replica::Absent };
            (self.run, self.replica) = (run, replica);
        }
        self.replica
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_agree_with_the_owner() {
        let mut owner = Owner::new(10..9000);
        owner.set(100..140, Replica::Open(3));
        owner.set(120..121, Replica::Valid(2));
        owner.set(1000..8000, Replica::Open(4));
        let mut replicas = Replicas::new(Some(&owner));
        for page in (0..10_000).chain([8999, 0, 5, 120, u64::MAX, 1000, 9000]) {
            assert_eq!(replicas.get(page), owner.get(page), "{page}");
        }
        assert_eq!(Replicas::new(None).get(3), Replica::Absent);
    }

    #[test]
    fn lookups_in_any_order_agree_with_searches() {
        let table: BTreeMap<u64, u64> = [0, 1, 2, 5, 6, 9, 300, 301, 303, u64::MAX].map(|page| (page, page)).into();
        for start in 0..12 {
            for step in [1, 2, 3, 299] {
                let mut lookup = Lookup::new(&table);
                for page in (start..400).step_by(step).chain([3, 4, 5, 6, 0, 1, 2, 301, u64::MAX, 0]) {
                    assert_eq!(lookup.get(page), table.get(&page), "{page} of {start} by {step}");
                }
            }
        }
    }

    #[test]
    fn members_agree_with_the_set() {
        for from in [0, 5, 63, 64, 700, u64::MAX] {
            let mut set = PageSet::new(from);
            set.insert(100..140);
            set.remove_all(701..702);
            set.insert(1000..1001);
            let mut members = Members::new(&set);
            for page in (0..2000).chain([0, u64::MAX, 701]) {
                assert_eq!(members.contains(page), set.contains(page), "from {from}, page {page}");
            }
        }
    }
}
