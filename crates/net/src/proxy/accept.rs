//! accept: connections for the calls that wait for them, and for event sets.
//!
//! ```text
//!   call ──> calls of the listening socket ──┐
//!                                            ├── a connection and room for it ──> reply to the first call, or entry NEW of the set
//!   Linux, or kept for kernels (loopback.rs) ┘
//!
//!   its time limit has passed, and there is still no connection ──> EAGAIN
//! ```
//!
//! The proxy alone decides which of the two a call gets, so that no connection goes to a call that has ended.

use spinio_ring::layout::Descriptor;
use spinio_ring::mailbox::{DONTWAIT, Request};
use spinio_sys::Errno;
use spinio_sys::linux::channel::{Until, wait_socket};
use spinio_sys::linux::socket::{self, AF_UNIX, is_inet};

use super::Proxy;
use super::caller::{Caller, failed};
use super::closed::is_no_room;
use super::control::with_address;
use super::sockets::{Accept, DGRAM, State};
use super::time_limits::deadline_of;
use crate::meet::Held;

impl Proxy {
    pub(super) fn accept(&mut self, request: &Request, caller: Caller, now: u64) {
        let descriptor = Descriptor::of(request.descriptor);
        let refused = match self.sockets.get(descriptor).filter(|socket| socket.closing.is_none()) {
            None => Some(Errno::BADF),
            Some(socket) if socket.kind == DGRAM => Some(Errno::OPNOTSUPP),
            Some(socket) if socket.state != State::Listening => Some(Errno::INVAL),
            Some(socket) => {
                let deadline = deadline_of(request.address.words()[0]);
                socket.accepts.push_back(Accept { caller, deadline });
                self.accept_all(descriptor.index, now);
                if request.flags & DONTWAIT == 0 {
                    return self.limit(descriptor.index, deadline);
                }
                // Calls are served in order: if any still waits, this one does.
                let left = self.sockets.get(descriptor).and_then(|socket| socket.accepts.pop_back());
                if let Some(Accept { caller, .. }) = left {
                    self.answer(caller, failed(Errno::AGAIN));
                }
                return;
            }
        };
        if let Some(errno) = refused {
            self.answer(caller, failed(errno));
        }
    }

    /// Whether a connection waits at a listening socket.
    fn has_connection(&mut self, index: u32) -> bool {
        let Some(socket) = self.sockets.at(index) else { return false };
        let is_held = socket.meeting.held.iter().any(|held| held.undecided.is_none());
        let waits = |fd| wait_socket(fd, Until::Readable, Some(0)).unwrap_or(false);
        is_held || socket.raw_fd().is_some_and(waits)
    }

    /// Gives connections to the calls that wait for them, and else to the event set.
    pub(super) fn accept_all(&mut self, index: u32, now: u64) {
        let listener = self.sockets.descriptor(index);
        loop {
            let Some(socket) = self.sockets.at(index) else { return };
            let (calls, watch) = (!socket.accepts.is_empty(), socket.watch);
            let (domain, kind, adopted) = (socket.domain, socket.kind, socket.adopted);
            if !calls && watch.set == 0 {
                return;
            }
            // The set first: no closed socket is given up for a connection that is not accepted.
            let is_wanted = calls || self.has_room_in_set(watch.set);
            let has_room = |proxy: &mut Proxy| {
                proxy.sockets.has_room(kind) || proxy.has_connection(index) && proxy.make_room(kind, now)
            };
            if !is_wanted || !has_room(self) {
                // Connections wait in the Linux kernel's backlog until a descriptor is closed, or events are taken.
                return self.postpone(index);
            }
            match self.with_room(now, |proxy| proxy.next_connection(index)) {
                Ok(Held { fd, peer, place, kept, .. }) => {
                    let fd = fd.into_fd();
                    if is_inet(domain) {
                        let _ = socket::no_delay(fd);
                    }
                    let done = self.add(fd, domain, kind, State::Connected);
                    if let (Ok(descriptor), Some(place)) = (done, place) {
                        self.join(descriptor, place);
                    } else if let Some(place) = place {
                        self.leave(place);
                    }
                    if let Ok(descriptor) = done {
                        self.counters.accepted.add(1);
                        if let Some(socket) = self.sockets.get(descriptor) {
                            socket.meeting.kept = kept;
                            // Descriptors may have come before.
                            socket.takes_rights |= adopted && domain == AF_UNIX;
                        }
                        if !calls {
                            self.tell_new(watch, listener, descriptor);
                        }
                        self.heat(descriptor.index);
                    }
                    let reply = match done {
                        Ok(descriptor) => with_address(descriptor.number(), &peer),
                        Err(errno) => failed(errno),
                    };
                    let call = self.sockets.at(index).and_then(|socket| socket.accepts.pop_front());
                    if let Some(Accept { caller, .. }) = call {
                        self.answer(caller, reply);
                    }
                    self.pace.gave(now);
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return,
                // No descriptors or no memory: the connection is still there, and so is the event.
                Err(errno) if is_no_room(errno) => return self.postpone(index),
                Err(errno) => return self.cancel_calls(index, errno),
            }
        }
    }
}
