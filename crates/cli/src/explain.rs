//! `spinio explain`: what a `pread`, or with `--write` a `pwrite`, of a range would do now, drawn.
//!
//! ```text
//!   0                                                     8 MiB
//!   pages  ████████████░░░░░░░░░░▒▒▒▒▒▒▓▓▓▓██████
//!   route  ccccccccccccddddddddddddddddccccmmmmmm
//!
//!   offset   length   route   predicted   why this route [1]
//!   [1] a faster route was refused: ...
//! ```
//!
//! The result is that of the code that serves a read, for this process, at this moment: for a program of another user,
//! or for the same program later, it may differ. Nothing is read of a file that the user owns or may write to.
//!
//! Whether another process pins the file is taken from /proc/locks and from that process's counters (`pin_holders.rs`).
//!
//! Known flaw: the Linux kernel reports no residency of a file owned by another user, so a byte every 64 KiB is read
//! with RWF_NOWAIT, and for each that is absent the kernel reads its page in. The second time such a file looks more
//! cached than it is.

use std::fmt::Write;
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use anyhow::Context;
use clap::Args;
use comfy_table::Cell;
use serde_json::{Value, json};
use spinio_io::{Explanation, runtime};
use spinio_plan::{Reason, Residency, Segment};
use spinio_sys::linux;

use crate::color::{OutputStyle, TextRole};
use crate::device::{self, DeviceName};
use crate::exit::Exit;
use crate::input::Input;
use crate::pin_holders::{self, Holder};
use crate::progress::Spinner;
use crate::{block_stack, format, output, range_strip, renamed_keys, table};

/// Rows of the table; further ones are only counted. `--all` shows every one.
const ROWS: usize = 40;

/// What `spinio explain` takes.
#[derive(Debug, Args)]
pub struct Explain {
    #[command(flatten)]
    input: Input,
    /// The device it would be read into: cuda:0, p2pmem:0, emulated [default: a CUDA GPU if there is one]
    #[arg(long)]
    device: Option<DeviceName>,
    /// Explain a pwrite out of the device instead of a pread into it
    #[arg(long)]
    write: bool,
    /// With --write: the file is opened with O_DSYNC
    #[arg(long, requires = "write")]
    sync: bool,
    /// With --write: the file is opened with O_DIRECT
    #[arg(long, requires = "write")]
    direct: bool,
    /// List every segment
    #[arg(long)]
    all: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs it.
pub fn run(explain: &Explain) -> anyhow::Result<Exit> {
    let opened = if explain.write { explain.input.open_for_write_range()? } else { explain.input.open()? };
    let name = explain.input.path().display().to_string();
    let device = explain.device.unwrap_or_else(device::preferred);
    let wait = Spinner::new("Querying what is cached");
    let buffer = device::probe_buffer(device)?;
    let fd = opened.file.as_raw_fd();
    let explanation = if explain.write {
        // Never written to; the flags are what matters.
        let flags = if explain.sync { linux::O_DSYNC } else { 0 } | if explain.direct { linux::O_DIRECT } else { 0 };
        let again = OpenOptions::new().read(true).custom_flags(flags as i32).open(explain.input.path());
        let again = again.with_context(|| format!("Cannot open {name} with these flags"))?;
        runtime().explain_write(again.as_raw_fd(), opened.offset, opened.len, buffer)
    } else {
        runtime().explain(fd, opened.offset, opened.len, buffer)
    };
    let explanation = explanation.map_err(|e| e.with_path(&name))?;
    drop(wait);
    let holders = pin_holders::holders_of(&opened.file);
    let text = match explain.json {
        true => format!("{:#}\n", json_of(&name, device, &explanation, &holders)),
        false => {
            let rows = if explain.all { usize::MAX } else { ROWS };
            let text = render(&OutputStyle::stdout(), &name, (device, explain.write), &explanation, rows);
            text + &holders_text(&holders, explain.write)
        }
    };
    output::print(&text)?;
    Ok(Exit::Ok)
}

/// Predicted nanoseconds of a segment, if any.
fn nanos(explanation: &Explanation, segment: usize) -> Option<f64> {
    explanation.prediction.segments.get(segment).copied()
}

/// The consequences if another process pins the file.
fn holders_text(holders: &[Holder], write: bool) -> String {
    let mut s = String::new();
    for holder in holders {
        let Holder { pid, name } = holder;
        let _ = match write {
            true => writeln!(
                s,
                "\nPinned by {name} ({pid}): a process that opens it for writing waits until it is unpinned"
            ),
            false => writeln!(
                s,
                "\nPinned by {name} ({pid}): large reads of that process come out of registered pages (dma), not as above"
            ),
        };
    }
    s
}

fn json_of(name: &str, device: DeviceName, explanation: &Explanation, holders: &[Holder]) -> Value {
    let mut at = explanation.offset;
    let extents: Vec<Value> = explanation
        .extents
        .iter()
        .map(|e| {
            let value = json!({ "offset": at, "length": e.len, "residency": residency_name(e.residency) });
            at += e.len;
            value
        })
        .collect();
    let segment = |(i, s): (usize, &Segment)| {
        json!({
            "offset": explanation.offset + s.offset,
            "length": s.len,
            "route": s.route.name(),
            "reason": s.reason.text(),
            "refused": s.refused.map(|r| r.text()),
            "predicted_ns": nanos(explanation, i),
        })
    };
    let mut value = json!({
        "file": name,
        "device": device.to_string(),
        "offset": explanation.offset,
        "length": explanation.len,
        "residency_source": explanation.residency_source,
        "model": explanation.model,
        "predicted_ns": explanation.prediction.total,
        "extents": extents,
        "segments": explanation.schedule.segments.iter().enumerate().map(segment).collect::<Vec<_>>(),
        "storage": block_stack::json(&explanation.storage),
        "advice": explanation.advice,
        "pinned_by": holders.iter().map(|h| json!({ "pid": h.pid, "name": h.name })).collect::<Vec<_>>(),
    });
    renamed_keys::add_old_keys(&mut value, &[("held_by", "pinned_by"), ("residency_asked", "residency_source")]);
    value
}

fn residency_name(residency: Residency) -> &'static str {
    match residency {
        Residency::Absent => "absent",
        Residency::Clean => "clean",
        Residency::Dirty => "dirty",
        Residency::Unknown => "unknown",
    }
}

