//! The socket of a map's thread: messages, with descriptors that belong to the thread's table.

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::Duration;

use rustix::net::RecvFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use spinio_sys::Errno;
use spinio_sys::linux::packets::{self, Received, Wait};

use crate::owned_fd::OwnedFd;
use crate::{Error, Result};

/// Descriptors in one message at most.
const MAX_DESCRIPTORS: usize = spinio_pagecache::leased_messages::MAX_DESCRIPTORS;

/// A server takes a connection and answers its first message after it has opened the file at most. Where it does not, it is
/// stopped, or the storage does not answer. What it is asked later takes as long as storage does.
const FIRST_ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// A connected socket, and the name of its other end in errors.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    peer: &'static str,
    /// Whether the first answer has come; calls have a time limit before.
    is_answered: Cell<bool>,
}

impl Socket {
    /// # Errors
    /// ETIMEDOUT: the other end takes no connection. Else the kernel's.
    pub(crate) fn connect(path: &Path, peer: &'static str) -> core::result::Result<Socket, Errno> {
        Socket::connect_within(path, peer, FIRST_ANSWER_WITHIN)
    }

    fn connect_within(path: &Path, peer: &'static str, limit: Duration) -> core::result::Result<Socket, Errno> {
        let connected = packets::connect_within(path, Some(limit));
        let fd: OwnedFd = connected.map_err(|error| if error == Errno::AGAIN { Errno::TIMEDOUT } else { error })?;
        set_socket_timeout(&fd, Timeout::Recv, Some(limit))?;
        Ok(Socket { fd, peer, is_answered: Cell::new(false) })
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
            got => {
                if !self.is_answered.replace(true) {
                    self.remove_limits().map_err(|error| self.failed("talk to", error))?;
                }
                Ok(got)
            }
        }
    }

    fn remove_limits(&self) -> core::result::Result<(), Errno> {
        set_socket_timeout(&self.fd, Timeout::Send, None)?;
        set_socket_timeout(&self.fd, Timeout::Recv, None)
    }

    fn failed(&self, what: &str, error: Errno) -> Error {
        match error {
            Errno::CONNRESET | Errno::PIPE | Errno::NOTCONN => Error::disconnected(),
            Errno::AGAIN => silent(self.peer),
            error => Error::of(error, &format!("{what} {}", self.peer)),
        }
    }
}

/// The other end does nothing.
pub(crate) fn silent(peer: &str) -> Error {
    let seconds = FIRST_ANSWER_WITHIN.as_secs();
    Error::new(
        Errno::TIMEDOUT,
        format!("No answer from {peer} for {seconds} s: its process may be stopped, or its storage does not answer"),
    )
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::path::PathBuf;

    use rustix::net::sockopt::socket_timeout;
    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept, bind, listen, recv, send, socket_with,
    };

    use super::*;

    type Fd = std::os::fd::OwnedFd;

    const SHORT: Duration = Duration::from_millis(20);

    /// A listener that accepts nothing, and its path; the directory is to stay.
    fn listener(backlog: i32) -> (Fd, PathBuf, (tempfile::TempDir, File)) {
        let folder = tempfile::tempdir().unwrap();
        let opened = File::open(folder.path()).unwrap();
        // An address has 108 bytes at most, a directory may have more.
        let path = PathBuf::from(format!("/proc/self/fd/{}/socket", opened.as_raw_fd()));
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, backlog).unwrap();
        (listener, path, (folder, opened))
    }

    #[test]
    fn full_backlog_is_waited_for_within_the_limit() {
        let (_listener, path, _folder) = listener(0);
        let mut waiting = Vec::new();
        let refused = loop {
            match Socket::connect_within(&path, "the server", SHORT) {
                Ok(socket) => waiting.push(socket),
                Err(error) => break error,
            }
            assert!(waiting.len() < 100, "the backlog has no end");
        };
        assert_eq!(refused, Errno::TIMEDOUT);
    }

    #[test]
    fn first_answer_has_a_limit_and_later_ones_have_none() {
        let (listener, path, _folder) = listener(8);
        let silent = Socket::connect_within(&path, "the server", SHORT).unwrap();
        silent.send(b"hello", None).unwrap();
        let error = silent.receive(&mut [0; 8], &mut Vec::new()).unwrap_err();
        assert_eq!((error.errno, error.is_disconnected()), (Errno::TIMEDOUT, false));
        assert!(error.to_string().starts_with("No answer from the server"), "{error}");
        drop((silent, accept(&listener).unwrap()));

        let minute = Duration::from_secs(60);
        let socket = Socket::connect_within(&path, "the server", minute).unwrap();
        socket.send(b"hello", None).unwrap();
        let server = accept(&listener).unwrap();
        recv(&server, &mut [0; 8], RecvFlags::empty()).unwrap();
        send(&server, b"welcome", rustix::net::SendFlags::empty()).unwrap();
        let limits = || [Timeout::Send, Timeout::Recv].map(|way| socket_timeout(socket.fd(), way).unwrap());
        assert_eq!(limits(), [Some(minute); 2]);
        assert_eq!(socket.receive(&mut [0; 8], &mut Vec::new()).unwrap().bytes, 7);
        assert_eq!(limits(), [None; 2]);
    }
}
