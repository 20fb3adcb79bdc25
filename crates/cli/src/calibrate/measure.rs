//! Times of one route: transfers by themselves, and many in flight.
//!
//! Every figure is the median of several runs after one that does not count, each at other offsets of the file. The
//! engines that serve reads make the transfers (`Trial` in io), so the cost of a plan is measured.

use std::time::{Duration, Instant};

use anyhow::Context;
use spinio_io::model::MeasuredRead;
use spinio_plan::{QueueSample, Reason, Route, RouteFit, Sample, Segment, fit_cost, fit_queue};

use crate::quantile::quantile;
use crate::random::SplitMix64;

/// How much to measure.
#[derive(Clone, Debug)]
pub struct SamplingOptions {
    /// Lengths of single transfers.
    pub sizes: Vec<u64>,
    /// Commands in flight, and the length of each.
    pub depths: Vec<(u64, u64)>,
    /// Runs that count.
    pub runs: usize,
    /// After this time, three runs are enough.
    pub time_limit: Duration,
}

impl SamplingOptions {
    /// 512 B to 64 MiB, and 2 to 64 commands; nothing longer than `most`.
    pub fn full(most: u64, runs: usize) -> SamplingOptions {
        let sizes = (9..=26).map(|p| 1u64 << p).filter(|s| *s <= most).collect();
        let lengths = [4u64 << 10, 64 << 10, 512 << 10];
        let counts = [2u64, 4, 8, 16, 64];
        let depths = lengths.iter().flat_map(|&s| counts.map(|n| (n, s))).filter(|(n, s)| n * s <= most).collect();
        SamplingOptions { sizes, depths, runs, time_limit: Duration::from_millis(300) }
    }

    /// A few offsets, to check whether a model still fits.
    pub fn quick(most: u64, runs: usize) -> SamplingOptions {
        let sizes = [4u64 << 10, 64 << 10, 1 << 20, 16 << 20].into_iter().filter(|s| *s <= most).collect();
        let depths = [(16u64, 64u64 << 10)].into_iter().filter(|(n, s)| n * s <= most).collect();
        SamplingOptions { sizes, depths, runs, time_limit: Duration::from_millis(200) }
    }

    /// Points to measure of one route.
    pub fn point_count(&self) -> u64 {
        (self.sizes.len() + self.depths.len()) as u64
    }
}

/// A median, and the standard deviation around the mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Bytes in total.
    pub bytes: u64,
    /// Number of commands.
    pub commands: u64,
    /// Nanoseconds.
    pub median: f64,
    /// Nanoseconds: what a sum of many such transfers is made of.
    pub mean: f64,
    /// Over the runs.
    pub deviation: f64,
}

/// What was measured of a route.
#[derive(Clone, Debug)]
pub struct RouteTimes {
    /// The route.
    pub route: Route,
    /// Single transfers, by length.
    pub single: Vec<Timing>,
    /// Many in flight.
    pub queued: Vec<Timing>,
}

impl RouteTimes {
    /// The fit of both.
    pub fn fit(&self) -> anyhow::Result<RouteFit> {
        let samples: Vec<_> = self.single.iter().map(|t| Sample { bytes: t.bytes, nanos: t.median }).collect();
        let batch = |t: &Timing| QueueSample { commands: t.commands, bytes: t.bytes, nanos: t.median };
        let batches: Vec<_> = self.single.iter().chain(&self.queued).map(batch).collect();
        let cannot = || format!("Cannot fit the times of {}", self.route);
        let cost = fit_cost(&samples).with_context(cannot)?;
        let flight = fit_queue(&batches).with_context(cannot)?;
        Ok(RouteFit { route: self.route, cost, queue: flight })
    }

    /// The mean time of a single transfer, interpolated linearly between the measured lengths.
    pub fn interpolate(&self, bytes: u64) -> f64 {
        let after = self.single.partition_point(|t| t.bytes < bytes);
        let (Some(first), Some(last)) = (self.single.first(), self.single.last()) else { return 0.0 };
        let (a, b) = match after {
            0 => return first.mean,
            n if n < self.single.len() => (&self.single[n - 1], &self.single[n]),
            _ if self.single.len() < 2 => return last.mean,
            n => (&self.single[n - 2], &self.single[n - 1]),
        };
        let share = (bytes as f64 - a.bytes as f64) / (b.bytes as f64 - a.bytes as f64);
        a.mean + share * (b.mean - a.mean)
    }
}

