//! Connections over shared memory: what the proxy of the net that accepts does for them, and what both sides do once bytes go
//! through it. [`spinio_ring::granule`] has the steps and the packets, announced.rs the connecting side of another net.
//!
//! ```text
//!   door of a listening socket ── a program of this user ──> channel: Greeting ── ANNOUNCE ──> Announced
//!   a connection from that name is accepted ── OFFER, granule ──> Offered ── AGREED ──> GO, Running ── the program closes it
//!      held in the backlog until then, undecided              └ too late, or the end: the connection stays with Linux
//!   Running: RING ──> the socket's events        end of the TCP or UNIX connection ──> last words of the program
//! ```
//!
//! A program, or the kernel of another net, has the part that a kernel has at the other end of a connection inside the net, so kernels and loopback.rs do
//! the rest. The channel stays until the program has closed its socket: only then, and once the kernel has closed its own, is
//! the granule used again, by the same process, or by another one after that has ended. A process that ends without a word
//! (kill -9) leaves its socket to Linux, which closes it: then the proxy writes what a close would have written.
//!
//! Known flaws: the proxy cannot see whether a process has passed a granule on to one that outlives it (fork, SCM_RIGHTS), which
//! then sees the bytes of a later connection of the same user. A process that polls its own granules can make the proxy look
//! often, but not longer.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use spinio_ring::Word;
use spinio_ring::granule::{self, Look, PACKET_BYTES, Packet, Refusal, watch_for};
use spinio_ring::layout::Descriptor;
use spinio_ring::peer::{CONSUMED, Place, TAIL, next_generation};
use spinio_sys::Errno;
use spinio_sys::linux::channel::{self, ProcessFd, receive_packet, send_packet};
use spinio_sys::linux::socket::{self, AF_UNIX, EPOLLET, EPOLLIN, EPOLLRDHUP, SocketAddress};
use spinio_sys::linux::{self, Fd};

use super::Proxy;
use super::channels::{ANNOUNCED, Channel, DOOR, Door, Stage, TAG};
use super::sockets::State;
use crate::NetAddress;
use crate::door::{self, PATIENCE_NS};
use crate::mapped_granule::MappedGranule;
use crate::meet::Held;
use crate::memory::Memory;
use crate::socket_fd::SocketFd;

/// Channels at a time.
const MOST_CHANNELS: usize = 1024;
/// Packets of a channel in a pass.
const PACKETS_A_PASS: usize = 16;
const SEQPACKET: u16 = 5;

impl Proxy {
    /// Opens the door of a listening socket. If another socket has it, programs stay with Linux.
    pub(super) fn open_door(&mut self, index: u32, name: &[u8]) {
        let listener = Descriptor { index, epoch: self.sockets.epoch(index) };
        if self.shared.granules.is_empty() || self.shared.doors.iter().any(|door| door.listener == listener) {
            return;
        }
        let Ok(fd) = socket::new_socket(AF_UNIX, SEQPACKET).map(SocketFd) else { return };
        let name = door::name(&NetAddress::of(name));
        let opened = socket::bind(fd.0, &name)
            .and_then(|()| socket::listen(fd.0, 64))
            .and_then(|()| socket::epoll_add(self.epoll.0, fd.0, EPOLLIN | EPOLLET, TAG | DOOR | u64::from(index)));
        if opened.is_ok() {
            self.shared.doors.push(Door { listener, name, fd });
        }
    }

    /// An event of a door or a channel.
    pub(super) fn take_shared_event(&mut self, data: u64, now: u64) {
        let number = data as u32;
        if data & ANNOUNCED != 0 {
            return self.take_answers(number, now);
        }
        if data & DOOR == 0 {
            return self.take_packets(number);
        }
        let Some(door) = self.shared.doors.iter().find(|door| door.listener.index == number) else { return };
        let (listener, door) = (door.listener, door.fd.0);
        while let Ok((fd, _)) = socket::accept(door) {
            self.greet(SocketFd(fd), listener, now);
        }
    }

