//! Datagrams and packets (DGRAM, SEQPACKET): records in the rings, one system call each.
//!
//! ```text
//!   send ring: record ── sendmsg ──> network     result: position after the record, with its errno, in the line
//!   receive ring <── record ── recvmsg           no room: it stays with the Linux kernel, until there is some
//!                <── record with an errno        an error of the socket
//! ```
//!
//! A kernel waits for the result of each datagram, so it gets the errno that a program gets. The rings are twice as long as
//! those of streams, so that the longest datagram of UDP has room in rings of the default size; one that is too long even for
//! an empty ring is cut, as for a small buffer.
//!
//! Known flaws: a datagram that the Linux kernel has no room for (EAGAIN) is tried again each millisecond. If this thread
//! finds ECONNREFUSED before a kernel sends again, a recv returns it and not that send.

use std::sync::Arc;

use spinio_ring::datagram::{DONTWAIT, HEADER_BYTES, Header, LONGEST_UDP6};
use spinio_ring::layout::ADDRESS_BYTES;
use spinio_ring::line::{EOF, ERR, FULL, Sent};
use spinio_ring::mailbox::Address;
use spinio_ring::{Position, Word};
use spinio_sys::Errno;
use spinio_sys::linux::datagram;
use spinio_sys::linux::rights::Rights;
use spinio_sys::linux::socket::{self, SocketAddress, is_inet};

use super::Proxy;
use super::sockets::{SEQPACKET, Socket};
use crate::memory::Memory;
use crate::socket_fd::Closer;

/// Datagrams of a socket in a pass, in each direction.
const DATAGRAMS_A_PASS: usize = 32;

/// A ring of a socket in pinned memory.
#[derive(Clone, Copy)]
struct Ring<'a> {
    memory: &'a Memory,
    offset: u64,
    size: u64,
}

impl Ring<'_> {
    fn load<const N: usize>(self, position: Position) -> [u64; N] {
        std::array::from_fn(|i| self.word(position, i).load_acquire())
    }

    fn word(&self, position: Position, i: usize) -> &std::sync::atomic::AtomicU64 {
        self.memory.ring_word(self.offset + position.after(i as u64 * 8).place(self.size).0 as u64)
    }

    /// Two contiguous parts: offsets and lengths.
    fn parts(self, position: Position, len: usize) -> [(u64, usize); 2] {
        let (at, to_end) = position.place(self.size);
        let first = len.min(to_end);
        [(self.offset + at as u64, first), (self.offset, len - first)]
    }
}

impl Proxy {
    /// Both directions; whether datagrams moved.
    pub(super) fn pump_datagrams(&mut self, index: u32, now: u64) -> bool {
        let sent = self.send_datagrams(index, now);
        let received = self.receive_datagrams(index, now);
        sent || received
    }

    fn send_datagrams(&mut self, index: u32, now: u64) -> bool {
        let memory = Arc::clone(&self.memory);
        let mut moved = 0;
        for _ in 0..DATAGRAMS_A_PASS {
            let Some(socket) = self.sockets.at(index) else { break };
            let (Some(fd), Some(rings)) = (socket.raw_fd(), socket.rings) else { break };
            if socket.send_ring.pending() == 0 {
                break;
            }
            let ring = Ring { memory: &memory, offset: rings.send, size: socket.send_ring.size() };
            let at = socket.send_ring.sent();
            let Ok(header) = Header::check(ring.load(at), socket.send_ring.pending()) else {
                self.violation(index);
                break;
            };
            let (address, len) = address_of(ring, at, &header);
            let parts = ring.parts(at.after(HEADER_BYTES as u64), header.stored as usize);
            let errno = match memory.send_message(fd, parts, &address[..len]) {
                Ok(sent) => {
                    self.counters.bytes_sent.add(sent as u64);
                    0
                }
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) if header.flags & DONTWAIT == 0 => {
                    self.postpone(index);
                    break;
                }
                Err(errno) => errno.raw_os_error() as u16,
            };
            moved += 1;
            let Some(socket) = self.sockets.at(index) else { break };
            socket.send_ring.advance(header.record_bytes());
            // The end of the net or of the socket stays.
            let errno = if socket.flags & ERR != 0 { socket.errno } else { errno };
            let result = Sent { position: socket.send_ring.sent(), errno };
            memory.device_line(index)[1].store_release(result.word());
            self.pace.gave(now);
        }
        if let Some(socket) = self.sockets.at(index) {
            let left = socket.send_ring.pending() > 0;
            if !left && std::mem::take(&mut socket.shut) {
                let _ = socket.raw_fd().map(|fd| socket::shutdown(fd, 1));
            }
            if left && moved == DATAGRAMS_A_PASS {
                self.heat(index);
            }
        }
        moved > 0
    }

    fn receive_datagrams(&mut self, index: u32, now: u64) -> bool {
        let memory = Arc::clone(&self.memory);
        let Some(socket) = self.sockets.at(index) else { return false };
        if socket.closing.is_some() || socket.flags & (EOF | ERR) != 0 {
            return false;
        }
        if socket.credit(&memory, index).is_err() {
            self.violation(index);
            return false;
        }
        let (mut moved, mut bytes, before) = (0, 0, socket.flags);
        socket.flags &= !FULL;
        while socket.readable && moved < DATAGRAMS_A_PASS {
            match receive(socket, &memory, &self.closer) {
                Ok(Received::Datagram(len)) => {
                    moved += 1;
                    bytes += len;
                }
                Ok(Received::Full) => {
                    socket.flags |= FULL;
                    break;
                }
                Ok(Received::End) => {
                    socket.flags |= EOF;
                    break;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    socket.readable = false;
                    if socket.shut_receive {
                        socket.flags |= EOF;
                    }
                }
                Err(errno) => {
                    moved += 1;
                    let header = Header { errno: errno.raw_os_error() as u16, ..Header::default() };
                    put_header(socket, &memory, &header, &[]);
                }
            }
        }
        let (full, again) = (socket.flags & FULL != 0, socket.readable && socket.flags & (EOF | FULL) == 0);
        if moved > 0 || socket.flags != before {
            socket.store_received(&memory, index);
            self.pace.gave(now);
        }
        self.counters.bytes_received.add(bytes as u64);
        if full {
            self.postpone(index);
        } else if again {
            self.heat(index);
        }
        moved > 0
    }
}

