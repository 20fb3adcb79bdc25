//! Where each structure is in the memory of a net. `device/include/spinio/net/layout.h` has the same in C++.
//!
//! ```text
//!   pinned host memory                                               device memory
//!        0  header: magic, stop, head of the doorbell queue               0  claims of the doorbell queue
//!     4096  doorbell queue: 4096 entries of 16 bytes                   4096  device sockets, 128 bytes each
//!    69632  records: 32 bytes a socket                                    .  mailbox claims, 16 bytes each
//!        .  device lines, then host lines: 128 bytes a socket each
//!        .  mailboxes: request and reply, 128 bytes each          .  event sets, 4224 bytes each
//!                                                                  .  pairs of ends, 128 bytes an end, then their rings
//!        .  event sets: a page of words, then a ring of 4096 bytes each
//!        .  waits: 16 bytes a socket (wait.rs)
//!        .  rings, from a multiple of 4096
//!        .  file buffers, if kernels may open files: 16 of 128 KiB each
//! ```

use core::ops::RangeInclusive;

/// The first word of the header.
pub const MAGIC: u64 = u64::from_le_bytes(*b"spinnet\x01");
/// Bytes of a page, and of each header.
pub const PAGE: usize = 4096;
/// Entries of the doorbell queue.
pub const DOORBELLS: usize = 4096;
/// Bytes of a doorbell entry.
pub const DOORBELL_BYTES: usize = 16;
/// Bytes of a line, and of a half of a mailbox.
pub const LINE_BYTES: usize = 128;
/// Bytes of a record.
pub const RECORD_BYTES: usize = 64;
/// Bytes of a mailbox.
pub const MAILBOX_BYTES: usize = 256;
/// Bytes of a device socket.
pub const DEVICE_SOCKET_BYTES: usize = 128;
/// Bytes of an end of a connection inside the net: [`crate::peer`].
pub const END_BYTES: usize = 128;
/// Bytes of the claim of a mailbox.
pub const CLAIM_BYTES: usize = 16;
/// Mailboxes for calls that are answered at once; the others are for calls that wait, such as accept.
pub const QUICK_MAILBOXES: u32 = 64;
/// The most bytes of a socket address.
pub const ADDRESS_BYTES: usize = 112;
/// The most sockets of a net.
pub const MAX_SOCKETS: u32 = 1 << 16;

/// Event sets of a net.
pub const EVENT_SETS: u32 = 16;
/// Entries of an event ring, 16 bytes each: a page.
pub const EVENTS: usize = 256;
/// Bytes of an event set's words in pinned memory.
pub const EVENT_WORDS_BYTES: usize = PAGE / EVENT_SETS as usize;
/// Bytes of an event set in device memory: claims, then copies of entries.
pub const DEVICE_SET_BYTES: usize = 128 + PAGE;

/// Buffers through which bytes of files travel.
pub const FILE_BUFFERS: u32 = 16;
/// Bytes of each.
pub const FILE_BUFFER_BYTES: usize = 128 << 10;
/// The most files that are open at a time.
pub const MAX_FILES: u32 = 256;
/// The index of the first file: those below it are sockets.
pub const FIRST_FILE: u32 = MAX_SOCKETS - MAX_FILES;
/// The longest path of a file.
pub const PATH_BYTES: usize = 4095;

/// Bytes of the words of groups that wait for a socket: receiving, sending.
pub const WAIT_BYTES: usize = 16;

/// Device memory of one direction of a connection between two devices: a page of words, and a ring.
pub const PEER_BYTES: u64 = 2 << 20;
/// The logarithms of the sizes that a ring in it may have.
pub const PEER_RING_LOG2: RangeInclusive<u8> = 12..=20;
/// Places in a net's window for its own such memory, and after them those for that of other nets.
pub const OWN_PEERS: u16 = 256;
/// As above.
pub const FAR_PEERS: u16 = 512;

/// Words of an event set in pinned memory.
pub mod event_words {
    /// Written by kernels: how many entries they have taken.
    pub const TAKEN: usize = 0;
    /// Written by kernels: the group that waits ([`crate::wait`]).
    pub const WAITS: usize = 1;
    /// Written by the proxy: 1 once the set is made.
    pub const MADE: usize = 16;
}

/// Words of the header.
pub mod header {
    /// [`super::MAGIC`]
    pub const MAGIC: usize = 0;
    /// 0; 1 once the net is stopped; 2 once the proxy has ended.
    pub const STOP: usize = 1;
    /// How many entries of the doorbell queue the proxy has taken.
    pub const DOORBELL_HEAD: usize = 16;
}

/// Words of the device memory's first page.
pub mod claims {
    /// The next place in the doorbell queue.
    pub const DOORBELL_TAIL: usize = 0;
    /// The head of the doorbell queue, as last seen.
    pub const DOORBELL_HEAD: usize = 1;
    /// Of the file buffers, a word each.
    pub const FILE_BUFFERS: usize = 64;
}

