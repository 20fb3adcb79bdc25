//! How a program and a net agree on a granule, on the program's side; and the granule as the program uses it.
//! [`spinio_ring::granule`] has the steps, `proxy/shared.rs` the other side.
//!
//! Each step is bounded. Whatever happens, the packet GO decides alone who has the bytes, so both sides always agree.

#![expect(unsafe_code, reason = "copies from and to memory that GPU kernels access at the same time")]

use std::sync::atomic::AtomicU64;

use spinio_host::settings::Settings;
use spinio_ring::Position;
use spinio_ring::granule::{PACKET_BYTES, Packet, Refusal};
use spinio_sys::linux::channel::{Until, receive_packet, send_packet, wait_socket};
use spinio_sys::linux::socket::{self, AF_UNIX, is_inet};
use spinio_sys::linux::{self, Fd};
use spinio_sys::{Errno, injection_point};

use crate::NetAddress;
use crate::door::{self, PATIENCE_NS};
use crate::mapped_granule::MappedGranule;
use crate::socket_fd::SocketFd;

const SEQPACKET: u16 = 5;

/// Why no door was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreached {
    NoDescriptor,
    /// Many others wait there.
    Busy,
    NoDoor,
}

impl Unreached {
    const fn sentence(self) -> &'static str {
        match self {
            Unreached::NoDescriptor => NO_DESCRIPTOR,
            Unreached::Busy => "too many programs connect to the net",
            Unreached::NoDoor => "no net that shares memory listens there",
        }
    }
}

const NO_DESCRIPTOR: &str = "no descriptor is left";
const LATE: &str = "the net did not answer in time, or another socket took the connection";

/// A socket that is about to connect, and whose name a net knows.
pub(crate) struct Announced {
    channel: SocketFd,
}

/// Announces a socket that is not connected yet. The reason why not, if not.
pub(crate) fn announce(anchor: Fd, to: &NetAddress) -> Result<Announced, &'static str> {
    if !Settings::of_process().net_upgrade {
        return Err("SPINIO_NET_UPGRADE=off");
    }
    let channel = knock(to).map_err(Unreached::sentence)?;
    injection_point!("program: door knocked at");
    if door::process_of(channel.0).is_none() {
        return Err("a net of another user listens there");
    }
    let own = own_name(to);
    if socket::bind(anchor, &own).is_err() {
        return Err("the address is not one of this machine");
    }
    let announced = Announced { channel };
    let announce = Packet::Announce { kernel: false, peer: None };
    if send_packet(announced.channel.0, &announce.encode(), Some(anchor)).is_err() {
        return Err(early_refusal(announced.channel.0).map_or(LATE, reason_of));
    }
    injection_point!("program: announcement sent");
    match announced.receive() {
        (Some(Packet::Welcome), _) => {
            injection_point!("program: welcome received");
            Ok(announced)
        }
        (Some(Packet::Refused(refusal)), _) => Err(reason_of(refusal)),
        _ => Err(LATE),
    }
}

fn reason_of(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::Memory => "the net has no memory left for programs",
        Refusal::Backlog => "the backlog of the listening socket is full",
        Refusal::Setting => "a setting of the net",
        Refusal::Descriptors => "the net has no descriptor left",
    }
}

/// What a net has answered that no longer takes the announcement.
fn early_refusal(channel: Fd) -> Option<Refusal> {
    let mut bytes = [0; PACKET_BYTES];
    let (len, file) = receive_packet(channel, &mut bytes).ok()?;
    drop(file.map(SocketFd));
    refusal_of(&bytes[..len])
}

/// The refusal that a packet is.
pub(crate) fn refusal_of(packet: &[u8]) -> Option<Refusal> {
    match Packet::decode(packet) {
        Some(Packet::Refused(refusal)) => Some(refusal),
        _ => None,
    }
}

/// The name to which a socket is bound that connects there: the Linux kernel chooses port or name. A connection inside one
/// machine has the same address at both ends.
pub(crate) fn own_name(to: &NetAddress) -> Vec<u8> {
    if !is_inet(to.family()) {
        return AF_UNIX.to_ne_bytes().to_vec();
    }
    let mut own = to.bytes().to_vec();
    own[2..4].fill(0);
    // To all interfaces means: to this machine.
    let address = if own.len() == 16 { 4..8 } else { 8..24 };
    if let Some(address) = own.get_mut(address).filter(|address| address.iter().all(|byte| *byte == 0)) {
        let last = address.len() - 1;
        (address[0], address[last]) = (if last == 3 { 127 } else { 0 }, 1);
    }
    own
}

/// A channel to the door of a listening socket.
pub(crate) fn knock(to: &NetAddress) -> Result<SocketFd, Unreached> {
    for listener in door::candidates(to) {
        let Ok(channel) = socket::new_socket(AF_UNIX, SEQPACKET).map(SocketFd) else {
            return Err(Unreached::NoDescriptor);
        };
        match socket::connect(channel.0, &door::name(&listener)) {
            Ok(()) => return Ok(channel),
            Err(Errno::AGAIN) => return Err(Unreached::Busy),
            Err(_) => {}
        }
    }
    Err(Unreached::NoDoor)
}

