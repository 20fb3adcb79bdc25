//! Sockets of CPU programs that talk to kernels of this machine: through memory that both map, or as any socket.
//!
//! ```text
//!   connect ── the listening socket has a door ── ANNOUNCE ... GO (spinio_ring::granule) ──> shared: bytes through a granule
//!          └── none, another user, no memory, a setting, too late ─────────────────────────> kernel: bytes through Linux
//!   send: room ── bytes ── tail ── the watch wants it? RING        recv: tail ── bytes ── consumed ── RING
//! ```
//!
//! The results of calls are those of the TCP or UNIX connection, which stays as anchor. A call that waits looks at the other
//! end's word for 50 us (not on machines with less than 8 processors), and then sleeps, up to 1 ms, in a wait for the anchor,
//! which ends with the net or its process. [`poll`] looks at several.
//!
//! The memory is not passed on by fork: a child has the socket no more. [`span`]: bytes in place.
//!
//! Known flaws: one thread receives and one sends at a time. A GPU cannot wake a thread, so after a pause a call is up to 1 ms late.

#![expect(unsafe_code, reason = "memory that GPU kernels access at the same time, and that of callers")]

mod anchor;
mod connect;
mod deadline;
mod direction;
mod flags;
mod plain;
pub(crate) mod poll;
mod span;

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::SeqCst};

use spinio_ring::event::{ENDED, FAILED, IN, OUT};
use spinio_ring::granule::{self, END_WORDS, wants};
use spinio_ring::peer::{CLOSED, CONSUMED, Mark, RESET, SHUT, TAIL};
use spinio_ring::{Position, Word};
use spinio_sys::linux::channel::{self, Until};
use spinio_sys::linux::{self, Fd, socket};
use spinio_sys::{Errno, injection_point};

use crate::handshake::{self, Announced, Memory};
use crate::socket_fd::SocketFd;
use crate::{Error, NetAddress, Result};

use self::anchor::{Anchor, Failure};
use self::connect::connect;
use self::deadline::{deadline, left};
use self::direction::Direction;
use self::flags::{MSG_DONTWAIT, MSG_PEEK, MSG_WAITALL};
use self::plain::KeptError;

const STREAM: u16 = 1;
const SPIN_NS: u64 = 50_000;
const FIRST_SLEEP_NS: u64 = 20_000;
const LONGEST_SLEEP_NS: u64 = 1_000_000;
const MANY_PROCESSORS: usize = 8;
/// Between two looks at the anchor by calls that need not wait.
const ANCHOR_NS: u64 = 1_000_000;

const SHUT_RECEIVE: u8 = 1;
const SHUT_SEND: u8 = 2;
const TOLD_CLOSED: u8 = 4;

/// What a socket is made for; 0 is the default.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketOptions {
    /// It goes through Linux.
    pub no_upgrade: bool,
    /// How long `recv` waits before EAGAIN; 0: without a limit.
    pub receive_timeout_ms: u32,
    /// The same for `send`; and how long `connect` waits for the connection, before EINPROGRESS (TCP) or EAGAIN (UNIX).
    pub send_timeout_ms: u32,
}

/// A connected stream socket.
pub struct Socket {
    anchor: SocketFd,
    reason: &'static str,
    shared: Option<Shared>,
    receives: Direction,
    sends: Direction,
    is_unix: bool,
    timeouts: [u64; 2],
    /// Of one that shares no memory.
    kept: KeptError,
    pid: u32,
}

struct Shared {
    memory: Memory,
    /// [`SHUT_RECEIVE`] ...
    shut: AtomicU8,
    anchor_seen: AtomicU64,
    failure: Failure,
    may_spin: bool,
}

