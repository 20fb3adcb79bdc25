//! Connections whose both ends are sockets of one net: how they are found, and which pairs of rings they use.
//!
//! ```text
//!   connecting socket   own name A, peer's name L  ──┐
//!                                                    ├─ mirrored: one connection, both ends here
//!   accepted socket     own name L, peer's name A  ──┘
//!   pair: free ── take ──> client | waits in the backlog ── join ──> client | accepted ── both leave ──> free, next generation
//! ```
//!
//! Nothing is taken on trust: a connection counts as one inside the net only once the proxy has accepted its other end itself.
//! TCP connections are compared by both names. UNIX clients have no name: the proxy gives them one of the abstract names that
//! Linux chooses, each of which belongs to one socket of this network namespace, and keeps it from the kernels.
//!
//! Known flaw: a UNIX client that is bound to a path stays with Linux, since several sockets can have the name of one path.

use std::collections::VecDeque;

use spinio_ring::layout::Descriptor;
use spinio_ring::peer::{Place, Told, next_generation};
use spinio_sys::linux::socket::{AF_UNIX, SocketAddress};

use crate::kept::Kept;
use crate::socket_fd::ForeignFd;

/// The end of a connection inside the net that a socket is.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) place: Place,
    pub(crate) told: Told,
}

/// A connection that was accepted from Linux, before a kernel has accepted it.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) fd: ForeignFd,
    pub(crate) peer: SocketAddress,
    /// Its other end is in this net, or a program that shares memory.
    pub(crate) place: Option<Place>,
    /// It is not known yet whether the program will: the channel that tells.
    pub(crate) undecided: Option<u32>,
    /// Why it goes through Linux.
    pub(crate) kept: Option<Kept>,
}

/// What a socket has to do with connections inside the net.
#[derive(Debug, Default)]
pub(crate) struct Meeting {
    /// It is an end of one.
    pub(crate) end: Option<End>,
    /// The name of the client is one that the proxy has chosen.
    pub(crate) unnamed: bool,
    /// The proxy has given it its name, so that another net knows it.
    pub(crate) named: bool,
    /// It connects, or is connected, to another net, with this channel.
    pub(crate) announced: Option<u32>,
    /// Why its bytes go through Linux, once that is known.
    pub(crate) kept: Option<Kept>,
    /// It connects, and waits for the other end since this time.
    pub(crate) since: Option<u64>,
    /// Of a listening socket: its name, its backlog, and what waits there.
    pub(crate) name: Vec<u8>,
    pub(crate) backlog: usize,
    pub(crate) held: VecDeque<Held>,
    /// Names of clients of this net that wait there, and why they stay with Linux.
    pub(crate) kept_clients: VecDeque<(Vec<u8>, Kept)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    None,
    /// In a backlog.
    Backlog,
    Socket(Descriptor),
}

#[derive(Debug)]
struct Pair {
    generation: u16,
    holders: [Holder; 2],
}

/// The pairs of ends and rings in device memory.
#[derive(Debug)]
pub(crate) struct Pairs {
    pairs: Vec<Pair>,
    free: VecDeque<u32>,
    size_log2: u32,
}

impl Pairs {
    pub(crate) fn new(count: u32, ring_bytes: u64) -> Pairs {
        let pairs = (0..count).map(|_| Pair { generation: 0, holders: [Holder::None; 2] }).collect();
        Pairs { pairs, free: (0..count).collect(), size_log2: ring_bytes.trailing_zeros() }
    }

    /// Whether the net has any.
    pub(crate) fn is_enabled(&self) -> bool {
        !self.pairs.is_empty()
    }

    /// Whether one is free.
    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// A pair for a client, whose other end waits in a backlog.
    pub(crate) fn take(&mut self, client: Descriptor) -> Option<Place> {
        let number = self.free.pop_front()?;
        let pair = &mut self.pairs[number as usize];
        pair.generation = next_generation(pair.generation);
        pair.holders = [Holder::Socket(client), Holder::Backlog];
        Some(Place {
            pair: number,
            second: false,
            generation: pair.generation,
            size_log2: self.size_log2,
            shared: false,
            remote: None,
        })
    }

    fn holder(&mut self, place: Place, other: bool) -> Option<&mut Holder> {
        let pair = self.pairs.get_mut(place.pair as usize).filter(|pair| pair.generation == place.generation)?;
        Some(&mut pair.holders[usize::from(place.second != other)])
    }

    /// An accepted socket is the other end.
    pub(crate) fn join(&mut self, place: Place, socket: Descriptor) {
        if let Some(holder) = self.holder(place, false) {
            *holder = Holder::Socket(socket);
        }
    }

    /// The socket at the other end, if there is one.
    pub(crate) fn other(&mut self, place: Place) -> Option<Descriptor> {
        match self.holder(place, true) {
            Some(Holder::Socket(descriptor)) => Some(*descriptor),
            _ => None,
        }
    }

    /// Whether the other end has left.
    pub(crate) fn other_has_left(&mut self, place: Place) -> bool {
        self.holder(place, true).is_none_or(|holder| *holder == Holder::None)
    }

    /// An end is used no more.
    pub(crate) fn leave(&mut self, place: Place) {
        match self.holder(place, false) {
            Some(holder) if *holder != Holder::None => *holder = Holder::None,
            _ => return,
        }
        if self.pairs[place.pair as usize].holders == [Holder::None; 2] {
            self.free.push_back(place.pair);
        }
    }
}

