//! Linux, without libc's wrappers.
//!
//! Why not a slice-taking wrapper crate: a buffer here may be device memory,
//! memory that another process changes, or an address the Linux kernel is meant to
//! refuse. None of these may become a Rust slice, so these calls take raw
//! pointers and leave validation to the Linux kernel. `rustix` gives the errno type;
//! its calls are used where a slice or an owned descriptor is correct.

mod atomic_replace;
mod block;
pub mod channel;
mod clock;
pub mod datagram;
mod dirfd;
mod file_handle;
mod files;
mod folios;
pub mod fs_magic;
mod inotify;
mod lease;
mod memory;
pub mod packets;
mod pipe;
mod probe;
mod process;
mod raw;
mod read_dir;
mod residency;
pub mod rights;
mod shadow_table;
mod shared_fd;
mod shared_words;
mod signals;
pub mod socket;
pub mod socket_move;
mod types;
mod uring;
mod wipe;

pub use atomic_replace::{atomic_replace, read_trusted};
pub use block::*;
pub use clock::*;
pub use dirfd::*;
pub use file_handle::*;
pub use files::*;
pub use folios::{is_in_large_folio, split_folios};
pub use inotify::{
    InotifyEvent, inotify_events, inotify_init, inotify_signal, remove_watch, watch_modifications, watch_opens,
};
pub use lease::*;
pub use memory::*;
pub use pipe::*;
pub use probe::io_uring;
pub use process::*;
pub use read_dir::read_dir;
pub use residency::*;
pub use shadow_table::{FdTableError, FdTableRoot, in_shadow_table, set_timer_slack, spawn_signals_blocked};
pub use shared_fd::*;
pub use shared_words::{ReadOnlyWords, SharedWords};
pub use signals::{
    SIGNAL_INTERVAL, SignalGuard, deliver_default_signals, hold_signals_by, holds_signals, holds_signals_still,
};
pub use types::*;
pub use uring::{NewOwnRing, OwnRing, Ring, RingFile, SharedRing};
pub use wipe::wipe_on_fork_word;
