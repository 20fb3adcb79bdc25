//! The two directions of a stream socket, from both sides. Rings have their names from the kernel, as in the device headers.
//!
//! ```text
//!   sent            tail                        consumed         received
//!     v               v                             v                v
//!   ──┼───────────────┼─────── send ring        ────┼────────────────┼─────── receive ring
//!     └ SendRing: the proxy sends these             └ Receiver: the kernel takes these
//!                     └ Sender: room up to sent + size               └ ReceiveRing: room up to consumed + size
//! ```
//!
//! Bytes are written before the position that includes them is published, and read before the position that gives their
//! place back.

use crate::Position;
use crate::line::{Consumed, EOF, ERR, FULL, Received, Sent};

/// A word of a kernel contradicts what the proxy knows: the connection is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation;

/// The proxy's side of a send ring, out of which it sends.
#[derive(Clone, Copy, Debug)]
pub struct SendRing {
    size: u64,
    sent: Position,
    tail: Position,
}

impl SendRing {
    /// An empty ring.
    pub const fn new(size: u64, first: Position) -> SendRing {
        SendRing { size, sent: first, tail: first }
    }

    /// A doorbell says that there are bytes up to `tail`. One of another group that came before the last one, and is seen
    /// after it, says nothing new: a doorbell is not ordered after those of a group that had the lock before.
    pub const fn extend(&mut self, tail: Position) -> Result<(), Violation> {
        if self.tail.since(tail) <= self.size {
            return Ok(());
        }
        if tail.since(self.sent) > self.size {
            return Err(Violation);
        }
        self.tail = tail;
        Ok(())
    }

    /// Bytes of the ring.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Bytes up to here were sent.
    pub const fn sent(&self) -> Position {
        self.sent
    }

    /// A kernel has sent up to here.
    pub const fn tail(&self) -> Position {
        self.tail
    }

    /// Bytes to send.
    pub const fn pending(&self) -> u64 {
        self.tail.since(self.sent)
    }

    /// Whether half of the ring is free, as far as is known: worth telling a kernel that waits for room.
    pub const fn has_half_free(&self) -> bool {
        self.pending() <= self.size / 2
    }

    /// The contiguous bytes to send next: place and length.
    pub fn next(&self) -> (usize, usize) {
        let (at, to_end) = self.sent.place(self.size);
        (at, to_end.min(self.pending() as usize))
    }

    /// Bytes were sent: their places are free.
    pub const fn advance(&mut self, bytes: usize) {
        self.sent = self.sent.after(bytes as u64);
    }

    /// What the device line says.
    pub const fn line(&self, errno: u16) -> Sent {
        Sent { position: self.sent, errno }
    }
}

/// The proxy's side of a receive ring, into which it receives.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveRing {
    size: u64,
    epoch: u32,
    consumed: Position,
    received: Position,
}

impl ReceiveRing {
    /// An empty ring.
    pub const fn new(size: u64, first: Position, epoch: u32) -> ReceiveRing {
        ReceiveRing { size, epoch, consumed: first, received: first }
    }

    /// The host line says what the kernel has taken. A word of another epoch says nothing.
    pub const fn credit(&mut self, word: u64) -> Result<(), Violation> {
        let consumed = Consumed::of(word);
        if consumed.epoch != self.epoch {
            return Ok(());
        }
        if consumed.position.since(self.consumed) > self.received.since(self.consumed) {
            return Err(Violation);
        }
        self.consumed = consumed.position;
        Ok(())
    }

    /// Bytes of the ring.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Bytes up to here are in the ring.
    pub const fn received(&self) -> Position {
        self.received
    }

    /// Bytes that the kernel has not taken, as far as is known.
    pub const fn unread(&self) -> u64 {
        self.received.since(self.consumed)
    }

    /// The contiguous room: place and length.
    pub fn room(&self) -> (usize, usize) {
        let (at, to_end) = self.received.place(self.size);
        (at, to_end.min((self.size - self.unread()) as usize))
    }

    /// Bytes were written there.
    pub const fn advance(&mut self, bytes: usize) {
        self.received = self.received.after(bytes as u64);
    }

    /// What the device line says.
    pub const fn line(&self, flags: u64) -> Received {
        Received { position: self.received, flags }
    }
}

/// What a kernel finds in a device line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Bytes to take: place and contiguous length.
    Bytes(usize, usize),
    /// Nothing yet.
    Nothing,
    /// The peer sends no more.
    End,
    /// Receiving fails: the errno is in the second word.
    Failed,
}

/// The kernel's side of a receive ring.
#[derive(Clone, Copy, Debug)]
pub struct Receiver {
    size: u64,
    epoch: u32,
    consumed: Position,
    /// The proxy waits for room.
    wanted: bool,
}

impl Receiver {
    /// An empty ring.
    pub const fn new(size: u64, first: Position, epoch: u32) -> Receiver {
        Receiver { size, epoch, consumed: first, wanted: false }
    }

