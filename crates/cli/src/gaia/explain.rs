//! `spinio gaia explain`: where the pages of a file are, and which programs have copies.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use comfy_table::Cell;
use serde_json::json;
use spinio_gaiad::{ExplainedFile, ExplainedRange, Holder, MapKind, RangeState};

use crate::color::{OutputStyle, TextRole};
use crate::exit::{self, Exit};
use crate::{format, input, output, table};

const PAGE: u64 = 4096;

#[derive(Debug, Args)]
pub struct Explain {
    /// A file below a mount of GAIA
    file: PathBuf,
    /// Show at most so many ranges [0: all]
    #[arg(long, value_name = "N", default_value_t = 40)]
    ranges: usize,
    /// Print JSON, with all ranges
    #[arg(long)]
    json: bool,
}

pub fn run(options: &Explain) -> anyhow::Result<Exit> {
    let name = options.file.display();
    let file = input::open(&options.file)?;
    if !file.metadata().with_context(|| format!("Cannot query {name}"))?.is_file() {
        return Err(exit::error(Exit::Failed, format!("{name} is not a file")));
    }
    let explained = spinio_gaiad::explain(&file).with_context(|| format!("Cannot ask the server about {name}"))?;
    let Some(explained) = explained else {
        let hint = "`spinio gaia mount DIR` mounts GAIA over a directory; `spinio gaia status` shows what the daemon of \
                    leased files holds of files without a mount";
        return Err(exit::error(Exit::Failed, format!("{name} is not below a mount of GAIA: {hint}")));
    };
    if options.json {
        output::print(&format!("{:#}\n", as_json(&options.file, &explained)))?;
    } else {
        output::print(&render(&options.file, &explained, options.ranges, &OutputStyle::stdout()))?;
    }
    Ok(Exit::Ok)
}

fn as_json(path: &Path, explained: &ExplainedFile) -> serde_json::Value {
    let range = |range: &ExplainedRange| {
        let RangeState { unwritten, invalidating, current, stale, open } = range.state;
        json!({
            "offset": range.offset, "bytes": range.len, "head": head(unwritten), "invalidating": invalidating,
            "maps_current": current, "maps_stale": stale, "maps_in_epoch": open,
        })
    };
    let map = |holder: &Holder| {
        json!({
            "pid": holder.pid, "user": holder.user, "offset": holder.first * PAGE, "bytes": holder.pages * PAGE,
            "current_bytes": holder.current * PAGE, "stale_bytes": holder.stale * PAGE,
            "epoch_bytes": holder.open * PAGE, "from_other_gpus_bytes": holder.from_peers * PAGE,
            "kind": kind(holder.kind),
        })
    };
    json!({
        "path": path.to_string_lossy(),
        "ranges": explained.ranges.iter().map(range).collect::<Vec<_>>(),
        "maps": explained.holders.iter().map(map).collect::<Vec<_>>(),
    })
}

/// Where the newest released or written bytes are that the server knows of.
fn head(unwritten: bool) -> &'static str {
    if unwritten { "memory" } else { "file" }
}

fn render(path: &Path, explained: &ExplainedFile, most: usize, paint: &OutputStyle) -> String {
    let size: u64 = explained.ranges.iter().map(|range| range.len).sum();
    let mut s = String::new();
    let _ = writeln!(s, "{}", paint.text(TextRole::Head, &path.display().to_string()));
    let unwritten: u64 = explained.ranges.iter().filter(|range| range.state.unwritten).map(|range| range.len).sum();
    let _ = writeln!(s, "  size    {}", format::bytes(size));
    let _ = writeln!(s, "  memory  {} of released bytes that are not in the file yet", format::bytes(unwritten));
    let _ = writeln!(s, "  maps    {}", explained.holders.len());
    if !explained.ranges.is_empty() {
        let shown = if most == 0 { explained.ranges.len() } else { most.min(explained.ranges.len()) };
        let head = ["offset", "bytes", "newest bytes in", "maps: current", "stale", "in an epoch"];
        let mut ranges = table::new(paint, &head);
        for range in &explained.ranges[..shown] {
            ranges.add_row(range_row(range).map(Cell::new));
        }
        table::align_columns(&mut ranges, &[0, 1, 3, 4, 5]);
        let _ = writeln!(s, "\n{}", table::text(&ranges));
        if shown < explained.ranges.len() {
            let rest = explained.ranges.len() - shown;
            let _ = writeln!(s, "{rest} more ranges: `--ranges 0` shows all");
        }
    }
    if !explained.holders.is_empty() {
        let head = [
            "process",
            "user",
            "offset",
            "bytes",
            "current",
            "stale",
            "in an epoch",
            "not fetched",
            "from GPUs",
            "kind",
        ];
        let mut maps = table::new(paint, &head);
        for holder in &explained.holders {
            maps.add_row(holder_row(holder).map(Cell::new));
        }
        table::align_columns(&mut maps, &[0, 1, 2, 3, 4, 5, 6, 7, 8]);
        let _ = writeln!(s, "\n{}", table::text(&maps));
    }
    s
}

