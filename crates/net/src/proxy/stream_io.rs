//! The system calls of a stream socket in one pass: what an I/O thread does, or the proxy itself.
//!
//! ```text
//!   proxy        StreamIo of a socket: descriptor, rings, how far each may go
//!   any thread   send() until EAGAIN ──> line: sent up to here        recv() until EAGAIN or full ──> line: received up to here
//!   proxy        takes back how far it came and what failed: events, errors, what to do next (stream.rs)
//! ```
//!
//! It is a value: it has no part in the proxy's tables, and the proxy does nothing with the socket meanwhile. The lines are
//! stored where the calls are made, so that kernels need not wait for the rest of the pass.

use spinio_ring::Word;
use spinio_ring::layout::Descriptor;
use spinio_ring::line::{EOF, ERR, FULL};
use spinio_ring::stream::{ReceiveRing, SendRing};
use spinio_sys::Errno;
use spinio_sys::linux::Fd;
use spinio_sys::linux::rights::Rights;

use super::fault::Faults;
use super::sockets::RingPair;
use crate::memory::Memory;
use crate::socket_fd::Closer;

/// Bytes of a socket in a pass, in each direction.
const BYTES_A_PASS: usize = 256 << 10;

#[derive(Debug)]
pub(super) struct StreamIo {
    pub(super) socket: Descriptor,
    pub(super) fd: Fd,
    pub(super) rings: RingPair,
    pub(super) send_ring: SendRing,
    pub(super) receive_ring: ReceiveRing,
    /// Bytes of the send ring that may go now: not those after a file that has to go first.
    pub(super) turn: usize,
    pub(super) receives: bool,
    /// As in the socket, before and after.
    pub(super) readable: bool,
    pub(super) writable: bool,
    pub(super) flags: u64,
    pub(super) errno: u16,
    pub(super) faults: Faults,
    /// Of descriptors that come with its bytes, if some can.
    pub(super) closer: Option<Closer>,
    /// What came of it.
    pub(super) sent: usize,
    pub(super) received: usize,
    pub(super) send_failed: Option<Errno>,
    /// The line says something new of the receiving direction.
    pub(super) line_changed: bool,
}

impl StreamIo {
    pub(super) fn run(&mut self, memory: &Memory) {
        self.send(memory);
        // After another error than EPIPE the connection is gone.
        if self.receives && self.send_failed.is_none_or(|errno| errno == Errno::PIPE) {
            self.receive(memory);
        }
    }

    /// Send ring to network.
    fn send(&mut self, memory: &Memory) {
        let turn = self.turn.min(BYTES_A_PASS);
        while self.writable && self.sent < turn {
            let (at, len) = self.send_ring.next();
            let len = len.min(turn - self.sent);
            let send = |len| memory.send(self.fd, self.rings.send + at as u64, len);
            let Some(done) = self.faults.apply(len, send) else { break };
            match done {
                Ok(sent) => {
                    self.send_ring.advance(sent);
                    self.sent += sent;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.writable = false,
                Err(errno) => {
                    self.send_failed = Some(errno);
                    break;
                }
            }
        }
        if self.sent > 0 {
            self.store_sent(memory);
        }
    }

    /// Network to receive ring.
    fn receive(&mut self, memory: &Memory) {
        let before = self.flags;
        let mut stored = before;
        self.flags &= !FULL;
        while self.readable && self.received < BYTES_A_PASS {
            let (at, room) = self.receive_ring.room();
            if room == 0 {
                self.flags |= FULL;
                break;
            }
            let room = room.min(BYTES_A_PASS - self.received);
            let (fd, place, closer) = (self.fd, self.rings.receive + at as u64, self.closer.as_ref());
            let Some(done) = self.faults.apply(room, |len| receive(memory, fd, closer, place, len)) else { break };
            match done {
                Ok(0) => {
                    self.flags |= EOF;
                    break;
                }
                Ok(received) => {
                    self.receive_ring.advance(received);
                    self.received += received;
                    // A kernel takes these while the next ones are received.
                    self.store_received(memory);
                    stored = self.flags;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.readable = false,
                Err(errno) => {
                    self.errno = errno.raw_os_error() as u16;
                    self.flags |= ERR;
                    // The errno is there before the flag that refers to it.
                    self.store_sent(memory);
                    break;
                }
            }
        }
        if self.flags != stored {
            self.store_received(memory);
        }
        self.line_changed = self.received > 0 || self.flags != before;
    }

    fn store_received(&self, memory: &Memory) {
        memory.device_line(self.socket.index)[0].store_release(self.receive_ring.line(self.flags).word());
    }

    fn store_sent(&self, memory: &Memory) {
        memory.device_line(self.socket.index)[1].store_release(self.send_ring.line(self.errno).word());
    }
}

/// Receives bytes; descriptors that come with them are closed elsewhere.
fn receive(memory: &Memory, fd: Fd, closer: Option<&Closer>, at: u64, len: usize) -> Result<usize, Errno> {
    let Some(closer) = closer else { return memory.recv(fd, at, len) };
    let mut rights = Rights::default();
    let done = memory.recv_with_rights(fd, at, len, &mut rights);
    drop(closer.own_all(&mut rights));
    done
}
