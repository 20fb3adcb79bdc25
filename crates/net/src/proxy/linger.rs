//! How long a closed socket is kept whose peer has not taken all that kernels have sent.
//!
//! ```text
//!   the peer takes bytes ──> it stays                       nothing for the limit, and
//!                                ├ another socket needs its rings, or its datagrams hold an address ──> given up
//!                                └ the net is closed ──────────────────────────────────────────────────> given up
//! ```
//!
//! A connection of TCP that is given up is reset: its peer learns that bytes are missing, where an end of the stream would say that all
//! have come.
//!
//! Known flaw: Linux has no such sign for UNIX sockets. Their peers see the end of the stream, or ECONNRESET if they had sent something that
//! was not received.

use spinio_sys::linux::socket;

use super::Proxy;
use super::sockets::{DGRAM, STREAM, Socket, State};

/// Limits since the peer took the last bytes, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LingerLimits {
    /// Before a closed socket is given up for another one; also the longest end of a net.
    pub(crate) open: u64,
    /// Once the net is closed.
    pub(crate) ending: u64,
}

/// What was left for the peer of a closed socket when it was last looked at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linger {
    since: u64,
    left: u64,
}

impl Linger {
    pub(super) const fn new(now: u64, left: u64) -> Linger {
        Linger { since: now, left }
    }

    /// Whether the peer has taken nothing for so long. What is left is asked for only once the limit has passed, so it is noticed up to
    /// one limit late.
    fn is_over(&mut self, now: u64, limit: u64, left: impl FnOnce() -> u64) -> bool {
        if now.saturating_sub(self.since) <= limit {
            return false;
        }
        let left = left();
        let moved = std::mem::replace(&mut self.left, left) != left;
        if moved {
            self.since = now;
        }
        !moved
    }
}

impl Socket {
    /// Bytes that its peer has not taken: in its ring, and in the Linux kernel.
    pub(super) fn left(&self) -> u64 {
        let in_linux = self.raw_fd().and_then(|fd| socket::unsent(fd).ok());
        self.send_ring.pending() + u64::from(in_linux.unwrap_or(0))
    }

    fn has_stalled(&mut self, now: u64, limit: u64) -> bool {
        let Some(mut linger) = self.closing else { return false };
        let over = linger.is_over(now, limit, || self.left());
        self.closing = Some(linger);
        over
    }
}

impl Proxy {
    /// Whether there is room for one more socket. Closed ones whose peers have taken nothing for long are given up for it.
    pub(super) fn make_room(&mut self, kind: u16, now: u64) -> bool {
        while !self.sockets.has_room(kind) {
            let (sockets, limit) = (&mut self.sockets, self.linger.open);
            self.closing.retain(|index| sockets.at(index).is_some_and(|socket| socket.closing.is_some()));
            let stalled = |index: &u32| sockets.at(*index).is_some_and(|socket| socket.has_stalled(now, limit));
            let Some(index) = self.closing.iter().find(stalled) else { return false };
            self.abandon(index);
        }
        true
    }

    /// Whether a closed socket is given up even if no other one needs its rings.
    pub(super) fn has_lingered(&mut self, index: u32, now: u64) -> bool {
        let (limits, ending) = (self.linger, self.ending.is_some());
        self.sockets.at(index).is_some_and(|socket| {
            let limit = if ending { limits.ending } else { limits.open };
            (ending || socket.kind == DGRAM) && socket.has_stalled(now, limit)
        })
    }

    /// The net is closed: all its sockets are, and the proxy ends once what they have is sent.
    pub(super) fn close_all(&mut self, now: u64) {
        self.ending = Some(now);
        for index in self.sockets.indices() {
            let descriptor = self.sockets.descriptor(index);
            self.close(descriptor, now);
        }
    }

    /// Ends a socket whose proxy ends. The peer of one that kernels have not closed, or of which not all was sent, does not take that for
    /// the end of the stream.
    pub(super) fn end_with_proxy(&mut self, index: u32) {
        let is_cut = self.sockets.at(index).is_some_and(|socket| {
            let complete = socket.closing.is_some() && socket.send_ring.pending() == 0 && socket.transfers.is_empty();
            socket.kind == STREAM && socket.state == State::Connected && (socket.resets || !complete)
        });
        if is_cut { self.abandon(index) } else { self.remove(index) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_begins_again_whenever_the_peer_has_taken_something() {
        let mut linger = Linger::new(100, 50);
        assert!(!linger.is_over(110, 10, || unreachable!("the limit has not passed")));
        assert!(!linger.is_over(111, 10, || 49), "it has taken a byte");
        assert!(!linger.is_over(121, 10, || unreachable!("the limit begins with that byte")));
        assert!(linger.is_over(122, 10, || 49));
        assert!(
            !linger.is_over(1000, 10, || 10) && !linger.is_over(1010, 10, || 10) && linger.is_over(1011, 10, || 10)
        );
    }
}
