//! The socket of a map's thread: messages, with descriptors that belong to the thread's table.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use spinio_pagecache::messages::MAX_CHUNKS;
use spinio_sys::Errno;

use crate::owned_fd::OwnedFd;
use crate::{Error, Result};

/// Descriptors in one message at most.
const MAX_DESCRIPTORS: usize = spinio_pagecache::leased_messages::MAX_DESCRIPTORS;

/// A connected socket, and the name of its other end in errors.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    peer: &'static str,
}

/// A message that was received.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    pub(crate) bytes: usize,
    /// It was longer than the buffer.
    pub(crate) is_cut: bool,
}

impl Socket {
    pub(crate) fn connect(path: &Path, peer: &'static str) -> core::result::Result<Socket, Errno> {
        let address = SocketAddrUnix::new(path)?;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let fd = OwnedFd::from(fd);
        rustix::net::connect(&fd, &address)?;
        Ok(Socket { fd, peer })
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Whether the other end is there, and has sent nothing.
    pub(crate) fn is_open(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(rustix::net::recv(&self.fd, &mut [0; 1], flags), Err(Errno::AGAIN | Errno::INTR))
    }

    /// Sends one message, with at most one descriptor.
    pub(crate) fn send(&self, message: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<()> {
        self.send_all(message, fd.as_slice())
    }

    /// Sends one message, with as many descriptors as a release hands over at most.
    pub(crate) fn send_all(&self, message: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_CHUNKS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        loop {
            match rustix::net::sendmsg(&self.fd, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL) {
                Ok(sent) if sent == message.len() => return Ok(()),
                Ok(_) => return Err(Error::disconnected()),
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET | Errno::PIPE | Errno::NOTCONN) => return Err(Error::disconnected()),
                Err(e) => return Err(Error::of(e, &format!("send to {}", self.peer))),
            }
        }
    }

    /// Receives one message, which is not empty. All descriptors that come with it are taken over, expected or not: each
    /// is closed in this table.
    pub(crate) fn receive(&self, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<Received> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = loop {
            let mut into = [IoSliceMut::new(buffer)];
            match rustix::net::recvmsg(&self.fd, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET | Errno::NOTCONN) => return Err(Error::disconnected()),
                Err(e) => return Err(Error::of(e, &format!("receive from {}", self.peer))),
                Ok(got) => break got,
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                descriptors.extend(fds.map(OwnedFd::from));
            }
        }
        match got.bytes {
            0 => Err(Error::disconnected()),
            bytes => Ok(Received { bytes, is_cut: got.flags.contains(ReturnFlags::TRUNC) }),
        }
    }
}
