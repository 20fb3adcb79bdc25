//! Granules: connections over memory that two processes map, one granule a connection: between a kernel and a CPU program,
//! or between kernels of two nets.
//!
//! ```text
//!   granule    0  end 0, which connects: tail, consumed                 128  end 1, which accepts: tail, consumed, watch
//!           4096  ring 0: from end 0 to end 1                             .  ring 1: from end 1 to end 0
//!
//!   program, or proxy of a kernel that connects              proxy of the net that accepts
//!     ANNOUNCE: the name of my socket ────────────────────> remembers it
//!     connects, as any program            <──── WELCOME ──── (or REFUSED)
//!                                         <───── OFFER ───── has accepted a connection from this name: the granule's descriptor
//!     has mapped it: AGREED ──────────────────────────────>
//!     bytes go through the granule        <────── GO ─────── tells kernels so
//! ```
//!
//! The ends are those of [`crate::peer`]: words, generations and rules are the same.
//!
//! **Device memory.** Two nets may agree on rings in device memory, each in that of its reader: after OFFER, and before AGREED, each
//! sends MEMORY with a descriptor of its own, which the other one maps; GO says whether both have. Kernels then store bytes and words
//! there, and the words also here, for the proxies. The generation is higher than in all earlier uses of the memory.
//!
//! **Who owns the bytes.** The packet GO decides: it is in the channel, or it is not. A program that waits no longer ends the
//! channel, after which the proxy cannot send GO, and then looks whether it is there already. A proxy that waits no longer closes
//! the channel without it. Before GO neither side moves a byte.
//!
//! **Events.** With a program, the watch of end 1 belongs to two CPUs: the proxy stores there what the kernel's event set wants and then looks at
//! the words ([`watch_for`]); the program stores its words, then looks at the watch ([`wants`]), and rings by a packet. A fence on
//! both sides lies between store and look, so that one of them sees what the other has stored. A program waits by looking.
//! Between two nets nothing is rung: each proxy looks at the words of its armed sockets. A doorbell and a packet of the other one
//! would not be sooner, since a GPU cannot wake the proxy that would send it.
//!
//! **Trust.** Each side loads a word once and checks its position against the ring. What is wrong ends this connection only.

#[cfg(loom)]
use loom::sync::atomic::{Ordering::SeqCst, fence};
#[cfg(not(loom))]
use std::sync::atomic::{Ordering::SeqCst, fence};

use crate::event::{ENDED, ERR, HUP, IN, OUT, when};
use crate::layout::{END_BYTES, PAGE};
use crate::message;
use crate::peer::{CLOSED, CONSUMED, Mark, RESET, SHUT, TAIL, WATCH};
use crate::{Position, Word};

/// Words of an end.
pub const END_WORDS: usize = END_BYTES / 8;
/// Words of both ends, from the beginning of a granule.
pub const WORDS: usize = 2 * END_WORDS;
/// A packet.
pub const PACKET_BYTES: usize = 24;

/// Bytes of a granule.
pub const fn bytes(ring_bytes: u64) -> u64 {
    PAGE as u64 + 2 * ring_bytes
}

/// The first word of an end.
pub const fn end(second: bool) -> usize {
    if second { END_WORDS } else { 0 }
}

/// Where a ring begins: that to the kernel, or that to the program.
pub const fn ring(ring_bytes: u64, to_program: bool) -> u64 {
    PAGE as u64 + if to_program { ring_bytes } else { 0 }
}

/// What the ends say.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// What the other end has sent and received.
    pub theirs: [Mark; 2],
    /// What this end has sent and received.
    pub mine: [Mark; 2],
}

impl Look {
    /// As end 1 sees them, if `second`, or end 0. Loads each word once.
    pub fn at<W: Word>(words: &[W], second: bool, generation: u16, first: Position) -> Look {
        let mark = |at: usize| Mark::now(words[at].load_acquire(), generation, first);
        let (mine, theirs) = (end(second), end(!second));
        // What this end has received, before what the other one has sent.
        let mine = [mark(mine + TAIL), mark(mine + CONSUMED)];
        Look { theirs: [mark(theirs + TAIL), mark(theirs + CONSUMED)], mine }
    }

