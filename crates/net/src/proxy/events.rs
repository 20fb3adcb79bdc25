//! Event sets: which sockets of a set are ready, told to kernels through the set's ring.
//!
//! ```text
//!   rearm ──> armed ──┐
//!   bytes, errors ────┴─ notify: level due? ── room ──> entry in the ring, not armed
//!                                           └─ full: held, tried again in each pass
//!   listening socket in a set ── room ──> accept: the connection is in the set too, not armed; entry NEW
//!                              └ full: connections wait in the backlog
//! ```
//!
//! Sets live as long as their net, so that no kernel can wait for one that is gone.
//!
//! Known flaw: kernels do not ring when they have made room in a full event ring. The proxy finds it at its next pass.

use spinio_ring::event::{ENDED, ERR, Entry, FAILED, HUP, IN, NEW, OUT, RDHUP, Watch, when};
use spinio_ring::layout::{Descriptor, event_words, record};
use spinio_ring::line;
use spinio_ring::mailbox::Request;
use spinio_ring::peer::{MOVED, Notice};
use spinio_ring::{Position, Word};
use spinio_sys::Errno;

use super::Proxy;
use super::sockets::{Socket, State};

impl Proxy {
    /// A new set: its number.
    pub(super) fn make_set(&mut self) -> Result<i32, Errno> {
        let set = self.sets.make().ok_or(Errno::NOBUFS)?;
        self.memory.event_words(u32::from(set) - 1)[event_words::MADE].store_release(1);
        Ok(set.into())
    }

    /// Puts a socket into a set and arms it; without events, takes it out of its set.
    pub(super) fn watch(&mut self, request: &Request) -> Result<(), Errno> {
        let (set, events) = ((request.argument >> 16) as u16, request.argument as u16);
        let descriptor = Descriptor::of(request.descriptor);
        let socket = self.sockets.get(descriptor).filter(|socket| socket.closing.is_none()).ok_or(Errno::BADF)?;
        if self.sets.get(set).is_none() {
            return Err(Errno::BADF);
        }
        if events & !(IN | OUT | ERR | HUP | RDHUP) != 0 {
            return Err(Errno::INVAL);
        }
        // An event of the set before has no reader any more.
        if let Some(before) = self.sets.get(socket.watch.set) {
            before.held.retain(|held| held != descriptor.index);
        }
        socket.watch = if events == 0 { Watch::default() } else { Watch::new(set, events) };
        let events = u64::from(socket.watch.events);
        let is_end = socket.meeting.end.as_ref().is_some_and(|end| !end.place.shared);
        if is_end {
            self.memory.record(descriptor.index)[record::SEND].store_release(events);
        }
        match socket.meeting.end.as_mut().filter(|_| is_end) {
            // What is true of an end of a connection inside the net the kernel that has called says next.
            Some(end) => {
                end.told.forget();
                socket.tells_connected = false;
                socket.watch.arm();
            }
            None => self.rearm(descriptor, Position::of(0)),
        }
        Ok(())
    }

    /// A kernel has looked at an end for the first time. Not armed: an event was made before, and a group has the socket.
    pub(super) fn look_if_armed(&mut self, descriptor: Descriptor, position: Position) {
        if self.sockets.get(descriptor).is_some_and(|socket| socket.watch.is_armed()) {
            self.rearm(descriptor, position);
        }
    }

    /// The next event of a socket is wanted. Of an end of a connection inside the net, the position is a notice.
    pub(super) fn rearm(&mut self, descriptor: Descriptor, position: Position) {
        if let Some(socket) = self.sockets.get(descriptor) {
            socket.watch.arm();
            if let Some(end) = socket.meeting.end.as_mut().filter(|end| !end.place.shared) {
                end.told.hear(Notice::of(position));
                socket.tells_connected = false;
            }
            self.heat(descriptor.index);
        }
    }

    /// Tells that a socket is ready, if it is and if a group waits for that.
    pub(super) fn notify(&mut self, index: u32) {
        let descriptor = self.sockets.descriptor(index);
        let Some(socket) = self.sockets.at(index) else { return };
        // A word that is wrong is found where the ring is used.
        let _ = socket.credit(&self.memory, index);
        let mut due = socket.watch.due(level(socket));
        if socket.tells_connected && socket.watch.is_armed() {
            due = Some(due.unwrap_or(0) | OUT);
        }
        let granule = self.granule_of(index);
        if let Some(place) = granule.filter(|_| due.is_none()) {
            due = self.events_of_granule(index, place);
        }
        let Some(socket) = self.sockets.at(index) else { return };
        let (Some(events), None) = (due, socket.closing) else { return };
        let Some(set) = self.sets.get(socket.watch.set) else { return };
        let entry = Entry { socket: descriptor, events, listener: None };
        if set.push(&self.memory, entry) {
            socket.watch.told();
            socket.transfers.found_no_room &= events & OUT == 0;
            socket.tells_connected = false;
            if let Some(end) = &mut socket.meeting.end {
                end.told.forget();
            }
            if let Some(place) = granule {
                self.told_of_granule(place);
            }
        } else {
            set.held.push(index);
        }
    }

    /// Tries again what had no room.
    pub(super) fn notify_held(&mut self) {
        for number in 1..=self.sets.count() {
            while let Some(index) = self.sets.get(number).and_then(|set| set.next_held(&self.memory)) {
                self.notify(index);
            }
        }
    }

    /// Whether a set's ring has room; false if there is no such set.
    pub(super) fn has_room_in_set(&mut self, set: u16) -> bool {
        self.sets.get(set).is_some_and(|set| set.has_room(&self.memory))
    }

    /// Tells of a new connection, for which there is room, and puts it into the set.
    pub(super) fn tell_new(&mut self, watch: Watch, listener: Descriptor, socket: Descriptor) {
        let Some(connection) = self.sockets.get(socket) else { return };
        connection.watch = Watch::new(watch.set, watch.events);
        if connection.meeting.end.is_some() {
            self.memory.record(socket.index)[record::SEND].store_release(watch.events.into());
        }
        if let Some(set) = self.sets.get(watch.set) {
            set.push(&self.memory, Entry { socket, events: NEW, listener: Some(listener) });
        }
    }
}

/// After a sendfile that did not wait, room in the ring alone is none for the next one.
fn has_room(socket: &Socket) -> bool {
    socket.send_ring.has_half_free() && socket.transfers.has_room(socket.writable)
}

/// What is true of a socket now.
fn level(socket: &Socket) -> u16 {
    let ended = socket.flags & line::EOF != 0;
    if let (State::Upgraded, Some(end)) = (socket.state, &socket.meeting.end) {
        return end.told.level() | when(ended, ENDED) | when(socket.errno != MOVED, FAILED);
    }
    if socket.connect_error != 0 {
        return FAILED;
    }
    if !matches!(socket.state, State::Connected | State::Failed) {
        return 0;
    }
    when(socket.receive_ring.unread() > 0, IN)
        | when(socket.errno != 0 || has_room(socket), OUT)
        | when(ended, ENDED)
        | when(ended && socket.errno != 0, HUP)
        | when(socket.flags & line::ERR != 0, FAILED)
}
