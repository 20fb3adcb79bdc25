//! The socket of a map's thread: messages, with descriptors that belong to the thread's table.

use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::net::RecvFlags;
use spinio_sys::Errno;
use spinio_sys::linux::packets::{self, Received, Wait};

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

impl Socket {
    pub(crate) fn connect(path: &Path, peer: &'static str) -> core::result::Result<Socket, Errno> {
        Ok(Socket { fd: packets::connect(path)?, peer })
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
        packets::send(&self.fd, message, fds, Wait::Yes).map_err(|error| self.failed("send to", error))
    }

    /// Receives one message, which is not empty. All descriptors that come with it are taken over, expected or not: each
    /// is closed in this table.
    pub(crate) fn receive(&self, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<Received> {
        let got = packets::receive(&self.fd, buffer, MAX_DESCRIPTORS, descriptors, Wait::Yes);
        match got.map_err(|error| self.failed("receive from", error))? {
            Received { bytes: 0, .. } => Err(Error::disconnected()),
            Received { descriptors_cut: true, .. } => {
                Err(Error::of(Errno::MFILE, &format!("receive from {}", self.peer)))
            }
            got => Ok(got),
        }
    }

    fn failed(&self, what: &str, error: Errno) -> Error {
        match error {
            Errno::CONNRESET | Errno::PIPE | Errno::NOTCONN => Error::disconnected(),
            error => Error::of(error, &format!("{what} {}", self.peer)),
        }
    }
}
