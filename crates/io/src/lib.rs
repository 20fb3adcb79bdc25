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

mod error;
mod fetch;
mod runtime;
pub mod settings;
pub mod stats;

pub use error::{Error, ErrorKind};
pub use runtime::{Runtime, Target, runtime};
pub use settings::Settings;
