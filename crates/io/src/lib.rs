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
//! `spinio-batch` reads thousands of ranges at once; `spinio-pinned` keeps files registered for reads that come again.

mod api;
pub mod ctx;
mod decide;
mod explain;
mod host_copy;
mod policy;
mod read;
mod stream;
mod trial;
mod write;

pub use api::{Runtime, apply_advice, check_settings, has_runtime, on_close, on_close_range, record_advice, runtime};
pub use decide::Buffer;
pub use explain::Explanation;
pub use policy::RoutePolicy;
pub use spinio_device::Target;
pub use spinio_files::known_fds::set_changes_counted;
pub use spinio_files::stripes::{NoStripeMap, ParityArray, StripeMap};
pub use spinio_files::{FdChange, SameFile, ShadowFile, WriteLease, program_fd};
pub use spinio_host::storage_rings::NoRing;
pub use spinio_host::{
    CancelPoll, Settings, deliver_after, device_call, install_cancel_poll, is_cancelled, is_in_device_call, settings,
    syscalls as kernel,
};
pub use spinio_pinned::{DeviceMapping, PinError, PinGuard};
pub use spinio_stats as stats;
pub use spinio_transfer::{AlignedBuf, Error, ErrorKind};
pub use stream::AsyncResult;
pub use write::Part;

/// Cost models, and trials that measure them.
pub mod model {
    pub use crate::trial::MeasuredRead;
    pub use spinio_files::cost::*;
}
