//! Short messages between two ends in device memory: their bytes travel in words beside the tail.
//!
//! ```text
//!   writer   words, tail with MESSAGE: no order        ring bytes        tail, with release order
//!   reader   sees the first tail: the words, each once its tag is right     sees the second one: the ring, as ever
//!
//!   word     7 bytes | tag 8: 0x80 and the low 7 bits of the position after the message
//! ```
//!
//! A store with release order waits until all earlier ones have arrived, which takes a GPU 0.5 to 1.2 us. The words need none: each says
//! by itself that it is there. So a message goes both ways, and a reader that waits takes what comes first.
//!
//! **Which bytes.** The message ends at the tail's position, and its last byte is the last one of the last word: so nothing has to say how
//! long it is, and a reader that has taken a part finds the rest. A tail with [`crate::peer::MESSAGE`] says that all bytes that the
//! reader has not taken are in the words; one without, that all are in the ring.
//!
//! **Why a word cannot be of another message.** The writer writes all words each time, and only after the reader has said that it has taken all
//! that was sent before; the reader looks at all of them each time. So it has seen each word of the message before, and a word is of
//! that one or of this one. Tags repeat after 128 bytes. Two messages in a row end at most 84 bytes apart, but with bytes between them that
//! went through the ring alone it may be 128: so the writer remembers where the last one ended, and what would have its tag goes through the
//! ring alone too ([`has_other_tag`]).
//!
//! **Earlier uses of the memory.** The writer clears the words before it publishes the first bytes of a connection, which go through the
//! ring. A reader that has taken those sees no older word any more, and no message is sent before it has said so.
//!
//! The kernels' side is device/include/spinio/net/message.h.
//!
//! Known flaw: a one-way stream of short messages, with no answers, learns too late what the reader has taken, and uses the ring alone.

use crate::{Position, Word};

/// Words of a message.
pub const WORDS: usize = 12;
/// Bytes in each.
pub const WORD_BYTES: usize = 7;
/// The longest message.
pub const BYTES: usize = WORDS * WORD_BYTES;

const TAG_SHIFT: u32 = 56;

/// The tag of the words of a message that ends here, in the place where it is in a word.
pub const fn tag(end: Position) -> u64 {
    (0x80 | (end.bits() & 0x7f)) << TAG_SHIFT
}

/// Whether bytes that end at `end` may go as a message after one that ended at `last`: else the words of that one would pass for theirs.
pub const fn has_other_tag(end: Position, last: Position) -> bool {
    tag(end) != tag(last)
}

/// Before the first bytes of a connection are published.
pub fn clear<W: Word>(words: &[W]) {
    for word in words {
        word.store_relaxed(0);
    }
}

/// Writes the words of a message that ends at `end`. No more than fit into them ([`BYTES`], if they are [`WORDS`]), after the reader has taken all that was sent before.
pub fn write<W: Word>(words: &[W], bytes: &[u8], end: Position) {
    let before = words.len() * WORD_BYTES - bytes.len();
    for (i, word) in words.iter().enumerate() {
        let at = |k: usize| (i * WORD_BYTES + k).checked_sub(before).map_or(0, |at| u64::from(bytes[at]) << (8 * k));
        word.store_relaxed((0..WORD_BYTES).map(at).fold(tag(end), |word, byte| word | byte));
    }
}

/// The last bytes of the message that ends at `end`, as many as `out` has; false if not all words are there yet.
pub fn read<W: Word>(words: &[W], out: &mut [u8], end: Position) -> bool {
    let Some(before) = (words.len() * WORD_BYTES).checked_sub(out.len()) else { return false };
    for (i, word) in words.iter().enumerate() {
        let word = word.load_relaxed();
        if (word ^ tag(end)) >> TAG_SHIFT != 0 {
            return false;
        }
        for k in 0..WORD_BYTES {
            if let Some(byte) = (i * WORD_BYTES + k).checked_sub(before) {
                out[byte] = (word >> (8 * k)) as u8;
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    fn words() -> [AtomicU64; WORDS] {
        std::array::from_fn(|_| AtomicU64::new(0))
    }

    #[test]
    fn messages_of_all_lengths_come_back_whole_and_in_part() {
        let words = words();
        let mut end = Position::of(u64::MAX - 300);
        for length in 1..=BYTES {
            let bytes: Vec<u8> = (0..length).map(|i| (i * 3 + length) as u8).collect();
            end = end.after(length as u64);
            assert!(!read(&words, &mut vec![0; length], end), "the words are of the message before");
            write(&words, &bytes, end);
            for taken in 0..length {
                let mut rest = vec![0; length - taken];
                assert!(read(&words, &mut rest, end));
                assert_eq!(rest, bytes[taken..]);
            }
        }
        assert!(!read(&words, &mut [0; BYTES + 1], end), "longer than any message");
    }

    #[test]
    fn words_of_last_message_pass_only_for_one_that_may_not_follow() {
        let words = words();
        let last = Position::of(u64::MAX - 100);
        write(&words, &[1; BYTES], last);
        let mut refused = 0;
        for apart in 1..=1000 {
            let end = last.after(apart);
            assert_eq!(read(&words, &mut [0], end), !has_other_tag(end, last), "{apart} bytes later");
            refused += u64::from(!has_other_tag(end, last));
        }
        assert_eq!(refused, 1000 / 128);
    }

    #[test]
    fn each_word_says_whether_it_is_of_the_message() {
        let words = words();
        let end = Position::of(1000);
        write(&words, &[1; BYTES], end);
        for word in &words {
            let right = word.load_relaxed();
            // Of a message before or after this one.
            for apart in (1..=BYTES as u64).flat_map(|apart| [apart, (1 << 48) - apart]) {
                word.store_relaxed(right & ((1 << TAG_SHIFT) - 1) | tag(end.after(apart)));
                assert!(!read(&words, &mut [0], end));
            }
            word.store_relaxed(0);
            assert!(!read(&words, &mut [0], end));
            word.store_relaxed(right);
        }
        assert!(read(&words, &mut [0], end));
        clear(&words);
        assert!(!read(&words, &mut [0], end));
    }
}
