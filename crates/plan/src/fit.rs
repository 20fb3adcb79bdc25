//! Regression: from measured times to the parameters of a cost.
//!
//! ```text
//!   one transfer at a time                     n commands in flight
//!
//!   T │            o╱                          T = latency + n * cost per command + s / BW
//!     │          ╱o                            three unknowns, none below 0
//!   C │o──o───o╯
//!     └────────┴──────── s
//!          S_cutoff
//! ```
//!
//! Times of 512 B and of 64 MiB differ by four orders of magnitude, and a planner compares both. So
//! the objective is the sum of the squares of the *relative* errors; plain least squares would fit
//! the largest transfers and nothing else.
//!
//! **Eq. 1.** For a given cutoff, `C` and `1 / BW` are a straight line through the points, in closed form. That `C` is
//! at least `S_cutoff / BW` (cost.rs) is one linear constraint: if the best line violates it, the solution is the best
//! line on its edge, `T = max(s, S_cutoff) / BW`. The cutoff itself is searched on a grid, then between the neighbours
//! of the best one. Of cutoffs that fit equally well the smallest is taken.
//!
//! **In flight.** Least squares with three unknowns that may not be negative: the solution is the
//! best of the plain least squares on each of the seven sets of unknowns that are not 0.
//!
//! Known flaws: outliers are not recognised; the caller passes the median of several runs. R^2 is of the
//! times themselves, as in the paper, so the largest decide it; `error` shows how the rest fits.

use std::fmt;

use crate::cost::{Cost, QueueCost};

/// One transfer by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Its length.
    pub bytes: u64,
    /// Its duration.
    pub nanos: f64,
}

/// Commands in flight together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueSample {
    /// Number of commands.
    pub commands: u64,
    /// Their total length.
    pub bytes: u64,
    /// From the first start to the last end.
    pub nanos: f64,
}

/// Fitted parameters, and how well they explain the measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit<T> {
    /// The parameters.
    pub value: T,
    /// Coefficient of determination, at most 1.
    pub r2: f64,
    /// Mean of |predicted / measured - 1|.
    pub error: f64,
}

/// Measurements that cannot be fitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FitError {
    /// Fewer than two different lengths.
    TooFew,
    /// A time that is not above 0, or infinite, or NaN; or a transfer of no bytes.
    InvalidTime,
}

impl fmt::Display for FitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FitError::TooFew => "a fit needs measurements of at least two different lengths",
            FitError::InvalidTime => "a measured time must be above 0 and finite, and be of at least one byte",
        })
    }
}

impl std::error::Error for FitError {}

/// Nanoseconds per byte, as a lower limit of a plausible transfer: 10^15 bytes a second. Keeps bandwidths finite.
const MIN_PER_BYTE: f64 = 1e-6;
/// Cutoffs tried in the first round, besides the lengths themselves, and in the second.
const CUTOFF_GRID: usize = 256;

/// `C`, `S_cutoff` and `BW` of Eq. 1.
pub fn fit_cost(samples: &[Sample]) -> Result<Fit<Cost>, FitError> {
    let (least, most) = length_range(samples.iter().map(|s| (s.bytes, s.nanos)))?;
    let mut best = Line::fit(samples, 0);
    let better = |line: Line, best: &mut Line| {
        if line.loss < best.loss * (1.0 - 1e-9) {
            *best = line;
        }
    };
    let ratio = (most as f64 / least as f64).powf(1.0 / CUTOFF_GRID as f64);
    let mut cutoffs: Vec<u64> = (0..=CUTOFF_GRID).map(|i| (least as f64 * ratio.powi(i as i32)) as u64).collect();
    cutoffs.extend(samples.iter().take(CUTOFF_GRID).map(|s| s.bytes));
    cutoffs.sort_unstable();
    cutoffs.dedup();
    for &cutoff in &cutoffs {
        better(Line::fit(samples, cutoff), &mut best);
    }
    // Between the neighbours of the best, in equal steps.
    let at = cutoffs.partition_point(|&c| c < best.cutoff);
    let from = if at > 0 { cutoffs[at - 1] } else { 0 };
    let to = cutoffs.get(at + 1).copied().unwrap_or(most);
    for i in 1..CUTOFF_GRID as u64 {
        let cutoff = from + ((to - from) as u128 * u128::from(i) / CUTOFF_GRID as u128) as u64;
        better(Line::fit(samples, cutoff), &mut best);
    }
    let bandwidth = 1e9 / best.per_byte;
    // As `Cost::new` will compute it, so that rounding does not break the rule.
    let fixed = best.fixed.max(best.cutoff as f64 * (1e9 / bandwidth));
    let value = Cost::new(fixed, best.cutoff, bandwidth).map_err(|_| FitError::InvalidTime)?;
    let (r2, error) = goodness_of_fit(samples.iter().map(|s| (value.time(s.bytes), s.nanos)));
    Ok(Fit { value, r2, error })
}

