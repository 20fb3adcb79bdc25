//! Connections inside a net: both ends are sockets of kernels of one GPU. Bytes go through rings in device memory.
//!
//! ```text
//!   end 0 (128 bytes, device memory)                                          end 1
//!     tail      bytes that it has sent ─────────── ring 0 ──────────────────> reader: bytes up to here
//!     consumed  bytes that it has received <────── ring 1 ─────────────────── tail; its room: consumed + size
//!     watch     what it wants to be told; the other end takes it, and rings the proxy's doorbell
//!   word: position 48 | generation 13 | flags 3
//! ```
//!
//! The groups of an end write its words, one group at a time (a lock a direction), and those of the other end read them.
//!
//! **Generation.** The proxy decides which sockets become the ends of a pair, and cannot write device memory. So nothing is
//! cleared when a pair is used again: a word of another generation says that this end has written nothing yet.
//!
//! **Watch.** A socket in an event set is armed: it writes the watch, then [`WATCHED`] into the other end's words, and looks at them.
//! The other end exchanges its words for new ones: if the old one was watched, it takes the watch. Both are read-modify-writes of one
//! word, of which one comes later: either the arming socket sees the bytes, or the other end sees that it is watched, or both
//! do, which makes one event ([`Told`]). So a send to a socket that no event set has looks at no watch.
//!
//! Known flaw: generations come again after 8191 uses of a pair. A word could survive that long only if in all these uses no
//! kernel touched its end.

use crate::position::{BITS, MASK};
use crate::{Position, Word};

/// Words of an end.
pub const TAIL: usize = 0;
/// The position up to which it has received.
pub const CONSUMED: usize = 1;
/// What it wants to be told.
pub const WATCH: usize = 2;

/// The other end has armed its watch after this word was written.
pub const WATCHED: u64 = 1 << 61;
/// Of a tail: it sends no more. Of a consumed position: it is closed.
pub const CLOSED: u64 = 1 << 62;
/// Of a tail: it was closed with bytes that it had not received.
pub const RESET: u64 = 1 << 63;
/// Of a consumed position: it receives no more.
pub const SHUT: u64 = 1 << 63;
/// Of a tail that is not closed: what was sent last is a short message, whose bytes may not be in the ring yet.
pub const MESSAGE: u64 = 1 << 63;
/// What it had received as it sent its last bytes, if both ends are kernels; then the words of a message.
pub const RECEIVED: usize = 3;

/// The errno in the line of a socket whose bytes do not come through the proxy any more.
pub const MOVED: u16 = 0xffff;

const GENERATIONS: u64 = (1 << 13) - 1;
/// The last one, after which the first one comes again.
pub const LAST_GENERATION: u16 = GENERATIONS as u16;
const PAIR_SHIFT: u32 = 8;
const SIDE_SHIFT: u32 = 40;
const PLACE_BIT: u64 = 1 << 63;
/// Of a place: the rings are in device memory.
pub const REMOTE_BIT: u64 = 1 << 41;
/// Of a place: the pair is a granule.
pub const SHARED_BIT: u64 = 1 << 62;

/// The generation after this one; 0 is that of memory that was never used.
pub const fn next_generation(generation: u16) -> u16 {
    if generation as u64 >= GENERATIONS { 1 } else { generation + 1 }
}

/// Which end a socket is: the word of its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the pair.
    pub pair: u32,
    /// It is end 1.
    pub second: bool,
    /// Of this use of the pair.
    pub generation: u16,
    /// The logarithm of the size of each ring.
    pub size_log2: u32,
    /// The pair is in a granule, and this its number: [`crate::granule`].
    pub shared: bool,
    /// Its rings are in device memory, each in that of its reader.
    pub remote: Option<Remote>,
}

/// Device memory of a connection, as numbers of places in the net's window ([`crate::layout::PEER_BYTES`] each): a page with the
/// words of the other end, and the ring that it fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Where the other end stores.
    pub near: u16,
    /// Where this end stores.
    pub far: u16,
}

impl Place {
    /// As a word.
    pub const fn word(self) -> u64 {
        let (pair, remote) = match self.remote {
            Some(Remote { near, far }) => (near as u64 | (far as u64) << 16, REMOTE_BIT),
            None => (self.pair as u64, 0),
        };
        PLACE_BIT
            | remote
            | if self.shared { SHARED_BIT } else { 0 }
            | (self.generation as u64) << BITS
            | (self.second as u64) << SIDE_SHIFT
            | pair << PAIR_SHIFT
            | self.size_log2 as u64
    }
}

/// A word of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// A position.
    pub position: Position,
    /// The use of the pair in which it was written.
    pub generation: u16,
    /// [`CLOSED`], [`RESET`], [`SHUT`]
    pub flags: u64,
}

impl Mark {
    /// As a word.
    pub const fn word(self) -> u64 {
        self.position.bits() | (self.generation as u64) << BITS | self.flags
    }

