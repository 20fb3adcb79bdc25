//! Validates the simulator: its times are compared with those of real transfers.
//!
//! ```text
//!   measure single transfers ──> table of times ──> the predicted time of each request
//!                                                        │ compare
//!   give the file the vector's residency ──> one transfer after another ──> the measured time
//! ```
//!
//! The transfers are real: a real file, its pages actually cached or dropped, the engines that serve reads, one segment
//! per request. Only the device may be emulated, with the latency and bandwidth that were set for it. As in the paper
//! the simulator uses measured times, here interpolated linearly between the measured lengths; the error of the fitted
//! Eq. 1 is printed next to it.
//!
//! Known flaws: pages that were just read in are in the processor's cache more often than those that were measured;
//! concurrent use of the disk by other processes affects every figure.

use spinio_io::model::MeasuredRead;
use spinio_plan::{Model, Objective, Route, Schedule, Segment};
use spinio_sys::linux::Advice;

use super::study::{self, BatchStrategy};
use super::vectors::{self, PAGE, Pattern};
use crate::calibrate::measure::{self, RouteTimes, SamplingOptions};
use crate::calibrate::measure_route;
use crate::device::Buffer;
use crate::progress::Progress;
use crate::random::SplitMix64;
use crate::test_file::TestFile;

/// Strategies whose schedules differ.
pub const STRATEGIES: [BatchStrategy; 3] =
    [BatchStrategy::AllStorage, BatchStrategy::AllCache, BatchStrategy::Planned(Objective::SerialGreedy)];

/// One request.
#[derive(Clone, Copy, Debug)]
pub struct RequestResult {
    /// Index into [`STRATEGIES`].
    pub strategy: usize,
    /// Nanoseconds.
    pub measured: f64,
    /// By the table of measured times.
    pub predicted: f64,
    /// By the fitted Eq. 1.
    pub fitted: f64,
}

/// The parameters of the validation.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The number of requests.
    pub requests: u64,
    /// Pages of each.
    pub pages: u64,
    /// The pattern of resident pages.
    pub pattern: Pattern,
    /// The seed of the vectors.
    pub seed: u64,
}

/// The routes, and the results.
pub struct Validation {
    /// From the page cache.
    pub cache: Route,
    /// From storage.
    pub storage: Route,
    /// All requests.
    pub requests: Vec<RequestResult>,
}

/// Mean of |simulated / measured - 1|, and of simulated / measured - 1.
pub fn errors(requests: impl Iterator<Item = (f64, f64)>) -> (f64, f64) {
    let (mut n, mut off, mut bias) = (0.0, 0.0, 0.0);
    for (simulated, measured) in requests {
        let one = simulated / measured - 1.0;
        n += 1.0;
        off += one.abs();
        bias += one;
    }
    if n > 0.0 { (off / n, bias / n) } else { (0.0, 0.0) }
}

/// Measures, then runs the requests.
pub fn run(subject: &TestFile, trial: &MeasuredRead<'_>, buffer: &Buffer, plan: &Plan) -> anyhow::Result<Validation> {
    let (open, _) = measure::routes(trial, buffer.target.allocation.device.capabilities().has_dma_engine);
    let find = |wanted: &[Route]| wanted.iter().copied().find(|r| open.contains(r));
    let (Some(cache), Some(storage)) = (find(&[Route::Copy, Route::Store]), find(&[Route::P2p, Route::Direct])) else {
        anyhow::bail!(
            "Cannot validate on {}: it takes a route from storage and one from the page cache",
            subject.path.display()
        );
    };
    let bytes = plan.pages * PAGE;
    // Single transfers only: here they are made one after another.
    let effort = SamplingOptions {
        depths: Vec::new(),
        time_limit: std::time::Duration::from_secs(2),
        ..SamplingOptions::full(bytes, 50)
    };
    let effort = SamplingOptions { sizes: effort.sizes.iter().copied().filter(|s| *s >= PAGE).collect(), ..effort };
    let (from_storage, from_cache) =
        (measure_route(subject, trial, storage, &effort)?, measure_route(subject, trial, cache, &effort)?);
    let times = |route: Route| if route == storage { &from_storage } else { &from_cache };
    let model = Model {
        storage: spinio_plan::fit_cost(&samples(&from_storage))?.value,
        cache: spinio_plan::fit_cost(&samples(&from_cache))?.value,
        cache_store: spinio_plan::fit_cost(&samples(&from_cache))?.value,
        ..Model::nvme()
    };
    let possible = spinio_plan::RouteConstraints { storage: Some(storage), cache, ..study::constraints() };

    let mut progress = Progress::count(plan.requests, "Reading by simulated schedules");
    let (mut extents, mut schedule, mut requests) = (Vec::new(), Schedule::default(), Vec::new());
    subject.advise(Advice::Random);
    for number in 0..plan.requests {
        let mut random = SplitMix64::new(plan.seed, number);
        vectors::draw(&mut random, plan.pattern, plan.pages, &mut extents);
        let at = random.below((trial.size() - bytes) / PAGE + 1) * PAGE;
        subject.evict(at, bytes);
        let mut from = at;
        for e in &extents {
            if e.residency.is_cached() {
                subject.read_range_into_cache(from, e.len)?;
            }
            from += e.len;
        }
        let strategy = (number % STRATEGIES.len() as u64) as usize;
        STRATEGIES[strategy].schedule(&extents, &model, &possible, &mut schedule);
        let mut request = RequestResult { strategy, measured: 0.0, predicted: 0.0, fitted: 0.0 };
        for s in &schedule.segments {
            let spent = trial.run(at + s.offset, &[Segment { offset: 0, ..*s }])?;
            request.measured += spent.as_nanos() as f64;
            request.predicted += times(s.route).interpolate(s.len);
            request.fitted += model.cost(s.route).time(s.len);
        }
        requests.push(request);
        progress.set(number + 1);
    }
    subject.advise(Advice::Normal);
    Ok(Validation { cache, storage, requests })
}

fn samples(times: &RouteTimes) -> Vec<spinio_plan::Sample> {
    times.single.iter().map(|t| spinio_plan::Sample { bytes: t.bytes, nanos: t.median }).collect()
}

#[cfg(test)]
mod tests {
    use super::errors;

    #[test]
    fn error_is_absolute_and_bias_is_signed() {
        let (off, bias) = errors([(1.1, 1.0), (0.9, 1.0)].into_iter());
        assert!((off - 0.1).abs() < 1e-12 && bias.abs() < 1e-12);
        assert_eq!(errors(std::iter::empty()), (0.0, 0.0));
    }
}
