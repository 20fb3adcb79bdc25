//! The model of the screen: for each process the changes between two updates, and the throughput of earlier updates.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Instant;

use spinio_io::stats::{Direction, Snapshot};
use spinio_plan::Route;

use crate::processes::ProcessList;

/// Updates that are remembered.
pub const HISTORY: usize = 240;

/// One process.
pub struct Row {
    path: PathBuf,
    /// All that it has done.
    pub total: Snapshot,
    /// What it has done since the last update, and how long ago that was.
    pub delta: Snapshot,
    pub seconds: f64,
    /// Bytes per second by route, the last update last.
    pub history: [VecDeque<u64>; Route::ALL.len()],
}

/// The contents of the screen.
#[derive(Default)]
pub struct Model {
    /// By PID.
    pub rows: Vec<Row>,
    pub other_versions: usize,
    pub paused: bool,
    selected: Option<PathBuf>,
    last_update: Option<Instant>,
}

impl Row {
    /// Calls of all directions per second.
    pub fn calls(&self) -> f64 {
        Direction::ALL.iter().map(|d| self.delta.calls(*d).calls as f64).sum::<f64>() / self.seconds
    }
}

impl Model {
    /// Adds the processes found at a moment.
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

    /// The selected row.
    pub fn selected(&self) -> usize {
        let at = self.rows.iter().position(|r| Some(&r.path) == self.selected.as_ref());
        at.unwrap_or(0)
    }

    /// Selects another row.
    pub fn select(&mut self, step: isize) {
        let last = self.rows.len().saturating_sub(1);
        let at = self.selected().saturating_add_signed(step).min(last);
        self.selected = self.rows.get(at).map(|r| r.path.clone());
    }

    /// Stops, or continues.
    pub fn pause(&mut self) {
        self.paused = !self.paused;
        // The time of the pause belongs to no interval: the next update starts a new one.
        if !self.paused {
            self.last_update = None;
        }
    }
}
