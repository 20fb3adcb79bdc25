//! The connection to the daemon, on the map's thread.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::net::sockopt::socket_peercred;
use spinio_pagecache::leased_messages::{Content, ContentId, MESSAGE, Reply, Request, Source, parse_reply};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use crate::owned_fd::OwnedFd;
use crate::socket::Socket;
use crate::{Error, Result};

/// What the thread owns.
pub(super) struct Connection {
    file: OwnedFd,
    device: [u8; 16],
    sockets: Vec<PathBuf>,
    socket: Option<Socket>,
    /// What came with the last reply.
    received: Vec<OwnedFd>,
}

/// A reply to an acquire.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    /// Descriptors of the thread's table, valid until its next call.
    Chunks {
        content: Content,
        first: u64,
        descriptors: Vec<Fd>,
    },
    Fill {
        content: Content,
        first: u64,
        count: u32,
        /// A device that has copies of them, and their descriptors, as above.
        copies: Option<([u8; 16], Vec<Fd>)>,
    },
    Ready {
        content: Content,
    },
}

impl Connection {
    /// Takes a duplicate of descriptor `fd` of thread `tid`.
    pub(super) fn new(tid: u32, fd: Fd, device: [u8; 16], sockets: Vec<PathBuf>) -> Result<Connection> {
        let file = dup_from(tid, fd)?;
        Ok(Connection { file, device, sockets, socket: None, received: Vec::new() })
    }

    /// A descriptor to test with whether another thread can take it.
    pub(super) fn own_file(&self) -> Fd {
        self.file.get()
    }

    pub(super) fn is_connected(&self) -> bool {
        self.socket.is_some()
    }

    pub(super) fn disconnect(&mut self) {
        self.received.clear();
        self.socket = None;
    }

    /// Connects to the first daemon that there is.
    pub(super) fn connect(&mut self) -> Result<()> {
        if self.socket.is_some() {
            return Ok(());
        }
        for path in &self.sockets {
            match dial(path) {
                Ok(socket) => {
                    let hello = Request::Hello { device: self.device };
                    return match exchange(&socket, &mut self.received, hello, Some(self.file.as_fd()))? {
                        Reply::Opened => {
                            self.socket = Some(socket);
                            Ok(())
                        }
                        other => Err(unexpected(other)),
                    };
                }
                Err(Errno::NOENT | Errno::CONNREFUSED | Errno::NOTDIR) => {}
                Err(e) => return Err(Error::of(e, &format!("connect to the GAIA daemon at {}", path.display()))),
            }
        }
        Err(no_daemon())
    }

    pub(super) fn acquire(&mut self, offset: u64, len: u64) -> Result<Answer> {
        match self.call(Request::Acquire { offset, len }, None)? {
            Reply::Chunks { content, first, count } if count as usize == self.received.len() => {
                let descriptors = self.received.iter().map(OwnedFd::get).collect();
                Ok(Answer::Chunks { content, first, descriptors })
            }
            Reply::Fill { content, first, count } => Ok(Answer::Fill { content, first, count, copies: None }),
            Reply::FillFrom { content, first, count, peer } if count as usize == self.received.len() => {
                let descriptors = self.received.iter().map(OwnedFd::get).collect();
                Ok(Answer::Fill { content, first, count, copies: Some((peer, descriptors)) })
            }
            Reply::Ready { content } => Ok(Answer::Ready { content }),
            other => Err(unexpected(other)),
        }
    }

    /// Hands chunks over, by their descriptors in the table of thread `tid`; for each, false: it is of no use. All are sent before
    /// the first reply is awaited, so that the two processes wake each other once, and not for each chunk.
    pub(super) fn filled(
        &mut self,
        content: ContentId,
        chunks: &[(u64, Fd)],
        source: Source,
        tid: u32,
    ) -> Result<Vec<bool>> {
        let socket = self.socket.as_ref().ok_or_else(Error::disconnected)?;
        for (chunk, fd) in chunks {
            let fd = dup_from(tid, *fd)?;
            send(socket, Request::Filled { content, chunk: *chunk, source }, Some(fd.as_fd()))?;
        }
        // Of all, also after a refusal: the next request must not get the reply of this one.
        let replies: Vec<_> = chunks.iter().map(|_| receive(socket, &mut self.received)).collect();
        let kept = replies.into_iter().map(|reply| match reply? {
            Reply::Kept { kept } => Ok(kept),
            other => Err(unexpected(other)),
        });
        kept.collect()
    }

