//! The sockets of a net as the proxy knows them: descriptors, states, rings.
//!
//! ```text
//!   slot (index) ── epoch, counted up at each use
//!     └ Socket ── Unconnected ── connect ──> Connecting ──> Connected, Upgraded ── error, violation ──> Failed
//!                      └─ listen ──> Listening                  └ close ──> closing: sends what is left, then is freed
//! ```
//!
//! Places and sizes of rings come from here alone, never from a word of a kernel.

use std::collections::VecDeque;
use std::sync::Arc;

use spinio_ring::event::Watch;
use spinio_ring::layout::Descriptor;
use spinio_ring::stream::{ReceiveRing, SendRing, Violation};
use spinio_ring::{Position, Word};
use spinio_sys::linux::Fd;

use super::caller::Caller;
use super::linger::Linger;
use super::seen_wait::SeenWait;
use super::transfers::Transfers;
use crate::meet::Meeting;
use crate::memory::Memory;
use crate::socket_fd::SocketFd;

/// Types of sockets.
pub(crate) const STREAM: u16 = 1;
pub(crate) const DGRAM: u16 = 2;
pub(crate) const SEQPACKET: u16 = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Unconnected,
    Listening,
    Connecting,
    Connected,
    /// Connected to a socket of this net: kernels exchange the bytes.
    Upgraded,
    /// Its descriptor is closed; kernels learn the errno from its line.
    Failed,
}

/// A send ring and a receive ring: offsets in pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingPair {
    pub(crate) receive: u64,
    pub(crate) send: u64,
}

/// A call of accept that waits.
#[derive(Debug)]
pub(crate) struct Accept {
    pub(crate) caller: Caller,
    /// It ends then; `u64::MAX`: it has no time limit.
    pub(crate) deadline: u64,
}

/// A connection that is being made.
#[derive(Debug)]
pub(crate) struct Connect {
    /// The call; none once it has returned without waiting.
    pub(crate) caller: Option<Caller>,
    /// It returns then; `u64::MAX`: it has no time limit.
    pub(crate) deadline: u64,
    /// The address.
    pub(crate) to: Vec<u8>,
}

/// A socket.
#[derive(Debug)]
pub(crate) struct Socket {
    /// Workers that send a file have it too.
    pub(crate) fd: Option<Arc<SocketFd>>,
    pub(crate) domain: u16,
    /// [`STREAM`], [`DGRAM`], [`SEQPACKET`]
    pub(crate) kind: u16,
    pub(crate) state: State,
    pub(crate) rings: Option<RingPair>,
    /// What kernels send, and what they receive.
    pub(crate) send_ring: SendRing,
    pub(crate) receive_ring: ReceiveRing,
    /// The Linux kernel may have bytes, or room.
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// Flags of the device line.
    pub(crate) flags: u64,
    /// errno of the device line.
    pub(crate) errno: u16,
    /// The sending direction ends after what is in the ring.
    pub(crate) shut: bool,
    /// No more is received, once nothing is left.
    pub(crate) shut_receive: bool,
    /// The program has given it: others may share the open socket.
    pub(crate) adopted: bool,
    /// Descriptors may come with its bytes, which the proxy does not want.
    pub(crate) takes_rights: bool,
    /// The program had refused them.
    pub(crate) refused_rights: bool,
    /// The kernel has closed the descriptor.
    pub(crate) closing: Option<Linger>,
    /// Then the connection is reset, once all is sent: not all was read.
    pub(crate) resets: bool,
    /// Its event set.
    pub(crate) watch: Watch,
    /// Groups that wait for long, receiving and sending, for the tools.
    pub(crate) waits: [SeenWait; 2],
    /// Calls of accept that wait.
    pub(crate) accepts: VecDeque<Accept>,
    /// A connection that is being made.
    pub(crate) connect: Option<Connect>,
    /// errno of one that failed after its call had returned, until `SO_ERROR` takes it.
    pub(crate) connect_error: u16,
    /// Files to be sent.
    pub(crate) transfers: Transfers,
    /// It has become an end after connect had returned. No kernel has armed the end yet, so that bytes make no event: one for OUT is
    /// told, also where that is not wanted, after which a kernel arms it.
    pub(crate) tells_connected: bool,
    /// Options that kernels have set: level, option, value.
    pub(crate) options: Vec<(u16, u16, i32)>,
    /// What it has to do with connections inside the net.
    pub(crate) meeting: Meeting,
}

