//! The connection to the daemon, on the map's thread.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use spinio_pagecache::leased_messages::{Content, ContentId, MAX_DESCRIPTORS, MESSAGE, Reply, Request, parse_reply};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use crate::owned_fd::OwnedFd;
use crate::{Error, Result};

/// What the thread owns.
pub(super) struct Connection {
    file: OwnedFd,
    device: [u8; 16],
    sockets: Vec<PathBuf>,
    socket: Option<OwnedFd>,
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
                    self.socket = Some(socket);
                    let (hello, file) = (Request::Hello { device: self.device }, self.file.get());
                    let opened = match self.call(hello, Some(file)) {
                        Ok(Reply::Opened) => Ok(()),
                        Ok(other) => Err(unexpected(other)),
                        Err(e) => Err(e),
                    };
                    if opened.is_err() {
                        self.disconnect();
                    }
                    return opened;
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
            Reply::Fill { content, first, count } => Ok(Answer::Fill { content, first, count }),
            Reply::Ready { content } => Ok(Answer::Ready { content }),
            other => Err(unexpected(other)),
        }
    }

    /// Hands a chunk over, by its descriptor in the table of thread `tid`. False: it is of no use.
    pub(super) fn filled(&mut self, content: ContentId, chunk: u64, tid: u32, fd: Fd) -> Result<bool> {
        let fd = dup_from(tid, fd)?;
        match self.call(Request::Filled { content, chunk }, Some(fd.get()))? {
            Reply::Kept { kept } => Ok(kept),
            other => Err(unexpected(other)),
        }
    }

    /// Gives chunks back that this client was to fill; the bytes that were dropped to make room.
    pub(super) fn abandon(&mut self, content: ContentId, chunk: u64, no_memory: bool) -> Result<u64> {
        match self.call(Request::Abandon { content, chunk, no_memory }, None)? {
            Reply::Freed { bytes } => Ok(bytes),
            other => Err(unexpected(other)),
        }
    }

    fn call(&mut self, request: Request, fd: Option<Fd>) -> Result<Reply<'static>> {
        self.received.clear();
        let socket = self.socket.as_ref().ok_or_else(Error::disconnected)?;
        send(socket, request, fd)?;
        receive(socket, &mut self.received)
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

fn dial(path: &Path) -> core::result::Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let socket = OwnedFd::from(socket);
    rustix::net::connect(&socket, &address)?;
    // It decides which bytes kernels load: root's, or this user's own.
    let peer = socket_peercred(&socket)?.uid;
    if peer.is_root() || peer == rustix::process::geteuid() { Ok(socket) } else { Err(Errno::PERM) }
}

fn send(socket: &OwnedFd, request: Request, fd: Option<Fd>) -> Result<()> {
    let mut bytes = Vec::with_capacity(MESSAGE);
    request.encode(&mut bytes);
    let fd = fd.map(BorrowedRaw);
    let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    loop {
        match rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET | Errno::PIPE | Errno::NOTCONN) => return Err(Error::disconnected()),
            Err(e) => return Err(Error::of(e, "send to the GAIA daemon")),
        }
    }
}

fn receive(socket: &OwnedFd, descriptors: &mut Vec<OwnedFd>) -> Result<Reply<'static>> {
    let mut bytes = [0; MESSAGE + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let mut into = [IoSliceMut::new(&mut bytes)];
        match rustix::net::recvmsg(socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET | Errno::NOTCONN) => return Err(Error::disconnected()),
            Err(e) => return Err(Error::of(e, "receive from the GAIA daemon")),
            Ok(got) => break got,
        }
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            descriptors.extend(fds.map(OwnedFd::from));
        }
    }
    if got.bytes == 0 {
        return Err(Error::disconnected());
    }
    let sent = |words: &dyn std::fmt::Display| Error::new(Errno::PROTO, format!("The GAIA daemon sent {words}"));
    match parse_reply(&bytes[..got.bytes]).map_err(|bad| sent(&bad))? {
        Reply::Failed { errno } => Err(refused(errno)),
        Reply::Opened => Ok(Reply::Opened),
        Reply::Chunks { content, first, count } => Ok(Reply::Chunks { content, first, count }),
        Reply::Fill { content, first, count } => Ok(Reply::Fill { content, first, count }),
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
            "The limit of the GAIA daemon leaves no room: maps of other files have it (`spinio gaia status`)"
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

/// A descriptor of this thread's table, for the time of a call.
struct BorrowedRaw(Fd);

impl AsFd for BorrowedRaw {
    #[expect(unsafe_code, reason = "borrows a raw descriptor")]
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        // SAFETY: its owner outlives the call that this was made for.
        unsafe { std::os::fd::BorrowedFd::borrow_raw(self.0) }
    }
}
