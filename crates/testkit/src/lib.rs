//! What tests of several crates need.
//!
//! ```text
//!   mount_fixture  a directory on a file system: ext4, tmpfs, overlay, btrfs, xfs, data=journal, FUSE; or why not
//!   file           holes, unwritten extents, and which pages are in the page cache
//!   buffer         memory of an emulated device, and its contents
//!   oracle         which bytes a read concurrent with a writer may have returned
//!   advice_log     which pages a runtime has had the kernel drop
//!   faulty_*       a device, or system calls, that fail the n-th call of an operation
//!   leak_check     descriptors of every table, mappings
//!   child          a forked child, and its exit status
//!   stop           a process stopped by a signal
//!   exclusive      waits until no child of another test has a file open
//!   as_user        the same tests once more as an ordinary user
//! ```
//!
//! Nothing here is linked into what users run, and nothing here is timed: a deadline only turns a hang into a failure.

mod advice_log;
pub mod as_user;
pub mod buffer;
pub mod child;
pub mod deadline;
pub mod exclusive;
pub mod faulty_device;
pub mod faulty_syscalls;
pub mod file;
mod fuse;
pub mod futex_trace;
pub mod hang;
pub mod leak_check;
pub mod mount_fixture;
pub mod oracle;
pub mod rng;
mod stop;

pub use advice_log::AdviceLog;
pub use buffer::Buffer;
pub use child::in_child;
pub use deadline::{eventually, with_deadline};
pub use exclusive::{wait_exclusive, wait_unwritten};
pub use faulty_device::{FaultyDevice, Operation};
pub use faulty_syscalls::{Call, Effect, FaultySyscalls};
pub use rng::Rng;
pub use stop::{continue_process, stop_process};
