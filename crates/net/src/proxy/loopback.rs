//! Connections inside the net: what the proxy does for them. [`crate::meet`] says how they are found.
//!
//! ```text
//!   connect ── Linux has connected it ── leads to a listening socket of this net? ── accepts there, until its other end comes
//!   accept  ── of each connection: is a client that connects its other end?           (either of them may be first)
//!      both ends are here ── a pair of rings in device memory ── record, line: `moved` ──> kernels
//!   doorbells: ready (the other end has news for an event set), close ── host: the TCP or UNIX connection fails
//! ```
//!
//! The connection of Linux stays, as anchor: `ss` shows it, firewalls and `ss -K` reach it, and it is closed with its socket.
//! No byte goes through it. What waits in the backlog is accepted before a kernel does so, and kept in order.

use spinio_ring::layout::{Descriptor, record};
use spinio_ring::line::EOF;
use spinio_ring::peer::{MOVED, Notice, Place, Told};
use spinio_ring::{Position, Word};
use spinio_sys::Errno;
use spinio_sys::linux::channel::{Until, wait_socket};
use spinio_sys::linux::socket::{self, AF_UNIX, SocketAddress};
use spinio_sys::linux::socket_move::set_nonblocking;

use super::Proxy;
use super::sockets::{STREAM, State};
use crate::kept::Kept;
use crate::meet::{End, Held, are_ends, is_abstract, may_lead_to};

/// How long a client that Linux has connected waits for its other end.
const PATIENCE_NS: u64 = 5_000_000;

impl Proxy {
    /// A socket listens.
    pub(super) fn note_listener(&mut self, index: u32, backlog: u32) {
        let Some(socket) = self.sockets.at(index) else { return };
        let Some(name) = socket.raw_fd().and_then(|fd| socket::getsockname(fd).ok()) else { return };
        socket.meeting.name = name.bytes().to_vec();
        socket.meeting.backlog = backlog.clamp(1, 4096) as usize;
        if socket.kind == STREAM {
            self.listeners.push(index);
            self.open_door(index, name.bytes());
        }
    }

    /// The listening socket of this net to which a client may be connected.
    fn listener_for(&mut self, own: &[u8], peer: &[u8]) -> Option<u32> {
        let sockets = &mut self.sockets;
        self.listeners.retain(|index| sockets.at(index).is_some_and(|socket| socket.state == State::Listening));
        let leads = |index: &u32| sockets.at(*index).is_some_and(|s| may_lead_to(&s.meeting.name, own, peer));
        self.listeners.iter().find(leads)
    }

    /// Before a stream socket connects. One of UNIX gets a name if it has none and is about to meet a socket of this net.
    pub(super) fn note_client(&mut self, index: u32) {
        let Some(socket) = self.sockets.at(index).filter(|socket| socket.kind == STREAM) else { return };
        let (Some(fd), Some(connect)) = (socket.raw_fd(), socket.connect.as_ref()) else { return };
        let (domain, to) = (socket.domain, connect.to.clone());
        let has_name = || socket::getsockname(fd).map_or(true, |name| name.bytes().len() > 2);
        if domain == AF_UNIX && self.pairs.is_enabled() && self.listener_for(&[], &to).is_some() && !has_name() {
            let named = socket::bind(fd, &AF_UNIX.to_ne_bytes()).is_ok();
            if let Some(socket) = self.sockets.at(index) {
                socket.meeting.unnamed = named;
            }
        }
        self.clients.push(index);
    }

    /// Linux has connected a client: whether it has become an end of a connection inside the net, or may still become one.
    pub(super) fn meet(&mut self, index: u32, now: u64) -> bool {
        let Some(socket) = self.sockets.at(index).filter(|socket| socket.kind == STREAM) else { return false };
        let is_unix = socket.domain == AF_UNIX;
        let Some(fd) = socket.raw_fd() else { return false };
        let since = *socket.meeting.since.get_or_insert(now);
        let (Ok(own), Ok(peer)) = (socket::getsockname(fd), socket::getpeername(fd)) else { return false };
        let Some(listener) = self.listener_for(own.bytes(), peer.bytes()) else { return false };
        let kept = loop {
            if !self.pairs.is_enabled() {
                break Kept::Setting;
            }
            if is_unix && !is_abstract(own.bytes()) {
                break Kept::Name;
            }
            if !self.pairs.has_room() {
                break Kept::Memory;
            }
            let Some(at) = self.sockets.at(listener) else { break Kept::Name };
            if at.meeting.held.len() >= at.meeting.backlog {
                break Kept::Backlog;
            }
            match self.with_room(now, |proxy| proxy.accept_one(listener)) {
                Ok(held) => {
                    if let Some(at) = self.sockets.at(listener) {
                        at.meeting.held.push_back(held);
                    }
                    self.heat(listener);
                    if self.sockets.at(index).is_none_or(|socket| socket.state == State::Upgraded) {
                        return true;
                    }
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) if !is_unix && now.saturating_sub(since) < PATIENCE_NS => {
                    // The last step of a TCP connection is not there yet.
                    if let Some(socket) = self.sockets.at(index) {
                        socket.state = State::Connecting;
                    }
                    self.postpone(index);
                    return true;
                }
                Err(errno) => break Kept::of(errno, Kept::Name),
            }
        };
        self.keep(index, kept);
        // Its other end is accepted later, and has the same reason.
        if kept != Kept::Name
            && let Some(at) = self.sockets.at(listener)
        {
            at.meeting.kept_clients.push_back((own.bytes().to_vec(), kept));
            if at.meeting.kept_clients.len() > at.meeting.backlog {
                at.meeting.kept_clients.pop_front();
            }
        }
        false
    }

