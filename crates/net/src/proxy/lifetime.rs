//! How sockets begin and end.
//!
//! ```text
//!   add ── table, event queue, the kernels' view
//!   close ── sends what is left ──> all is sent ──> remove: the descriptor is closed, the place is free
//!                                   └ bytes were not read, or it is given up (linger.rs) ──> abandon: reset, then removed
//!   violation ── reset; the kernel that broke the rules learns it from its line
//! ```

use std::sync::Arc;

use spinio_ring::Word;
use spinio_ring::layout::{Descriptor, kind_of, record, ring_place};
use spinio_sys::Errno;
use spinio_sys::linux::Fd;
use spinio_sys::linux::rights;
use spinio_sys::linux::socket::{self, AF_UNIX, EPOLLET, EPOLLIN, EPOLLOUT, EPOLLRDHUP, is_inet};

use super::Proxy;
use super::channels::close_listener;
use super::linger::Linger;
use super::sockets::{DGRAM, STREAM, State};
use crate::socket_fd::SocketFd;

impl Proxy {
    /// Puts a socket into the table, the event queue and the kernels' view.
    pub(super) fn add(&mut self, fd: Fd, domain: u16, kind: u16, state: State) -> Result<Descriptor, Errno> {
        let errno = if state == State::Connected { 0 } else { Errno::NOTCONN.raw_os_error() as u16 };
        let Some(descriptor) = self.sockets.add(SocketFd(fd), domain, kind, state) else {
            return Err(Errno::NOBUFS);
        };
        let index = descriptor.index;
        if let Err(errno) = self.watch_socket(fd, descriptor) {
            self.sockets.remove(index);
            return Err(errno);
        }
        if domain == AF_UNIX
            && let Some(socket) = self.sockets.at(index)
        {
            socket.takes_rights = rights::pass_rights(fd, false).is_err();
        }
        self.set_error(index, errno);
        let log2 = self.sockets.ring_bytes_of(kind).trailing_zeros();
        let rings = self.sockets.at(index).and_then(|socket| socket.rings);
        let words = self.memory.record(index);
        if let Some(rings) = rings {
            words[record::RECEIVE].store_release(ring_place(rings.receive, log2));
            words[record::SEND].store_release(ring_place(rings.send, log2));
        }
        // A datagram needs no connection, but to send without an address.
        let connected = kind != DGRAM && state == State::Connected;
        words[record::FIRST].store_release(self.first.bits() | kind_of(kind, domain, connected));
        words[record::STATE].store_release(u64::from(descriptor.epoch) << 2 | 2);
        self.counters.open.add(1);
        Ok(descriptor)
    }

    /// Puts a descriptor into the event queue.
    pub(super) fn watch_socket(&self, fd: Fd, descriptor: Descriptor) -> Result<(), Errno> {
        let events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
        let data = u64::from(descriptor.index) | u64::from(descriptor.epoch) << 32;
        socket::epoll_add(self.epoll.0, fd, events, data)
    }

    /// The kernel has closed the descriptor. What it has sent is still sent.
    pub(super) fn close(&mut self, descriptor: Descriptor, now: u64) {
        let index = descriptor.index;
        if self.sockets.get(descriptor).is_none_or(|socket| socket.closing.is_some()) {
            return;
        }
        self.cancel_calls(index, Errno::BADF);
        let Some(socket) = self.sockets.get(descriptor) else { return };
        socket.closing = Some(Linger::new(now, socket.left()));
        let _ = socket.credit(&self.memory, index);
        if is_inet(socket.domain) && socket.kind == STREAM && socket.receive_ring.unread() > 0 {
            // As Linux does: the peer of a socket that is closed with unread bytes learns that they were not read, after
            // what was sent.
            socket.resets = true;
            self.send_all(index);
        }
        let Some(socket) = self.sockets.get(descriptor) else { return };
        // The address of a datagram socket is free at once, as for a program.
        if socket.state == State::Connected && (socket.kind == STREAM || socket.send_ring.pending() > 0) {
            self.closing.push(index);
            self.heat(index);
        } else {
            self.end(index);
        }
    }