/// Latency, cost per command and bandwidth of commands in flight together.
pub fn fit_queue(batches: &[QueueSample]) -> Result<Fit<QueueCost>, FitError> {
    length_range(batches.iter().map(|b| (b.bytes, b.nanos)))?;
    if batches.iter().any(|b| b.commands == 0) {
        return Err(FitError::InvalidTime);
    }
    // Rows divided by their time: the remainder is the relative error. Columns scaled to length 1.
    let rows: Vec<[f64; 3]> =
        batches.iter().map(|b| [1.0 / b.nanos, b.commands as f64 / b.nanos, b.bytes as f64 / b.nanos]).collect();
    let scale: [f64; 3] = std::array::from_fn(|i| rows.iter().map(|r| r[i] * r[i]).sum::<f64>().sqrt());
    let mut best: Option<(f64, [f64; 3])> = None;
    // Bytes alone first, then with a latency, then with a cost per command: of equal results the first is kept.
    for set in [[2].as_slice(), &[0, 2], &[1, 2], &[0, 1, 2], &[0], &[1], &[0, 1]] {
        let Some(found) = solve(&rows, &scale, set) else { continue };
        let loss: f64 = rows.iter().map(|r| (r[0] * found[0] + r[1] * found[1] + r[2] * found[2] - 1.0).powi(2)).sum();
        if loss.is_finite() && best.is_none_or(|(least, _)| loss < least * (1.0 - 1e-9)) {
            best = Some((loss, found));
        }
    }
    let (_, [latency, per_command, per_byte]) = best.ok_or(FitError::InvalidTime)?;
    let value = QueueCost { latency, per_command, per_byte: per_byte.max(MIN_PER_BYTE) };
    let (r2, error) =
        goodness_of_fit(batches.iter().map(|b| {
            (value.latency + b.commands as f64 * value.per_command + b.bytes as f64 * value.per_byte, b.nanos)
        }));
    Ok(Fit { value, r2, error })
}

/// The shortest and the longest, if there are both and every time is one.
fn length_range(measured: impl Iterator<Item = (u64, f64)>) -> Result<(u64, u64), FitError> {
    let (mut shortest, mut most) = (u64::MAX, 0);
    for (bytes, nanos) in measured {
        if bytes == 0 || bytes > 1 << 60 || !(nanos.is_normal() && (1e-3..1e18).contains(&nanos)) {
            return Err(FitError::InvalidTime);
        }
        shortest = shortest.min(bytes);
        most = most.max(bytes);
    }
    if shortest < most { Ok((shortest, most)) } else { Err(FitError::TooFew) }
}

/// R^2 and the mean relative error.
fn goodness_of_fit(predicted: impl Iterator<Item = (f64, f64)> + Clone) -> (f64, f64) {
    let n = predicted.clone().count() as f64;
    let mean = predicted.clone().map(|(_, t)| t).sum::<f64>() / n;
    let all: f64 = predicted.clone().map(|(_, t)| (t - mean).powi(2)).sum();
    let left: f64 = predicted.clone().map(|(p, t)| (p - t).powi(2)).sum();
    let error = predicted.map(|(p, t)| (p / t - 1.0).abs()).sum::<f64>() / n;
    // Equal times leave nothing to explain.
    let r2 = if all > 0.0 { 1.0 - left / all } else { f64::from(u8::from(left <= 1e-9 * mean * mean)) };
    (r2, error)
}

