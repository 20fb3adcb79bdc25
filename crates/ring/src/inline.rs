//! Small messages inside a line: its reader has them with the same read that tells it of them.
//!
//! ```text
//!   word of a message (w2-w15 of a line)    7 bytes | phase 8          all 14 words each time, also for one byte
//!   device line    w0: position, length, phase     the bytes are in the receive ring too, where a reader finds them in any case
//!   host line      doorbell: position, length, phase     the bytes are nowhere else: the proxy copies them into the send ring
//! ```
//!
//! A word is good if its phase is that of the message: so the words need no order among themselves. Phases are few and come
//! again. So a message may be overwritten only once its reader has no use for it: in a device line if the kernel has taken all
//! bytes before ([`crate::stream::Outgoing::has_unread`]), in a host line if the proxy has sent all. A phase belongs to a line,
//! not to a socket: a new socket of the same place goes on with it, or words of the old one would be good.

use crate::Word;

/// The most bytes of a message.
pub const BYTES: usize = 98;
/// Words of a message.
pub const WORDS: usize = 14;
/// Of these words, the first one in a line.
pub const FIRST: usize = 2;

const BYTES_A_WORD: usize = 7;
const PHASES: u8 = 31;

/// Which message of a line: 1 to 31, then 1 again; 0: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Phase(u8);

impl Phase {
    /// As a number, below 32.
    pub const fn number(self) -> u8 {
        self.0
    }

    /// Of the low 5 bits of a number.
    pub const fn of(number: u64) -> Phase {
        Phase((number & 0x1f) as u8)
    }

    /// Of the next message.
    #[must_use]
    pub const fn next(self) -> Phase {
        self.next_of(PHASES)
    }

    /// Of the next message, where there are so many phases: models have fewer.
    #[must_use]
    pub(crate) const fn next_of(self, phases: u8) -> Phase {
        Phase(self.0 % phases + 1)
    }
}

/// A message as a line and a doorbell announce it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inline {
    /// Bytes; 0: there is none.
    pub length: u8,
    /// Which message.
    pub phase: Phase,
}

/// Stores a message in its words, all of them. Bytes that do not fit are not stored.
pub fn store<W: Word>(words: &[W], bytes: impl Iterator<Item = u8>, phase: Phase) {
    let mut bytes = bytes.fuse();
    for word in words {
        let mut value = u64::from(phase.number()) << 56;
        for at in 0..BYTES_A_WORD {
            value |= u64::from(bytes.next().unwrap_or(0)) << (at * 8);
        }
        word.store_release(value);
    }
}

/// The bytes of a message, if all words of it are there; the rest is zero. Each word is loaded once.
pub fn load<W: Word>(words: &[W], message: Inline) -> Option<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    for (part, word) in bytes[..usize::from(message.length).min(BYTES)].chunks_mut(BYTES_A_WORD).zip(words) {
        let value = word.load_acquire();
        if value >> 56 != u64::from(message.phase.number()) {
            return None;
        }
        part.copy_from_slice(&value.to_le_bytes()[..part.len()]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn message_comes_out_as_it_went_in_and_not_before_its_last_word() {
        let words: [AtomicU64; WORDS] = Default::default();
        let mut phase = Phase::default();
        for length in 1..=BYTES {
            phase = phase.next();
            let message = Inline { length: length as u8, phase };
            let bytes: Vec<u8> = (0..length).map(|i| (i * 3 + length) as u8).collect();
            assert_eq!(load(&words, message), None, "nothing is stored yet");
            store(&words, bytes.iter().copied(), phase);
            assert_eq!(load(&words, message).unwrap()[..length], bytes[..]);
            let last = (length - 1) / BYTES_A_WORD;
            words[last].store_release(words[last].load_acquire() ^ 1 << 60);
            assert_eq!(load(&words, message), None, "a word is missing");
        }
    }

    #[test]
    fn each_message_replaces_the_words_of_all_earlier_ones() {
        let words: [AtomicU64; WORDS] = Default::default();
        let mut phase = Phase::default().next();
        let long = Inline { length: BYTES as u8, phase };
        store(&words, (0..BYTES).map(|i| i as u8), phase);
        for _ in 0..PHASES {
            phase = phase.next();
            store(&words, std::iter::once(1), phase);
        }
        // The phase is that of the long message again, of which no word may be left.
        assert_eq!(phase, long.phase);
        let found = load(&words, long).unwrap();
        assert_eq!((found[0], &found[1..]), (1, &[0; BYTES - 1][..]));
    }
}
