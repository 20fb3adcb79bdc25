//! Maps of leased files: read-only, of any local file that no process writes, one copy for each GPU and user.
//!
//! ```text
//!   acquire ── Map ─────────── chunks side by side at reserved addresses, mapped read-only           chunks.rs
//!               │  fills absent ones through SPIN's routes (FileReader),                             fill.rs
//!               │  or from the copy that another device has
//!               v
//!          thread, unshared fd table ── socket ──> spinio gaia serve: who fills what; descriptors    connection.rs
//! ```
//!
//! The daemon holds a read lease of the file, and a descriptor of each chunk. A chunk is filled by one process and
//! mapped by all. When a process opens the file for writing, the daemon gives the lease back and forgets the chunks; a
//! map keeps the old bytes until its next acquire, which maps chunks of the new content at the same addresses.
//!
//! An acquire of an unchanged range is one message: the daemon verifies its lease, and thereby that it exists itself.
//! If the daemon has ended, the bytes stay where they are, and the next acquire needs another daemon.
//!
//! Chunks lie on a grid of the file. Their length depends on its size, so a map reserves addresses for the coarser grid.
//!
//! Known flaws:
//! - One thread for each map.
//! - If a file grows or shrinks over a size from which chunks are larger, an acquire of a part of the map may unmap
//!   ranges beside it, up to 256 MiB away: acquire those again.

mod acquire;
mod chunks;
mod connection;
mod fill;
mod imports;
mod map;

use std::path::PathBuf;

use spinio_host::Settings;

pub use map::Map;

/// Where the daemon may be, in the order of preference.
pub fn sockets() -> Vec<PathBuf> {
    let settings = Settings::of_process();
    let (socket, runtime_dir) = (settings.gaia_socket.as_deref(), settings.runtime_dir.as_deref());
    spinio_pagecache::leased_messages::sockets(socket, rustix::process::geteuid().is_root(), runtime_dir)
        .into_iter()
        .map(PathBuf::from)
        .collect()
}