impl Socket {
    /// Connects to a listening socket, of a net or of any program.
    pub fn connect(address: &NetAddress, options: SocketOptions) -> Result<Socket> {
        let what = |errno| Error::of(errno, &format!("connect to {address}"));
        let anchor = SocketFd(socket::new_socket(address.family(), STREAM).map_err(what)?);
        let announced =
            if options.no_upgrade { Err("no_upgrade of the options") } else { handshake::announce(anchor.0, address) };
        let timeouts = [options.receive_timeout_ms, options.send_timeout_ms].map(|ms| u64::from(ms) * 1_000_000);
        connect(anchor.0, address, deadline(timeouts[1])).map_err(what)?;
        injection_point!("program: connected");
        if socket::is_inet(address.family()) {
            let _ = socket::no_delay(anchor.0);
        }
        channel::set_timeouts(anchor.0, timeouts).map_err(what)?;
        let (shared, reason) = match announced.and_then(Announced::agree) {
            Ok(memory) => (Some(Shared::new(memory)), "a net of this user on this machine listens there"),
            Err(reason) => (None, reason),
        };
        let is_unix = address.family() == socket::AF_UNIX;
        let first = shared.as_ref().map_or(Position::of(0), |shared| shared.memory.first);
        let (receives, sends) = (Direction::new(first), Direction::new(first));
        let kept = KeptError::default();
        Ok(Socket { anchor, reason, shared, receives, sends, is_unix, timeouts, kept, pid: linux::getpid() })
    }

    /// How bytes travel, "shared" or "kernel", and why.
    pub fn transport(&self) -> (&'static str, &'static str) {
        (if self.shared.is_some() { "shared" } else { "kernel" }, self.reason)
    }

    /// The descriptor of the TCP or UNIX connection, for names and options.
    pub fn anchor(&self) -> Fd {
        self.anchor.0
    }

    fn check(&self) -> core::result::Result<(), Errno> {
        if linux::getpid() == self.pid { Ok(()) } else { Err(Errno::NODEV) }
    }

    /// Receives: bytes, 0 at the end of the stream. Flags: MSG_DONTWAIT, MSG_WAITALL, MSG_PEEK.
    ///
    /// # Safety
    /// The range must be writable.
    pub unsafe fn recv(&self, to: *mut u8, len: usize, flags: u32) -> core::result::Result<usize, Errno> {
        if flags & !(MSG_DONTWAIT | MSG_WAITALL | MSG_PEEK) != 0 {
            return Err(Errno::INVAL);
        }
        self.check()?;
        let mut side = self.receives.lock(flags & MSG_DONTWAIT == 0)?;
        let deadline = deadline(self.timeouts[0]);
        let Some(shared) = &self.shared else {
            // SAFETY: guaranteed by the caller.
            return unsafe { plain::receive(self.anchor.0, &self.kept, to, len, flags, deadline) };
        };
        let consumed = &mut side.position;
        let (mut done, mut result) = (0, Ok(0));
        while done < len {
            result = self.wait_for_bytes(shared, *consumed, flags, deadline);
            let Ok(there @ 1..) = result else { break };
            let take = there.min(len - done);
            // SAFETY: the range is the caller's, and the bytes are in the ring until `consumed` says otherwise.
            unsafe { shared.memory.copy_out(*consumed, to.add(done), take) };
            done += take;
            if flags & MSG_PEEK != 0 {
                break;
            }
            *consumed = consumed.after(take as u64);
            self.publish_consumed(shared, *consumed);
            if there - take <= shared.memory.size() as usize / 2 {
                self.tell(shared, OUT);
            }
            if flags & MSG_WAITALL == 0 {
                break;
            }
        }
        if done > 0 { Ok(done) } else { result }
    }