fn family(name: &[u8]) -> u16 {
    name.first_chunk().map_or(0, |bytes| u16::from_ne_bytes(*bytes))
}

/// A UNIX name without the family, and a path without what follows its end.
fn unix_name(name: &[u8]) -> &[u8] {
    let name = name.get(2..).unwrap_or_default();
    match name.first() {
        None | Some(0) => name,
        Some(_) => name.split(|byte| *byte == 0).next().unwrap_or_default(),
    }
}

/// Port and address.
fn inet_name(name: &[u8]) -> Option<(&[u8], &[u8])> {
    match name.len() {
        16 => Some((&name[2..4], &name[4..8])),
        28 => Some((&name[2..4], &name[8..24])),
        _ => None,
    }
}

/// Whether a UNIX name is that of one socket only.
pub(crate) fn is_abstract(name: &[u8]) -> bool {
    name.len() > 3 && name[2] == 0
}

/// Whether a client with these names, of which the UNIX ones need not be complete, may be connected to the listening socket
/// that has this name.
pub(crate) fn may_lead_to(listener: &[u8], own: &[u8], peer: &[u8]) -> bool {
    if family(listener) != family(peer) {
        return false;
    }
    if family(peer) == AF_UNIX {
        return !unix_name(peer).is_empty() && unix_name(listener) == unix_name(peer);
    }
    let (Some((port, address)), Some((to_port, to))) = (inet_name(listener), inet_name(peer)) else { return false };
    let is_this_machine = || to[0] == 127 && to.len() == 4 || inet_name(own).is_some_and(|(_, from)| from == to);
    port == to_port && (address == to || address.iter().all(|byte| *byte == 0) && is_this_machine())
}

/// Whether two sockets are the ends of one connection: (own name, peer's name) of the client and of the accepted one.
pub(crate) fn are_ends(client: (&[u8], &[u8]), accepted: (&[u8], &[u8])) -> bool {
    if family(client.0) == AF_UNIX {
        return is_abstract(client.0) && client.0 == accepted.1;
    }
    inet_name(client.0).is_some() && client.0 == accepted.1 && client.1 == accepted.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inet(port: u16, address: [u8; 4]) -> Vec<u8> {
        let mut name = vec![2, 0];
        name.extend(port.to_be_bytes());
        name.extend(address);
        name.extend([0; 8]);
        name
    }

    fn unix(name: &[u8]) -> Vec<u8> {
        [&[1, 0], name].concat()
    }

    const HOME: [u8; 4] = [127, 0, 0, 1];

    #[test]
    fn names_lead_to_a_listening_socket_of_this_machine_only() {
        let (any, home, far) = (inet(80, [0; 4]), inet(80, HOME), inet(80, [192, 0, 2, 1]));
        let own = inet(5000, HOME);
        assert!(may_lead_to(&home, &own, &home) && may_lead_to(&any, &own, &home));
        assert!(!may_lead_to(&any, &own, &far), "the same port of another machine");
        assert!(may_lead_to(&any, &inet(5000, [192, 0, 2, 1]), &far), "it is this machine");
        assert!(!may_lead_to(&home, &own, &inet(81, HOME)));
        assert!(
            may_lead_to(&unix(b"/a\0"), &unix(b""), &unix(b"/a")) && may_lead_to(&unix(b"\0a"), &[], &unix(b"\0a"))
        );
        assert!(!may_lead_to(&unix(b"\0a"), &[], &unix(b"\0a\0")) && !may_lead_to(&unix(b""), &[], &unix(b"")));
    }

    #[test]
    fn ends_of_one_connection_have_mirrored_names() {
        let (a, b) = (inet(5000, HOME), inet(80, HOME));
        assert!(are_ends((&a, &b), (&b, &a)));
        assert!(!are_ends((&a, &inet(80, [10, 0, 0, 1])), (&b, &a)), "a translated address");
        assert!(are_ends((&unix(b"\x0000001"), &unix(b"/l\0")), (&unix(b"/l\0"), &unix(b"\x0000001"))));
        assert!(
            !are_ends((&unix(b"/c\0"), &unix(b"/l\0")), (&unix(b"/l\0"), &unix(b"/c\0"))),
            "a path can be bound again"
        );
        assert!(!are_ends((&unix(b""), &unix(b"/l\0")), (&unix(b"/l\0"), &unix(b""))));
    }

    #[test]
    fn pair_is_free_once_both_ends_have_left_and_has_another_generation_then() {
        let socket = |index| Descriptor { index, epoch: 1 };
        let mut pairs = Pairs::new(1, 4096);
        let client = pairs.take(socket(1)).unwrap();
        let accepted = Place { second: true, ..client };
        assert!(pairs.take(socket(2)).is_none() && pairs.other(client).is_none());
        pairs.join(accepted, socket(7));
        assert_eq!((pairs.other(client), pairs.other(accepted)), (Some(socket(7)), Some(socket(1))));
        pairs.leave(client);
        pairs.leave(client);
        assert!(!pairs.has_room() && pairs.other_has_left(accepted) && !pairs.other_has_left(client));
        pairs.leave(accepted);
        let again = pairs.take(socket(3)).unwrap();
        assert_eq!((again.pair, again.generation), (0, 2));
        assert!(pairs.other_has_left(client) && pairs.other(accepted).is_none(), "of an earlier use");
        pairs.leave(client);
        assert!(!pairs.has_room());
    }
}
