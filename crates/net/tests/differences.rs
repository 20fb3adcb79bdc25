//! Where sockets of kernels differ from those of programs (docs/semantics.md), as far as no test of `device/tests` compares it.

#![expect(unsafe_code, reason = "bytes that are sent as urgent ones, and descriptors")]

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use spinio_device::registry;
use spinio_net::{Net, NetAddress, Options};
use spinio_sys::Errno;

const PATIENCE: Duration = Duration::from_secs(120);

/// A net, its end of a TCP connection, and this program's.
fn connected() -> (Net, i32, TcpStream) {
    let options = Options { sockets: 64, connections: 16, ring_bytes: 4096, idle_us: 500, ..Options::default() };
    let net = Net::open(registry::emulated().unwrap(), options).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = NetAddress::parse(&format!("tcp://{}", listener.local_addr().unwrap())).unwrap();
    let socket = net.connect(&address).unwrap();
    (net, socket, listener.accept().unwrap().0)
}

fn send_urgent(stream: &TcpStream, bytes: &[u8]) {
    // SAFETY: the bytes live across the call.
    let sent = unsafe { libc::send(stream.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), libc::MSG_OOB) };
    assert_eq!(sent, bytes.len() as isize);
}

#[test]
fn urgent_bytes_of_a_peer_are_not_in_the_stream() {
    let (net, socket, mut peer) = connected();
    peer.write_all(b"before").unwrap();
    send_urgent(&peer, b"!");
    peer.write_all(b"after").unwrap();
    let begun = Instant::now();
    while net.stats().bytes_received < 11 {
        assert!(begun.elapsed() < PATIENCE, "{} bytes", net.stats().bytes_received);
        std::thread::sleep(Duration::from_millis(1));
    }
    match net.release(socket, 4096) {
        Ok((fd, unread)) => {
            // SAFETY: this process has just received it.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
            assert_eq!(String::from_utf8_lossy(&unread), "beforeafter");
        }
        Err(error) if [Errno::PERM, Errno::NOSYS].contains(&error.errno) => {
            println!("skipped: this sandbox refuses pidfd_getfd ({error})");
        }
        Err(error) => panic!("{error}"),
    }
    net.close().unwrap();
}

#[test]
fn descriptors_of_a_net_are_not_in_the_table_of_the_program() {
    let (net, _socket, peer) = connected();
    // The inode of the net's end is that of the peer's peer: looked for by its port in the table of connections.
    let port = format!(":{:04X} ", peer.peer_addr().unwrap().port());
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let line =
        table.lines().find(|line| line.split_whitespace().nth(1).is_some_and(|own| format!("{own} ").ends_with(&port)));
    let inode = line.and_then(|line| line.split_whitespace().nth(9)).unwrap();
    let has_it = |folder: &str| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| std::fs::read_link(entry.path()).ok())
            .any(|to| to.to_string_lossy() == format!("socket:[{inode}]"))
    };
    assert!(!has_it("/proc/self/fd"));
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    assert!(
        tasks.map(|task| format!("{}/fd", task.path().display())).any(|folder| has_it(&folder)),
        "no thread has it"
    );
    net.close().unwrap();
}