    /// Sends; fewer bytes than `len` only if MSG_DONTWAIT or the timeout found no room for more, or before an error.
    ///
    /// # Safety
    /// The range must be readable.
    pub unsafe fn send(&self, from: *const u8, len: usize, flags: u32) -> core::result::Result<usize, Errno> {
        if flags & !MSG_DONTWAIT != 0 {
            return Err(Errno::INVAL);
        }
        self.check()?;
        let mut side = self.sends.lock(flags & MSG_DONTWAIT == 0)?;
        let deadline = deadline(self.timeouts[1]);
        let Some(shared) = &self.shared else {
            // SAFETY: guaranteed by the caller.
            return unsafe { plain::send(self.anchor.0, &self.kept, from, len, flags, deadline) };
        };
        let tail = &mut side.position;
        let (mut done, mut failed) = (0, Errno::AGAIN);
        while done < len {
            match self.wait_for_room(shared, *tail, flags, deadline) {
                // What is sent goes nowhere.
                Ok(None) => return Ok(len),
                Ok(Some(room)) => {
                    // Half a ring at most, so that the kernel takes one half while this thread writes the other one.
                    let take = room.min(len - done).min(shared.memory.size() as usize / 2);
                    // SAFETY: the range is the caller's, and the kernel reads no byte after `tail`.
                    unsafe { shared.memory.copy_in(*tail, from.add(done), take) };
                    *tail = tail.after(take as u64);
                    shared.memory.words()[TAIL].store_release(shared.mark(*tail, 0));
                    self.tell(shared, IN);
                    done += take;
                }
                Err(errno) => {
                    failed = errno;
                    break;
                }
            }
        }
        if done == len || done > 0 { Ok(done) } else { Err(failed) }
    }

    /// 0: receives no more; 1: sends no more; 2: both.
    pub fn shutdown(&self, how: u32) -> core::result::Result<(), Errno> {
        if how > 2 {
            return Err(Errno::INVAL);
        }
        self.check()?;
        let Some(shared) = &self.shared else { return socket::shutdown(self.anchor.0, how) };
        if how != 1 {
            // A call that waits sees it, and gives the lock back.
            shared.shut.fetch_or(SHUT_RECEIVE, SeqCst);
            let side = self.receives.lock(true)?;
            self.publish_consumed(shared, side.position);
            self.tell(shared, OUT);
        }
        if how != 0 {
            shared.shut.fetch_or(SHUT_SEND, SeqCst);
            let side = self.sends.lock(true)?;
            shared.memory.words()[TAIL].store_release(shared.mark(side.position, CLOSED));
            self.tell(shared, ENDED);
        }
        Ok(())
    }

    fn publish_consumed(&self, shared: &Shared, consumed: Position) {
        let flags = if shared.has(SHUT_RECEIVE) { SHUT } else { 0 };
        shared.memory.words()[CONSUMED].store_release(shared.mark(consumed, flags));
    }

    /// Events have become true for the kernel's socket: its proxy wants to be told?
    fn tell(&self, shared: &Shared, events: u16) {
        if wants(shared.memory.words(), events) {
            shared.memory.ring();
        }
    }

    /// Bytes that can be received, or 0 at the end.
    fn wait_for_bytes(
        &self,
        shared: &Shared,
        consumed: Position,
        flags: u32,
        deadline: Option<u64>,
    ) -> core::result::Result<usize, Errno> {
        let mut pause = Pause::new(shared, deadline);
        loop {
            let tail = shared.theirs(TAIL);
            let there = tail.position.since(consumed);
            if there > shared.memory.size() {
                return Err(Errno::PROTO);
            }
            if there > 0 {
                return Ok(there as usize);
            }
            if tail.flags & CLOSED != 0 {
                return if tail.flags & RESET != 0 { Err(Errno::CONNRESET) } else { Ok(0) };
            }
            match pause.anchor {
                Anchor::Connected => {}
                Anchor::Ended => return Ok(0),
                Anchor::Failed(errno) => return Err(errno),
            }
            if shared.has(SHUT_RECEIVE) {
                return Ok(0);
            }
            pause.again(shared, self.anchor.0, flags)?;
        }
    }

