//! `spinio run`: a program under SPIN.
//!
//! ```text
//!   run CMD            LD_PRELOAD=libspinio.so, then exec: no process of SPIN's remains
//!   run --stats CMD    the same in a child; signals go to it, and after it ended the table
//!                      of its device reads goes to standard error
//! ```
//!
//! The exit status is the program's own, 128+n when signal n ended it; 125 to 127 as in env(1) and timeout(1).
//!
//! Known flaw: with `--stats` the program's parent is spinio, so a job control shell stops and continues both, but `$!`
//! is the PID of spinio.

pub mod signals;
mod target;

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use clap::Args;
use spinio_io::settings;
use spinio_io::stats::{Direction, Snapshot};

use crate::color::{OutputStyle, TextRole};
use crate::exit::{self, Exit};
use crate::output;
use crate::stat::report;
use crate::{format, library, table};

/// What `spinio run` takes.
#[derive(Debug, Args)]
pub struct Run {
    /// When the program has ended, print on stderr how its device requests travelled
    #[arg(long)]
    stats: bool,
    /// Set SPINIO_NAME for the program, e.g. `--set threads=8`; docs/settings.md lists them
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = setting)]
    settings: Vec<(String, String)>,
    /// Refuse to run a program that LD_PRELOAD cannot reach (static, setuid, 32-bit), instead of warning
    #[arg(long)]
    strict: bool,
    /// The program and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// `threads=8` or `SPINIO_THREADS=8`, checked as the library itself checks it.
fn setting(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    let upper = name.to_uppercase();
    let full = if upper.starts_with("SPINIO_") { upper } else { format!("SPINIO_{upper}") };
    let Some(row) = settings::row(&full) else {
        let known: Vec<&str> = settings::TABLE.iter().map(|row| row.name).collect();
        return Err(format!("there is no setting {full}; there are {}", known.join(", ")));
    };
    let complaints = spinio_io::check_settings(|name| (name == full).then(|| value.to_owned()));
    match complaints.is_empty() {
        true => Ok((full, value.to_owned())),
        false => Err(format!("{full} takes {}", row.values)),
    }
}

/// The variables that `--set` adds to the environment, under the new names, and the old names that it removes. If both
/// the new and the old name of a setting are given, the new one is used.
fn environment(settings: &[(String, String)]) -> (Vec<(&str, &str)>, Vec<&'static str>) {
    let (mut set, mut removed) = (Vec::new(), Vec::new());
    for (given, value) in settings {
        let row = settings::row(given);
        let name = row.map_or(given.as_str(), |row| row.name);
        if let Some((_, new)) = settings.iter().rev().find(|(other, _)| other != given && other == name) {
            if new != value {
                output::note(&format!("spinio: {given}={value} is ignored: {name}={new} is set, its new name\n"));
            }
            continue;
        }
        set.push((name, value.as_str()));
        removed.extend(row.and_then(|row| row.old));
    }
    (set, removed)
}

/// Runs it; returns the status to end with.
pub fn run(run: &Run) -> anyhow::Result<u8> {
    let (mut command, name) = prepare(&run.command, &run.settings, run.strict)?;
    if run.stats { with_stats(run, command, &name) } else { Err(cannot_start(&name, &command.exec())) }
}

/// The program under the library, ready to start, and its name for messages.
pub fn prepare(
    command: &[OsString],
    settings: &[(String, String)],
    strict: bool,
) -> anyhow::Result<(Command, OsString)> {
    let [name, args @ ..] = command else { return Err(exit::error(Exit::Usage, "Name a program")) };
    let program = target::resolve(name).map_err(|e| cannot_start(name, &e))?;
    let finding = target::find_obstacle(&program);
    if let Some(finding) = &finding {
        if strict {
            return Err(exit::error(Exit::Refused, format!("{finding}. Refused, because of --strict")));
        }
        output::note(&format!("spinio: {finding}. It runs without SPIN\n"));
    }
    let mut command = Command::new(&program);
    command.arg0(name).args(args);
    let (set, removed) = environment(settings);
    for old in removed {
        command.env_remove(old);
    }
    command.envs(set);
    if !finding.is_some_and(|f| f.is_harmful()) {
        let library = library::find().map_err(as_refused)?;
        command.env("LD_PRELOAD", library::preload(&library, std::env::var_os("LD_PRELOAD").as_deref())?);
    }
    Ok((command, name.clone()))
}

