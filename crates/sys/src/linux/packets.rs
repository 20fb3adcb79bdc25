//! Packets with descriptors between processes of one machine: SOCK_SEQPACKET sockets of unix(7), and SCM_RIGHTS.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

type Result<T> = core::result::Result<T, Errno>;

/// Descriptors in one packet at most, by the Linux kernel (SCM_MAX_FD).
pub const MAX_DESCRIPTORS: usize = 253;

const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS));

/// Whether a call waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// As long as the time limit of the socket says.
    Yes,
    /// EAGAIN instead.
    No,
}

/// What came with a packet, beside its descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// 0: the other end is closed, or an empty packet.
    pub bytes: usize,
    /// It had more bytes than there was room for; they are lost.
    pub bytes_cut: bool,
    /// Descriptors are lost: there were more than asked for, or this process may have no more (RLIMIT_NOFILE).
    pub descriptors_cut: bool,
}

impl Received {
    /// Whether something of it is lost.
    pub fn is_cut(self) -> bool {
        self.bytes_cut || self.descriptors_cut
    }
}

/// Two sockets that are connected to each other.
pub fn pair() -> Result<(OwnedFd, OwnedFd)> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// A socket that is connected to the listener at a path. Waits for a place if the listener accepts none of those that
/// wait already.
pub fn connect<F: From<OwnedFd> + AsFd>(path: &Path) -> Result<F> {
    connect_within(path, None)
}

/// The same, with this limit for waiting, which later sends have too.
///
/// # Errors
/// EAGAIN: the listener has accepted none for so long. Else the kernel's.
pub fn connect_within<F: From<OwnedFd> + AsFd>(path: &Path, within: Option<Duration>) -> Result<F> {
    let address = SocketAddrUnix::new(path)?;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // Before any error: only its owner's type closes it in the right way.
    let socket = F::from(socket);
    if within.is_some() {
        set_socket_timeout(&socket, Timeout::Send, within)?;
    }
    // A signal ends the wait of a socket with a limit, whatever SA_RESTART says.
    retry_on_intr(|| rustix::net::connect(&socket, &address))?;
    Ok(socket)
}

/// Sends a packet with duplicates of descriptors. A closed other end is EPIPE without a signal, or ECONNRESET if it left
/// packets unread.
///
/// # Errors
/// EINVAL: more than [`MAX_DESCRIPTORS`]. Else the kernel's, after all EINTR.
pub fn send(via: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>], wait: Wait) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::NOSIGNAL | if wait == Wait::No { SendFlags::DONTWAIT } else { SendFlags::empty() };
    retry_on_intr(|| rustix::net::sendmsg(&via, &[IoSlice::new(bytes)], &mut control, flags)).map(drop)
}

/// Receives a packet. All descriptors that come with it are taken over, expected or not, as far as there is room for
/// `most` of them: the Linux kernel closes the others.
///
/// # Errors
/// The kernel's, after all EINTR.
pub fn receive<F: From<OwnedFd>>(
    via: impl AsFd,
    bytes: &mut [u8],
    most: usize,
    descriptors: &mut Vec<F>,
    wait: Wait,
) -> Result<Received> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let room = if most == 0 { 0 } else { rustix::cmsg_space!(ScmRights(most.min(MAX_DESCRIPTORS))) };
    let mut control = RecvAncillaryBuffer::new(&mut space[..room]);
    let flags = RecvFlags::CMSG_CLOEXEC | if wait == Wait::No { RecvFlags::DONTWAIT } else { RecvFlags::empty() };
    let got = retry_on_intr(|| rustix::net::recvmsg(&via, &mut [IoSliceMut::new(bytes)], &mut control, flags))?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights.map(F::from));
        }
    }
    let has = |flag| got.flags.contains(flag);
    Ok(Received { bytes: got.bytes, bytes_cut: has(ReturnFlags::TRUNC), descriptors_cut: has(ReturnFlags::CTRUNC) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(bytes: usize) -> Received {
        Received { bytes, bytes_cut: false, descriptors_cut: false }
    }

    #[test]
    fn packets_keep_their_boundaries_and_descriptors_and_tell_of_the_end() {
        let (ours, theirs) = pair().unwrap();
        let (mut bytes, mut fds) = ([0; 8], Vec::<OwnedFd>::new());
        assert_eq!(receive(&theirs, &mut bytes, 4, &mut fds, Wait::No), Err(Errno::AGAIN));
        let file = std::fs::File::open("/dev/null").unwrap();
        send(&ours, b"three", &[file.as_fd(); 3], Wait::Yes).unwrap();
        send(&ours, b"none", &[], Wait::No).unwrap();
        let got = receive(&theirs, &mut bytes, 4, &mut fds, Wait::Yes).unwrap();
        assert_eq!((got, &bytes[..5], fds.len()), (whole(5), &b"three"[..], 3));
        let got = receive(&theirs, &mut bytes, 0, &mut fds, Wait::No).unwrap();
        assert_eq!((got.bytes, &bytes[..4], fds.len()), (4, &b"none"[..], 3));
        drop(ours);
        assert_eq!(receive(&theirs, &mut bytes, 4, &mut fds, Wait::Yes).unwrap().bytes, 0);
        assert_eq!(send(&theirs, b"late", &[], Wait::Yes), Err(Errno::PIPE));
    }

    #[test]
    fn what_has_no_room_is_lost_and_told_of() {
        let (ours, theirs) = pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        send(&ours, b"much too long", &[], Wait::Yes).unwrap();
        send(&ours, b"many", &[file.as_fd(); 5], Wait::Yes).unwrap();
        let (mut bytes, mut fds) = ([0; 8], Vec::<OwnedFd>::new());
        let got = receive(&theirs, &mut bytes, 1, &mut fds, Wait::Yes).unwrap();
        assert_eq!((got, &bytes), (Received { bytes_cut: true, ..whole(8) }, b"much too"));
        let got = receive(&theirs, &mut bytes, 1, &mut fds, Wait::Yes).unwrap();
        assert_eq!(got, Received { descriptors_cut: true, ..whole(4) });
        assert!((1..5).contains(&fds.len()), "{}", fds.len());
        let all = [file.as_fd(); MAX_DESCRIPTORS];
        send(&ours, b"all", &all, Wait::Yes).unwrap();
        fds.clear();
        let got = receive(&theirs, &mut bytes, MAX_DESCRIPTORS, &mut fds, Wait::Yes).unwrap();
        assert_eq!((got, fds.len()), (whole(3), MAX_DESCRIPTORS));
        assert_eq!(send(&ours, b"more", &[file.as_fd(); MAX_DESCRIPTORS + 1], Wait::Yes), Err(Errno::INVAL));
    }
}
