//! Files that are sent to a socket: sendfile.
//!
//! ```text
//!   call ──> transfers of the socket ── bytes of the ring up to the call are sent ── the Linux kernel has room?
//!                                                                                          │ yes: a worker calls
//!   reply <── all sent, end of the file, error, deadline <── result: bytes <── sendfile(2) ┘ at most 4 MiB
//! ```
//!
//! The bytes go from the file to the socket inside the Linux kernel. A worker waits for the disk, never for the peer: the
//! descriptor of the socket does not block, and what it has no room for waits here for EPOLLOUT. So a slow peer takes no
//! worker, and a slow disk holds up no other socket.
//!
//! Order. What a kernel sent before goes first, and what it sends meanwhile waits until the transfer has ended. While a
//! worker has the descriptor, the proxy sends nothing on it; a worker of a call that was cancelled is waited for too.
//!
//! A call that is cancelled, since the socket is closed or the net is stopped, tells also what its worker was sending then.
//!
//! Known flaws: a deadline is looked at between two calls of a worker, so a disk that does not answer delays it. A call that is cancelled
//! waits for such a disk as long as the end of a net (`last_linger_ms`), and tells then what was sent before. So does one whose connection
//! is reset meanwhile, at once.

use spinio_ring::layout::Descriptor;
use spinio_ring::line::CONNECTING;
use spinio_ring::mailbox::{DONTWAIT, Reply, Request};
use spinio_ring::peer::MOVED;
use spinio_sys::Errno;
use spinio_sys::linux;

use super::Proxy;
use super::caller::Caller;
use super::fault::Fault;
use super::file_table::Outcome;
use super::sockets::{STREAM, State};
use super::transfers::{Cancelled, Ended, Sent, Transfer, Transfers, send};

/// Bytes of one call of a worker.
const BYTES_A_CALL: u64 = 4 << 20;

impl Proxy {
    pub(super) fn send_file(&mut self, request: &Request, caller: Caller, now: u64) {
        match self.add_transfer(request, caller, now) {
            Ok(index) => drop(self.pump(index, now)),
            Err((caller, result)) => self.answer(caller, Reply::with_numbers(result, [0])),
        }
    }

    /// Its socket; else the result at once.
    fn add_transfer(&mut self, request: &Request, caller: Caller, now: u64) -> Result<u32, (Caller, i32)> {
        let descriptor = Descriptor::of(request.descriptor);
        let [offset, size, timeout, ..] = request.address.words();
        let file = self.file(request.argument);
        let dontwait = request.flags & DONTWAIT != 0;
        let refused = match self.sockets.get(descriptor).filter(|socket| socket.closing.is_none()) {
            None => Errno::BADF,
            Some(socket) if socket.kind != STREAM => Errno::OPNOTSUPP,
            // Not errors: it is not connected yet, or its bytes do not come here any more, which the kernel learns so.
            Some(socket) if socket.errno == CONNECTING => Errno::AGAIN,
            Some(socket) if socket.errno == MOVED => return Err((caller, -i32::from(MOVED))),
            Some(socket) if socket.errno != 0 => Errno::from_raw_os_error(socket.errno.into()),
            Some(socket) if socket.state != State::Connected => Errno::NOTCONN,
            Some(socket) if socket.shut => Errno::PIPE,
            Some(_) if offset > i64::MAX as u64 => Errno::INVAL,
            Some(socket) => match file {
                None => Errno::BADF,
                Some(_) if size == 0 => return Err((caller, 0)),
                Some(_) if dontwait && !socket.transfers.is_empty() => {
                    socket.transfers.found_no_room = true;
                    Errno::AGAIN
                }
                Some(file) => {
                    let left = size.min(i64::MAX as u64 - offset);
                    let after = socket.send_ring.sent().after(socket.send_ring.pending());
                    let deadline = deadline(now, timeout);
                    let transfer = Transfer { caller, file, offset, left, sent: 0, after, dontwait, timeout, deadline };
                    socket.transfers.queue.push_back(transfer);
                    return Ok(descriptor.index);
                }
            },
        };
        Err((caller, -refused.raw_os_error()))
    }

    /// Goes on with the first transfer of a socket whose turn it is; whether it did.
    pub(super) fn pump_transfers(&mut self, index: u32, now: u64) -> bool {
        let Some(socket) = self.sockets.at(index) else { return false };
        let transfers = &mut socket.transfers;
        if transfers.working || transfers.queue.is_empty() {
            return false;
        }
        let late = transfers.queue.iter().position(|transfer| now >= transfer.deadline);
        if let Some(transfer) = late.and_then(|late| transfers.queue.remove(late)) {
            self.finish(transfer, Errno::AGAIN);
            self.heat(index);
            return true;
        }
        let ring_first = transfers.ring_turn(&socket.send_ring) > 0;
        let Some(transfer) = transfers.queue.front() else { return false };
        if ring_first || !socket.writable {
            if transfer.dontwait && !socket.writable {
                transfers.found_no_room = true;
                if let Some(transfer) = transfers.queue.pop_front() {
                    self.finish(transfer, Errno::AGAIN);
                }
                self.heat(index);
                return true;
            }
            self.postpone(index);
            return false;
        }
        let Some(fd) = socket.fd.clone() else { return false };
        let (file, offset, left) = (transfer.file.clone(), transfer.offset, transfer.left);
        let bytes = match self.faults.next() {
            Fault::None | Fault::Interrupted => left.min(BYTES_A_CALL),
            Fault::Short => 1,
            Fault::Late => {
                self.postpone(index);
                return false;
            }
        };
        // An event that comes while the worker sends tells of room that it may not have seen.
        (transfers.working, transfers.cancelled, socket.writable) = (true, None, false);
        let socket = self.sockets.descriptor(index);
        if let Some(files) = &mut self.files {
            files.submit(file.0.share_key(), None, move || {
                let (bytes, ended) = send(fd.0, &file, offset, bytes);
                Outcome::Sent(Sent { socket, bytes, ended })
            });
        }
        true
    }