/// `run` has its own codes, so that they are not mistaken for the program's.
fn as_refused(error: anyhow::Error) -> anyhow::Error {
    exit::error(Exit::Refused, format!("{error:#}"))
}

/// The error of a program that did not start.
pub fn cannot_start(name: &OsStr, error: &io::Error) -> anyhow::Error {
    let exit = if error.kind() == io::ErrorKind::NotFound { Exit::NotFound } else { Exit::CannotStart };
    exit::error(exit, format!("Cannot run {}: {error}", name.to_string_lossy()))
}

fn with_stats(run: &Run, mut command: Command, name: &OsStr) -> anyhow::Result<u8> {
    let counters = CounterSource::new(run)?;
    if let Some(path) = &counters.temp_dir {
        command.env("SPINIO_STATS", dir_setting(path.path()));
    }
    let caught = signals::catch();
    let mut child = command.spawn().map_err(|e| cannot_start(name, &e))?;
    let forward = signals::forward_to(child.id(), caught);
    wait_until_ended(child.id());
    drop(forward);
    let status = child.wait().with_context(|| format!("Cannot wait for {}", name.to_string_lossy()))?;
    let paint = OutputStyle::stderr();
    match (counters.read_counters(), &counters.temp_dir) {
        (None, None) => output::note(&no_counters_text(&paint, &counters.path)),
        (counted, _) => output::note(&summary(&paint, counted.as_ref())),
    }
    Ok(match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128u8.wrapping_add(signal as u8),
        (None, None) => Exit::Failed as u8,
    })
}

/// Waits without reaping: until then the PID is not reused, so no forwarded signal can reach another process.
fn wait_until_ended(child: u32) {
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
    let Some(pid) = Pid::from_raw(child as i32) else { return };
    while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {}
}

/// The path of the counters: the user's own file, if one was set, else a temporary one.
struct CounterSource {
    temp_dir: Option<tempfile::TempDir>,
    path: PathBuf,
    before: Option<Snapshot>,
}

impl CounterSource {
    fn new(run: &Run) -> anyhow::Result<CounterSource> {
        let path = run.settings.iter().rev().find(|(name, _)| name == "SPINIO_STATS").map(|(_, v)| OsString::from(v));
        let path = path.or_else(|| std::env::var_os("SPINIO_STATS")).filter(|v| !v.is_empty());
        match path {
            Some(path) => {
                let path = PathBuf::from(path);
                Ok(CounterSource { temp_dir: None, before: read(&path), path })
            }
            None => {
                let ours = counters_dir()?;
                let path = ours.path().to_owned();
                Ok(CounterSource { temp_dir: Some(ours), path, before: None })
            }
        }
    }

    fn read_counters(&self) -> Option<Snapshot> {
        if self.temp_dir.is_some() {
            // A file for each process: the program, its children, and the programs that they have executed.
            let files = std::fs::read_dir(&self.path).ok()?.flatten();
            return files.filter_map(|entry| read(&entry.path())).reduce(|mut sum, s| {
                sum.add(&s);
                sum
            });
        }
        let now = read(&self.path)?;
        Some(match &self.before {
            Some(before) => now.since(before),
            None => now,
        })
    }
}

fn read(path: &Path) -> Option<Snapshot> {
    crate::processes::CounterFile::open(path).ok().map(|c| c.snapshot)
}

/// A directory for the counters of a program and its children, in memory if possible.
pub fn counters_dir() -> anyhow::Result<tempfile::TempDir> {
    let made = |place: &Path| tempfile::Builder::new().prefix("spinio-stats-").tempdir_in(place);
    made(Path::new("/dev/shm"))
        .or_else(|_| made(&std::env::temp_dir()))
        .map_err(|e| exit::error(Exit::Refused, format!("Cannot make a directory for the counters: {e}")))
}

