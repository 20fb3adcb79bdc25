//! Table, JSON and chart of what came of an experiment.

use std::fmt::Write;

use comfy_table::Cell;
use serde_json::{Value, json};

use super::experiment::{Along, Method, Unit};
use super::runner::{Measurement, Outcome};
use crate::color::{OutputStyle, TextRole};
use crate::svg::{Axis, Chart, Point, Scale, Series};
use crate::{format, table};

fn value(unit: Unit, value: f64) -> String {
    match unit {
        Unit::Seconds => format::time(value * 1e9),
        Unit::Bytes => format::bytes(value as u64),
        Unit::Number if value == value.trunc() => format!("{value:.0}"),
        Unit::Number => format!("{value:.1}"),
    }
}

/// For users.
pub fn render(paint: &OutputStyle, o: &Outcome) -> String {
    let e = o.experiment;
    let mut s = format!("{} {}\n", paint.text(TextRole::Head, e.name), e.title);
    let _ = writeln!(s, "claim: {}\n", e.claim);
    if !o.cells.is_empty() {
        let mut head = vec!["", "method", "median", "±", "times faster", "CPU time", "GPU memory"];
        head.extend(e.columns.iter().map(|column| column.label));
        head.push("runs");
        let mut rows = table::new(paint, &head);
        let mut before = usize::MAX;
        for cell in &o.cells {
            let first = std::mem::replace(&mut before, cell.setting) != cell.setting;
            rows.add_row(row(o, cell, if first { o.settings[cell.setting].label } else { "" }));
        }
        table::align_columns(&mut rows, &(2..head.len()).collect::<Vec<_>>());
        let _ = writeln!(s, "{}\n", table::text(&rows));
    }
    for missing in &o.missing {
        let _ = writeln!(s, "not measured: {missing}");
    }
    s
}

fn row(o: &Outcome, cell: &Measurement, label: &str) -> Vec<Cell> {
    let (seconds, spread) = cell.median("seconds").unwrap_or_default();
    let base = base(o, cell.setting).filter(|base| !std::ptr::eq(*base, cell)).and_then(|base| base.median("seconds"));
    let figure = |key, unit| cell.median(key).map_or_else(|| "-".to_owned(), |(median, _)| value(unit, median));
    let mut row = vec![
        Cell::new(label),
        Cell::new(cell.method.name),
        Cell::new(value(Unit::Seconds, seconds)),
        Cell::new(format!("{:.0} %", spread * 100.0 / seconds.max(1e-12))),
        Cell::new(base.map_or_else(|| "1".to_owned(), |(base, _)| format!("{:.2}", base / seconds.max(1e-12)))),
        Cell::new(figure("cpu", Unit::Seconds)),
        Cell::new(figure("gpu", Unit::Bytes)),
    ];
    row.extend(o.experiment.columns.iter().map(|column| Cell::new(figure(column.key, column.unit))));
    row.push(Cell::new(cell.runs.len()));
    row
}

/// What the methods of a setting are compared with: the first one.
fn base(o: &Outcome, setting: usize) -> Option<&Measurement> {
    o.cells.iter().find(|cell| cell.setting == setting)
}

/// As JSON, without what all experiments have in common.
pub fn json(o: &Outcome) -> Value {
    let cells: Vec<_> = o
        .cells
        .iter()
        .map(|cell| {
            let setting = &o.settings[cell.setting];
            let values: serde_json::Map<_, _> =
                setting.values.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
            let (median, spread) = cell.median("seconds").unwrap_or_default();
            json!({
                "setting": setting.label, "values": values, "method": cell.method.name,
                "median_seconds": median, "spread_seconds": spread, "runs": cell.runs,
            })
        })
        .collect();
    let methods: serde_json::Map<_, _> =
        o.experiment.methods.iter().map(|method| (method.name.to_owned(), json!(method.what))).collect();
    json!({
        "experiment": o.experiment.name, "title": o.experiment.title, "claim": o.experiment.claim,
        "methods": methods, "cells": cells, "not_measured": o.missing,
    })
}

/// Median times, with half of the distance between their quartiles.
pub fn chart(o: &Outcome, device: &str) -> Chart {
    let (label, along) = o.experiment.axis;
    let series = |(colour, method): (usize, &Method)| {
        let point = |cell: &Measurement| {
            let (median, spread) = cell.median("seconds")?;
            Some(Point { x: o.settings[cell.setting].x, y: median * 1e3, deviation: spread * 1e3 })
        };
        let points: Vec<_> = o.cells.iter().filter(|cell| cell.method.name == method.name).filter_map(point).collect();
        let line = along == Along::Log;
        (!points.is_empty()).then(|| Series { name: method.name.to_owned(), points, colour, line, dots: true })
    };
    Chart {
        title: format!("{}: {} ({device})", o.experiment.name, o.experiment.title),
        x: Axis { label: label.into(), scale: along.scale(o.settings) },
        y: Axis { label: "milliseconds".into(), scale: Scale::Log },
        series: o.experiment.methods.iter().enumerate().filter_map(series).collect(),
    }
}
