//! The state of one sequential reader: the surveyed range ahead of it, and the range it has passed.

use std::collections::VecDeque;
use std::ops::Range;

use super::{CACHED_SURVEY_STEP, SURVEY_STEP};

/// Whole pages only: the granularity of the page cache.
const PAGE: u64 = 4096;

/// The limit of absent runs recorded ahead of the reader; further runs are ignored and their pages stay.
const MAX_RUNS: usize = 1024;

/// A stream of reads of one descriptor.
#[derive(Clone, Debug, Default)]
pub struct SurveyWindow {
    /// The surveyed range, without a gap.
    surveyed: Range<u64>,
    /// The absent runs in it that the reader has not passed; in order, disjoint.
    absent: VecDeque<Range<u64>>,
}

impl SurveyWindow {
    /// Advances the reader to `at`, and returns the ranges it has passed that were absent at the survey: it read them
    /// in. After a jump the old range is finished; its absent runs count as read in as far as the Linux kernel may have
    /// read ahead, which is `distance` at most.
    pub fn advance(&mut self, at: u64, distance: u64) -> Vec<Range<u64>> {
        if at < self.surveyed.start || at > self.surveyed.end {
            return self.finish(distance, at);
        }
        let at = at / PAGE * PAGE;
        let mut out = Vec::new();
        while let Some(run) = self.absent.front_mut()
            && run.start < at
        {
            out.push(run.start..run.end.min(at));
            if run.end > at {
                run.start = at;
                break;
            }
            self.absent.pop_front();
        }
        self.surveyed.start = self.surveyed.start.max(at);
        out
    }

    /// The next range to survey, so that residency is known `distance` bytes ahead of `at`.
    pub fn next_survey(&self, at: u64, distance: u64) -> Option<Range<u64>> {
        let end = at.saturating_add(distance).checked_next_multiple_of(PAGE)?;
        (end > self.surveyed.end).then_some(self.surveyed.end..end)
    }

    /// Records the absent runs of a range that [`SurveyWindow::next_survey`] returned, in order.
    pub fn record_survey(&mut self, surveyed: Range<u64>, absent: impl IntoIterator<Item = Range<u64>>) {
        if surveyed.start != self.surveyed.end || surveyed.is_empty() {
            return;
        }
        let before = self.surveyed.end;
        self.surveyed.end = surveyed.end;
        for run in absent {
            let run = run.start.max(before).next_multiple_of(PAGE)..run.end.min(surveyed.end) / PAGE * PAGE;
            let full = self.absent.len() >= MAX_RUNS;
            match self.absent.back_mut() {
                _ if run.is_empty() => {}
                Some(last) if last.end == run.start => last.end = run.end,
                Some(last) if last.end > run.start => {}
                _ if full => {}
                _ => self.absent.push_back(run),
            }
        }
    }

    /// The stream ends, or continues at `at`: every absent run within `distance` of its position.
    pub fn finish(&mut self, distance: u64, at: u64) -> Vec<Range<u64>> {
        let end = self.surveyed.start.saturating_add(distance);
        let absent = std::mem::take(&mut self.absent);
        let at = at / PAGE * PAGE;
        self.surveyed = at..at;
        absent.into_iter().map(|run| run.start..run.end.min(end)).filter(|run| !run.is_empty()).collect()
    }

    /// Another owner is responsible for the range from now on.
    pub fn forget(&mut self, range: &Range<u64>) {
        self.absent = std::mem::take(&mut self.absent).into_iter().flat_map(|run| subtract(run, range)).collect();
    }

    /// Whether the whole surveyed range is cached, so that the rest may be spot-checked.
    pub fn all_cached(&self) -> bool {
        !self.surveyed.is_empty() && self.absent.is_empty()
    }

    /// Whether any surveyed page is absent.
    pub fn any_absent(&self) -> bool {
        !self.absent.is_empty()
    }

    /// How many bytes may be read until the next survey.
    pub fn survey_step(&self) -> u64 {
        if self.all_cached() { CACHED_SURVEY_STEP } else { SURVEY_STEP }
    }
}

/// The remainder of a run.
pub(super) fn subtract(run: Range<u64>, hole: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let parts = [run.start..run.end.min(hole.start), run.start.max(hole.end)..run.end];
    let disjoint = run.end <= hole.start || hole.end <= run.start || hole.is_empty();
    let parts = if disjoint { [run.clone(), 0..0] } else { parts };
    parts.into_iter().filter(|part| !part.is_empty())
}
