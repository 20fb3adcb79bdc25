//! Sockets that kernels have closed: which of them linger, and which are given up, for another one or at the end of the net.

use spinio_sys::Errno;
use spinio_sys::linux::socket;

use super::Proxy;
use super::sockets::{DGRAM, STREAM, Socket, State};

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

    fn is_late(&mut self, now: u64, limit: u64) -> bool {
        self.closing.is_some_and(|linger| linger.is_late(now, limit))
    }
}

/// Whether Linux has no descriptor or no memory left.
pub(super) fn is_no_room(errno: Errno) -> bool {
    matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
}

impl Proxy {
    /// Whether there is room for one more socket. Closed ones are given up for it.
    pub(super) fn make_room(&mut self, kind: u16, now: u64) -> bool {
        while !self.sockets.has_room(kind) {
            if self.give_up_one(now).is_none() {
                return false;
            }
        }
        true
    }

    /// Makes a call of Linux that takes a descriptor or memory, for which closed sockets are given up: one whose descriptor another
    /// thread has to close makes room for a later call only.
    pub(super) fn with_room<T>(
        &mut self,
        now: u64,
        mut call: impl FnMut(&mut Proxy) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        loop {
            match call(self) {
                Err(errno) if is_no_room(errno) && self.give_up_one(now) == Some(true) => {}
                done => return done,
            }
        }
    }

    /// Gives up a closed socket whose peer takes nothing or too little, if there is one; whether its descriptor is free.
    fn give_up_one(&mut self, now: u64) -> Option<bool> {
        let (sockets, limit) = (&mut self.sockets, self.linger.open);
        self.closing.retain(|index| sockets.at(index).is_some_and(|socket| socket.closing.is_some()));
        let mut is_given_up = |index: &u32, is: fn(&mut Socket, u64, u64) -> bool| {
            sockets.at(*index).is_some_and(|socket| is(socket, now, limit))
        };
        let stalled = self.closing.iter().find(|index| is_given_up(index, Socket::has_stalled));
        // The first one is the one that was closed first.
        let index = stalled.or_else(|| self.closing.iter().find(|index| is_given_up(index, Socket::is_late)))?;
        Some(self.abandon(index))
    }

    /// Whether a closed socket is given up even if no other one needs its rings.
    pub(super) fn has_lingered(&mut self, index: u32, now: u64) -> bool {
        let (limits, ending) = (self.linger, self.ending.is_some());
        self.sockets.at(index).is_some_and(|socket| {
            let limit = if ending { limits.ending } else { limits.open };
            (ending || socket.kind == DGRAM) && socket.has_stalled(now, limit)
        })
    }

    /// At the end of the net: closed sockets whose peers take nothing are given up, and those that have ended are forgotten.
    pub(super) fn end_closed(&mut self, now: u64) {
        for index in self.closing.take_all() {
            if self.has_lingered(index, now) {
                self.abandon(index);
            } else if self.sockets.at(index).is_some_and(|socket| socket.closing.is_some()) {
                self.closing.push(index);
            }
        }
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
        if is_cut {
            self.abandon(index);
        } else {
            self.remove(index);
        }
    }
}
