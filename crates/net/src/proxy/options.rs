//! Socket options: those of Linux that are an `int`, on the socket of Linux. A kernel's own time limits are on the device.
//!
//! ```text
//!   setsockopt ── known option? ── setsockopt(2)
//!   getsockopt ── SO_ERROR? ── what the proxy has seen: of a connect that did not wait, once; of a broken connection, each time
//!              └ known option? ── getsockopt(2)
//! ```
//!
//! Only options that change nothing that the proxy relies on are let through: no SO_LINGER, no SO_RCVLOWAT, no filters.

use spinio_ring::layout::Descriptor;
use spinio_ring::line::{CONNECTING, ERR};
use spinio_ring::mailbox::{Address, Reply, Request};
use spinio_ring::peer::MOVED;
use spinio_sys::Errno;
use spinio_sys::linux::socket::{self, AF_INET, AF_INET6, AF_UNIX, SO_ERROR, SOL_SOCKET};

use super::Proxy;
use super::sockets::Socket;

const IPPROTO_IP: u16 = 0;
const IPPROTO_TCP: u16 = 6;
const IPPROTO_IPV6: u16 = 41;

/// What may be done with an option.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    ReadAndWrite,
}

/// All have a value of four bytes.
fn access(level: u16, option: u16) -> Option<Access> {
    match (level, option) {
        // SO_TYPE, SO_ERROR, SO_ACCEPTCONN, SO_PROTOCOL, SO_DOMAIN
        (SOL_SOCKET, 3 | SO_ERROR | 30 | 38 | 39) => Some(Access::Read),
        // SO_REUSEADDR, SO_DONTROUTE, SO_BROADCAST, SO_SNDBUF, SO_RCVBUF, SO_KEEPALIVE, SO_PRIORITY, SO_REUSEPORT, SO_MARK
        (SOL_SOCKET, 2 | 5..=9 | 12 | 15 | 36)
        // IP_TOS, IP_TTL; TCP_NODELAY, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT, TCP_USER_TIMEOUT; IPV6_V6ONLY, IPV6_TCLASS
        | (IPPROTO_IP, 1 | 2)
        | (IPPROTO_TCP, 1 | 4..=6 | 18)
        | (IPPROTO_IPV6, 26 | 67) => Some(Access::ReadAndWrite),
        _ => None,
    }
}

impl Proxy {
    /// `setsockopt`
    pub(super) fn set_option(&mut self, request: &Request) -> Result<Reply, Errno> {
        let (socket, level, option) = self.socket_and_option(request, Access::ReadAndWrite)?;
        let (bytes, len) = request.address.bytes();
        let value = bytes.first_chunk().filter(|_| len == 4).ok_or(Errno::INVAL)?;
        let value = i32::from_ne_bytes(*value);
        let fd = socket.raw_fd().ok_or(Errno::CONNRESET)?;
        socket::set_option(fd, level, option, value)?;
        socket.options.retain(|(l, o, _)| (*l, *o) != (level, option));
        socket.options.push((level, option, value));
        Ok(Reply::new(0))
    }

    /// `getsockopt`
    pub(super) fn get_option(&mut self, request: &Request) -> Result<Reply, Errno> {
        let (socket, level, option) = self.socket_and_option(request, Access::Read)?;
        let value = if (level, option) == (SOL_SOCKET, SO_ERROR) {
            let (error, failed_connect) = error_of(socket);
            if failed_connect {
                socket.connect_error = 0;
                let index = Descriptor::of(request.descriptor).index;
                self.set_error(index, Errno::NOTCONN.raw_os_error() as u16);
            }
            error.into()
        } else {
            let fd = socket.raw_fd().ok_or(Errno::CONNRESET)?;
            socket::option(fd, level, option)?
        };
        Ok(Reply { result: 0, address: Address::new(&value.to_ne_bytes()) })
    }

    fn socket_and_option(&mut self, request: &Request, wanted: Access) -> Result<(&mut Socket, u16, u16), Errno> {
        let (level, option) = ((request.argument >> 16) as u16, request.argument as u16);
        let descriptor = Descriptor::of(request.descriptor);
        let socket = self.sockets.get(descriptor).filter(|socket| socket.closing.is_none()).ok_or(Errno::BADF)?;
        match access(level, option) {
            Some(access) if access == wanted || access == Access::ReadAndWrite => {}
            _ => return Err(Errno::NOPROTOOPT),
        }
        // As Linux has it: each domain knows its own levels.
        let known = match level {
            IPPROTO_IP => socket.domain == AF_INET,
            IPPROTO_IPV6 => socket.domain == AF_INET6,
            IPPROTO_TCP => socket.domain != AF_UNIX,
            _ => true,
        };
        if known { Ok((socket, level, option)) } else { Err(Errno::OPNOTSUPP) }
    }
}

/// The error of a socket, 0 for none; and whether it is that of a connect that did not wait.
fn error_of(socket: &Socket) -> (u16, bool) {
    if socket.connect_error != 0 {
        return (socket.connect_error, true);
    }
    let is_error = socket.flags & ERR != 0 && !matches!(socket.errno, MOVED | CONNECTING);
    let error = if is_error { socket.errno } else { 0 };
    // No connection yet is none.
    (if i32::from(error) == Errno::NOTCONN.raw_os_error() { 0 } else { error }, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_the_proxy_relies_on_are_refused() {
        let (linger, receive_low_water, attach_filter, receive_timeout) = (13, 18, 26, 20);
        for option in [linger, receive_low_water, attach_filter, receive_timeout, 0, u16::MAX] {
            assert!(access(SOL_SOCKET, option).is_none(), "{option}");
        }
        assert!(access(SOL_SOCKET, SO_ERROR) == Some(Access::Read));
        assert!(access(u16::MAX, 1).is_none());
    }
}
