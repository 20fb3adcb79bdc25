//! Datagrams: messages in two parts, for rings, and what a socket has next.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::files::Fd;
use super::raw::syscall;
use super::rights::Rights;
use super::socket::SocketAddress;

type Result<T> = core::result::Result<T, Errno>;

const MSG_PEEK: usize = 2;
const MSG_TRUNC: usize = 0x20;
const MSG_DONTWAIT: usize = 0x40;
const MSG_NOSIGNAL: usize = 0x4000;
const MSG_CMSG_CLOEXEC: usize = 0x4000_0000;
const FIONREAD: usize = 0x541b;
const POLLRDHUP: i16 = 0x2000;

/// `struct iovec`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Part {
    /// Where.
    pub start: *mut u8,
    /// How many bytes.
    pub len: usize,
}

/// `struct msghdr`
#[repr(C)]
struct Message {
    name: *mut u8,
    name_len: u32,
    parts: *const Part,
    part_count: usize,
    control: usize,
    control_len: usize,
    flags: u32,
}

/// `sendmsg` that neither waits nor raises a signal; to an address unless that is empty.
///
/// # Safety
/// The parts must be readable; their bytes may change meanwhile.
pub unsafe fn send_message(fd: Fd, parts: &[Part], address: &[u8]) -> Result<usize> {
    let name = if address.is_empty() { core::ptr::null_mut() } else { address.as_ptr().cast_mut() };
    let message = Message {
        name,
        name_len: address.len() as u32,
        parts: parts.as_ptr(),
        part_count: parts.len(),
        control: 0,
        control_len: 0,
        flags: 0,
    };
    let flags = MSG_DONTWAIT | MSG_NOSIGNAL;
    // SAFETY: the message and the address live across the call; the parts are guaranteed by the caller.
    unsafe { syscall(k::__NR_sendmsg, [fd as usize, &raw const message as usize, flags, 0, 0, 0]) }
}

/// `recvmsg` that does not wait: the length of the datagram, which may be more than the parts have room for, and the address.
/// Without `rights` the Linux kernel closes descriptors that come with it.
///
/// # Safety
/// The parts must be writable, and nothing else may depend on their bytes.
pub unsafe fn recv_message(fd: Fd, parts: &[Part], mut rights: Option<&mut Rights>) -> Result<(usize, SocketAddress)> {
    SocketAddress::fill(|name, name_len| {
        let (control, control_len) = rights.as_mut().map_or((0, 0), |rights| rights.buffer());
        let mut message = Message {
            name,
            name_len: *name_len,
            parts: parts.as_ptr(),
            part_count: parts.len(),
            control,
            control_len,
            flags: 0,
        };
        let flags = MSG_DONTWAIT | MSG_TRUNC | MSG_CMSG_CLOEXEC;
        // SAFETY: the message, the buffer and the memory for the address live across the call; the parts are guaranteed by the caller.
        let got = unsafe { syscall(k::__NR_recvmsg, [fd as usize, &raw mut message as usize, flags, 0, 0, 0]) }?;
        *name_len = message.name_len;
        if let Some(rights) = rights.as_mut() {
            rights.filled(message.control_len);
        }
        Ok(got)
    })
}

/// `recvmsg` of a UNIX stream that does not wait: bytes, and the descriptors that came with them.
///
/// # Safety
/// As of [`super::socket::recv`].
pub unsafe fn recv_with_rights(fd: Fd, to: *mut u8, len: usize, rights: &mut Rights) -> Result<usize> {
    let part = Part { start: to, len };
    let (control, control_len) = rights.buffer();
    let name = core::ptr::null_mut();
    let mut message =
        Message { name, name_len: 0, parts: &raw const part, part_count: 1, control, control_len, flags: 0 };
    let flags = MSG_DONTWAIT | MSG_CMSG_CLOEXEC;
    // SAFETY: the message, the part and the buffer live across the call; the part is guaranteed by the caller.
    let got = unsafe { syscall(k::__NR_recvmsg, [fd as usize, &raw mut message as usize, flags, 0, 0, 0]) }?;
    rights.filled(message.control_len);
    Ok(got)
}

