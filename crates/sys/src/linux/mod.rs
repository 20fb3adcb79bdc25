//! Linux, without libc's wrappers.
//!
//! Why not a slice-taking wrapper crate: a buffer here may be device memory,
//! memory that another process changes, or an address the kernel is meant to
//! refuse. None of these may become a Rust slice, so these calls take raw
//! pointers and leave judging them to the kernel. `rustix` gives the errno type;
//! its calls are used where a slice or an owned descriptor is honest.

mod files;
mod folder;
pub mod fs_magic;
mod lease;
mod list;
mod memory;
mod notify;
mod pipe;
mod private;
mod probe;
mod process;
mod raw;
mod replace;
mod residency;
mod shared;
mod storage;
mod types;
mod uring;
mod wipe;

pub use files::*;
pub use folder::*;
pub use lease::*;
pub use list::read_dir;
pub use memory::*;
pub use notify::{
    InotifyEvent, inotify_events, inotify_init, inotify_signal, remove_watch, watch_modifications, watch_opens,
};
pub use pipe::*;
pub use private::{FdTableError, FdTableRoot, in_shadow_table, spawn_signals_blocked};
pub use probe::io_uring;
pub use process::*;
pub use replace::{atomic_replace, read_trusted};
pub use residency::*;
pub use shared::*;
pub use storage::*;
pub use types::*;
pub use uring::Ring;
pub use wipe::wipe_on_fork_word;