    /// The events that are true for the socket of this end.
    pub fn level(&self, ring_bytes: u64, is_unix: bool) -> u16 {
        let ([sent, taken], [tail, consumed]) = (self.theirs, self.mine);
        let has = |mark: Mark, flag: u64| mark.flags & flag != 0;
        let no_reader = has(taken, CLOSED) || is_unix && has(taken, SHUT);
        let ended = has(sent, CLOSED);
        // A message may be taken before its writer's proxy sees its end.
        let early = (1..=message::BYTES as u64).contains(&consumed.position.since(sent.position));
        let room = ring_bytes.saturating_sub(tail.position.since(taken.position));
        when(sent.position != consumed.position && !early, IN)
            | when(room >= ring_bytes / 2 || no_reader || has(tail, CLOSED), OUT)
            | when(ended || has(consumed, SHUT), ENDED)
            | when(has(sent, RESET), ERR | HUP)
            | when(ended && (no_reader || has(tail, CLOSED)), HUP)
    }

    /// The words of the other end, if its process has ended without a word: as Linux closes its sockets. None if it has closed
    /// it before.
    pub fn last_words(&self, generation: u16) -> Option<[u64; 2]> {
        let [sent, taken] = self.theirs;
        if taken.flags & CLOSED != 0 {
            return None;
        }
        let unread = self.mine[0].position != taken.position;
        let reset = if unread { RESET } else { 0 };
        let word = |mark: Mark, flags| Mark { position: mark.position, generation, flags }.word();
        Some([word(sent, CLOSED | reset), word(taken, CLOSED)])
    }
}

/// The proxy wants to be told of these events; 0: of none. It looks at the words after this.
pub fn watch_for<W: Word>(words: &[W], events: u16) {
    words[END_WORDS + WATCH].store_release(events.into());
    fence(SeqCst);
}

/// Whether the proxy wants to be told, on the program's side after it has stored its words.
pub fn wants<W: Word>(words: &[W], events: u16) -> bool {
    fence(SeqCst);
    words[END_WORDS + WATCH].load_acquire() & u64::from(events) != 0
}

/// What a packet says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Packet {
    /// A program, or a kernel, is about to connect a socket, whose descriptor comes too.
    Announce {
        /// It is one of a kernel.
        kernel: bool,
        /// The kernel can store into device memory of others: the last use of the memory that it offers for this.
        peer: Option<u16>,
    },
    /// The proxy will offer memory.
    Welcome,
    /// It will not.
    Refused(Refusal),
    /// With the granule's descriptor.
    Offer {
        /// The logarithm of the size of each ring.
        size_log2: u8,
        /// Of this use of the granule.
        generation: u16,
        /// At which both directions begin.
        first: Position,
        /// MEMORY follows: the logarithm of the size of each ring there, not 0.
        peer: Option<u8>,
    },
    /// With the descriptor of device memory, into which the other end's kernel stores.
    Memory {
        /// Of the net.
        net: u64,
        /// Of this memory in it.
        number: u16,
    },
    /// The program has mapped it.
    Agreed,
    /// Bytes go through it from now on.
    Go {
        /// Through the device memory that both have offered.
        peer: bool,
    },
    /// The kernel's socket has an event.
    Ring,
}

/// Why a proxy offers no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// All granules are in use.
    Memory = 1,
    /// As many connections as the backlog allows wait.
    Backlog,
    /// A setting.
    Setting,
    /// No descriptor was left.
    Descriptors,
}

const MAGIC: u64 = u64::from_le_bytes(*b"spnshr\x01\0");

