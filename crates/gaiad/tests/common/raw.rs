//! A client without the library, which may say anything.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use spinio_pagecache::messages::{
    self, Access, Fill, MAX_MESSAGE, MapKind, NO_PEERS, ReleasePart, Reply, Request, Run, STAGE, TICKET_IOCTL,
    TICKET_REPLY, TicketReply,
};
use spinio_sys::linux::packets::{self, Wait};

const PAGE: u64 = 4096;

/// A connection, and what came with the reply to hello.
pub struct Raw {
    socket: OwnedFd,
    pub window: File,
    pub backing: File,
    pub owner: u64,
    buffer: Vec<u8>,
}

/// Asks the mount for a ticket.
pub fn ticket(file: &File) -> TicketReply {
    let mut bytes = [0; TICKET_REPLY];
    spinio_sys::linux::ioctl_read(file.as_raw_fd(), TICKET_IOCTL, &mut bytes).unwrap();
    TicketReply::from_bytes(&bytes).unwrap()
}

/// Connects without saying anything.
pub fn dial(path: &[u8]) -> OwnedFd {
    packets::connect(Path::new(OsStr::from_bytes(path))).unwrap()
}

/// Sends bytes; false if the server has closed the connection.
pub fn send(socket: &OwnedFd, bytes: &[u8]) -> bool {
    packets::send(socket, bytes, &[], Wait::Yes).is_ok()
}

impl Raw {
    /// Makes a map; an errno if the server refuses, 0 if it closes the connection.
    pub fn map(file: &File, access: Access, first: u64, pages: u64) -> Result<Raw, u32> {
        let ticket = ticket(file);
        Raw::hello(&ticket, Request::Hello { ticket: ticket.ticket, access, first, pages, kind: MapKind::Replica })
    }

    /// Says hello.
    pub fn hello(ticket: &TicketReply, hello: Request<'_>) -> Result<Raw, u32> {
        let socket = dial(ticket.path());
        let mut out = Vec::new();
        hello.encode(&mut out);
        // A server that refuses the connection does not wait for this: its answer is there before, or after a reset.
        let _ = send(&socket, &out);
        let mut buffer = vec![0; MAX_MESSAGE];
        let mut descriptors = Vec::<File>::new();
        let mut receive = || packets::receive(&socket, &mut buffer, 4, &mut descriptors, Wait::Yes);
        let got = receive().or_else(|_| receive()).map_err(|_| 0u32)?;
        let owner = match messages::parse_reply(&buffer[..got.bytes]) {
            Ok(Reply::Mapped { owner, .. }) => owner,
            Ok(Reply::Failed { errno }) => return Err(errno),
            Ok(other) => panic!("{other:?}"),
            Err(_) => return Err(0),
        };
        let mut descriptors = descriptors.into_iter();
        let (window, backing) = (descriptors.next().unwrap(), descriptors.next().unwrap());
        Ok(Raw { socket, window, backing, owner, buffer })
    }

    /// Sends bytes; false if the server has closed the connection.
    pub fn send(&self, bytes: &[u8]) -> bool {
        send(&self.socket, bytes)
    }

    /// Sends bytes with descriptors.
    pub fn send_with(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        packets::send(&self.socket, bytes, fds, Wait::Yes).is_ok()
    }

    /// Sends a request and parses the reply; `None` if the server closes the connection.
    pub fn call(&mut self, request: Request<'_>) -> Option<Reply<'_>> {
        let mut out = Vec::new();
        request.encode(&mut out);
        if !self.send(&out) {
            return None;
        }
        self.receive()
    }

    /// The same, with descriptors.
    pub fn call_with(&mut self, request: Request<'_>, descriptors: &[OwnedFd]) -> Option<Reply<'_>> {
        let mut out = Vec::new();
        request.encode(&mut out);
        let fds: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        if !self.send_with(&out, &fds) {
            return None;
        }
        self.receive()
    }

    pub fn receive(&mut self) -> Option<Reply<'_>> {
        let got = rustix::io::read(&self.socket, &mut self.buffer).unwrap_or(0);
        (got > 0).then(|| messages::parse_reply(&self.buffer[..got]).unwrap())
    }

    /// One step of an acquire: what to fetch.
    pub fn fills(&mut self, request: Request<'_>) -> Vec<Fill> {
        match self.call(request) {
            Some(Reply::Fills { fills, .. }) => fills.iter().collect(),
            other => panic!("{other:?}"),
        }
    }

    /// The pages of the last fills, but for these, were fetched: what to fetch next.
    pub fn filled_but(&mut self, refused: &[Run]) -> Vec<Fill> {
        let mut out = Vec::new();
        messages::filled_but(&mut out, refused);
        assert!(self.send(&out));
        match self.receive() {
            Some(Reply::Fills { fills, .. }) => fills.iter().collect(),
            other => panic!("{other:?}"),
        }
    }

    /// A whole acquire, of which no page is fetched.
    pub fn acquire(&mut self, first: u64, pages: u64, access: Access) {
        let mut fills = self.fills(Request::Acquire { first, pages, access, fetch: true, peers: NO_PEERS });
        while !fills.is_empty() {
            fills = self.fills(Request::Filled);
        }
    }

    /// Puts the bytes of a page into the stage.
    pub fn stage(&self, at: u32, bytes: &[u8]) {
        let stage = self.window.metadata().unwrap().len() / PAGE - u64::from(STAGE);
        self.window.write_all_at(bytes, (stage + u64::from(at)) * PAGE).unwrap();
    }

    /// A release in one message; what was committed, or the errno (0: the connection is closed).
    pub fn release(&mut self, id: u64, range: Run, runs: &[Run]) -> Result<u64, u32> {
        self.part(id, range, 0, true, runs)
    }

    /// A message of a release, with as many pages in all; what was committed so far.
    pub fn part(&mut self, id: u64, range: Run, total: u32, last: bool, runs: &[Run]) -> Result<u64, u32> {
        let mut out = Vec::new();
        let part = ReleasePart { id, first: range.first, pages: range.count, last, at: 0, total };
        messages::release(&mut out, part, runs);
        if !self.send(&out) {
            return Err(0);
        }
        match self.receive() {
            Some(Reply::Committed { pages, .. }) => Ok(pages),
            Some(Reply::Staged) => Ok(0),
            Some(Reply::Failed { errno }) => Err(errno),
            None => Err(0),
            other => panic!("{other:?}"),
        }
    }
}
