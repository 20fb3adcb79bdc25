//! The model of the screen: for each process the changes between two updates, and the throughput of earlier updates.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Instant;

use spinio_io::stats::{Direction, Snapshot};
use spinio_plan::Route;

use crate::processes::ProcessList;
use crate::screen_state::{ScreenState, remember};

/// One process.
pub struct Row {
    path: PathBuf,
    /// All that it has done.
    pub total: Snapshot,
    /// What it has done since the last update, and how long ago that was. Nothing where that is not known.
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
    pub state: ScreenState,
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
        if self.state.is_paused() {
            return;
        }
        let elapsed = self.state.begin_update(now);
        self.other_versions = found.other_versions;
        let mut old = std::mem::take(&mut self.rows);
        for counters in found.processes {
            let same = |r: &Row| r.path == counters.path && r.total.process == counters.snapshot.process;
            let before = old.iter().position(same).map(|at| old.swap_remove(at));
            let whole = counters.snapshot;
            let (total, history) = before.map(|row| (row.total, row.history)).unzip();
            let mut history = history.unwrap_or_default();
            let Some(seconds) = elapsed else {
                let delta = whole.since(&whole);
                self.rows.push(Row { path: counters.path, total: whole, delta, seconds: 1.0, history });
                continue;
            };
            // A process that has appeared since is counted in full.
            let delta = total.map_or_else(|| whole.clone(), |total| whole.since(&total));
            for route in Route::ALL {
                let bytes = delta.rows.iter().filter(|l| l.route == route);
                let bytes = bytes.fold(0u64, |sum, l| sum.saturating_add(l.bytes));
                remember(&mut history[route as usize], (bytes as f64 / seconds) as u64);
            }
            self.rows.push(Row { path: counters.path, total: whole, delta, seconds, history });
        }
        self.rows.sort_by_key(|r| r.total.process.pid);
    }

    /// The selected row.
    pub fn selected(&self) -> usize {
        self.state.selected(self.rows.iter().map(|row| row.path.as_path()))
    }

    /// Selects another row.
    pub fn select(&mut self, step: isize) {
        self.state.select(step, self.rows.iter().map(|row| row.path.as_path()));
    }
}
