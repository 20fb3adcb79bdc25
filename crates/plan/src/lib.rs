//! Routing as arithmetic: who is resident, what each route costs, which schedule is cheapest.
//!
//! ```text
//!   extents (residency) ──> runs ─┐
//!   cost model ───────────────────┼──> planner: storage or cache, ──> lay: segments, each with
//!   what is possible ─────────────┘    run by run                     a route and a reason
//!                                        optimal     the paper's cost, exact
//!                                        greedy      the paper's rule
//!                                        concurrent  both sides at once, the default
//! ```
//!
//! The costs of a model are defaults, or were measured and fitted (`fit`, `calibration`).
//!
//! Nothing here reads a file, a clock or a setting, so everything here can be
//! tested against brute force.
//!
//! Known flaws: the cost of an edge that alignment cuts off is predicted, but not weighed.
#![forbid(unsafe_code)]

mod calibration;
mod concurrent;
mod cost;
mod fit;
mod gathering;
pub mod geometry;
mod greedy;
mod lay;
mod merge;
mod optimal;
mod plan;
mod possible;
mod predict;
pub mod readahead;
mod schedule;
mod scratch;
pub mod shape;
mod window;
mod words;
mod write;

pub use calibration::{Calibration, ParseError, RouteFit};
pub use cost::{Cost, CostError, Model, QueueCost};
pub use fit::{Fit, FitError, QueueSample, Sample, fit_cost, fit_queue};
pub use gathering::{BatchStrategy, DensityStats};
pub use merge::{CoalesceRule, CoalescedRead, Span, coalesce};
pub use plan::{Objective, plan};
pub use possible::RouteConstraints;
pub use predict::{Prediction, predict};
pub use schedule::Schedule;
pub use words::{Extent, Reason, Residency, Route, Segment};
pub use write::{WriteConstraints, WriteDecision, decide_write, split_aligned};
