//! Calls that end after the time limit of their socket: accept and connect.
//!
//! Those that send and receive look at the time themselves, on the device. These are ended here alone, so that no connection goes to
//! a call that has returned.

use std::collections::VecDeque;

use spinio_sys::{Errno, linux};

use super::Proxy;
use super::caller::failed;
use super::sockets::Accept;

/// When a call with a time limit ends; 0: it has none, `u64::MAX`. From the time of the clock, not of the turn: a turn has begun before the
/// request came, so that the call would end before its limit.
pub(super) fn deadline_of(limit: u64) -> u64 {
    if limit == 0 { u64::MAX } else { linux::monotonic_ns().saturating_add(limit) }
}

impl Proxy {
    /// A call on this socket ends at the deadline; `u64::MAX`: it has none.
    pub(super) fn limit(&mut self, index: u32, deadline: u64) {
        if deadline == u64::MAX {
            return;
        }
        self.next_deadline = self.next_deadline.min(deadline);
        self.limited.push(index);
    }

    /// Ends the calls whose time limit has passed; whether there were any.
    pub(super) fn end_late_calls(&mut self, now: u64) -> bool {
        if now < self.next_deadline {
            return false;
        }
        let mut ended = false;
        self.next_deadline = u64::MAX;
        for index in self.limited.take_all() {
            let is_late = |accept: &Accept| accept.deadline <= now;
            if self.sockets.at(index).is_some_and(|socket| socket.accepts.iter().any(is_late)) {
                // As in Linux, a connection that is there comes before the limit.
                self.accept_all(index, now);
            }
            let Some(socket) = self.sockets.at(index) else { continue };
            let (late, waiting): (VecDeque<_>, _) = socket.accepts.drain(..).partition(is_late);
            socket.accepts = waiting;
            let next = socket.accepts.iter().map(|accept| accept.deadline).min().unwrap_or(u64::MAX);
            let connect = socket.connect.as_ref().filter(|connect| connect.caller.is_some());
            let connect = connect.map_or(u64::MAX, |connect| connect.deadline);
            self.limit(index, next);
            ended |= !late.is_empty();
            for Accept { caller, .. } in late {
                self.answer(caller, failed(Errno::AGAIN));
            }
            if connect <= now {
                self.end_late_connect(index);
                ended = true;
            } else {
                self.limit(index, connect);
            }
        }
        ended
    }
}