fn render(
    paint: &OutputStyle,
    name: &str,
    (device, write): (DeviceName, bool),
    explanation: &Explanation,
    rows: usize,
) -> String {
    let mut s = String::new();
    let _ = writeln!(
        s,
        "{} {} of {} at {} of {name} {} {device}",
        paint.text(TextRole::Head, "one"),
        if write { "pwrite" } else { "pread" },
        format::bytes(explanation.len),
        explanation.offset,
        if write { "out of" } else { "into" },
    );
    if explanation.len == 0 {
        s += if write {
            "a write of nothing\n"
        } else {
            "nothing is there to read: the range is at the end of the file\n"
        };
        return s;
    }
    draw(&mut s, paint, explanation);
    let _ = writeln!(s, "\n{}", table::text(&segments(paint, explanation, rows)));
    for (i, reason) in refusals(explanation).into_iter().enumerate() {
        let _ = writeln!(s, "[{}] a faster route was refused: {reason}", i + 1);
    }
    let hidden = explanation.schedule.segments.len().saturating_sub(rows);
    if hidden > 0 {
        let _ = writeln!(s, "... and {hidden} segments more: --all lists them");
    }
    total(&mut s, explanation);
    let _ = writeln!(
        s,
        "\n{}\n{}",
        paint.text(TextRole::Head, "What is under it"),
        block_stack::tree_text(&explanation.storage, 2)
    );
    if !explanation.advice.is_empty() {
        let _ = writeln!(s, "\n{}", paint.text(TextRole::Head, "What would make it faster"));
        for advice in &explanation.advice {
            let _ = writeln!(s, "  {advice}");
        }
    }
    s
}

fn draw(s: &mut String, paint: &OutputStyle, explanation: &Explanation) {
    let columns = paint.width.saturating_sub(8).clamp(20, 160);
    let (from, to) = (format::bytes(explanation.offset), format::bytes(explanation.offset + explanation.len));
    let gap = columns.saturating_sub(from.chars().count() + to.chars().count());
    let _ = writeln!(s, "\n       {from}{:gap$}{to}", "");
    let _ = writeln!(s, "pages  {}", range_strip::residency(paint, &explanation.extents, columns));
    let _ = writeln!(s, "route  {}", range_strip::schedule(paint, &explanation.schedule, columns));
    let _ = writeln!(s, "\n       {}", range_strip::residency_legend(paint, &explanation.extents));
    let _ = writeln!(s, "       {}", range_strip::schedule_legend(paint, &explanation.schedule));
    let _ = writeln!(
        s,
        "       {}",
        paint.text(TextRole::Dim, &format!("residency was queried by {}", explanation.residency_source))
    );
}

/// Reasons for which a faster route was refused, each once; listed below the table by number.
fn refusals(explanation: &Explanation) -> Vec<Reason> {
    let mut all = Vec::new();
    for reason in explanation.schedule.segments.iter().filter_map(|s| s.refused) {
        if !all.contains(&reason) {
            all.push(reason);
        }
    }
    all
}

fn segments(paint: &OutputStyle, explanation: &Explanation, rows: usize) -> comfy_table::Table {
    let refused = refusals(explanation);
    let note = |reason| refused.iter().position(|r| *r == reason).map_or_else(String::new, |i| format!(" [{}]", i + 1));
    let mut table = table::new(paint, &["offset", "length", "route", "predicted", "why this route"]);
    for (i, segment) in explanation.schedule.segments.iter().enumerate().take(rows) {
        table.add_row(vec![
            Cell::new(explanation.offset + segment.offset),
            Cell::new(format::bytes(segment.len)),
            table::route(segment.route),
            Cell::new(nanos(explanation, i).map_or_else(|| "-".to_owned(), format::time)),
            Cell::new(format!("{}{}", segment.reason, segment.refused.map_or_else(String::new, note))),
        ]);
    }
    table::align_columns(&mut table, &[0, 1, 3]);
    table
}

