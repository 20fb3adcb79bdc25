//! A release while its messages arrive.

use std::ops::Range;
use std::time::{Duration, Instant};

use spinio_pagecache::messages::{self, ReleaseId};
use spinio_pagecache::{StagedPages, StagedRun};

use crate::release_memory::Reserved;

/// A release that a client does not continue for so long is forgotten: its pages occupy memory.
pub(crate) const CONTINUE_WITHIN: Duration = Duration::from_secs(10);
/// What a page may take besides: 40 MB/s.
const EACH_PAGE: Duration = Duration::from_micros(100);

/// A message of a release.
pub(crate) struct Part<'a> {
    pub(crate) id: ReleaseId,
    /// Pages of the file.
    pub(crate) range: Range<u64>,
    /// No more follow.
    pub(crate) last: bool,
    /// Where its first page is in the stage.
    pub(crate) at: u32,
    /// Pages of the whole release.
    pub(crate) total: u32,
    pub(crate) runs: messages::Runs<'a>,
}

/// A release of which not all messages have come.
pub(crate) struct Draft<'a> {
    pub(crate) id: ReleaseId,
    pub(crate) range: Range<u64>,
    /// Pages of the file that the client has changed, in ascending order, with copies of their bytes.
    pub(crate) pages: StagedPages,
    /// How long the client has let the server wait, and since when it does now.
    waited: Duration,
    answered: Instant,
    /// How many there may be.
    pub(crate) total: u64,
    /// For those that are still to come.
    pub(crate) reserved: Option<Reserved<'a>>,
    /// Where the next run may begin.
    next: u64,
    /// The first page past the end of the file, if some are.
    pub(crate) past: Option<u64>,
}

impl<'a> Draft<'a> {
    pub(crate) fn new(id: ReleaseId, range: Range<u64>) -> Draft<'a> {
        Draft {
            id,
            next: range.start,
            range,
            pages: StagedPages::default(),
            waited: Duration::ZERO,
            answered: Instant::now(),
            total: u64::MAX,
            reserved: None,
            past: None,
        }
    }

    /// The next message is here; false if they come so slowly that this may be meant to keep memory from others.
    pub(crate) fn goes_on(&mut self) -> bool {
        self.waited += self.answered.elapsed();
        self.waited <= CONTINUE_WITHIN + EACH_PAGE * self.pages.count() as u32
    }

    /// The client is told that it may send the next message.
    pub(crate) fn answered(&mut self) {
        self.answered = Instant::now();
    }

    /// Adds the pages of the next run that are inside the file to runs; `None`: it is out of order or outside the release.
    /// `size`: that of the file, in pages.
    pub(crate) fn next_run(&mut self, pages: Range<u64>, size: u64, runs: &mut Vec<Range<u64>>) -> Option<()> {
        if pages.start < self.next || pages.end > self.range.end {
            return None;
        }
        self.next = pages.end;
        let inside = pages.start..pages.end.min(size);
        if inside.end < pages.end {
            self.past = Some(self.past.map_or(size, |past| past.min(size)));
        }
        match runs.last_mut() {
            _ if inside.is_empty() => {}
            Some(last) if last.end == inside.start => last.end = inside.end,
            _ => runs.push(inside),
        }
        Some(())
    }
}

/// Pages of runs.
pub(crate) fn count(runs: &[Range<u64>]) -> u64 {
    runs.iter().map(|run| run.end - run.start).sum()
}

/// Runs of slots for runs of as many pages: each with its first page.
pub(crate) fn place(pages: &[Range<u64>], slots: Vec<StagedRun>) -> Vec<(u64, StagedRun)> {
    let (mut slots, mut placed) = (slots.into_iter(), Vec::new());
    let mut rest: Option<StagedRun> = None;
    for run in pages {
        let mut page = run.start;
        while page < run.end {
            let Some(mut staged) = rest.take().or_else(|| slots.next()) else { return placed };
            let (len, room) = (staged.slots().len() as u64, run.end - page);
            if room < len {
                rest = Some(staged.split_off(room as u32));
            }
            placed.push((page, staged));
            page += len.min(room);
        }
    }
    placed
}
