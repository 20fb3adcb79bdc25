//! The entry: extents in, schedule out.

use crate::possible::Possible;
use crate::scratch::Scratch;
use crate::{Extent, Model, Residency, Schedule, concurrent, greedy, lay, optimal};

/// What a plan is to be good at, and how hard to try.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Objective {
    /// Storage and page cache at the same time, commands in flight together: the slower side counts.
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

/// Plans a request whose extents lie end to end, into `out`.
pub fn plan(objective: Objective, extents: &[Extent], model: &Model, possible: &Possible, out: &mut Schedule) {
    let Schedule { segments, scratch } = out;
    scratch.fill(extents);
    if possible.storage.is_none() {
        scratch.runs.iter_mut().for_each(|run| run.from_storage = false);
    } else if !only_run(objective, scratch, model, possible) {
        match objective {
            Objective::Concurrent => concurrent::decide(scratch, model, possible),
            Objective::Serial => optimal::decide(scratch, model, possible),
            Objective::SerialGreedy => greedy::decide(scratch, model, possible),
        }
    }
    lay::lay(scratch, possible, segments);
}

/// The usual request is all of one residency: two costs to compare at most. False if there is more.
fn only_run(objective: Objective, scratch: &mut Scratch, model: &Model, possible: &Possible) -> bool {
    let [run] = &mut scratch.runs[..] else { return false };
    run.from_storage = match run.residency {
        Residency::Absent => true,
        Residency::Unknown => false,
        Residency::Clean | Residency::Dirty => {
            let dirty = if run.residency == Residency::Dirty { run.len as f64 * model.writeback } else { 0.0 };
            let route = possible.cache_route(run.residency, run.len);
            match objective {
                Objective::SerialGreedy => false,
                Objective::Serial => model.storage.time(run.len) + dirty < model.cost(route).time(run.len),
                Objective::Concurrent => {
                    let flight = &model.storage_flight;
                    let latency = model.flight(possible.cache).latency;
                    let cache = latency + possible.flight_cache(model, run.residency, run.len);
                    flight.latency + flight.share(run.len) + dirty < cache
                }
            }
        }
    };
    true
}
