//! Kernels that connect to a listening socket of another net: what the proxy of the connecting side does. The other side is
//! shared.rs, to which it is as a program; [`spinio_ring::granule`] has the steps and the packets.
//!
//! ```text
//!   connect ── a door of this user? ── ANNOUNCE ──> Announced ── WELCOME ──> Welcome: connects, as any program
//!     OFFER, granule ──> Registering, on another thread ── AGREED ──> Agreed ── GO ──> Running: the socket is end 0
//!     MEMORY: device memory, mapped by that thread too ── MEMORY, of the own device ──┘        └ closed ──> Leaving
//!   refused, broken off, late ──> the connection goes, or stays, through Linux
//! ```
//!
//! Until it is decided the call of connect waits, so that no kernel moves a byte. The channel stays until the socket is closed:
//! its end tells the other net that the granule is used no more. So a process that is killed gives everything back. Where the
//! other kernel stores into memory of this device, that is used again only once the other net has closed the channel too.

use spinio_host::settings::Settings;
use spinio_ring::granule::{PACKET_BYTES, Packet};
use spinio_ring::layout::PEER_RING_LOG2;
use spinio_ring::peer::{Place, Remote};
use spinio_sys::linux::channel::send_packet;
use spinio_sys::linux::socket::{self, AF_UNIX, EPOLLIN, EPOLLRDHUP, is_inet};
use spinio_sys::{Errno, injection_point};

use super::Proxy;
use super::announcement::{Announced, Stage};
use super::channels::{ANNOUNCED, TAG};
use super::imports::Found;
use super::rings::Slot;
use super::sockets::STREAM;
use crate::door::{self, PATIENCE_NS};
use crate::kept::Kept;
use crate::socket_fd::{ForeignFd, SocketFd};
use crate::{NetAddress, handshake};

impl Proxy {
    /// Announces a socket that is about to connect, if another net listens there: it connects once that has answered.
    pub(super) fn announce(&mut self, index: u32, now: u64) -> bool {
        if !self.imports.is_enabled() || !Settings::of_process().net_upgrade {
            let off = !self.pairs.is_enabled();
            self.note_kept(index, if off { Kept::Setting } else { Kept::Device });
            return false;
        }
        let descriptor = self.sockets.descriptor(index);
        let Some(socket) = self.sockets.at(index).filter(|socket| socket.kind == STREAM) else { return false };
        let (Some(fd), Some(connect)) = (socket.raw_fd(), &socket.connect) else { return false };
        let (domain, to) = (socket.domain, NetAddress::of(&connect.to));
        if to.family() != domain || is_inet(domain) && !matches!(to.bytes().len(), 16 | 28) {
            return false;
        }
        // A connection inside this net needs no door.
        if door::candidates(&to).iter().any(|to| self.shared.has_door(&door::name(to))) {
            return false;
        }
        let channel = match handshake::knock(&to) {
            Ok(channel) => self.closer.own(channel.into_fd()),
            Err(unreached) => {
                self.keep(index, unreached.into());
                return false;
            }
        };
        let Some(process) = door::process_of(channel.fd()) else {
            self.keep(index, Kept::User);
            return false;
        };
        if self.name_client(index, fd, &to).is_none() {
            return false;
        }
        let announce = Packet::Announce { kernel: true, peer: self.rings.last_generation() };
        let number = self.announced.iter().position(Option::is_none).unwrap_or(self.announced.len());
        let (events, data) = (EPOLLIN | EPOLLRDHUP, TAG | ANNOUNCED | number as u64);
        let done = send_packet(channel.fd(), &announce.encode(), Some(fd))
            .and_then(|()| socket::epoll_add(self.epoll.0, channel.fd(), events, data));
        if let Err(errno) = done {
            let mut bytes = [0; PACKET_BYTES];
            let got = self.closer.receive_packet(channel.fd(), &mut bytes).ok();
            let refusal = got.and_then(|(len, _)| handshake::refusal_of(&bytes[..len]));
            self.keep(index, refusal.map_or(Kept::of(errno, Kept::Time), Kept::from));
            return false;
        }
        if number == self.announced.len() {
            self.announced.push(None);
        }
        self.announced[number] = Some(Announced {
            channel,
            socket: descriptor,
            stage: Stage::Announced,
            since: now,
            process,
            granule_ready: false,
            expects_memory: false,
            peer_size_log2: 0,
            near: Slot::None,
            far: Slot::None,
            is_gone: false,
        });
        if let Some(socket) = self.sockets.at(index) {
            socket.meeting.announced = Some(number as u32);
        }
        injection_point!("connecting net: announcement sent");
        true
    }

