//! `spinio calibrate --check`: whether the stored model still fits today's machine.

use std::fmt::Write;

use comfy_table::Cell;
use serde_json::json;
use spinio_io::model::{MeasuredRead, date};

use super::measure::{self, RouteTimes, SamplingOptions};
use crate::color::{OutputStyle, TextRole};
use crate::device::Buffer;
use crate::exit::{self, Exit};
use crate::test_file::TestFile;
use crate::{format, output, table};

/// A route fits while its measured times are within this factor of the model, on average.
const FIT_FACTOR: f64 = 1.5;

/// A route; commands, bytes and measured / model at each offset; their mean.
type Row = (spinio_plan::Route, Vec<(u64, u64, f64)>, Option<f64>);

/// Runs the check.
pub fn run(
    subject: &TestFile,
    trial: &MeasuredRead<'_>,
    buffer: &Buffer,
    effort: &SamplingOptions,
    as_json: bool,
) -> anyhow::Result<Exit> {
    let Some(stored) = trial.calibration() else {
        let place = trial.key();
        let text = format!(
            "There is no model of {} ({}) and {}: `spinio calibrate` makes one",
            place.storage, place.file_system, place.device
        );
        return Err(exit::error(Exit::Missing, text));
    };
    let (open, _) = measure::routes(trial, buffer.target.allocation.device.capabilities().has_dma_engine);
    let (mut rows, mut fits) = (Vec::new(), true);
    for m in &stored.routes {
        let Some(route) = open.iter().find(|r| **r == m.route) else {
            rows.push((m.route, Vec::new(), None));
            fits = false;
            continue;
        };
        let times = super::measure_route(subject, trial, *route, effort)?;
        let ratios = ratios(&times, m);
        let mean = mean(&ratios);
        fits &= (1.0 / FIT_FACTOR..=FIT_FACTOR).contains(&mean);
        rows.push((m.route, ratios, Some(mean)));
    }
    let text = if as_json {
        let of = |(route, ratios, mean): &Row| {
            let points: Vec<_> = ratios
                .iter()
                .map(|(n, bytes, ratio)| json!({ "commands": n, "bytes": bytes, "measured_over_model": ratio }))
                .collect();
            json!({ "route": route.name(), "measured_over_model": mean, "points": points })
        };
        let routes: Vec<_> = rows.iter().map(of).collect();
        format!("{:#}\n", json!({ "measured": stored.measured_at, "fits": fits, "routes": routes }))
    } else {
        let paint = OutputStyle::stdout();
        let mut table = table::new(&paint, &["route", "measured / model", "at"]);
        for (route, ratios, mean) in &rows {
            let at: Vec<_> = ratios
                .iter()
                .map(|(n, bytes, ratio)| match n {
                    1 => format!("{} {ratio:.2}", format::bytes(*bytes)),
                    n => format!("{n} x {} {ratio:.2}", format::bytes(bytes / n)),
                })
                .collect();
            let text = mean.map_or_else(|| "closed today".to_owned(), |m| format!("{m:.2}"));
            table.add_row(vec![table::route(*route), Cell::new(text), Cell::new(at.join(", "))]);
        }
        table::align_columns(&mut table, &[1]);
        let mut s = format!("{}\n\n", table::text(&table));
        let _ = match fits {
            true => {
                writeln!(s, "{} the model of {} still fits", paint.text(TextRole::Good, "✓"), date(stored.measured_at))
            }
            false => writeln!(
                s,
                "{} the model of {} does not fit today's machine: run `spinio calibrate` again if this lasts",
                paint.text(TextRole::Bad, "✗"),
                date(stored.measured_at)
            ),
        };
        s
    };
    output::print(&text)?;
    Ok(if fits { Exit::Ok } else { Exit::Failed })
}

/// Commands, bytes, measured over predicted.
fn ratios(times: &RouteTimes, m: &spinio_plan::RouteFit) -> Vec<(u64, u64, f64)> {
    let flight = &m.queue.value;
    let single = times.single.iter().map(|t| (1, t.bytes, t.median / m.cost.value.time(t.bytes).max(1.0)));
    let many = times.queued.iter().map(|t| {
        let predicted = flight.latency + t.commands as f64 * flight.per_command + t.bytes as f64 * flight.per_byte;
        (t.commands, t.bytes, t.median / predicted.max(1.0))
    });
    single.chain(many).collect()
}

/// The geometric mean: twice as slow and twice as fast are equally far off.
fn mean(ratios: &[(u64, u64, f64)]) -> f64 {
    let sum: f64 = ratios.iter().map(|(_, _, r)| r.max(1e-9).ln()).sum();
    (sum / ratios.len().max(1) as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometric_mean_cancels_ratios() {
        assert!((mean(&[(1, 1, 2.0), (1, 1, 0.5)]) - 1.0).abs() < 1e-12);
        assert!((mean(&[(1, 1, 3.0)]) - 3.0).abs() < 1e-12);
    }
}
