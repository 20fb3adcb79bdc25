//! Table, JSON and chart of an experiment.

use std::fmt::Write;

use comfy_table::Cell;
use serde_json::{Value, json};

use super::ExperimentResult;
use super::method::Method;
use crate::color::{OutputStyle, TextRole};
use crate::svg::{Axis, Chart, Point, Scale, Series};
use crate::table;

/// GB/s, three digits.
fn rate(gbps: f64) -> String {
    match gbps {
        r if r >= 9.995 => format!("{r:.1}"),
        r if r >= 0.0995 => format!("{r:.2}"),
        r => format!("{r:.4}"),
    }
}

/// For users.
pub fn render(paint: &OutputStyle, o: &ExperimentResult) -> String {
    let e = o.experiment;
    let mut s = format!("{} {}\n", paint.text(TextRole::Head, e.name), e.title);
    let _ = writeln!(s, "the paper: {}", e.claim);
    let _ = writeln!(
        s,
        "here: {} on {}, {}; {}; {} {}, {} runs and one before them; GB/s, standard deviation, times SPIN's",
        o.device,
        o.storage,
        o.file_system,
        crate::format::bytes(o.size),
        o.threads,
        if o.threads == 1 { "thread" } else { "threads" },
        o.runs
    );
    s.push('\n');
    let shown: Vec<Method> = e.methods.iter().copied().filter(|m| o.cells.iter().any(|c| c.method == *m)).collect();
    if !shown.is_empty() {
        let mut head = vec![""];
        head.extend(shown.iter().map(|m| m.name()));
        if e.name == "fig1" {
            head.push("pread+copy / P2P");
        }
        let mut table = table::new(paint, &head);
        for (i, setting) in o.settings.iter().enumerate() {
            let at = |method: Method| o.cells.iter().find(|c| c.setting == i && c.method == method);
            let spin = at(Method::Spin).map(|c| c.runs.mean());
            let mut row = vec![Cell::new(&setting.label)];
            for &method in &shown {
                let text = at(method).map_or_else(
                    || "-".to_owned(),
                    |c| {
                        let (mean, deviation) = (c.runs.mean(), c.runs.deviation());
                        let times = spin.filter(|_| method != Method::Spin);
                        let times = times.map_or_else(String::new, |spin| format!(" {:.2}x", mean / spin));
                        format!("{} ±{:.0} %{times}", rate(mean), deviation * 100.0 / mean.max(1e-12))
                    },
                );
                row.push(Cell::new(text));
            }
            if e.name == "fig1" {
                let both = at(Method::PreadCopy).zip(at(Method::P2p));
                row.push(Cell::new(
                    both.map_or_else(|| "-".to_owned(), |(c, p)| format!("{:.2}x", c.runs.mean() / p.runs.mean())),
                ));
            }
            table.add_row(row);
        }
        if !e.paper.is_empty() {
            let mut row = vec![Cell::new("the paper")];
            let of = |m: &Method| e.paper.iter().find(|(p, _)| p == m).map_or("-", |(_, text)| text);
            row.extend(shown.iter().map(|m| Cell::new(of(m))));
            table.add_row(row);
        }
        let columns: Vec<usize> = (1..=shown.len() + usize::from(e.name == "fig1")).collect();
        table::align_columns(&mut table, &columns);
        let _ = writeln!(s, "{}\n", table::text(&table));
    }
    for missing in &o.missing {
        let _ = writeln!(s, "not measured: {missing}");
    }
    s
}

/// As JSON.
pub fn json(o: &ExperimentResult) -> Value {
    let cells: Vec<_> = o
        .cells
        .iter()
        .map(|c| {
            let setting = &o.settings[c.setting];
            json!({
                "setting": setting.label,
                "block": setting.block,
                "cached": setting.cached,
                "load": setting.load.name(),
                "method": c.method.name(),
                "gbps": c.runs.0,
                "mean": c.runs.mean(),
                "deviation": c.runs.deviation(),
            })
        })
        .collect();
    let paper: serde_json::Map<String, Value> =
        o.experiment.paper.iter().map(|(m, text)| (m.name().to_owned(), json!(text))).collect();
    json!({
        "experiment": o.experiment.name,
        "title": o.experiment.title,
        "paper_claim": o.experiment.claim,
        "paper_gbps": paper,
        "date": o.date,
        "command": o.command,
        "version": env!("CARGO_PKG_VERSION"),
        "machine": o.machine,
        "device": o.device,
        "storage": o.storage,
        "file_system": o.file_system,
        "threads": o.threads,
        "file_bytes": o.size,
        "runs": o.runs,
        "cells": cells,
        "not_measured": o.missing,
    })
}

/// Means with their standard deviations.
pub fn chart(o: &ExperimentResult) -> Chart {
    let (label, scale) = o.experiment.axis(&o.settings);
    let series = |(colour, &method): (usize, &Method)| {
        let points: Vec<_> = o
            .cells
            .iter()
            .filter(|c| c.method == method)
            .map(|c| Point { x: o.settings[c.setting].x, y: c.runs.mean(), deviation: c.runs.deviation() })
            .collect();
        let line = !matches!(scale, Scale::Names(_));
        (!points.is_empty()).then(|| Series { name: method.name().to_owned(), points, colour, line, dots: true })
    };
    Chart {
        title: format!("{}: {}", o.experiment.name, o.experiment.title),
        x: Axis { label: label.into(), scale: scale.clone() },
        y: Axis { label: "GB/s".into(), scale: Scale::Log },
        series: Method::ALL.iter().enumerate().filter_map(series).collect(),
    }
}
