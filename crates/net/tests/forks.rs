//! Forked children, which have copies of the descriptors of their parent, keep nothing of it alive. Not beside other tests, whose
//! descriptors a child would have too.

#![expect(unsafe_code, reason = "fork, and memory that a program shares with a net")]

mod fake_net;

use std::os::fd::AsRawFd;

use spinio_device::registry;
use spinio_net::{Net, Options};
use spinio_ring::granule::{self, Packet};
use spinio_sys::linux::channel::{Until, receive_packet, wait_socket};

use self::fake_net::connect_well;

/// A forked child of this process that does nothing; it is killed with this.
struct Child(libc::pid_t);

impl Child {
    fn new() -> Child {
        // SAFETY: the child makes system calls only.
        match unsafe { libc::fork() } {
            0 => loop {
                // SAFETY: no memory is involved.
                unsafe { libc::pause() };
            },
            pid => {
                assert!(pid > 0);
                Child(pid)
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: it is our child, which nothing else waits for.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

#[test]
fn close_is_seen_while_a_forked_child_lives() {
    let (socket, net) = connect_well("forks");
    let _child = Child::new();
    drop(socket);
    let channel = net.channel.as_raw_fd();
    let mut bytes = [0; granule::PACKET_BYTES];
    loop {
        assert_eq!(wait_socket(channel, Until::Readable, Some(300_000_000_000)), Ok(true), "the channel has no end");
        match receive_packet(channel, &mut bytes).unwrap() {
            (0, _) => break,
            (len, _) => assert_eq!(Packet::decode(&bytes[..len]), Some(Packet::Ring)),
        }
    }
}

#[test]
fn forked_child_has_no_granule_of_a_net() {
    let options = Options { sockets: 64, connections: 16, ring_bytes: 4096, ..Options::default() };
    let net = Net::open(registry::emulated().unwrap(), options).unwrap();
    let child = Child::new();
    let granules = |process: String| {
        let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
        maps.lines().filter(|line| line.contains("memfd:spinio-net")).count()
    };
    assert_eq!(granules("self".to_string()), 4);
    assert_eq!(granules(child.0.to_string()), 0);
    net.close().unwrap();
}