impl Packet {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, words): (u64, [u64; 2]) = match self {
            Packet::Announce { kernel, peer } => {
                (1, [u64::from(*kernel), peer.map_or(0, |last| 1 << 16 | u64::from(last))])
            }
            Packet::Welcome => (2, [0; 2]),
            Packet::Refused(refusal) => (3, [*refusal as u64, 0]),
            Packet::Offer { size_log2, generation, first, peer } => {
                let what = u64::from(*size_log2) | u64::from(*generation) << 8 | u64::from(peer.unwrap_or(0)) << 32;
                (4, [what, first.bits()])
            }
            Packet::Agreed => (5, [0; 2]),
            Packet::Go { peer } => (6, [u64::from(*peer), 0]),
            Packet::Ring => (7, [0; 2]),
            Packet::Memory { net, number } => (8, [*net, u64::from(*number)]),
        };
        let mut out = (MAGIC | kind << 56).to_le_bytes().to_vec();
        out.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        out
    }

    /// Of bytes; None if they are none.
    pub fn decode(bytes: &[u8]) -> Option<Packet> {
        let words = bytes.first_chunk::<24>()?;
        let word = |at: usize| words[at * 8..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        if word(0) & (u64::MAX >> 8) != MAGIC {
            return None;
        }
        Some(match word(0) >> 56 {
            1 => Packet::Announce { kernel: word(1) == 1, peer: (word(2) >> 16 == 1).then_some(word(2) as u16) },
            2 => Packet::Welcome,
            3 => Packet::Refused(match word(1) {
                1 => Refusal::Memory,
                2 => Refusal::Backlog,
                4 => Refusal::Descriptors,
                _ => Refusal::Setting,
            }),
            4 => Packet::Offer {
                size_log2: word(1) as u8,
                generation: (word(1) >> 8) as u16,
                first: Position::of(word(2)),
                peer: Some((word(1) >> 32) as u8).filter(|log2| *log2 != 0),
            },
            5 => Packet::Agreed,
            6 => Packet::Go { peer: word(1) == 1 },
            7 => Packet::Ring,
            8 => Packet::Memory { net: word(1), number: word(2) as u16 },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn packets_survive_and_garbage_is_none() {
        let offer = |peer| Packet::Offer { size_log2: 12, generation: 0x1fff, first: Position::of(u64::MAX), peer };
        let refused = [Refusal::Memory, Refusal::Backlog, Refusal::Setting, Refusal::Descriptors].map(Packet::Refused);
        let announced = [None, Some(0), Some(0x1fff)].map(|peer| {
            let kernel = peer.is_some();
            [Packet::Announce { kernel, peer }, offer(kernel.then_some(20)), Packet::Go { peer: kernel }]
        });
        let memory = Packet::Memory { net: u64::MAX, number: 15 };
        let others = [Packet::Welcome, Packet::Agreed, Packet::Ring, memory];
        for packet in others.into_iter().chain(announced.into_iter().flatten()).chain(refused) {
            let bytes = packet.encode();
            assert!(bytes.len() <= PACKET_BYTES);
            assert_eq!(Packet::decode(&bytes), Some(packet));
            assert_eq!(Packet::decode(&bytes[..23]), None);
            let mut wrong = bytes;
            wrong[2] ^= 1;
            assert_eq!(Packet::decode(&wrong), None);
        }
        let mut unknown = Packet::Ring.encode();
        unknown[7] = 99;
        assert_eq!((Packet::decode(&unknown), Packet::decode(&[])), (None, None));
    }

    #[test]
    fn events_and_last_words_are_those_of_a_socket() {
        let first = Position::of(0);
        let words: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let set = |at: usize, position: u64, flags| {
            words[at].store_release(Mark { position: Position::of(position), generation: 3, flags }.word());
        };
        let level = |is_unix| Look::at(&words, true, 3, first).level(8, is_unix);
        assert_eq!(level(false), OUT);
        set(TAIL, 5, 0);
        assert_eq!(level(false), IN | OUT);
        set(END_WORDS + CONSUMED, 5, 0);
        set(END_WORDS + TAIL, 5, 0);
        assert_eq!(level(false), 0, "no byte, and less than half of the room");
        set(TAIL, 3, 0);
        assert_eq!(level(false) & IN, 0, "a message was taken before its writer's proxy knows of it");
        set(TAIL, 5, 0);
        let of_end_0 = Look::at(&words, false, 3, first);
        assert_eq!((of_end_0.level(8, false), of_end_0.level(16, false)), (IN | OUT, IN | OUT));
        assert_eq!(of_end_0.last_words(3).unwrap().map(|word| Mark::of(word).flags), [CLOSED, CLOSED]);
        let dead = Look::at(&words, true, 3, first).last_words(3).unwrap().map(Mark::of);
        assert_eq!(dead.map(|mark| (mark.position.bits(), mark.flags)), [(5, CLOSED | RESET), (0, CLOSED)]);
        watch_for(&words, IN);
        assert!(wants(&words, ENDED) && !wants(&words, OUT));
        set(TAIL, 5, CLOSED);
        set(CONSUMED, 5, CLOSED);
        assert_eq!(level(false), ENDED | OUT | HUP);
        assert!(Look::at(&words, true, 3, first).last_words(3).is_none());
    }
}