/// Words of a record: what a kernel has to know of a socket before its first call.
pub mod record {
    /// Epoch of the socket, times 4, plus 2 while it is open.
    pub const STATE: usize = 0;
    /// Place of the receive ring: [`super::ring_place`].
    pub const RECEIVE: usize = 1;
    /// Place of the send ring.
    pub const SEND: usize = 2;
    /// Position at which both directions begin, and what the socket is: [`super::kind_of`].
    pub const FIRST: usize = 3;
    /// Where its granule is, as kernels see it ([`crate::granule`]); written before a place that says so.
    pub const GRANULE: usize = 4;
}

/// Sizes of a net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Sockets: a power of two.
    pub sockets: u32,
    /// Mailboxes.
    pub mailboxes: u32,
}

impl Sizes {
    /// Offset of the doorbell queue.
    pub const fn doorbells(self) -> usize {
        PAGE
    }

    /// Offset of the records.
    pub const fn records(self) -> usize {
        self.doorbells() + DOORBELLS * DOORBELL_BYTES
    }

    /// Offset of the device lines.
    pub const fn device_lines(self) -> usize {
        (self.records() + self.sockets as usize * RECORD_BYTES).next_multiple_of(LINE_BYTES)
    }

    /// Offset of the host lines.
    pub const fn host_lines(self) -> usize {
        self.device_lines() + self.sockets as usize * LINE_BYTES
    }

    /// Offset of the mailboxes.
    pub const fn mailboxes(self) -> usize {
        self.host_lines() + self.sockets as usize * LINE_BYTES
    }

    /// Offset of the event sets: the words of all, then their rings.
    pub const fn event_sets(self) -> usize {
        (self.mailboxes() + self.mailboxes as usize * MAILBOX_BYTES).next_multiple_of(PAGE)
    }

    /// Offset of the words of groups that wait for sockets.
    pub const fn waits(self) -> usize {
        self.event_sets() + PAGE + EVENT_SETS as usize * PAGE
    }

    /// Offset of the rings.
    pub const fn rings(self) -> usize {
        (self.waits() + self.sockets as usize * WAIT_BYTES).next_multiple_of(PAGE)
    }

    /// Offset of the device sockets in device memory.
    pub const fn device_sockets(self) -> usize {
        PAGE
    }

    /// Offset of the claims of mailboxes in device memory.
    pub const fn mailbox_claims(self) -> usize {
        self.device_sockets() + self.sockets as usize * DEVICE_SOCKET_BYTES
    }

    /// Offset of the event sets in device memory.
    pub const fn device_sets(self) -> usize {
        (self.mailbox_claims() + self.mailboxes as usize * CLAIM_BYTES).next_multiple_of(LINE_BYTES)
    }

    /// Offset of the ends of connections inside the net: two for each pair.
    pub const fn device_ends(self) -> usize {
        self.device_sets() + EVENT_SETS as usize * DEVICE_SET_BYTES
    }

    /// Offset of the rings of so many pairs. What is before them is zero at the beginning.
    pub const fn device_rings(self, pairs: u32) -> usize {
        (self.device_ends() + pairs as usize * 2 * END_BYTES).next_multiple_of(PAGE)
    }
}

/// Where a ring is, as one word: its offset in pinned memory, and the logarithm of its size in the low 8 bits.
pub const fn ring_place(offset: u64, size_log2: u32) -> u64 {
    offset << 8 | size_log2 as u64
}

/// What a socket is, for the high bits of a position: type 4, domain 8, and whether it is connected from the beginning.
pub const fn kind_of(kind: u16, domain: u16, connected: bool) -> u64 {
    (kind as u64 & 15 | (domain as u64 & 255) << 4 | (connected as u64) << 15) << 48
}

/// A descriptor: the number by which kernels name a socket. Stale ones have another epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Below the number of sockets.
    pub index: u32,
    /// 15 bits, never 0.
    pub epoch: u32,
}

impl Descriptor {
    /// As a positive number.
    pub const fn number(self) -> i32 {
        (self.epoch << 16 | self.index) as i32
    }

    /// Of a number.
    pub const fn of(number: u32) -> Descriptor {
        Descriptor { index: number & 0xffff, epoch: number >> 16 & 0x7fff }
    }

    /// The epoch of the next socket in this place.
    pub const fn next_epoch(epoch: u32) -> u32 {
        if epoch >= 0x7fff { 1 } else { epoch + 1 }
    }
}

/// What a kernel gets as an argument: 64 bytes, by value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Handle {
    /// Address of the pinned memory, as kernels see it.
    pub pinned: u64,
    /// Address of the device memory.
    pub device: u64,
    /// [`Sizes::sockets`]
    pub sockets: u32,
    /// [`Sizes::mailboxes`]
    pub mailboxes: u32,
    /// Address of the window in which memory of connections to other devices is mapped, [`PEER_BYTES`] each; 0: there is none.
    pub peers: u64,
    /// Address of the rings of connections inside the net.
    pub rings: u64,
    /// The position at which streams begin.
    pub first: u64,
    /// Where the file buffers are: offset in pinned memory. 0: kernels may open no files.
    pub files: u64,
    /// [`Sizes::waits`]
    pub waits: u64,
}

const _: () = assert!(size_of::<Handle>() == 64);