    /// A worker has sent for a transfer.
    pub(super) fn take_sent(&mut self, sent: Sent, now: u64) {
        self.counters.bytes_sent.add(sent.bytes);
        let index = sent.socket.index;
        let Some(socket) = self.sockets.get(sent.socket) else { return };
        let transfers = &mut socket.transfers;
        transfers.working = false;
        socket.writable |= sent.ended != Ended::NoRoom;
        let cancelled = transfers.cancelled.take();
        let errno = match (cancelled, sent.ended) {
            (Some(cancelled), _) => cancelled.errno,
            (_, Ended::Failed(errno)) if socket.errno == 0 => errno,
            (_, Ended::Failed(_)) => Errno::from_raw_os_error(socket.errno.into()),
            _ => Errno::AGAIN,
        };
        if let Some(transfer) = transfers.queue.front_mut() {
            transfer.offset += sent.bytes;
            transfer.left -= sent.bytes;
            transfer.sent += sent.bytes;
            if sent.bytes > 0 {
                transfer.deadline = deadline(now, transfer.timeout);
            }
            if transfer.dontwait {
                transfers.found_no_room = sent.ended == Ended::NoRoom;
            }
            let over = match sent.ended {
                _ if cancelled.is_some() => true,
                Ended::Complete => transfer.left == 0,
                Ended::NoRoom => transfer.dontwait,
                Ended::EndOfFile | Ended::Failed(_) => true,
            };
            if over && let Some(transfer) = transfers.queue.pop_front() {
                let at_end = sent.ended == Ended::EndOfFile && cancelled.is_none();
                let errno = if at_end { None } else { Some(errno) };
                self.answer_transfer(transfer, errno);
            }
        }
        if let Ended::Failed(errno) = sent.ended
            && is_of_socket(errno)
        {
            self.fail_sending(index, errno);
        }
        self.pace.gave(now);
        self.heat(index);
    }

    /// The transfers of a socket that failed or ends. A worker of the first one may still send, which its result tells.
    pub(super) fn cancel_transfers(&mut self, index: u32, errno: Errno) {
        let Some(socket) = self.sockets.at(index) else { return };
        let transfers = &mut socket.transfers;
        let working = transfers.working && !transfers.queue.is_empty();
        if working && transfers.cancelled.is_none() {
            let until = linux::monotonic_ns().saturating_add(self.linger.ending);
            transfers.cancelled = Some(Cancelled { errno, until });
            self.cancelled.push(index);
        }
        for transfer in transfers.queue.split_off(working.into()) {
            self.finish(transfer, errno);
        }
    }

    /// Answers those that were cancelled, and whose workers say nothing.
    pub(super) fn end_cancelled(&mut self, now: u64) {
        for index in self.cancelled.take_all() {
            let Some(transfers) = self.sockets.at(index).map(|socket| &mut socket.transfers) else { continue };
            let Some(cancelled) = transfers.cancelled else { continue };
            if now < cancelled.until {
                self.cancelled.push(index);
            } else if let Some(transfer) = transfers.queue.pop_front() {
                self.finish(transfer, cancelled.errno);
            }
        }
    }

    /// Those of a socket that was removed, whose workers have no one to tell.
    pub(super) fn end_transfers(&mut self, transfers: Transfers) {
        let errno = transfers.cancelled.map_or(Errno::BADF, |cancelled| cancelled.errno);
        for transfer in transfers.queue {
            self.finish(transfer, errno);
        }
    }

    fn finish(&mut self, transfer: Transfer, errno: Errno) {
        self.answer_transfer(transfer, Some(errno));
    }

    /// What was sent comes before an error, as in the system call.
    fn answer_transfer(&mut self, transfer: Transfer, errno: Option<Errno>) {
        let result = match errno {
            Some(errno) if transfer.sent == 0 => -errno.raw_os_error(),
            _ => 0,
        };
        self.answer(transfer.caller, Reply::with_numbers(result, [transfer.sent]));
    }
}

fn deadline(now: u64, timeout: u64) -> u64 {
    if timeout == 0 { u64::MAX } else { now.saturating_add(timeout) }
}

/// Whether an error of sendfile tells of the socket, not of the file.
fn is_of_socket(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::PIPE
            | Errno::CONNRESET
            | Errno::CONNABORTED
            | Errno::NOTCONN
            | Errno::TIMEDOUT
            | Errno::HOSTUNREACH
            | Errno::HOSTDOWN
            | Errno::NETUNREACH
            | Errno::NETDOWN
            | Errno::NETRESET
    )
}