    /// A program is at the door.
    fn greet(&mut self, fd: SocketFd, listener: Descriptor, now: u64) {
        let Some(process) = door::process_of(fd.0) else { return };
        let channels = &mut self.shared.channels;
        let number = channels.iter().position(Option::is_none).unwrap_or(channels.len());
        let events = EPOLLIN | EPOLLRDHUP;
        if number >= MOST_CHANNELS || socket::epoll_add(self.epoll.0, fd.0, events, TAG | number as u64).is_err() {
            return;
        }
        if number == channels.len() {
            channels.push(None);
        }
        let (name, stage) = (Vec::new(), Stage::Greeting);
        let channel = Channel { fd, process, listener, name, since: now, stage, other_net: false, socket: None };
        channels[number] = Some(channel);
    }

    fn take_packets(&mut self, number: u32) {
        let mut bytes = [0; PACKET_BYTES];
        for _ in 0..PACKETS_A_PASS {
            let Some(fd) = self.shared.channel(number).map(|channel| channel.fd.0) else { return };
            match receive_packet(fd, &mut bytes) {
                Err(Errno::AGAIN | Errno::INTR) => return,
                Ok((0, _)) | Err(_) => return self.end_channel(number),
                Ok((len, descriptor)) => {
                    // None is asked for.
                    drop(descriptor.map(SocketFd));
                    if !self.take_packet(number, Packet::decode(&bytes[..len])) {
                        let socket = self.shared.channel(number).and_then(|channel| channel.socket);
                        match socket.filter(|socket| self.sockets.get(*socket).is_some()) {
                            Some(socket) => self.violation(socket.index),
                            None => self.refuse_held(number),
                        }
                        return self.end_channel(number);
                    }
                }
            }
        }
    }

    /// A program broke the rules before a kernel has accepted its connection.
    fn refuse_held(&mut self, number: u32) {
        self.counters.violations.add(1);
        let Some(channel) = self.shared.channel(number) else { return };
        let (Stage::Running(granule), listener) = (channel.stage, channel.listener) else { return };
        let Some(socket) = self.sockets.get(listener) else { return };
        let is_it = |held: &Held| held.place.is_some_and(|place| place.shared && place.pair == granule);
        let held = socket.meeting.held.iter().position(is_it).and_then(|at| socket.meeting.held.remove(at));
        if let Some(held) = held {
            self.refuse(&held);
        }
    }

    /// Whether the packet is one that may come now.
    fn take_packet(&mut self, number: u32, packet: Option<Packet>) -> bool {
        let Some(channel) = self.shared.channel(number) else { return true };
        let (fd, process, listener, socket) = (channel.fd.0, channel.process, channel.listener, channel.socket);
        match (channel.stage, packet) {
            (Stage::Greeting, Some(Packet::Announce { name, kernel })) if name.len() > 3 => {
                channel.name = name;
                channel.other_net = kernel;
                channel.stage = Stage::Announced;
                let refusal = if self.shared.free_for(process).is_none() {
                    self.counters.kept_by_granules.add(1);
                    Some(Refusal::Memory)
                } else if self.sockets.get(listener).is_none_or(|s| s.meeting.held.len() >= s.meeting.backlog) {
                    Some(Refusal::Backlog)
                } else {
                    None
                };
                let answer = refusal.map_or(Packet::Welcome, Packet::Refused);
                if send_packet(fd, &answer.encode(), None).is_err() || refusal.is_some() {
                    self.end_channel(number);
                }
                true
            }
            (Stage::Offered(granule), Some(Packet::Agreed)) => {
                if send_packet(fd, &Packet::Go.encode(), None).is_err() {
                    self.end_channel(number);
                } else {
                    channel.stage = Stage::Running(granule);
                    self.counters.shared.add(1);
                    self.decide(number, listener.index, Some(granule));
                }
                true
            }
            (Stage::Running(_), Some(Packet::Ring)) => {
                if let Some(socket) = socket.filter(|socket| self.sockets.get(*socket).is_some()) {
                    self.heat(socket.index);
                }
                true
            }
            _ => false,
        }
    }

