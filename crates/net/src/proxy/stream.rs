//! Bytes of one socket: from its send ring to the network, from the network to its receive ring, and its errors.
//!
//! ```text
//!   send ring ── send() ──> network       EAGAIN: until EPOLLOUT        error: errno of the line, for later sends
//!   receive ring <── recv() ── network    EAGAIN: until EPOLLIN         0: EOF      error: ERR, after what has arrived
//!                └ full: FULL, until a credit doorbell, or until the next tick finds room
//! ```
//!
//! A credit doorbell is a hint: a kernel that did not see FULL yet rings none. So full rings are looked at in each pass
//! while the proxy is busy, and then at each tick.

use std::sync::Arc;

use spinio_ring::Word;
use spinio_ring::line::{EOF, ERR, FULL, Sent};
use spinio_sys::Errno;
use spinio_sys::linux::socket;

use super::Proxy;
use super::fault::Fault;
use super::sockets::{STREAM, State};

/// Bytes of a socket in a pass, in each direction.
const BYTES_A_PASS: usize = 256 << 10;

impl Proxy {
    /// Does what there is to do for a socket; whether bytes moved.
    pub(super) fn pump(&mut self, index: u32, now: u64) -> bool {
        let Some(socket) = self.sockets.at(index) else { return false };
        match socket.state {
            State::Unconnected if socket.connect.is_some() => self.connect_again(index, now),
            State::Connecting => self.finish_connect(index, now),
            State::Listening => {
                self.accept_announced(index);
                self.accept_all(index, now);
            }
            State::Connected if socket.kind != STREAM => {
                let moved = self.pump_datagrams(index, now);
                self.notify(index);
                self.finish_closing(index);
                return moved;
            }
            State::Connected => {
                let sent = self.pump_send_ring(index) | self.pump_transfers(index, now);
                let received = self.pump_receive_ring(index, now);
                self.notify(index);
                self.finish_closing(index);
                return sent || received;
            }
            State::Upgraded => {
                self.look_at_anchor(index);
                self.notify(index);
            }
            State::Failed | State::Unconnected => self.notify(index),
        }
        false
    }

    /// Send ring to network.
    pub(super) fn pump_send_ring(&mut self, index: u32) -> bool {
        let memory = Arc::clone(&self.memory);
        let Some(socket) = self.sockets.at(index) else { return false };
        let (Some(fd), Some(rings)) = (socket.raw_fd(), socket.rings) else { return false };
        let (mut moved, mut failed) = (0, None);
        while socket.writable && moved < BYTES_A_PASS {
            let (at, len) = socket.send_ring.next();
            let len = len.min(socket.transfers.ring_turn(&socket.send_ring) as usize);
            if len == 0 {
                break;
            }
            let len = len.min(BYTES_A_PASS - moved);
            let done = match self.faults.next() {
                Fault::None => memory.send(fd, rings.send + at as u64, len),
                Fault::Short => memory.send(fd, rings.send + at as u64, 1),
                Fault::Interrupted => Err(Errno::INTR),
                Fault::Late => break,
            };
            match done {
                Ok(sent) => {
                    socket.send_ring.advance(sent);
                    moved += sent;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => socket.writable = false,
                Err(errno) => {
                    failed = Some(errno);
                    break;
                }
            }
        }
        if moved > 0 {
            socket.store_sent(&memory, index);
            self.counters.bytes_sent.add(moved as u64);
        }
        if let Some(errno) = failed {
            self.fail_sending(index, errno);
        } else if socket.shut && socket.send_ring.pending() == 0 && socket.errno == 0 && socket.transfers.is_empty() {
            let _ = socket::shutdown(fd, 1);
            self.fail_sending(index, Errno::PIPE);
        } else if socket.writable && socket.transfers.ring_turn(&socket.send_ring) > 0 {
            self.heat(index);
        }
        moved > 0
    }

    /// Network to receive ring.
    fn pump_receive_ring(&mut self, index: u32, now: u64) -> bool {
        let memory = Arc::clone(&self.memory);
        let Some(socket) = self.sockets.at(index) else { return false };
        let (Some(fd), Some(rings)) = (socket.raw_fd(), socket.rings) else { return false };
        if socket.closing.is_some() || socket.flags & (EOF | ERR) != 0 {
            return false;
        }
        if socket.credit(&memory, index).is_err() {
            self.violation(index);
            return false;
        }
        let (mut moved, before) = (0, socket.flags);
        socket.flags &= !FULL;
        while socket.readable && moved < BYTES_A_PASS {
            let (at, room) = socket.receive_ring.room();
            if room == 0 {
                socket.flags |= FULL;
                break;
            }
            let room = room.min(BYTES_A_PASS - moved);
            let done = match self.faults.next() {
                Fault::None => memory.recv(fd, rings.receive + at as u64, room),
                Fault::Short => memory.recv(fd, rings.receive + at as u64, 1),
                Fault::Interrupted => Err(Errno::INTR),
                Fault::Late => break,
            };
            match done {
                Ok(0) => {
                    socket.flags |= EOF;
                    break;
                }
                Ok(received) => {
                    socket.receive_ring.advance(received);
                    moved += received;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => socket.readable = false,
                Err(errno) => {
                    socket.errno = errno.raw_os_error() as u16;
                    socket.flags |= ERR;
                    break;
                }
            }
        }
        let (flags, full) = (socket.flags, socket.flags & FULL != 0);
        let again = socket.readable && flags & (EOF | ERR | FULL) == 0;
        if flags & ERR != 0 {
            // The errno is there before the flag that refers to it.
            socket.store_sent(&memory, index);
        }
        if moved > 0 || flags != before {
            socket.store_received(&memory, index);
            self.pace.gave(now);
        }
        self.counters.bytes_received.add(moved as u64);
        if full {
            self.postpone(index);
            if self.pace.is_busy(now) {
                self.heat(index);
            }
        } else if again {
            self.heat(index);
        }
        moved > 0
    }

    /// Later sends fail; what is in the ring has nowhere to go.
    pub(super) fn fail_sending(&mut self, index: u32, errno: Errno) {
        let Some(socket) = self.sockets.at(index) else { return };
        let left = socket.send_ring.pending();
        socket.send_ring.advance(left as usize);
        if socket.flags & ERR == 0 {
            // Else the connection has failed before, and bytes that a kernel sent meanwhile get EPIPE: recv never returns that.
            socket.errno = errno.raw_os_error() as u16;
        }
        if errno != Errno::PIPE {
            // The connection is gone, not just this direction: the error that tells so is reported only once.
            socket.flags |= ERR;
        }
        // The position stays, so that the kernel runs out of room and looks at the errno.
        let sent = &self.memory.device_line(index)[1];
        sent.store_release(Sent { errno: socket.errno, ..Sent::of(sent.load_acquire()) }.word());
        socket.store_received(&self.memory, index);
        self.cancel_transfers(index, errno);
    }

    /// Sets or clears the error of both directions.
    pub(super) fn set_error(&mut self, index: u32, errno: u16) {
        let Some(socket) = self.sockets.at(index) else { return };
        socket.errno = errno;
        socket.flags = if errno == 0 { socket.flags & !ERR } else { socket.flags | ERR };
        // The flag refers to the errno, which is there as long as the flag is.
        if errno != 0 {
            socket.store_sent(&self.memory, index);
        }
        socket.store_received(&self.memory, index);
        if errno == 0 {
            socket.store_sent(&self.memory, index);
        }
    }
}
