//! The table and the JSON of a calibration.

use std::fmt::Write;
use std::path::Path;

use comfy_table::Cell;
use serde_json::{Value, json};

use super::CalibrationRun;
use crate::color::{OutputStyle, TextRole};
use crate::{format, renamed_keys, table};

/// A fit whose mean relative error is larger than this is called poor: the same factor decides whether `--check` calls
/// a model fitting.
const POOR_FIT: f64 = 0.5;

/// GB/s from a time per byte.
fn rate(per_byte: f64) -> String {
    format::gbps(1 << 30, per_byte * f64::from(1u32 << 30) / 1e9)
}

/// For users.
pub fn render(paint: &OutputStyle, found: &CalibrationRun, stored_path: Option<&Path>) -> String {
    let c = &found.calibration;
    let mut s = String::new();
    let mut line = |label: &str, what: &str| {
        let _ = writeln!(s, "{} {what}", paint.text(TextRole::Head, &format!("{label:<8}")));
    };
    line("storage", &format!("{}, {}", c.storage, c.file_system));
    line("device", &c.device);
    s.push('\n');
    let head =
        ["route", "C", "cutoff", "GB/s", "R2", "off by", "in flight:", "latency", "a command", "GB/s", "R2", "off by"];
    let mut table = table::new(paint, &head);
    for m in &c.routes {
        let (one, many) = (&m.cost.value, &m.queue.value);
        let percent = |error: f64| format!("{:.0} %", error * 100.0);
        table.add_row(vec![
            table::route(m.route),
            Cell::new(format::time(one.fixed())),
            Cell::new(format::bytes(one.cutoff())),
            Cell::new(rate(one.per_byte())),
            Cell::new(format!("{:.4}", m.cost.r2)),
            Cell::new(percent(m.cost.error)),
            Cell::new(""),
            Cell::new(format::time(many.latency)),
            Cell::new(format::time(many.per_command)),
            Cell::new(rate(many.per_byte)),
            Cell::new(format!("{:.4}", m.queue.r2)),
            Cell::new(percent(m.queue.error)),
        ]);
    }
    table::align_columns(&mut table, &[1, 2, 3, 4, 5, 7, 8, 9, 10, 11]);
    let _ = writeln!(s, "{}\n", table::text(&table));
    for (route, reason) in &found.unavailable {
        let _ = writeln!(s, "{route} was not measured: {reason}");
    }
    if let Some(per_byte) = c.writeback {
        let _ = writeln!(s, "dirty pages are written back at {} GB/s", rate(per_byte));
    }
    let poor: Vec<_> =
        c.routes.iter().filter(|m| m.cost.error.max(m.queue.error) > POOR_FIT).map(|m| m.route.name()).collect();
    if !poor.is_empty() {
        let _ = writeln!(
            s,
            "{} {}: the fit is off by more than {:.0} % on average, as with other work on the machine; measure again on a quieter \
             machine, or plans will be made with this",
            paint.text(TextRole::Bad, "!"),
            poor.join(", "),
            POOR_FIT * 100.0
        );
    }
    let _ = match stored_path {
        Some(path) => writeln!(s, "stored in {}: programs that start from now on use it", path.display()),
        None => writeln!(s, "not stored"),
    };
    s
}

/// For programs.
pub fn json(found: &CalibrationRun, stored_path: Option<&Path>) -> Value {
    let c = &found.calibration;
    let routes: Vec<_> = c
        .routes
        .iter()
        .zip(&found.times)
        .map(|(m, times)| {
            let points: Vec<_> = times
                .single
                .iter()
                .chain(&times.queued)
                .map(|t| json!({ "commands": t.commands, "bytes": t.bytes, "median_ns": t.median, "deviation_ns": t.deviation }))
                .collect();
            let mut row = json!({
                "route": m.route.name(),
                "cost": {
                    "fixed_ns": m.cost.value.fixed(),
                    "cutoff": m.cost.value.cutoff(),
                    "ns_per_byte": m.cost.value.per_byte(),
                    "r2": m.cost.r2,
                    "mean_error": m.cost.error,
                },
                "queue": {
                    "latency_ns": m.queue.value.latency,
                    "command_ns": m.queue.value.per_command,
                    "ns_per_byte": m.queue.value.per_byte,
                    "r2": m.queue.r2,
                    "mean_error": m.queue.error,
                },
                "points": points,
            });
            renamed_keys::add_old_keys(&mut row, &[("flight", "queue")]);
            row
        })
        .collect();
    let closed: Vec<_> =
        found.unavailable.iter().map(|(route, why)| json!({ "route": route.name(), "why": why.text() })).collect();
    let mut value = json!({
        "storage": c.storage,
        "file_system": c.file_system,
        "device": c.device,
        "threads": c.threads,
        "writeback_ns_per_byte": c.writeback,
        "routes": routes,
        "not_measured": closed,
        "stored_at": stored_path.map(|p| p.display().to_string()),
    });
    renamed_keys::add_old_keys(&mut value, &[("kept", "stored_at")]);
    value
}
