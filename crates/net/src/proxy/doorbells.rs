//! The doorbells of kernels: a queue that all of them write, and the proxy reads.
//!
//! ```text
//!   pass: up to 64 in order ──> a call, a close, bytes to send, room, events ──> sockets with something to do
//!         none in order, each 100 ms ──> those after entries that were claimed and not written
//!         blocked for a second, full because of these ──> the net is broken
//! ```
//!
//! A doorbell that a kernel claims and never writes (it was killed in between) holds up no other one. Once the queue is full
//! because of it, the net is broken: all calls fail with EPROTO or ESHUTDOWN.
//!
//! Known flaw: 4096 doorbells that are claimed and never written, and none after them, look like silence: calls wait until the
//! net is stopped.

use std::sync::Arc;

use spinio_ring::Position;
use spinio_ring::doorbell::{Entry, Op};
use spinio_ring::layout::{DOORBELLS, Descriptor, header};
use spinio_ring::mailbox::{Call, Request};
use spinio_sys::Errno;

use super::Proxy;
use super::caller::Caller;
use super::sockets::State;

/// Doorbells of a pass.
const DOORBELLS_A_PASS: usize = 64;
/// Between two looks at the whole doorbell queue.
const SEARCH_NS: u64 = 100_000_000;
/// How long a doorbell that is claimed and not written may block the queue.
const BLOCKED_NS: u64 = 1_000_000_000;

impl Proxy {
    /// Takes the doorbells of a pass; whether there were any.
    pub(super) fn take_doorbells(&mut self, now: u64) -> bool {
        let memory = Arc::clone(&self.memory);
        let mut taken = 0;
        while taken < DOORBELLS_A_PASS
            && let Some(entry) = self.doorbells.pop(memory.doorbells())
        {
            taken += 1;
            self.take_doorbell(entry, now);
        }
        if taken == 0 && now.saturating_sub(self.last_search) > SEARCH_NS {
            self.last_search = now;
            taken += self.search_doorbells(now);
        }
        self.free_doorbells(taken, now);
        taken > 0
    }

    /// What kernels have rung until now, also after entries that others have not written yet.
    pub(super) fn take_all_doorbells(&mut self, now: u64) {
        for _ in 0..DOORBELLS.div_ceil(DOORBELLS_A_PASS) {
            if !self.take_doorbells(now) {
                break;
            }
        }
        let taken = self.search_doorbells(now);
        self.free_doorbells(taken, now);
    }

    /// The places of doorbells that were taken are free.
    fn free_doorbells(&mut self, taken: usize, now: u64) {
        if taken > 0 {
            self.doorbells.publish(&self.memory.header()[header::DOORBELL_HEAD]);
            self.counters.doorbells.add(taken as u64);
            self.pace.heard(now);
        }
    }

    /// Takes doorbells after ones that were claimed and not written, and looks whether these block the queue.
    fn search_doorbells(&mut self, now: u64) -> usize {
        let memory = Arc::clone(&self.memory);
        let mut taken = 0;
        while taken < DOORBELLS_A_PASS
            && let Some(entry) = self.doorbells.search(memory.doorbells())
        {
            taken += 1;
            self.take_doorbell(entry, now);
        }
        if !self.doorbells.is_blocked() {
            self.blocked = None;
        } else if now.saturating_sub(*self.blocked.get_or_insert(now)) > BLOCKED_NS {
            self.counters.violations.add(if self.stopped { 0 } else { self.doorbells.holes() as u64 });
            // The queue stays full, so that every later call finds that the net is stopped.
            self.end_calls(Errno::PROTO);
        }
        taken
    }

    fn take_doorbell(&mut self, entry: Entry, now: u64) {
        let descriptor = Descriptor { index: entry.socket, epoch: entry.epoch };
        match entry.op {
            Ok(Op::Control) => self.take_request(entry.socket, entry.position, now),
            Ok(Op::Close) => {
                // The doorbells of what other groups have sent before may be seen later: this one says how far they go.
                self.sent_up_to(descriptor, entry.position);
                self.close(descriptor, now);
            }
            Ok(Op::Credit) => self.heat(descriptor.index),
            Ok(Op::Rearm) => self.rearm(descriptor, entry.position),
            Ok(Op::Armed) => self.look_if_armed(descriptor, entry.position),
            Ok(Op::Ready) => self.ready(descriptor, entry.position),
            Ok(Op::Send) => self.sent_up_to(descriptor, entry.position),
            Err(_) => self.counters.violations.add(1),
        }
    }

    /// A kernel has sent bytes up to here. After a close that said so already, this says nothing new.
    fn sent_up_to(&mut self, descriptor: Descriptor, position: Position) {
        let Some(socket) = self.sockets.get(descriptor) else { return };
        if socket.state != State::Connected || socket.closing.is_some() {
            return;
        }
        match socket.send_ring.extend(position) {
            Ok(()) => self.heat(descriptor.index),
            Err(_) => self.violation(descriptor.index),
        }
    }

    /// The request of a mailbox. One to shut a direction down, or to send a file, comes with how far was sent, as a close does.
    /// `sent`: as [`Op::Control`] says.
    fn take_request(&mut self, mailbox: u32, sent: Position, now: u64) {
        let Some(waiting) = self.waiting.get_mut(mailbox as usize) else {
            return self.counters.violations.add(1);
        };
        if std::mem::replace(waiting, true) {
            // A second request before the answer to the first one.
            return self.counters.violations.add(1);
        }
        let mut request = Request::load(self.memory.mailbox(mailbox).0);
        let shuts = request.call == Ok(Call::Shutdown) && matches!(request.argument, 1 | 2);
        if shuts || request.call == Ok(Call::SendFile) {
            self.sent_up_to(Descriptor::of(request.descriptor), sent);
        }
        if request.call == Ok(Call::Connect) {
            request.time_limit = sent.bits().saturating_mul(1000);
        }
        self.call(
            request,
            Caller::Mailbox { mailbox, number: request.number, block: request.argument, since: now },
            now,
        );
    }
}
