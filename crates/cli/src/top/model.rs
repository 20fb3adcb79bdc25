//! What the screen shows: for each process what changed between two looks, and the throughput of the looks before.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Instant;

use spinio_io::stats::{Direction, Snapshot};
use spinio_plan::Route;

use crate::processes::ProcessList;

/// Looks that are remembered.
pub const HISTORY: usize = 240;

/// One process.
pub struct Row {
    path: PathBuf,
    /// All that it did.
    pub total: Snapshot,
    /// What it did since the look before, and how long ago that was.
    pub delta: Snapshot,
    pub seconds: f64,
    /// Bytes a second by route, the last look last.
    pub history: [VecDeque<u64>; Route::ALL.len()],
}

/// Everything the screen shows.
#[derive(Default)]
pub struct Model {
    /// By process number.
    pub rows: Vec<Row>,
    pub other_versions: usize,
    pub paused: bool,
    selected: Option<PathBuf>,
    last_update: Option<Instant>,
}

impl Row {
    /// Calls of all directions a second.
    pub fn calls(&self) -> f64 {
        Direction::ALL.iter().map(|d| self.delta.calls(*d).calls as f64).sum::<f64>() / self.seconds
    }
}

impl Model {
    /// Takes in what was found at a moment.
    pub fn update(&mut self, found: ProcessList, now: Instant) {
        if self.paused {
            return;
        }
        let seconds = self.last_update.map_or(1.0, |then| now.duration_since(then).as_secs_f64()).max(1e-3);
        let first = self.last_update.replace(now).is_none();
        self.other_versions = found.other_versions;
        let mut old = std::mem::take(&mut self.rows);
        for counters in found.processes {
            let same = |r: &Row| r.path == counters.path && r.total.process == counters.snapshot.process;
            let before = old.iter().position(same).map(|at| old.swap_remove(at));
            let whole = counters.snapshot;
            let (delta, mut history) = match before {
                Some(before) => (whole.since(&before.total), before.history),
                // At the first update the elapsed time is unknown; a process that appeared later is counted in full.
                None if first => (whole.since(&whole), Default::default()),
                None => (whole.clone(), Default::default()),
            };
            for route in Route::ALL {
                let bytes = delta.rows.iter().filter(|l| l.route == route);
                let bytes = bytes.fold(0u64, |sum, l| sum.saturating_add(l.bytes));
                let history = &mut history[route as usize];
                history.push_back((bytes as f64 / seconds) as u64);
                if history.len() > HISTORY {
                    history.pop_front();
                }
            }
            self.rows.push(Row { path: counters.path, total: whole, delta, seconds, history });
        }
        self.rows.sort_by_key(|r| r.total.process.pid);
    }

    /// The row that is looked at closely.
    pub fn selected(&self) -> usize {
        let at = self.rows.iter().position(|r| Some(&r.path) == self.selected.as_ref());
        at.unwrap_or(0)
    }

    /// Another one.
    pub fn select(&mut self, step: isize) {
        let last = self.rows.len().saturating_sub(1);
        let at = self.selected().saturating_add_signed(step).min(last);
        self.selected = self.rows.get(at).map(|r| r.path.clone());
    }

    /// Stops, or continues.
    pub fn pause(&mut self) {
        self.paused = !self.paused;
        // The time of the pause counts for no interval: the next update starts a new one.
        if !self.paused {
            self.last_update = None;
        }
    }
}
