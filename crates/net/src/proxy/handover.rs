//! Sockets that move between the program and the kernels: adopt and release.
//!
//! ```text
//!   program's table                                        table of the proxy
//!     fd ── adopt ── pidfd_getfd ──────────────────────────> socket      bytes that wait in the Linux kernel stay there
//!     fd <── a pair of sockets (SCM_RIGHTS) ── release ───── socket      send ring: is empty before, else EBUSY
//!     unread bytes <──────────────────────────────────────── receive ring
//! ```
//!
//! No byte is lost and none comes twice: bytes that kernels have sent leave before the socket does, and bytes that arrived
//! and no kernel has received go to the program, which gets them before those that it receives itself. Datagrams have
//! boundaries, so a socket with unread ones stays.
//!
//! Known flaws: if a process that shares a listening socket clears O_NONBLOCK, and takes the connection between the proxy's look
//! and its accept, the proxy waits until the next one comes. A kernel that still uses a socket which the program takes has no defined result; `release()` of kernels ends
//! its use. Where a sandbox refuses `pidfd_getfd`, neither direction works (EPERM, ENOSYS).

use std::sync::Arc;

use spinio_ring::Word;
use spinio_ring::layout::{Descriptor, kind_of, record};
use spinio_ring::line::ERR;
use spinio_sys::Errno;
use spinio_sys::linux::rights;
use spinio_sys::linux::socket::{self, AF_UNIX, is_inet};
use spinio_sys::linux::socket_move::{SocketKind, send_descriptor, set_nonblocking, socket_kind};

use super::Proxy;
use super::sockets::{DGRAM, SEQPACKET, STREAM, State};
use crate::kept::Kept;
use crate::socket_fd::Place;

const TCP: u32 = 6;
const UDP: u32 = 17;
const MPTCP: u32 = 262;

impl Proxy {
    /// Puts a socket of the program into the table.
    pub(super) fn adopt(&mut self, place: Place, now: u64) -> Result<Descriptor, Errno> {
        if self.stopped {
            return Err(self.refusal);
        }
        // Not of the closer: the program keeps a socket that is refused, as it is. It has another descriptor, so a close does not wait.
        let own = self.with_room(now, |_| place.duplicate())?;
        let fd = own.0;
        let SocketKind { domain, kind, protocol, listening } = socket_kind(fd)?;
        if domain != AF_UNIX && !is_inet(domain) {
            return Err(Errno::AFNOSUPPORT);
        }
        match kind {
            STREAM if domain == AF_UNIX || matches!(protocol, TCP | MPTCP) => {}
            DGRAM if domain == AF_UNIX || protocol == UDP => {}
            SEQPACKET if domain == AF_UNIX => {}
            STREAM | DGRAM | SEQPACKET => return Err(Errno::PROTONOSUPPORT),
            _ => return Err(Errno::SOCKTNOSUPPORT),
        }
        let connected = !listening && socket::getpeername(fd).is_ok();
        let state = match (listening, connected || kind == DGRAM) {
            (true, _) => State::Listening,
            (false, true) => State::Connected,
            (false, false) => return Err(Errno::NOTCONN),
        };
        if !self.make_room(kind, now) {
            return Err(Errno::NOBUFS);
        }
        let refused_rights = domain == AF_UNIX && !rights::passes_rights(fd);
        let descriptor = self.add(own.into_fd(), domain, kind, state)?;
        let index = descriptor.index;
        // Not before: the program keeps a socket that is refused, as it is.
        if let Err(errno) = set_nonblocking(fd, true) {
            if domain == AF_UNIX && !refused_rights {
                let _ = rights::pass_rights(fd, true);
            }
            self.close_now(index);
            self.remove(index);
            return Err(errno);
        }
        if let Some(socket) = self.sockets.at(index) {
            // Descriptors may have come before.
            (socket.adopted, socket.takes_rights) = (true, domain == AF_UNIX);
            socket.refused_rights = refused_rights;
            socket.meeting.kept = Some(Kept::Adopted);
        }
        let _ = socket::wait_for_nothing(fd);
        if kind == DGRAM && connected {
            let first = self.first.bits() | kind_of(kind, domain, true);
            self.memory.record(index)[record::FIRST].store_release(first);
        }
        if listening {
            self.sockets.free_rings(index);
        } else if is_inet(domain) && kind == STREAM {
            let _ = socket::no_delay(fd);
        }
        self.heat(index);
        Ok(descriptor)
    }

