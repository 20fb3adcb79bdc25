//! The event sets of a net as the proxy knows them. What it does with them: events.rs.

use spinio_ring::event::{Entry, Producer};
use spinio_ring::layout::{EVENT_SETS, event_words};

use super::index_queue::IndexQueue;
use crate::memory::Memory;

/// The sets of a net, in the order of their numbers.
#[derive(Debug, Default)]
pub(super) struct Sets {
    sets: Vec<Set>,
}

impl Sets {
    /// A new set: its number. None: there are as many as a net can have.
    pub(super) fn make(&mut self) -> Option<u16> {
        let place = self.sets.len() as u32;
        if place >= EVENT_SETS {
            return None;
        }
        self.sets.push(Set { place, producer: Producer::default(), held: IndexQueue::default() });
        Some(self.count())
    }

    /// How many there are: the number of the last one, as the first one has 1.
    pub(super) fn count(&self) -> u16 {
        self.sets.len() as u16
    }

    /// The set of a number; 0 is that of none.
    pub(super) fn get(&mut self, number: u16) -> Option<&mut Set> {
        self.sets.get_mut(usize::from(number).checked_sub(1)?)
    }
}

/// A set.
#[derive(Debug)]
pub(super) struct Set {
    /// Where its ring and its words are.
    place: u32,
    /// The proxy's side of its ring.
    producer: Producer,
    /// Sockets whose events had no room. One that is closed, or was told meanwhile, does no harm here.
    pub(super) held: IndexQueue,
}

impl Set {
    /// Whether its ring has room.
    pub(super) fn has_room(&mut self, memory: &Memory) -> bool {
        let taken = &memory.event_words(self.place)[event_words::TAKEN];
        self.producer.has_room(memory.event_ring(self.place), taken)
    }

    /// Puts an event into its ring; false if it is full.
    pub(super) fn push(&mut self, memory: &Memory, entry: Entry) -> bool {
        let taken = &memory.event_words(self.place)[event_words::TAKEN];
        self.producer.push(memory.event_ring(self.place), taken, entry)
    }

    /// The next socket whose event had no room, once there is some.
    pub(super) fn next_held(&mut self, memory: &Memory) -> Option<u32> {
        if self.has_room(memory) { self.held.pop() } else { None }
    }
}
