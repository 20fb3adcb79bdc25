//! Device memory of connections between two nets: each end stores into the other one's (NVLink, or one GPU), and loads from its own.
//!
//! ```text
//!   ANNOUNCE: can use it ──────────────> makes memory, if none is left ── WELCOME, OFFER, MEMORY ──> maps it, makes its own
//!   both have mapped what the other one has offered? <──────────────────────────────── MEMORY, AGREED
//!     GO: peer, or only the granule ───────────────────────────────────────────────────────────────> the end that connects
//! ```
//!
//! A net that cannot map the other one's (no peer access, no memory left) says nothing of its own, and the bytes go through the
//! granule. The words go through both: device memory for kernels, the granule for the proxies.

use spinio_ring::granule::Packet;
use spinio_ring::peer::Remote;
use spinio_sys::injection_point;
use spinio_sys::linux::channel::send_packet;

use super::Proxy;
use super::channels::Stage;
use super::rings::Slot;
use crate::importer::Mapped;
use crate::socket_fd::SocketFd;

impl Proxy {
    /// Both have agreed: bytes go through device memory, if each has mapped that of the other one, or through the granule.
    pub(super) fn go_on(&mut self, number: u32) {
        let Some(channel) = self.shared.channel(number) else { return };
        let Stage::Offered(granule) = channel.stage else { return };
        let remote = channel.near.ready().zip(channel.far.ready()).map(|(near, far)| Remote { near, far });
        let (fd, index) = (channel.fd.fd(), channel.listener.index);
        if send_packet(fd, &Packet::Go { peer: remote.is_some() }.encode(), None).is_err() {
            return self.end_channel(number);
        }
        injection_point!("accepting net: go sent");
        channel.stage = Stage::Running(granule);
        let unused = if remote.is_none() { std::mem::take(&mut channel.near) } else { Slot::None };
        self.rings.give_back(unused);
        (if remote.is_some() { &self.counters.peer } else { &self.counters.shared }).add(1);
        self.decide(number, index, Some((granule, remote)));
    }

    /// Device memory of this net is made.
    pub(super) fn made(&mut self, place: u16, fd: Option<SocketFd>, now: u64) {
        let done = fd.is_some();
        self.rings.made(place, fd);
        for number in 0..self.shared.channels.len() as u32 {
            let Some(channel) = self.shared.channel(number) else { continue };
            channel.near.settle(place, done);
            if channel.stage == Stage::Preparing && !matches!(channel.near, Slot::Soon(_)) {
                self.welcome(number);
            }
        }
        self.settle_announced(place, done, now);
    }

    /// Device memory of another net is mapped, or cannot be.
    pub(super) fn mapped(&mut self, place: u16, mapped: Mapped, now: u64) {
        let done = mapped == Mapped::Yes;
        self.rings.mapped(place, mapped);
        for number in 0..self.shared.channels.len() as u32 {
            let Some(channel) = self.shared.channel(number) else { continue };
            channel.far.settle(place, done);
            if channel.agreed && !matches!(channel.far, Slot::Soon(_)) {
                self.go_on(number);
            }
        }
        self.settle_announced(place, done, now);
    }
}
