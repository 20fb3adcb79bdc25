//! `spinio-lab chart`: draws the result of `spinio calibrate --json`.
//!
//! Its input is the JSON, so a chart can be drawn later and on another machine, and `spinio` needs no library for
//! charts.

use std::path::PathBuf;

use anyhow::{Context, anyhow};
use clap::Args;
use serde_json::Value;

use crate::exit::Exit;
use crate::svg::{Axis, Chart, Point, Scale, Series};

/// What `spinio-lab chart` takes.
#[derive(Debug, Args)]
pub struct Draw {
    /// What `spinio calibrate --json` printed
    #[arg(value_name = "CALIBRATION.json")]
    json: PathBuf,
    /// Where the chart is written
    #[arg(value_name = "CHART.svg")]
    svg: PathBuf,
}

/// Runs it.
pub fn run(draw: &Draw) -> anyhow::Result<Exit> {
    let text = std::fs::read_to_string(&draw.json).with_context(|| format!("Cannot read {}", draw.json.display()))?;
    let chart = serde_json::from_str(&text).map_err(anyhow::Error::from).and_then(|value| chart(&value));
    chart
        .with_context(|| format!("{} is not what `spinio calibrate --json` prints", draw.json.display()))?
        .write(&draw.svg)?;
    Ok(Exit::Ok)
}

/// One transfer at a time, as measured.
struct Timed {
    bytes: u64,
    median: f64,
    deviation: f64,
}

fn text<'a>(of: &'a Value, name: &str) -> anyhow::Result<&'a str> {
    of[name].as_str().ok_or_else(|| anyhow!("it has no text `{name}`"))
}

fn number(of: &Value, name: &str) -> anyhow::Result<f64> {
    of[name].as_f64().ok_or_else(|| anyhow!("it has no number `{name}`"))
}

fn list<'a>(of: &'a Value, name: &str) -> anyhow::Result<&'a Vec<Value>> {
    of[name].as_array().ok_or_else(|| anyhow!("it has no list `{name}`"))
}

fn single(route: &Value) -> anyhow::Result<Vec<Timed>> {
    let timed = |point: &Value| {
        let bytes = number(point, "bytes")? as u64;
        Ok(Timed { bytes, median: number(point, "median_ns")?, deviation: number(point, "deviation_ns")? })
    };
    list(route, "points")?.iter().filter(|point| point["commands"] == 1).map(timed).collect()
}

/// Points and the fitted lines of single transfers.
fn chart(value: &Value) -> anyhow::Result<Chart> {
    let mut series = Vec::new();
    for (colour, route) in list(value, "routes")?.iter().enumerate() {
        let (name, fit, times) = (text(route, "route")?, &route["cost"], single(route)?);
        let (fixed, cutoff, per_byte) = (number(fit, "fixed_ns")?, number(fit, "cutoff")?, number(fit, "ns_per_byte")?);
        let measured = |t: &Timed| Point { x: t.bytes as f64, y: t.median / 1e3, deviation: t.deviation / 1e3 };
        series.push(Series {
            name: format!("{name}, measured"),
            points: times.iter().map(measured).collect(),
            colour,
            line: false,
            dots: true,
        });
        // Eight points per power of 2, so that the bend is visible.
        let ends = (times.first().map_or(512, |t| t.bytes), times.last().map_or(512, |t| t.bytes));
        let places = (ends.0 as f64).log2() as i32 * 8..=(ends.1 as f64).log2() as i32 * 8;
        let fitted = |i: i32| {
            let bytes = (f64::from(i) / 8.0).exp2();
            Point { x: bytes, y: (fixed + (bytes - cutoff).max(0.0) * per_byte) / 1e3, deviation: 0.0 }
        };
        series.push(Series {
            name: format!("{name}, fit, R2 {:.4}", number(fit, "r2")?),
            points: places.map(fitted).collect(),
            colour,
            line: true,
            dots: false,
        });
    }
    let device = text(value, "device")?.split(',').next().unwrap_or_default();
    Ok(Chart {
        title: format!("One transfer: {}, {}, {device}", text(value, "storage")?, text(value, "file_system")?),
        x: Axis { label: "length".into(), scale: Scale::Bytes },
        y: Axis { label: "us".into(), scale: Scale::Log },
        series,
    })
}

#[cfg(test)]
mod tests {
    use spinio_cli::calibrate::{CalibrationRun, measure, report};
    use spinio_plan::{Calibration, Route};

    use super::*;

    fn times(route: Route) -> measure::RouteTimes {
        let timed = |commands: u64, bytes: u64, median: f64| measure::Timing {
            bytes,
            commands,
            median,
            mean: median,
            deviation: median / 10.0,
        };
        let single = [512, 4096, 65536, 1 << 20, 8 << 20].map(|bytes| timed(1, bytes, 20_000.0 + bytes as f64));
        let many = [2, 8, 64].map(|n| timed(n, n * 4096, 20_000.0 + n as f64 * 5000.0));
        measure::RouteTimes { route, single: single.to_vec(), queued: many.to_vec() }
    }

    /// The JSON of the command itself, so that the two stay consistent.
    #[test]
    fn chart_draws_the_json_of_calibrate() {
        let times = vec![times(Route::Copy), times(Route::Direct)];
        let routes = times.iter().map(|t| t.fit().unwrap()).collect();
        let name = |text: &str| text.to_owned();
        let (storage, file_system, device) = (name("disk"), name("ext4"), name("emulated:0, 256 MiB"));
        let calibration = Calibration { storage, file_system, device, routes, ..Calibration::default() };
        let value = report::json(&CalibrationRun { times, unavailable: vec![], calibration }, None);
        let chart = chart(&value).unwrap();
        assert_eq!(chart.title, "One transfer: disk, ext4, emulated:0");
        let names: Vec<_> = chart.series.iter().map(|s| s.name.split(", R2").next().unwrap()).collect();
        assert_eq!(names, ["copy, measured", "copy, fit", "direct, measured", "direct, fit"]);
        let lengths: Vec<_> = chart.series[0].points.iter().map(|p| p.x as u64).collect();
        assert_eq!(lengths, [512, 4096, 65536, 1 << 20, 8 << 20], "those in flight together are not drawn");
        assert!(chart.series[1].points.windows(2).all(|p| p[0].x < p[1].x && p[0].y <= p[1].y), "a cost grows");
    }

    #[test]
    fn invalid_calibration_is_refused() {
        for value in ["{}", "[]", r#"{"routes": [{"route": "copy"}], "device": "", "storage": "", "file_system": ""}"#]
        {
            assert!(chart(&serde_json::from_str(value).unwrap()).is_err(), "{value}");
        }
    }
}
