//! Device memory for connections between two devices: that of this net, into which kernels of others store, and theirs.
//!
//! ```text
//!   window of kernels:  own 0 .. 255: each for one process       far 256 .. 767: of other nets
//!     own: made ── offered ── used by a connection until both sides have left ──> free, for the same process, or for any once
//!                                                                                 that has ended
//! ```
//!
//! Nothing clears the words of such memory. So each use has a generation that is higher than all before, of all memory that the
//! connection uses; when generations run out, connections go through granules.
//!
//! It is made and mapped as it is needed, by importer.rs, and given back when the net is closed.

use std::sync::mpsc::Sender;

use spinio_ring::layout::{FAR_PEERS, OWN_PEERS};
use spinio_ring::peer::LAST_GENERATION;
use spinio_sys::Errno;
use spinio_sys::linux::channel::ProcessFd;
use spinio_sys::linux::socket_move::send_descriptor;

use crate::importer::{Mapped, Request};
use crate::socket_fd::{ForeignFd, SocketFd};

#[derive(Debug, Default)]
struct Own {
    /// None while it is made, or if it could not be.
    fd: Option<SocketFd>,
    generation: u16,
    /// The only process that may have mapped it.
    owner: Option<(u32, ProcessFd)>,
    used: bool,
    /// The importer is at it.
    making: bool,
}

#[derive(Debug)]
struct Far {
    /// The process and the net that have made it, and its number there.
    of: (u32, u64, u16),
    /// Until the importer has it.
    fd: Option<ForeignFd>,
    /// None while the importer is at it.
    mapped: Option<Mapped>,
}

/// A place in the window, or that there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Slot {
    #[default]
    None,
    /// It is made or mapped.
    Soon(u16),
    Ready(u16),
}

impl Slot {
    pub(super) const fn ready(self) -> Option<u16> {
        match self {
            Slot::Ready(place) => Some(place),
            Slot::None | Slot::Soon(_) => None,
        }
    }

    /// What came of it.
    pub(super) fn settle(&mut self, place: u16, done: bool) {
        if *self == Slot::Soon(place) {
            *self = if done { Slot::Ready(place) } else { Slot::None };
        }
    }
}

/// All of it.
pub(super) struct Rings {
    own: Vec<Own>,
    far: Vec<Far>,
    /// Of this net, for others.
    pub(super) net: u64,
    importer: Option<Sender<Request>>,
}

impl Rings {
    /// Without an importer, connections to other devices go through granules.
    pub(super) fn new(importer: Option<Sender<Request>>, net: u64) -> Rings {
        Rings { own: Vec::new(), far: Vec::new(), net, importer }
    }

    /// The last use of all own memory, if this net has any to offer.
    pub(super) fn last_generation(&self) -> Option<u16> {
        let of = self.own.iter().map(|own| own.generation).filter(|generation| *generation < LAST_GENERATION);
        self.importer.as_ref().map(|_| of.max().unwrap_or(0))
    }

    /// Own memory for a connection to a process.
    pub(super) fn take_own(&mut self, process: u32) -> Slot {
        let Some(importer) = &self.importer else { return Slot::None };
        // What has no generation left is of no use any more.
        let lasts = |own: &Own| own.generation < LAST_GENERATION;
        let is_of = |own: &Own| own.owner.as_ref().is_some_and(|(of, fd)| *of == process && !fd.has_ended());
        let is_for_any = |own: &Own| own.owner.as_ref().is_none_or(|(_, fd)| fd.has_ended());
        let number = |own: &Vec<Own>, fits: &dyn Fn(&Own) -> bool| {
            own.iter().position(|each| !each.used && each.fd.is_some() && lasts(each) && fits(each))
        };
        if let Some(at) = number(&self.own, &is_of).or_else(|| number(&self.own, &is_for_any)) {
            self.own[at].used = true;
            return Slot::Ready(at as u16);
        }
        // One that could not be made, such as while the device had no memory, may be made now.
        let place =
            self.own.iter().position(|own| !own.used && !own.making && own.fd.is_none()).unwrap_or(self.own.len())
                as u16;
        if place >= OWN_PEERS || importer.send(Request::Make(place)).is_err() {
            return Slot::None;
        }
        if usize::from(place) == self.own.len() {
            self.own.push(Own::default());
        }
        let own = &mut self.own[usize::from(place)];
        (own.used, own.making) = (true, true);
        Slot::Soon(place)
    }