    /// Gives chunks back that this client was to fill; the bytes that were dropped to make room.
    pub(super) fn abandon(&mut self, content: ContentId, chunk: u64, no_memory: bool) -> Result<u64> {
        match self.call(Request::Abandon { content, chunk, no_memory }, None)? {
            Reply::Freed { bytes } => Ok(bytes),
            other => Err(unexpected(other)),
        }
    }

    fn call(&mut self, request: Request, fd: Option<BorrowedFd<'_>>) -> Result<Reply<'static>> {
        let socket = self.socket.as_ref().ok_or_else(Error::disconnected)?;
        exchange(socket, &mut self.received, request, fd)
    }
}

/// Takes a descriptor out of the table of another thread of this process.
pub(super) fn dup_from(tid: u32, fd: Fd) -> Result<OwnedFd> {
    linux::dup_from_thread(tid, fd).map(OwnedFd::new).map_err(|e| Error::of(e, "duplicate the descriptor"))
}

pub(super) fn no_daemon() -> Error {
    let sentence = "The file is not below a GAIA mount, and no daemon for other files is running: `spinio gaia serve` \
                    starts one (or `spinio gaia mount DIR` mounts)";
    Error::new(Errno::NOTSUP, sentence)
}

fn dial(path: &Path) -> core::result::Result<Socket, Errno> {
    let socket = Socket::connect(path, "the GAIA daemon")?;
    // It decides which bytes kernels load: root's, or this user's own.
    let peer = socket_peercred(socket.fd())?.uid;
    if peer.is_root() || peer == rustix::process::geteuid() { Ok(socket) } else { Err(Errno::PERM) }
}

/// Sends a request and waits for its reply; what comes with that is put into `received`.
fn exchange(
    socket: &Socket,
    received: &mut Vec<OwnedFd>,
    request: Request,
    fd: Option<BorrowedFd<'_>>,
) -> Result<Reply<'static>> {
    send(socket, request, fd)?;
    receive(socket, received)
}

fn send(socket: &Socket, request: Request, fd: Option<BorrowedFd<'_>>) -> Result<()> {
    let mut message = Vec::with_capacity(MESSAGE);
    request.encode(&mut message);
    socket.send(&message, fd)
}

/// Waits for a reply; what comes with that is put into `received`.
fn receive(socket: &Socket, received: &mut Vec<OwnedFd>) -> Result<Reply<'static>> {
    received.clear();
    let mut bytes = [0; MESSAGE + 1];
    let got = socket.receive(&mut bytes, received)?;
    let sent = |words: &dyn std::fmt::Display| Error::new(Errno::PROTO, format!("The GAIA daemon sent {words}"));
    match parse_reply(&bytes[..got.bytes]).map_err(|bad| sent(&bad))? {
        Reply::Failed { errno } => Err(refused(errno)),
        Reply::Opened => Ok(Reply::Opened),
        Reply::Chunks { content, first, count } => Ok(Reply::Chunks { content, first, count }),
        Reply::Fill { content, first, count } => Ok(Reply::Fill { content, first, count }),
        Reply::FillFrom { content, first, count, peer } => Ok(Reply::FillFrom { content, first, count, peer }),
        Reply::Ready { content } => Ok(Reply::Ready { content }),
        Reply::Kept { kept } => Ok(Reply::Kept { kept }),
        Reply::Freed { bytes } => Ok(Reply::Freed { bytes }),
        other => Err(unexpected(other)),
    }
}

fn unexpected(reply: Reply<'_>) -> Error {
    Error::new(Errno::PROTO, format!("The GAIA daemon sent an unexpected reply: {reply:?}"))
}

fn refused(errno: u32) -> Error {
    let error = Error::refused(errno);
    let sentence = match error.errno {
        Errno::TXTBSY => {
            "A process, perhaps this one, has the file open for writing: acquire again once it has closed the file"
        }
        Errno::NOMEM => {
            "The limit of the GAIA daemon leaves no room: maps of other files have it (`spinio gaia status`), or it is \
             less than a chunk of this file, which has up to 256 MiB"
        }
        Errno::PERM => {
            "Nothing excludes writers of the file: a lease needs its owner's daemon or root's (`spinio gaia serve`), \
             else it must be immutable or on a read-only file system"
        }
        Errno::NOTSUP => "The file system of the file has no leases that exclude all writers",
        Errno::ACCESS => "The descriptor is not open for reading, or the GAIA daemon belongs to another user",
        Errno::INVAL => "Only regular files can be mapped",
        Errno::USERS => "This user has too many maps",
        _ => return error,
    };
    error.with_sentence(sentence)
}