impl Announced {
    fn send(&self, packet: &Packet) -> Result<(), &'static str> {
        send_packet(self.channel.0, &packet.encode(), None).map_err(|_| LATE)
    }

    /// The next packet, if it comes in time.
    fn receive(&self) -> (Option<Packet>, Option<SocketFd>) {
        let until = linux::monotonic_ns() + PATIENCE_NS;
        loop {
            match self.take() {
                Err(Errno::AGAIN) => {}
                Err(_) => return (None, None),
                Ok(packet) => return packet,
            }
            let left = until.saturating_sub(linux::monotonic_ns());
            if left == 0 || wait_socket(self.channel.0, Until::Readable, Some(left)).is_err() {
                return (None, None);
            }
        }
    }

    fn take(&self) -> Result<(Option<Packet>, Option<SocketFd>), Errno> {
        let mut bytes = [0; PACKET_BYTES];
        let (len, fd) = receive_packet(self.channel.0, &mut bytes)?;
        Ok((Packet::decode(&bytes[..len]), fd.map(SocketFd)))
    }

    /// After the socket is connected: the memory through which the bytes go, or the reason why they go through Linux.
    pub(crate) fn agree(self) -> Result<Memory, &'static str> {
        let (size_log2, generation, first, file) = match self.receive() {
            (Some(Packet::Offer { size_log2, generation, first, peer: None }), file) => {
                // It comes with one, for which the Linux kernel had no number here.
                (size_log2, generation, first, file.ok_or(NO_DESCRIPTOR)?)
            }
            (Some(Packet::Refused(refusal)), _) => return Err(reason_of(refusal)),
            _ => return Err(LATE),
        };
        injection_point!("program: offer received");
        let granule = MappedGranule::map(file.0, size_log2).ok_or("the memory cannot be mapped")?;
        injection_point!("program: granule mapped");
        self.send(&Packet::Agreed)?;
        injection_point!("program: agreement sent");
        let mut go = self.receive().0;
        if go.is_none() {
            // From now on the net cannot send it. It may have done so before.
            let _ = socket::shutdown(self.channel.0, 2);
            go = self.take().ok().and_then(|(packet, _)| packet);
        }
        if go != Some(Packet::Go { peer: false }) {
            return Err(LATE);
        }
        injection_point!("program: go received");
        Ok(Memory { granule, generation, first, channel: Some(self.channel) })
    }
}

/// A granule.
pub(crate) struct Memory {
    granule: MappedGranule,
    pub(crate) generation: u16,
    pub(crate) first: Position,
    channel: Option<SocketFd>,
}

impl Memory {
    /// Bytes of each ring.
    pub(crate) fn size(&self) -> u64 {
        self.granule.size()
    }

    /// The words of both ends.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        self.granule.words()
    }

    /// The two parts of so many bytes of a ring, from a position on: their places, and the length of the first one.
    fn parts(&self, to_program: bool, position: Position, len: usize) -> ([*mut u8; 2], usize) {
        assert!(len as u64 <= self.size());
        let (at, to_end) = position.place(self.size());
        let ring = self.granule.ring(to_program);
        // SAFETY: inside the ring, since `at` is less than its size.
        (unsafe { [ring.add(at), ring] }, to_end.min(len))
    }

    /// The place of a position in a ring, and how many bytes are there up to its end.
    pub(crate) fn contiguous(&self, to_program: bool, position: Position) -> (*mut u8, usize) {
        let ([at, _], whole) = self.parts(to_program, position, self.size() as usize);
        (at, whole)
    }

    /// Copies received bytes out.
    ///
    /// # Safety
    /// The range must be writable.
    pub(crate) unsafe fn copy_out(&self, position: Position, to: *mut u8, len: usize) {
        let ([first, second], split) = self.parts(true, position, len);
        // SAFETY: guaranteed by the caller; a kernel that breaks the protocol changes only the bytes that it sends.
        unsafe {
            core::ptr::copy_nonoverlapping(first, to, split);
            core::ptr::copy_nonoverlapping(second, to.add(split), len - split);
        }
    }

    /// Copies bytes in that are to be sent.
    ///
    /// # Safety
    /// The range must be readable.
    pub(crate) unsafe fn copy_in(&self, position: Position, from: *const u8, len: usize) {
        let ([first, second], split) = self.parts(false, position, len);
        // SAFETY: guaranteed by the caller; no kernel reads these places before they are published.
        unsafe {
            core::ptr::copy_nonoverlapping(from, first, split);
            core::ptr::copy_nonoverlapping(from.add(split), second, len - split);
        }
    }

    /// Tells the proxy that the socket is closed, also while children of fork have the channel.
    pub(crate) fn leave(&self) {
        if let Some(channel) = &self.channel {
            let _ = socket::shutdown(channel.0, 2);
        }
    }

    /// Tells the proxy of an event. If the channel is full, it has such packets enough.
    pub(crate) fn ring(&self) {
        if let Some(channel) = &self.channel {
            let _ = send_packet(channel.0, &Packet::Ring.encode(), None);
        }
    }
}
