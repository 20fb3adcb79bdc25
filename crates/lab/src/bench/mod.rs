//! `spinio-lab bench`: the paper's evaluation, on the devices of this machine.
//!
//! ```text
//!   experiment.rs   fig1, fig4a-d, fig5, table3: settings and the paper's claim
//!        │ each setting x each method
//!        ▼
//!   method.rs       the five transfer methods, as programs would use them
//!   measure.rs      runs of the methods in turns: cache prepared, threads started at once, first run dropped
//!   load.rs         stress-ng, concurrently
//!        ▼
//!   report.rs       table, JSON, chart with error bars
//! ```
//!
//! Methods that cannot run here are listed with the reason: a GPU whose memory cannot be mapped has neither P2P nor
//! pread+GPU.
//!
//! Known flaws: files are smaller than the paper's unless `--size` is given, so a disk's own cache has more effect; the
//! emulated device's copies are made by the same processors that read.

mod experiment;
mod load;
mod measure;
mod method;
mod report;

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use serde_json::Value;
use spinio_io::{model, runtime};
use spinio_plan::Route;

use self::experiment::{EXPERIMENTS, Experiment, Setting};
use self::load::{LoadGuard, Stress};
use self::measure::{RunOptions, Runs};
use self::method::{Method, Reader};
use crate::color::{OutputStyle, TextRole};
use crate::device::{self, Buffer, DeviceName};
use crate::exit::{self, Exit};
use crate::progress::Progress;
use crate::test_file::TestFile;
use crate::{format, limit, machine, output, scratch};

/// What `spinio-lab bench` takes.
#[derive(Debug, Args)]
pub struct Bench {
    /// Experiments: fig1, fig4a, fig4b, fig4c, fig4d, fig5, table3, or all
    #[arg(value_name = "EXPERIMENT")]
    names: Vec<String>,
    /// List the experiments, what each shows and what the paper says
    #[arg(long)]
    list: bool,
    /// A directory for scratch files, one a thread; or a file or block device that all threads read
    #[arg(long, value_name = "PATH")]
    path: Option<PathBuf>,
    /// The same, on an array of disks, for fig4c
    #[arg(long, value_name = "PATH")]
    raid: Option<PathBuf>,
    /// The device: cuda:0, p2pmem:0, emulated [default: a CUDA GPU if there is one]
    #[arg(long)]
    device: Option<DeviceName>,
    /// Runs of each point; the first does not count
    #[arg(long, value_name = "N", default_value_t = 11)]
    runs: usize,
    /// Bytes of each thread's file [default: of each experiment, see --list]
    #[arg(long, value_name = "BYTES", value_parser = format::parse)]
    size: Option<u64>,
    /// Block sizes, where they vary [default: 512 B to 8 MiB by factors of 4]
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', value_parser = format::parse)]
    blocks: Vec<u64>,
    /// Methods: pread+copy, pread+copy+D, P2P, pread+GPU, SPIN [default: all of the experiment]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = Method::parse)]
    methods: Vec<Method>,
    /// Threads [default: of each experiment]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Seconds after which a run ends; what was read by then counts
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = limit::parse)]
    limit: Duration,
    /// Write EXPERIMENT.json and EXPERIMENT.svg into this directory
    #[arg(long, value_name = "DIRECTORY")]
    out: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// One setting measured with one method.
struct Measurement {
    setting: usize,
    method: Method,
    runs: Runs,
}

/// The result of an experiment.
struct ExperimentResult {
    experiment: &'static Experiment,
    settings: Vec<Setting>,
    cells: Vec<Measurement>,
    missing: Vec<String>,
    device: String,
    storage: String,
    file_system: String,
    machine: Value,
    threads: usize,
    runs: usize,
    size: u64,
    date: String,
    command: String,
}

