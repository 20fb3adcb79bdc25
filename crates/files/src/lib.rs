//! What SPIN keeps beside files between requests.
//!
//! ```text
//!   files          all of it, one object a runtime
//!     state, table   a file's shadow descriptors, alignment, mapping; which files are remembered
//!     residency      which pages of a range are cached
//!     streams        which descriptors read in sequence
//!     readahead      what such reads brought into the page cache, and how it leaves
//!     block_stack, stripes   the block devices under a file, and its place in an array with parity
//!     p2p_probe, p2p_trust   whether storage may DMA into a device
//!     cost/          what each route costs: calibrated, default, corrected
//!     tables, prefault       page tables filled before a stream needs them
//!     shadow_file    files that SPIN opened itself
//!     write_lease, lease_watcher   being alone with such a file
//!   ctx            the host's handles that all of these use
//! ```

pub mod block_stack;
pub mod cost;
mod ctx;
mod fd_identity;
mod files;
mod lease_watcher;
pub mod p2p_probe;
mod p2p_trust;
pub mod prefault;
pub mod readahead;
pub mod residency;
pub mod shadow_file;
mod state;
pub mod streams;
pub mod stripes;
mod table;
pub mod tables;
pub mod write_lease;

pub use ctx::FilesCtx;
pub use fd_identity::{FdIdentity, fds_change};
pub use files::Files;
pub use lease_watcher::lease_valid_until;
pub use p2p_trust::{P2pTrust, P2pTrustMap};
pub use residency::ResidencyAccess;
pub use shadow_file::{ShadowFile, is_shadow};
pub use state::{FileState, share_key};
pub use write_lease::WriteLease;
