//! connect: a connection of Linux, or one that becomes an end of memory of this net (loopback.rs) or of another (announced.rs).
//!
//! ```text
//!   call ──> Unconnected, Connecting ──> connected: reply 0        ──┐ refused: reply -errno, Unconnected again
//!     │ DONTWAIT, or after the time limit of its socket (SO_SNDTIMEO)│
//!     └──> reply EINPROGRESS; the socket waits by itself: `connecting` in its line ──> OUT, or the error for SO_ERROR
//! ```
//!
//! As in Linux, a limit ends the call and not the connection. A packet socket (SEQPACKET) does not connect after its call: EAGAIN.

use spinio_ring::layout::Descriptor;
use spinio_ring::line::{CONNECTING, ERR};
use spinio_ring::mailbox::{DONTWAIT, Reply, Request};
use spinio_sys::linux::socket::{self, is_inet};
use spinio_sys::{Errno, injection_point};

use super::Proxy;
use super::caller::{Caller, failed};
use super::sockets::{Connect, DGRAM, STREAM, State};
use super::time_limits::deadline_of;
use crate::kept::Kept;

impl Proxy {
    pub(super) fn connect(&mut self, request: &Request, caller: Caller, now: u64) {
        let descriptor = Descriptor::of(request.descriptor);
        let errno = match self.sockets.get(descriptor).filter(|socket| socket.closing.is_none()) {
            None => Errno::BADF,
            Some(socket) if socket.connect.is_some() => Errno::ALREADY,
            Some(socket) if socket.kind == DGRAM => {
                // At once, also again, and back to no address.
                let (bytes, len) = request.address.bytes();
                let fd = socket.raw_fd();
                let done = fd.map_or(Err(Errno::CONNRESET), |fd| socket::connect(fd, &bytes[..len]));
                let result = done.map_or_else(|errno| -errno.raw_os_error(), |()| 0);
                return self.answer(caller, Reply::new(result));
            }
            Some(socket) => match socket.state {
                State::Connected | State::Upgraded => Errno::ISCONN,
                State::Listening if is_inet(socket.domain) => Errno::ISCONN,
                State::Listening => Errno::INVAL,
                State::Failed => Errno::CONNRESET,
                State::Unconnected | State::Connecting => {
                    let (bytes, len) = request.address.bytes();
                    let deadline = deadline_of(request.time_limit);
                    socket.connect = Some(Connect { caller: Some(caller), deadline, to: bytes[..len].to_vec() });
                    (socket.meeting.since, socket.meeting.kept) = (None, None);
                    if std::mem::take(&mut socket.connect_error) != 0 {
                        self.set_error(descriptor.index, Errno::NOTCONN.raw_os_error() as u16);
                    }
                    self.note_client(descriptor.index);
                    if !self.announce(descriptor.index, now) {
                        self.connect_again(descriptor.index, now);
                    }
                    if request.flags & DONTWAIT != 0 {
                        self.connect_later(descriptor.index);
                    }
                    return self.limit(descriptor.index, deadline);
                }
            },
        };
        self.answer(caller, failed(errno));
    }

    /// The time limit of a call has passed.
    pub(super) fn end_late_connect(&mut self, index: u32) {
        self.connect_later(index);
        // A packet socket.
        let Some(socket) = self.sockets.at(index).filter(|socket| socket.kind != STREAM) else { return };
        if let Some(caller) = socket.connect.take().and_then(|connect| connect.caller) {
            self.answer(caller, failed(Errno::AGAIN));
        }
    }

    /// A call of connect does not wait: it returns, if the connection is not there yet.
    fn connect_later(&mut self, index: u32) {
        let Some(socket) = self.sockets.at(index).filter(|socket| socket.kind == STREAM) else { return };
        let Some(caller) = socket.connect.as_mut().and_then(|connect| connect.caller.take()) else { return };
        // Neither an error nor room, until it is connected or has failed.
        (socket.errno, socket.flags) = (CONNECTING, socket.flags & !ERR);
        socket.store_received(&self.memory, index);
        socket.store_sent(&self.memory, index);
        self.answer(caller, failed(Errno::INPROGRESS));
    }

