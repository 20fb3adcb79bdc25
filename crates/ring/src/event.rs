//! Event sets: the proxy tells kernels which of many sockets are ready, each event to one group.
//!
//! ```text
//!   proxy   socket: watched ── rearm ──> armed ── level is due, ring has room ──> entry, disarmed
//!                                          └ ring is full: stays armed, looked at again when kernels have taken some
//!   entry n % 256 (host memory)  e0: socket 31 | 0 | events 16 | 0 | lap 1      e1: listening socket of a new connection
//!   kernels (device memory)      lock ── its holder alone reads host memory, and moves entries into the copies
//!                                copies, head, tail ── a group claims entries: compare-and-swap of head
//!   taken (host memory)          how many entries the holder of the lock has moved: room for the proxy
//! ```
//!
//! An armed socket makes one entry, so that one group serves it, until this group has armed it again. Whether a socket is
//! ready is a level: at each arming it is looked at anew, so what arrived meanwhile is not lost.
//!
//! A group reads the copies before its compare-and-swap. The copies are overwritten only once head has passed them: then the
//! compare-and-swap fails, and what was read does not count.

use crate::Word;
use crate::layout::Descriptor;

/// Bytes, or the end of the stream, can be received.
pub const IN: u16 = 1;
/// At least half of the send ring is free.
pub const OUT: u16 = 4;
/// The connection has failed. Always watched.
pub const ERR: u16 = 8;
/// Both directions have ended. Always watched.
pub const HUP: u16 = 0x10;
/// The peer sends no more.
pub const RDHUP: u16 = 0x2000;
/// The socket is a connection that a listening socket of the set has accepted.
pub const NEW: u16 = 0x4000;

/// What is true once the peer sends no more.
pub const ENDED: u16 = IN | RDHUP;
/// What is true of a connection that has failed.
pub const FAILED: u16 = ENDED | OUT | ERR | HUP;

/// The events, if the condition holds.
pub const fn when(condition: bool, events: u16) -> u16 {
    if condition { events } else { 0 }
}

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Whose event it is.
    pub socket: Descriptor,
    /// [`IN`] ... [`NEW`]
    pub events: u16,
    /// The listening socket of a new connection.
    pub listener: Option<Descriptor>,
}

const LAP: u64 = 1 << 63;

/// The lap bit of a ticket in a ring of so many entries.
const fn lap(ticket: u64, entries: u64) -> u64 {
    if (ticket / entries).is_multiple_of(2) { LAP } else { 0 }
}

impl Entry {
    fn words(self) -> [u64; 2] {
        let number = |descriptor: Descriptor| u64::from(descriptor.number() as u32);
        [number(self.socket) | u64::from(self.events) << 32, self.listener.map_or(0, number)]
    }

    fn of([e0, e1]: [u64; 2]) -> Entry {
        let listener = (e1 != 0).then(|| Descriptor::of(e1 as u32));
        Entry { socket: Descriptor::of(e0 as u32), events: (e0 >> 32) as u16, listener }
    }
}

/// The proxy's side of a ring. A word of a kernel that contradicts what it knows is not believed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Producer {
    tail: u64,
    taken: u64,
}

impl Producer {
    /// Whether there is room for an entry; `taken` is the kernels' word.
    pub fn has_room<W: Word>(&mut self, queue: &[W], taken: &W) -> bool {
        let entries = (queue.len() / 2) as u64;
        if self.tail - self.taken < entries {
            return true;
        }
        let now = taken.load_acquire();
        if (self.taken..=self.tail).contains(&now) {
            self.taken = now;
        }
        self.tail - self.taken < entries
    }

    /// Puts an entry into the ring; false if it is full.
    pub fn push<W: Word>(&mut self, queue: &[W], taken: &W, entry: Entry) -> bool {
        if !self.has_room(queue, taken) {
            return false;
        }
        let entries = (queue.len() / 2) as u64;
        let at = (self.tail % entries) as usize * 2;
        let [e0, e1] = entry.words();
        queue[at + 1].store_release(e1);
        queue[at].store_release(e0 | lap(self.tail, entries));
        self.tail += 1;
        true
    }
}

/// The kernels' side of a ring.
#[derive(Clone, Copy, Debug)]
pub struct Taker<'a, W> {
    /// The ring in host memory.
    pub queue: &'a [W],
    /// The word for the proxy.
    pub taken: &'a W,
    /// Lock, head, tail, and the last value of `taken`, in device memory.
    pub claims: &'a [W; 4],
    /// The copies in device memory, as many as the ring has entries.
    pub copies: &'a [W],
}

