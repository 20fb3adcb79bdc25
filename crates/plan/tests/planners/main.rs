//! The planners against plans that were found by trying all.
//!
//! ```text
//!   oracle      what a plan costs, and the least of all plans, the slow and obvious way
//!   serial      exact is exact; greedy never better
//!   concurrent  how far from the optimum
//!   schedule    covers the request, keeps what is possible, says why
//! ```

mod concurrent;
mod oracle;
mod schedule;
mod serial;