enum Received {
    Datagram(usize),
    Full,
    End,
}

/// The next datagram, into the ring.
fn receive(socket: &mut Socket, memory: &Memory, closer: &Closer) -> Result<Received, Errno> {
    let (Some(fd), Some(rings)) = (socket.raw_fd(), socket.rings) else { return Ok(Received::Full) };
    let (size, unread) = (socket.receive_ring.size() as usize, socket.receive_ring.unread() as usize);
    let around = HEADER_BYTES + ADDRESS_BYTES + 16;
    let Some(room) = (size - unread).checked_sub(around) else { return Ok(Received::Full) };
    // Never half a datagram, unless it is too long for the ring.
    let fits_surely = unread == 0 || is_inet(socket.domain) && room >= LONGEST_UDP6;
    if !fits_surely && datagram::next_length(fd)? > room {
        return Ok(Received::Full);
    }
    let ring = Ring { memory, offset: rings.receive, size: size as u64 };
    let parts = ring.parts(socket.receive_ring.received().after(HEADER_BYTES as u64), room);
    let mut rights = socket.takes_rights.then(Rights::default);
    let received = memory.recv_message(fd, parts, rights.as_mut());
    drop(rights.and_then(|mut rights| closer.own_all(&mut rights)));
    let (len, address): (usize, SocketAddress) = received?;
    if len == 0 && socket.kind == SEQPACKET && datagram::is_at_end(fd) {
        return Ok(Received::End);
    }
    let (words, address_len) = words_of(address.bytes());
    let header = Header {
        stored: len.min(room) as u32,
        address_len: address_len as u8,
        address: if address_len <= 16 { [words[0], words[1]] } else { [0; 2] },
        len: len as u32,
        ..Header::default()
    };
    put_header(socket, memory, &header, &words);
    Ok(Received::Datagram(header.stored as usize))
}

/// Completes the record of which the payload is in the ring.
fn put_header(socket: &mut Socket, memory: &Memory, header: &Header, address: &[u64]) {
    let Some(rings) = socket.rings else { return };
    let size = socket.receive_ring.size();
    if size - socket.receive_ring.unread() < header.record_bytes() as u64 {
        return;
    }
    let (ring, at) = (Ring { memory, offset: rings.receive, size }, socket.receive_ring.received());
    for (i, word) in header.words().into_iter().enumerate() {
        ring.word(at, i).store_release(word);
    }
    let long = at.after(header.long_address_at() as u64);
    for (i, word) in address.iter().take(header.long_address_words()).enumerate() {
        ring.word(long, i).store_release(*word);
    }
    socket.receive_ring.advance(header.record_bytes());
}

/// The address of a record that a kernel wrote.
fn address_of(ring: Ring<'_>, at: Position, header: &Header) -> ([u8; ADDRESS_BYTES], usize) {
    let mut words = [0_u64; ADDRESS_BYTES / 8];
    words[..2].copy_from_slice(&header.address);
    let long = at.after(header.long_address_at() as u64);
    for (i, word) in words.iter_mut().enumerate().take(header.long_address_words()) {
        *word = ring.word(long, i).load_acquire();
    }
    Address::of_words(words, header.address_len).bytes()
}

fn words_of(address: &[u8]) -> ([u64; ADDRESS_BYTES / 8], usize) {
    let address = Address::new(address);
    (address.words(), address.bytes().1)
}