    /// It was made.
    pub(super) fn made(&mut self, place: u16, fd: Option<SocketFd>) {
        if let Some(own) = self.own.get_mut(usize::from(place)) {
            own.used &= fd.is_some();
            own.making = false;
            own.fd = fd;
        }
        self.ask(Request::Taken(place));
    }

    fn ask(&self, request: Request) -> bool {
        self.importer.as_ref().is_some_and(|importer| importer.send(request).is_ok())
    }

    /// A process gets it: the descriptor.
    pub(super) fn give(&mut self, place: u16, process: u32, generation: u16) -> Result<i32, Errno> {
        let own = self.own.get_mut(usize::from(place)).ok_or(Errno::NOMEM)?;
        let fd = own.fd.as_ref().ok_or(Errno::NOMEM)?.0;
        if own.owner.as_ref().is_none_or(|(of, fd)| *of != process || fd.has_ended()) {
            own.owner = Some((process, ProcessFd::open(process)?));
        }
        own.generation = generation;
        Ok(fd)
    }

    /// Memory of another net.
    pub(super) fn take_far(&mut self, of: (u32, u64, u16), fd: ForeignFd) -> Slot {
        if let Some(at) = self.far.iter().position(|far| far.of == of) {
            let place = OWN_PEERS + at as u16;
            return match self.far[at].mapped {
                Some(Mapped::No) => Slot::None,
                Some(Mapped::Yes) => Slot::Ready(place),
                None => Slot::Soon(place),
                // There may be a descriptor by now.
                Some(Mapped::NotNow) if self.ask(Request::Map(place)) => {
                    self.far[at] = Far { of, fd: Some(fd), mapped: None };
                    Slot::Soon(place)
                }
                Some(Mapped::NotNow) => Slot::None,
            };
        }
        let place = OWN_PEERS + self.far.len() as u16;
        if place >= OWN_PEERS + FAR_PEERS || !self.ask(Request::Map(place)) {
            return Slot::None;
        }
        self.far.push(Far { of, fd: Some(fd), mapped: None });
        Slot::Soon(place)
    }

    /// The importer wants its descriptor.
    pub(super) fn give_far(&mut self, place: u16, passage: Option<SocketFd>) {
        let far = self.far.get_mut(usize::from(place.saturating_sub(OWN_PEERS)));
        if let (Some(fd), Some(passage)) = (far.and_then(|far| far.fd.take()), passage) {
            let _ = send_descriptor(passage.0, fd.fd());
        }
        // It fails without one.
        self.ask(Request::Given(place));
    }

    /// It was mapped, or was not.
    pub(super) fn mapped(&mut self, place: u16, mapped: Mapped) {
        let at = usize::from(place.saturating_sub(OWN_PEERS));
        if let Some(far) = self.far.get_mut(at) {
            far.mapped = Some(mapped);
        }
    }

    /// The generation of a use of own memory by a connection, the other parts of which had these before. None: there is none.
    pub(super) fn next_generation(&self, place: u16, others: [u16; 2]) -> Option<u16> {
        let own = self.own.get(usize::from(place))?.generation;
        let last = others.into_iter().fold(own, u16::max);
        (last < LAST_GENERATION).then(|| last + 1)
    }

    /// Both sides of a connection have left own memory.
    pub(super) fn give_back(&mut self, slot: Slot) {
        if let Slot::Ready(place) | Slot::Soon(place) = slot
            && let Some(own) = self.own.get_mut(usize::from(place))
        {
            own.used = false;
        }
    }
}
