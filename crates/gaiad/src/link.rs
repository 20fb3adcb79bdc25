//! The socket between supervisor and server: fixed-size messages, with descriptors.
//!
//! ```text
//!   supervisor ── Invalidate (/dev/fuse, socket of requests) ────────────────────────────────> invalidator
//!   supervisor ── Start (/dev/fuse, state memory, backing directory, sockets of clients and
//!                        invalidator, counter of servers) ───────────────────────────────────> server
//!              ── Orphan(node) + descriptor, for each ──────────────────────────────────────>
//!              ── Go ───────────────────────────────────────────────────────────────────────>
//!              <───────────────────────────────────────── Keep(node) + descriptor, Drop(node)
//! ```
//!
//! A message that the server has sent arrives even if it dies right after, so `Keep` needs no answer.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};

/// Descriptors in one message at most.
const MOST_FDS: usize = 8;
const BYTES: usize = 16;

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// To a server, with six descriptors.
    Start,
    /// To an invalidator, with two descriptors.
    Invalidate,
    /// A file without a name that the kernel still uses; with its descriptor.
    Orphan(u64),
    /// All orphans are sent.
    Go,
    /// Keep this descriptor for the next server.
    Keep(u64),
    /// It is not needed any more.
    Drop(u64),
}

impl Message {
    fn to_bytes(self) -> [u8; BYTES] {
        let (kind, node) = match self {
            Message::Start => (1, 0),
            Message::Orphan(node) => (2, node),
            Message::Go => (3, 0),
            Message::Keep(node) => (4, node),
            Message::Drop(node) => (5, node),
            Message::Invalidate => (6, 0),
        };
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&u64::to_ne_bytes(kind));
        bytes[8..].copy_from_slice(&u64::to_ne_bytes(node));
        bytes
    }

    fn from_bytes(bytes: &[u8; BYTES]) -> Option<Message> {
        let word = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let node = word(8)?;
        Some(match word(0)? {
            1 => Message::Start,
            2 => Message::Orphan(node),
            3 => Message::Go,
            4 => Message::Keep(node),
            5 => Message::Drop(node),
            6 => Message::Invalidate,
            _ => return None,
        })
    }
}

/// One end.
#[derive(Debug)]
pub struct Link(OwnedFd);

impl Link {
    /// Both ends.
    ///
    /// # Errors
    /// The kernel's.
    pub fn pair() -> Result<(Link, Link), Errno> {
        let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Link(a), Link(b)))
    }

    /// An end that was inherited.
    pub fn new(socket: OwnedFd) -> Link {
        Link(socket)
    }

    /// The socket.
    pub fn into_fd(self) -> OwnedFd {
        self.0
    }

    /// Sends a message; waits while the other end does not read.
    ///
    /// # Errors
    /// EPIPE: the other end is closed.
    pub fn send(&self, message: Message, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::INVAL);
        }
        let bytes = message.to_bytes();
        rustix::io::retry_on_intr(|| {
            rustix::net::sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
        })
        .map(drop)
    }

    /// The next message and its descriptors; `None`: the other end is closed. `wait` false: EAGAIN if there is none.
    ///
    /// # Errors
    /// EPROTO: not a message.
    pub fn receive(&self, wait: bool) -> Result<Option<(Message, Vec<OwnedFd>)>, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; BYTES];
        let flags = RecvFlags::CMSG_CLOEXEC | if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        let received = rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)
        })?;
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        match received.bytes {
            0 => Ok(None),
            BYTES => Message::from_bytes(&bytes).map(|m| Some((m, fds))).ok_or(Errno::PROTO),
            _ => Err(Errno::PROTO),
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
