//! Lines: 128 aligned bytes for each socket and direction, the only memory that a waiting kernel reads.
//!
//! ```text
//!   device line, written by the proxy    w0: received position 48 | 0 12 | flags 4
//!                                        w1: sent position 48 | errno 16
//!   host line, written by kernels        w0: consumed position 48 | epoch 16
//!                                        w1: for peers that poll
//! ```

use crate::position::{BITS, Position};

/// The peer sends no more bytes.
pub const EOF: u64 = 1 << 60;
/// Receiving fails with the errno of the second word, after the bytes that arrived.
pub const ERR: u64 = 1 << 61;
/// The ring was full: the proxy waits for room, and wants a credit doorbell.
pub const FULL: u64 = 1 << 62;

/// The errno in the line of a socket whose connection is being made, without a call that waits for it: no bytes and no room yet.
pub const CONNECTING: u16 = 0xfffe;

/// The first word of a device line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Bytes up to here are in the receive ring.
    pub position: Position,
    /// [`EOF`], [`ERR`], [`FULL`]
    pub flags: u64,
}

impl Received {
    /// As a word.
    pub const fn word(self) -> u64 {
        self.position.bits() | self.flags
    }

    /// Of a word.
    pub const fn of(word: u64) -> Received {
        Received { position: Position::of(word), flags: word & (EOF | ERR | FULL) }
    }
}

/// The second word of a device line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Bytes up to here have left the send ring.
    pub position: Position,
    /// Sending fails with it; 0: none.
    pub errno: u16,
}

impl Sent {
    /// As a word.
    pub const fn word(self) -> u64 {
        self.position.bits() | (self.errno as u64) << BITS
    }

    /// Of a word.
    pub const fn of(word: u64) -> Sent {
        Sent { position: Position::of(word), errno: (word >> BITS) as u16 }
    }
}

/// The first word of a host line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Consumed {
    /// The kernel has taken the bytes up to here out of the receive ring.
    pub position: Position,
    /// Epoch of the socket: a word of an earlier one does not count.
    pub epoch: u32,
}

impl Consumed {
    /// As a word.
    pub const fn word(self) -> u64 {
        self.position.bits() | (self.epoch as u64) << BITS
    }

    /// Of a word.
    pub const fn of(word: u64) -> Consumed {
        Consumed { position: Position::of(word), epoch: (word >> BITS) as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_all_fields() {
        let position = Position::of(0xfedc_ba98_7654);
        let received = Received { position, flags: EOF | FULL };
        assert_eq!(Received::of(received.word()), received);
        let sent = Sent { position, errno: 104 };
        assert_eq!(Sent::of(sent.word()), sent);
        let consumed = Consumed { position, epoch: 0x7fff };
        assert_eq!(Consumed::of(consumed.word()), consumed);
    }
}
