//! `spinio demo`: the purpose of SPIN, on a real file, for a new user.
//!
//! ```text
//!   create file ──> compile reader.c ──┬─ without SPIN:  pread gives EFAULT
//!                                      ├─ cold           ┐
//!                                      ├─ half-cached    ├ LD_PRELOAD=libspinio.so: every byte compared,
//!                                      └─ cached         ┘ counters read from the SPINIO_STATS file
//! ```
//!
//! The reader is a C program that calls `pread` and contains no code of SPIN; each state is a new process. All figures
//! are measured: bytes and time by the reader, routes and reasons by the library's counters, and the state of the file
//! by the kernel.
//!
//! Known flaws: a rate includes the start of SPIN inside the reader (its threads, its pinned memory), which matters for
//! small files. A virtual disk that its host has cached looks faster cold than any real disk.

pub mod file;
mod net;
mod program;
mod report;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use rustix::io::Errno;

use self::file::State;
use self::program::Program;
use self::report::{DemoRun, Report};
use crate::cleanup;
use crate::device::DeviceName;
use crate::exit::{self, Exit};
use crate::{format, library, output, scratch};

/// What `spinio demo` takes.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Demo {
    #[command(subcommand)]
    other: Option<Other>,
    /// Size of the file: 64M, 4G
    #[arg(long, value_name = "BYTES", default_value = "256M", value_parser = format::parse)]
    size: u64,
    /// Make the file here (it must not exist; removed afterwards) instead of in a temporary directory
    #[arg(long, value_name = "FILE")]
    path: Option<PathBuf>,
    /// The device to read into: cuda:0, p2pmem:0, emulated [default: a CUDA GPU if there is one]
    #[arg(long)]
    device: Option<DeviceName>,
}

/// Other demos.
#[derive(Debug, Subcommand)]
enum Other {
    /// Run a web server that is one GPU kernel, and ask it with plain HTTP
    Net(net::Net),
}

/// Runs it.
pub fn run(demo: &Demo) -> anyhow::Result<Exit> {
    if let Some(Other::Net(net)) = &demo.other {
        return net::run(net);
    }
    if demo.size == 0 {
        return Err(exit::error(Exit::Usage, "A demo of 0 bytes shows nothing: give --size a number above 0"));
    }
    let library = library::find()?;
    let (directory, warning) = match &demo.path {
        Some(_) => (std::env::temp_dir(), None),
        None => scratch::disk_dir(),
    };
    let work = tempfile::Builder::new()
        .prefix("spinio-demo-")
        .tempdir_in(&directory)
        .with_context(|| format!("Cannot make a temporary directory in {}", directory.display()))?;
    let watch = cleanup::on_signal(vec![work.path().to_owned()]);
    let program = program::prepare(work.path())?;

    let data = DataFile::create(demo.path.clone().unwrap_or_else(|| work.path().join("data")))?;
    // Not before it was made: the name may be that of a file of the user's.
    watch.add(data.path.clone());
    let warning = warning.or_else(|| {
        let there = scratch::is_in_memory(&data.path);
        there.then(|| format!("{} is on a file system in memory: it is always cached", data.path.display()))
    });
    check_free_space(&data.path, demo.size)?;
    file::make(&data.file, &data.path, demo.size)?;

    let stage = DemoContext { program, library: preloadable_path(&library, work.path())?, work: work.path(), demo };
    let refused = stage.without_spin(&data)?;
    let mut outcomes = Vec::new();
    for state in State::ALL {
        let resident = file::set_state(&data.file, &data.path, demo.size, state)?;
        outcomes.push(stage.with_spin(&data, state, resident)?);
    }
    let report = Report { size: demo.size, path: &data.path, warning, plain_errno: refused, outcomes };
    output::print(&report.render(&crate::color::OutputStyle::stdout()))?;
    Ok(if report.is_equal() { Exit::Ok } else { Exit::Different })
}

/// The file, removed when the demo ends, however it ends.
struct DataFile {
    file: std::fs::File,
    path: PathBuf,
}

impl DataFile {
    fn create(path: PathBuf) -> anyhow::Result<DataFile> {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .with_context(|| format!("Cannot create {}", path.display()))?;
        Ok(DataFile { file, path })
    }
}

impl Drop for DataFile {
    fn drop(&mut self) {
        // In the temporary directory the file is removed with the directory; a second removal finds nothing.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p.to_owned(),
        _ => PathBuf::from("."),
    }
}

fn check_free_space(path: &Path, size: u64) -> anyhow::Result<()> {
    if let Ok(fs) = rustix::fs::statvfs(path) {
        let available = fs.f_bavail.saturating_mul(fs.f_frsize);
        if available < size {
            bail!(
                "No room for {} in {}: {} are free. Give --size or --path",
                format::bytes(size),
                parent(path).display(),
                format::bytes(available)
            );
        }
    }
    Ok(())
}

/// A path of the library that LD_PRELOAD can name: itself, or a link in the temporary directory.
fn preloadable_path(library: &Path, work: &Path) -> anyhow::Result<PathBuf> {
    if library::can_be_preloaded(library) {
        return Ok(library.to_owned());
    }
    let link = work.join("libspinio.so");
    std::os::unix::fs::symlink(library, &link).with_context(|| format!("Cannot link {}", link.display()))?;
    Ok(link)
}

/// What all runs of the reader share.
struct DemoContext<'a> {
    program: Program,
    library: PathBuf,
    work: &'a Path,
    demo: &'a Demo,
}

impl DemoContext<'_> {
    fn env(&self) -> anyhow::Result<Vec<(&'static str, OsString)>> {
        let mut env = vec![("LD_PRELOAD", library::preload(&self.library, std::env::var_os("LD_PRELOAD").as_deref())?)];
        if let Some(device) = self.demo.device {
            env.push(("DEMO_DEVICE", device.to_string().into()));
        }
        // The whole file must fit.
        if std::env::var_os("SPINIO_EMULATED").is_none() && self.demo.size > (1 << 30) {
            env.push(("SPINIO_EMULATED", format!("size={}", self.demo.size.next_multiple_of(2 << 20)).into()));
        }
        Ok(env)
    }

    /// The same program with the hooks turned off: what the kernel alone returns for device memory.
    fn without_spin(&self, data: &DataFile) -> anyhow::Result<Option<Errno>> {
        let mut env = self.env()?;
        env.push(("SPINIO_DISABLE", "1".into()));
        let run = self.program.run(&data.path, self.demo.size, None, &env)?;
        // The reader called `pread`, or there is no memory to read into.
        if run.answer.errno.is_none() && !run.status.success() {
            return Err(exit::error(Exit::Missing, format!("No device to read into: {}", run.stderr)));
        }
        Ok(run.answer.errno.map(Errno::from_raw_os_error))
    }

    fn with_spin(&self, data: &DataFile, state: State, resident: Option<f64>) -> anyhow::Result<DemoRun> {
        let stats = self.work.join(format!("stats-{}", state.name()));
        let mut env = self.env()?;
        env.push(("SPINIO_STATS", stats.clone().into()));
        let run = self.program.run(&data.path, self.demo.size, Some(&stats), &env)?;
        match run.status.code() {
            Some(0 | 3) => {}
            _ => bail!("The demo program failed on the {} file ({}): {}", state.name(), run.status, run.stderr),
        }
        let snapshot = program::read_stats(&stats).unwrap_or_default();
        Ok(DemoRun { state, resident, answer: run.answer, snapshot })
    }
}