    /// Looks at the first word of the device line.
    pub fn look(&mut self, word: u64) -> Look {
        let received = Received::of(word);
        self.wanted = received.flags & FULL != 0;
        let there = received.position.since(self.consumed);
        let (at, to_end) = self.consumed.place(self.size);
        match there.min(self.size) as usize {
            0 if received.flags & ERR != 0 => Look::Failed,
            0 if received.flags & EOF != 0 => Look::End,
            0 => Look::Nothing,
            bytes => Look::Bytes(at, bytes.min(to_end)),
        }
    }

    /// Bytes were taken: the word for the host line, and whether the proxy wants a credit doorbell.
    pub const fn advance(&mut self, bytes: usize) -> (u64, bool) {
        self.consumed = self.consumed.after(bytes as u64);
        (Consumed { position: self.consumed, epoch: self.epoch }.word(), self.wanted)
    }
}

/// The kernel's side of a send ring.
#[derive(Clone, Copy, Debug)]
pub struct Sender {
    size: u64,
    sent: Position,
    tail: Position,
}

impl Sender {
    /// An empty ring. It claims no room before it has looked at the line, which says whether there is a connection.
    pub const fn new(size: u64, first: Position) -> Sender {
        Sender { size, sent: first.after(size.wrapping_neg()), tail: first }
    }

    /// The contiguous room that is known: place and length.
    pub fn room(&self) -> (usize, usize) {
        let (at, to_end) = self.tail.place(self.size);
        (at, to_end.min((self.size - self.tail.since(self.sent)) as usize))
    }

    /// Looks at the second word of the device line: the errno, 0 for none.
    pub const fn look(&mut self, word: u64) -> u16 {
        let sent = Sent::of(word);
        if self.tail.since(sent.position) <= self.size {
            self.sent = sent.position;
        }
        sent.errno
    }

    /// Bytes were written: the position for the doorbell.
    pub const fn advance(&mut self, bytes: usize) -> Position {
        self.tail = self.tail.after(bytes as u64);
        self.tail
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doorbell_outside_the_ring_is_a_violation_and_an_older_one_says_nothing() {
        let first = Position::of(u64::MAX - 10);
        let mut send_ring = SendRing::new(4096, first);
        assert_eq!(send_ring.extend(first.after(4097)), Err(Violation));
        assert_eq!(send_ring.extend(first.after(100)), Ok(()));
        assert_eq!(send_ring.extend(first.after(99)), Ok(()));
        assert_eq!(send_ring.extend(first.after(100).after(4097_u64.wrapping_neg())), Err(Violation));
        assert_eq!(send_ring.pending(), 100);
        send_ring.advance(100);
        assert_eq!(send_ring.extend(first.after(99)), Ok(()));
        assert_eq!(send_ring.pending(), 0);
        assert_eq!(send_ring.extend(first.after(4197)), Err(Violation));
        assert_eq!(send_ring.extend(first.after(4196)), Ok(()));
        assert_eq!(send_ring.pending(), 4096);
    }

    #[test]
    fn credit_for_bytes_that_were_not_received_is_a_violation() {
        let first = Position::of(u64::MAX - 10);
        let word = |bytes, epoch| Consumed { position: first.after(bytes), epoch }.word();
        let mut receive_ring = ReceiveRing::new(4096, first, 9);
        receive_ring.advance(50);
        assert_eq!(receive_ring.credit(word(51, 9)), Err(Violation));
        assert_eq!(receive_ring.credit(word(51, 8)), Ok(()), "a word of an earlier epoch does not count");
        assert_eq!(receive_ring.unread(), 50);
        assert_eq!(receive_ring.credit(word(20, 9)), Ok(()));
        assert_eq!(receive_ring.credit(word(19, 9)), Err(Violation));
        assert_eq!(receive_ring.unread(), 30);
    }

    #[test]
    fn bytes_come_before_errors_and_the_end() {
        let mut receiver = Receiver::new(4096, Position::of(0), 1);
        let word = |bytes, flags| Received { position: Position::of(bytes), flags }.word();
        assert_eq!(receiver.look(word(3, ERR | EOF)), Look::Bytes(0, 3));
        receiver.advance(3);
        assert_eq!(receiver.look(word(3, EOF)), Look::End);
        assert_eq!(receiver.look(word(3, EOF | ERR)), Look::Failed);
    }

    #[test]
    fn new_sender_looks_before_it_writes() {
        let mut sender = Sender::new(4096, Position::of(0));
        assert_eq!(sender.room().1, 0);
        assert_eq!(sender.look(Sent { position: Position::of(0), errno: 107 }.word()), 107);
        assert_eq!(sender.look(Sent::default().word()), 0);
        assert_eq!(sender.room(), (0, 4096));
    }
}