/// The best line for one cutoff.
#[derive(Clone, Copy)]
struct Line {
    cutoff: u64,
    fixed: f64,
    per_byte: f64,
    loss: f64,
}

impl Line {
    fn fit(samples: &[Sample], cutoff: u64) -> Line {
        let above = |s: &Sample| s.bytes.saturating_sub(cutoff) as f64;
        let weight = |s: &Sample| 1.0 / (s.nanos * s.nanos);
        let all: f64 = samples.iter().map(weight).sum();
        let x = samples.iter().map(|s| weight(s) * above(s)).sum::<f64>() / all;
        let t = samples.iter().map(|s| weight(s) * s.nanos).sum::<f64>() / all;
        let spread: f64 = samples.iter().map(|s| weight(s) * (above(s) - x).powi(2)).sum();
        let slope: f64 = samples.iter().map(|s| weight(s) * (above(s) - x) * (s.nanos - t)).sum::<f64>() / spread;
        let per_byte = if slope.is_finite() { slope.max(MIN_PER_BYTE) } else { MIN_PER_BYTE };
        let fixed = t - per_byte * x;
        let free = Line { cutoff, fixed, per_byte, loss: 0.0 };
        let line = if fixed >= cutoff as f64 * per_byte { free } else { Line::fit_through_origin(samples, cutoff) };
        let loss = |s: &Sample| ((line.fixed + above(s) * line.per_byte) / s.nanos - 1.0).powi(2);
        Line { loss: samples.iter().map(loss).sum(), ..line }
    }

    /// The best of those with `C = S_cutoff / BW`: one straight line through the origin, flat below the cutoff.
    fn fit_through_origin(samples: &[Sample], cutoff: u64) -> Line {
        let ratio = |s: &Sample| s.bytes.max(cutoff) as f64 / s.nanos;
        let (once, twice) = samples.iter().map(ratio).fold((0.0, 0.0), |(once, twice), r| (once + r, twice + r * r));
        let per_byte = (once / twice).max(MIN_PER_BYTE);
        Line { cutoff, fixed: cutoff as f64 * per_byte, per_byte, loss: 0.0 }
    }
}

/// Least squares on some of the unknowns, the others 0; none if it is not unique or negative.
fn solve(rows: &[[f64; 3]], scale: &[f64; 3], set: &[usize]) -> Option<[f64; 3]> {
    let n = set.len();
    // The normal equations, with the right side as the last column.
    let mut m = [[0.0; 4]; 3];
    for (i, &a) in set.iter().enumerate() {
        for (j, &b) in set.iter().enumerate() {
            m[i][j] = rows.iter().map(|r| r[a] / scale[a] * (r[b] / scale[b])).sum();
        }
        m[i][n] = rows.iter().map(|r| r[a] / scale[a]).sum();
    }
    for column in 0..n {
        let pivot = (column..n).max_by(|&a, &b| m[a][column].abs().total_cmp(&m[b][column].abs()))?;
        if m[pivot][column].abs() < 1e-9 {
            return None;
        }
        m.swap(column, pivot);
        let row = m[column];
        for (i, other) in m.iter_mut().enumerate().take(n) {
            if i != column {
                let times = other[column] / row[column];
                other.iter_mut().zip(row).for_each(|(o, r)| *o -= times * r);
            }
        }
    }
    let mut out = [0.0; 3];
    for (i, &a) in set.iter().enumerate() {
        let value = m[i][n] / m[i][i] / scale[a];
        if !(value.is_finite() && value >= 0.0) {
            return None;
        }
        out[a] = value;
    }
    Some(out)
}
