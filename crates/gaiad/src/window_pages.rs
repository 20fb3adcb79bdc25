//! The pages of a release, read from the client's window a few at a time.

use std::borrow::Borrow;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::rc::Rc;

use rustix::io::Errno;
use spinio_pagecache::{self as pagecache, PageBytes, ZEROS, offset_of};

use crate::file_backing;

/// Pages of one system call.
const BATCH: u64 = 16;

/// Copies of pages of the file, in order; an error ends the release.
pub(crate) struct WindowPages<'a> {
    window: BorrowedFd<'a>,
    /// The map's first page in the file.
    map_first: u64,
    /// Not read yet.
    runs: std::slice::Iter<'a, Range<u64>>,
    run: Range<u64>,
    /// Read, and not given yet.
    read: Range<u64>,
    /// The first page of the batch.
    batch_first: u64,
    batch: Rc<Vec<PageBytes>>,
}

/// A copy of a page.
pub(crate) struct WindowPage {
    batch: Rc<Vec<PageBytes>>,
    at: usize,
}

impl Borrow<PageBytes> for WindowPage {
    fn borrow(&self) -> &PageBytes {
        &self.batch[self.at]
    }
}

impl<'a> WindowPages<'a> {
    /// Pages of these runs, which are within the map.
    pub(crate) fn new(window: BorrowedFd<'a>, map_first: u64, runs: &'a [Range<u64>]) -> WindowPages<'a> {
        let batch = Rc::new(vec![ZEROS; BATCH as usize]);
        WindowPages { window, map_first, runs: runs.iter(), run: 0..0, read: 0..0, batch_first: 0, batch }
    }

    /// Reads the next pages; false: there are none.
    fn fill(&mut self) -> pagecache::Result<bool> {
        while self.run.is_empty() {
            let Some(run) = self.runs.next() else { return Ok(false) };
            self.run = run.clone();
        }
        let end = self.run.end.min(self.run.start + BATCH);
        (self.read, self.batch_first) = (self.run.start..end, self.run.start);
        self.run.start = end;
        let count = (end - self.read.start) as usize;
        if Rc::get_mut(&mut self.batch).is_none() {
            // A page of it is still in use.
            self.batch = Rc::new(vec![ZEROS; BATCH as usize]);
        }
        let Some(batch) = Rc::get_mut(&mut self.batch) else { return Ok(false) };
        let bytes = batch[..count].as_flattened_mut();
        let offset = offset_of(self.read.start - self.map_first);
        let got = file_backing::read(self.window, offset, bytes).map_err(std::io::Error::from)?;
        // The window is as long as the map.
        if got == bytes.len() { Ok(true) } else { Err(std::io::Error::from(Errno::PROTO).into()) }
    }
}

impl Iterator for WindowPages<'_> {
    type Item = pagecache::Result<(u64, WindowPage)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.read.is_empty() {
            match self.fill() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
        let page = self.read.start;
        let at = (page - self.batch_first) as usize;
        self.read.start += 1;
        Some(Ok((page, WindowPage { batch: Rc::clone(&self.batch), at })))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn window(pages: u64) -> std::os::fd::OwnedFd {
        let window = rustix::fs::memfd_create("window", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        for page in 0..pages {
            file_backing::write(window.as_fd(), offset_of(page), &[page as u8 + 1; spinio_pagecache::PAGE]).unwrap();
        }
        window
    }

    #[test]
    fn every_page_of_every_run_is_read_once_and_in_order() {
        let window = window(60);
        let runs = [100..101, 103..119, 120..137, 140..160];
        let pages: Vec<_> = WindowPages::new(window.as_fd(), 100, &runs).map(Result::unwrap).collect();
        assert_eq!(
            pages.iter().map(|(page, _)| *page).collect::<Vec<_>>(),
            runs.into_iter().flatten().collect::<Vec<_>>()
        );
        // All of them at once: a batch that is in use is not read into.
        for (page, bytes) in &pages {
            let bytes: &PageBytes = bytes.borrow();
            assert!(bytes.iter().all(|byte| u64::from(*byte) == page - 100 + 1), "page {page}");
        }
    }

    #[test]
    fn page_past_the_end_of_the_window_is_an_error() {
        let window = window(4);
        let runs = [0..3, 3..5];
        let mut pages = WindowPages::new(window.as_fd(), 0, &runs);
        assert!((0..3).all(|_| pages.next().is_some_and(|page| page.is_ok())));
        assert!(pages.next().is_some_and(|page| page.is_err()));
    }
}