impl Socket {
    /// The descriptor of Linux; none once the connection was reset.
    pub(super) fn raw_fd(&self) -> Option<Fd> {
        self.fd.as_ref().map(|fd| fd.0)
    }

    /// Whether the last close of its descriptor may wait: for what others have set or have sent.
    pub(super) fn is_foreign(&self) -> bool {
        self.adopted || self.takes_rights
    }

    /// Whether bytes go between its rings and a stream of Linux.
    pub(super) fn is_stream(&self) -> bool {
        self.kind == STREAM && self.state == State::Connected
    }

    /// Learns from the host line what kernels have received.
    pub(super) fn credit(&mut self, memory: &Memory, index: u32) -> Result<(), Violation> {
        self.receive_ring.credit(memory.host_line(index)[0].load_acquire())
    }

    /// Stores into the device line how far was received, and the flags.
    pub(super) fn store_received(&self, memory: &Memory, index: u32) {
        memory.device_line(index)[0].store_release(self.receive_ring.line(self.flags).word());
    }

    /// Stores into the device line how far was sent, and the errno.
    pub(super) fn store_sent(&self, memory: &Memory, index: u32) {
        memory.device_line(index)[1].store_release(self.send_ring.line(self.errno).word());
    }
}

/// A place for a socket.
#[derive(Debug)]
struct Slot {
    epoch: u32,
    socket: Option<Socket>,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Sockets {
    slots: Vec<Slot>,
    /// The one that was freed first is used first: epochs repeat late.
    free: VecDeque<u32>,
    rings: Vec<RingPair>,
    pub(crate) ring_bytes: u64,
    first: Position,
}

impl Sockets {
    /// `rings`: offset of the first ring; `pairs` of them, each of `ring_bytes` in both directions.
    /// `epoch`: the one before the first one of all slots.
    pub(crate) fn new(count: u32, rings: u64, pairs: u32, ring_bytes: u64, first: Position, epoch: u32) -> Sockets {
        let slots = (0..count).map(|_| Slot { epoch, socket: None }).collect();
        let pair = |n: u32| {
            let receive = rings + u64::from(n) * 2 * ring_bytes;
            RingPair { receive, send: receive + ring_bytes }
        };
        let rings = (0..pairs).rev().map(pair).collect();
        Sockets { slots, free: (0..count).collect(), rings, ring_bytes, first }
    }

    /// Whether there are a slot and rings for one more.
    pub(crate) fn has_room(&self, kind: u16) -> bool {
        !self.free.is_empty() && self.rings.len() >= pairs_of(kind)
    }

    /// Bytes of each ring of a socket.
    pub(crate) fn ring_bytes_of(&self, kind: u16) -> u64 {
        self.ring_bytes * pairs_of(kind) as u64
    }

    /// Puts a new socket into a slot.
    pub(crate) fn add(&mut self, fd: SocketFd, domain: u16, kind: u16, state: State) -> Option<Descriptor> {
        if !self.has_room(kind) {
            return None;
        }
        let (index, mut rings) = (self.free.pop_front()?, self.rings.pop()?);
        if pairs_of(kind) == 2 {
            // Each ring has the place of a pair.
            rings.send = self.rings.pop()?.receive;
        }
        let ring_bytes = self.ring_bytes_of(kind);
        let slot = &mut self.slots[index as usize];
        slot.epoch = Descriptor::next_epoch(slot.epoch);
        slot.socket = Some(Socket {
            fd: Some(Arc::new(fd)),
            domain,
            kind,
            state,
            rings: Some(rings),
            send_ring: SendRing::new(ring_bytes, self.first),
            receive_ring: ReceiveRing::new(ring_bytes, self.first, slot.epoch),
            readable: true,
            writable: true,
            flags: 0,
            errno: 0,
            shut: false,
            shut_receive: false,
            adopted: false,
            takes_rights: false,
            refused_rights: false,
            closing: None,
            resets: false,
            watch: Watch::default(),
            waits: <[SeenWait; 2]>::default(),
            accepts: VecDeque::new(),
            connect: None,
            connect_error: 0,
            transfers: Transfers::default(),
            tells_connected: false,
            options: Vec::new(),
            meeting: Meeting::default(),
        });
        Some(Descriptor { index, epoch: slot.epoch })
    }