/// The routes that a plan for this file and device may use, and those it may not, with the reason.
pub fn routes(trial: &MeasuredRead<'_>, copies: bool) -> (Vec<Route>, Vec<(Route, Reason)>) {
    let wanted = match copies {
        true => [Route::Copy, Route::Dma, Route::Direct, Route::P2p].as_slice(),
        false => &[Route::Store, Route::P2p],
    };
    let (mut open, mut closed) = (Vec::new(), Vec::new());
    for &route in wanted {
        match trial.allows(route) {
            Ok(()) => open.push(route),
            Err(reason) => closed.push((route, reason)),
        }
    }
    (open, closed)
}

/// Segments of one route, end to end, in random order where there are several.
fn segments(route: Route, commands: u64, len: u64, random: &mut SplitMix64) -> Vec<Segment> {
    let segment = |i| Segment { offset: i * len, len, route, reason: Reason::BySetting, refused: None };
    let mut out: Vec<_> = (0..commands).map(segment).collect();
    for i in (1..out.len()).rev() {
        out.swap(i, random.below(i as u64 + 1) as usize);
    }
    out
}

/// One point: the median of several runs after one that does not count.
pub fn point(
    trial: &MeasuredRead<'_>,
    route: Route,
    commands: u64,
    len: u64,
    effort: &SamplingOptions,
    random: &mut SplitMix64,
) -> anyhow::Result<Timing> {
    let bytes = commands * len;
    // Whole pages: the unit of residency, and possible on every route.
    let places = (trial.size() - bytes) / 4096 + 1;
    let mut times = Vec::with_capacity(effort.runs);
    let (begun, mut failures, mut warm) = (Instant::now(), 0, false);
    for _ in 0..=effort.runs {
        let at = random.below(places) * 4096;
        match trial.run(at, &segments(route, commands, len, random)) {
            // The first that took the route: one that failed has warmed nothing up.
            Ok(_) if !warm => warm = true,
            Ok(spent) => times.push(spent.as_nanos() as f64),
            // A piece that took another route was not measured; one failure may be chance.
            Err(e) if failures >= 3 => return Err(e).with_context(|| format!("Cannot measure the route {route}")),
            Err(_) => failures += 1,
        }
        if times.len() >= 3 && begun.elapsed() > effort.time_limit {
            break;
        }
    }
    let median = quantile(&times, 0.5)
        .with_context(|| format!("The route {route} could not be measured: its pieces took other routes"))?;
    let mean = times.iter().sum::<f64>() / times.len() as f64;
    let square = times.iter().map(|t| (t - mean).powi(2)).sum::<f64>() / times.len() as f64;
    Ok(Timing { bytes, commands, median, mean, deviation: square.sqrt() })
}

/// All points of a route; `done` is called after each.
pub fn route(
    trial: &MeasuredRead<'_>,
    route: Route,
    effort: &SamplingOptions,
    random: &mut SplitMix64,
    mut done: impl FnMut(),
) -> anyhow::Result<RouteTimes> {
    let mut times = RouteTimes { route, single: Vec::new(), queued: Vec::new() };
    // A P2P command of less than a block is refused by the disk.
    let least = if route == Route::P2p { trial.align() } else { 1 };
    for &len in &effort.sizes {
        if len >= least && len <= trial.size() {
            times.single.push(point(trial, route, 1, len, effort, random)?);
        }
        done();
    }
    for &(commands, len) in &effort.depths {
        if len >= least && commands * len <= trial.size() {
            times.queued.push(point(trial, route, commands, len, effort, random)?);
        }
        done();
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_interpolated_linearly() {
        let timed = |bytes, median| Timing { bytes, commands: 1, median, mean: median, deviation: 0.0 };
        let times =
            RouteTimes { route: Route::Copy, single: vec![timed(1000, 10.0), timed(2000, 20.0)], queued: vec![] };
        for (bytes, nanos) in [(1, 10.0), (1000, 10.0), (1500, 15.0), (2000, 20.0), (3000, 30.0)] {
            assert_eq!(times.interpolate(bytes), nanos, "{bytes}");
        }
    }

    #[test]
    fn options_respect_max_length() {
        let small = SamplingOptions::full(1 << 20, 3);
        assert_eq!(small.sizes.last(), Some(&(1 << 20)));
        assert!(small.depths.iter().all(|(n, s)| n * s <= 1 << 20) && small.point_count() > 10);
        assert_eq!(SamplingOptions::full(1 << 40, 3).sizes.len(), 18);
    }

    #[test]
    fn segments_cover_range_once() {
        let mut all = segments(Route::Direct, 9, 4096, &mut SplitMix64::new(1, 1));
        all.sort_unstable_by_key(|s| s.offset);
        assert!(all.iter().enumerate().all(|(i, s)| s.offset == i as u64 * 4096 && s.len == 4096));
    }
}
