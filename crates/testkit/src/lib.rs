//! What tests of several crates need.
//!
//! ```text
//!   place     a folder on a file system: ext4, tmpfs, overlay, btrfs, xfs, data=journal, FUSE; or why not
//!   file      holes, unwritten extents, and which pages are in the page cache
//!   buffer    memory of an emulated device, and what is in it
//!   oracle    which bytes a read beside a writer may have returned
//!   faulty_*  a device, or a kernel, that fails the n-th call of an operation
//!   leaks     descriptors of every table, mappings
//!   child     a forked child, and its verdict
//!   alone     waits until no child of another test has a file open
//!   user      the same test once more as an ordinary user
//! ```
//!
//! Nothing here is linked into what users run, and nothing here is timed: a deadline only turns a hang into a failure.

pub mod alone;
pub mod buffer;
pub mod child;
pub mod deadline;
pub mod faulty_device;
pub mod faulty_kernel;
pub mod file;
mod fuse;
pub mod hang;
pub mod leaks;
pub mod oracle;
pub mod place;
pub mod rng;
pub mod user;

pub use alone::wait_exclusive;
pub use buffer::Buffer;
pub use child::in_child;
pub use deadline::{eventually, with_deadline};
pub use faulty_device::{FaultyDevice, Operation};
pub use faulty_kernel::{Call, Effect, FaultySyscalls};
pub use rng::Rng;
