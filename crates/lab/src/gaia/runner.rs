//! Runs a cell as often as asked, or as often as time permits, and drops the first run.
//!
//! ```text
//!   time left of all ──> share of this experiment ──> share of this cell:  open, not counted ─> prepare ─> run ─> check   x runs
//! ```
//!
//! Every run is checked: a method whose results are wrong has no figures. What was measured before the time limit
//! counts, and the report says how many runs these are.

use std::time::{Duration, Instant};

use super::experiment::{Cell, Experiment, Method, Needs, Setting};
use super::stage::Stage;
use super::time_shares::{self, Share};
use super::usage;
use super::worker::{Figures, TimeUp};
use crate::quantile::quantile;

/// The runs of one method at one setting, without the first.
pub struct Measurement {
    /// The number of the setting.
    pub setting: usize,
    /// The method.
    pub method: &'static Method,
    /// Of each run.
    pub runs: Vec<Figures>,
}

impl Measurement {
    /// The median of a figure, and half of the distance between its quartiles; none if no run has it.
    pub fn median(&self, key: &str) -> Option<(f64, f64)> {
        let values: Vec<f64> = self.runs.iter().filter_map(|figures| figures.get(key).copied()).collect();
        let at = |share: f64| quantile(&values, share);
        Some((at(0.5)?, (at(0.75)? - at(0.25)?) / 2.0))
    }
}

/// What came of an experiment.
pub struct Outcome {
    /// Which.
    pub experiment: &'static Experiment,
    /// The settings.
    pub settings: &'static [Setting],
    /// By settings, then methods.
    pub cells: Vec<Measurement>,
    /// Methods and settings without figures, and why.
    pub missing: Vec<String>,
    /// Results were wrong.
    pub wrong: bool,
}

/// The methods that can run here, and why the others cannot.
pub fn methods(stage: &Stage, experiment: &'static Experiment) -> (Vec<&'static Method>, Vec<String>) {
    let (mut methods, mut missing) = (Vec::new(), Vec::new());
    for method in experiment.methods {
        let why = match method.needs {
            Needs::Nothing => None,
            Needs::Cuda if stage.is_cuda() => None,
            Needs::Cuda => Some("there is no CUDA GPU here"),
            Needs::Absent(why) => Some(why),
        };
        match why {
            None => methods.push(method),
            Some(why) => missing.push(format!("{}: {why}", method.name)),
        }
    }
    (methods, missing)
}

/// Runs an experiment within `limit`. `runs`: with the first, which is dropped. `keep` gets what there is after each cell.
pub fn run(
    stage: &Stage,
    experiment: &'static Experiment,
    settings: &'static [Setting],
    runs: usize,
    limit: Duration,
    keep: &dyn Fn(&Outcome) -> anyhow::Result<()>,
) -> anyhow::Result<Outcome> {
    let (methods, missing) = methods(stage, experiment);
    let mut outcome = Outcome { experiment, settings, cells: Vec::new(), missing, wrong: false };
    let cells = (0..settings.len()).flat_map(|setting| (0..methods.len()).map(move |method| (setting, method)));
    let place =
        |cell: &Measurement| (cell.setting, methods.iter().position(|method| core::ptr::eq(*method, cell.method)));
    time_shares::share(cells.collect(), Instant::now() + limit, Instant::now, |(number, method), share| {
        let (setting, method) = (&settings[number], methods[method]);
        let (counted, problem) = measure(stage, experiment, method, setting, runs, share);
        let is_late = counted.is_empty() && problem.as_ref().is_some_and(|problem| problem.is::<TimeUp>());
        if is_late && !share.is_last {
            return Ok(false);
        }
        if let Some(problem) = problem {
            outcome.wrong |= problem.is::<Wrong>();
            outcome.missing.push(format!("{} at {}: {problem:#}", method.name, setting.label));
        }
        if !counted.is_empty() {
            outcome.cells.push(Measurement { setting: number, method, runs: counted });
            // One that was tried again is not the last one of its setting.
            outcome.cells.sort_by_key(place);
        }
        keep(&outcome).map(|()| true)
    })?;
    keep(&outcome)?;
    Ok(outcome)
}

/// Results were wrong.
#[derive(Debug)]
struct Wrong(u64);

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} results are wrong", self.0)
    }
}

impl std::error::Error for Wrong {}