    /// Room in the ring; None: the kernel has closed, and what is sent goes nowhere.
    fn wait_for_room(
        &self,
        shared: &Shared,
        tail: Position,
        flags: u32,
        deadline: Option<u64>,
    ) -> core::result::Result<Option<usize>, Errno> {
        let mut pause = Pause::new(shared, deadline);
        let now = linux::monotonic_ns();
        if now.saturating_sub(shared.anchor_seen.load(SeqCst)) > ANCHOR_NS {
            shared.anchor_seen.store(now, SeqCst);
            pause.anchor = shared.failure.look(self.anchor.0);
        }
        loop {
            if shared.has(SHUT_SEND) {
                return Err(Errno::PIPE);
            }
            let consumed = shared.theirs(CONSUMED);
            if consumed.flags & CLOSED != 0 {
                if shared.theirs(TAIL).flags & RESET != 0 {
                    return Err(Errno::CONNRESET);
                }
                // TCP learns it from the answer to the first bytes that come too late.
                if self.is_unix || shared.shut.fetch_or(TOLD_CLOSED, SeqCst) & TOLD_CLOSED != 0 {
                    return Err(Errno::PIPE);
                }
                return Ok(None);
            }
            if self.is_unix && consumed.flags & SHUT != 0 {
                return Err(Errno::PIPE);
            }
            let used = tail.since(consumed.position);
            if used > shared.memory.size() {
                return Err(Errno::PROTO);
            }
            match pause.anchor {
                Anchor::Connected => {}
                Anchor::Ended => return Err(Errno::PIPE),
                Anchor::Failed(errno) => return Err(errno),
            }
            if used < shared.memory.size() {
                return Ok(Some((shared.memory.size() - used) as usize));
            }
            pause.again(shared, self.anchor.0, flags)?;
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let Some(shared) = &self.shared else { return };
        if linux::getpid() != self.pid {
            return;
        }
        let (consumed, tail) = (self.receives.lock_beside_span().position, self.sends.lock_beside_span().position);
        let unread = shared.theirs(TAIL).position != consumed;
        // As Linux does: its peer learns that not all was read.
        let reset = if unread { RESET } else { 0 };
        let shut = if shared.has(SHUT_RECEIVE) { SHUT } else { 0 };
        let words = shared.memory.words();
        words[TAIL].store_release(shared.mark(tail, CLOSED | reset));
        words[CONSUMED].store_release(shared.mark(consumed, CLOSED | shut));
        self.tell(shared, FAILED);
        shared.memory.leave();
    }
}

impl Shared {
    fn new(memory: Memory) -> Shared {
        Shared {
            memory,
            shut: AtomicU8::new(0),
            anchor_seen: AtomicU64::new(0),
            failure: Failure::default(),
            may_spin: linux::available_cpus() >= MANY_PROCESSORS,
        }
    }

    fn has(&self, flag: u8) -> bool {
        self.shut.load(SeqCst) & flag != 0
    }

    fn mark(&self, position: Position, flags: u64) -> u64 {
        Mark { position, generation: self.memory.generation, flags }.word()
    }

    /// A word of the kernel's end, loaded once.
    fn theirs(&self, word: usize) -> Mark {
        let word = self.memory.words()[END_WORDS + word].load_acquire();
        Mark::now(word, self.memory.generation, self.memory.first)
    }
}

/// The wait of a call.
struct Pause {
    anchor: Anchor,
    deadline: Option<u64>,
    spin_until: u64,
    sleep: u64,
}

impl Pause {
    fn new(shared: &Shared, deadline: Option<u64>) -> Pause {
        Pause {
            anchor: shared.failure.known(),
            deadline,
            spin_until: if shared.may_spin { linux::monotonic_ns() + SPIN_NS } else { 0 },
            sleep: FIRST_SLEEP_NS,
        }
    }

    /// After a look in vain: another one, or EAGAIN.
    fn again(&mut self, shared: &Shared, anchor: Fd, flags: u32) -> core::result::Result<(), Errno> {
        if flags & MSG_DONTWAIT != 0 {
            self.anchor = shared.failure.look(anchor);
            return if matches!(self.anchor, Anchor::Connected) { Err(Errno::AGAIN) } else { Ok(()) };
        }
        if self.spin_until > 0 {
            for _ in 0..32 {
                core::hint::spin_loop();
            }
            if linux::monotonic_ns() > self.spin_until {
                self.spin_until = 0;
            }
            return Ok(());
        }
        let left = left(self.deadline).unwrap_or(u64::MAX);
        if left == 0 {
            return Err(Errno::AGAIN);
        }
        if channel::wait_socket(anchor, Until::Readable, Some(self.sleep.min(left)))? {
            self.anchor = shared.failure.look(anchor);
        }
        self.sleep = (self.sleep * 2).min(LONGEST_SLEEP_NS);
        Ok(())
    }
}

const _: () = assert!(granule::WORDS * 8 <= linux::PAGE);