/// The length of the next datagram, which stays.
pub fn next_length(fd: Fd) -> Result<usize> {
    // SAFETY: no memory is involved: no byte is asked for.
    unsafe { syscall(k::__NR_recvfrom, [fd as usize, 0, 0, MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT, 0, 0]) }
}

/// Whether the peer sends no more and no byte is left. An empty packet may be left: receiving it and the end are the same.
pub fn is_at_end(fd: Fd) -> bool {
    let mut left = 0_i32;
    // SAFETY: the word lives across the call.
    let asked = unsafe { syscall(k::__NR_ioctl, [fd as usize, FIONREAD, &raw mut left as usize, 0, 0, 0]) };
    // struct pollfd: descriptor, events, results.
    let (mut poll, now) = ([fd as u32, POLLRDHUP as u32], [0_u64; 2]);
    // SAFETY: both arrays live across the call; no signal mask.
    let polled = unsafe { syscall(k::__NR_ppoll, [poll.as_mut_ptr() as usize, 1, now.as_ptr() as usize, 0, 0, 0]) };
    asked.is_ok() && left == 0 && polled == Ok(1) && (poll[1] >> 16) as i16 & POLLRDHUP != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linux::close;
    use crate::linux::socket::{AF_UNIX, bind, connect, getsockname, new_socket};

    #[test]
    fn datagrams_keep_their_boundaries_and_lengths() {
        let (a, b) = (new_socket(AF_UNIX, 2).unwrap(), new_socket(AF_UNIX, 2).unwrap());
        for socket in [a, b] {
            bind(socket, &AF_UNIX.to_ne_bytes()).unwrap();
        }
        let (to, from) = (getsockname(b).unwrap(), getsockname(a).unwrap());
        let mut bytes = *b"hello world";
        let (start, end) = bytes.split_at_mut(5);
        let parts = [start, end].map(|part| Part { start: part.as_mut_ptr(), len: part.len() });
        let mut got = [0_u8; 4];
        let room = [Part { start: got.as_mut_ptr(), len: 4 }];
        // SAFETY: the arrays live across the calls.
        unsafe {
            assert_eq!(recv_message(b, &room, None).map(|got| got.0), Err(Errno::AGAIN));
            assert_eq!(send_message(a, &parts, to.bytes()), Ok(11));
            assert_eq!(send_message(a, &[], to.bytes()), Ok(0));
            assert_eq!(next_length(b), Ok(11));
            let (len, address) = recv_message(b, &room, None).unwrap();
            assert_eq!((len, address.bytes(), &got), (11, from.bytes(), b"hell"));
            assert_eq!((next_length(b), recv_message(b, &room, None).unwrap().0), (Ok(0), 0));
            connect(a, to.bytes()).unwrap();
            assert_eq!(send_message(a, &parts[..1], &[]), Ok(5));
        }
        for fd in [a, b] {
            close(fd).unwrap();
        }
    }

    #[test]
    fn end_is_told_from_an_empty_packet() {
        let (listener, client) = (new_socket(AF_UNIX, 5).unwrap(), new_socket(AF_UNIX, 5).unwrap());
        bind(listener, &AF_UNIX.to_ne_bytes()).unwrap();
        crate::linux::socket::listen(listener, 1).unwrap();
        connect(client, getsockname(listener).unwrap().bytes()).unwrap();
        let (server, _) = crate::linux::socket::accept(listener).unwrap();
        let mut byte = 7_u8;
        let part = [Part { start: &raw mut byte, len: 1 }];
        // SAFETY: the byte lives across the calls.
        unsafe {
            assert_eq!(send_message(client, &[], &[]), Ok(0));
            assert_eq!(recv_message(server, &part, None).unwrap().0, 0);
            assert!(!is_at_end(server));
            assert_eq!((send_message(client, &[], &[]), send_message(client, &part, &[])), (Ok(0), Ok(1)));
            close(client).unwrap();
            assert_eq!(recv_message(server, &part, None).unwrap().0, 0);
            assert!(!is_at_end(server), "a packet is left");
            assert_eq!(recv_message(server, &part, None).unwrap().0, 1);
            assert_eq!(recv_message(server, &part, None).unwrap().0, 0);
            assert!(is_at_end(server));
        }
        for fd in [listener, server] {
            close(fd).unwrap();
        }
    }
}
