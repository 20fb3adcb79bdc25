//! The door of a listening socket: where CPU programs ask for memory, before they connect. Both sides of it use this.
//!
//! A door is an abstract UNIX socket of packets whose name is made of the listening socket's address, so it is found in one
//! network namespace only. Each side accepts only processes of its own user. That the holder of a door also has the listening
//! socket is not taken on trust: its proxy offers memory only for a connection that it has accepted.

use spinio_sys::linux::channel::peer_credentials;
use spinio_sys::linux::socket::{AF_INET, AF_INET6, AF_UNIX};
use spinio_sys::linux::{Fd, geteuid};

use crate::NetAddress;

/// How long each step of an upgrade may take.
pub(crate) const PATIENCE_NS: u64 = 5_000_000_000;

const PREFIX: &str = "spinio-net-2/";

/// The name of a listening socket's door.
pub(crate) fn name(listener: &NetAddress) -> Vec<u8> {
    let mut bytes = AF_UNIX.to_ne_bytes().to_vec();
    bytes.push(0);
    bytes.extend(PREFIX.bytes());
    let text = listener.to_string();
    if text.len() <= 64 {
        bytes.extend(text.bytes());
    } else {
        // A path may be longer than a name: FNV-1a.
        let hash =
            text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        bytes.extend(format!("#{hash:016x}").bytes());
    }
    bytes
}

/// The addresses at which a listening socket for `to` may have its door.
pub(crate) fn candidates(to: &NetAddress) -> Vec<NetAddress> {
    let mut all = vec![to.clone()];
    let bytes = to.bytes();
    let any = |family: u16, len: usize| {
        let mut any = family.to_ne_bytes().to_vec();
        any.extend(&bytes[2..4]);
        any.resize(len, 0);
        NetAddress::of(&any)
    };
    match (to.family(), bytes.len()) {
        (AF_INET, 16) => all.extend([any(AF_INET, 16), any(AF_INET6, 28)]),
        (AF_INET6, 28) => all.push(any(AF_INET6, 28)),
        _ => {}
    }
    all
}

/// Whether two names are of one socket, of which a socket of IPv6 may see an address of IPv4.
pub(crate) fn same_name(announced: &[u8], seen: &[u8]) -> bool {
    const MAPPED: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
    match (announced.len(), seen.len()) {
        (16, 16) => announced[..8] == seen[..8],
        (28, 28) => announced[..4] == seen[..4] && announced[8..24] == seen[8..24],
        (16, 28) => announced[2..4] == seen[2..4] && seen[8..20] == MAPPED && announced[4..8] == seen[20..24],
        _ => announced.len() > 3 && announced == seen,
    }
}

/// The process at the other end of a channel, if it is of the same user.
pub(crate) fn process_of(channel: Fd) -> Option<u32> {
    peer_credentials(channel).ok().filter(|(_, uid)| *uid == geteuid()).map(|(pid, _)| pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doors_are_found_by_the_address_or_by_that_of_all_interfaces() {
        let parse = |text: &str| NetAddress::parse(text).unwrap();
        let texts = |to: &str| -> Vec<String> { candidates(&parse(to)).iter().map(NetAddress::to_string).collect() };
        assert_eq!(texts("tcp://127.0.0.1:80"), ["tcp://127.0.0.1:80", "tcp://0.0.0.0:80", "tcp://[::]:80"]);
        assert_eq!(texts("tcp://[::1]:80"), ["tcp://[::1]:80", "tcp://[::]:80"]);
        assert_eq!(texts("unix:@a"), ["unix:@a"]);
        let long = name(&parse(&format!("unix:///{}", "x".repeat(100))));
        assert!(long.len() < 60 && long != name(&parse(&format!("unix:///{}", "x".repeat(101)))));
    }

    #[test]
    fn names_of_one_socket_are_the_same_in_both_protocols() {
        let bytes = |text| NetAddress::parse(text).unwrap().bytes().to_vec();
        let four = bytes("tcp://127.0.0.1:5000");
        assert!(same_name(&four, &bytes("tcp://[::ffff:127.0.0.1]:5000")));
        assert!(!same_name(&four, &bytes("tcp://[::ffff:127.0.0.2]:5000")));
        assert!(same_name(&four, &four) && !same_name(&four, &bytes("tcp://127.0.0.1:5001")));
        assert!(!same_name(&[1, 0], &[1, 0]), "two sockets without a name");
    }
}
