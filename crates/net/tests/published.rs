//! What `spinio net` reads: each socket has its transport, and the reason why it has that one.

mod texts;

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use spinio_device::registry;
use spinio_net::{Net, NetAddress, Options, Socket, SocketOptions};

use crate::texts::{becomes, counts, publishes};

const IN: u16 = 1;

fn options() -> Options {
    Options { sockets: 64, connections: 16, ring_bytes: 4096, idle_us: 500, ..Options::default() }
}

fn open(options: Options) -> Net {
    Net::open(registry::emulated().unwrap(), options).unwrap()
}

/// A listening socket whose connections the proxy accepts, as a kernel would that waits for its event set.
fn listen(net: &Net, address: &str) -> NetAddress {
    let listener = net.listen(&NetAddress::parse(address).unwrap(), 8).unwrap();
    net.add(net.set().unwrap(), listener, IN).unwrap();
    net.address(listener).unwrap()
}

fn name(of: &str) -> String {
    format!("unix:@spinio-published-{of}-{}", std::process::id())
}

#[test]
fn plain_sockets_keep_a_connection_with_linux_on_either_side() {
    if !publishes() {
        return;
    }
    let net = open(options());
    let address = listen(&net, "tcp://127.0.0.1:0");
    let place = address.to_string().strip_prefix("tcp://").unwrap().to_owned();
    let client = TcpStream::connect(&place).unwrap();
    let accepted = becomes(&place, None, ["kernel", "plain"]);
    assert_eq!(
        (&accepted["peer"], &accepted["peer_process"]),
        (&client.local_addr().unwrap().to_string().into(), &0.into())
    );
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = NetAddress::parse(&format!("tcp://{}", server.local_addr().unwrap())).unwrap();
    let connected = net.connect(&to).unwrap();
    becomes("", Some(connected), ["kernel", "plain"]);
    net.close().unwrap();
}

#[test]
fn connections_of_one_net_are_inside_until_its_rings_are_in_use() {
    if !publishes() {
        return;
    }
    // Half as many pairs of rings.
    let net = open(Options { connections: 8, ..options() });
    let address = listen(&net, &name("inside"));
    let clients: Vec<_> = (0..5).map(|_| net.connect(&address).unwrap()).collect();
    for client in &clients[..4] {
        becomes("", Some(*client), ["loopback", "inside"]);
    }
    becomes("", Some(clients[4]), ["kernel", "memory"]);
    counts("kept_by_memory", 1);
    net.close().unwrap();
}

#[test]
fn net_without_upgrades_says_so_on_both_sides() {
    if !publishes() {
        return;
    }
    let net = open(Options { no_upgrade: true, ..options() });
    let address = listen(&net, &name("off"));
    let client = net.connect(&address).unwrap();
    becomes("", Some(client), ["kernel", "setting"]);
    becomes(address.to_string().strip_prefix("unix:").unwrap(), None, ["kernel", "setting"]);
    net.close().unwrap();
}

#[test]
fn programs_and_other_nets_share_memory_until_none_is_left() {
    if !publishes() {
        return;
    }
    let net = open(Options { shared_connections: 1, ..options() });
    let address = listen(&net, &name("shared"));
    let local = address.to_string().strip_prefix("unix:").unwrap().to_owned();
    let program = Socket::connect(&address, SocketOptions::default()).unwrap();
    assert_eq!(program.transport().0, "shared");
    let accepted = becomes(&local, None, ["shared", "program"]);
    assert_eq!(accepted["peer_process"], std::process::id());
    let other = open(options());
    let kept = other.connect(&address).unwrap();
    becomes("", Some(kept), ["kernel", "granules"]);
    // The other side knows only that it asks for nothing any more.
    becomes(&local, None, ["kernel", "plain"]);
    other.close().unwrap();
    drop(program);
    net.close().unwrap();
}

#[test]
fn kernels_of_two_nets_name_the_process_of_the_other() {
    if !publishes() {
        return;
    }
    let (net, other) = (open(options()), open(options()));
    let address = listen(&net, &name("two"));
    let client = other.connect(&address).unwrap();
    let local = address.to_string().strip_prefix("unix:").unwrap().to_owned();
    // Where the emulated devices map each other's memory.
    for (local, number) in [("", Some(client)), (&local, None)] {
        assert_eq!(becomes(local, number, ["peer", "net"])["peer_process"], std::process::id());
    }
    other.close().unwrap();
    net.close().unwrap();
}

#[test]
fn sockets_of_the_program_stay_with_linux() {
    if !publishes() {
        return;
    }
    let net = open(options());
    let (stream, _peer) = UnixStream::pair().unwrap();
    let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
    for (fd, why) in [(OwnedFd::from(stream), "adopted"), (OwnedFd::from(datagrams), "type")] {
        match net.adopt(fd.into_raw_fd()) {
            Ok(number) => becomes("", Some(number), ["kernel", why]),
            Err(error) => return println!("skipped: this sandbox refuses pidfd_getfd ({error})"),
        };
    }
    net.close().unwrap();
}
