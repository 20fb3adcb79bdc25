//! Charts as SVG: series of points over a size or a share, with error bars.
//!
//! ```text
//!   title
//!   y │        o────x     o first   x second
//!     │   o──x╯
//!     │ x╯
//!     └──────────────
//!       512 B   64 KiB
//! ```
//!
//! A logarithmic axis is drawn as a linear one of logarithms, with separate labels: every power of 10, or the powers of
//! 2 that occur.

use std::path::Path;

use anyhow::{Context, anyhow};
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::prelude::*;

use crate::format;

/// The scale of an axis.
#[derive(Clone, Debug)]
pub enum Scale {
    /// From 0.
    Linear,
    /// Powers of 10.
    Log,
    /// Powers of 2 of bytes.
    Bytes,
    /// Positions 0, 1, 2 ... with these names.
    Names(Vec<String>),
}

/// One axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// Its quantity.
    pub label: String,
    /// Its scale.
    pub scale: Scale,
}

/// One measurement: a mean with its standard deviation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// The horizontal value.
    pub x: f64,
    /// The vertical value.
    pub y: f64,
    /// Standard deviation; 0 draws no bar.
    pub deviation: f64,
}

/// Points of one name.
#[derive(Clone, Debug)]
pub struct Series {
    /// Shown in the legend.
    pub name: String,
    /// In order of `x`.
    pub points: Vec<Point>,
    /// Index of its colour; related series share it.
    pub colour: usize,
    /// Whether its points are joined by a line.
    pub line: bool,
    /// Whether its points are marked by dots.
    pub dots: bool,
}

/// A chart.
#[derive(Clone, Debug)]
pub struct Chart {
    /// The title.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The series.
    pub series: Vec<Series>,
}

/// Colours that are distinguishable with most kinds of colour blindness (Okabe and Ito's).
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
    RGBColor(148, 120, 40),
];

/// Names of series next to one another, and pixels of a row of them.
const LEGEND_COLUMNS: i32 = 3;
const LEGEND_ROW: i32 = 20;

/// Size of letters times their number next to each other along the chart.
const LABEL_WIDTH: usize = 1600;

impl Scale {
    /// The position of a value on the linear axis.
    fn place(&self, value: f64) -> f64 {
        match self {
            Scale::Linear | Scale::Names(_) => value,
            Scale::Log => value.max(f64::MIN_POSITIVE).log10(),
            Scale::Bytes => value.max(f64::MIN_POSITIVE).log2(),
        }
    }

    /// The ends of an axis that contains all these values.
    fn ends(&self, places: impl Iterator<Item = f64>) -> (f64, f64) {
        let (mut least, mut most) =
            places.filter(|p| p.is_finite()).fold((f64::INFINITY, f64::NEG_INFINITY), |(l, m), p| (l.min(p), m.max(p)));
        if least > most {
            (least, most) = (0.0, 1.0);
        }
        match self {
            Scale::Linear => (least.min(0.0), if most > 0.0 { most * 1.08 } else { 1.0 }),
            Scale::Log => (least.floor(), most.ceil().max(least.floor() + 1.0)),
            // Half a power of margin: points of the first and the last length do not touch the frame.
            Scale::Bytes => (least.floor() - 0.5, most.ceil().max(least.floor() + 1.0) + 0.5),
            Scale::Names(names) => (-0.5, names.len() as f64 - 0.5),
        }
    }

    /// The positions of labels.
    fn ticks(&self, (from, to): (f64, f64)) -> Vec<f64> {
        let every = match self {
            Scale::Linear => {
                let step = 10f64.powf(((to - from) / 5.0).log10().floor());
                [1.0, 2.0, 5.0, 10.0].map(|n| n * step).into_iter().find(|s| (to - from) / s <= 8.0).unwrap_or(step)
            }
            Scale::Log | Scale::Names(_) => 1.0,
            Scale::Bytes => ((to - from) / 9.0).ceil().max(1.0),
        };
        // Lengths are marked from the first one on, so that with few lengths every mark is under a point.
        let first = if matches!(self, Scale::Bytes) { from.ceil() } else { (from / every).ceil() * every };
        (0..).map(|i| first + f64::from(i) * every).take_while(|t| *t <= to + 1e-9).take(100).collect()
    }