const LOCK: usize = 0;
const HEAD: usize = 1;
const TAIL: usize = 2;
const SAID: usize = 3;

impl<W: Word> Taker<'_, W> {
    /// Claims an event that is among the copies.
    pub fn claim(&self) -> Option<Entry> {
        let entries = (self.copies.len() / 2) as u64;
        loop {
            let head = self.claims[HEAD].load_acquire();
            if head == self.claims[TAIL].load_acquire() {
                return None;
            }
            let at = (head % entries) as usize * 2;
            let words = [self.copies[at].load_acquire(), self.copies[at + 1].load_acquire()];
            if self.claims[HEAD].compare_exchange(head, head + 1) {
                return Some(Entry::of(words));
            }
        }
    }

    /// Whether this group reads host memory from now on.
    pub fn lock(&self) -> bool {
        self.claims[LOCK].compare_exchange(0, 1)
    }

    /// Leaves that to another group.
    pub fn unlock(&self) {
        self.claims[LOCK].store_release(0);
    }

    /// With the lock: moves entries from host memory into the copies; whether there were any.
    pub fn gather(&self) -> bool {
        let entries = (self.queue.len() / 2) as u64;
        let (begin, head) = (self.claims[TAIL].load_acquire(), self.claims[HEAD].load_acquire());
        let mut tail = begin;
        while tail - head < entries {
            let at = (tail % entries) as usize * 2;
            let e0 = self.queue[at].load_acquire();
            if e0 & LAP != lap(tail, entries) {
                break;
            }
            self.copies[at].store_release(e0 & !LAP);
            self.copies[at + 1].store_release(self.queue[at + 1].load_acquire());
            tail += 1;
        }
        if tail != begin {
            self.claims[TAIL].store_release(tail);
        }
        // Not at each event: the proxy wants to know of room in quarters of the ring.
        if tail - self.claims[SAID].load_acquire() >= entries.div_ceil(4) {
            self.claims[SAID].store_release(tail);
            self.taken.store_release(tail);
        }
        tail != begin
    }
}

/// What a socket is watched for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watch {
    /// Number of the set, from 1; 0: none.
    pub set: u16,
    /// What the set's users want to know.
    pub events: u16,
    armed: bool,
}

impl Watch {
    /// In a set, not armed.
    pub const fn new(set: u16, events: u16) -> Watch {
        Watch { set, events, armed: false }
    }

    /// The next event is wanted.
    pub const fn arm(&mut self) {
        self.armed = self.set != 0;
    }

    /// Whether an event is wanted.
    pub const fn is_armed(&self) -> bool {
        self.armed
    }

    /// The events to tell now, if the socket is in this state.
    pub const fn due(&self, level: u16) -> Option<u16> {
        let events = level & (self.events | ERR | HUP);
        if self.armed && events != 0 { Some(events) } else { None }
    }

    /// They were told.
    pub const fn told(&mut self) {
        self.armed = false;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn entries_keep_all_fields() {
        let descriptor = |index, epoch| Descriptor { index, epoch };
        for listener in [None, Some(descriptor(0xffff, 1))] {
            let entry = Entry { socket: descriptor(7, 0x7fff), events: IN | NEW, listener };
            assert_eq!(Entry::of(entry.words()), entry);
            assert_eq!(entry.words()[0] & LAP, 0);
        }
    }

    #[test]
    fn impossible_words_of_kernels_make_no_room() {
        let queue: Vec<AtomicU64> = (0..8).map(|_| AtomicU64::new(0)).collect();
        let (taken, mut producer) = (AtomicU64::new(0), Producer::default());
        let entry = Entry { socket: Descriptor { index: 1, epoch: 1 }, events: IN, listener: None };
        while producer.push(&queue, &taken, entry) {}
        for wrong in [5, 1 << 40, u64::MAX] {
            taken.store_release(wrong);
            assert!(!producer.has_room(&queue, &taken));
        }
        taken.store_release(3);
        assert!(producer.has_room(&queue, &taken));
        taken.store_release(2);
        assert_eq!((0..9).filter(|_| producer.push(&queue, &taken, entry)).count(), 3, "it does not go back");
    }

    #[test]
    fn failures_are_told_unasked_and_only_while_armed() {
        let mut watch = Watch::new(3, IN);
        assert_eq!(watch.due(ERR), None);
        watch.arm();
        assert_eq!((watch.due(OUT), watch.due(OUT | ERR)), (None, Some(ERR)));
        watch.told();
        assert_eq!(watch.due(IN), None);
        let mut none = Watch::default();
        none.arm();
        assert_eq!(none.due(ERR), None, "a socket in no set");
    }
}
