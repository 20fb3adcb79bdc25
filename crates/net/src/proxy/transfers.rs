//! The files that are being sent to a socket, and what a worker does for one. What the proxy does with them: sendfile.rs.

use std::collections::VecDeque;
use std::sync::Arc;

use spinio_host::shadow_fd::ShadowFd;
use spinio_ring::Position;
use spinio_ring::layout::Descriptor;
use spinio_ring::stream::SendRing;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::caller::Caller;

/// A file that is being sent.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) caller: Caller,
    pub(super) file: FileRef,
    pub(super) offset: u64,
    pub(super) left: u64,
    pub(super) sent: u64,
    /// Bytes of the ring up to here go first.
    pub(super) after: Position,
    pub(super) dontwait: bool,
    /// How long it may wait for room, and until when.
    pub(super) timeout: u64,
    pub(super) deadline: u64,
}

/// A file of kernels.
#[derive(Clone)]
pub(crate) struct FileRef(pub(crate) Arc<ShadowFd>);

impl std::fmt::Debug for FileRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "file {}", self.0.get())
    }
}

/// Those of a socket, in order.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    pub(super) queue: VecDeque<Transfer>,
    /// A worker sends for the first one, or for one that was cancelled.
    pub(super) working: bool,
    /// The first one was cancelled meanwhile. It is answered when the worker has said what it has sent.
    pub(super) cancelled: Option<Cancelled>,
    /// One that does not wait found no room in the Linux kernel, or another one before it. The ring may be empty then, and says nothing of
    /// that room.
    pub(super) found_no_room: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Cancelled {
    pub(super) errno: Errno,
    /// It is answered without the worker then, which a disk keeps.
    pub(super) until: u64,
}

impl Transfers {
    /// Whether nothing is sent and nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty() && !self.working
    }

    /// Whether one that does not wait would find room in the Linux kernel, as far as is known.
    pub(crate) fn has_room(&self, writable: bool) -> bool {
        !self.found_no_room || writable && self.is_empty()
    }

    /// How many bytes of the ring may be sent now.
    pub(crate) fn ring_turn(&self, ring: &SendRing) -> u64 {
        match self.queue.front() {
            _ if self.working => 0,
            Some(first) => first.after.since(ring.sent()).min(ring.pending()),
            None => ring.pending(),
        }
    }
}

/// What a worker has done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) socket: Descriptor,
    pub(super) bytes: u64,
    pub(super) ended: Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// As many bytes as it was to send.
    Complete,
    /// The socket has no room.
    NoRoom,
    /// The file has no more.
    EndOfFile,
    Failed(Errno),
}

/// Sends `bytes` of a file, on a worker.
pub(super) fn send(socket: Fd, file: &FileRef, offset: u64, bytes: u64) -> (u64, Ended) {
    let mut sent = 0;
    while sent < bytes {
        match linux::sendfile(socket, file.0.get(), (offset + sent) as i64, (bytes - sent) as usize) {
            Ok(0) => return (sent, Ended::EndOfFile),
            Ok(more) => sent += more as u64,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return (sent, Ended::NoRoom),
            Err(errno) => return (sent, Ended::Failed(errno)),
        }
    }
    (sent, Ended::Complete)
}
