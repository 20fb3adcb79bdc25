//! `spinio calibrate`: what each route costs between this storage and this device.
//!
//! ```text
//!   scratch file ──> single transfers, 512 B to 64 MiB ──> Eq. 1: C, cutoff, bandwidth
//!                ──> 2 to 64 commands in flight        ──> latency, cost a command, bandwidth
//!                        │ table with R^2, JSON, and:
//!                        ▼
//!   ~/.local/state/spinio/models/<storage>-<file system>-<device>      read by every program under SPIN
//! ```
//!
//! `--check` measures a few sizes only and reports whether the stored model still fits.
//!
//! Known flaws: other work of the machine during the measurement is included in it; reads are measured, writes are
//! assumed to cost the same.

mod check;
pub mod measure;
pub mod report;

use std::fs::Permissions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use spinio_io::model::MeasuredRead;
use spinio_io::{model, runtime};
use spinio_plan::{Calibration, Reason, Route};

use self::measure::{RouteTimes, SamplingOptions};
use crate::color::OutputStyle;
use crate::device::{self, Buffer, DeviceName};
use crate::exit::{self, Exit};
use crate::progress::{Progress, Spinner};
use crate::random::SplitMix64;
use crate::test_file::TestFile;
use crate::{format, output};

/// What `spinio calibrate` takes.
#[derive(Debug, Args)]
pub struct Calibrate {
    /// A directory, for a scratch file there; or a file or block device, which is only read
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// The device: cuda:0, p2pmem:0, emulated [default: a CUDA GPU if there is one]
    #[arg(long)]
    device: Option<DeviceName>,
    /// Measure a few sizes only, and report whether the stored model still fits
    #[arg(long)]
    check: bool,
    /// Runs of each measurement that count
    #[arg(long, value_name = "N", default_value_t = 7)]
    runs: usize,
    /// Bytes of the scratch file; transfers of up to a half of it are measured
    #[arg(long, value_name = "BYTES", default_value = "256M", value_parser = format::parse)]
    size: u64,
    /// Moved to `spinio-lab chart`
    #[arg(long, value_name = "FILE", hide = true)]
    svg: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Keep nothing
    #[arg(long)]
    dry_run: bool,
}

/// The longest transfer measured.
const MAX_TRANSFER: u64 = 64 << 20;

/// The result.
pub struct CalibrationRun {
    /// The points.
    pub times: Vec<RouteTimes>,
    /// Routes that could not be measured, and why.
    pub unavailable: Vec<(Route, Reason)>,
    /// The fits.
    pub calibration: Calibration,
}

/// Runs it.
pub fn run(calibrate: &Calibrate) -> anyhow::Result<Exit> {
    if calibrate.svg.is_some() {
        let why = "`--svg` has moved: keep the output of `--json`, and draw it with `spinio-lab chart` (docs/lab.md)";
        return Err(exit::error(Exit::Usage, why));
    }
    if calibrate.runs == 0 || calibrate.size < 2 << 20 {
        return Err(exit::error(Exit::Usage, "Give --runs above 0 and --size of at least 2M"));
    }
    let folder = runtime().settings().cost_model_dir.clone();
    if folder.is_none() && !calibrate.dry_run {
        let why = "There is no directory to store a model in: set HOME, XDG_STATE_HOME or SPINIO_COST_MODEL_DIR, or give --dry-run";
        return Err(exit::error(Exit::Usage, why));
    }
    let subject = TestFile::open(&calibrate.path, calibrate.size)?;
    let most = MAX_TRANSFER.min(subject.size / 2);
    let wait = Spinner::new("Opening the device");
    let name = calibrate.device.unwrap_or_else(device::preferred);
    let buffer = Buffer::mapped(name, most)?;
    drop(wait);
    let trial = runtime()
        .trial(subject.file.as_raw_fd(), buffer.target)
        .map_err(|e| e.with_path(calibrate.path.display().to_string()))?;
    if calibrate.check {
        return check::run(&subject, &trial, &buffer, &SamplingOptions::quick(most, calibrate.runs), calibrate.json);
    }
    let found = measure_all(&subject, &trial, &buffer, &SamplingOptions::full(most, calibrate.runs))?;
    let kept = match folder {
        Some(folder) if !calibrate.dry_run => store(&folder, &trial, &found.calibration).map(Some),
        _ => Ok(None),
    };
    // The result is printed before the error of writing it.
    let path = kept.as_ref().ok().and_then(|k| k.as_deref());
    let text = match calibrate.json {
        true => format!("{:#}\n", report::json(&found, path)),
        false => report::render(&OutputStyle::stdout(), &found, path),
    };
    output::print(&text)?;
    kept?;
    Ok(Exit::Ok)
}

/// Measures and fits every route that is open.
pub fn measure_all(
    subject: &TestFile,
    trial: &MeasuredRead<'_>,
    buffer: &Buffer,
    effort: &SamplingOptions,
) -> anyhow::Result<CalibrationRun> {
    let (open, closed) = measure::routes(trial, buffer.target.allocation.device.capabilities().has_dma_engine);
    let mut times = Vec::new();
    for route in open {
        times.push(measure_route(subject, trial, route, effort)?);
    }
    anyhow::ensure!(!times.is_empty(), "No route can be measured on {}", subject.path.display());
    let writeback = subject.writeback(32 << 20)?;
    let place = trial.key();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let calibration = Calibration {
        storage: place.storage,
        file_system: place.file_system,
        device: place.device,
        measured_at: now,
        threads: trial.threads(),
        routes: times.iter().map(RouteTimes::fit).collect::<anyhow::Result<_>>()?,
        writeback,
    };
    Ok(CalibrationRun { times, unavailable: closed, calibration })
}

/// Measures one route, with the file as cached as the route wants it.
pub fn measure_route(
    subject: &TestFile,
    trial: &MeasuredRead<'_>,
    route: Route,
    effort: &SamplingOptions,
) -> anyhow::Result<RouteTimes> {
    // Of a large file of the user's, the first part is enough.
    let part = subject.size.min(1 << 30);
    match route.from_cache() {
        true => subject.read_into_cache(part)?,
        false => subject.evict(0, subject.size),
    }
    let mut progress = Progress::count(effort.point_count(), &format!("Measuring {route}"));
    let mut count = 0;
    let mut random = SplitMix64::new(route as u64, 0);
    measure::route(&trial.within(part), route, effort, &mut random, || {
        count += 1;
        progress.set(count);
    })
}

/// Stores a calibration where programs will find it; atomically.
fn store(folder: &str, trial: &MeasuredRead<'_>, calibration: &Calibration) -> anyhow::Result<PathBuf> {
    let path = model::file_path(folder, &trial.key());
    let cannot = || format!("Cannot store the model in {}", path.display());
    std::fs::create_dir_all(folder).with_context(cannot)?;
    // In a shared directory programs of other users read it; a temporary file is its owner's only, unless told otherwise.
    let mut builder = tempfile::Builder::new();
    let mut file = builder.permissions(Permissions::from_mode(0o644)).tempfile_in(folder).with_context(cannot)?;
    std::io::Write::write_all(&mut file, calibration.to_text().as_bytes()).with_context(cannot)?;
    file.persist(&path).with_context(cannot)?;
    Ok(path)
}
