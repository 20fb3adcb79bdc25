//! `spinio-lab gaia`: the evaluation of the GAIA paper and uses of today, on a mount of this machine.
//!
//! ```text
//!   experiments.rs   names, claims, methods, settings: data
//!        │ each setting x each method
//!        v
//!   cells/           which programs run on which files, and what CPU programs do meanwhile
//!   stage.rs         compiled programs, a mount, a directory beside it      worker.rs   one program with kernels
//!        v
//!   runner.rs        runs, the first one dropped; results checked      time_shares.rs   the time limit, shared among cells
//!   report.rs        table, JSON, chart
//! ```
//!
//! Kernels are one CUDA C++ source (benches/gaia/programs), which nvcc compiles for the GPU if there are both, else the C++
//! compiler for the emulated device. There, counts and results mean something and times do not.
//!
//! The mount's daemon has no program of its own: supervisor and server are this one, with the arguments of `spinio gaia`.
//!
//! Known flaws: full sizes are below the paper's. Two GPU processes on a machine with one GPU take turns on it. The
//! processor time of the daemon is counted in ticks of 10 ms.

mod cells;
mod deadline;
mod experiment;
mod experiments;
mod programs;
mod report;
mod runner;
mod stage;
mod time_shares;
mod usage;
mod worker;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use spinio_cli::compiler::Gpu;
use spinio_io::model;

use self::deadline::Deadline;
use self::experiment::{Experiment, Needs};
use self::experiments::EXPERIMENTS;
use self::runner::Outcome;
use self::stage::Stage;
use crate::color::{OutputStyle, TextRole};
use crate::exit::{self, Exit};
use crate::{limit, machine, output, scratch};

/// Sizes of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Scale {
    /// For emulated devices: the default there.
    Small,
    /// For GPUs.
    Full,
    /// For GPUs: files of many GB, where an experiment has them.
    Large,
}

/// What `spinio-lab gaia` takes.
#[derive(Debug, Args)]
pub struct Gaia {
    /// Experiments, or all; `list` prints them, with the methods
    #[arg(value_name = "EXPERIMENT", required = true)]
    names: Vec<String>,
    /// Runs of each method at each setting; the first does not count
    #[arg(long, value_name = "N", default_value_t = 11)]
    runs: usize,
    /// Seconds after which everything must have ended; what was measured by then is printed
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = limit::parse)]
    limit: Duration,
    /// The sizes [default: full on a GPU, small on the emulated device]
    #[arg(long)]
    scale: Option<Scale>,
    /// Make the mount in a temporary directory of this one
    #[arg(long, value_name = "DIR")]
    path: Option<PathBuf>,
    /// Write EXPERIMENT.json and EXPERIMENT.svg into this directory
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Whether these arguments are for the daemon: `gaia mount`, `gaia server` and so on, as this program starts itself.
pub fn is_daemon() -> bool {
    let words: Vec<_> = std::env::args_os().skip(1).take(2).collect();
    let [gaia, what] = &words[..] else { return false };
    gaia == "gaia" && ["mount", "umount", "server", "serve", "drop", "status"].iter().any(|word| what == word)
}

