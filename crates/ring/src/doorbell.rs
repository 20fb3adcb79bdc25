//! The doorbell queue: kernels tell the proxy which socket has something new, and what.
//!
//! ```text
//!   claim (device memory)   ticket = tail, if tail - head < 4096; tail + 1      compare-and-swap: a full queue refuses
//!   entry ticket % 4096     e0: position 48 | op 7 | 0 8 | lap 1    lap: 1 in the first round, then 0, 1 ...
//!                           e1: socket 32 | epoch 15 | 0 16 | lap 1
//!   proxy                   both laps are of this round: the entry is complete; head + 1
//! ```
//!
//! The kernel makes its bytes visible before it claims, since nothing between claim and entry may wait. An entry that is claimed
//! and not written yet is a hole: the proxy takes those after it, and the hole once it is written. That is as if it had been
//! claimed later: the doorbells of a direction of a socket, and of a mailbox, are rung one after the other. Those of groups that
//! had the lock earlier may be seen after a close or a shutdown, so these say how far was sent. An entry is taken only if all
//! before it are still holes once it was seen: else a group could write a hole and then this one while the proxy looks. Places up
//! to a hole are not used again, so a hole that is never written blocks the queue 4096 entries later.

use crate::Word;
use crate::layout::DOORBELLS;
use crate::position::{BITS, Position};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// The send ring has bytes up to the position.
    Send = 1,
    /// Room in a receive ring that was full.
    Credit = 3,
    /// The next event of a socket in an event set is wanted.
    Rearm = 4,
    /// What is true of a connection inside the net that was armed when it was put into an event set, or when it became one.
    Armed = 5,
    /// The kernel uses the descriptor no more. What it has sent goes up to the position.
    Close = 6,
    /// A request is in the mailbox whose number is in the place of the socket. If it ends sending, the position is as of a close; of
    /// connect it is a time limit in microseconds, 0: none.
    Control = 7,
    /// The other end of a connection inside the net has something new: [`crate::peer::Notice`] is in the place of the position.
    Ready = 40,
}

/// An entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What happened; the number as it came if it is no [`Op`].
    pub op: Result<Op, u8>,
    /// Up to which bytes were sent: of a send, a close and a shutdown; of [`Op::Rearm`], [`Op::Armed`] and [`Op::Ready`] a notice.
    pub position: Position,
    /// Index of the socket, or number of the mailbox.
    pub socket: u32,
    /// Epoch of the socket.
    pub epoch: u32,
}

const LAP: u64 = 1 << 63;
const OP_MASK: u64 = 0x7f;
const EPOCH_MASK: u64 = 0x7fff;

/// The place of a ticket in a queue, and its lap bit. Models have shorter queues.
const fn place<W>(queue: &[W], ticket: u64) -> (usize, u64) {
    let places = (queue.len() / 2) as u64;
    let lap = if (ticket / places).is_multiple_of(2) { LAP } else { 0 };
    ((ticket % places) as usize * 2, lap)
}

impl Entry {
    /// An entry of a kernel.
    pub const fn new(op: Op, position: Position, socket: u32, epoch: u32) -> Entry {
        Entry { op: Ok(op), position, socket, epoch }
    }

    fn words(self, lap: u64) -> [u64; 2] {
        let op = self.op.map_or_else(u64::from, |op| op as u64);
        let epoch = u64::from(self.epoch) & EPOCH_MASK;
        [self.position.bits() | op << BITS | lap, u64::from(self.socket) | epoch << 32 | lap]
    }

    fn of(e0: u64, e1: u64) -> Entry {
        let op = match e0 >> BITS & OP_MASK {
            1 => Ok(Op::Send),
            3 => Ok(Op::Credit),
            4 => Ok(Op::Rearm),
            5 => Ok(Op::Armed),
            6 => Ok(Op::Close),
            7 => Ok(Op::Control),
            40 => Ok(Op::Ready),
            other => Err(other as u8),
        };
        Entry { op, position: Position::of(e0), socket: e1 as u32, epoch: (e1 >> 32 & EPOCH_MASK) as u32 }
    }
}

