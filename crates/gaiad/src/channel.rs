//! Messages on the socket of a client, and questions to a server.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use spinio_pagecache::messages::{self, MAX_CHUNKS, MAX_MESSAGE, Reply, Request};
use spinio_sys::linux::packets::{self, Wait};

/// A server answers a question at once, or there is none.
pub(crate) const WITHIN: Duration = Duration::from_secs(10);

/// What came from a client.
pub(crate) enum Received<'a> {
    Message(&'a [u8]),
    /// A message with descriptors for which this process had no numbers left.
    WithoutDescriptors,
    /// Nothing within the time that was set for the socket.
    Nothing,
    /// The client has gone, or sends too much.
    End,
}

/// The next message, and the descriptors that came with it.
pub(crate) fn receive_in_time<'a>(
    socket: &OwnedFd,
    buffer: &'a mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> Received<'a> {
    descriptors.clear();
    match packets::receive(socket, buffer, MAX_CHUNKS, descriptors, Wait::Yes) {
        // As many as there is room for: there were more.
        Ok(got) if got.descriptors_cut && !got.bytes_cut && descriptors.len() < MAX_CHUNKS => {
            Received::WithoutDescriptors
        }
        Ok(got) if got.is_cut() => Received::End,
        Ok(got) if (1..=MAX_MESSAGE).contains(&got.bytes) => Received::Message(&buffer[..got.bytes]),
        Err(Errno::AGAIN) => Received::Nothing,
        _ => Received::End,
    }
}

/// The next message; `None`: the client does not send one in time, has gone, or sends too much.
pub(crate) fn receive<'a>(socket: &OwnedFd, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    match receive_in_time(socket, buffer, &mut Vec::new()) {
        Received::Message(message) => Some(message),
        Received::WithoutDescriptors | Received::Nothing | Received::End => None,
    }
}

/// Sends one message.
pub(crate) fn send(socket: &OwnedFd, encode: impl FnOnce(&mut Vec<u8>)) -> Result<(), Errno> {
    let mut message = Vec::new();
    encode(&mut message);
    packets::send(socket, &message, &[], Wait::Yes)
}

/// The reply that a request fails.
pub(crate) fn refuse(out: &mut Vec<u8>, error: Errno) {
    Reply::Failed { errno: error.raw_os_error() as u32 }.encode(out);
}

/// Asks the server at `path`; `each` gets the replies, until the server has no more. EAGAIN: it does not take the question,
/// or does not reply, for `within`.
pub(crate) fn ask(
    path: &Path,
    question: Request<'_>,
    within: Duration,
    each: impl FnMut(Reply<'_>) -> Result<(), Errno>,
) -> Result<(), Errno> {
    ask_while(path, question, within, || Err(Errno::AGAIN), each)
}

/// The same for a question that may take long: each time that no reply has come for `within`, `on_silence` says whether to
/// wait on.
pub(crate) fn ask_while(
    path: &Path,
    question: Request<'_>,
    within: Duration,
    on_silence: impl FnMut() -> Result<(), Errno>,
    mut each: impl FnMut(Reply<'_>) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let mut message = Vec::new();
    question.encode(&mut message);
    converse(path, &message, &[], within, on_silence, |bytes| match messages::parse_reply(bytes) {
        Ok(Reply::Failed { errno }) => Err(Errno::from_raw_os_error(errno as i32)),
        Ok(reply) => each(reply),
        Err(_) => Err(Errno::PROTO),
    })
}

/// The same with messages of any kind.
pub(crate) fn converse(
    path: &Path,
    question: &[u8],
    descriptors: &[BorrowedFd<'_>],
    within: Duration,
    mut on_silence: impl FnMut() -> Result<(), Errno>,
    mut each: impl FnMut(&[u8]) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let socket: OwnedFd = packets::connect_within(path, Some(within))?;
    set_socket_timeout(&socket, Timeout::Recv, Some(within))?;
    packets::send(&socket, question, descriptors, Wait::Yes)?;
    let mut buffer = vec![0; MAX_MESSAGE + 1];
    loop {
        match rustix::io::retry_on_intr(|| rustix::io::read(&socket, &mut buffer)) {
            Ok(0) => return Ok(()),
            Ok(got) => each(&buffer[..got.min(MAX_MESSAGE)])?,
            Err(Errno::AGAIN) => on_silence()?,
            Err(error) => return Err(error),
        }
    }
}