    /// Gives a socket that a kernel has not bound a name that the other net will see; None if it has none.
    fn name_client(&mut self, index: u32, fd: i32, to: &NetAddress) -> Option<()> {
        let name = socket::getsockname(fd).ok()?;
        let bound = if is_inet(to.family()) { name.bytes().get(2..4) != Some(&[0, 0]) } else { name.bytes().len() > 2 };
        if bound {
            // A socket that is bound to a path or to all interfaces is not known by its name there.
            let all = name.bytes().get(if name.bytes().len() == 16 { 4..8 } else { 8..24 });
            if is_inet(to.family()) && all.is_some_and(|address| address.iter().any(|byte| *byte != 0)) {
                return Some(());
            }
            self.keep(index, Kept::Name);
            return None;
        }
        // An address that is not this machine's cannot be bound.
        if socket::bind(fd, &handshake::own_name(to)).is_err() {
            self.note_kept(index, Kept::Name);
            return None;
        }
        let socket = self.sockets.at(index)?;
        socket.meeting.named = true;
        socket.meeting.unnamed |= to.family() == AF_UNIX;
        Some(())
    }

    /// Whether a socket has to wait for the other net before it connects.
    pub(super) fn waits_for_welcome(&mut self, index: u32) -> bool {
        self.stage_of(index) == Some(Stage::Announced)
    }

    /// Whether a socket that Linux has connected waits for the other net.
    pub(super) fn waits_for_go(&mut self, index: u32) -> bool {
        self.stage_of(index).is_some_and(|stage| !matches!(stage, Stage::Running(_)))
    }

    fn stage_of(&mut self, index: u32) -> Option<Stage> {
        let number = self.sockets.at(index)?.meeting.announced?;
        self.announced.get(number as usize)?.as_ref().map(|announced| announced.stage)
    }

    /// Linux could not connect a socket: the next attempt may be to another address.
    pub(super) fn forget_announced(&mut self, index: u32) {
        self.end_announced(index);
        let Some(socket) = self.sockets.at(index) else { return };
        if !std::mem::take(&mut socket.meeting.named) || !is_inet(socket.domain) {
            return;
        }
        // The name stays with a TCP socket, so it gets a new one.
        let Ok(fd) = socket::new_socket(socket.domain, STREAM).map(SocketFd) else { return };
        let _ = socket::reuse_address(fd.0);
        let descriptor = self.sockets.descriptor(index);
        if self.watch_socket(fd.0, descriptor).is_ok()
            && let Some(socket) = self.sockets.at(index)
        {
            for (level, option, value) in &socket.options {
                let _ = socket::set_option(fd.0, *level, *option, *value);
            }
            socket.fd = Some(std::sync::Arc::new(fd));
        }
    }

    /// A socket needs its channel no more.
    pub(super) fn end_announced(&mut self, index: u32) {
        let Some(number) = self.sockets.at(index).and_then(|socket| socket.meeting.announced.take()) else { return };
        self.drop_announced(number);
    }

    /// The same, of a socket that is removed.
    pub(super) fn drop_announced(&mut self, number: u32) {
        let Some(Some(announced)) = self.announced.get_mut(number as usize) else { return };
        let (granule, near) = (announced.stage.granule(), announced.near);
        if let Stage::Running(Place { remote: Some(_), .. }) = announced.stage
            && !announced.is_gone
        {
            // It answers with the end of the channel, once its kernel has left.
            announced.stage = Stage::Leaving;
            let _ = socket::shutdown(announced.channel.fd(), 1);
        } else {
            let _ = socket::epoll_remove(self.epoll.0, announced.channel.fd());
            self.announced[number as usize] = None;
            self.rings.give_back(near);
        }
        if let Some(granule) = granule {
            self.imports.give_back(granule);
        }
    }

    /// Packets of another net.
    pub(super) fn take_answers(&mut self, number: u32, now: u64) {
        let mut bytes = [0; PACKET_BYTES];
        // Each step has one packet.
        for _ in 0..4 {
            let Some(Some(announced)) = self.announced.get(number as usize) else { return };
            match self.closer.receive_packet(announced.channel.fd(), &mut bytes) {
                Err(Errno::AGAIN | Errno::INTR) => return,
                Ok((0, _)) | Err(_) => return self.broken_off(number, now),
                Ok((len, file)) => self.take_answer(number, Packet::decode(&bytes[..len]), file, now),
            }
        }
    }

