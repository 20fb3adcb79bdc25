//! The connection of Linux, made until a deadline, whatever signals come.
//!
//! TCP is tried without a wait, and then waited for: a second connect(2) of a socket that is connecting would fail. A UNIX socket
//! cannot be waited for while the backlog is full: its connect(2) waits itself, and after a signal it is made again.

use spinio_sys::Errno;
use spinio_sys::linux::channel::{self, Until};
use spinio_sys::linux::socket::{self, is_inet};
use spinio_sys::linux::{Fd, socket_move};

use super::deadline::left;
use crate::NetAddress;

type Result<T> = core::result::Result<T, Errno>;

/// The shortest limit that SO_SNDTIMEO has; 0 is none.
const SHORTEST_NS: u64 = 1000;

/// Connects a new socket, which does not wait yet; later it does. At the deadline EINPROGRESS (TCP) or EAGAIN (UNIX), as connect(2) with
/// SO_SNDTIMEO. The time limits of the descriptor are changed.
pub(super) fn connect(fd: Fd, to: &NetAddress, deadline: Option<u64>) -> Result<()> {
    if is_inet(to.family()) {
        connect_inet(fd, to, deadline)?;
        return socket_move::set_nonblocking(fd, false);
    }
    socket_move::set_nonblocking(fd, false)?;
    connect_unix(fd, to, deadline)
}

fn connect_inet(fd: Fd, to: &NetAddress, deadline: Option<u64>) -> Result<()> {
    match socket::connect(fd, to.bytes()) {
        Err(Errno::INPROGRESS) => {}
        done => return done,
    }
    loop {
        let left = left(deadline);
        if channel::wait_socket(fd, Until::Writable, left)? {
            break;
        }
        if left == Some(0) {
            return Err(Errno::INPROGRESS);
        }
    }
    match socket::take_error(fd)? {
        0 => Ok(()),
        errno => Err(Errno::from_raw_os_error(errno)),
    }
}

fn connect_unix(fd: Fd, to: &NetAddress, deadline: Option<u64>) -> Result<()> {
    loop {
        if let Some(left) = left(deadline) {
            channel::set_timeouts(fd, [0, left.max(SHORTEST_NS)])?;
        }
        match socket::connect(fd, to.bytes()) {
            Err(Errno::INTR) if left(deadline) == Some(0) => return Err(Errno::AGAIN),
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}
