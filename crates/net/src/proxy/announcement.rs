//! A socket that connects to another net, or is connected to one, as the proxy has it. What it does with it: announced.rs.

use spinio_ring::layout::Descriptor;
use spinio_ring::peer::Place;

use super::rings::Slot;
use crate::socket_fd::ForeignFd;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Announced,
    Welcome,
    /// Being registered with the device, then agreed to.
    Registering(Place),
    Agreed(Place),
    Running(Place),
    /// The socket is closed. The other net may still store into this one's memory.
    Leaving,
}

impl Stage {
    /// The granule of another net that it has.
    pub(super) const fn granule(self) -> Option<u32> {
        match self {
            Stage::Announced | Stage::Welcome | Stage::Leaving => None,
            Stage::Registering(place) | Stage::Agreed(place) | Stage::Running(place) => Some(place.pair),
        }
    }
}

/// A socket that connects to another net, or is connected to one.
pub(super) struct Announced {
    pub(super) channel: ForeignFd,
    pub(super) socket: Descriptor,
    pub(super) stage: Stage,
    pub(super) since: u64,
    pub(super) process: u32,
    /// Kernels see the granule.
    pub(super) granule_ready: bool,
    /// Device memory of the other net is to come.
    pub(super) expects_memory: bool,
    /// The logarithm of the size of the rings there.
    pub(super) peer_size_log2: u8,
    pub(super) near: Slot,
    pub(super) far: Slot,
    /// The other net has closed the channel.
    pub(super) is_gone: bool,
}