/// Runs it.
pub fn run(gaia: &Gaia) -> anyhow::Result<Exit> {
    if gaia.names == ["list"] {
        output::print(&list(&OutputStyle::stdout()))?;
        return Ok(Exit::Ok);
    }
    let wanted = selected(&gaia.names)?;
    if gaia.runs < 2 {
        return Err(exit::error(Exit::Usage, "Give --runs of at least 2"));
    }
    if let Some(out) = &gaia.out {
        // Checked first, not after the minutes of the measurement.
        std::fs::create_dir_all(out).with_context(|| format!("Cannot write into {}", out.display()))?;
    }
    let end = Instant::now() + gaia.limit;
    let directory = gaia.path.clone().unwrap_or_else(|| scratch::disk_dir().0);
    let stage = Stage::set_up(&directory, Deadline::after(gaia.limit))?;
    let style = OutputStyle::stdout();
    if !gaia.json {
        output::print(&format!("kernels  {}\n\n", kernels(&stage)))?;
    }
    let (mut all, mut wrong) = (Vec::new(), false);
    let scale = gaia.scale.unwrap_or(if stage.is_cuda() { Scale::Full } else { Scale::Small });
    let settings = |experiment: &'static Experiment| match scale {
        Scale::Small => experiment.small,
        Scale::Large if !experiment.large.is_empty() => experiment.large,
        _ => experiment.full,
    };
    let cells = |experiment| settings(experiment).len() * runner::methods(&stage, experiment).0.len();
    let mut cells_left: usize = wanted.iter().copied().map(cells).sum();
    for experiment in wanted {
        let left = end.saturating_duration_since(Instant::now());
        // As each cell has the same; what one leaves is the others'.
        let share = left.mul_f64(cells(experiment) as f64 / cells_left.max(1) as f64);
        cells_left -= cells(experiment);
        let settings = settings(experiment);
        // After each cell, so that what was measured is there if this process is killed.
        let keep = |outcome: &Outcome| match &gaia.out {
            Some(out) => write(out, &stage, outcome, &record(&stage, gaia, outcome)),
            None => Ok(()),
        };
        let outcome = runner::run(&stage, experiment, settings, gaia.runs, share, &keep)?;
        wrong |= outcome.wrong;
        let record = record(&stage, gaia, &outcome);
        match gaia.json {
            true => all.push(record),
            false => output::print(&format!("{}\n", report::render(&style, &outcome)))?,
        }
        stage.clear()?;
    }
    stage.close()?;
    if gaia.json {
        output::print(&format!("{:#}\n", Value::Array(all)))?;
    }
    Ok(if wrong { Exit::Different } else { Exit::Ok })
}

fn kernels(stage: &Stage) -> String {
    match stage.gpu {
        Gpu::Cuda if stage.devices > 1 => format!("on {} GPUs: {}", stage.devices, stage.device),
        Gpu::Cuda => format!("on one GPU: {}; two GPU processes take turns on it", stage.device),
        Gpu::Emulated(why) => format!("on emulated devices, in software: {why}. Times say nothing about a GPU"),
    }
}

/// With the machine and the command.
fn record(stage: &Stage, gaia: &Gaia, outcome: &Outcome) -> Value {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let mut record = report::json(outcome);
    record["date"] = json!(model::date(now));
    record["command"] = json!(machine::command());
    record["version"] = json!(env!("CARGO_PKG_VERSION"));
    record["machine"] = machine::info();
    record["device"] = json!(stage.device);
    record["devices"] = json!(stage.devices);
    record["emulated"] = json!(!stage.is_cuda());
    record["runs"] = json!(gaia.runs - 1);
    record
}

fn write(out: &Path, stage: &Stage, outcome: &Outcome, record: &Value) -> anyhow::Result<()> {
    let name = outcome.experiment.name;
    let cannot = || format!("Cannot write into {}", out.display());
    std::fs::write(out.join(format!("{name}.json")), format!("{record:#}\n")).with_context(cannot)?;
    if !outcome.cells.is_empty() {
        report::chart(outcome, &stage.device).write(&out.join(format!("{name}.svg")))?;
    }
    Ok(())
}

fn list(paint: &OutputStyle) -> String {
    let mut s = String::new();
    for e in EXPERIMENTS {
        s += &format!("{} {}\n", paint.text(TextRole::Head, &format!("{:<10}", e.name)), e.title);
        s += &format!("           claim: {}\n", e.claim);
        for method in e.methods {
            let needs = match method.needs {
                Needs::Nothing => "",
                Needs::Cuda => "; needs a CUDA GPU",
                Needs::Absent(_) => "; not in this version",
            };
            s += &format!("           {:<15} {}{needs}\n", method.name, method.what);
        }
    }
    s + "all        every one of them\n"
}

fn selected(names: &[String]) -> anyhow::Result<Vec<&'static Experiment>> {
    if names.iter().any(|name| name == "all") {
        return Ok(EXPERIMENTS.iter().collect());
    }
    let find = |name: &String| {
        let found = EXPERIMENTS.iter().find(|e| e.name == name);
        found.ok_or_else(|| {
            exit::error(Exit::Usage, format!("`{name}` is no experiment: `spinio-lab gaia list` prints them"))
        })
    };
    names.iter().map(find).collect()
}
