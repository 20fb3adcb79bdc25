//! poll of several sockets and descriptors.
//!
//! ```text
//!   sockets that share memory: words of the granule ── events ──> some are ready? return
//!          ^                                                        │ none
//!          └── ppoll of the others, and of each anchor, for 20 us, 40 us ... 1 ms <──┘
//! ```
//!
//! As in other calls that wait, a GPU cannot wake the thread, so an event is up to 1 ms late. Without a socket that shares memory it is
//! one ppoll. A handler of a signal ends the call with EINTR, as it ends poll(2): signals that come between two ppolls are delivered in
//! the next one.

use spinio_ring::event::{ENDED, ERR, FAILED, HUP, IN, OUT, RDHUP, when};
use spinio_ring::granule::Look;
use spinio_ring::peer::{CLOSED, RESET, SHUT};
use spinio_sys::Errno;
use spinio_sys::linux::channel::{self, PollFd};
use spinio_sys::linux::{self, Fd, SignalGuard};

use super::anchor::Anchor;
use super::{FIRST_SLEEP_NS, LONGEST_SLEEP_NS, SPIN_NS, Shared, Socket};

/// What is looked at.
#[derive(Clone, Copy)]
pub enum PollSource<'a> {
    /// A socket.
    Socket(&'a Socket),
    /// A descriptor of the program; less than 0: none.
    Fd(Fd),
}

/// One of those that [`poll`] looks at. Events are those of poll(2).
#[derive(Clone, Copy)]
pub struct Poll<'a> {
    /// What is looked at.
    pub source: PollSource<'a>,
    /// Of a socket: POLLIN, POLLOUT, POLLRDHUP.
    pub events: u16,
    /// Those that are true now.
    pub ready: u16,
}

impl Poll<'_> {
    fn shared(&self) -> Option<(&Socket, &Shared)> {
        match self.source {
            PollSource::Socket(socket) => socket.shared.as_ref().map(|shared| (socket, shared)),
            PollSource::Fd(_) => None,
        }
    }

    /// The event of an error that Linux has told a call which could not return it.
    fn kept(&self) -> u16 {
        match self.source {
            PollSource::Socket(socket) if socket.kept.is_there() => ERR,
            _ => 0,
        }
    }

    fn descriptor(&self) -> PollFd {
        let events = if self.shared().is_some() { IN | RDHUP } else { self.events };
        let fd = match self.source {
            PollSource::Socket(socket) => socket.anchor.0,
            PollSource::Fd(fd) => fd,
        };
        PollFd { fd, events, ready: 0 }
    }
}

/// Waits until some are ready, at most so many nanoseconds: how many are. EINTR: a handler of a signal has run, and none is.
pub fn poll(polls: &mut [Poll<'_>], timeout: Option<u64>) -> Result<usize, Errno> {
    let (mut shares, mut spins) = (false, false);
    for poll in polls.iter() {
        if let Some((socket, shared)) = poll.shared() {
            socket.check()?;
            (shares, spins) = (true, shared.may_spin);
        }
    }
    let begun = linux::monotonic_ns();
    let deadline = timeout.map(|timeout| begun.saturating_add(timeout));
    let mut descriptors: Vec<PollFd> = polls.iter().map(Poll::descriptor).collect();
    let mut anchors = vec![Anchor::Connected; polls.len()];
    let (mut wait, mut sleep) = (Some(0), FIRST_SLEEP_NS);
    let mut signals: Option<SignalGuard> = None;
    loop {
        let polled = match &signals {
            None => channel::poll(&mut descriptors, wait),
            Some(blocked) => channel::poll_with_signals(&mut descriptors, wait, blocked),
        };
        let interrupted = polled == Err(Errno::INTR);
        if interrupted {
            descriptors.iter_mut().for_each(|descriptor| descriptor.ready = 0);
        } else {
            polled?;
        }
        for ((poll, descriptor), anchor) in polls.iter_mut().zip(&mut descriptors).zip(&mut anchors) {
            poll.ready = match poll.shared() {
                None => descriptor.ready | poll.kept(),
                Some((socket, shared)) => {
                    if descriptor.ready != 0 {
                        *anchor = shared.failure.look(descriptor.fd);
                    }
                    if !matches!(anchor, Anchor::Connected) {
                        // It would end each wait.
                        descriptor.fd = -1;
                    }
                    events(socket, shared, *anchor) & (poll.events | ERR | HUP)
                }
            };
        }
        let ready = polls.iter().filter(|poll| poll.ready != 0).count();
        let now = linux::monotonic_ns();
        let left = deadline.map(|deadline| deadline.saturating_sub(now));
        if ready > 0 {
            return Ok(ready);
        }
        if interrupted {
            return Err(Errno::INTR);
        }
        if left == Some(0) {
            return Ok(0);
        }
        if shares {
            // Between two ppolls a handler would run unseen.
            signals.get_or_insert_with(SignalGuard::block_asynchronous);
        }
        wait = if !shares {
            left
        } else if spins && now - begun < SPIN_NS {
            Some(0)
        } else {
            let wait = sleep.min(left.unwrap_or(u64::MAX));
            sleep = (sleep * 2).min(LONGEST_SLEEP_NS);
            Some(wait)
        };
    }
}

/// The events that are true for a socket that shares memory, as for the connection of Linux.
fn events(socket: &Socket, shared: &Shared, anchor: Anchor) -> u16 {
    let memory = &shared.memory;
    let look = Look::at(memory.words(), false, memory.generation, memory.first);
    let ([sent, taken], [tail, consumed]) = (look.theirs, look.mine);
    let level = look.level(memory.size(), socket.is_unix) & !HUP;
    if sent.flags & CLOSED == 0 {
        match anchor {
            Anchor::Connected => {}
            Anchor::Ended => return ENDED | OUT | HUP,
            Anchor::Failed(_) => return FAILED,
        }
    }
    let receives_no_more = sent.flags & CLOSED != 0 || consumed.flags & SHUT != 0;
    let sends_no_more = tail.flags & CLOSED != 0 || socket.is_unix && taken.flags & (CLOSED | SHUT) != 0;
    let ended = receives_no_more && sends_no_more || sent.flags & RESET != 0;
    level | when(ended, HUP)
}
