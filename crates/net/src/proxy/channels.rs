//! Granules, doors and channels as the proxy has them. What it does with them: shared.rs.
//!
//! ```text
//!   door (a listening socket) ── program connects ──> channel ── Greeting, Preparing, Announced, Offered(granule), Running(granule), Draining(granule)
//!   granule: kernel and program use it ── both have left ──> free, for the same process, or for any once that has ended
//! ```

use std::sync::Arc;

use spinio_ring::layout::Descriptor;
use spinio_ring::peer::Place;
use spinio_sys::Errno;
use spinio_sys::linux::channel::ProcessFd;
use spinio_sys::linux::socket;

use super::rings::Slot;
use crate::kept::Kept;
use crate::socket_fd::{Closer, ForeignFd, SocketFd};

/// What the epoll data of doors and channels say, and of the channels of sockets that connect to another net, where sockets have an epoch.
pub(super) const TAG: u64 = 1 << 62;
pub(super) const DOOR: u64 = 1 << 61;
pub(super) const ANNOUNCED: u64 = 1 << 60;

/// Whether the data of an event are of a door or a channel.
pub(super) const fn is_shared_event(data: u64) -> bool {
    data >> 62 == 1
}

/// The memory of a connection.
pub(super) struct Granule {
    pub(super) fd: SocketFd,
    pub(super) generation: u16,
    /// The only process that may have mapped it.
    pub(super) owner: Option<(u32, ProcessFd)>,
    /// Who uses it.
    pub(super) kernel: bool,
    pub(super) program: bool,
    /// The other end, a program, rings where it has news. That of another net does not.
    pub(super) rings: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Greeting,
    /// Device memory is made for it.
    Preparing,
    Announced,
    Offered(u32),
    Running(u32),
    /// The other side has left, and the kernel of this net may still store into its memory.
    Draining(u32),
}

pub(super) struct Channel {
    pub(super) fd: ForeignFd,
    pub(super) process: u32,
    pub(super) listener: Descriptor,
    /// The socket that was announced, until it has connected.
    pub(super) announced: Option<ForeignFd>,
    pub(super) since: u64,
    pub(super) stage: Stage,
    /// It is another net, whose kernel connects.
    pub(super) other_net: bool,
    /// The other net can use device memory: the last use of its own.
    pub(super) peer: Option<u16>,
    /// Device memory of this net, and of the other one; and the other one has agreed, but theirs is being mapped.
    pub(super) near: Slot,
    pub(super) far: Slot,
    pub(super) agreed: bool,
    /// The kernel's socket, once it is accepted.
    pub(super) socket: Option<Descriptor>,
}

pub(super) struct Door {
    pub(super) listener: Descriptor,
    pub(super) name: Vec<u8>,
    pub(super) fd: SocketFd,
    /// Programs may wait there for which no descriptor was left.
    pub(super) retry: bool,
}

/// Granules, doors and channels.
pub(super) struct Shared {
    pub(super) granules: Vec<Granule>,
    /// No descriptor was left for any granule.
    pub(super) lacks_granules: bool,
    pub(super) doors: Vec<Door>,
    /// Listening sockets for whose door no descriptor was left.
    pub(super) doorless: Vec<Descriptor>,
    pub(super) channels: Vec<Option<Channel>>,
    /// The logarithm of the size of rings in granules, and in device memory.
    pub(super) size_log2: u32,
    pub(super) peer_size_log2: u32,
}

/// Closes a listening socket of UNIX with a name that is free at once, unless the table is full. Connections that wait there may have
/// brought descriptors.
pub(super) fn close_listener(fd: SocketFd, closer: &Closer) {
    // No more come.
    let _ = socket::shutdown(fd.0, 2);
    loop {
        match socket::accept(fd.0) {
            Ok((waiting, _)) => drop(closer.own(waiting)),
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            // None waits.
            Err(Errno::INVAL | Errno::AGAIN) => return,
            // Those that wait are closed with it.
            Err(_) => return closer.close(Arc::new(fd)),
        }
    }
}

