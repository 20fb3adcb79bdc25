//! The socket between supervisor and server: fixed-size messages, with descriptors.
//!
//! ```text
//!   supervisor ── Invalidate (/dev/fuse, socket of requests) ────────────────────────────────> invalidator
//!   supervisor ── Start (/dev/fuse, state memory, backing directory, sockets of clients and
//!                        invalidator, counter of servers) ───────────────────────────────────> server
//!              ── Kept(what, node) + descriptor, for each ──────────────────────────────────>
//!              ── Go ───────────────────────────────────────────────────────────────────────>
//!              <───────────────────────────── Keep(what, node) + descriptor, Drop(what, node)
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

/// What a descriptor that the supervisor keeps is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    /// The inode of a node (O_PATH): one that no name leads to, or any where there are no handles.
    Inode,
    /// The content of a file that its mode forbids the server to open.
    Content,
}

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// To a server, with six descriptors.
    Start,
    /// To an invalidator, with two descriptors.
    Invalidate,
    /// Of an earlier server; with its descriptor.
    Kept(Use, u64),
    /// All kept descriptors are sent.
    Go,
    /// Keep this descriptor for the next server.
    Keep(Use, u64),
    /// It is not needed any more.
    Drop(Use, u64),
}

/// Added to the kind of a message.
const CONTENT: u64 = 16;

impl Message {
    fn to_bytes(self) -> [u8; BYTES] {
        let (kind, what, node) = match self {
            Message::Start => (1, Use::Inode, 0),
            Message::Kept(what, node) => (2, what, node),
            Message::Go => (3, Use::Inode, 0),
            Message::Keep(what, node) => (4, what, node),
            Message::Drop(what, node) => (5, what, node),
            Message::Invalidate => (6, Use::Inode, 0),
        };
        let kind = if what == Use::Content { kind + CONTENT } else { kind };
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&u64::to_ne_bytes(kind));
        bytes[8..].copy_from_slice(&u64::to_ne_bytes(node));
        bytes
    }

    fn from_bytes(bytes: &[u8; BYTES]) -> Option<Message> {
        let word = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let (kind, node) = (word(0)?, word(8)?);
        let what = if kind & CONTENT != 0 { Use::Content } else { Use::Inode };
        Some(match kind & !CONTENT {
            1 => Message::Start,
            2 => Message::Kept(what, node),
            3 => Message::Go,
            4 => Message::Keep(what, node),
            5 => Message::Drop(what, node),
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
