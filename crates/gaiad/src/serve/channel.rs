//! Messages and descriptors on the socket of a client.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use spinio_pagecache::leased_messages::{MESSAGE, Reply, Request, parse_request};
use spinio_sys::linux::packets::{self, Wait};

/// The next request, and its descriptor; `None`: the client has gone, or does not keep to the protocol.
pub(super) fn receive(socket: &OwnedFd) -> Option<(Request, Option<OwnedFd>)> {
    let (mut bytes, mut fds) = ([0; MESSAGE + 1], Vec::new());
    let got = packets::receive(socket, &mut bytes, 1, &mut fds, Wait::Yes).ok()?;
    if got.is_cut() {
        return None;
    }
    let request = parse_request(&bytes[..got.bytes]).ok()?;
    (fds.len() == request.descriptors()).then(|| (request, fds.pop()))
}

/// Sends a reply with descriptors.
pub(super) fn send(socket: &OwnedFd, reply: Reply<'_>, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut bytes = Vec::with_capacity(MESSAGE);
    reply.encode(&mut bytes);
    packets::send(socket, &bytes, fds, Wait::Yes)
}

/// The reply that a request fails.
pub(super) fn failed(error: Errno) -> Reply<'static> {
    Reply::Failed { errno: error.raw_os_error() as u32 }
}
