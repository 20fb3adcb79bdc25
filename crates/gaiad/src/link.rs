//! The socket between supervisor and server: fixed-size messages, with descriptors.
//!
//! ```text
//!   supervisor ── Invalidate (/dev/fuse, socket of requests) ────────────────────────────────> invalidator
//!   server ── Devices, then the requests of device_process/ ─────────────────────────────────> device process
//!   supervisor ── Start (/dev/fuse, state memory, backing directory, sockets of clients and
//!                        invalidator, counter of servers, the directory for reading only) ───> server
//!              ── Kept(what) + nodes and descriptors, until all are sent ───────────────────>
//!              ── Go ───────────────────────────────────────────────────────────────────────>
//!              <───────────────────────────── Keep(what, node) + descriptor, Drop(what, node)
//! ```
//!
//! A message that the server has sent arrives even if it dies right after, so `Keep` needs no answer.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use spinio_sys::linux::packets::{self, Wait};

/// Descriptors in one message at most.
const MOST_FDS: usize = 250;
const BYTES: usize = 16;
/// A message of [`Message::Kept`] has a node for each descriptor.
const MOST_BYTES: usize = BYTES + MOST_FDS * 8;

/// What a descriptor that the supervisor keeps is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    /// The inode of a node (O_PATH): one that no name leads to, or any where there are no handles.
    Inode,
    /// The content of a file that its mode forbids the server to open.
    Content,
    /// Device memory with released pages, or the list of these (arrivals.rs). Instead of a node there is a number of the
    /// server's.
    Handed,
}

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// To a server, with seven descriptors.
    Start,
    /// To an invalidator, with two descriptors.
    Invalidate,
    /// To a device process: the requests follow on the same socket.
    Devices,
    /// Of an earlier server; with nodes and their descriptors.
    Kept(Use),
    /// All kept descriptors are sent.
    Go,
    /// Keep this descriptor for the next server.
    Keep(Use, u64),
    /// It is not needed any more.
    Drop(Use, u64),
}

/// Added to the kind of a message.
const CONTENT: u64 = 16;
const HANDED: u64 = 32;

impl Message {
    fn to_bytes(self) -> [u8; BYTES] {
        let (kind, what, node) = match self {
            Message::Start => (1, Use::Inode, 0),
            Message::Kept(what) => (2, what, 0),
            Message::Go => (3, Use::Inode, 0),
            Message::Keep(what, node) => (4, what, node),
            Message::Drop(what, node) => (5, what, node),
            Message::Invalidate => (6, Use::Inode, 0),
            Message::Devices => (7, Use::Inode, 0),
        };
        let kind = match what {
            Use::Inode => kind,
            Use::Content => kind + CONTENT,
            Use::Handed => kind + HANDED,
        };
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&u64::to_ne_bytes(kind));
        bytes[8..].copy_from_slice(&u64::to_ne_bytes(node));
        bytes
    }

    fn from_bytes(bytes: &[u8; BYTES]) -> Option<Message> {
        let word = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let (kind, node) = (word(0)?, word(8)?);
        let what = match kind & (CONTENT | HANDED) {
            0 => Use::Inode,
            CONTENT => Use::Content,
            HANDED => Use::Handed,
            _ => return None,
        };
        Some(match kind & !(CONTENT | HANDED) {
            1 => Message::Start,
            2 => Message::Kept(what),
            3 => Message::Go,
            4 => Message::Keep(what, node),
            5 => Message::Drop(what, node),
            6 => Message::Invalidate,
            7 => Message::Devices,
            _ => return None,
        })
    }
}

/// A message that was received.
#[derive(Debug)]
pub struct Received {
    /// Which.
    pub message: Message,
    /// Those of [`Message::Kept`].
    pub nodes: Vec<u64>,
    /// That came with it.
    pub fds: Vec<OwnedFd>,
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
        let (a, b) = packets::pair()?;
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
        packets::send(&self.0, &message.to_bytes(), fds, Wait::Yes)
    }

    /// Sends what is kept, many in one message.
    ///
    /// # Errors
    /// As [`Link::send`].
    pub fn send_kept<'a>(&self, what: Use, all: impl Iterator<Item = (u64, BorrowedFd<'a>)>) -> Result<(), Errno> {
        let mut all = all.peekable();
        while all.peek().is_some() {
            let mut bytes = Message::Kept(what).to_bytes().to_vec();
            let mut fds = Vec::with_capacity(MOST_FDS);
            for (node, fd) in all.by_ref().take(MOST_FDS) {
                bytes.extend(node.to_ne_bytes());
                fds.push(fd);
            }
            packets::send(&self.0, &bytes, &fds, Wait::Yes)?;
        }
        Ok(())
    }

    /// The next message; `None`: the other end is closed.
    ///
    /// # Errors
    /// EPROTO: not a message.
    pub fn receive(&self, wait: Wait) -> Result<Option<Received>, Errno> {
        let (mut bytes, mut fds) = ([0; MOST_BYTES], Vec::new());
        let received = packets::receive(&self.0, &mut bytes, MOST_FDS, &mut fds, wait)?;
        if received.bytes == 0 {
            return Ok(None);
        }
        let (header, rest) = bytes[..received.bytes].split_first_chunk::<BYTES>().ok_or(Errno::PROTO)?;
        let message = Message::from_bytes(header).ok_or(Errno::PROTO)?;
        let (nodes, more) = rest.as_chunks::<8>();
        let is_right = if matches!(message, Message::Kept(_)) { nodes.len() == fds.len() } else { nodes.is_empty() };
        if !is_right || !more.is_empty() {
            return Err(Errno::PROTO);
        }
        let nodes = nodes.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect();
        Ok(Some(Received { message, nodes, fds }))
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_descriptors_arrive_with_their_nodes_in_messages_that_fit() {
        const ALL: u64 = 600;
        let (ours, theirs) = Link::pair().unwrap();
        let fd = std::fs::File::open("/dev/null").unwrap();
        ours.send_kept(Use::Content, std::iter::empty()).unwrap();
        ours.send_kept(Use::Inode, (0..ALL).map(|node| (node, fd.as_fd()))).unwrap();
        ours.send(Message::Keep(Use::Content, 7), &[fd.as_fd()]).unwrap();
        ours.send(Message::Go, &[]).unwrap();
        drop(ours);
        let mut nodes = Vec::new();
        loop {
            let got = theirs.receive(Wait::Yes).unwrap().unwrap();
            if got.message != Message::Kept(Use::Inode) {
                assert_eq!((got.message, got.fds.len()), (Message::Keep(Use::Content, 7), 1));
                break;
            }
            assert_eq!(got.nodes.len(), got.fds.len());
            nodes.extend(got.nodes);
        }
        assert_eq!(nodes, (0..ALL).collect::<Vec<_>>());
        assert_eq!(theirs.receive(Wait::No).unwrap().unwrap().message, Message::Go);
        assert!(theirs.receive(Wait::Yes).unwrap().is_none());
    }
}