    /// Size of the labels of the horizontal axis: long adjacent names are written smaller, so that they do not overlap.
    fn font(&self) -> u32 {
        match self {
            Scale::Names(names) => {
                let longest = names.iter().map(|n| n.chars().count()).max().unwrap_or(0);
                (LABEL_WIDTH / (names.len() * longest).max(1)).clamp(8, 14) as u32
            }
            _ => 14,
        }
    }

    fn text(&self, place: f64) -> String {
        match self {
            Scale::Linear if place.abs() < 1e-9 => "0".to_owned(),
            Scale::Linear if place.abs() >= 10.0 => format!("{place:.0}"),
            Scale::Linear => format!("{}", (place * 1000.0).round() / 1000.0),
            Scale::Log => {
                let value = 10f64.powf(place);
                if (0.001..10_000_000.0).contains(&value) {
                    format!("{}", (value * 1000.0).round() / 1000.0)
                } else {
                    format!("1e{place:.0}")
                }
            }
            Scale::Bytes => format::bytes(place.exp2().round() as u64),
            Scale::Names(names) => names.get(place.round().max(0.0) as usize).cloned().unwrap_or_default(),
        }
    }
}

/// A linear axis with labels at these positions.
struct TickAxis {
    ends: (f64, f64),
    ticks: Vec<f64>,
}

impl Ranged for TickAxis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (from, to): (i32, i32)) -> i32 {
        let share = (value - self.ends.0) / (self.ends.1 - self.ends.0);
        // A value far outside is drawn a little outside, so that pixel coordinates stay small.
        from + (share.clamp(-1.0, 2.0) * f64::from(to - from)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.ends.0..self.ends.1
    }
}

impl Chart {
    /// The chart as the text of an SVG file.
    pub fn svg(&self) -> anyhow::Result<String> {
        let mut text = String::new();
        self.draw(&mut text).map_err(|e| anyhow!("Cannot draw the chart {}: {e}", self.title))?;
        Ok(text)
    }

