//! GPUnet: sockets that GPU kernels call.
//!
//! ```text
//!   kernel ── send, recv, accept ...        device/include/spinio/net.h
//!     │  doorbells, lines, rings (spinio-ring), in pinned host memory and device memory: memory.rs
//!   proxy ── socket, send, recv ...         proxy/: one thread with a descriptor table of its own, and I/O threads
//!     │
//!   Linux ── TCP, UDP, UNIX ── nc, curl, any program
//! ```
//!
//! A [`Net`] is the network stack of one device: its memory, its sockets, its proxy, and a thread that sees if the device fails. All memory is made when it is opened and
//! given back when it is closed: a driver gives memory back only when no kernel runs.
//!
//! Connections to programs of this machine and to other nets may leave Linux's sockets for memory that both map: proxy/shared.rs,
//! proxy/announced.rs.
//!
//! The proxy makes system calls for sockets only. It never calls the device and never reads a file, which workers do, so
//! nothing that waits for a kernel or a disk stops the sockets. Its descriptors are not in the program's table: the program cannot close them,
//! and a forked child holds none of its ports.
//!
//! Known flaws: one thread decides for all sockets of a net, and only system calls of streams are shared out; rings are of one size; after a pause the first doorbell waits
//! for the proxy's next look, at most 5 ms (`proxy/pace.rs`).

mod address;
mod counters;
mod default_device;
mod door;
mod error;
mod granules;
mod handshake;
mod importer;
mod kept;
mod mapped_granule;
mod meet;
mod memory;
mod net;
mod proxy;
mod socket;
mod socket_fd;
mod watch;

pub use address::NetAddress;
pub use counters::Stats;
pub use default_device::default_device;
pub use error::{Error, Result};
pub use net::{FileOptions, Net, Options};
pub use socket::poll::{Poll, PollSource, poll};
pub use socket::{Socket, SocketOptions};
pub use spinio_ring::layout::Handle;
