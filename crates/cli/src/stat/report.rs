//! Counters as tables.

use comfy_table::{Cell, Table};
use spinio_io::stats::{Calls, Direction, Gauge, Histogram, Snapshot};

use crate::color::{OutputStyle, TextRole};
use crate::processes::ProcessList;
use crate::renamed_keys::RESIDENCIES;
use crate::{format, table};

/// Everything about one process. `seconds`: the interval of the counters; with it rates are printed.
pub fn of_process(paint: &OutputStyle, s: &Snapshot, seconds: Option<f64>) -> String {
    let mut text =
        format!("{}{}\n", paint.text(TextRole::Head, &process_title(s)), seconds.map_or(String::new(), interval_text));
    if s.is_empty() {
        return text + "\nno device requests\n";
    }
    text += &format!("\n{}\n", table::text(&calls(paint, s, seconds)));
    text += &format!("\n{}\n", table::text(&table::of_snapshot(paint, s)));
    text + &details(paint, s)
}

/// The lines after the routes: refusals, residency, gauges.
pub fn details(paint: &OutputStyle, s: &Snapshot) -> String {
    let mut text = String::new();
    if !s.refusals.is_empty() {
        text += &format!("\n{}\n", table::text(&refused(paint, s)));
    }
    let seen: Vec<_> = RESIDENCIES.iter().map(|(r, name)| (s.pages(*r), name)).filter(|(n, _)| *n > 0).collect();
    if !seen.is_empty() {
        let seen: Vec<_> = seen.iter().map(|(n, name)| format!("{n} {name}")).collect();
        text += &format!("\npages surveyed: {}\n", seen.join(", "));
    }
    if let Some(gauges) = gauges_text(s) {
        text += &format!("{}held: {gauges}\n", if seen.is_empty() { "\n" } else { "" });
    }
    if s.overflow > 0 {
        text += &format!("{} pieces are in no line: their routes and reasons found no room in the table\n", s.overflow);
    }
    text
}

fn process_title(s: &Snapshot) -> String {
    match s.process.pid {
        0 => "counters of no process yet".to_owned(),
        pid => format!("{} (process {pid})", s.process.name),
    }
}

fn interval_text(seconds: f64) -> String {
    format!(", the last {}", format::time(seconds * 1e9))
}

/// `1.2 us`; `-` for nothing.
pub fn quantile(latency: &Histogram, q: f64) -> String {
    latency.quantile(q).map_or("-".to_owned(), |nanos| format::time(nanos as f64))
}

fn calls(paint: &OutputStyle, s: &Snapshot, seconds: Option<f64>) -> Table {
    let rate = if seconds.is_some() { "GB/s" } else { "GB/s inside" };
    let mut table = table::new(paint, &["calls", "returned", "failed", "bytes", rate, "p50", "p90", "p99", "p99.9"]);
    for direction in Direction::ALL {
        let c: &Calls = s.calls(direction);
        if c.calls == 0 {
            continue;
        }
        table.add_row(vec![
            Cell::new(direction.name()),
            Cell::new(c.calls),
            Cell::new(c.failed),
            Cell::new(format::bytes(c.bytes)),
            Cell::new(format::gbps(c.bytes, seconds.unwrap_or(c.nanos as f64 / 1e9))),
            Cell::new(quantile(&c.latency, 0.5)),
            Cell::new(quantile(&c.latency, 0.9)),
            Cell::new(quantile(&c.latency, 0.99)),
            Cell::new(quantile(&c.latency, 0.999)),
        ]);
    }
    table::align_columns(&mut table, &[1, 2, 3, 4, 5, 6, 7, 8]);
    table
}

fn refused(paint: &OutputStyle, s: &Snapshot) -> Table {
    let mut table = table::new(paint, &["refused", "bytes", "a faster route, because"]);
    for r in &s.refusals {
        table.add_row(vec![Cell::new(r.count), Cell::new(format::bytes(r.bytes)), Cell::new(r.reason)]);
    }
    table::align_columns(&mut table, &[0, 1]);
    table
}

