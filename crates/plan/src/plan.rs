//! The entry point: extents in, schedule out.

use crate::constraints::RouteConstraints;
use crate::scratch::Scratch;
use crate::{Extent, Model, Residency, Schedule, concurrent, greedy, optimal, segments};

/// The objective of a plan, and how exactly it is minimised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Objective {
    /// Storage and page cache work at the same time, with several commands in flight: the slower side counts.
    #[default]
    Concurrent,
    /// The paper's: one transfer after another. The exact optimum.
    Serial,
    /// The same objective by the paper's greedy rule.
    SerialGreedy,
}

impl Objective {
    /// All objectives, in the order in which they are listed everywhere.
    pub const ALL: [Objective; 3] = [Objective::Concurrent, Objective::Serial, Objective::SerialGreedy];

    /// The name used in tables and docs.
    pub const fn name(self) -> &'static str {
        match self {
            Objective::Concurrent => "concurrent",
            Objective::Serial => "serial",
            Objective::SerialGreedy => "greedy",
        }
    }
}

/// Plans a request, whose extents are contiguous, into `out`.
pub fn plan(
    objective: Objective,
    extents: &[Extent],
    model: &Model,
    constraints: &RouteConstraints,
    out: &mut Schedule,
) {
    let Schedule { segments, scratch } = out;
    scratch.fill(extents);
    if constraints.storage.is_none() {
        scratch.runs.iter_mut().for_each(|run| run.from_storage = false);
    } else if !plan_single_run(objective, scratch, model, constraints) {
        match objective {
            Objective::Concurrent => concurrent::decide(scratch, model, constraints),
            Objective::Serial => optimal::decide(scratch, model, constraints),
            Objective::SerialGreedy => greedy::decide(scratch, model, constraints),
        }
    }
    segments::build_segments(scratch, constraints, segments);
}

/// The common request has one residency: two costs to compare at most. False if there is more.
fn plan_single_run(objective: Objective, scratch: &mut Scratch, model: &Model, constraints: &RouteConstraints) -> bool {
    let [run] = &mut scratch.runs[..] else { return false };
    run.from_storage = match run.residency {
        Residency::Absent => true,
        Residency::Unknown => false,
        Residency::Clean | Residency::Dirty => {
            let dirty = if run.residency == Residency::Dirty { run.len as f64 * model.writeback } else { 0.0 };
            let route = constraints.cache_route(run.residency, run.len);
            match objective {
                Objective::SerialGreedy => false,
                Objective::Serial => model.storage.time(run.len) + dirty < model.cost(route).time(run.len),
                Objective::Concurrent => {
                    let queue = &model.storage_queue;
                    let latency = model.queue(constraints.cache).latency;
                    let cache = latency + constraints.queued_cache_time(model, run.residency, run.len);
                    queue.latency + queue.command_time(run.len) + dirty < cache
                }
            }
        }
    };
    true
}
