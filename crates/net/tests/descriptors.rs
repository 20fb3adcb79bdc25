//! Connections that stay with Linux since no descriptor was left: `spinio net` says so, on either side.

mod limit;
mod texts;

use std::fs::File;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use spinio_device::registry;
use spinio_net::{Net, NetAddress, Options, Socket, SocketOptions};

use crate::limit::{alone, leave, limit_to};
use crate::texts::{becomes, counts, publishes};

const PATIENCE: Duration = Duration::from_secs(120);
const IN: u16 = 1;
const DESCRIPTORS: [&str; 2] = ["kernel", "descriptors"];

fn open() -> Net {
    let options = Options { sockets: 64, connections: 16, ring_bytes: 4096, idle_us: 500, ..Options::default() };
    Net::open(registry::emulated().unwrap(), options).unwrap()
}

/// An address at which nothing listens yet.
fn name(of: &str) -> NetAddress {
    NetAddress::parse(&format!("unix:@spinio-descriptors-{of}-{}", std::process::id())).unwrap()
}

/// A listening socket whose connections the proxy accepts, as a kernel would that waits for its event set.
fn listen(net: &Net, address: &NetAddress) -> NetAddress {
    let listener = net.listen(address, 8).unwrap();
    net.add(net.set().unwrap(), listener, IN).unwrap();
    net.address(listener).unwrap()
}

#[test]
fn connection_inside_a_net_that_cannot_be_accepted() {
    let _alone = alone();
    if !publishes() {
        return;
    }
    let net = open();
    for (at, address) in [name("inside"), NetAddress::parse("tcp://127.0.0.1:0").unwrap()].iter().enumerate() {
        let address = listen(&net, address);
        let one = leave(1);
        let client = net.connect(&address).unwrap();
        drop(one);
        becomes("", Some(client), DESCRIPTORS);
        let text = address.to_string();
        let local = text.strip_prefix("unix:").or(text.strip_prefix("tcp://")).unwrap();
        becomes(local, None, DESCRIPTORS);
        counts("kept_by_descriptors", at as u64 + 1);
        // The next one is as without a limit.
        let client = net.connect(&address).unwrap();
        becomes("", Some(client), ["loopback", "inside"]);
    }
    net.close().unwrap();
}

#[test]
fn connection_for_which_no_door_can_be_looked_for() {
    let _alone = alone();
    if !publishes() {
        return;
    }
    let (net, server) = (open(), TcpListener::bind("127.0.0.1:0").unwrap());
    let to = NetAddress::parse(&format!("tcp://{}", server.local_addr().unwrap())).unwrap();
    let one = leave(1);
    let client = net.connect(&to).unwrap();
    drop(one);
    becomes("", Some(client), DESCRIPTORS);
    counts("kept_by_descriptors", 1);
    let client = net.connect(&to).unwrap();
    becomes("", Some(client), ["kernel", "plain"]);
    net.close().unwrap();
}

#[test]
fn listening_socket_opens_its_door_once_a_descriptor_is_left() {
    let _alone = alone();
    let (net, address) = (open(), name("door"));
    let one = leave(1);
    let listener = net.listen(&address, 8).unwrap();
    drop(one);
    net.add(net.set().unwrap(), listener, IN).unwrap();
    let (begun, mut reason) = (Instant::now(), "");
    while reason != "a net of this user on this machine listens there" {
        assert!(begun.elapsed() < PATIENCE, "{reason}");
        reason = Socket::connect(&address, SocketOptions::default()).unwrap().transport().1;
        std::thread::sleep(Duration::from_millis(1));
    }
    net.close().unwrap();
}

/// A thread of the program maps it. The proxies, which have tables of their own, have descriptors all the time.
#[test]
fn device_memory_of_another_net_is_mapped_once_a_descriptor_is_left() {
    let _alone = alone();
    if !publishes() {
        return;
    }
    let (net, other, third) = (open(), open(), open());
    let (address, at_third) = (listen(&net, &name("net")), listen(&third, &name("third")));
    // Each has made what it offers, and uses it no more.
    for (from, to, listening) in [(&other, &at_third, &third), (&third, &address, &net)] {
        let client = from.connect(to).unwrap();
        becomes("", Some(client), ["peer", "net"]);
        let accepted = becomes(to.to_string().strip_prefix("unix:").unwrap(), None, ["peer", "net"]);
        from.close_socket(client).unwrap();
        listening.close_socket(accepted["socket"].as_i64().unwrap() as i32).unwrap();
        let begun = Instant::now();
        while [from, listening].iter().any(|net| net.stats().open > 1) {
            assert!(begun.elapsed() < PATIENCE, "a closed socket is there");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let files: Vec<File> = (0..200).map(|_| File::open("/dev/null").unwrap()).collect();
    let none = limit_to(files[files.len() - 1].as_raw_fd() as u64 + 1);
    let client = other.connect(&address).unwrap();
    drop((none, files));
    becomes("", Some(client), ["shared", "pinned"]);
    let client = other.connect(&address).unwrap();
    becomes("", Some(client), ["peer", "net"]);
    for net in [net, other, third] {
        net.close().unwrap();
    }
}
