//! Maps of a device whose kernels access all memory of the process (HMM, or the CPU's page tables): the map is a shared
//! mapping of the file, and the device is one more CPU.
//!
//! ```text
//!   kernel: load, store ──> mapping of the file ──> page cache of the mount <── `write`, mappings of CPU programs
//!                                │ fault                  │         ▲
//!                                └─ READ ──> server <─────┘ WRITE   └─ INVAL: a release of a map with a replica
//! ```
//!
//! The Linux kernel keeps such a mapping coherent, so there is nothing to bring up to date and nothing to publish:
//!
//! - **acquire**: what CPU programs have written is in the same pages. What another map has released was invalidated
//!   before its release returned, so that the next load faults. What is left is the size of the file: the pages of the map
//!   that are past its end are private zeros, so that kernels may touch all of a range that was acquired.
//! - **release** waits for the thread's stream. The stores are those of a CPU program's mapping: maps with replicas see
//!   them after the flush of their acquire, which the server demands while a program has the file open for writing, as
//!   this mapping does.
//!
//! No epoch is lost with the server: pages that are not written back yet are the Linux kernel's. A map tells each server
//! about itself, for `spinio gaia explain` only.
//!
//! A file that is below no mount is mapped for reading, without a daemon and without a lease: a copy would become stale
//! when a program writes, the page cache does not.
//!
//! Known flaws: stores are visible before their release, and stay after the end of a program in its epoch. Pages that a
//! program cuts off while a kernel uses them are an error of the program, as for any mapping: on a GPU its context is lost.

mod map;
mod mapping;
mod source;
mod stream_order;

pub use map::Map;
