//! Messages and descriptors on the socket of a client.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use spinio_pagecache::leased_messages::{MAX_DESCRIPTORS, MESSAGE, Reply, Request, parse_request};

/// The next request, and its descriptor; `None`: the client has gone, or does not keep to the protocol.
pub(super) fn receive(socket: &OwnedFd) -> Option<(Request, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; MESSAGE + 1];
    let got = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })
    .ok()?;
    // Taken over even if they are not expected: each is closed here.
    let mut fds: Vec<OwnedFd> = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return None;
    }
    let request = parse_request(&bytes[..got.bytes]).ok()?;
    (fds.len() == request.descriptors()).then(|| (request, fds.pop()))
}

/// Sends a reply with descriptors.
pub(super) fn send(socket: &OwnedFd, reply: Reply<'_>, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut bytes = Vec::with_capacity(MESSAGE);
    reply.encode(&mut bytes);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    let socket = socket.as_fd();
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
    })
    .map(drop)
}

/// The reply that a request fails.
pub(super) fn failed(error: Errno) -> Reply<'static> {
    Reply::Failed { errno: error.raw_os_error() as u32 }
}
