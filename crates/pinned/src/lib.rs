//! Pinned files: their pages stay registered with a device, for repeated reads.
//!
//! ```text
//!   pin(fd) ── a lease, a seal ... excludes writers                                  write_exclusion.rs
//!     │
//!     ├─ for each device: a mapping of the whole file, registered in chunks          pinned_pages.rs
//!     │
//!     ├─ read      DMA straight out of the pages: no registration, no CPU copy       read.rs
//!     ├─ batch     a GPU kernel gathers the operations straight out of the pages     crates/batch
//!     └─ map       an address through which the program's own GPU kernels read       device_mapping.rs
//!
//!   another process opens the file for writing ──> the Linux kernel blocks it, and signals the lease watcher
//!     reads finish ─ pages are unpinned ─ the lease is released ──> the writer's open returns      unpinner.rs
//! ```
//!
//! Registered pages cannot be reclaimed. If a file is truncated, or written past the page cache, they are orphans with
//! old bytes. So a file is pinned only while something excludes writers, which is checked before each use and after it:
//! bytes that were read after the exclusion had ended are read again on another route.
//!
//! Absent pages are read in while the file is registered: all of a pinned file is in memory, and `SPINIO_PIN_LIMIT`
//! limits the total.
//!
//! A forked child has no pinned files: it creates its own runtime. Its copy of the program's descriptors has no part in
//! the lease, which belongs to a descriptor of SPIN.
//!
//! Known flaws:
//! - Unpinning waits for all work in the context (CUDA). So a long GPU kernel of the program delays a writer until it
//!   ends, at most until the Linux kernel breaks the lease by force.
//! - A process that opens the file for writing with O_NONBLOCK gets EAGAIN meanwhile, as with any lease.
//! - If a program closes its last descriptor of a pinned file in a way that no hook sees, the file stays pinned.

mod device_mapping;
mod error;
mod pinned_file;
mod pinned_files;
mod pinned_list;
mod pinned_pages;
mod read;
mod ref_gate;
mod unpinner;
mod write_exclusion;

#[cfg(all(test, loom))]
mod interleavings;

pub use device_mapping::DeviceMapping;
pub use error::PinError;
pub use pinned_file::PinGuard;
pub use pinned_files::PinnedFiles;
pub use pinned_pages::PinnedPages;
