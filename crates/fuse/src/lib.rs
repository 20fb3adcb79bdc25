//! The FUSE protocol, for servers that may die and come back.
//!
//! ```text
//!   mount ──> /dev/fuse ──negotiate──> Negotiated (plain data, to store)
//!                 │                          │
//!   any thread of any process that has       │ a new server: Connection::new(descriptor), resend(); no INIT
//!   the descriptor                           ▼
//!   Connection::receive ──> bytes ──Request::parse──> Operation ──> reply / reply_error
//!                                                     notifications: inval_inode, inval_entry, resend
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `abi.rs` | structures and constants of fuse.h |
//! | `request.rs` | from bytes to a typed request; total, no panic |
//! | `connection.rs` | reading requests, replies, notifications |
//! | `negotiate.rs` | INIT |
//! | `directory.rs` | the content of READDIR replies |
//! | `mount.rs` | mount, unmount, abort, the table of mounts |
//! | `failure.rs` | why there is no mount |
//! | `helper.rs` | `fusermount3`: mounts of users without privileges |
//!
//! Why not `fuser` or `fuse-backend-rs`: a server here attaches to a connection that an earlier process negotiated, and
//! asks for that process's requests again.
#![forbid(unsafe_code)]

pub mod abi;
mod connection;
mod directory;
mod failure;
mod helper;
pub mod mount;
mod negotiate;
mod request;

pub use connection::{Connection, Received};
pub use directory::DirectoryBuffer;
pub use failure::MountFailure;
pub use negotiate::{MAX_WRITE, Negotiated, REQUEST_BYTES, Refusal, negotiate};
pub use request::{Forgets, Malformed, Operation, Request};
