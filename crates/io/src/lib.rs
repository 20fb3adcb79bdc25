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
//!
//! `batch` has thousands of reads at once, `hold` files that stay registered for reads that come again.

mod aligned_buf;
mod batch;
mod copies;
mod core;
mod crew;
mod error;
mod explain;
mod fd_identity;
mod file;
mod hold;
mod interrupt;
pub mod kernel;
mod lock;
pub mod model;
mod own;
mod pins;
mod read;
mod runtime;
pub mod settings;
mod staging;
pub mod stats;
mod sync;
mod write;

pub use aligned_buf::AlignedBuf;
pub use batch::{Done, Each, Many, Piece, Ticket};
pub use error::{Error, ErrorKind};
pub use explain::{Buffer, Explanation};
pub use fd_identity::{FdIdentity, fds_change};
pub use file::stripes::{Array, NoStripes, Surveyed};
pub use hold::{Mapped, NotHeld};
pub use interrupt::{Interruptible, interruptible, is_interrupted};
pub use own::{OnItsWay, OwnFile, WriteLease};
pub use runtime::{Runtime, Target, advised, forget, forget_range, note_advice, runtime};
pub use settings::Settings;
pub use write::Part;
