//! The GAIA daemon: a pass-through mount over a directory, whose server may die at any time without loss.
//!
//! ```text
//!   programs: open read write mmap rename ...
//!      │
//!   kernel: page cache of the mount (write-back), names, attributes; checks permissions
//!      │ /dev/fuse                                                      one process: the server
//!      ▼                                                    ┌─────────────────────────────────────────────┐
//!   ┌ supervisor ─────────────────┐   descriptors (link)    │ server      attach, RESEND, worker threads  │
//!   │ /dev/fuse                   ├────────────────────────>│ handlers/   one request -> one reply        │
//!   │ state memory                │                         │  ├ nodes    number -> file handle           │
//!   │ backing directory           │<────────────────────────┤  ├ journal  what must not be done twice     │
//!   │ what no handle opens        │   Keep / Drop           │  ├ backing  descriptors, opened by handle   │
//!   │ socket for clients          │                         │  └ content  bytes of pages: the seam        │
//!   │ restarts the server         │                         └───────────────┬─────────────────────────────┘
//!   └─────────────────────────────┘                                         ▼ backing directory, below the mount
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `supervisor/` | mount with its checks, servers one after the other, socket and lock of the mount |
//! | `link.rs` | messages and descriptors between the two |
//! | `state.rs` | the memory file that outlives the server: its parts |
//! | `nodes.rs`, `journal.rs` | two of these parts |
//! | `server.rs` | a server's life |
//! | `handlers/` | the operations |
//! | `backing.rs` | descriptors of the backing file system |
//! | `content.rs` | reads and writes of file content: from the page table, or the file below the mount |
//! | `copiers.rs` | threads that copy the pages of large releases |
//! | `files/` | files with a page table, what writes their released pages out, and the invalidation of the kernel's pages |
//! | `slot_memory.rs`, `file_backing.rs` | what `spinio-pagecache` needs: state memory, the file below |
//! | `invalidator.rs` | the process that waits for the kernel to drop pages |
//! | `device_process/` | the process that uses devices for the server: copies from memory of GPU programs |
//! | `accept.rs`, `admission.rs`, `channel.rs`, `clients.rs`, `tickets.rs`, `quotas.rs` | connections of GPU programs, what they share, their rights and limits |
//! | `client.rs`, `draft.rs`, `release.rs`, `release_memory.rs` | one map: acquire, release |
//! | `handoff.rs`, `arrivals.rs` | releases that hand device memory over, and the bytes that are on their way from there |
//! | `seek.rs` | holes of files that have dirty pages |
//! | `late.rs` | requests that wait for a lease, descriptors or memory |
//! | `writers.rs` | which files a program may have open for writing |
//! | `shared_counters.rs` | memory by which clients know that nothing has changed |
//! | `times.rs` | why writes leave modification times as they were |
//! | `threads.rs` | how the others are started |
//! | `report.rs` | messages to the user |
//! | `buffer.rs` | why the pages of buffers exist before they are used |
//! | `privileges.rs` | the capabilities that each process keeps |
//! | `identity.rs` | new files belong to the caller |
//! | `unmount.rs` | `spinio gaia umount` |
//! | `other_mounts.rs` | where the file system is mounted too: there the daemon goes on |
//! | `serve/` | the daemon of leased files, a process of its own: no mount, no server |
//! | `status.rs` | what the server holds, for `spinio gaia status` |
//! | `explain.rs` | where the pages of a file are, for `spinio gaia explain` |
//!
//! **A server is replaced, not restarted**: nothing in its ordinary memory matters. The kernel keeps requests until
//! they are answered and sends them again to the next server (FUSE_NOTIFY_RESEND, Linux 6.9); dirty pages are in the
//! kernel; what node numbers mean is in state memory; an open file is its node.
//!
//! Known flaws:
//! - After a crash a node record may stay until unmount (its count is too high), 256 bytes each: one per request in
//!   flight, and up to a few hundred for a READDIRPLUS.
//! - File systems mounted below the directory appear as the directories that they cover.
//! - Needs file handles of the backing file system, and without root the setuid program `fusermount3`, and a descriptor
//!   of each node (backing.rs).
#![deny(unsafe_code)]
#![expect(unreachable_pub, reason = "only the command uses this crate: `pub` here means `for other files`")]

mod accept;
mod admission;
mod arrivals;
mod arriving;
mod backing;
mod buffer;
mod channel;
mod client;
mod clients;
mod content;
mod copiers;
mod device_process;
mod draft;
mod explain;
mod file_backing;
mod files;
mod handlers;
mod handoff;
mod identity;
mod invalidator;
mod journal;
mod late;
mod lent;
mod link;
mod lock;
mod nodes;
mod other_mounts;
mod overwrites;
mod privileges;
mod quotas;
mod release;
mod release_memory;
mod report;
mod seek;
mod serve;
mod server;
mod shared_counters;
mod slot_memory;
mod small_writes;
mod state;
mod status;
mod supervisor;
mod threads;
mod tickets;
mod times;
mod unmount;
mod writers;

use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;

use rustix::io::Errno;

use crate::link::{Link, Message, Received};
use crate::privileges::Role;
use crate::report::report;

pub use content::Content;
pub use explain::{ExplainedFile, ExplainedRange, explain, is_below_mount};
pub use serve::{Daemon, DaemonStatus, LeasedFileStatus, drop_unused, query_daemon, stop_daemon};
pub use spinio_pagecache::leased_messages::{PeerRefusal, ROOT_SOCKET, sockets};
pub use spinio_pagecache::messages::{
    Holder, MapKind, RangeState, ServerLimits, ServerStatus, Stats, Totals, UserStatus, UserUse,
};
pub use state::StateMemory;
pub use status::{FileStatus, Mount, MountStatus, mounts, status};
pub use supervisor::{Ended, MountError, NAME, Supervisor, connection_of};
pub use unmount::unmount;

/// Bytes of state memory for released pages that are not written out yet, unless told otherwise: an eighth of the
/// machine's memory. It is used as pages are released.
pub fn default_pages_bytes() -> usize {
    ((spinio_sys::linux::total_memory() / 8) as usize).clamp(64 << 20, 16 << 30)
}

/// The same for so many bytes of pages, without what the page table needs for itself.
pub fn pages_bytes_for(released: u64) -> usize {
    slot_memory::PageSlots::bytes_for(u32::try_from(released / spinio_pagecache::PAGE as u64).unwrap_or(u32::MAX))
}

/// The server process: serves what the supervisor hands over through standard input. The process ends with 0 after an
/// unmount.
pub fn server_role() -> ExitCode {
    let link = std::io::stdin().as_fd().try_clone_to_owned();
    let serve = |link: Link| match link.receive(spinio_sys::linux::packets::Wait::Yes)? {
        Some(Received { message: Message::Start, fds, .. }) => {
            privileges::keep(Role::Server)?;
            server::serve(link, fds)
        }
        Some(Received { message: Message::Invalidate, fds, .. }) => {
            let [device, requests] = <[OwnedFd; 2]>::try_from(fds).map_err(|_| Errno::PROTO)?;
            drop(link);
            privileges::keep(Role::Invalidator)?;
            invalidator::run(device, requests)
        }
        Some(Received { message: Message::Devices, .. }) => {
            privileges::keep(Role::Devices)?;
            device_process::run(&link.into_fd())
        }
        _ => Err(Errno::PROTO),
    };
    let served = link.map_err(|e| e.to_string()).and_then(|link| serve(Link::new(link)).map_err(|e| e.to_string()));
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report!("the server cannot begin: {error}");
            ExitCode::FAILURE
        }
    }
}