    /// The connection of a channel goes through a granule, or stays with Linux.
    fn decide(&mut self, number: u32, listener: u32, granule: Option<u32>) {
        let size_log2 = self.shared.size_log2;
        let generation = granule.map_or(0, |granule| self.shared.granules[granule as usize].generation);
        let Some(socket) = self.sockets.at(listener) else { return };
        if let Some(held) = socket.meeting.held.iter_mut().find(|held| held.undecided == Some(number)) {
            held.undecided = None;
            held.place = granule.map(|pair| Place { pair, second: true, generation, size_log2, shared: true });
        }
        self.heat(listener);
    }

    /// The program has closed it, or has ended, or broke the rules, or came too late.
    fn end_channel(&mut self, number: u32) {
        let Some(channel) = self.shared.channels.get_mut(number as usize).and_then(Option::take) else { return };
        let _ = socket::epoll_remove(self.epoll.0, channel.fd.0);
        match channel.stage {
            Stage::Greeting | Stage::Announced => {}
            Stage::Offered(granule) => {
                let granule = &mut self.shared.granules[granule as usize];
                (granule.kernel, granule.program) = (false, false);
                self.decide(number, channel.listener.index, None);
            }
            Stage::Running(granule) => {
                self.shared.granules[granule as usize].program = false;
                if let Some(socket) = channel.socket.and_then(|socket| self.sockets.get(socket)) {
                    // Its connection ends too, or has ended.
                    socket.readable = true;
                    self.heat(channel.socket.map_or(0, |socket| socket.index));
                }
            }
        }
    }

    /// Those that wait for too long stay with Linux.
    pub(super) fn end_late_channels(&mut self, now: u64) {
        for number in 0..self.shared.channels.len() as u32 {
            let late = |channel: &mut Channel| {
                !matches!(channel.stage, Stage::Running(_)) && now.saturating_sub(channel.since) > PATIENCE_NS
            };
            if self.shared.channel(number).is_some_and(late) {
                self.end_channel(number);
            }
        }
    }