    /// Of a word.
    pub const fn of(word: u64) -> Mark {
        let generation = (word >> BITS & GENERATIONS) as u16;
        Mark { position: Position::of(word), generation, flags: word & (CLOSED | RESET) }
    }

    /// Of a word in this use of the pair: one that was not written yet says that nothing has happened.
    pub fn now(word: u64, generation: u16, first: Position) -> Mark {
        let mark = Mark::of(word);
        if mark.generation == generation { mark } else { Mark { position: first, generation, flags: 0 } }
    }
}

/// The other end's words are impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation;

/// The reading side of a ring.
#[derive(Clone, Copy, Debug)]
pub struct Reader {
    size: u64,
    generation: u16,
    first: Position,
    consumed: Position,
}

impl Reader {
    /// Of a new connection.
    pub const fn new(size: u64, generation: u16, first: Position) -> Reader {
        Reader { size, generation, first, consumed: first }
    }

    /// Bytes that can be read: place, and contiguous length; and whether the writer has ended after what is there.
    pub fn look(&self, tail: u64) -> Result<(usize, usize, bool), Violation> {
        let mark = Mark::now(tail, self.generation, self.first);
        let there = mark.position.since(self.consumed);
        if there > self.size {
            return Err(Violation);
        }
        let (at, to_end) = self.consumed.place(self.size);
        Ok((at, to_end.min(there as usize), mark.flags & CLOSED != 0))
    }

    /// Bytes were read: the word for the writer.
    pub fn advance(&mut self, bytes: usize) -> u64 {
        self.consumed = self.consumed.after(bytes as u64);
        Mark { position: self.consumed, generation: self.generation, flags: 0 }.word()
    }
}

/// The writing side of a ring.
#[derive(Clone, Copy, Debug)]
pub struct Writer {
    size: u64,
    generation: u16,
    first: Position,
    tail: Position,
}

impl Writer {
    /// Of a new connection.
    pub const fn new(size: u64, generation: u16, first: Position) -> Writer {
        Writer { size, generation, first, tail: first }
    }

    /// Room: place, and contiguous length.
    pub fn room(&self, consumed: u64) -> Result<(usize, usize), Violation> {
        let used = self.tail.since(Mark::now(consumed, self.generation, self.first).position);
        if used > self.size {
            return Err(Violation);
        }
        let (at, to_end) = self.tail.place(self.size);
        Ok((at, to_end.min((self.size - used) as usize)))
    }

    /// Bytes were written: the word for the reader.
    pub fn advance(&mut self, bytes: usize) -> u64 {
        self.tail = self.tail.after(bytes as u64);
        self.end(0)
    }

    /// The word for the reader, after which nothing comes.
    pub fn end(&self, flags: u64) -> u64 {
        Mark { position: self.tail, generation: self.generation, flags }.word()
    }
}

/// What travels to the proxy: which arming, and which events are true.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Notice {
    /// Number of the arming, counted up at each.
    pub arming: u32,
    /// As in [`crate::event`].
    pub events: u16,
}

impl Notice {
    /// In the place of a position.
    pub const fn position(self) -> Position {
        Position::of((self.arming as u64) << 16 | self.events as u64)
    }

    /// Of a position.
    pub const fn of(position: Position) -> Notice {
        Notice { arming: (position.bits() >> 16) as u32, events: position.bits() as u16 }
    }

    const fn watch(self, generation: u16) -> u64 {
        (self.arming as u64) << 16 | self.events as u64 | (generation as u64) << BITS
    }
}

/// Begins to use the watch of an end, which wants nothing yet.
pub fn open<W: Word>(watch: &W, generation: u16) {
    loop {
        let old = watch.load_acquire();
        if (old >> BITS) as u16 == generation || watch.compare_exchange(old, (generation as u64) << BITS) {
            return;
        }
    }
}

/// Writes the watch of an end for `events`: the number of this arming. What is true already is looked at after this. None for
/// a socket that was closed meanwhile: the watch may be of a later one.
pub fn arm<W: Word>(watch: &W, generation: u16, events: u16) -> Option<u32> {
    loop {
        let old = watch.load_acquire();
        if (old >> BITS) as u16 != generation {
            return None;
        }
        let arming = Notice::of(Position::of(old)).arming.wrapping_add(1);
        if watch.compare_exchange(old, Notice { arming, events }.watch(generation)) {
            return Some(arming);
        }
    }
}

/// Writes into the other end's word that this end is armed: the word, as it was. After [`arm`].
pub fn watch_word<W: Word>(word: &W) -> u64 {
    loop {
        let old = word.load_acquire();
        if word.compare_exchange(old, old | WATCHED) {
            return old;
        }
    }
}

/// Publishes a word of an end: whether the other end was armed since the last one.
pub fn publish<W: Word>(at: &W, word: u64) -> bool {
    loop {
        let old = at.load_acquire();
        if at.compare_exchange(old, word) {
            return old & WATCHED != 0;
        }
    }
}

