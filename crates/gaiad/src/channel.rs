//! Messages on the socket of a client.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::SendFlags;
use spinio_pagecache::messages::{MAX_MESSAGE, Reply};

/// The next message; `None`: the client has gone, or sends too much.
pub(crate) fn receive<'a>(socket: &OwnedFd, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    let socket: BorrowedFd<'_> = socket.as_fd();
    let got = rustix::io::retry_on_intr(|| rustix::io::read(socket, &mut *buffer)).ok()?;
    (1..=MAX_MESSAGE).contains(&got).then(|| &buffer[..got])
}

/// Sends one message.
pub(crate) fn send(socket: &OwnedFd, encode: impl FnOnce(&mut Vec<u8>)) -> Result<(), Errno> {
    let mut message = Vec::new();
    encode(&mut message);
    rustix::io::retry_on_intr(|| rustix::net::send(socket, &message, SendFlags::NOSIGNAL)).map(drop)
}

/// The reply that a request fails.
pub(crate) fn refuse(out: &mut Vec<u8>, error: Errno) {
    Reply::Failed { errno: error.raw_os_error() as u32 }.encode(out);
}