    /// Why a client of this net that waits at a listening socket stays with Linux.
    fn kept_client(&mut self, listener: u32, name: &[u8]) -> Option<Kept> {
        let clients = &mut self.sockets.at(listener)?.meeting.kept_clients;
        let at = clients.iter().position(|(of, _)| of == name)?;
        clients.remove(at).map(|(_, kept)| kept)
    }

    /// The next connection of a listening socket.
    pub(super) fn next_connection(&mut self, listener: u32) -> Result<Held, Errno> {
        loop {
            let socket = self.sockets.at(listener).ok_or(Errno::BADF)?;
            if let Some(at) = socket.meeting.held.iter().position(|held| held.undecided.is_none()) {
                return socket.meeting.held.remove(at).ok_or(Errno::AGAIN);
            }
            // One that is undecided holds up no other one.
            let held = self.accept_one(listener)?;
            if let Some(socket) = self.sockets.at(listener) {
                socket.meeting.held.push_back(held);
            }
        }
    }

    pub(super) fn accept_one(&mut self, listener: u32) -> Result<Held, Errno> {
        let socket = self.sockets.at(listener).ok_or(Errno::BADF)?;
        let fd = socket.raw_fd().ok_or(Errno::BADF)?;
        if socket.adopted {
            // Who shares the open socket can clear O_NONBLOCK: the proxy would wait in accept.
            if !wait_socket(fd, Until::Readable, Some(0))? {
                return Err(Errno::AGAIN);
            }
            set_nonblocking(fd, true)?;
        }
        let adopted = socket.adopted;
        let (fd, peer) = socket::accept(fd)?;
        let (fd, mut held_peer) = (self.closer.own(fd), peer);
        if adopted {
            // It has the options of its listening socket.
            let _ = socket::wait_for_nothing(fd.fd());
        }
        let place = self.other_end_of(fd.fd(), &peer).map(|(place, unnamed)| {
            if unnamed {
                held_peer = SocketAddress::unnamed_unix();
            }
            Place { second: true, ..place }
        });
        let offered = if place.is_none() { self.offer(listener, fd.fd(), &peer).map(Some) } else { Ok(None) };
        let (undecided, kept) = match offered {
            Ok(undecided) => (undecided, None),
            Err(_) if adopted => (None, Some(Kept::Adopted)),
            Err(_) if !self.pairs.is_enabled() => (None, Some(Kept::Setting)),
            Err(kept) => (None, Some(self.kept_client(listener, peer.bytes()).unwrap_or(kept))),
        };
        if undecided.is_some() && family_of(&peer) == AF_UNIX {
            held_peer = SocketAddress::unnamed_unix();
        }
        Ok(Held { fd, peer: held_peer, place, undecided, kept })
    }

    /// If the other end of an accepted connection is a client of this net, both become ends.
    fn other_end_of(&mut self, fd: i32, peer: &SocketAddress) -> Option<(Place, bool)> {
        let sockets = &mut self.sockets;
        self.clients.retain(|index| sockets.at(index).is_some_and(|socket| socket.connect.is_some()));
        if self.clients.is_empty() || !self.pairs.has_room() {
            return None;
        }
        let own = socket::getsockname(fd).ok()?;
        let index = self.clients.iter().find(|index| {
            let client = sockets.at(*index).and_then(|socket| socket.raw_fd());
            let names = client.map(|fd| (socket::getsockname(fd), socket::getpeername(fd)));
            matches!(names, Some((Ok(a), Ok(b))) if are_ends((a.bytes(), b.bytes()), (own.bytes(), peer.bytes())))
        })?;
        let client = self.sockets.descriptor(index);
        let place = self.pairs.take(client)?;
        let socket = self.sockets.at(index)?;
        let (connect, unnamed) = (socket.connect.take(), socket.meeting.unnamed);
        self.become_end(index, place);
        self.counters.connected.add(1);
        self.counters.upgraded.add(1);
        self.end_connect(index, connect, 0);
        Some((place, unnamed))
    }

    /// Whether a descriptor is that of an end whose other end is in this net.
    pub(super) fn is_end(&mut self, descriptor: u32) -> bool {
        let end = self.sockets.get(Descriptor::of(descriptor)).and_then(|socket| socket.meeting.end.as_ref());
        end.is_some_and(|end| !end.place.shared)
    }

