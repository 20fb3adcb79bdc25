//! The word by which a group that waits for long says so: for people, not for the protocol.
//!
//! ```text
//!   waits 1 | thread 10 | block 21 | position 32        0: none waits, or not for long
//! ```
//!
//! A socket has one for each direction, of which the group that has the direction's lock is the only writer. The position is
//! the low half of what it has received, or sent: once the socket is past it, the group does not wait any more. A group takes
//! the word back only if it gives up.

use crate::Position;

const WAITS: u64 = 1 << 63;

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
        WAITS | (self.thread as u64 & 0x3ff) << 53 | (self.block as u64 & 0x1f_ffff) << 32 | at.bits() & 0xffff_ffff
    }

    /// Of a word, if the socket is still at its position.
    pub fn of(word: u64, at: Position) -> Option<Waiter> {
        let waits = word & WAITS != 0 && word as u32 == at.bits() as u32;
        waits.then_some(Waiter { block: (word >> 32) as u32 & 0x1f_ffff, thread: (word >> 53) as u32 & 0x3ff })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_ends_where_the_socket_goes_on() {
        let (waiter, at) = (Waiter { block: 0x1f_ffff, thread: 1023 }, Position::of(u64::MAX));
        assert_eq!(Waiter::of(waiter.word(at), at), Some(waiter));
        assert_eq!(Waiter::of(waiter.word(at), at.after(1)), None);
        assert_eq!(Waiter::of(0, Position::of(0)), None);
        let first = Waiter { block: 0, thread: 0 };
        assert_eq!(Waiter::of(first.word(Position::of(7)), Position::of(7)), Some(first));
    }
}