impl Shared {
    /// `files`: descriptors of the granules; without them, the net has no doors. `failed`: why there are not more.
    pub(super) fn new(files: Vec<SocketFd>, failed: Option<Errno>, ring_bytes: u64, peer_ring_bytes: u64) -> Shared {
        let granule =
            |fd: SocketFd| Granule { fd, generation: 0, owner: None, kernel: false, program: false, rings: false };
        let granules: Vec<Granule> = files.into_iter().map(granule).collect();
        let lacks = |errno| Kept::of(errno, Kept::Plain) == Kept::Descriptors;
        Shared {
            lacks_granules: granules.is_empty() && failed.is_some_and(lacks),
            granules,
            doors: Vec::new(),
            doorless: Vec::new(),
            channels: Vec::new(),
            size_log2: ring_bytes.trailing_zeros(),
            peer_size_log2: peer_ring_bytes.trailing_zeros(),
        }
    }

    /// A granule that this process may map.
    pub(super) fn free_for(&self, process: u32) -> Option<usize> {
        let is_free = |granule: &&(usize, &Granule)| !granule.1.kernel && !granule.1.program;
        let all: Vec<(usize, &Granule)> = self.granules.iter().enumerate().collect();
        let free = || all.iter().filter(is_free);
        let own = free().find(|(_, granule)| {
            granule.owner.as_ref().is_some_and(|(owner, fd)| *owner == process && !fd.has_ended())
        });
        let unused = || free().find(|(_, granule)| granule.owner.as_ref().is_none_or(|(_, fd)| fd.has_ended()));
        own.or_else(unused).map(|(number, _)| *number)
    }

    /// Whether the other end of a granule rings.
    pub(super) fn rings(&self, place: Place) -> bool {
        place.second && self.granules.get(place.pair as usize).is_some_and(|granule| granule.rings)
    }

    pub(super) fn channel(&mut self, number: u32) -> Option<&mut Channel> {
        self.channels.get_mut(number as usize)?.as_mut()
    }

    pub(super) fn is_announced_for(&self, listener: Descriptor) -> bool {
        let waits = |channel: &Channel| channel.stage == Stage::Announced && channel.listener == listener;
        self.channels.iter().flatten().any(waits)
    }

    /// Whether a program could not ask for memory at a listening socket, since no descriptor was left for what that needs.
    pub(super) fn lacks_descriptors(&self, listener: Descriptor) -> bool {
        self.lacks_granules || self.doorless.contains(&listener)
    }

    /// Whether a listening socket has the door of this name.
    pub(super) fn has_door(&self, name: &[u8]) -> bool {
        self.doors.iter().any(|door| door.name == name)
    }

    /// A listening socket is closed.
    pub(super) fn close_door(&mut self, index: u32, closer: &Closer) {
        for door in self.doors.extract_if(.., |door| door.listener.index == index) {
            close_listener(door.fd, closer);
        }
    }

    /// The socket of a kernel is closed. The channel that waited for that.
    pub(super) fn leave(&mut self, place: Place) -> Option<u32> {
        if place.second
            && let Some(granule) = self.granules.get_mut(place.pair as usize)
            && granule.generation == place.generation
        {
            granule.kernel = false;
            let of_it = |channel: &&mut Channel| channel.stage == Stage::Running(place.pair);
            if let Some(channel) = self.channels.iter_mut().flatten().find(of_it) {
                channel.socket = None;
            }
            let drains = |channel: &Channel| channel.stage == Stage::Draining(place.pair);
            return self.channels.iter().position(|it| it.as_ref().is_some_and(drains)).map(|number| number as u32);
        }
        None
    }

    pub(super) fn join(&mut self, place: Place, socket: Descriptor) {
        let of_it = |channel: &&mut Channel| channel.stage == Stage::Running(place.pair);
        if let Some(channel) = self.channels.iter_mut().flatten().find(of_it) {
            channel.socket = Some(socket);
        }
    }
}