fn range_row(range: &ExplainedRange) -> [String; 6] {
    let RangeState { unwritten, invalidating, current, stale, open } = range.state;
    let count = |maps: u8| if maps == u8::MAX { "255+".to_owned() } else { maps.to_string() };
    let note = if invalidating { ", being invalidated" } else { "" };
    [
        range.offset.to_string(),
        format::bytes(range.len),
        format!("{}{note}", head(unwritten)),
        count(current),
        count(stale),
        count(open),
    ]
}

/// How kernels have the pages of a map.
fn kind(kind: MapKind) -> &'static str {
    match kind {
        MapKind::Replica => "replica",
        MapKind::Registered => "in place, registered",
        MapKind::Coherent => "in place, coherent",
    }
}

fn holder_row(holder: &Holder) -> [String; 10] {
    if holder.kind == MapKind::Coherent {
        // It has no pages of its own: nothing to fetch, and nothing that gets old.
        let none = || "-".to_owned();
        let (first, pages) = ((holder.first * PAGE).to_string(), format::bytes(holder.pages * PAGE));
        let (pid, user) = (holder.pid.to_string(), holder.user.to_string());
        return [pid, user, first, pages, none(), none(), none(), none(), none(), kind(holder.kind).to_owned()];
    }
    let rest = holder.pages.saturating_sub(holder.current + holder.stale + holder.open);
    let bytes = |pages: u64| format::bytes(pages * PAGE);
    [
        holder.pid.to_string(),
        holder.user.to_string(),
        (holder.first * PAGE).to_string(),
        bytes(holder.pages),
        bytes(holder.current),
        bytes(holder.stale),
        bytes(holder.open),
        bytes(rest),
        bytes(holder.from_peers),
        kind(holder.kind).to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained() -> ExplainedFile {
        let range = |offset, len, state| ExplainedRange { offset, len, state };
        let unwritten = RangeState { unwritten: true, stale: 2, ..RangeState::default() };
        ExplainedFile {
            ranges: vec![
                range(0, 8192, RangeState { current: 255, ..RangeState::default() }),
                range(8192, 4096, unwritten),
                range(12288, 100, RangeState { invalidating: true, open: 1, ..RangeState::default() }),
            ],
            holders: vec![
                Holder {
                    pid: 42,
                    user: 7,
                    first: 1,
                    pages: 5,
                    current: 1,
                    stale: 1,
                    open: 1,
                    from_peers: 3,
                    kind: MapKind::Registered,
                },
                Holder { pid: 43, user: 7, pages: 2, kind: MapKind::Coherent, ..Holder::default() },
            ],
        }
    }

    #[test]
    fn ranges_and_maps_are_listed() {
        let text = render(Path::new("/m/f"), &explained(), 0, &OutputStyle { colour: false, width: 120 });
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        for row in [
            &["memory", "4", "KiB", "of", "released", "bytes", "that", "are", "not", "in", "the", "file", "yet"][..],
            &["0", "8", "KiB", "file", "255+", "0", "0"],
            &["8192", "4", "KiB", "memory", "0", "2", "0"],
            &["12288", "100", "B", "file,", "being", "invalidated", "0", "0", "1"],
            &[
                "42",
                "7",
                "4096",
                "20",
                "KiB",
                "4",
                "KiB",
                "4",
                "KiB",
                "4",
                "KiB",
                "8",
                "KiB",
                "12",
                "KiB",
                "in",
                "place,",
                "registered",
            ],
            &["43", "7", "0", "8", "KiB", "-", "-", "-", "-", "-", "in", "place,", "coherent"],
        ] {
            assert!(rows.iter().any(|seen| seen == row), "no {row:?} in\n{text}");
        }
    }

    #[test]
    fn cut_list_says_so() {
        let text = render(Path::new("/m/f"), &explained(), 1, &OutputStyle { colour: false, width: 120 });
        assert!(text.contains("2 more ranges: `--ranges 0` shows all"), "{text}");
    }

    #[test]
    fn json_has_bytes() {
        let json = as_json(Path::new("/m/f"), &explained());
        assert_eq!((&json["ranges"][1]["head"], &json["ranges"][1]["maps_stale"]), (&json!("memory"), &json!(2)));
        assert_eq!((&json["maps"][0]["offset"], &json["maps"][0]["epoch_bytes"]), (&json!(4096), &json!(4096)));
        assert_eq!(json["maps"][1]["kind"], "in place, coherent");
        assert_eq!(json["maps"][0]["from_other_gpus_bytes"], json!(12288));
    }
}