    /// Writes it.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        std::fs::write(path, self.svg()?).with_context(|| format!("Cannot write {}", path.display()))
    }

    fn draw(&self, text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let all = || self.series.iter().flat_map(|s| &s.points);
        let xs = self.x.scale.ends(all().map(|p| self.x.scale.place(p.x)));
        let ys = self.y.scale.ends(all().flat_map(|p| [p.y, p.y + p.deviation]).map(|y| self.y.scale.place(y)));
        let rows = (self.series.len() as i32 + LEGEND_COLUMNS - 1) / LEGEND_COLUMNS;
        let whole = SVGBackend::with_string(text, (900, 520 + (rows * LEGEND_ROW) as u32 + 12)).into_drawing_area();
        whole.fill(&WHITE)?;
        let (area, legend) = whole.split_vertically(520);
        let mut chart = ChartBuilder::on(&area)
            .caption(&self.title, ("sans-serif", 20))
            .margin(12)
            .margin_right(36)
            .x_label_area_size(46)
            .y_label_area_size(70)
            .build_cartesian_2d(
                TickAxis { ends: xs, ticks: self.x.scale.ticks(xs) },
                TickAxis { ends: ys, ticks: self.y.scale.ticks(ys) },
            )?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(BLACK.mix(0.12))
            .x_desc(&self.x.label)
            .y_desc(&self.y.label)
            .x_labels(40)
            .y_labels(40)
            .x_label_formatter(&|p| self.x.scale.text(*p))
            .y_label_formatter(&|p| self.y.scale.text(*p))
            .label_style(("sans-serif", 14))
            .x_label_style(("sans-serif", self.x.scale.font()))
            .axis_desc_style(("sans-serif", 15))
            .draw()?;
        for series in &self.series {
            let colour = COLOURS[series.colour % COLOURS.len()];
            let place = |p: &Point| (self.x.scale.place(p.x), self.y.scale.place(p.y));
            let line = series.points.iter().map(place).filter(|_| series.line);
            chart.draw_series(LineSeries::new(line, colour.stroke_width(2)))?;
            if series.dots {
                chart.draw_series(series.points.iter().map(|p| Circle::new(place(p), 3, colour.filled())))?;
            }
            chart.draw_series(series.points.iter().filter(|p| p.deviation > 0.0).map(|p| {
                let (x, y) = place(p);
                // A logarithmic axis has no 0 at which a bar could end.
                let low = self.y.scale.place((p.y - p.deviation).max(p.y / 100.0)).max(ys.0);
                ErrorBar::new_vertical(x, low, y, self.y.scale.place(p.y + p.deviation), colour.stroke_width(1), 6)
            }))?;
        }
        // Below the chart, where it covers no point.
        for (i, series) in self.series.iter().enumerate() {
            let (x, y) = (80 + (i as i32 % LEGEND_COLUMNS) * 275, 6 + (i as i32 / LEGEND_COLUMNS) * LEGEND_ROW);
            let colour = COLOURS[series.colour % COLOURS.len()];
            if series.line {
                legend.draw(&PathElement::new([(x, y + 7), (x + 22, y + 7)], colour.stroke_width(2)))?;
            }
            if series.dots {
                legend.draw(&Circle::new((x + 11, y + 7), 3, colour.filled()))?;
            }
            legend.draw(&Text::new(series.name.clone(), (x + 28, y), ("sans-serif", 14)))?;
        }
        whole.present()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(scale: Scale) -> Axis {
        Axis { label: "label".into(), scale }
    }

    fn chart(x: Scale, y: Scale, points: &[(f64, f64)]) -> String {
        let points = points.iter().map(|&(x, y)| Point { x, y, deviation: y / 10.0 }).collect();
        let series = vec![Series { name: "copy <&>".into(), points, colour: 0, line: true, dots: true }];
        Chart { title: "Title".into(), x: axis(x), y: axis(y), series }.svg().unwrap()
    }

    #[test]
    fn chart_has_axis_and_series_labels() {
        let text = chart(Scale::Bytes, Scale::Log, &[(512.0, 3e3), (65536.0, 1e5), (67108864.0, 4e7)]);
        for part in ["<svg", "Title", "512 B", "128 KiB", "10000", "copy &lt;&amp;&gt;", "</svg>"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn chart_draws_any_points() {
        for points in [&[][..], &[(1.0, 0.0)], &[(4096.0, 5.0), (4096.0, 5.0)], &[(0.0, f64::NAN), (9.0, 1e300)]] {
            for scale in [Scale::Linear, Scale::Log, Scale::Bytes, Scale::Names(vec!["a".into()])] {
                assert!(chart(scale.clone(), Scale::Linear, points).contains("</svg>"));
                assert!(chart(Scale::Linear, scale, points).contains("</svg>"));
            }
        }
    }

    #[test]
    fn first_and_last_point_have_margin_and_tick() {
        let lengths = [512.0f64, 2048.0, 8192.0, 32768.0, 131072.0, 524288.0, 2097152.0, 8388608.0];
        let ends = Scale::Bytes.ends(lengths.iter().map(|b| b.log2()));
        let ticks = Scale::Bytes.ticks(ends);
        assert!(ends.0 < 9.0 && ends.1 > 23.0, "{ends:?}");
        assert_eq!(ticks, lengths.map(f64::log2));
    }

    #[test]
    fn many_long_names_use_smaller_font() {
        let names = |n: usize, name: &str| Scale::Names(vec![name.to_owned(); n]);
        assert_eq!(names(5, "pread+copy+D").font(), 14);
        assert!(names(9, "100 %, CPU load").font() < 13);
        assert!(chart(names(9, "100 %, CPU load"), Scale::Linear, &[(0.0, 1.0), (8.0, 2.0)]).contains("CPU load"));
    }

    #[test]
    fn ticks_are_few_and_in_range() {
        for (scale, ends) in [(Scale::Linear, (0.0, 12.9)), (Scale::Linear, (0.0, 0.03)), (Scale::Bytes, (8.5, 26.5))] {
            let ticks = scale.ticks(ends);
            assert!((3..=12).contains(&ticks.len()), "{scale:?} {ticks:?}");
            assert!(ticks.iter().all(|t| (ends.0..=ends.1).contains(t)), "{ticks:?}");
        }
    }
}