/// Takes the watch of the other end, after `events` have become true for it: the number of the arming, if it wants to be told.
pub fn take<W: Word>(watch: &W, generation: u16, events: u16) -> Option<u32> {
    loop {
        let old = watch.load_acquire();
        let wanted = Notice::of(Position::of(old));
        let told = (old >> BITS) as u16 == generation && wanted.events & events != 0;
        let new = if told { old & !0xffff } else { old };
        // Also where nothing changes, for an end that has only stored its words: it orders this look after them.
        if watch.compare_exchange(old, new) {
            return told.then_some(wanted.arming);
        }
    }
}

/// The proxy's side of a watch: what is true of a socket since it was last armed. Doorbells come in any order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    last: Notice,
}

impl Told {
    /// A doorbell has come, of the socket itself as it was armed or of its other end: whether it counts.
    pub fn hear(&mut self, notice: Notice) -> bool {
        let ahead = notice.arming.wrapping_sub(self.last.arming);
        if ahead == 0 {
            self.last.events |= notice.events;
        } else if ahead < 1 << 31 {
            self.last = notice;
        }
        ahead < 1 << 31
    }

    /// Events that are true.
    pub const fn level(&self) -> u16 {
        self.last.events
    }

    /// They were told: they count no more.
    pub const fn forget(&mut self) {
        self.last.events = 0;
    }
}

const _: () = assert!(MASK >> 16 == u32::MAX as u64);

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::event::{IN, OUT};

    #[test]
    fn words_of_another_generation_say_that_nothing_has_happened() {
        let first = Position::of(u64::MAX - 2);
        let mut writer = Writer::new(8, 7, first);
        let reader = Reader::new(8, 8, first);
        let word = writer.advance(5) | CLOSED;
        assert_eq!(Mark::of(word), Mark { position: first.after(5), generation: 7, flags: CLOSED });
        assert_eq!(reader.look(word), Ok((5, 0, false)));
        assert_eq!(Reader::new(8, 7, first).look(word), Ok((5, 3, true)));
        assert_eq!(writer.room(0), Ok((2, 3)), "memory that was never used");
    }

    #[test]
    fn impossible_positions_are_violations() {
        let mark = |bytes: u64| Mark { position: Position::of(bytes), generation: 1, flags: 0 }.word();
        let (reader, mut writer) = (Reader::new(8, 1, Position::of(0)), Writer::new(8, 1, Position::of(0)));
        assert_eq!(reader.look(mark(9)), Err(Violation));
        assert_eq!(reader.look(mark(u64::MAX)), Err(Violation));
        writer.advance(4);
        assert_eq!(writer.room(mark(5)), Err(Violation), "more than was sent");
        writer.advance(4);
        assert_eq!((writer.room(mark(0)), writer.room(mark(8))), (Ok((0, 0)), Ok((0, 8))));
    }

    #[test]
    fn watch_is_taken_once_and_only_for_what_it_is_about() {
        let watch = AtomicU64::new(0);
        assert_eq!(take(&watch, 3, IN), None);
        assert_eq!(arm(&watch, 3, IN), None, "it is not open");
        open(&watch, 3);
        assert_eq!(arm(&watch, 3, IN), Some(1));
        open(&watch, 3);
        assert_eq!((take(&watch, 3, OUT), take(&watch, 2, IN), take(&watch, 4, IN)), (None, None, None));
        assert_eq!((take(&watch, 3, IN | OUT), take(&watch, 3, IN)), (Some(1), None));
        assert_eq!(arm(&watch, 3, IN), Some(2));
        open(&watch, 4);
        assert_eq!((arm(&watch, 4, IN), arm(&watch, 3, OUT)), (Some(1), None), "the other socket is of an earlier use");
        assert_eq!(take(&watch, 4, IN), Some(1));
    }

    #[test]
    fn notices_count_in_any_order_of_their_doorbells() {
        let notice = |arming, events| Notice { arming, events };
        let mut told = Told::default();
        assert!(told.hear(notice(1, 0)) && told.level() == 0);
        assert!(told.hear(notice(1, IN)) && told.level() == IN);
        // The other end's doorbell overtakes that of the arming.
        assert!(told.hear(notice(2, OUT)) && told.hear(notice(2, 0)) && told.level() == OUT);
        told.forget();
        assert!(!told.hear(notice(1, IN)) && told.level() == 0, "of an arming that is over");
        assert_eq!(Notice::of(notice(u32::MAX, IN | OUT).position()), notice(u32::MAX, IN | OUT));
    }

    #[test]
    fn generations_come_again_without_the_one_of_unused_memory() {
        assert_eq!((next_generation(0), next_generation(0x1ffe), next_generation(0x1fff)), (1, LAST_GENERATION, 1));
    }
}
