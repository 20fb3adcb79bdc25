//! Requests on files, executed: the heart of SPIN.
//!
//! ```text
//!   Read { fd, offset, address, len }
//!     │  small: one page-cache read into staging, one queued copy, return
//!     ▼
//!   file state ──> residency ──> plan ──> schedule
//!                                            │ pieces
//!                     ┌──────────┬───────────┼──────────┬─────────┐
//!                   copy        dma        store      direct     p2p      engines
//!                     └──────────┴───────────┴──────────┴─────────┘
//!                                            ▼
//!                          bytes delivered, statistics
//! ```

mod canary;
mod core;
mod crew;
mod engine;
mod error;
mod explain;
mod fetch;
mod file;
mod job;
pub mod kernel;
mod large;
mod lock;
mod pins;
mod plain;
mod residency;
mod route;
mod runtime;
pub mod settings;
mod small;
mod staging;
pub mod stats;
mod work;

pub use error::{Error, ErrorKind};
pub use explain::{Buffer, Explanation};
pub use runtime::{Runtime, Target, forget, forget_all, runtime};
pub use settings::Settings;
