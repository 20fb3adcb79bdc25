//! Maps of files in device memory: GPU kernels load and store file pages, and CPU programs use the same file.
//!
//! ```text
//!   program ── acquire, release ──> Map ──────── replica in device memory, private to this map      replica.rs
//!   (any thread)                     │  scan, copies on the program's stream                        epoch.rs
//!                                    │ window: a memory file shared with the server                 window.rs
//!                                    v
//!                              link thread, unshared fd table ── socket ──> server                  link.rs
//!                                    ├── descriptor of the mounted file: flush, times, tickets      mounted_file.rs
//!                                    └── descriptor of the file below the mount: read only          connection.rs
//! ```
//!
//! **acquire** flushes what CPU programs have written, then brings the replica up to date. **release** finds the pages
//! that changed since then by their fingerprints, and has the server commit them: all or nothing. The server merges
//! pages that others have changed meanwhile, byte by byte, and invalidates the Linux kernel's copies.
//!
//! Both can also be done in the order of a stream, by a thread of the device ([`stream_order`], [`lane`]).
//!
//! The server never calls a device. It trusts no bytes of a client but those that the client could write to the file
//! anyway. A client that dies leaves nothing: its unreleased stores are dropped.
//!
//! When the server dies, its supervisor starts another. An epoch that was open then fails with ESTALE, because bases
//! are not persistent; the map itself stays, and its next acquire attaches to the new server ([`reattach`]).
//!
//! Files that are not below a mount are mapped by another way, read-only: [`leased`].
//!
//! A map can also be read in place, from the page cache of the Linux kernel, without device memory ([`in_place`]). On a
//! device whose kernels access all memory of the process it is read and written there ([`coherent`]).
//! Kernels can also read files on demand, without a map: [`reader`].
//!
//! Pages that another map of the process has on another device are copied from there ([`peers`]).
//!
//! Device memory comes chunk by chunk, when pages are acquired, and goes when others need it ([`chunks`], [`room`]).
//!
//! Known flaws: one thread for each map; on a device without chunks a replica is one allocation.

mod advice;
mod attach;
mod call_checks;
mod chunks;
pub mod coherent;
mod connection;
mod counters;
mod current;
mod drops;
mod epoch;
mod error;
mod fetch;
mod file_reader;
mod handoff;
mod in_place;
mod lane;
pub mod leased;
mod lend;
mod link;
mod map;
mod maps;
mod mounted_file;
mod overlapped_copies;
mod owned_fd;
mod owner_name;
mod page_states;
mod peers;
mod process_owned;
mod queued_calls;
mod ranges;
pub mod reader;
mod reattach;
mod registered_stages;
mod replica;
mod room;
mod socket;
mod sources;
mod staging;
mod state;
mod stream_order;
mod table_thread;
mod window;

#[cfg(test)]
mod tests;

pub use advice::Advice;
pub use error::Error;
pub use file_reader::{FileReader, OpenFile};
pub use map::Map;
pub use maps::{FileMap, map, map_in_place, unmap, unmap_range, with_map};
pub use ranges::touches_map;
pub use room::limit_memory;
pub use spinio_pagecache::leased_messages::PeerRefusal;
pub use spinio_pagecache::messages::{Access, Stats};
pub use state::{InPlaceWay, Info};
pub use stream_order::StreamRelease;

type Result<T> = core::result::Result<T, Error>;
