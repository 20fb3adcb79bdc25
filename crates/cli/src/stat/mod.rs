//! `spinio stat`: what the processes that use SPIN have done.
//!
//! ```text
//!   stat                 a line for each process
//!   stat PID             calls, routes with their reasons, refusals, residency, gauges
//!        --json          the same as JSON
//!        --watch[=N]     again every second, or N, with the rates of that time
//!        --prometheus    the text format of Prometheus, once or on --listen ADDRESS
//! ```
//!
//! No process is queried: the counters are in files (docs/observing.md).

mod json;
mod listen;
mod prometheus;
pub mod report;

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;

use crate::color::OutputStyle;
use crate::exit::{self, Exit};
use crate::output;
use crate::processes::{self, CounterFile, ProcessList};

/// What `spinio stat` takes.
#[derive(Debug, Args)]
pub struct Stat {
    /// The process to report; without it a line for each that uses SPIN
    #[arg(value_parser = pid)]
    pid: Option<u32>,
    /// Read this file of counters instead, one that SPINIO_STATS named
    #[arg(long, value_name = "FILE", conflicts_with = "pid")]
    file: Option<PathBuf>,
    /// Print JSON: an object for one process, else a list
    #[arg(long)]
    json: bool,
    /// Print again every second, or every SECONDS, what happened since
    // With a space the next argument would be the value: `--watch PID` would take the PID as seconds.
    #[arg(
        long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "1",
        value_parser = seconds
    )]
    watch: Option<Duration>,
    /// Print in the text format of Prometheus
    #[arg(long, conflicts_with_all = ["json", "watch"])]
    prometheus: bool,
    /// Answer `GET /metrics` on this address (127.0.0.1:9464) until stopped
    #[arg(long, value_name = "ADDRESS", requires = "prometheus", value_parser = address)]
    listen: Option<SocketAddr>,
}

/// A PID.
pub fn pid(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("`{text}` is no number of a process"))
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| format!("`{text}` is no address and port: write 127.0.0.1:9464 or [::1]:9464"))
}

/// An interval in seconds.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is no number of seconds"))?;
    match seconds {
        s if (0.01..=86_400.0).contains(&s) => Ok(Duration::from_secs_f64(s)),
        _ => Err("between 0.01 and 86400 seconds".to_owned()),
    }
}

/// Runs it.
pub fn run(stat: &Stat) -> anyhow::Result<Exit> {
    if stat.prometheus {
        return export(stat);
    }
    match stat.watch {
        None => {
            output::print(&once(stat)?)?;
            Ok(Exit::Ok)
        }
        Some(every) => watch(stat, every),
    }
}

/// The one process or file that was selected, if any.
fn one(stat: &Stat) -> anyhow::Result<Option<CounterFile>> {
    match (&stat.file, stat.pid) {
        (Some(path), _) => processes::open_path(path).map(Some),
        (None, Some(pid)) => processes::find(pid).map(Some),
        (None, None) => Ok(None),
    }
}

fn once(stat: &Stat) -> anyhow::Result<String> {
    let paint = OutputStyle::stdout();
    Ok(match one(stat)? {
        Some(one) if stat.json => json::text(&json::of(&one))?,
        Some(one) => report::of_process(&paint, &one.snapshot, None),
        None => {
            let found = processes::list();
            if stat.json {
                json::text(&found.processes.iter().map(json::of).collect::<Vec<_>>())?
            } else {
                report::of_all(&paint, &found)
            }
        }
    })
}

fn watch(stat: &Stat, every: Duration) -> anyhow::Result<Exit> {
    let clear_screen = std::io::stdout().is_terminal();
    let mut one = one(stat)?;
    let mut earlier: Option<(Instant, Vec<CounterFile>)> = None;
    loop {
        let paint = OutputStyle::stdout();
        let now = Instant::now();
        let current = match &mut one {
            Some(one) => {
                if one.refresh().is_err() || (stat.file.is_none() && !one.is_alive()) {
                    output::note("spinio: the process has ended\n");
                    return Ok(Exit::Ok);
                }
                vec![one.try_clone().context("Cannot duplicate the descriptor of the counters")?]
            }
            None => processes::list().processes,
        };
        if let Some((then, before)) = &earlier {
            let seconds = now.duration_since(*then).as_secs_f64();
            let since = |c: &CounterFile| {
                let old = before.iter().find(|b| b.path == c.path && b.snapshot.process == c.snapshot.process);
                old.map_or_else(|| c.snapshot.clone(), |old| c.snapshot.since(&old.snapshot))
            };
            let text = match (&one, stat.json) {
                (Some(_), false) => {
                    current.iter().map(|c| report::of_process(&paint, &since(c), Some(seconds))).collect()
                }
                (None, false) => report::of_rates(&paint, current.iter().map(since).collect(), seconds),
                (_, true) => {
                    let list: Vec<_> =
                        current.iter().map(|c| json::of_snapshot(&c.path, &since(c), Some(seconds))).collect();
                    json::line(&list)?
                }
            };
            output::print(&if clear_screen && !stat.json { format!("\x1b[H\x1b[J{text}") } else { text })?;
        }
        earlier = Some((now, current));
        std::thread::sleep(every);
    }
}

fn export(stat: &Stat) -> anyhow::Result<Exit> {
    let page = |stat: &Stat| -> anyhow::Result<String> {
        let found = match one(stat)? {
            Some(one) => ProcessList { processes: vec![one], other_versions: 0 },
            None => processes::list(),
        };
        prometheus::text(found.processes.into_iter().map(|c| c.snapshot).collect()).context("Cannot encode the metrics")
    };
    match stat.listen {
        None => output::print(&page(stat)?)?,
        // A selected process that has ended gives an empty page and does not end the exporter.
        Some(address) => {
            listen::serve(address, &|| page(stat).or_else(|_| prometheus::text(Vec::new()).map_err(Into::into)))
                .map_err(|e| exit::error(Exit::Failed, format!("Cannot listen on {address}: {e}")))?
        }
    }
    Ok(Exit::Ok)
}
