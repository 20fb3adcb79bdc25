//! A connection to the server: one map, one owner.

use std::ffi::OsStr;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use spinio_pagecache::messages::{self, MAX_MESSAGE, Reply, Request, TicketReply};
use spinio_sys::{Errno, injection_point};

use crate::owned_fd::OwnedFd;
use crate::owner_name::Name;
use crate::socket::{Socket, silent};
use crate::{Error, Result};

/// The other end, in errors.
const PEER: &str = "the GAIA server";

/// The socket, and a buffer for each direction.
pub(crate) struct Connection {
    socket: Socket,
    sent: Vec<u8>,
    received: Vec<u8>,
    /// A part of a release was sent whose answer was not received.
    owed: bool,
}

/// What the server sends with [`Reply::Mapped`].
pub(crate) struct Descriptors {
    pub(crate) window: OwnedFd,
    /// The file below the mount, read-only.
    pub(crate) file: OwnedFd,
    /// Memory of counters: of the file, and of servers.
    pub(crate) counters: [OwnedFd; 2],
}

impl Connection {
    /// Connects to the server that gave the ticket.
    pub(crate) fn dial(ticket: &TicketReply) -> Result<Connection> {
        let failed = |e: Errno| match e {
            Errno::CONNREFUSED => Error::disconnected(),
            // It lives as long as the mount, which has just given the ticket.
            Errno::NOENT => {
                let path = String::from_utf8_lossy(ticket.path());
                let sentence =
                    format!("The socket of the GAIA mount, {path}, is not here: a container needs its directory too");
                Error::new(Errno::NOENT, sentence)
            }
            Errno::TIMEDOUT => silent(PEER),
            e => Error::of(e, "connect to the GAIA server"),
        };
        let socket = Socket::connect(Path::new(OsStr::from_bytes(ticket.path())), PEER).map_err(failed)?;
        Ok(Connection { socket, sent: Vec::new(), received: vec![0; MAX_MESSAGE + 1], owed: false })
    }

    /// Whether the server has not closed it. No reply is awaited.
    pub(crate) fn is_open(&self) -> bool {
        self.socket.is_open()
    }

    /// Sends the first request; the reply has descriptors.
    pub(crate) fn hello(&mut self, hello: Request<'_>) -> Result<(u64, Name, Descriptors)> {
        self.post(|out| hello.encode(out))?;
        let mut descriptors = Vec::new();
        let (size, name) = match self.receive(&mut descriptors)? {
            Reply::Mapped { owner, size, file } => (size, Name { file, owner }),
            other => return Err(unexpected(&other)),
        };
        match <[OwnedFd; 4]>::try_from(descriptors) {
            Ok([window, file, changes, servers]) => {
                Ok((size, name, Descriptors { window, file, counters: [changes, servers] }))
            }
            Err(_) => Err(Error::new(Errno::PROTO, "The GAIA server did not send four descriptors")),
        }
    }

    /// Sends a part of a release, after the answer for the one before.
    pub(crate) fn send_part(&mut self, encode: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
        self.end_parts()?;
        self.post(encode)?;
        injection_point!("client: part of a release sent");
        self.owed = true;
        Ok(())
    }

    /// Waits for the answer for the part that was sent last.
    pub(crate) fn end_parts(&mut self) -> Result<()> {
        if std::mem::take(&mut self.owed) {
            match self.receive(&mut Vec::new())? {
                Reply::Staged => {}
                other => return Err(unexpected(&other)),
            }
        }
        Ok(())
    }

    fn post(&mut self, encode: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
        self.sent.clear();
        encode(&mut self.sent);
        self.socket.send(&self.sent, None)
    }

    /// Sends a request and waits for its reply; a refusal is an error.
    pub(crate) fn call(&mut self, encode: impl FnOnce(&mut Vec<u8>)) -> Result<Reply<'_>> {
        self.call_with(encode, &[])
    }

    /// [`Connection::call`] with descriptors.
    pub(crate) fn call_with(
        &mut self,
        encode: impl FnOnce(&mut Vec<u8>),
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Reply<'_>> {
        self.end_parts()?;
        self.sent.clear();
        encode(&mut self.sent);
        self.socket.send_all(&self.sent, descriptors)?;
        injection_point!("client: request sent");
        self.receive(&mut Vec::new())
    }

    fn receive(&mut self, descriptors: &mut Vec<OwnedFd>) -> Result<Reply<'_>> {
        let got = self.socket.receive(&mut self.received, descriptors)?;
        injection_point!("client: reply received");
        if got.bytes_cut || got.bytes > MAX_MESSAGE {
            return Err(Error::new(Errno::PROTO, "The GAIA server sent a message that is too long"));
        }
        match messages::parse_reply(&self.received[..got.bytes]) {
            Ok(Reply::Failed { errno }) => Err(Error::refused(errno)),
            Ok(reply) => Ok(reply),
            Err(bad) => Err(Error::new(Errno::PROTO, format!("The GAIA server sent {bad}"))),
        }
    }
}

pub(crate) fn unexpected(reply: &Reply<'_>) -> Error {
    Error::new(Errno::PROTO, format!("The GAIA server sent an unexpected reply: {reply:?}"))
}
