//! Connections over shared memory: what the proxy of the net that accepts does for them. [`spinio_ring::granule`] has the steps and
//! the packets, announced.rs the connecting side of another net, granule_ends.rs what both sides do once bytes go through it.
//!
//! ```text
//!   door of a listening socket ── a program of this user ──> channel: Greeting ── ANNOUNCE ──> Announced
//!   the announced socket's connection is accepted ── OFFER, granule ──> Offered ── AGREED ──> GO, Running ── the program closes it
//!      held in the backlog until then, undecided              └ too late, or the end: the connection stays with Linux
//!   Running: RING ──> the socket's events        end of the TCP or UNIX connection ──> last words of the program
//! ```
//!
//! A program, or the kernel of another net, has the part that a kernel has at the other end of a connection inside the net, so
//! kernels and loopback.rs do the rest. The channel stays until the program has closed its socket: only then, and once the kernel has closed its own, is
//! the granule used again, by the same process, or by another one after that has ended. A process that ends without a word
//! (kill -9) leaves its socket to Linux, which closes it: then the proxy writes what a close would have written.
//!
//! Known flaws: the proxy cannot see whether a process has passed a granule on to one that outlives it (fork, SCM_RIGHTS), which
//! then sees the bytes of a later connection of the same user. A process that polls its own granules can make the proxy look
//! often, but not longer.

use std::sync::Arc;

use spinio_ring::Word;
use spinio_ring::granule::{PACKET_BYTES, Packet, Refusal};
use spinio_ring::layout::Descriptor;
use spinio_ring::peer::{Place, Remote, next_generation};
use spinio_sys::linux::channel::{ProcessFd, send_packet};
use spinio_sys::linux::socket::{self, AF_UNIX, EPOLLET, EPOLLIN, EPOLLRDHUP, SocketAddress};
use spinio_sys::linux::socket_move::socket_kind;
use spinio_sys::linux::{self, Fd};
use spinio_sys::{Errno, injection_point};

use super::Proxy;
use super::channels::{ANNOUNCED, Channel, DOOR, Door, Stage, TAG};
use super::rings::Slot;
use super::sockets::{STREAM, State};
use crate::NetAddress;
use crate::door::{self, PATIENCE_NS};
use crate::kept::Kept;
use crate::meet::Held;
use crate::socket_fd::{Closer, ForeignFd, SocketFd};

/// Channels at a time.
const MOST_CHANNELS: usize = 1024;
/// Packets of a channel in a pass.
const PACKETS_A_PASS: usize = 16;
const SEQPACKET: u16 = 5;

