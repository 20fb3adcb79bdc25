//! The queues between GPU kernels and the proxy of their sockets, and those of a reader of files: where each word is, and what
//! both sides do with it.
//!
//! ```text
//!   kernel (device/include/spinio/net/)                              proxy (crates/net)
//!   stream::Sender ── bytes in a send ring ── doorbell: position ──> stream::SendRing
//!            room <── line: sent position ──────────────────────────┘
//!   stream::Receiver <── line: received position, flags ─────────── stream::ReceiveRing ── bytes in a receive ring
//!            └────────── host line: consumed position ─────────────> room
//!   event::Taker <── events, new connections ─────────────────── event::Producer
//!            └────────── taken ────────────────────────────────────> room
//!   peer ── two kernels of one net: ends and rings in device memory, no proxy on the way of a byte
//!   granule ── a kernel and a program: the same, in pinned memory that both map
//!   page_requests ── a kernel and the fillers of a reader of files (GAIA), in pinned memory
//!   mailbox::Caller ── request ── doorbell: number ── mailbox::Server ── reply
//! ```
//!
//! Order. Every word here is 8 aligned bytes with one writer, which stores it with release order; its readers load it with
//! acquire order. Words of short messages have none: they say by themselves that they are there ([`message`]). Nothing crosses
//! the bus as a read-modify-write. The only ones are on words in device memory that no CPU accesses: claims of places in the
//! doorbell queue and of mailboxes, and what an end of a connection wants to be told.
//!
//! Trust. The proxy trusts no word that a kernel writes: it loads it once and checks it against what it knows itself
//! ([`stream::Violation`]). Kernels trust the proxy, which is in their own process.
//!
//! The kernel's side exists twice: here in Rust, for models and tests, and in CUDA C++. A test compares the layouts. The
//! code takes its atomics through [`Word`], so that a model checker runs the same code.
//!
//! Known flaw: polling peers have their place in the layout, but no code yet.
#![forbid(unsafe_code)]

pub mod datagram;
pub mod doorbell;
pub mod event;
pub mod granule;
#[cfg(all(test, loom))]
mod interleavings;
pub mod layout;
pub mod line;
pub mod mailbox;
pub mod message;
pub mod page_requests;
pub mod peer;
pub mod position;
pub mod stream;
pub mod wait;
mod word;

pub use position::Position;
pub use word::Word;