/// Puts an entry into the queue; false if it is full. `tail` and `seen` are in device memory, `head` is the proxy's word.
pub fn push<W: Word>(queue: &[W], tail: &W, seen: &W, head: &W, entry: Entry) -> bool {
    loop {
        let ticket = tail.load_acquire();
        if ticket.wrapping_sub(seen.load_acquire()) >= DOORBELLS as u64 {
            let now = head.load_acquire();
            seen.store_release(now);
            if ticket.wrapping_sub(now) >= DOORBELLS as u64 {
                return false;
            }
        }
        if tail.compare_exchange(ticket, ticket.wrapping_add(1)) {
            let (at, lap) = place(queue, ticket);
            let [e0, e1] = entry.words(lap);
            queue[at].store_release(e0);
            queue[at + 1].store_release(e1);
            return true;
        }
    }
}

/// How many places [`Consumer::pop`] looks at.
const NEAR: usize = 8;

/// The proxy's side.
#[derive(Clone, Debug, Default)]
pub struct Consumer {
    /// All entries before it are taken.
    head: u64,
    /// No entry from here on is taken.
    next: u64,
    /// Between them, those that are not taken.
    holes: Vec<u64>,
}

impl Consumer {
    /// The next entry that is complete, among the first ones. The words are loaded once.
    pub fn pop<W: Word>(&mut self, queue: &[W]) -> Option<Entry> {
        self.find(queue, NEAR)
    }

    /// The same among all: for entries after many that are not complete. It loads the whole queue.
    pub fn search<W: Word>(&mut self, queue: &[W]) -> Option<Entry> {
        self.find(queue, DOORBELLS)
    }

    fn find<W: Word>(&mut self, queue: &[W], most: usize) -> Option<Entry> {
        let complete = |ticket: u64| Some((ticket, load(queue, ticket)?));
        let room = (queue.len() / 2) as u64 - self.next.wrapping_sub(self.head);
        let ahead = (0..room.min(most as u64)).map(|i| self.next.wrapping_add(i));
        let (mut ticket, mut entry) = self.holes.iter().take(most).copied().chain(ahead).find_map(complete)?;
        // A group may have written an earlier entry since that was looked at, and then this one: the earlier comes first.
        while let Some(earlier) = self.open_before(ticket).find_map(complete) {
            (ticket, entry) = earlier;
        }
        match self.holes.iter().position(|&hole| hole == ticket) {
            Some(at) => drop(self.holes.remove(at)),
            None => {
                self.holes.extend((0..ticket.wrapping_sub(self.next)).map(|i| self.next.wrapping_add(i)));
                self.next = ticket.wrapping_add(1);
            }
        }
        self.settle();
        Some(entry)
    }

    /// Those before a ticket that are not taken.
    fn open_before(&self, ticket: u64) -> impl Iterator<Item = u64> {
        let (head, next, place) = (self.head, self.next, ticket.wrapping_sub(self.head));
        let ahead = place.saturating_sub(next.wrapping_sub(head));
        let holes = self.holes.iter().copied().take_while(move |hole| hole.wrapping_sub(head) < place);
        holes.chain((0..ahead).map(move |i| next.wrapping_add(i)))
    }

    fn settle(&mut self) {
        self.head = self.holes.first().copied().unwrap_or(self.next);
    }

    /// Whether no entry can follow before one is written that was claimed long ago.
    pub const fn is_blocked(&self) -> bool {
        self.next.wrapping_sub(self.head) >= DOORBELLS as u64
    }

    /// Entries that were claimed and are not written, as far as later ones show them.
    pub const fn holes(&self) -> usize {
        self.holes.len()
    }

    /// How many entries it has taken, for the kernels: their places are free.
    pub fn publish<W: Word>(&self, head: &W) {
        head.store_release(self.head);
    }
}

