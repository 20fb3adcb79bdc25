//! A connection to the server: one map, one owner.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};
use spinio_pagecache::messages::{self, MAX_MESSAGE, Reply, Request, TicketReply};
use spinio_sys::Errno;

use crate::owned_fd::OwnedFd;
use crate::{Error, Result};

/// The socket, and a buffer for each direction.
pub(crate) struct Connection {
    socket: OwnedFd,
    sent: Vec<u8>,
    received: Vec<u8>,
}

/// What the server sends with [`Reply::Mapped`].
pub(crate) struct Descriptors {
    pub(crate) window: OwnedFd,
    /// The file below the mount, read-only.
    pub(crate) file: OwnedFd,
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
            e => Error::of(e, "connect to the GAIA server"),
        };
        let address = SocketAddrUnix::new(ticket.path()).map_err(failed)?;
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|e| Error::of(e, "create a socket"))?;
        let socket = OwnedFd::from(socket);
        rustix::net::connect(&socket, &address).map_err(failed)?;
        Ok(Connection { socket, sent: Vec::new(), received: vec![0; MAX_MESSAGE + 1] })
    }

    /// Sends the first request; the reply has descriptors.
    pub(crate) fn hello(&mut self, hello: Request<'_>) -> Result<(u64, Descriptors)> {
        self.post(|out| hello.encode(out))?;
        let mut descriptors = Vec::new();
        let size = match self.receive(Some(&mut descriptors))? {
            Reply::Mapped { size, .. } => size,
            other => return Err(unexpected(&other)),
        };
        let mut descriptors = descriptors.into_iter();
        match (descriptors.next(), descriptors.next(), descriptors.next()) {
            (Some(window), Some(file), None) => Ok((size, Descriptors { window, file })),
            _ => Err(Error::new(Errno::PROTO, "The GAIA server did not send two descriptors")),
        }
    }

    /// Sends a message that has no reply.
    pub(crate) fn post(&mut self, encode: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
        self.sent.clear();
        encode(&mut self.sent);
        let mut none = SendAncillaryBuffer::default();
        loop {
            match rustix::net::sendmsg(&self.socket, &[IoSlice::new(&self.sent)], &mut none, SendFlags::NOSIGNAL) {
                Ok(n) if n == self.sent.len() => return Ok(()),
                Ok(_) => return Err(Error::disconnected()),
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET | Errno::PIPE | Errno::NOTCONN) => return Err(Error::disconnected()),
                Err(e) => return Err(Error::of(e, "send to the GAIA server")),
            }
        }
    }

    /// Sends a request and waits for its reply; a refusal is an error.
    pub(crate) fn call(&mut self, encode: impl FnOnce(&mut Vec<u8>)) -> Result<Reply<'_>> {
        self.post(encode)?;
        self.receive(None)
    }

    fn receive(&mut self, descriptors: Option<&mut Vec<OwnedFd>>) -> Result<Reply<'_>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let got = loop {
            let mut into = [IoSliceMut::new(&mut self.received)];
            match rustix::net::recvmsg(&self.socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET | Errno::NOTCONN) => return Err(Error::disconnected()),
                Err(e) => return Err(Error::of(e, "receive from the GAIA server")),
                Ok(got) => break got,
            }
        };
        // Taken over even if they are not expected: each is closed in this table.
        let all: Vec<OwnedFd> = ancillary
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds.map(OwnedFd::from)),
                _ => None,
            })
            .flatten()
            .collect();
        if got.bytes == 0 {
            return Err(Error::disconnected());
        }
        if let Some(descriptors) = descriptors {
            *descriptors = all;
        }
        if got.flags.contains(ReturnFlags::TRUNC) || got.bytes > MAX_MESSAGE {
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
