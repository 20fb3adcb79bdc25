//! A sparse set of pages: which pages the kernel may have.

use std::collections::HashMap;
use std::ops::Range;

const BITS: u64 = 512;
const WORDS: usize = (BITS / 64) as usize;

/// A set of pages in chunks of 512. Of a chunk that is absent, the pages from `from` on are in the set.
#[derive(Debug)]
pub(crate) struct PageSet {
    from: u64,
    chunks: HashMap<u64, [u64; WORDS]>,
}

impl PageSet {
    /// Contains every page from this one on.
    pub(crate) fn new(from: u64) -> PageSet {
        PageSet { from, chunks: HashMap::new() }
    }

    #[cfg(test)]
    pub(crate) fn contains(&self, page: u64) -> bool {
        match self.chunks.get(&(page / BITS)) {
            Some(words) => words[(page % BITS / 64) as usize] >> (page % 64) & 1 == 1,
            None => page >= self.from,
        }
    }

    /// The pages `64 * number` and the 63 after it, one bit each.
    pub(crate) fn word(&self, number: u64) -> u64 {
        let (chunk, word) = (number / WORDS as u64, (number % WORDS as u64) as usize);
        self.chunks.get(&chunk).copied().unwrap_or_else(|| self.absent(chunk))[word]
    }

    /// The pages of a range that are in the set, as runs.
    pub(crate) fn runs(&self, pages: Range<u64>) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        let mut at = pages.start;
        while at < pages.end {
            // From `at` on the word has zeros, or ones, and no bit past its end.
            let word = self.word(at / 64) >> (at % 64);
            let left = 64 - at % 64;
            let zeros = u64::from(word.trailing_zeros()).min(left);
            let ones = u64::from((word >> zeros.min(63)).trailing_ones()).min(left - zeros);
            let start = (at + zeros).min(pages.end);
            let end = start.saturating_add(ones).min(pages.end);
            match runs.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ if start < end => runs.push(start..end),
                _ => {}
            }
            at = at.saturating_add(zeros + ones).max(start);
        }
        runs
    }

    pub(crate) fn insert(&mut self, pages: Range<u64>) {
        self.set(pages, true);
    }

    pub(crate) fn remove_all(&mut self, pages: Range<u64>) {
        self.set(pages, false);
    }

    /// Adds every page from this one on.
    pub(crate) fn insert_from(&mut self, page: u64) {
        let next = (page / BITS + 1).saturating_mul(BITS);
        self.chunks.retain(|chunk, _| *chunk <= page / BITS);
        self.insert(page..next);
        self.from = self.from.min(page);
    }

    /// The words of a chunk that is absent.
    fn absent(&self, chunk: u64) -> [u64; WORDS] {
        let first = self.from.saturating_sub(chunk * BITS).min(BITS);
        std::array::from_fn(|word| {
            let zeros = first.saturating_sub(word as u64 * 64).min(64);
            u64::MAX.checked_shl(zeros as u32).unwrap_or(0)
        })
    }

    fn set(&mut self, pages: Range<u64>, value: bool) {
        let mut page = pages.start;
        while page < pages.end {
            let chunk = page / BITS;
            let end = pages.end.min((chunk + 1).saturating_mul(BITS));
            let absent = self.absent(chunk);
            let words = self.chunks.entry(chunk).or_insert(absent);
            let mut at = page;
            while at < end {
                let (word, bit) = ((at % BITS / 64) as usize, at % 64);
                let len = (64 - bit).min(end - at);
                let mask = u64::MAX >> (64 - len) << bit;
                if value {
                    words[word] |= mask
                } else {
                    words[word] &= !mask
                }
                at += len;
            }
            if *words == absent {
                self.chunks.remove(&chunk);
            }
            page = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_agrees_with_a_list() {
        for from in [0, 700, 1024, u64::MAX] {
            let mut set = PageSet::new(from);
            let mut list: Vec<bool> = (0..2000).map(|page| page >= from).collect();
            for step in 0u64..200 {
                let first = step * 7919 % 1800;
                if step % 3 == 0 {
                    set.remove_all(first..first + 1);
                    list[first as usize] = false;
                } else {
                    let pages = first..first + step;
                    set.insert(pages.clone());
                    pages.for_each(|page| list[page as usize] = true);
                }
                if step == 150 {
                    set.insert_from(1300);
                    list[1300..].fill(true);
                }
            }
            (0..2000).for_each(|page| assert_eq!(set.contains(page), list[page as usize], "from {from}, page {page}"));
            assert!(set.contains(u64::MAX));
        }
    }

    #[test]
    fn chunk_like_an_absent_one_is_not_stored() {
        let mut set = PageSet::new(3);
        set.remove_all(5..6);
        assert!(!set.contains(2) && !set.contains(5) && set.contains(6));
        set.insert(5..6);
        assert!(set.contains(5) && set.chunks.is_empty());
    }
}