    /// A closed socket has sent everything, or cannot.
    pub(super) fn finish_closing(&mut self, index: u32) {
        let Some(socket) = self.sockets.at(index) else { return };
        if socket.closing.is_none() {
            return;
        }
        if socket.send_ring.pending() == 0 && socket.transfers.is_empty() {
            self.end(index);
        } else if socket.kind != STREAM {
            // No event tells when the peer of datagrams has room. Streams go on with EPOLLOUT, or when the worker of a file has ended.
            self.postpone(index);
        }
    }

    /// Frees a closed socket that has sent all.
    fn end(&mut self, index: u32) {
        if self.sockets.at(index).is_some_and(|socket| socket.resets) {
            self.abandon(index);
        } else {
            self.remove(index);
        }
    }

    /// Resets the connection; whether its descriptor is free.
    pub(super) fn abandon(&mut self, index: u32) -> bool {
        let Some(socket) = self.sockets.at(index) else { return true };
        if let Some(fd) = socket.raw_fd() {
            let _ = socket::reset_on_close(fd);
        }
        let waits = socket.is_foreign() && !is_inet(socket.domain);
        if !waits {
            self.close_now(index);
        }
        self.remove(index);
        !waits
    }

    /// Closes the descriptor of a socket that is about to be removed, and whose close does not wait: others have one too, or the
    /// connection is reset, and nothing waits in its queue.
    pub(super) fn close_now(&mut self, index: u32) {
        let Some(fd) = self.sockets.at(index).and_then(|socket| socket.fd.take()) else { return };
        let _ = socket::epoll_remove(self.epoll.0, fd.0);
    }

    /// Removes a socket: its descriptor is closed, and its place is free.
    pub(super) fn remove(&mut self, index: u32) {
        self.memory.record(index)[record::STATE].store_release(u64::from(self.sockets.descriptor(index).epoch) << 2);
        if let Some(fd) = self.sockets.at(index).and_then(|socket| socket.raw_fd()) {
            let _ = socket::epoll_remove(self.epoll.0, fd);
        }
        let Some(mut socket) = self.sockets.remove(index) else { return };
        let is_foreign = socket.is_foreign();
        self.close_fd(socket.fd.take(), is_foreign, socket.state == State::Listening && !socket.adopted);
        self.counters.open.set(self.counters.open.get() - 1);
        self.end_transfers(std::mem::take(&mut socket.transfers));
        if let Some(end) = socket.meeting.end {
            self.leave(end.place);
        }
        if let Some(number) = socket.meeting.announced {
            self.drop_announced(number);
        }
        if socket.state == State::Listening {
            self.shared.close_door(index, &self.closer);
        }
        for held in socket.meeting.held {
            self.refuse(&held);
        }
    }

    /// Closes a descriptor: if it may wait, on another thread.
    fn close_fd(&self, fd: Option<Arc<SocketFd>>, is_foreign: bool, listens: bool) {
        match fd {
            Some(fd) if is_foreign && listens => {
                // Its name is to be free at once.
                if let Ok(fd) = Arc::try_unwrap(fd) {
                    close_listener(fd, &self.closer);
                }
            }
            Some(fd) if is_foreign => self.closer.close(fd),
            _ => {}
        }
    }

    /// A kernel broke the rules: its connection is reset, and no other.
    pub(super) fn violation(&mut self, index: u32) {
        self.counters.violations.add(1);
        self.cancel_calls(index, Errno::CONNRESET);
        if let Some(socket) = self.sockets.at(index) {
            let (fd, is_foreign) = (socket.fd.take(), socket.is_foreign());
            if let Some(fd) = &fd {
                let _ = socket::reset_on_close(fd.0);
            }
            socket.state = State::Failed;
            let closing = socket.closing.is_some();
            self.close_fd(fd, is_foreign, false);
            if closing {
                return self.remove(index);
            }
        }
        self.set_error(index, Errno::CONNRESET.raw_os_error() as u16);
        self.notify(index);
    }
}
