//! The word by which a group that waits for long, or has a span of a ring, says so: for people, not for the protocol.
//!
//! ```text
//!   waits 1 | thread 10 | span 1 | block 20 | position 32        0: none waits, or not for long, and none has a span
//! ```
//!
//! A socket has one for each direction, of which the group that has the direction's lock is the only writer. The position is
//! the low half of what it has received, or sent: once the socket is past it, the group does not wait any more. A group takes
//! the word back only if it gives up. A word of a span is there until the span is given back.

use crate::Position;

const WAITS: u64 = 1 << 63;
const SPAN: u64 = 1 << 52;

/// A group, by its leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// `blockIdx.x`
    pub block: u32,
    /// Number in its block.
    pub thread: u32,
}

impl Waiter {
    /// As a word.
    pub const fn word(self, at: Position) -> u64 {
        WAITS | (self.thread as u64 & 0x3ff) << 53 | (self.block as u64 & 0xf_ffff) << 32 | at.bits() & 0xffff_ffff
    }

    /// The group that waits, if the socket is still at the word's position.
    pub fn of(word: u64, at: Position) -> Option<Waiter> {
        let waits = word & (WAITS | SPAN) == WAITS && word as u32 == at.bits() as u32;
        waits.then_some(Waiter::of_any(word))
    }

    /// The group that has a span.
    pub fn of_span(word: u64) -> Option<Waiter> {
        (word & (WAITS | SPAN) == WAITS | SPAN).then_some(Waiter::of_any(word))
    }

    const fn of_any(word: u64) -> Waiter {
        Waiter { block: (word >> 32) as u32 & 0xf_ffff, thread: (word >> 53) as u32 & 0x3ff }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_ends_where_the_socket_goes_on() {
        let (waiter, at) = (Waiter { block: 0xf_ffff, thread: 1023 }, Position::of(u64::MAX));
        assert_eq!(Waiter::of(waiter.word(at), at), Some(waiter));
        assert_eq!(Waiter::of(waiter.word(at), at.after(1)), None);
        assert_eq!(Waiter::of(0, Position::of(0)), None);
        assert_eq!((Waiter::of_span(waiter.word(at)), Waiter::of_span(waiter.word(at) | SPAN)), (None, Some(waiter)));
        assert_eq!(Waiter::of(waiter.word(at) | SPAN, at), None);
        let first = Waiter { block: 0, thread: 0 };
        assert_eq!(Waiter::of(first.word(Position::of(7)), Position::of(7)), Some(first));
    }
}
