//! Sockets and epoll.
//!
//! Addresses are bytes: they come from GPU kernels, and only the Linux kernel interprets them. Buffers are raw pointers,
//! since a GPU may access them at the same time.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::files::Fd;
use super::raw::syscall;

type Result<T> = core::result::Result<T, Errno>;

/// `AF_UNIX`
pub const AF_UNIX: u16 = 1;
/// `AF_INET`
pub const AF_INET: u16 = 2;
/// `AF_INET6`
pub const AF_INET6: u16 = 10;
/// `EPOLLIN`
pub const EPOLLIN: u32 = 1;
/// `EPOLLOUT`
pub const EPOLLOUT: u32 = 4;
/// `EPOLLERR`
pub const EPOLLERR: u32 = 8;
/// `EPOLLHUP`
pub const EPOLLHUP: u32 = 16;
/// `EPOLLRDHUP`
pub const EPOLLRDHUP: u32 = 0x2000;
/// `EPOLLET`
pub const EPOLLET: u32 = 1 << 31;

const SOCK_NONBLOCK: usize = 0o4000;
const SOCK_CLOEXEC: usize = 0o200_0000;
/// `SOL_SOCKET`
pub const SOL_SOCKET: u16 = 1;
const SO_REUSEADDR: usize = 2;
/// `SO_ERROR`
pub const SO_ERROR: u16 = 4;
const SO_LINGER: usize = 13;
const SO_RCVLOWAT: usize = 18;
const IPPROTO_TCP: usize = 6;
const TCP_NODELAY: usize = 1;
const MSG_DONTWAIT: usize = 0x40;
const MSG_NOSIGNAL: usize = 0x4000;
/// Bytes of `struct sockaddr_storage`.
const LONGEST_ADDRESS: usize = 128;

/// Whether a domain is of the internet protocols.
pub const fn is_inet(domain: u16) -> bool {
    matches!(domain, AF_INET | AF_INET6)
}

/// A socket address as the Linux kernel returns it.
#[derive(Clone, Copy, Debug)]
pub struct SocketAddress {
    bytes: [u8; LONGEST_ADDRESS],
    len: usize,
}

impl SocketAddress {
    /// That of a UNIX socket without a name.
    pub fn unnamed_unix() -> SocketAddress {
        let mut bytes = [0; LONGEST_ADDRESS];
        bytes[..2].copy_from_slice(&AF_UNIX.to_ne_bytes());
        SocketAddress { bytes, len: 2 }
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Of a call that stores an address and its length; the result of the call, too.
    pub(super) fn fill(call: impl FnOnce(*mut u8, &mut u32) -> Result<usize>) -> Result<(usize, SocketAddress)> {
        let (mut bytes, mut len) = ([0_u8; LONGEST_ADDRESS], LONGEST_ADDRESS as u32);
        let result = call(bytes.as_mut_ptr(), &mut len)?;
        Ok((result, SocketAddress { bytes, len: (len as usize).min(LONGEST_ADDRESS) }))
    }
}

/// `socket(domain, kind | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)`; kind: 1 stream, 2 datagram, 5 seqpacket.
pub fn new_socket(domain: u16, kind: u16) -> Result<Fd> {
    let kind = usize::from(kind) | SOCK_NONBLOCK | SOCK_CLOEXEC;
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_socket, [domain.into(), kind, 0, 0, 0, 0]) }.map(|fd| fd as Fd)
}

/// `bind`.
pub fn bind(fd: Fd, address: &[u8]) -> Result<()> {
    // SAFETY: the slice lives across the call.
    unsafe { syscall(k::__NR_bind, [fd as usize, address.as_ptr() as usize, address.len(), 0, 0, 0]) }.map(drop)
}

/// `connect`.
pub fn connect(fd: Fd, address: &[u8]) -> Result<()> {
    // SAFETY: the slice lives across the call.
    unsafe { syscall(k::__NR_connect, [fd as usize, address.as_ptr() as usize, address.len(), 0, 0, 0]) }.map(drop)
}

/// `listen`.
pub fn listen(fd: Fd, backlog: u32) -> Result<()> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_listen, [fd as usize, backlog as usize, 0, 0, 0, 0]) }.map(drop)
}

/// `accept4(SOCK_NONBLOCK | SOCK_CLOEXEC)`, and the peer's address.
pub fn accept(fd: Fd) -> Result<(Fd, SocketAddress)> {
    with_address(|bytes, len| {
        // SAFETY: both pointers are to memory of `with_address` that lives across the call.
        unsafe { syscall(k::__NR_accept4, [fd as usize, bytes, len, SOCK_NONBLOCK | SOCK_CLOEXEC, 0, 0]) }
    })
    .map(|(fd, address)| (fd as Fd, address))
}

/// `getsockname`.
pub fn getsockname(fd: Fd) -> Result<SocketAddress> {
    // SAFETY: as in `accept`.
    with_address(|bytes, len| unsafe { syscall(k::__NR_getsockname, [fd as usize, bytes, len, 0, 0, 0]) }).map(|a| a.1)
}

