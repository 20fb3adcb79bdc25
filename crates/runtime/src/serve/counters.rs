//! The counters, as JSON. Keys may be added; a client ignores the ones that it does not know.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use serde_json::{Map, Value, json};
use spinio_io::runtime;
use spinio_io::stats::{Direction, Gauge};

use crate::Report;

pub(super) unsafe extern "C" fn counters(report: Report) {
    let text = all().to_string();
    // SAFETY: the report is the caller's.
    unsafe { report.send(0, &text, None) }
}

fn all() -> Value {
    let snapshot = runtime().stats();
    let mut counters = Map::new();
    for direction in Direction::ALL {
        let calls = snapshot.calls(direction);
        let one = json!({
            "calls": calls.calls,
            "failed": calls.failed,
            "bytes": calls.bytes,
            "nanoseconds": calls.nanos,
            "p50_nanoseconds": calls.latency.quantile(0.5),
            "p99_nanoseconds": calls.latency.quantile(0.99),
        });
        counters.insert(direction.name().to_owned(), one);
    }
    let route = |line: &spinio_io::stats::RouteRow| {
        json!({
            "direction": line.direction.name(),
            "route": line.route.name(),
            "reason": line.reason.text(),
            "pieces": line.pieces,
            "bytes": line.bytes,
            "nanoseconds": line.nanos,
            "p50_nanoseconds": line.latency.quantile(0.5),
            "p99_nanoseconds": line.latency.quantile(0.99),
        })
    };
    counters.insert("routes".to_owned(), snapshot.rows.iter().map(route).collect());
    let refused = snapshot.refusals.iter();
    let refused = refused.map(|line| json!({ "reason": line.reason.text(), "times": line.count, "bytes": line.bytes }));
    counters.insert("refused".to_owned(), refused.collect());
    let gauges = Gauge::ALL.iter().map(|gauge| (gauge.key().to_owned(), json!(snapshot.gauge(*gauge))));
    counters.insert("gauges".to_owned(), Value::Object(gauges.collect()));
    // The same under its earlier names, for one release.
    let old = Gauge::ALL.iter().map(|gauge| (old_gauge_name(*gauge).to_owned(), json!(snapshot.gauge(*gauge))));
    counters.insert("kept".to_owned(), Value::Object(old.collect()));
    Value::Object(counters)
}

fn old_gauge_name(gauge: Gauge) -> &'static str {
    match gauge {
        Gauge::Pinned => "pinned",
        Gauge::BounceBytes => "staging",
        Gauge::CachedFileStates => "kept files",
        Gauge::PinnedFiles => "held files",
        Gauge::PinnedFileBytes => "held",
        Gauge::ReadaheadPages => "read-ahead set",
    }
}