    /// Whether the other end has a name that kernels do not see: over shared memory, the one that has connected.
    pub(super) fn peer_is_unnamed(&mut self, index: u32) -> bool {
        let place = self.sockets.at(index).and_then(|socket| socket.meeting.end.as_ref()).map(|end| end.place);
        if let Some(place) = place.filter(|place| place.shared) {
            return place.second;
        }
        let other = place.and_then(|place| self.pairs.other(place));
        other.and_then(|other| self.sockets.get(other)).is_some_and(|socket| socket.meeting.unnamed)
    }

    /// A socket becomes an end: its bytes do not come here any more.
    pub(super) fn become_end(&mut self, index: u32, place: Place) {
        let Some(socket) = self.sockets.at(index) else { return };
        socket.state = State::Upgraded;
        socket.meeting.end = Some(End { place, told: Told::default() });
        let events = u64::from(socket.watch.events);
        let granule = if place.shared { self.granule_address(place) } else { 0 };
        let words = self.memory.record(index);
        words[record::GRANULE].store_release(granule);
        words[record::SEND].store_release(events);
        words[record::RECEIVE].store_release(place.word());
        self.sockets.free_rings(index);
        // Kernels that look there find the record.
        self.set_error(index, MOVED);
    }

    /// A socket that was accepted is the other end.
    pub(super) fn join(&mut self, socket: Descriptor, place: Place) {
        if place.shared {
            self.join_granule(place, socket);
            return self.become_end(socket.index, place);
        }
        self.pairs.join(place, socket);
        self.become_end(socket.index, place);
        if self.pairs.other_has_left(place) {
            self.end_line(socket.index);
        }
    }

    /// Tells of the other end's close, where its kernel has not done so.
    pub(super) fn end_line(&mut self, index: u32) {
        let Some(socket) = self.sockets.at(index) else { return };
        socket.flags |= EOF;
        socket.store_received(&self.memory, index);
        self.notify(index);
    }

    /// An end is used no more.
    pub(super) fn leave(&mut self, place: Place) {
        if place.shared {
            return self.leave_granule(place);
        }
        let other = self.pairs.other(place);
        self.pairs.leave(place);
        if let Some(other) = other.filter(|other| self.sockets.get(*other).is_some()) {
            self.end_line(other.index);
        }
    }

    /// A connection is gone that no kernel has accepted.
    pub(super) fn refuse(&mut self, held: &Held) {
        let _ = socket::reset_on_close(held.fd.fd());
        if let Some(number) = held.undecided {
            self.forget_undecided(number);
        }
        if let Some(place) = held.place.filter(|place| place.shared) {
            self.leave_granule(place);
        } else if let Some(place) = held.place {
            let client = self.pairs.other(place);
            self.pairs.leave(place);
            if let Some(client) = client {
                self.fail_end(client, Errno::CONNRESET);
            }
        }
    }

    /// Looks whether Linux has ended the connection.
    pub(super) fn look_at_anchor(&mut self, index: u32) {
        let Some(socket) = self.sockets.at(index) else { return };
        if !std::mem::take(&mut socket.readable) {
            return;
        }
        let Some(fd) = socket.raw_fd() else { return };
        if let Some(place) = self.granule_of(index) {
            return self.look_at_other_process(index, fd, place);
        }
        let failed = socket::take_error(fd).unwrap_or(0);
        if failed == 0 {
            return;
        }
        let end = self.sockets.at(index).and_then(|socket| socket.meeting.end.as_ref());
        let place = end.map(|end| end.place);
        let this = self.sockets.descriptor(index);
        self.fail_end(this, Errno::from_raw_os_error(failed));
        if let Some(other) = place.and_then(|place| self.pairs.other(place)) {
            self.fail_end(other, Errno::CONNRESET);
        }
    }

    pub(super) fn fail_end(&mut self, descriptor: Descriptor, errno: Errno) {
        let Some(socket) = self.sockets.get(descriptor).filter(|socket| socket.state == State::Upgraded) else {
            return;
        };
        socket.state = State::Failed;
        self.set_error(descriptor.index, errno.raw_os_error() as u16);
        self.notify(descriptor.index);
    }

    /// A doorbell of an end: something has become true for the other one, which is armed.
    pub(super) fn ready(&mut self, descriptor: Descriptor, position: Position) {
        let end = self.sockets.get(descriptor).and_then(|socket| socket.meeting.end.as_ref());
        let other = end.map(|end| end.place).and_then(|place| self.pairs.other(place));
        if let Some(other) = other
            && let Some(end) = self.sockets.get(other).and_then(|socket| socket.meeting.end.as_mut())
            && end.told.hear(Notice::of(position))
        {
            self.heat(other.index);
        }
    }
}

fn family_of(address: &SocketAddress) -> u16 {
    address.bytes().first_chunk().map_or(0, |bytes| u16::from_ne_bytes(*bytes))
}
