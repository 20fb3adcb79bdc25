//! Sockets that move between the descriptor tables of one process: what a descriptor is, and how it goes to another table.
//!
//! A thread takes a descriptor out of another table with `dup_from_thread`. It gives one away through a pair of sockets
//! (SCM_RIGHTS), of which the other thread has made both ends: before Linux 6.9 the table of a thread that is not the first
//! one cannot be named.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::channel::{receive_packet, send_packet};
use super::files::{Fd, close, status_flags};
use super::raw::syscall;
use super::socket::AF_UNIX;

type Result<T> = core::result::Result<T, Errno>;

const SOL_SOCKET: usize = 1;
const SO_TYPE: usize = 3;
const SO_ACCEPTCONN: usize = 30;
const SO_PROTOCOL: usize = 38;
const SO_DOMAIN: usize = 39;

/// What a descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketKind {
    /// `AF_UNIX` ...
    pub domain: u16,
    /// 1 stream, 2 datagram, 5 seqpacket.
    pub kind: u16,
    /// 6 TCP, 17 UDP, 262 MPTCP; 0 of UNIX sockets.
    pub protocol: u32,
    /// It listens.
    pub listening: bool,
}

/// What a descriptor is; ENOTSOCK if it is no socket.
pub fn socket_kind(fd: Fd) -> Result<SocketKind> {
    Ok(SocketKind {
        domain: option(fd, SO_DOMAIN)? as u16,
        kind: option(fd, SO_TYPE)? as u16,
        protocol: option(fd, SO_PROTOCOL)? as u32,
        listening: option(fd, SO_ACCEPTCONN)? != 0,
    })
}

fn option(fd: Fd, name: usize) -> Result<i32> {
    let (mut value, mut len) = (0_i32, 4_u32);
    let args = [fd as usize, SOL_SOCKET, name, &raw mut value as usize, &raw mut len as usize, 0];
    // SAFETY: both words live across the call.
    unsafe { syscall(k::__NR_getsockopt, args) }?;
    Ok(value)
}

/// `O_NONBLOCK`, which all descriptors of the open file have in common.
pub fn set_nonblocking(fd: Fd, on: bool) -> Result<()> {
    let flags = status_flags(fd)? as u32;
    let flags = if on { flags | k::O_NONBLOCK } else { flags & !k::O_NONBLOCK };
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_fcntl, [fd as usize, k::F_SETFL as usize, flags as usize, 0, 0, 0]) }.map(drop)
}

/// `socketpair` of UNIX packets.
pub fn socket_pair() -> Result<(Fd, Fd)> {
    const SEQPACKET: usize = 5;
    let mut ends = [-1 as Fd; 2];
    let kind = SEQPACKET | k::O_CLOEXEC as usize;
    // SAFETY: `ends` takes two descriptors and lives across the call.
    unsafe { syscall(k::__NR_socketpair, [AF_UNIX.into(), kind, 0, ends.as_mut_ptr() as usize, 0, 0]) }?;
    Ok((ends[0], ends[1]))
}

/// Sends a duplicate of a descriptor.
pub fn send_descriptor(via: Fd, fd: Fd) -> Result<()> {
    send_packet(via, &[0], Some(fd))
}

/// Receives a descriptor that was sent before, with close-on-exec.
pub fn receive_descriptor(via: Fd) -> Result<Fd> {
    // Without one the Linux kernel had no number for it.
    receive_packet(via, &mut [0])?.1.ok_or(Errno::MFILE)
}

/// A pair of sockets, closed with this.
#[derive(Debug)]
pub struct Passage {
    /// For the thread that receives.
    pub inner: Fd,
    /// For the thread that sends, which duplicates it.
    pub outer: Fd,
}

impl Passage {
    /// In the table of this thread.
    pub fn new() -> Result<Passage> {
        socket_pair().map(|(inner, outer)| Passage { inner, outer })
    }

    /// Nothing more is sent: frees a number of the table, and what was sent can still be received.
    pub fn close_outer(&mut self) {
        if self.outer >= 0 {
            let _ = close(std::mem::replace(&mut self.outer, -1));
        }
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        let _ = close(self.inner);
        self.close_outer();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linux::socket::{AF_INET, bind, listen, new_socket};

    #[test]
    fn kinds_of_sockets_are_told_and_descriptors_go_through_a_passage() {
        let kind = |fd| socket_kind(fd).unwrap();
        let udp = new_socket(AF_INET, 2).unwrap();
        assert_eq!(kind(udp), SocketKind { domain: AF_INET, kind: 2, protocol: 17, listening: false });
        let listener = new_socket(AF_UNIX, 5).unwrap();
        bind(listener, &AF_UNIX.to_ne_bytes()).unwrap();
        listen(listener, 1).unwrap();
        assert_eq!(kind(listener), SocketKind { domain: AF_UNIX, kind: 5, protocol: 0, listening: true });
        let passage = Passage::new().unwrap();
        assert_eq!(receive_descriptor(passage.inner), Err(Errno::AGAIN));
        assert_eq!(send_descriptor(passage.outer, -1), Err(Errno::BADF));
        send_descriptor(passage.outer, udp).unwrap();
        let other = receive_descriptor(passage.inner).unwrap();
        assert!(other != udp && kind(other) == kind(udp));
        let nonblocking = |fd| status_flags(fd).unwrap() as u32 & k::O_NONBLOCK != 0;
        assert!(nonblocking(other));
        set_nonblocking(udp, false).unwrap();
        assert!(!nonblocking(other), "it is the same socket");
        let (out, into) = crate::linux::pipe().unwrap();
        assert_eq!(socket_kind(out), Err(Errno::NOTSOCK));
        for fd in [udp, other, listener, out, into] {
            close(fd).unwrap();
        }
    }
}