    fn take_answer(&mut self, number: u32, packet: Option<Packet>, file: Option<ForeignFd>, now: u64) {
        let Some(Some(announced)) = self.announced.get_mut(number as usize) else { return };
        let index = announced.socket.index;
        match (announced.stage, packet) {
            (Stage::Announced, Some(Packet::Welcome)) => {
                injection_point!("connecting net: welcome received");
                (announced.stage, announced.since) = (Stage::Welcome, now);
                self.connect_again(index, now);
            }
            (Stage::Announced | Stage::Welcome, Some(Packet::Refused(refusal))) => {
                self.keep(index, refusal.into());
                self.stay_with_linux(number, now);
            }
            // It comes with a file, for which the Linux kernel had no number here, unless the other net breaks the rules.
            (Stage::Welcome, Some(Packet::Offer { .. })) if file.is_none() => {
                self.keep_announced(number, Kept::Descriptors, now);
            }
            (Stage::Welcome, Some(Packet::Offer { size_log2, generation, first, peer })) => {
                injection_point!("connecting net: offer received");
                let fits = peer.is_none_or(|log2| PEER_RING_LOG2.contains(&log2));
                (announced.expects_memory, announced.peer_size_log2) = (peer.is_some(), peer.unwrap_or(0));
                let found = match file.filter(|_| fits && first == self.first) {
                    Some(file) => self.imports.take(file.fd(), size_log2),
                    None => Found::Refused,
                };
                let place = |pair| Place {
                    pair,
                    second: false,
                    generation,
                    size_log2: size_log2.into(),
                    shared: true,
                    remote: None,
                };
                match found {
                    Found::Ready(granule) => {
                        (announced.stage, announced.since) = (Stage::Registering(place(granule)), now);
                        announced.granule_ready = true;
                        self.agree(number, now);
                    }
                    Found::Soon(granule) => {
                        (announced.stage, announced.since) = (Stage::Registering(place(granule)), now);
                    }
                    Found::Refused => self.withdraw(number, now),
                    Found::Full => {
                        self.keep(index, Kept::Granules);
                        self.stay_with_linux(number, now);
                    }
                }
            }
            (Stage::Registering(_), Some(Packet::Memory { net, number: of })) if announced.expects_memory => {
                injection_point!("connecting net: memory received");
                announced.expects_memory = false;
                let of = (announced.process, net, of);
                if let Some(file) = file {
                    announced.far = self.rings.take_far(of, file);
                }
                if announced.far != Slot::None {
                    announced.near = self.rings.take_own(of.0);
                }
                self.agree(number, now);
            }
            (Stage::Agreed(place), Some(Packet::Go { peer })) => {
                injection_point!("connecting net: go received");
                self.go(number, place, peer, now);
            }
            (Stage::Leaving, _) => {}
            // Nothing more may come.
            (Stage::Running(_), _) => self.violation(index),
            _ => self.withdraw(number, now),
        }
    }

    /// A granule is registered with the device, or cannot be.
    pub(super) fn imported(&mut self, granule: u32, address: Option<u64>, now: u64) {
        injection_point!("connecting net: granule registered");
        self.imports.set_address(granule, address);
        let waits =
            |announced: &Announced| matches!(announced.stage, Stage::Registering(place) if place.pair == granule);
        let number = self.announced.iter().position(|announced| announced.as_ref().is_some_and(waits));
        let Some(number) = number.map(|number| number as u32) else { return };
        if address.is_some() {
            if let Some(Some(announced)) = self.announced.get_mut(number as usize) {
                announced.granule_ready = true;
            }
            self.agree(number, now);
        } else {
            self.keep_announced(number, Kept::Granules, now);
        }
    }

    /// Device memory was made or mapped.
    pub(super) fn settle_announced(&mut self, place: u16, done: bool, now: u64) {
        for number in 0..self.announced.len() {
            let Some(announced) = &mut self.announced[number] else { continue };
            announced.near.settle(place, done);
            announced.far.settle(place, done);
            self.agree(number as u32, now);
        }
    }