    /// The connection is there, or has failed: answers the call, or tells those that look at the socket later.
    pub(super) fn end_connect(&mut self, index: u32, connect: Option<Connect>, errno: i32) {
        let Some(connect) = connect else { return };
        if let Some(caller) = connect.caller {
            return self.answer(caller, Reply::new(-errno));
        }
        let Some(socket) = self.sockets.at(index) else { return };
        socket.connect_error = errno as u16;
        socket.tells_connected = socket.meeting.end.as_ref().is_some_and(|end| !end.place.shared);
        if errno != 0 {
            self.set_error(index, errno as u16);
        }
        // Not told at once: accept of this net may come here, and has counted the room for its own event.
        self.heat(index);
    }

    /// Begins to connect, or tries once more where a listener's backlog was full.
    pub(super) fn connect_again(&mut self, index: u32, now: u64) {
        if self.stopped || self.waits_for_welcome(index) {
            return;
        }
        let Some(socket) = self.sockets.at(index) else { return };
        let (Some(fd), Some(connect)) = (socket.raw_fd(), &socket.connect) else { return };
        // After an attempt that failed, Linux says so once more, where nothing has asked connect(2) how it ended.
        let again = |errno| if errno == Errno::CONNABORTED { socket::connect(fd, &connect.to) } else { Err(errno) };
        match socket::connect(fd, &connect.to).or_else(again) {
            Ok(()) => self.connected(index, 0, now),
            Err(Errno::INPROGRESS | Errno::INTR) => socket.state = State::Connecting,
            Err(Errno::AGAIN) => self.postpone(index),
            Err(errno) => self.connected(index, errno.raw_os_error(), now),
        }
    }

    /// An event came while it was connecting.
    pub(super) fn finish_connect(&mut self, index: u32, now: u64) {
        if self.stopped {
            return;
        }
        let Some(fd) = self.sockets.at(index).and_then(|socket| socket.raw_fd()) else { return };
        match socket::take_error(fd) {
            Ok(0) if socket::getpeername(fd).is_ok() => self.connected(index, 0, now),
            Ok(0) => {}
            Ok(errno) => self.connected(index, errno, now),
            Err(errno) => self.connected(index, errno.raw_os_error(), now),
        }
    }

    fn connected(&mut self, index: u32, errno: i32, now: u64) {
        if errno == 0 && self.waits_for_go(index) {
            injection_point!("connecting net: connected");
            if let Some(socket) = self.sockets.at(index) {
                socket.state = State::Connecting;
            }
            return;
        }
        if errno == 0 && self.meet(index, now) {
            return self.pace.gave(now);
        }
        if errno != 0 {
            self.forget_announced(index);
        }
        let Some(socket) = self.sockets.at(index) else { return };
        let connect = socket.connect.take();
        socket.state = if errno == 0 { State::Connected } else { State::Unconnected };
        if errno == 0 {
            if let Some(fd) = socket.raw_fd().filter(|_| is_inet(socket.domain)) {
                let _ = socket::no_delay(fd);
            }
            socket.readable = true;
            socket.writable = true;
            let lacked = socket.meeting.kept == Some(Kept::Descriptors);
            self.set_error(index, 0);
            self.counters.connected.add(1);
            self.counters.kept_by_descriptors.add(lacked.into());
            self.heat(index);
        }
        self.end_connect(index, connect, errno);
        self.pace.gave(now);
    }

    /// A connection stays with Linux, for this reason, which is counted; where no descriptor was left, once it is there: until
    /// then it is tried in other ways.
    pub(super) fn keep(&mut self, index: u32, kept: Kept) {
        if let Some(counter) = kept.counter(&self.counters).filter(|_| kept != Kept::Descriptors) {
            counter.add(1);
        }
        self.note_kept(index, kept);
    }

    /// The same of one that nothing counts, or that may still be upgraded in another way.
    pub(super) fn note_kept(&mut self, index: u32, kept: Kept) {
        if let Some(socket) = self.sockets.at(index) {
            socket.meeting.kept = Some(kept);
        }
    }
}
