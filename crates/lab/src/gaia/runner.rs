//! Runs a cell as often as asked, or as often as time permits, and drops the first run.
//!
//! ```text
//!   time left of all ──> share of this experiment ──> share of this cell:  prepare ─> run ─> check   x runs
//! ```
//!
//! Every run is checked: a method whose results are wrong has no figures. What was measured before the time limit
//! counts, and the report says how many runs these are.

use std::time::{Duration, Instant};

use super::experiment::{Cell, Experiment, Figures, Method, Needs, Setting};
use super::stage::Stage;
use super::usage;
use super::worker::TimeUp;

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
        let mut values: Vec<f64> = self.runs.iter().filter_map(|figures| figures.get(key).copied()).collect();
        values.sort_by(f64::total_cmp);
        let last = values.len().checked_sub(1)?;
        let at = |share: f64| {
            let place = share * last as f64;
            let (low, high) = (values[place.floor() as usize], values[place.ceil() as usize]);
            low + (high - low) * place.fract()
        };
        Some((at(0.5), (at(0.75) - at(0.25)) / 2.0))
    }
}

/// What came of an experiment.
pub struct Outcome {
    /// Which.
    pub experiment: &'static Experiment,
    /// The settings.
    pub settings: &'static [Setting],
    /// In the order of measurement.
    pub cells: Vec<Measurement>,
    /// Methods and settings without figures, and why.
    pub missing: Vec<String>,
    /// Results were wrong.
    pub wrong: bool,
}

/// Runs an experiment within `limit`. `runs`: with the first, which is dropped.
pub fn run(
    stage: &Stage,
    experiment: &'static Experiment,
    settings: &'static [Setting],
    runs: usize,
    limit: Duration,
) -> Outcome {
    let mut outcome = Outcome { experiment, settings, cells: Vec::new(), missing: Vec::new(), wrong: false };
    let end = Instant::now() + limit;
    let mut methods = Vec::new();
    for method in experiment.methods {
        let why = match method.needs {
            Needs::Nothing => None,
            Needs::Cuda if stage.is_cuda() => None,
            Needs::Cuda => Some("there is no CUDA GPU here"),
            Needs::Absent(why) => Some(why),
        };
        match why {
            None => methods.push(method),
            Some(why) => outcome.missing.push(format!("{}: {why}", method.name)),
        }
    }
    let mut cells = settings.len() * methods.len();
    for (number, setting) in settings.iter().enumerate() {
        for &method in &methods {
            let left = end.saturating_duration_since(Instant::now());
            let share = left / u32::try_from(cells).unwrap_or(1).max(1);
            cells -= 1;
            // A cell that needs more than its share for its first two runs gets it from the others.
            stage.deadline.set(end);
            let measured = measure(stage, experiment, method, setting, runs, Instant::now() + share);
            let (counted, problem) = measured;
            if let Some(problem) = problem {
                outcome.wrong |= problem.is::<Wrong>();
                outcome.missing.push(format!("{} at {}: {problem:#}", method.name, setting.label));
            }
            if !counted.is_empty() {
                outcome.cells.push(Measurement { setting: number, method, runs: counted });
            }
        }
    }
    outcome
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
    share_ends: Instant,
) -> (Vec<Figures>, Option<anyhow::Error>) {
    let mut counted = Vec::new();
    let mut all = || -> anyhow::Result<()> {
        if stage.deadline.left().is_zero() {
            return Err(TimeUp.into());
        }
        let mut cell = (experiment.open)(stage, method, setting)?;
        for run in 0..runs {
            if run >= 2 && Instant::now() >= share_ends {
                break;
            }
            let figures = once(stage, cell.as_mut(), run)?;
            if run > 0 {
                counted.push(figures);
            }
        }
        Ok(())
    };
    let problem = all().err();
    if problem.as_ref().is_some_and(|problem| problem.is::<Wrong>()) {
        counted.clear();
    }
    (counted, problem)
}

fn once(stage: &Stage, cell: &mut dyn Cell, run: usize) -> anyhow::Result<Figures> {
    cell.prepare(run)?;
    let before = usage::cpu_seconds(&stage.daemon());
    let mut figures = cell.run()?;
    *figures.entry("cpu".to_owned()).or_default() += (usage::cpu_seconds(&stage.daemon()) - before).max(0.0);
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
}
