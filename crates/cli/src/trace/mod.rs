//! `spinio trace`: device requests one by one, with the pieces of each.
//!
//! ```text
//!   trace PID            switches tracing on in the process's counters, for two seconds at a time
//!   trace -- CMD         starts CMD with tracing on; its children are traced too
//!        │ poll every 5 ms: rings ──> events
//!        ▼
//!   gather.rs            pieces wait for their request ──> request with segments
//!        ├── jsonl.rs     a line for each, as they return
//!        └── perfetto.rs  at the end, for ui.perfetto.dev and chrome://tracing
//! ```
//!
//! Known flaws: a request that has not returned is not listed. A process that makes more than 32,768 records (requests
//! and pieces) in the 5 ms between two polls loses the oldest; their number is printed at the end.

mod gather;
mod jsonl;
mod perfetto;

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, ValueEnum};
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use rustix::time::{ClockId, clock_gettime};
use spinio_io::stats::trace::{Reader, file};

use self::gather::{CompleteRequest, RequestAssembler};
use crate::exit::{self, Exit};
use crate::output;
use crate::processes::{self, CounterFile};
use crate::run::{self, signals};

/// What `spinio trace` takes.
#[derive(Debug, Args)]
pub struct Trace {
    /// The process to trace; or name a program
    #[arg(conflicts_with = "command", required_unless_present = "command", value_parser = crate::stat::pid)]
    pid: Option<u32>,
    /// Where to write; default: standard output
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// `jsonl`: a line for each request; `perfetto`: for ui.perfetto.dev. By the name of the output: .json is perfetto
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Stop after this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = crate::stat::seconds)]
    seconds: Option<Duration>,
    /// The program to trace, and its arguments, after `--`
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Jsonl,
    Perfetto,
}

/// Between two polls of the rings.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The same when nothing is traced any more.
const OFF_INTERVAL: Duration = Duration::from_millis(20);

/// For how long a process traces after the tracer's last request, and how often the tracer repeats it.
const LEASE: Duration = Duration::from_secs(2);
const RENEW: Duration = Duration::from_millis(250);

/// Runs it; returns the status to end with.
pub fn run(trace: &Trace) -> anyhow::Result<u8> {
    match trace.pid {
        Some(pid) => attach(trace, pid).map(|()| Exit::Ok as u8),
        None => launch(trace),
    }
}

/// Set by the signals that end this command: the trace is then written out.
fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&flag)).context("Cannot take signals")?;
    }
    Ok(flag)
}

