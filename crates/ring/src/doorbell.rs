//! The doorbell queue: kernels tell the proxy which socket has something new, and what.
//!
//! ```text
//!   claim (device memory)   ticket = tail, if tail - head < 4096; tail + 1      compare-and-swap: a full queue refuses
//!   entry ticket % 4096     e0: position 48 | op 7 | phase 5 | 0 | lap 1        lap: 1 in the first round, then 0, 1 ...
//!                           e1: socket 32 | epoch 15 | length 7 | 0 | lap 1
//!   proxy                   both laps are of this round: the entry is complete; head + 1
//! ```
//!
//! The kernel makes its bytes visible before it claims, since nothing between claim and entry may wait: an entry that is
//! claimed and never written stops the queue.

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
    /// The kernel uses the descriptor no more.
    Close = 6,
    /// A request is in the mailbox whose number is in the place of the socket.
    Control = 7,
}

/// An entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What happened; the number as it came if it is no [`Op`].
    pub op: Result<Op, u8>,
    /// Of a send.
    pub position: Position,
    /// Index of the socket, or number of the mailbox.
    pub socket: u32,
    /// Epoch of the socket.
    pub epoch: u32,
}

const LAP: u64 = 1 << 63;
const OP_MASK: u64 = 0x7f;
const EPOCH_MASK: u64 = 0x7fff;

/// The lap bit of a ticket.
const fn lap(ticket: u64) -> u64 {
    if (ticket / DOORBELLS as u64).is_multiple_of(2) { LAP } else { 0 }
}

impl Entry {
    /// An entry of a kernel.
    pub const fn new(op: Op, position: Position, socket: u32, epoch: u32) -> Entry {
        Entry { op: Ok(op), position, socket, epoch }
    }

    fn words(self, ticket: u64) -> [u64; 2] {
        let op = self.op.map_or_else(u64::from, |op| op as u64);
        let epoch = u64::from(self.epoch) & EPOCH_MASK;
        [self.position.bits() | op << BITS | lap(ticket), u64::from(self.socket) | epoch << 32 | lap(ticket)]
    }

    fn of(e0: u64, e1: u64) -> Entry {
        let op = match e0 >> BITS & OP_MASK {
            1 => Ok(Op::Send),
            3 => Ok(Op::Credit),
            4 => Ok(Op::Rearm),
            6 => Ok(Op::Close),
            7 => Ok(Op::Control),
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
            let at = (ticket as usize % DOORBELLS * 2) % queue.len();
            let [e0, e1] = entry.words(ticket);
            queue[at].store_release(e0);
            queue[at + 1].store_release(e1);
            return true;
        }
    }
}

/// The proxy's side.
#[derive(Clone, Copy, Debug, Default)]
pub struct Consumer {
    head: u64,
}

impl Consumer {
    /// The next entry, if it is complete. The words are loaded once.
    pub fn pop<W: Word>(&mut self, queue: &[W]) -> Option<Entry> {
        let at = (self.head as usize % DOORBELLS * 2) % queue.len();
        let (e0, e1) = (queue[at].load_acquire(), queue[at + 1].load_acquire());
        let due = lap(self.head);
        if e0 & LAP != due || e1 & LAP != due {
            return None;
        }
        self.head = self.head.wrapping_add(1);
        Some(Entry::of(e0, e1))
    }

    /// How many entries it has taken, for the kernels.
    pub fn publish<W: Word>(&self, head: &W) {
        head.store_release(self.head);
    }
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
        let [e0, e1] = Entry::new(Op::Close, Position::of(0), 3, 4).words(0);
        queue[1].store_release(e1);
        assert_eq!(consumer.pop(&queue), None);
        queue[0].store_release(e0);
        assert_eq!(consumer.pop(&queue), Some(Entry::new(Op::Close, Position::of(0), 3, 4)));
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