/// Runs it.
pub fn run(bench: &Bench) -> anyhow::Result<Exit> {
    if bench.list {
        output::print(&list(&OutputStyle::stdout()))?;
        return Ok(Exit::Ok);
    }
    let wanted = selected_experiments(&bench.names)?;
    let sane = bench.runs >= 2 && bench.threads.is_none_or(|t| (1..=256).contains(&t));
    if !sane || bench.blocks.iter().any(|b| !(1..=1 << 30).contains(b)) {
        let why = "Give --runs of at least 2, --threads of 1 to 256, and --blocks up to 1G";
        return Err(exit::error(Exit::Usage, why));
    }
    let device = bench.device.unwrap_or_else(device::preferred);
    if let Some(directory) = &bench.out {
        // Checked first, not after the minutes of the measurement.
        std::fs::create_dir_all(directory).with_context(|| format!("Cannot write into {}", directory.display()))?;
    }
    let guard = LoadGuard::new();
    let mut all = Vec::new();
    let mut measure = |experiment| -> anyhow::Result<()> {
        let outcome = run_experiment(bench, experiment, device, &guard)?;
        match bench.json {
            true => all.push(report::json(&outcome)),
            false => output::print(&format!("{}\n", report::render(&OutputStyle::stdout(), &outcome)))?,
        }
        bench.out.iter().try_for_each(|directory| write(directory, &outcome))
    };
    let result = wanted.into_iter().try_for_each(&mut measure);
    // Also what was measured before an experiment that failed.
    if bench.json && !(all.is_empty() && result.is_err()) {
        output::print(&format!("{:#}\n", Value::Array(all)))?;
    }
    result.map(|()| Exit::Ok)
}

fn list(paint: &OutputStyle) -> String {
    let mut s = String::new();
    for e in EXPERIMENTS {
        s += &format!(
            "{} {}; files of {}\n",
            paint.text(TextRole::Head, &format!("{:<7}", e.name)),
            e.title,
            format::bytes(e.size)
        );
        s += &format!("        the paper: {}\n", e.claim);
    }
    s + "all     every one of them\n"
}

fn selected_experiments(names: &[String]) -> anyhow::Result<Vec<&'static Experiment>> {
    if names.is_empty() {
        return Err(exit::error(Exit::Usage, "Name an experiment, or all; --list prints them"));
    }
    if names.iter().any(|n| n == "all") {
        return Ok(EXPERIMENTS.iter().collect());
    }
    let find = |name: &String| {
        let found = EXPERIMENTS.iter().find(|e| e.name == name);
        found.ok_or_else(|| exit::error(Exit::Usage, format!("`{name}` is no experiment: --list prints them")))
    };
    names.iter().map(find).collect()
}

fn run_experiment(
    bench: &Bench,
    experiment: &'static Experiment,
    device: DeviceName,
    guard: &LoadGuard,
) -> anyhow::Result<ExperimentResult> {
    let chosen = if experiment.needs_array() { &bench.raid } else { &bench.path };
    let blocks = if bench.blocks.is_empty() { experiment::blocks() } else { bench.blocks.clone() };
    let settings = experiment.settings(&blocks);
    let threads = bench.threads.unwrap_or(experiment.threads);
    let size = bench.size.unwrap_or(experiment.size);
    let mut outcome = ExperimentResult {
        experiment,
        settings,
        cells: Vec::new(),
        missing: Vec::new(),
        device: device.to_string(),
        storage: "-".to_owned(),
        file_system: "-".to_owned(),
        machine: machine::info(),
        threads,
        runs: bench.runs - 1,
        size,
        date: model::date(
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        ),
        command: machine::command(),
    };
    let path = match chosen {
        Some(path) => path.clone(),
        None if experiment.needs_array() => {
            outcome.missing.push("all of it: name a place on an array of disks with --raid".to_owned());
            return Ok(outcome);
        }
        None => scratch::disk_dir().0,
    };
    let largest = outcome.settings.iter().map(|s| s.block).max().unwrap_or(0);
    if size < largest {
        return Err(exit::error(Exit::Usage, format!("--size is below the largest block, {}", format::bytes(largest))));
    }
    let files = open_files(&path, size, threads)?;
    measure_all(bench, &mut outcome, &files, device, &path, guard)?;
    Ok(outcome)
}

/// One file per thread in a directory; else the given file.
fn open_files(path: &Path, size: u64, threads: usize) -> anyhow::Result<Vec<TestFile>> {
    let count = if path.is_dir() { threads } else { 1 };
    (0..count).map(|_| TestFile::open(path, size)).collect()
}