    /// Agrees, once all is registered and mapped.
    fn agree(&mut self, number: u32, now: u64) {
        let Some(Some(announced)) = self.announced.get_mut(number as usize) else { return };
        let Stage::Registering(mut place) = announced.stage else { return };
        let soon = |slot| matches!(slot, Slot::Soon(_));
        if !announced.granule_ready || announced.expects_memory || soon(announced.near) || soon(announced.far) {
            return;
        }
        let memory = announced.near.ready().zip(announced.far.ready()).and_then(|(near, far)| {
            // Higher than all uses before, which the other net has seen to, unless another connection was faster.
            let next = self.rings.next_generation(near, [0, 0]).filter(|next| *next <= place.generation)?;
            let file = self.rings.give(near, announced.process, place.generation.max(next)).ok()?;
            place.remote = Some(Remote { near, far });
            Some((Packet::Memory { net: self.rings.net, number: near }, file))
        });
        if memory.is_none() {
            self.rings.give_back(std::mem::take(&mut announced.near));
        }
        (announced.stage, announced.since) = (Stage::Agreed(place), now);
        let channel = announced.channel.fd();
        let sent = memory.map_or(Ok(()), |(packet, file)| send_packet(channel, &packet.encode(), Some(file)));
        injection_point!("connecting net: about to agree");
        if sent.and_then(|()| send_packet(channel, &Packet::Agreed.encode(), None)).is_err() {
            self.broken_off(number, now);
        }
        injection_point!("connecting net: agreement sent");
    }

    /// Both have agreed: the socket is an end.
    fn go(&mut self, number: u32, mut place: Place, peer: bool, now: u64) {
        let Some(Some(announced)) = self.announced.get_mut(number as usize) else { return };
        let index = announced.socket.index;
        if peer && place.remote.is_none() {
            // It was offered none.
            return self.violation(index);
        }
        if peer {
            place.size_log2 = announced.peer_size_log2.into();
        } else {
            place.remote = None;
            self.rings.give_back(std::mem::take(&mut announced.near));
        }
        announced.stage = Stage::Running(place);
        self.become_end(index, place);
        self.counters.connected.add(1);
        (if peer { &self.counters.peer } else { &self.counters.shared }).add(1);
        let Some(socket) = self.sockets.at(index) else { return };
        socket.readable = true;
        let connect = socket.connect.take();
        self.end_connect(index, connect, 0);
        self.heat(index);
        self.pace.gave(now);
    }

    /// It does not wait any longer. The other net may have said GO before, which alone decides.
    fn withdraw(&mut self, number: u32, now: u64) {
        let Some(Some(announced)) = self.announced.get(number as usize) else { return };
        if let Stage::Agreed(place) = announced.stage {
            let mut bytes = [0; PACKET_BYTES];
            // From now on it cannot say it.
            let _ = socket::shutdown(announced.channel.fd(), 2);
            let got = self.closer.receive_packet(announced.channel.fd(), &mut bytes);
            let packet = got.ok().and_then(|(len, _)| Packet::decode(&bytes[..len]));
            if let Some(Packet::Go { peer }) = packet {
                return self.go(number, place, peer, now);
            }
        }
        self.keep_announced(number, Kept::Time, now);
    }

    /// The other net has closed the channel.
    fn broken_off(&mut self, number: u32, now: u64) {
        let Some(Some(announced)) = self.announced.get_mut(number as usize) else { return };
        if announced.stage == Stage::Leaving {
            return self.drop_announced(number);
        }
        if matches!(announced.stage, Stage::Running(_)) {
            announced.is_gone = true;
            // Its connection ends too, or has ended.
            let index = announced.socket.index;
            let _ = socket::epoll_remove(self.epoll.0, announced.channel.fd());
            if let Some(socket) = self.sockets.at(index) {
                socket.readable = true;
            }
            return self.heat(index);
        }
        self.keep_announced(number, Kept::Time, now);
    }

    fn keep_announced(&mut self, number: u32, kept: Kept, now: u64) {
        if let Some(Some(announced)) = self.announced.get(number as usize) {
            self.keep(announced.socket.index, kept);
        }
        self.stay_with_linux(number, now);
    }

    fn stay_with_linux(&mut self, number: u32, now: u64) {
        let Some(Some(announced)) = self.announced.get(number as usize) else { return };
        let (index, connects) = (announced.socket.index, announced.stage != Stage::Announced);
        self.end_announced(index);
        if connects {
            // Linux may have connected it already.
            self.heat(index);
        } else {
            self.connect_again(index, now);
        }
    }

    /// Those that wait for too long stay with Linux.
    pub(super) fn end_late_announced(&mut self, now: u64) {
        for number in 0..self.announced.len() {
            let late = |announced: &Announced| {
                !matches!(announced.stage, Stage::Running(_) | Stage::Leaving)
                    && now.saturating_sub(announced.since) > PATIENCE_NS
            };
            if self.announced[number].as_ref().is_some_and(late) {
                self.withdraw(number as u32, now);
            }
        }
    }
}