    /// The socket of a descriptor that is not stale.
    pub(crate) fn get(&mut self, descriptor: Descriptor) -> Option<&mut Socket> {
        let slot = self.slots.get_mut(descriptor.index as usize)?;
        slot.socket.as_mut().filter(|_| slot.epoch == descriptor.epoch)
    }

    /// The socket in a slot.
    pub(crate) fn at(&mut self, index: u32) -> Option<&mut Socket> {
        self.slots.get_mut(index as usize)?.socket.as_mut()
    }

    /// The descriptor of the socket in a slot.
    pub(crate) fn descriptor(&self, index: u32) -> Descriptor {
        Descriptor { index, epoch: self.slots.get(index as usize).map_or(0, |slot| slot.epoch) }
    }

    /// Gives the rings of a socket back; kernels do not use them any more.
    pub(crate) fn free_rings(&mut self, index: u32) {
        let bytes = self.ring_bytes;
        let Some(socket) = self.at(index) else { return };
        let (rings, pairs) = (socket.rings.take(), pairs_of(socket.kind));
        match rings {
            Some(rings) if pairs == 2 => {
                let pair = |receive| RingPair { receive, send: receive + bytes };
                self.rings.extend([pair(rings.send), pair(rings.receive)]);
            }
            rings => self.rings.extend(rings),
        }
    }

    /// Ends a socket.
    pub(crate) fn remove(&mut self, index: u32) -> Option<Socket> {
        self.free_rings(index);
        let slot = self.slots.get_mut(index as usize)?;
        let socket = slot.socket.take();
        if socket.is_some() {
            self.free.push_back(index);
        }
        socket
    }

    /// Indices of all sockets.
    pub(crate) fn indices(&self) -> Vec<u32> {
        let used = self.slots.iter().zip(0..).filter(|(slot, _)| slot.socket.is_some());
        used.map(|(_, index)| index).collect()
    }
}

/// Pairs of rings that a socket takes: records of datagrams need more room than the same bytes of a stream.
const fn pairs_of(kind: u16) -> usize {
    if kind == STREAM { 1 } else { 2 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_used_again_late_and_with_another_epoch() {
        let mut sockets = Sockets::new(4, 4096, 2, 4096, Position::of(0), 0);
        let add = |sockets: &mut Sockets| sockets.add(SocketFd(-1), 1, STREAM, State::Unconnected);
        let (a, b) = (add(&mut sockets).unwrap(), add(&mut sockets).unwrap());
        assert_eq!((a.index, b.index, a.epoch), (0, 1, 1));
        assert!(!sockets.has_room(STREAM) && add(&mut sockets).is_none(), "there are rings for two");
        let rings = sockets.at(0).unwrap().rings;
        assert!(sockets.remove(0).is_some() && sockets.remove(0).is_none());
        assert!(sockets.get(a).is_none());
        let c = add(&mut sockets).unwrap();
        assert_eq!((c.index, sockets.at(2).unwrap().rings), (2, rings));
        sockets.remove(2);
        let d = add(&mut sockets).unwrap();
        sockets.remove(d.index);
        let again = add(&mut sockets).unwrap();
        assert_eq!((again.index, again.epoch), (0, 2));
        assert!(sockets.get(a).is_none(), "the descriptor of the first use is stale");
        sockets.remove(0);
        assert_eq!(add(&mut sockets).unwrap().index, 2);
    }

    #[test]
    fn rings_of_datagrams_are_two_pairs_that_come_back_as_two() {
        let mut sockets = Sockets::new(4, 4096, 3, 4096, Position::of(0), 0);
        let a = sockets.add(SocketFd(-1), 1, DGRAM, State::Connected).unwrap();
        let rings = sockets.at(a.index).unwrap().rings;
        assert_eq!(rings, Some(RingPair { receive: 4096, send: 3 * 4096 }));
        assert_eq!(sockets.at(a.index).unwrap().receive_ring.size(), 8192);
        assert!(sockets.has_room(STREAM) && !sockets.has_room(SEQPACKET));
        sockets.remove(a.index);
        let mut starts: Vec<_> =
            (0..3).filter_map(|_| sockets.add(SocketFd(-1), 1, STREAM, State::Connected)).collect();
        let mut rings: Vec<_> = starts.drain(..).filter_map(|d| sockets.at(d.index)?.rings).collect();
        rings.sort_by_key(|rings| rings.receive);
        let pair = |n: u64| RingPair { receive: 4096 + n * 8192, send: 8192 + n * 8192 };
        assert_eq!(rings, [pair(0), pair(1), pair(2)]);
    }
}
