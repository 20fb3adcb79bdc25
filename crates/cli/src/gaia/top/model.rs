//! The model of the screen: what each mount and daemon holds, what changed between two answers, and how that was before.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Instant;

use spinio_gaiad::{DaemonStatus, FileStatus, MountStatus, Totals};

use crate::gaia::held::Held;
use crate::screen_state::{ScreenState, remember};

/// The contents of the screen.
#[derive(Default)]
pub struct Model {
    /// The mounts, then the daemons.
    pub rows: Vec<Row>,
    pub errors: Vec<String>,
    pub show_files: bool,
    pub state: ScreenState,
}

/// A mount or a daemon.
pub struct Row {
    /// The directory, or the socket.
    pub path: PathBuf,
    pub holder: Holder,
}

pub enum Holder {
    Mount(Box<MountRow>),
    /// Root's mount, which this user may not ask.
    Unasked,
    Daemon(DaemonStatus),
}

/// A mount. All rates are of a second.
pub struct MountRow {
    pub status: MountStatus,
    pub rates: Rates,
    /// Released pages, the last answer last.
    pub history: VecDeque<u64>,
    /// Of `status.files`, in their order.
    pub files: Vec<Rates>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    pub releases: f64,
    pub published: f64,
    pub merged: f64,
    pub invalidations: f64,
    pub invalidated: f64,
}

impl Rates {
    fn between(before: &Totals, now: &Totals, seconds: f64) -> Rates {
        // A counter that is lower than it was began anew: all of it is new.
        let rate = |of: fn(&Totals) -> u64| of(now).checked_sub(of(before)).unwrap_or(of(now)) as f64 / seconds;
        Rates {
            releases: rate(|t| t.commits),
            published: rate(|t| t.published),
            merged: rate(|t| t.merged),
            invalidations: rate(|t| t.invalidations),
            invalidated: rate(|t| t.invalidated),
        }
    }
}

fn totals_of(file: &FileStatus) -> Totals {
    let stats = file.stats;
    Totals { commits: stats.commits, published: stats.published, merged: stats.merged, ..Totals::default() }
}

impl MountRow {
    /// `before`: the row of this mount at the last answer; a mount that was not there then is counted from now on, and so
    /// is every mount where the time since then is not known.
    fn new(status: MountStatus, before: Option<MountRow>, seconds: Option<f64>) -> MountRow {
        let (Some(before), Some(seconds)) = (&before, seconds) else {
            let files = vec![Rates::default(); status.files.len()];
            let history = before.map(|row| row.history).unwrap_or_default();
            return MountRow { status, rates: Rates::default(), history, files };
        };
        let old = &before.status;
        // Another server counts from zero.
        let base = if old.server.pid == status.server.pid { old.server.totals } else { Totals::default() };
        let rates = Rates::between(&base, &status.server.totals, seconds);
        let of_file = |file: &FileStatus| {
            let base = old.files.iter().find(|old| old.path == file.path).map(totals_of).unwrap_or_default();
            Rates::between(&base, &totals_of(file), seconds)
        };
        let files = status.files.iter().map(of_file).collect();
        let mut history = before.history.clone();
        remember(&mut history, rates.published as u64);
        MountRow { status, rates, history, files }
    }
}

impl Model {
    /// Adds the answers of a moment.
    pub fn update(&mut self, held: Held, now: Instant) {
        if self.state.is_paused() {
            return;
        }
        let seconds = self.state.begin_update(now);
        let mut old = std::mem::take(&mut self.rows);
        for (path, status) in held.mounts {
            let before = old.iter().position(|row| row.path == path).map(|at| old.swap_remove(at).holder);
            let before = match before {
                Some(Holder::Mount(before)) => Some(*before),
                _ => None,
            };
            let row = MountRow::new(status, before, seconds);
            self.rows.push(Row { path, holder: Holder::Mount(Box::new(row)) });
        }
        self.rows.extend(held.roots.into_iter().map(|path| Row { path, holder: Holder::Unasked }));
        let daemon = |(path, daemon)| Row { path, holder: Holder::Daemon(daemon) };
        self.rows.extend(held.daemons.into_iter().map(daemon));
        self.errors = held.errors;
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