/// The entry of a ticket, if it is complete.
fn load<W: Word>(queue: &[W], ticket: u64) -> Option<Entry> {
    let (at, due) = place(queue, ticket);
    let (e0, e1) = (queue[at].load_acquire(), queue[at + 1].load_acquire());
    (e0 & LAP == due && e1 & LAP == due).then(|| Entry::of(e0, e1))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    fn words(count: usize) -> Vec<AtomicU64> {
        (0..count).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn entries_come_out_in_order_over_many_rounds_and_a_full_queue_refuses() {
        let (queue, claims) = (words(DOORBELLS * 2), words(3));
        let mut consumer = Consumer::default();
        let entry = |i: u64| Entry::new(Op::Send, Position::of(i * 77), i as u32, i as u32 % 0x7fff);
        let push = |i| push(&queue, &claims[0], &claims[1], &claims[2], entry(i));
        assert_eq!(consumer.pop(&queue), None);
        let (mut pushed, mut popped) = (0, 0);
        for round in 0..10 {
            while push(pushed) {
                pushed += 1;
            }
            assert_eq!(pushed - popped, DOORBELLS as u64);
            for _ in 0..round * 777 % DOORBELLS + 1 {
                assert_eq!(consumer.pop(&queue), Some(entry(popped)));
                popped += 1;
            }
            consumer.publish(&claims[2]);
        }
        while consumer.pop(&queue).is_some() {
            popped += 1;
        }
        assert_eq!(pushed, popped);
    }

    #[test]
    fn entry_with_one_word_is_not_complete() {
        let queue = words(DOORBELLS * 2);
        let mut consumer = Consumer::default();
        let [e0, e1] = Entry::new(Op::Close, Position::of(0), 3, 4).words(LAP);
        queue[1].store_release(e1);
        assert_eq!(consumer.pop(&queue), None);
        queue[0].store_release(e0);
        assert_eq!(consumer.pop(&queue), Some(Entry::new(Op::Close, Position::of(0), 3, 4)));
    }

    #[test]
    fn entries_after_one_that_is_never_written_are_taken_until_the_queue_is_full() {
        for holes in [1, 20_u64] {
            let (queue, claims) = (words(DOORBELLS * 2), words(3));
            let mut consumer = Consumer::default();
            let entry = |i: u64| Entry::new(Op::Send, Position::of(i), 1, 1);
            let push = |i| push(&queue, &claims[0], &claims[1], &claims[2], entry(i));
            assert!(push(0) && consumer.pop(&queue) == Some(entry(0)));
            claims[0].store_release(1 + holes);
            for i in 1..DOORBELLS as u64 - holes + 1 {
                assert!(push(i) && !consumer.is_blocked());
                let near = consumer.pop(&queue);
                assert_eq!(near.is_some(), i > 1 || holes < NEAR as u64);
                assert_eq!(near.or_else(|| consumer.search(&queue)), Some(entry(i)));
                consumer.publish(&claims[2]);
            }
            assert!(!push(9999) && consumer.is_blocked());
            assert_eq!((consumer.holes(), consumer.search(&queue)), (holes as usize, None));
        }
    }

    #[test]
    fn entry_that_is_written_late_is_taken_once() {
        let (queue, claims, late) = (words(DOORBELLS * 2), words(3), words(1));
        let mut consumer = Consumer::default();
        let entry = |i: u64| Entry::new(Op::Send, Position::of(i), 1, 1);
        claims[0].store_release(1);
        for i in 1..5 {
            assert!(push(&queue, &claims[0], &claims[1], &claims[2], entry(i)));
        }
        let all: Vec<_> = std::iter::from_fn(|| consumer.pop(&queue)).collect();
        assert_eq!(all, (1..5).map(entry).collect::<Vec<_>>());
        assert!(push(&queue, &late[0], &claims[1], &claims[2], entry(77)));
        assert_eq!((consumer.pop(&queue), consumer.pop(&queue)), (Some(entry(77)), None));
        consumer.publish(&claims[2]);
        assert_eq!(claims[2].load_acquire(), 5);
    }

    #[test]
    fn unknown_op_keeps_its_number() {
        let queue = words(DOORBELLS * 2);
        queue[0].store_release(LAP | 0x55 << BITS);
        queue[1].store_release(u64::MAX);
        let entry = Consumer::default().pop(&queue).unwrap();
        assert_eq!((entry.op, entry.socket, entry.epoch), (Err(0x55), u32::MAX, 0x7fff));
    }
}