/// `bounce buffers 8 MiB (most 16 MiB), cached file states 3`.
fn gauges_text(s: &Snapshot) -> Option<String> {
    let parts: Vec<String> = Gauge::ALL
        .into_iter()
        .filter(|g| s.gauge(*g).1 > 0)
        .map(|g| {
            let (now, most) = s.gauge(g);
            let show = |n: u64| match g {
                Gauge::Pinned | Gauge::BounceBytes | Gauge::PinnedFileBytes => format::bytes(n),
                Gauge::CachedFileStates | Gauge::PinnedFiles | Gauge::ReadaheadPages => n.to_string(),
            };
            let most = if most > now { format!(" (most {})", show(most)) } else { String::new() };
            format!("{} {}{most}", g.name(), show(now))
        })
        .collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// A line for each process.
pub fn of_all(paint: &OutputStyle, found: &ProcessList) -> String {
    let mut text = String::new();
    if found.processes.is_empty() {
        text += "no process has made a device request under SPIN\n";
    } else {
        let mut table = table::new(
            paint,
            &["process", "reads", "writes", "batches", "bytes", "p50", "p99", "bounce buffers", "program"],
        );
        for s in found.processes.iter().map(|c| &c.snapshot) {
            let latency = all(s);
            table.add_row(vec![
                Cell::new(s.process.pid),
                Cell::new(s.read.calls),
                Cell::new(s.write.calls),
                Cell::new(s.batch.calls),
                Cell::new(format::bytes(total(s))),
                Cell::new(quantile(&latency, 0.5)),
                Cell::new(quantile(&latency, 0.99)),
                Cell::new(format::bytes(s.gauge(Gauge::BounceBytes).0)),
                Cell::new(&s.process.name),
            ]);
        }
        table::align_columns(&mut table, &[0, 1, 2, 3, 4, 5, 6, 7]);
        text += &format!("{}\n", table::text(&table));
    }
    if found.other_versions > 0 {
        let n = found.other_versions;
        let (are, run) = if n == 1 { ("is", "runs") } else { ("are", "run") };
        text += &format!("{n} more {are} not shown: {run} another version of SPIN\n");
    }
    text
}

/// A line for each process: what it did in `seconds`.
pub fn of_rates(paint: &OutputStyle, mut snapshots: Vec<Snapshot>, seconds: f64) -> String {
    snapshots.sort_by_key(|s| s.process.pid);
    let mut table = table::new(paint, &["process", "calls/s", "GB/s", "p50", "p99", "bounce buffers", "program"]);
    for s in &snapshots {
        let latency = all(s);
        let calls: u64 = Direction::ALL.iter().fold(0, |n, d| s.calls(*d).calls.saturating_add(n));
        table.add_row(vec![
            Cell::new(s.process.pid),
            Cell::new(format!("{:.0}", calls as f64 / seconds)),
            Cell::new(format::gbps(total(s), seconds)),
            Cell::new(quantile(&latency, 0.5)),
            Cell::new(quantile(&latency, 0.99)),
            Cell::new(format::bytes(s.gauge(Gauge::BounceBytes).0)),
            Cell::new(&s.process.name),
        ]);
    }
    table::align_columns(&mut table, &[0, 1, 2, 3, 4, 5]);
    format!("{}\n", table::text(&table))
}

/// Bytes of all directions.
pub fn total(s: &Snapshot) -> u64 {
    Direction::ALL.iter().fold(0, |n, d| s.calls(*d).bytes.saturating_add(n))
}

/// Latencies of all directions.
pub fn all(s: &Snapshot) -> Histogram {
    let mut all = s.read.latency.clone();
    all.merge(&s.write.latency);
    all.merge(&s.batch.latency);
    all
}
