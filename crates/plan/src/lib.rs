//! Routing as arithmetic: who is resident, what each route costs, which schedule is cheapest.
//!
//! ```text
//!   residency (extents) ─┐
//!   cost model ──────────┼──> planner ──> schedule: segments, each with a route and a reason
//!   what is possible ────┘
//! ```
//!
//! Nothing here reads a file, a clock or a setting, so everything here can be
//! tested against brute force.
#![forbid(unsafe_code)]

mod cost;
mod words;

pub use cost::{BadCost, Cost, Flight, Model};
pub use words::{Extent, Reason, Residency, Route, Schedule, Segment};