    /// Accepts what was announced before a kernel does so.
    pub(super) fn accept_announced(&mut self, index: u32) {
        let listener = Descriptor { index, epoch: self.sockets.epoch(index) };
        while self.shared.is_announced_for(listener)
            && self.sockets.at(index).is_some_and(|s| s.meeting.held.len() < s.meeting.backlog)
        {
            match self.accept_one(index) {
                Ok(held) => {
                    if let Some(socket) = self.sockets.at(index) {
                        socket.meeting.held.push_back(held);
                    }
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => return,
            }
        }
    }

    /// If a program has announced an accepted connection, it is offered a granule: the channel that will tell.
    pub(super) fn offer(&mut self, listener: u32, peer: &SocketAddress) -> Option<u32> {
        let memory = Arc::clone(&self.memory);
        let is_it = |channel: &Channel| {
            channel.stage == Stage::Announced
                && channel.listener.index == listener
                && door::same_name(&channel.name, peer.bytes())
        };
        let number = self.shared.channels.iter().position(|channel| channel.as_ref().is_some_and(is_it))? as u32;
        let channel = self.shared.channel(number)?;
        let (fd, process, rings) = (channel.fd.0, channel.process, !channel.other_net);
        let offered = self.shared.free_for(process).and_then(|at| {
            let granule = &mut self.shared.granules[at];
            let owner = ProcessFd::open(process).ok()?;
            let words = memory.granule(at as u32)?;
            granule.generation = next_generation(granule.generation);
            // A bus never sees a word of an earlier connection.
            words.iter().for_each(|word| word.store_release(0));
            let (size_log2, generation) = (self.shared.size_log2 as u8, granule.generation);
            let offer = Packet::Offer { size_log2, generation, first: self.first };
            // From now on the process may map it.
            granule.owner = Some((process, owner));
            send_packet(fd, &offer.encode(), Some(granule.fd.0)).ok()?;
            (granule.kernel, granule.program, granule.rings) = (true, true, rings);
            Some(at as u32)
        });
        match (offered, self.shared.channel(number)) {
            (Some(granule), Some(channel)) => {
                channel.stage = Stage::Offered(granule);
                Some(number)
            }
            _ => {
                self.counters.kept_by_granules.add(1);
                self.end_channel(number);
                None
            }
        }
    }

    /// A connection that waited for its decision is gone.
    pub(super) fn forget_undecided(&mut self, number: u32) {
        self.end_channel(number);
    }

    /// A kernel's socket is an end of a granule.
    pub(super) fn join_granule(&mut self, place: Place, socket: Descriptor) {
        self.shared.join(place, socket);
    }

    /// What the socket's set is to be told now.
    pub(super) fn events_of_granule(&mut self, index: u32, place: Place) -> Option<u16> {
        let (memory, import) = (Arc::clone(&self.memory), self.import_of(place));
        let (first, words) = (self.first, words_of(&memory, import.as_deref(), place)?);
        let socket = self.sockets.at(index)?;
        let (watch, is_unix) = (socket.watch, socket.domain == AF_UNIX);
        let level = || Look::at(words, place.second, place.generation, first).level(1 << place.size_log2, is_unix);
        let due = watch.due(level());
        if due.is_some() || !watch.is_armed() {
            return due;
        }
        if !self.shared.rings(place) {
            if !self.looked_at.contains(&index) {
                self.looked_at.push_back(index);
            }
            return None;
        }
        watch_for(words, watch.events | spinio_ring::event::ERR | spinio_ring::event::HUP);
        watch.due(level())
    }

    /// They were told: the program need not ring.
    pub(super) fn told_of_granule(&mut self, place: Place) {
        if self.shared.rings(place)
            && let Some(words) = self.memory.granule(place.pair)
        {
            watch_for(words, 0);
        }
    }

    /// Looks at the granules of armed sockets whose other end is a kernel of another net, which rings nobody: whether one was
    /// due.
    pub(super) fn look_at_granules(&mut self) -> bool {
        let count = self.looked_at.len();
        for _ in 0..count {
            if let Some(index) = self.looked_at.pop_front() {
                self.notify(index);
            }
        }
        self.looked_at.len() < count
    }

    /// Where kernels see a granule.
    pub(super) fn granule_address(&self, place: Place) -> u64 {
        if place.second { self.memory.granule_address(place.pair) } else { self.imports.address(place.pair) }
    }

    /// A granule of another net, to which this one has connected.
    fn import_of(&self, place: Place) -> Option<Arc<MappedGranule>> {
        if place.second { None } else { self.imports.granule(place.pair) }
    }

    /// Looks whether the socket of the other process is closed.
    pub(super) fn look_at_other_process(&mut self, index: u32, fd: Fd, place: Place) {
        match channel::look(fd) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            // It may not send here.
            Ok(1..) => self.violation(index),
            Ok(0) => {
                self.write_last_words(place);
                self.end_line(index);
            }
            Err(errno) => {
                let this = Descriptor { index, epoch: self.sockets.epoch(index) };
                self.fail_end(this, errno);
            }
        }
    }

    /// What a process has not written that has ended: its words are the proxy's now.
    fn write_last_words(&self, place: Place) {
        let import = self.import_of(place);
        let Some(words) = words_of(&self.memory, import.as_deref(), place) else { return };
        let look = Look::at(words, place.second, place.generation, self.first);
        if let Some([sent, taken]) = look.last_words(place.generation) {
            let theirs = granule::end(!place.second);
            words[theirs + TAIL].store_release(sent);
            words[theirs + CONSUMED].store_release(taken);
        }
    }

    /// Whether a socket is an end of a granule.
    pub(super) fn granule_of(&mut self, index: u32) -> Option<Place> {
        let socket = self.sockets.at(index).filter(|socket| socket.state == State::Upgraded)?;
        socket.meeting.end.as_ref().map(|end| end.place).filter(|place| place.shared)
    }
}

/// The words of the ends of a granule.
fn words_of<'a>(memory: &'a Memory, import: Option<&'a MappedGranule>, place: Place) -> Option<&'a [AtomicU64]> {
    if place.second { memory.granule(place.pair) } else { import.map(MappedGranule::words) }
}

const _: () = assert!(linux::PAGE == spinio_ring::layout::PAGE);
