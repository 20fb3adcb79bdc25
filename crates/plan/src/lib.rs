//! Routing as arithmetic: the residency of the bytes, the cost of each route, and the cheapest schedule.
//!
//! ```text
//!   extents (residency) ──> runs ─┐
//!   cost model ───────────────────┼──> planner: storage or cache, ──> segments: each with
//!   constraints ──────────────────┘    run by run                     a route and a reason
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
//! Known flaws: the cost of an edge that alignment cuts off is predicted, but the planners ignore it.
#![forbid(unsafe_code)]

mod batch_cost;
mod calibration;
mod coalesce;
mod concurrent;
mod constraints;
mod cost;
mod fit;
pub mod geometry;
mod greedy;
mod optimal;
mod plan;
mod predict;
pub mod readahead;
mod schedule;
mod scratch;
mod segments;
mod sliding_min;
pub mod stripe_layout;
mod types;
mod write;

pub use batch_cost::{BatchStrategy, DensityStats};
pub use calibration::{Calibration, ParseError, RouteFit};
pub use coalesce::{CoalesceRule, CoalescedRead, Span, coalesce};
pub use constraints::RouteConstraints;
pub use cost::{Cost, CostError, Model, QueueCost};
pub use fit::{Fit, FitError, QueueSample, Sample, fit_cost, fit_queue};
pub use plan::{Objective, plan};
pub use predict::{Prediction, predict};
pub use schedule::Schedule;
pub use types::{Extent, Reason, Residency, Route, Segment};
pub use write::{WriteConstraints, WriteDecision, decide_write, split_aligned};