/// `getpeername`.
pub fn getpeername(fd: Fd) -> Result<SocketAddress> {
    // SAFETY: as in `accept`.
    with_address(|bytes, len| unsafe { syscall(k::__NR_getpeername, [fd as usize, bytes, len, 0, 0, 0]) }).map(|a| a.1)
}

fn with_address(call: impl FnOnce(usize, usize) -> Result<usize>) -> Result<(usize, SocketAddress)> {
    SocketAddress::fill(|bytes, len| call(bytes as usize, &raw mut *len as usize))
}

/// `shutdown`: 0 for receiving, 1 for sending, 2 for both.
pub fn shutdown(fd: Fd, how: u32) -> Result<()> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_shutdown, [fd as usize, how as usize, 0, 0, 0, 0]) }.map(drop)
}

/// `sendto` that neither waits nor raises a signal.
///
/// # Safety
/// The range must be readable; its bytes may change meanwhile.
pub unsafe fn send(fd: Fd, from: *const u8, len: usize) -> Result<usize> {
    let flags = MSG_DONTWAIT | MSG_NOSIGNAL;
    // SAFETY: guaranteed by the caller.
    unsafe { syscall(k::__NR_sendto, [fd as usize, from as usize, len, flags, 0, 0]) }
}

/// `recvfrom` that does not wait.
///
/// # Safety
/// The range must be writable, and nothing else may depend on its bytes.
pub unsafe fn recv(fd: Fd, to: *mut u8, len: usize) -> Result<usize> {
    // SAFETY: guaranteed by the caller.
    unsafe { syscall(k::__NR_recvfrom, [fd as usize, to as usize, len, MSG_DONTWAIT, 0, 0]) }
}

/// Takes the error that an asynchronous event left; 0 for none.
pub fn take_error(fd: Fd) -> Result<i32> {
    option(fd, SOL_SOCKET, SO_ERROR)
}

/// `getsockopt` of an option that is an `int`.
pub fn option(fd: Fd, level: u16, name: u16) -> Result<i32> {
    let (mut value, mut len) = (0_i32, 4_u32);
    let args = [fd as usize, level.into(), name.into(), &raw mut value as usize, &raw mut len as usize, 0];
    // SAFETY: both words live across the call.
    unsafe { syscall(k::__NR_getsockopt, args) }?;
    Ok(value)
}

/// `setsockopt` of an option that is an `int`.
pub fn set_option(fd: Fd, level: u16, name: u16, value: i32) -> Result<()> {
    set(fd, level.into(), name.into(), &[value])
}

/// `SO_REUSEADDR`: a port of ended connections can be bound again.
pub fn reuse_address(fd: Fd) -> Result<()> {
    set(fd, SOL_SOCKET.into(), SO_REUSEADDR, &[1])
}

/// `SIOCOUTQ`: bytes that were sent and that the peer has not taken: of TCP those without an acknowledgement, of UNIX sockets the memory
/// of those that were not received.
pub fn unsent(fd: Fd) -> Result<u32> {
    const SIOCOUTQ: usize = 0x5411;
    let mut bytes = 0_i32;
    // SAFETY: the word lives across the call.
    unsafe { syscall(k::__NR_ioctl, [fd as usize, SIOCOUTQ, &raw mut bytes as usize, 0, 0, 0]) }?;
    Ok(bytes.max(0) as u32)
}

/// `TCP_NODELAY`: each message leaves at once.
pub fn no_delay(fd: Fd) -> Result<()> {
    set(fd, IPPROTO_TCP, TCP_NODELAY, &[1])
}

/// `SO_LINGER` of no time: `close` resets the connection.
pub fn reset_on_close(fd: Fd) -> Result<()> {
    set(fd, SOL_SOCKET.into(), SO_LINGER, &[1, 0])
}

/// No `SO_LINGER`, so that `close` does not wait; and `SO_RCVLOWAT` of 1, so that each byte makes an event.
pub fn wait_for_nothing(fd: Fd) -> Result<()> {
    set(fd, SOL_SOCKET.into(), SO_LINGER, &[0, 0])?;
    set(fd, SOL_SOCKET.into(), SO_RCVLOWAT, &[1])
}

/// `close` does not wait for what is unsent. One that resets the connection stays so. ENOTSOCK: nothing is asked of a file.
pub fn close_without_wait(fd: Fd) -> Result<()> {
    let (mut linger, mut len) = ([0_i32; 2], size_of::<[i32; 2]>() as u32);
    let (value, len) = (linger.as_mut_ptr() as usize, &raw mut len as usize);
    // SAFETY: both live across the call.
    unsafe { syscall(k::__NR_getsockopt, [fd as usize, SOL_SOCKET.into(), SO_LINGER, value, len, 0]) }?;
    if linger[0] == 0 || linger[1] == 0 {
        return Ok(());
    }
    set(fd, SOL_SOCKET.into(), SO_LINGER, &[0, 0])
}

