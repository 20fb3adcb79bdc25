//! A value for each page of a range, in chunks of 512 pages: a chunk whose pages have one value needs one word.
//!
//! What is done with all pages of a large range costs by chunks, and no more than a word a page at worst. A chunk with
//! several values has one again when one is set for all of it.

use std::ops::Range;

const CHUNK: u64 = 512;

#[derive(Clone, Debug)]
enum Chunk<T> {
    Same(T),
    Each(Box<[T; CHUNK as usize]>),
}

/// The table. Pages that were never set have the value that it was made with.
#[derive(Clone, Debug)]
pub struct PageRuns<T> {
    unset: T,
    chunks: Vec<Chunk<T>>,
}

impl<T: Copy + PartialEq> PageRuns<T> {
    /// Every page has this value.
    pub fn new(unset: T) -> PageRuns<T> {
        PageRuns { unset, chunks: Vec::new() }
    }

    /// The value of a page.
    pub fn get(&self, page: u64) -> T {
        match self.chunks.get((page / CHUNK) as usize) {
            Some(Chunk::Same(value)) => *value,
            Some(Chunk::Each(values)) => values[(page % CHUNK) as usize],
            None => self.unset,
        }
    }

    /// Sets the value of pages.
    pub fn set(&mut self, pages: Range<u64>, value: T) {
        let mut page = pages.start;
        while page < pages.end {
            let (index, first) = ((page / CHUNK) as usize, page / CHUNK * CHUNK);
            if index >= self.chunks.len() {
                if value == self.unset {
                    return;
                }
                self.chunks.resize(index + 1, Chunk::Same(self.unset));
            }
            let end = pages.end.min(first + CHUNK);
            let chunk = &mut self.chunks[index];
            match chunk {
                _ if end - page == CHUNK => *chunk = Chunk::Same(value),
                Chunk::Same(same) if *same == value => {}
                Chunk::Same(same) => {
                    let mut values = Box::new([*same; CHUNK as usize]);
                    values[(page - first) as usize..(end - first) as usize].fill(value);
                    *chunk = Chunk::Each(values);
                }
                Chunk::Each(values) => values[(page - first) as usize..(end - first) as usize].fill(value),
            }
            page = end;
        }
    }

    /// The longest runs of pages with one value, in ascending order: all of these pages.
    pub fn runs(&self, pages: Range<u64>) -> impl Iterator<Item = (Range<u64>, T)> + '_ {
        let mut at = pages.start;
        std::iter::from_fn(move || {
            if at >= pages.end {
                return None;
            }
            let (start, value) = (at, self.get(at));
            while at < pages.end {
                let next = self.end_of_run(at, value).min(pages.end);
                if next == at {
                    break;
                }
                at = next;
            }
            Some((start..at, value))
        })
    }

    /// Where the pages with this value from `page` on end, or their chunk; `page` itself if it has another.
    fn end_of_run(&self, page: u64, value: T) -> u64 {
        let (index, end) = ((page / CHUNK) as usize, (page / CHUNK + 1) * CHUNK);
        match self.chunks.get(index) {
            Some(Chunk::Same(same)) => {
                if *same == value {
                    end
                } else {
                    page
                }
            }
            Some(Chunk::Each(values)) => {
                let rest = &values[(page % CHUNK) as usize..];
                rest.iter().position(|other| *other != value).map_or(end, |len| page + len as u64)
            }
            None => {
                if self.unset == value {
                    u64::MAX
                } else {
                    page
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_agrees_with_a_list() {
        let mut table = PageRuns::new(0);
        let mut list = vec![0u8; 4000];
        let mut state = 1u64;
        let mut next = |most: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % most
        };
        for _ in 0..2000 {
            let first = next(3000);
            let len = if next(2) == 0 { next(4) } else { next(1000) };
            let value = next(3) as u8;
            table.set(first..first + len, value);
            list[first as usize..(first + len) as usize].fill(value);
            let (from, to) = (next(2000), 2000 + next(2000));
            let mut at = from;
            let mut before = None;
            for (run, value) in table.runs(from..to) {
                assert!(run.start == at && run.end > at && before != Some(value));
                run.clone().for_each(|page| assert_eq!((value, table.get(page)), (list[page as usize], value)));
                (at, before) = (run.end, Some(value));
            }
            assert_eq!(at, to);
        }
        assert_eq!(table.get(u64::MAX), 0);
        assert_eq!(table.runs(5000..u64::MAX).collect::<Vec<_>>(), [(5000..u64::MAX, 0)]);
        assert_eq!(table.runs(7..7).count(), 0);
    }

    #[test]
    fn chunk_of_one_value_is_one_word_again() {
        let mut table = PageRuns::new(0);
        table.set(3..4, 1);
        assert!(matches!(table.chunks[0], Chunk::Each(_)));
        table.set(0..512, 1);
        assert!(matches!(table.chunks[0], Chunk::Same(1)));
        table.set(512..100_000, 0);
        assert_eq!(table.chunks.len(), 1);
    }
}
