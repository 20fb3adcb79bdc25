//! Counters as JSON.

use std::path::Path;

use serde_json::{Value, json};
use spinio_io::stats::{Calls, Direction, Gauge, Histogram, Snapshot};

use crate::processes::CounterFile;
use crate::renamed_keys;

/// One process.
pub fn of(counters: &CounterFile) -> Value {
    of_snapshot(&counters.path, &counters.snapshot, None)
}

/// Counters of one process, those of an interval if `seconds` is given.
pub fn of_snapshot(path: &Path, s: &Snapshot, seconds: Option<f64>) -> Value {
    let calls: serde_json::Map<_, _> =
        Direction::ALL.iter().map(|d| (d.name().to_owned(), calls(s.calls(*d)))).collect();
    let routes: Vec<Value> = s
        .rows
        .iter()
        .map(|l| {
            let mut row = json!({
                "direction": l.direction.name(),
                "route": l.route.name(),
                "why": l.reason.text(),
                "pieces": l.pieces,
                "bytes": l.bytes,
                "nanoseconds": l.nanos,
                "latency_ns": latency(&l.latency),
            });
            renamed_keys::add_reason(&mut row, l.reason);
            row
        })
        .collect();
    let refused: Vec<Value> = s
        .refusals
        .iter()
        .map(|r| {
            let mut row = json!({"why": r.reason.text(), "times": r.count, "bytes": r.bytes});
            renamed_keys::add_reason(&mut row, r.reason);
            row
        })
        .collect();
    let pages: serde_json::Map<_, _> =
        renamed_keys::RESIDENCIES.iter().map(|(r, name)| ((*name).to_owned(), s.pages(*r).into())).collect();
    let mut gauges = json!({});
    for g in Gauge::ALL {
        let (now, max) = s.gauge(g);
        gauges[g.key()] = json!({"now": now, "max": max});
        renamed_keys::add_old_keys(&mut gauges[g.key()], &[("most", "max")]);
        if let Some(old) = renamed_keys::gauge_old(g) {
            renamed_keys::add_old_keys(&mut gauges, &[(old, g.key())]);
        }
    }
    let mut value = json!({
        "process": s.process.pid,
        "program": s.process.name,
        "began_unix_ns": s.process.started_wall,
        "seconds": seconds,
        "file": path.to_string_lossy(),
        "calls": calls,
        "routes": routes,
        "refused": refused,
        "pages": pages,
        "gauges": gauges,
        "overflow": s.overflow,
    });
    renamed_keys::add_old_keys(&mut value, &[("unplaced", "overflow")]);
    value
}

fn calls(c: &Calls) -> Value {
    json!({
        "calls": c.calls,
        "failed": c.failed,
        "bytes": c.bytes,
        "nanoseconds": c.nanos,
        "latency_ns": latency(&c.latency),
    })
}

/// Quantiles, and the nonempty buckets: each with its upper latency bound; null for the slowest.
fn latency(h: &Histogram) -> Value {
    let buckets: Vec<Value> = h.nonempty().map(|(below, n)| json!([below, n])).collect();
    json!({
        "p50": h.quantile(0.5),
        "p90": h.quantile(0.9),
        "p99": h.quantile(0.99),
        "p999": h.quantile(0.999),
        "buckets": buckets,
    })
}

/// As `--json` prints it.
pub fn text(value: &impl serde::Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// On one line, for a stream of objects.
pub fn line(value: &impl serde::Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string(value)? + "\n")
}
