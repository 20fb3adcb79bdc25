//! What both live screens remember between two updates: the selected row, whether they are paused, and when the last
//! update was.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Updates that are remembered.
pub const HISTORY: usize = 240;

#[derive(Default)]
pub struct ScreenState {
    paused: bool,
    selected: Option<PathBuf>,
    last_update: Option<Instant>,
}

impl ScreenState {
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Stops, or continues.
    pub fn pause(&mut self) {
        self.paused = !self.paused;
        // The time of the pause belongs to no interval: the next update begins a new one.
        if !self.paused {
            self.last_update = None;
        }
    }

    /// Begins an update. Returns the seconds since the last one; `None` at the first one and at the first one after a
    /// pause, when what has changed belongs to no known time.
    pub fn begin_update(&mut self, now: Instant) -> Option<f64> {
        self.last_update.replace(now).map(|last| (now - last).as_secs_f64().max(1e-3))
    }

    /// Which of these rows is selected.
    pub fn selected<'a>(&self, mut rows: impl Iterator<Item = &'a Path>) -> usize {
        rows.position(|row| Some(row) == self.selected.as_deref()).unwrap_or(0)
    }

    /// Selects the row that is `step` below the selected one.
    pub fn select<'a>(&mut self, step: isize, rows: impl ExactSizeIterator<Item = &'a Path> + Clone) {
        let last = rows.len().saturating_sub(1);
        let at = self.selected(rows.clone()).saturating_add_signed(step).min(last);
        self.selected = rows.clone().nth(at).map(Path::to_owned);
    }
}

/// Adds a value to those that are remembered.
pub fn remember(history: &mut VecDeque<u64>, value: u64) {
    history.push_back(value);
    if history.len() > HISTORY {
        history.pop_front();
    }
}