impl Proxy {
    /// Opens the door of a listening socket. If another socket has it, programs stay with Linux.
    pub(super) fn open_door(&mut self, index: u32, name: &[u8]) {
        let listener = self.sockets.descriptor(index);
        if self.shared.granules.is_empty() || self.shared.doors.iter().any(|door| door.listener == listener) {
            return;
        }
        self.shared.doorless.retain(|of| *of != listener);
        let fd = match socket::new_socket(AF_UNIX, SEQPACKET) {
            Ok(fd) => SocketFd(fd),
            Err(errno) => {
                let lacked = (Kept::of(errno, Kept::Plain) == Kept::Descriptors).then_some(listener);
                return self.shared.doorless.extend(lacked);
            }
        };
        let name = door::name(&NetAddress::of(name));
        let opened = socket::bind(fd.0, &name)
            .and_then(|()| socket::listen(fd.0, 64))
            .and_then(|()| socket::epoll_add(self.epoll.0, fd.0, EPOLLIN | EPOLLET, TAG | DOOR | u64::from(index)));
        if opened.is_ok() {
            self.shared.doors.push(Door { listener, name, fd, retry: false });
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
        self.answer_door(number, now);
    }

    /// Programs are at the door of a listening socket.
    fn answer_door(&mut self, index: u32, now: u64) {
        let Some(door) = self.shared.doors.iter().find(|door| door.listener.index == index) else { return };
        let (listener, door) = (door.listener, door.fd.0);
        let retry = loop {
            match socket::accept(door) {
                Ok((fd, _)) => self.greet(self.closer.own(fd), listener, now),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => break false,
                // No descriptor or no memory: they still wait, and no event tells when there is one.
                Err(_) => break true,
            }
        };
        if let Some(door) = self.shared.doors.iter_mut().find(|door| door.listener == listener) {
            door.retry = retry;
        }
    }

    /// Tries again to open doors, and at doors, for which no descriptor was left.
    pub(super) fn retry_doors(&mut self, now: u64) {
        for listener in std::mem::take(&mut self.shared.doorless) {
            let socket = self.sockets.get(listener).filter(|socket| socket.state == State::Listening);
            if let Some(name) = socket.map(|socket| socket.meeting.name.clone()) {
                self.open_door(listener.index, &name);
            }
        }
        let waiting = self.shared.doors.iter().filter(|door| door.retry);
        for index in waiting.map(|door| door.listener.index).collect::<Vec<_>>() {
            self.answer_door(index, now);
        }
    }

    /// A program is at the door.
    fn greet(&mut self, fd: ForeignFd, listener: Descriptor, now: u64) {
        let Some(process) = door::process_of(fd.fd()) else { return };
        let channels = &mut self.shared.channels;
        let number = channels.iter().position(Option::is_none).unwrap_or(channels.len());
        let events = EPOLLIN | EPOLLRDHUP;
        if number >= MOST_CHANNELS || socket::epoll_add(self.epoll.0, fd.fd(), events, TAG | number as u64).is_err() {
            self.counters.kept_by_granules.add(1);
            return turn_away(&fd, &self.closer);
        }
        if number == channels.len() {
            channels.push(None);
        }
        let (announced, stage) = (None, Stage::Greeting);
        channels[number] = Some(Channel {
            fd,
            process,
            listener,
            announced,
            since: now,
            stage,
            other_net: false,
            peer: None,
            near: Slot::None,
            far: Slot::None,
            agreed: false,
            socket: None,
        });
        injection_point!("accepting net: door knocked at");
    }

    fn take_packets(&mut self, number: u32) {
        let mut bytes = [0; PACKET_BYTES];
        for _ in 0..PACKETS_A_PASS {
            let Some(fd) = self.shared.channel(number).map(|channel| channel.fd.fd()) else { return };
            match self.closer.receive_packet(fd, &mut bytes) {
                Err(Errno::AGAIN | Errno::INTR) => return,
                Ok((0, _)) | Err(_) => return self.end_channel(number),
                Ok((len, file)) => {
                    if !self.take_packet(number, Packet::decode(&bytes[..len]), file) {
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
    fn take_packet(&mut self, number: u32, packet: Option<Packet>, file: Option<ForeignFd>) -> bool {
        let Some(channel) = self.shared.channel(number) else { return true };
        let (fd, process, listener, socket) = (channel.fd.fd(), channel.process, channel.listener, channel.socket);
        match (channel.stage, packet) {
            (Stage::Greeting, Some(Packet::Announce { kernel, peer })) => {
                injection_point!("accepting net: announcement received");
                if file.as_ref().is_some_and(|file| !is_stream(file.fd())) {
                    return false;
                }
                channel.announced = file;
                channel.other_net = kernel;
                channel.peer = peer;
                let refusal = if channel.announced.is_none() {
                    // The packet came without the socket.
                    self.counters.kept_by_descriptors.add(1);
                    Some(Refusal::Descriptors)
                } else if self.shared.free_for(process).is_none() {
                    self.counters.kept_by_granules.add(1);
                    Some(Refusal::Memory)
                } else if self.sockets.get(listener).is_none_or(|s| s.meeting.held.len() >= s.meeting.backlog) {
                    Some(Refusal::Backlog)
                } else {
                    None
                };
                if let Some(refusal) = refusal {
                    let _ = send_packet(fd, &Packet::Refused(refusal).encode(), None);
                    self.end_channel(number);
                    return true;
                }
                let near = if peer.is_some() { self.rings.take_own(process) } else { Slot::None };
                if let Some(channel) = self.shared.channel(number) {
                    (channel.near, channel.stage) = (near, Stage::Preparing);
                }
                if !matches!(near, Slot::Soon(_)) {
                    self.welcome(number);
                }
                true
            }
            (Stage::Offered(_), Some(Packet::Memory { net, number: of }))
                if channel.near != Slot::None && channel.far == Slot::None =>
            {
                injection_point!("accepting net: memory received");
                if let Some(file) = file {
                    channel.far = self.rings.take_far((process, net, of), file);
                }
                true
            }
            (Stage::Offered(_), Some(Packet::Agreed)) => {
                injection_point!("accepting net: agreement received");
                channel.agreed = true;
                if !matches!(channel.far, Slot::Soon(_)) {
                    self.go_on(number);
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

    /// The other side may connect.
    pub(super) fn welcome(&mut self, number: u32) {
        let Some(channel) = self.shared.channel(number) else { return };
        channel.stage = Stage::Announced;
        if send_packet(channel.fd.fd(), &Packet::Welcome.encode(), None).is_err() {
            self.end_channel(number);
        }
        injection_point!("accepting net: welcome sent");
    }

    /// The connection of a channel goes through a granule, or stays with Linux.
    pub(super) fn decide(&mut self, number: u32, listener: u32, granule: Option<(u32, Option<Remote>)>) {
        let remote = granule.and_then(|(_, remote)| remote);
        let size_log2 = if remote.is_some() { self.shared.peer_size_log2 } else { self.shared.size_log2 };
        let generation = granule.map_or(0, |(granule, _)| self.shared.granules[granule as usize].generation);
        let Some(socket) = self.sockets.at(listener) else { return };
        if let Some(held) = socket.meeting.held.iter_mut().find(|held| held.undecided == Some(number)) {
            held.undecided = None;
            held.kept = if granule.is_none() { Some(Kept::Time) } else { None };
            held.place =
                granule.map(|(pair, _)| Place { pair, second: true, generation, size_log2, shared: true, remote });
        }
        self.heat(listener);
    }

    /// The program has closed it, or has ended, or broke the rules, or came too late.
    pub(super) fn end_channel(&mut self, number: u32) {
        let Some(channel) = self.shared.channels.get_mut(number as usize).and_then(Option::take) else { return };
        let _ = socket::epoll_remove(self.epoll.0, channel.fd.fd());
        match channel.stage {
            Stage::Greeting | Stage::Preparing | Stage::Announced | Stage::Draining(_) => {
                self.rings.give_back(channel.near);
            }
            Stage::Offered(granule) => {
                self.rings.give_back(channel.near);
                let granule = &mut self.shared.granules[granule as usize];
                (granule.kernel, granule.program) = (false, false);
                self.decide(number, channel.listener.index, None);
            }
            Stage::Running(granule) => {
                self.shared.granules[granule as usize].program = false;
                let drains = self.shared.granules[granule as usize].kernel && channel.near != Slot::None;
                if !drains {
                    self.rings.give_back(channel.near);
                }
                if let Some(socket) = channel.socket.and_then(|socket| self.sockets.get(socket)) {
                    // Its connection ends too, or has ended.
                    socket.readable = true;
                    self.heat(channel.socket.map_or(0, |socket| socket.index));
                }
                if drains {
                    self.shared.channels[number as usize] =
                        Some(Channel { stage: Stage::Draining(granule), ..channel });
                }
            }
        }
    }

    /// Those that wait for too long stay with Linux.
    pub(super) fn end_late_channels(&mut self, now: u64) {
        for number in 0..self.shared.channels.len() as u32 {
            let late = |channel: &mut Channel| {
                !matches!(channel.stage, Stage::Running(_) | Stage::Draining(_))
                    && now.saturating_sub(channel.since) > PATIENCE_NS
            };
            if self.shared.channel(number).is_some_and(late) {
                self.end_channel(number);
            }
        }
    }

    /// Accepts what was announced before a kernel does so.
    pub(super) fn accept_announced(&mut self, index: u32) {
        let listener = self.sockets.descriptor(index);
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
                Err(Errno::AGAIN) => return,
                // As at a door: no event tells when there is a descriptor.
                Err(_) => return self.postpone(index),
            }
        }
    }

    /// If a program has announced an accepted connection, it is offered a granule: the channel that will tell. Else why the
    /// connection stays with Linux.
    pub(super) fn offer(&mut self, listener: u32, accepted: Fd, peer: &SocketAddress) -> Result<u32, Kept> {
        let memory = Arc::clone(&self.memory);
        let is_it = |channel: &Channel| {
            channel.stage == Stage::Announced
                && channel.listener.index == listener
                && channel.announced.as_ref().is_some_and(|client| is_client(client.fd(), accepted, peer))
        };
        let number = self.shared.channels.iter().position(|channel| channel.as_ref().is_some_and(is_it));
        let lacks = self.shared.lacks_descriptors(self.sockets.descriptor(listener));
        let plain = if lacks { Kept::Descriptors } else { Kept::Plain };
        let number = number.ok_or(plain)? as u32;
        injection_point!("accepting net: connection accepted");
        let channel = self.shared.channel(number).ok_or(plain)?;
        channel.announced = None;
        let (fd, process, rings) = (channel.fd.fd(), channel.process, !channel.other_net);
        let (own, theirs) = (channel.near.ready(), channel.peer.unwrap_or(0));
        let mut near = None;
        let lacking = |errno| Kept::of(errno, Kept::Granules);
        let free = self.shared.free_for(process).ok_or(Kept::Granules);
        let offered = free.and_then(|at| {
            let granule = &mut self.shared.granules[at];
            let owner = ProcessFd::open(process).map_err(lacking)?;
            let words = memory.granule(at as u32).ok_or(Kept::Granules)?;
            near = own.and_then(|own| Some((own, self.rings.next_generation(own, [granule.generation, theirs])?)));
            granule.generation = near.map_or_else(|| next_generation(granule.generation), |(_, generation)| generation);
            // A bus never sees a word of an earlier connection.
            words.iter().for_each(|word| word.store_release(0));
            let (size_log2, generation) = (self.shared.size_log2 as u8, granule.generation);
            let peer = near.map(|_| self.shared.peer_size_log2 as u8);
            let offer = Packet::Offer { size_log2, generation, first: self.first, peer };
            // From now on the process may map it.
            granule.owner = Some((process, owner));
            send_packet(fd, &offer.encode(), Some(granule.fd.0)).map_err(lacking)?;
            injection_point!("accepting net: granule offered");
            if let Some((near, generation)) = near {
                let memory = Packet::Memory { net: self.rings.net, number: near };
                let file = self.rings.give(near, process, generation).map_err(lacking)?;
                send_packet(fd, &memory.encode(), Some(file)).map_err(lacking)?;
                injection_point!("accepting net: memory offered");
            }
            (granule.kernel, granule.program, granule.rings) = (true, true, rings);
            Ok(at as u32)
        });
        match (offered, self.shared.channel(number)) {
            (Ok(granule), Some(channel)) => {
                channel.stage = Stage::Offered(granule);
                let unused = if near.is_none() { std::mem::take(&mut channel.near) } else { Slot::None };
                self.rings.give_back(unused);
                Ok(number)
            }
            (offered, _) => {
                let kept = offered.err().unwrap_or(Kept::Granules);
                let refusal = if kept == Kept::Descriptors { Refusal::Descriptors } else { Refusal::Memory };
                if let Some(counter) = kept.counter(&self.counters) {
                    counter.add(1);
                }
                let _ = send_packet(fd, &Packet::Refused(refusal).encode(), None);
                self.end_channel(number);
                Err(kept)
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
}

/// Refuses a program that has no channel, whether it has sent its announcement or not.
fn turn_away(fd: &ForeignFd, closer: &Closer) {
    let _ = send_packet(fd.fd(), &Packet::Refused(Refusal::Memory).encode(), None);
    // It sends nothing more; what it has sent is received, since the end of the channel would be ECONNRESET instead of the answer.
    let _ = socket::shutdown(fd.fd(), 0);
    let mut bytes = [0; PACKET_BYTES];
    for _ in 0..PACKETS_A_PASS {
        let Ok((1.., _)) = closer.receive_packet(fd.fd(), &mut bytes) else { break };
    }
}

const _: () = assert!(linux::PAGE == spinio_ring::layout::PAGE);

/// Whether a descriptor of another process is a socket that may connect. Nothing else is asked of it: calls on a file may wait.
fn is_stream(fd: Fd) -> bool {
    socket_kind(fd).is_ok_and(|it| it.kind == STREAM && (it.domain == AF_UNIX || socket::is_inet(it.domain)))
}

/// Whether a socket of a client is the other end of an accepted one.
fn is_client(client: Fd, accepted: Fd, peer: &SocketAddress) -> bool {
    let is_named = socket::getsockname(client).is_ok_and(|own| door::same_name(own.bytes(), peer.bytes()));
    // Two sockets may have one address of TCP (SO_REUSEPORT), but not connect to the same place.
    let connects = || {
        let (to, at) = (socket::getpeername(client), socket::getsockname(accepted));
        matches!((to, at), (Ok(to), Ok(at)) if door::same_name(to.bytes(), at.bytes()))
    };
    is_named && (peer.bytes().first_chunk() == Some(&AF_UNIX.to_ne_bytes()) || connects())
}