/// The directory in the format of SPINIO_STATS.
pub fn dir_setting(path: &Path) -> OsString {
    let mut text = path.as_os_str().to_owned();
    text.push("/");
    text
}

/// The message if the user's own SPINIO_STATS names a path without counters, whatever the cause.
fn no_counters_text(paint: &OutputStyle, place: &Path) -> String {
    let head = paint.text(TextRole::Head, "spinio:");
    let named = place.display();
    if place.as_os_str() == "off" {
        format!("{head} nothing was counted: SPINIO_STATS is off\n")
    } else if place.is_dir() {
        format!(
            "{head} SPINIO_STATS is the directory {named}: `spinio stat --file` reads what a process has counted there\n"
        )
    } else {
        format!(
            "{head} {named}, which SPINIO_STATS names, has no counters: no device requests, or no room for them there\n"
        )
    }
}

/// The table that `--stats` prints.
fn summary(paint: &OutputStyle, snapshot: Option<&Snapshot>) -> String {
    let head = paint.text(TextRole::Head, "spinio:");
    let Some(s) = snapshot.filter(|s| !s.is_empty()) else {
        return format!(
            "{head} no device requests: the program passed no device memory to a call that reads or writes files\n"
        );
    };
    let mut text = String::new();
    for direction in Direction::ALL {
        let c = s.calls(direction);
        if c.calls > 0 {
            text += &format!(
                "{head} {} device {}{}, {}, {} inside them, {} GB/s\n",
                c.calls,
                direction.name(),
                match (c.calls, direction) {
                    (1, _) => "",
                    (_, Direction::Batch) => "es",
                    _ => "s",
                },
                format::bytes(c.bytes),
                format::time(c.nanos as f64),
                format::gbps(c.bytes, c.nanos as f64 / 1e9),
            );
        }
    }
    text + &table::text(&table::of_snapshot(paint, s)) + "\n" + &report::details(paint, s)
}

#[cfg(test)]
mod tests {
    use spinio_io::stats::{Calls, Histogram, RouteRow};
    use spinio_plan::{Reason, Route};

    use super::*;

    const PLAIN: OutputStyle = OutputStyle { colour: false, width: 100 };

    #[test]
    fn settings_are_validated_before_start() {
        assert_eq!(setting("threads=8"), Ok(("SPINIO_THREADS".into(), "8".into())));
        assert_eq!(setting("SPINIO_ORDERING=strict"), Ok(("SPINIO_ORDERING".into(), "strict".into())));
        assert!(setting("threads").is_err());
        assert!(setting("warp=9").unwrap_err().contains("SPINIO_THREADS"));
        assert!(setting("threads=many").unwrap_err().contains("1 to 64"));
    }

    #[test]
    fn program_without_device_requests_is_reported() {
        assert!(summary(&PLAIN, None).contains("no device requests"));
        assert!(summary(&PLAIN, Some(&Snapshot::default())).contains("no device requests"));
    }

    #[test]
    fn summary_lists_routes_and_reasons() {
        let line = RouteRow {
            direction: Direction::Read,
            route: Route::Direct,
            reason: Reason::Absent,
            pieces: 3,
            bytes: 3 << 20,
            nanos: 5,
            latency: Histogram::default(),
        };
        let mut s = Snapshot { rows: vec![line], ..Snapshot::default() };
        s.read = Calls { calls: 1, bytes: 3 << 20, nanos: 1_000_000, ..Calls::default() };
        let text = summary(&PLAIN, Some(&s));
        assert!(text.contains("1 device read, 3 MiB, 1.0 ms inside them, 3.15 GB/s"), "{text}");
        let row = text.lines().find(|l| l.contains("direct")).unwrap();
        assert!(row.contains("100 %") && row.contains("not in the page cache"), "{text}");
    }
}