    /// Gives a socket back to the program, through `passage`, and the bytes that no kernel has received, of which there
    /// may be `room`. EBUSY: not yet.
    pub(super) fn release(
        &mut self,
        descriptor: Descriptor,
        passage: Place,
        room: usize,
        now: u64,
    ) -> Result<Vec<u8>, Errno> {
        self.take_all_doorbells(now);
        let index = descriptor.index;
        let socket = self.sockets.get(descriptor).filter(|socket| socket.closing.is_none()).ok_or(Errno::BADF)?;
        if socket.connect.is_some() || socket.state == State::Connecting {
            return Err(Errno::ALREADY);
        }
        if socket.state == State::Upgraded {
            // The socket of Linux is an anchor, without bytes.
            return Err(Errno::OPNOTSUPP);
        }
        if !socket.meeting.held.is_empty() {
            // Connections that were accepted before a kernel did so cannot go back into the backlog.
            return Err(Errno::BUSY);
        }
        let (stream, connected) = (socket.kind == STREAM, socket.state == State::Connected);
        if stream && connected {
            self.send_all(index);
        }
        let memory = Arc::clone(&self.memory);
        let unread = {
            let socket = self.sockets.get(descriptor).ok_or(Errno::BADF)?;
            // An error that kernels were told of is not told again. The end of the net is none.
            let failed = socket.state == State::Failed || connected && socket.flags & ERR != 0;
            let ended = socket.errno == Errno::SHUTDOWN.raw_os_error() as u16;
            if failed && socket.errno != 0 && (!ended || socket.state == State::Failed) {
                return Err(Errno::from_raw_os_error(socket.errno.into()));
            }
            if connected && socket.credit(&memory, index).is_err() {
                self.violation(index);
                return Err(Errno::CONNRESET);
            }
            let left = if connected { socket.receive_ring.unread() } else { 0 };
            // A file that a worker still sends goes on, also after the net was stopped.
            let sends = connected && (socket.send_ring.pending() > 0 || !socket.transfers.is_empty());
            if sends || left > 0 && !stream {
                return Err(Errno::BUSY);
            }
            if left as usize > room {
                return Err(Errno::MSGSIZE);
            }
            match socket.rings {
                Some(rings) if left > 0 => {
                    let first = socket.receive_ring.received().after(left.wrapping_neg());
                    memory.load(rings.receive, socket.receive_ring.size(), first).take(left as usize).collect()
                }
                _ => Vec::new(),
            }
        };
        let fd = self.sockets.at(index).and_then(|socket| socket.raw_fd()).ok_or(Errno::BADF)?;
        let passage = passage.duplicate()?;
        set_nonblocking(fd, false)?;
        let takes_rights = self.sockets.at(index).is_some_and(|it| it.domain == AF_UNIX && !it.refused_rights);
        if let Err(errno) = send_descriptor(passage.0, fd) {
            let _ = set_nonblocking(fd, true);
            return Err(errno);
        }
        if takes_rights {
            let _ = rights::pass_rights(fd, true);
        }
        self.set_error(index, Errno::BADF.raw_os_error() as u16);
        self.cancel_calls(index, Errno::BADF);
        // The connection ends with the program's descriptor. That is the last one, so this close does not wait.
        self.close_now(index);
        self.remove(index);
        Ok(unread)
    }
}