fn measure_all(
    bench: &Bench,
    o: &mut ExperimentResult,
    files: &[TestFile],
    device: DeviceName,
    path: &Path,
    guard: &LoadGuard,
) -> anyhow::Result<()> {
    let first = &files[0];
    o.size = first.size;
    let buffer = Buffer::mapped(device, 1 << 20)?;
    let trial =
        runtime().trial(first.file.as_raw_fd(), buffer.target).map_err(|e| e.with_path(path.display().to_string()))?;
    let (place, unit) = (trial.key(), trial.align());
    (o.device, o.storage, o.file_system) = (place.device, place.storage, place.file_system);
    let mut methods = Vec::new();
    for &method in o.experiment.methods.iter().filter(|m| bench.methods.is_empty() || bench.methods.contains(m)) {
        let closed = match method {
            Method::P2p => trial.allows(Route::P2p).err().map(|reason| reason.text().to_owned()),
            Method::PreadGpu if !buffer.target.allocation.host_mapped => {
                Some("the device's memory is not mapped for the CPU".to_owned())
            }
            _ => None,
        };
        // A method is timed only if it delivers the file's bytes.
        let block = 64u64 << 10;
        let tried = || Reader::new(method, first, device, block)?.check(first, block, block as usize);
        match closed.or_else(|| tried().err().map(|e| format!("{e:#}"))) {
            None => methods.push(method),
            Some(why) => o.missing.push(format!("{}: {why}", method.name())),
        }
    }
    drop(trial);
    let effort = RunOptions {
        runs: o.runs,
        limit: bench.limit,
        threads: o.threads,
        reads: o.experiment.reads,
        pattern: o.experiment.pattern,
    };
    let total = o.settings.len() * methods.len() * bench.runs;
    let mut progress = Progress::count(total as u64, &format!("Measuring {}", o.experiment.name));
    let mut count = 0;
    for (i, setting) in o.settings.iter().enumerate() {
        if measure::blocks_per_thread(files, setting.block, o.threads) == 0 {
            let (label, size) = (&setting.label, format::bytes(o.size));
            o.missing.push(format!("{label}: {size} are less than a block for each of {} threads", o.threads));
            continue;
        }
        let is_aligned = |method: &Method| !method.is_direct() || setting.block.is_multiple_of(unit);
        let (methods, unaligned): (Vec<_>, Vec<_>) = methods.iter().copied().partition(is_aligned);
        for method in unaligned {
            let text = "blocks are not aligned for direct I/O, which takes multiples of";
            o.missing.push(format!("{} at {}: {text} {unit}", method.name(), setting.label));
        }
        if methods.is_empty() {
            continue;
        }
        // With time to cache the share before each run.
        let each = effort.limit + Duration::from_secs(60);
        let most = each * u32::try_from(methods.len() * bench.runs).unwrap_or(u32::MAX);
        let mut stress = match Stress::start(setting.load, path, most, guard) {
            Ok(stress) => stress,
            Err(why) => {
                o.missing.push(format!("{}: {why}", setting.label));
                continue;
            }
        };
        let measured = measure::run_all(&methods, setting, &effort, files, device, || {
            count += 1;
            progress.set(count);
        });
        let lasted = stress.as_mut().is_none_or(Stress::is_running);
        drop(stress);
        for (method, runs) in measured {
            match runs {
                Ok(_) if !lasted => {
                    o.missing.push(format!("{} at {}: stress-ng ended before it", method.name(), setting.label))
                }
                Ok(runs) => o.cells.push(Measurement { setting: i, method, runs }),
                Err(e) => o.missing.push(format!("{} at {}: {e:#}", method.name(), setting.label)),
            }
        }
        // Results are not lost when a long run is interrupted. An error of writing them is reported once, at the end.
        if let Some(directory) = &bench.out {
            let _ = write(directory, o);
        }
    }
    Ok(())
}

fn write(directory: &Path, outcome: &ExperimentResult) -> anyhow::Result<()> {
    let cannot = || format!("Cannot write into {}", directory.display());
    let name = outcome.experiment.name;
    std::fs::write(directory.join(format!("{name}.json")), format!("{:#}\n", report::json(outcome)))
        .with_context(cannot)?;
    if !outcome.cells.is_empty() {
        report::chart(outcome).write(&directory.join(format!("{name}.svg")))?;
    }
    Ok(())
}
