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

use spinio_ring::Word;
use spinio_ring::line::{EOF, ERR, FULL, Sent};
use spinio_sys::Errno;
use spinio_sys::linux::socket;

use super::Proxy;
use super::sockets::{STREAM, State};
use super::stream_io::StreamIo;

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
            State::Connected => return self.pump_streams(&[index], now),
            State::Upgraded => {
                self.look_at_anchor(index);
                self.notify(index);
            }
            State::Failed | State::Unconnected => self.notify(index),
        }
        false
    }

    /// The system calls of a stream that there are to make; `None`: none, or a word of the kernel was wrong.
    fn stream_io(&mut self, index: u32) -> Option<StreamIo> {
        let descriptor = self.sockets.descriptor(index);
        let socket = self.sockets.at(index)?;
        let (fd, rings) = (socket.raw_fd()?, socket.rings?);
        let receives = socket.closing.is_none() && socket.flags & (EOF | ERR) == 0;
        if receives && socket.credit(&self.memory, index).is_err() {
            self.violation(index);
            return None;
        }
        Some(StreamIo {
            socket: descriptor,
            fd,
            rings,
            send_ring: socket.send_ring,
            receive_ring: socket.receive_ring,
            turn: socket.transfers.ring_turn(&socket.send_ring) as usize,
            receives,
            readable: socket.readable,
            writable: socket.writable,
            flags: socket.flags,
            errno: socket.errno,
            faults: self.faults.split(),
            closer: socket.takes_rights.then(|| self.closer.clone()),
            sent: 0,
            received: 0,
            send_failed: None,
            line_changed: false,
        })
    }

    /// Makes the system calls of streams, with the help of I/O threads where there are many, and acts on what came of them;
    /// whether bytes moved.
    pub(super) fn pump_streams(&mut self, indices: &[u32], now: u64) -> bool {
        let mut ios = std::mem::take(&mut self.stream_ios);
        ios.extend(indices.iter().filter_map(|index| self.stream_io(*index)));
        let helped = self.io_threads.run(&mut ios);
        self.counters.helped.add(helped as u64);
        for io in &ios {
            self.take_back(io);
        }
        let mut moved = false;
        for io in ios.drain(..) {
            moved |= self.finish_stream(&io, now);
        }
        self.stream_ios = ios;
        moved
    }

    /// The send ring, as far as the network takes it.
    pub(super) fn send_all(&mut self, index: u32) {
        while let Some(mut io) = self.stream_io(index) {
            io.receives = false;
            io.run(&self.memory);
            self.take_back(&io);
            self.finish_sending(&io);
            if io.sent == 0 || !io.writable || io.send_ring.pending() == 0 {
                break;
            }
        }
    }

    /// The socket is as its system calls have left it.
    fn take_back(&mut self, io: &StreamIo) {
        let Some(socket) = self.sockets.get(io.socket) else { return };
        (socket.send_ring, socket.receive_ring) = (io.send_ring, io.receive_ring);
        (socket.readable, socket.writable) = (io.readable, io.writable);
        (socket.flags, socket.errno) = (io.flags, io.errno);
    }

    fn finish_stream(&mut self, io: &StreamIo, now: u64) -> bool {
        let index = io.socket.index;
        // None: the socket has ended since, as the other end of one that was finished before.
        if self.sockets.get(io.socket).is_none() {
            return false;
        }
        self.finish_sending(io);
        let moved = self.pump_transfers(index, now);
        self.finish_receiving(io, now);
        self.notify(index);
        self.finish_closing(index);
        moved || io.sent > 0 || io.received > 0
    }

    fn finish_sending(&mut self, io: &StreamIo) {
        let index = io.socket.index;
        self.counters.bytes_sent.add(io.sent as u64);
        let Some(socket) = self.sockets.at(index) else { return };
        if let Some(errno) = io.send_failed {
            self.fail_sending(index, errno);
        } else if socket.shut && socket.send_ring.pending() == 0 && socket.errno == 0 && socket.transfers.is_empty() {
            let _ = socket::shutdown(io.fd, 1);
            self.fail_sending(index, Errno::PIPE);
        } else if socket.writable && socket.transfers.ring_turn(&socket.send_ring) > 0 {
            self.heat(index);
        }
    }

    fn finish_receiving(&mut self, io: &StreamIo, now: u64) {
        let index = io.socket.index;
        self.counters.bytes_received.add(io.received as u64);
        if io.line_changed {
            self.pace.gave(now);
        }
        if !io.receives || io.flags & (EOF | ERR) != 0 {
            return;
        }
        if io.flags & FULL != 0 {
            self.postpone(index);
            if self.pace.is_busy(now) {
                self.heat(index);
            }
        } else if io.readable {
            self.heat(index);
        }
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