/// The runs that count, and what ended them early.
fn measure(
    stage: &Stage,
    experiment: &Experiment,
    method: &Method,
    setting: &Setting,
    runs: usize,
    share: Share,
) -> (Vec<Figures>, Option<anyhow::Error>) {
    if share.all.is_zero() {
        return (Vec::new(), Some(TimeUp.into()));
    }
    stage.deadline.set(Instant::now() + share.all);
    match (experiment.open)(stage, method, setting) {
        Ok(mut cell) => {
            // The program runs now: its start takes nothing from the runs.
            let share_ends = Instant::now() + share.runs;
            repeat(cell.as_mut(), &|| usage::cpu_seconds(&stage.daemon()), runs, share_ends)
        }
        Err(problem) => (Vec::new(), Some(problem)),
    }
}

/// `daemon`: seconds of processors that it has used.
fn repeat(
    cell: &mut dyn Cell,
    daemon: &dyn Fn() -> f64,
    runs: usize,
    share_ends: Instant,
) -> (Vec<Figures>, Option<anyhow::Error>) {
    let mut counted = Vec::new();
    for run in 0..runs {
        // Two runs are the least from which one counts.
        if run >= 2 && Instant::now() >= share_ends {
            break;
        }
        match once(cell, daemon, run) {
            Ok(figures) if run > 0 => counted.push(figures),
            Ok(_) => {}
            Err(problem) => {
                if problem.is::<Wrong>() {
                    counted.clear();
                }
                return (counted, Some(problem));
            }
        }
    }
    (counted, None)
}

fn once(cell: &mut dyn Cell, daemon: &dyn Fn() -> f64, run: usize) -> anyhow::Result<Figures> {
    cell.prepare(run)?;
    let before = daemon();
    let mut figures = cell.run()?;
    *figures.entry("cpu".to_owned()).or_default() += (daemon() - before).max(0.0);
    match cell.wrong()? {
        0 => Ok(figures),
        wrong => Err(Wrong(wrong).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_half_of_the_distance_of_quartiles() {
        const METHOD: Method = Method::new("map", "");
        let of = |values: &[f64]| {
            let runs = values.iter().map(|v| Figures::from([("seconds".to_owned(), *v)])).collect();
            Measurement { setting: 0, method: &METHOD, runs }.median("seconds")
        };
        assert_eq!(of(&[3.0]), Some((3.0, 0.0)));
        assert_eq!(of(&[4.0, 2.0]), Some((3.0, 0.5)));
        assert_eq!(of(&[9.0, 1.0, 5.0, 3.0, 7.0]), Some((5.0, 2.0)));
        assert_eq!(of(&[]), None);
    }

    /// Its `n`-th run takes `n` seconds, and is wrong from a run on.
    struct Counting {
        run: usize,
        wrong_from: usize,
    }

    impl Cell for Counting {
        fn prepare(&mut self, run: usize) -> anyhow::Result<()> {
            self.run = run;
            Ok(())
        }

        fn run(&mut self) -> anyhow::Result<Figures> {
            Ok(Figures::from([("seconds".to_owned(), self.run as f64), ("cpu".to_owned(), 1.0)]))
        }

        fn wrong(&mut self) -> anyhow::Result<u64> {
            Ok(u64::from(self.run >= self.wrong_from))
        }
    }

    #[test]
    fn first_run_is_dropped_and_the_daemons_time_is_added() {
        let later = Instant::now() + Duration::from_secs(3600);
        let used = std::cell::Cell::new(0.0);
        let daemon = || used.replace(used.get() + 0.5);
        let (runs, problem) = repeat(&mut Counting { run: 0, wrong_from: 9 }, &daemon, 4, later);
        let seconds: Vec<_> = runs.iter().map(|run| (run["seconds"], run["cpu"])).collect();
        assert_eq!(seconds, [(1.0, 1.5), (2.0, 1.5), (3.0, 1.5)]);
        assert!(problem.is_none());
    }

    #[test]
    fn one_run_counts_when_the_time_is_over_and_none_when_a_result_is_wrong() {
        let (runs, problem) = repeat(&mut Counting { run: 0, wrong_from: 9 }, &|| 0.0, 9, Instant::now());
        assert!(runs.len() == 1 && problem.is_none());
        let later = Instant::now() + Duration::from_secs(3600);
        let (runs, problem) = repeat(&mut Counting { run: 0, wrong_from: 3 }, &|| 0.0, 9, later);
        assert!(runs.is_empty());
        assert_eq!(problem.unwrap().to_string(), "1 results are wrong");
    }
}
