//! How long a closed socket is kept whose peer has not taken all that kernels have sent.
//!
//! ```text
//!   the peer takes bytes ──> it stays                       nothing for the limit, and
//!                                ├ another socket needs its place, or its datagrams hold an address ──> given up
//!                                └ the net is closed ──────────────────────────────────────────────────> given up
//!                            for ten limits, if another socket needs its place ────────────────────────> given up
//! ```
//!
//! Its place are its rings, and where Linux has none left its descriptor. A peer that takes a byte now and then would else keep them as
//! long as it likes.
//!
//! A connection of TCP that is given up is reset: its peer learns that bytes are missing, where an end of the stream would say that all
//! have come.
//!
//! Known flaw: Linux has no such sign for UNIX sockets. Their peers see the end of the stream, or ECONNRESET if they had sent something that
//! was not received.

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
    closed: u64,
    since: u64,
    left: u64,
}

/// So many limits a peer may take for all, if another socket needs the place.
const LIMITS_FOR_ALL: u64 = 10;

impl Linger {
    pub(super) const fn new(now: u64, left: u64) -> Linger {
        Linger { closed: now, since: now, left }
    }

    /// Whether the peer has taken nothing for so long. What is left is asked for only once the limit has passed, so it is noticed up to
    /// one limit late.
    pub(super) fn is_over(&mut self, now: u64, limit: u64, left: impl FnOnce() -> u64) -> bool {
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

    /// Whether the peer has had the time for all that a slow one gets.
    pub(super) const fn is_late(&self, now: u64, limit: u64) -> bool {
        now.saturating_sub(self.closed) > limit.saturating_mul(LIMITS_FOR_ALL)
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

    #[test]
    fn peer_that_takes_a_byte_now_and_then_is_late_after_ten_limits() {
        let mut linger = Linger::new(100, 50);
        for now in (111..=200).step_by(11) {
            assert!(!linger.is_over(now, 10, || 50 - now / 11) && !linger.is_late(now, 10));
        }
        assert!(!linger.is_late(200, 10) && linger.is_late(201, 10));
        assert!(!linger.is_late(u64::MAX, u64::MAX), "no limit is passed");
    }
}