fn attach(trace: &Trace, pid: u32) -> anyhow::Result<()> {
    let stopped = stop_flag()?;
    let found = processes::find(pid)?;
    let counters =
        found.reopen_to_trace().map_err(anyhow::Error::from).with_context(|| format!("Cannot trace process {pid}"))?;
    // The process writes there without a check: allocate the space first.
    fallocate(counters.file(), FallocateFlags::empty(), 0, file::BYTES)
        .with_context(|| format!("Cannot trace process {pid}: no room for the trace in {}", counters.path.display()))?;
    // Only now: it truncates an earlier trace.
    let mut sink = TraceWriter::new(trace)?;
    let mut source = TracedProcess { reader: Reader::from_now(read_at(counters.file()))?, counters };
    let mut switch = TraceSwitch { file: source.counters.file().try_clone()?, requested: 0 };
    let begun = Instant::now();
    let mut renewed: Option<Instant> = None;
    loop {
        if renewed.is_none_or(|at| at.elapsed() >= RENEW) {
            switch.renew()?;
            renewed = Some(Instant::now());
        }
        let over = stopped.load(Relaxed) || trace.seconds.is_some_and(|s| begun.elapsed() >= s);
        let dead = !source.counters.is_alive();
        if over {
            switch.off();
        }
        sink.take(&mut source, over || dead)?;
        if over || dead {
            return sink.finish();
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// The word that switches tracing on in a process.
struct TraceSwitch {
    file: File,
    requested: u64,
}

impl TraceSwitch {
    fn renew(&mut self) -> anyhow::Result<()> {
        let now = clock_gettime(ClockId::Monotonic);
        let until = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64 + LEASE.as_nanos() as u64;
        // Another tracer may have set a later time, and SPINIO_TRACE no end at all.
        if self.until() < until {
            self.file.write_all_at(&until.to_le_bytes(), file::TRACING_AT).context("Cannot switch tracing on")?;
            self.requested = until;
        }
        Ok(())
    }

    fn until(&self) -> u64 {
        let mut word = [0; 8];
        self.file.read_exact_at(&mut word, file::TRACING_AT).map_or(0, |()| u64::from_le_bytes(word))
    }

    /// Switches tracing off at once, if no other tracer needs it.
    fn off(&mut self) {
        if self.requested != 0 && self.until() == self.requested {
            let _ = self.file.write_all_at(&[0; 8], file::TRACING_AT);
        }
    }
}

impl Drop for TraceSwitch {
    fn drop(&mut self) {
        self.off();
    }
}

fn launch(trace: &Trace) -> anyhow::Result<u8> {
    let directory = run::counters_dir()?;
    let (mut command, name) = run::prepare(&trace.command, &[], false)?;
    command.env("SPINIO_STATS", run::dir_setting(directory.path())).env("SPINIO_TRACE", "1");
    // Only now: it truncates an earlier trace.
    let mut sink = TraceWriter::new(trace)?;
    let caught = signals::catch();
    let mut child = command.spawn().map_err(|e| run::cannot_start(&name, &e))?;
    let forward = signals::forward_to(child.id(), caught);
    let begun = Instant::now();
    let mut sources = HashMap::new();
    let result = loop {
        let over = trace.seconds.is_some_and(|s| begun.elapsed() >= s);
        let ended = has_ended(child.id());
        find_new(directory.path(), &mut sources);
        let taken = sources.values_mut().try_for_each(|source| sink.take(source, ended || over));
        if taken.is_err() || ended || over {
            break taken;
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    // The program goes on, and this command ends with its status, also where the trace cannot be written.
    if let Err(error) = result.and_then(|()| sink.finish())
        && !exit::is_closed_pipe(&error)
    {
        output::note(&format!("spinio: {error:#}\n"));
    }
    drop(sources);
    keep_off(directory.path(), child.id());
    drop(forward);
    let status = child.wait().with_context(|| format!("Cannot wait for {}", name.to_string_lossy()))?;
    Ok(match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128u8.wrapping_add(signal as u8),
        (None, None) => Exit::Failed as u8,
    })
}

/// Keeps tracing off until the child has ended: after --seconds, or when the trace cannot be written. Processes that
/// begin meanwhile begin with tracing on, as their environment says.
fn keep_off(directory: &Path, child: u32) {
    loop {
        let ended = has_ended(child);
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            // No file is kept open: a build begins thousands of processes, and a later one may reuse a PID.
            if is_on(&entry.path())
                && let Ok(counters) = CounterFile::open_to_trace(&entry.path())
            {
                let _ = counters.file().write_all_at(&[0; 8], file::TRACING_AT);
            }
        }
        if ended {
            return;
        }
        std::thread::sleep(OFF_INTERVAL);
    }
}

/// Whether tracing is on in a file, if it has counters: a quick check before all of them are read.
fn is_on(path: &Path) -> bool {
    let mut word = [0; 8];
    let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
    file.and_then(|file| file.read_exact_at(&mut word, file::TRACING_AT)).is_ok() && word != [0; 8]
}

/// Whether a child process has ended; it is not reaped.
fn has_ended(child: u32) -> bool {
    let Some(pid) = Pid::from_raw(child as i32) else { return true };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    waitid(WaitId::Pid(pid), options).map_or(true, |status| status.is_some())
}

/// Files that have appeared since.
fn find_new(directory: &Path, sources: &mut HashMap<PathBuf, TracedProcess>) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if !sources.contains_key(&path)
            && let Ok(counters) = CounterFile::open_to_trace(&path)
        {
            sources.insert(path, TracedProcess { reader: Reader::default(), counters });
        }
    }
}

/// One process that is traced.
struct TracedProcess {
    counters: CounterFile,
    reader: Reader,
}

fn read_at(file: &File) -> impl Fn(&mut [u8], u64) -> std::io::Result<()> {
    |into, offset| file.read_exact_at(into, offset)
}

/// Where the trace is written.
struct TraceWriter {
    out: BufWriter<Box<dyn Write>>,
    /// What failed if it cannot be written.
    name: String,
    format: Format,
    gather: RequestAssembler,
    /// In the format of Perfetto: written at the end.
    all: Vec<CompleteRequest>,
    programs: HashMap<u32, String>,
    lost: HashMap<PathBuf, u64>,
    written: u64,
}

impl TraceWriter {
    fn new(trace: &Trace) -> anyhow::Result<TraceWriter> {
        let by_name = match trace.output.as_deref().and_then(Path::extension) {
            Some(e) if e == "json" => Format::Perfetto,
            _ => Format::Jsonl,
        };
        let out: Box<dyn Write> = match &trace.output {
            Some(path) => Box::new(File::create(path).with_context(|| format!("Cannot write {}", path.display()))?),
            None => Box::new(output::Stdout),
        };
        let place = trace.output.as_ref().map_or("standard output".into(), |path| path.display().to_string());
        Ok(TraceWriter {
            out: BufWriter::new(out),
            name: format!("Cannot write the trace to {place}"),
            format: trace.format.unwrap_or(by_name),
            gather: RequestAssembler::default(),
            all: Vec::new(),
            programs: HashMap::new(),
            lost: HashMap::new(),
            written: 0,
        })
    }

    fn take(&mut self, source: &mut TracedProcess, last: bool) -> anyhow::Result<()> {
        let events = source.reader.poll(read_at(source.counters.file()), last)?;
        if source.reader.lost() > 0 {
            self.lost.insert(source.counters.path.clone(), source.reader.lost());
        }
        let mut wrote = false;
        for event in events {
            let Some(whole) = self.gather.take(event) else { continue };
            self.written += 1;
            let process = &source.counters.snapshot.process;
            self.programs.entry(whole.request.pid).or_insert_with(|| process.name.clone());
            match self.format {
                Format::Jsonl => {
                    self.out.write_all(jsonl::line(&whole)?.as_bytes()).context(self.name.clone())?;
                    wrote = true;
                }
                Format::Perfetto => self.all.push(whole),
            }
        }
        if wrote {
            self.out.flush().context(self.name.clone())?;
        }
        Ok(())
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        if self.format == Format::Perfetto {
            perfetto::write(&mut self.out, &self.all, &self.programs).context(self.name.clone())?;
        }
        self.out.flush().context(self.name.clone())?;
        let lost: u64 = self.lost.values().sum();
        if lost > 0 {
            let written = self.written;
            output::note(&format!("spinio: {written} requests traced; {lost} records came too fast and were lost\n"));
        } else if self.written == 0 {
            output::note("spinio: no device requests\n");
        }
        Ok(())
    }
}
