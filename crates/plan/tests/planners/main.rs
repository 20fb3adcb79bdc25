//! The planners against plans found by exhaustive search.
//!
//! ```text
//!   oracle      the cost of a plan, and the best of all plans, by exhaustive search
//!   serial      exact is exact; greedy never better
//!   concurrent  how far from the optimum
//!   schedule    covers the request, satisfies the constraints, gives reasons
//! ```

mod concurrent;
mod oracle;
mod schedule;
mod serial;