fn set(fd: Fd, level: usize, name: usize, value: &[i32]) -> Result<()> {
    let args = [fd as usize, level, name, value.as_ptr() as usize, size_of_val(value), 0];
    // SAFETY: the slice lives across the call.
    unsafe { syscall(k::__NR_setsockopt, args) }.map(drop)
}

/// `struct epoll_event`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, packed)]
pub struct EpollEvent {
    /// `EPOLLIN` ...
    pub events: u32,
    /// As passed to [`epoll_add`].
    pub data: u64,
}

/// `epoll_create1(EPOLL_CLOEXEC)`
pub fn epoll_create() -> Result<Fd> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_epoll_create1, [SOCK_CLOEXEC, 0, 0, 0, 0, 0]) }.map(|fd| fd as Fd)
}

/// `epoll_ctl(EPOLL_CTL_ADD)`
pub fn epoll_add(epoll: Fd, fd: Fd, events: u32, data: u64) -> Result<()> {
    const EPOLL_CTL_ADD: usize = 1;
    let event = EpollEvent { events, data };
    // SAFETY: the event lives across the call.
    unsafe { syscall(k::__NR_epoll_ctl, [epoll as usize, EPOLL_CTL_ADD, fd as usize, &raw const event as usize, 0, 0]) }
        .map(drop)
}

/// `epoll_ctl(EPOLL_CTL_DEL)`: closing is not enough where others have descriptors of the same socket.
pub fn epoll_remove(epoll: Fd, fd: Fd) -> Result<()> {
    const EPOLL_CTL_DEL: usize = 2;
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_epoll_ctl, [epoll as usize, EPOLL_CTL_DEL, fd as usize, 0, 0, 0]) }.map(drop)
}

/// `epoll_pwait2`, and `epoll_pwait` with its coarser time where a kernel or a sandbox refuses that.
pub fn epoll_wait(epoll: Fd, events: &mut [EpollEvent], nanoseconds: u64) -> Result<usize> {
    let timeout = [nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000];
    let (out, len) = (events.as_mut_ptr() as usize, events.len());
    // SAFETY: the events and the time live across the call; no signal mask.
    match unsafe { syscall(k::__NR_epoll_pwait2, [epoll as usize, out, len, timeout.as_ptr() as usize, 0, 0]) } {
        Err(Errno::NOSYS | Errno::PERM) => {
            let ms = nanoseconds.div_ceil(1_000_000) as usize;
            // SAFETY: as above.
            unsafe { syscall(k::__NR_epoll_pwait, [epoll as usize, out, len, ms, 0, 0]) }
        }
        other => other,
    }
}

/// `eventfd2(EFD_CLOEXEC | EFD_NONBLOCK)`: a counter that makes an epoll event when it grows.
pub fn event_fd() -> Result<Fd> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_eventfd2, [0, (k::EFD_CLOEXEC | k::EFD_NONBLOCK) as usize, 0, 0, 0, 0]) }
        .map(|fd| fd as Fd)
}

/// Adds 1 to such a counter.
pub fn signal_event(fd: Fd) -> Result<()> {
    let one = 1_u64;
    // SAFETY: the word lives across the call.
    unsafe { syscall(k::__NR_write, [fd as usize, &raw const one as usize, size_of_val(&one), 0, 0, 0]) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linux::close;

    #[test]
    fn bytes_go_through_a_connection_and_events_tell_of_them() {
        let listener = new_socket(AF_UNIX, 1).unwrap();
        // An address of the Linux kernel's choice in the abstract namespace.
        bind(listener, &AF_UNIX.to_ne_bytes()).unwrap();
        listen(listener, 1).unwrap();
        let address = getsockname(listener).unwrap();
        let client = new_socket(AF_UNIX, 1).unwrap();
        connect(client, address.bytes()).unwrap();
        let (server, _) = accept(listener).unwrap();
        let (epoll, mut events) = (epoll_create().unwrap(), [EpollEvent::default(); 4]);
        epoll_add(epoll, server, EPOLLIN | EPOLLET, 77).unwrap();
        assert_eq!(epoll_wait(epoll, &mut events, 1000).unwrap(), 0);
        let mut got = [0_u8; 8];
        // SAFETY: the arrays live across the calls.
        unsafe {
            assert_eq!(recv(server, got.as_mut_ptr(), 8), Err(Errno::AGAIN));
            assert_eq!(send(client, b"hello".as_ptr(), 5), Ok(5));
            assert_eq!(epoll_wait(epoll, &mut events, 1_000_000_000).unwrap(), 1);
            assert!(unsent(client).unwrap() >= 5);
            assert_eq!(recv(server, got.as_mut_ptr(), 8), Ok(5));
            assert_eq!(unsent(client), Ok(0));
        }
        assert_eq!(({ events[0].data }, &got[..5]), (77, &b"hello"[..]));
        for fd in [listener, client, server, epoll] {
            close(fd).unwrap();
        }
    }
}
