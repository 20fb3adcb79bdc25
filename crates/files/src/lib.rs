//! The state that SPIN stores for files between requests.
//!
//! ```text
//!   files          all of it, one object per runtime
//!     state, table   the shadow descriptors, alignment and mapping of a file; which files are remembered
//!     ring_slot      the slots of a file in rings that read storage
//!     residency      which pages of a range are cached
//!     sequential     which descriptors read sequentially
//!     known_fds      which descriptors have reads that end by themselves, or are of files on a disk of this machine
//!     no_p2p_fds     which descriptors have storage that reaches no device
//!     readahead      which pages such reads added to the page cache, and when they are dropped
//!     block_stack, stripes   the block devices under a file, and its position in an array with parity
//!     p2p_probe, p2p_trust   whether storage may DMA into a device
//!     cost/          what each route costs: calibrated, default, corrected
//!     prefault_state, prefault   page tables filled before a stream needs them
//!     shadow_file    files that SPIN opened itself
//!     write_lease, lease_watcher   exclusive access to such a file
//!   ctx            the handles of the host that all of these use
//! ```

pub mod block_stack;
pub mod cost;
mod ctx;
mod fd_identity;
mod files;
pub mod known_fds;
mod lease_watcher;
mod no_p2p_fds;
pub mod p2p_probe;
mod p2p_trust;
pub mod prefault;
pub mod prefault_state;
pub mod readahead;
pub mod residency;
mod ring_slot;
pub mod sequential;
pub mod shadow_file;
mod state;
pub mod stripes;
mod table;
pub mod write_lease;

pub use ctx::FilesCtx;
pub use fd_identity::{FdChange, FdIdentity, SameFile};
pub use files::Files;
pub use lease_watcher::{LeaseWatch, LeaseWatcher, lease_valid_until};
pub use no_p2p_fds::NoP2pFds;
pub use p2p_trust::{P2pTrust, P2pTrustMap};
pub use residency::ResidencyAccess;
pub use shadow_file::{ShadowFile, is_shadow, program_fd};
pub use state::{FileState, share_key, size_of};
pub use write_lease::WriteLease;