fn total(s: &mut String, explanation: &Explanation) {
    let p = &explanation.prediction;
    if p.total <= 0.0 {
        let _ = writeln!(s, "no time is predicted for this call");
        return;
    }
    let _ = writeln!(
        s,
        "predicted {} ({} GB/s), each side's start included: {} from storage, {} from the page cache. Cost model: {}",
        format::time(p.total),
        format::gbps(explanation.len, p.total / 1e9),
        format::time(p.storage),
        format::time(p.cache),
        explanation.model
    );
}

#[cfg(test)]
mod tests {
    use spinio_plan::{Extent, Prediction, Route, Schedule};

    use super::*;

    const PLAIN: OutputStyle = OutputStyle { colour: false, width: 100 };

    fn device() -> DeviceName {
        "emulated".parse().unwrap()
    }

    fn sample_explanation(segments: usize) -> Explanation {
        let len = 1 << 20;
        let segment = |i: usize| Segment {
            offset: i as u64 * len,
            len,
            route: [Route::Copy, Route::Direct][i % 2],
            reason: [Reason::Cached, Reason::Absent][i % 2],
            refused: (i == 1).then_some(Reason::NoP2pMapping),
        };
        let extent = |i: usize| Extent { len, residency: [Residency::Clean, Residency::Absent][i % 2] };
        let mut schedule = Schedule::default();
        schedule.segments = (0..segments).map(segment).collect();
        Explanation {
            offset: 4096,
            len: len * segments as u64,
            residency_source: "cachestat",
            extents: (0..segments).map(extent).collect(),
            schedule,
            prediction: Prediction {
                segments: (0..segments).map(|i| 1000.0 * (i + 1) as f64).collect(),
                storage: 2000.0,
                cache: 1000.0,
                total: 2000.0,
            },
            model: "nvme".to_owned(),
            storage: std::sync::Arc::default(),
            advice: vec!["read it ahead".to_owned()],
        }
    }

    #[test]
    fn shows_strips_table_and_advice() {
        let text = render(&PLAIN, "/data/f", (device(), false), &sample_explanation(2), 40);
        assert!(text.contains("pread of 2 MiB at 4096 of /data/f into emulated:0"), "{text}");
        let line = |start: &str| text.lines().find(|l| l.starts_with(start)).unwrap().to_owned();
        assert_eq!(line("pages").matches('█').count(), line("pages").matches('░').count());
        assert_eq!(line("route").matches('c').count(), line("route").matches('d').count());
        let row = text.lines().find(|l| l.contains("direct ") && l.contains("2.0 us")).unwrap();
        assert!(row.contains("1052672") && row.trim_end().ends_with("not in the page cache [1]"), "{text}");
        let refused = Reason::NoP2pMapping.text();
        assert_eq!(text.matches(refused).count(), 1, "{text}");
        assert!(text.contains(&format!("[1] a faster route was refused: {refused}")), "{text}");
        assert!(text.contains("predicted 2.0 us") && text.contains("read it ahead"), "{text}");
    }

    #[test]
    fn long_table_is_truncated_with_note() {
        let text = render(&PLAIN, "f", (device(), false), &sample_explanation(100), 40);
        assert!(text.contains("... and 60 segments more"));
        let all = render(&PLAIN, "f", (device(), false), &sample_explanation(100), usize::MAX);
        assert!(!all.contains("segments more") && all.lines().count() > 100);
    }

    #[test]
    fn empty_range_is_explained() {
        let mut none = sample_explanation(0);
        none.len = 0;
        assert!(render(&PLAIN, "f", (device(), false), &none, 40).contains("nothing is there to read"));
    }

    #[test]
    fn json_offsets_are_file_offsets() {
        let value = json_of("f", device(), &sample_explanation(2), &[]);
        assert_eq!(value["extents"][1]["offset"], 4096 + (1 << 20));
        assert_eq!(value["segments"][1]["offset"], 4096 + (1 << 20));
        assert_eq!(value["segments"][1]["route"], "direct");
        assert_eq!(value["segments"][0]["refused"], Value::Null);
        assert_eq!(value["predicted_ns"], 2000.0);
    }

    #[test]
    fn lines_fit_terminal_width() {
        for width in [40, 60, 100, 200] {
            let paint = OutputStyle { colour: false, width };
            let text = render(&paint, "f", (device(), false), &sample_explanation(3), 40);
            for line in text.lines().filter(|l| l.starts_with("pages") || l.starts_with("route")) {
                assert!(line.chars().count() <= width, "{width}: {line}");
            }
        }
    }
}
