//! Doors of listening sockets where something is used up: this test plays the programs, packet by packet.

#![expect(unsafe_code, reason = "descriptors, and options of sockets")]

mod limit;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use spinio_device::registry;
use spinio_net::{Net, NetAddress, Options, Socket, SocketOptions};
use spinio_ring::granule::{PACKET_BYTES, Packet, Refusal};
use spinio_sys::Errno;
use spinio_sys::linux::channel::{Until, receive_packet, send_packet, wait_socket};
use spinio_sys::linux::socket::{self, AF_UNIX};

use crate::limit::{alone, leave, limit, proxy_descriptors, set_limit};

const STREAM: u16 = 1;
const SEQPACKET: u16 = 5;
/// Much less than the 5 s after which a program goes on without an answer.
const AT_ONCE: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(120);

fn open() -> Net {
    let options = Options { sockets: 64, connections: 16, ring_bytes: 4096, idle_us: 500, ..Options::default() };
    Net::open(registry::emulated().unwrap(), options).unwrap()
}

/// A net that listens, the address of the socket, and that of its door.
fn listening(name: &str) -> (Net, NetAddress, NetAddress) {
    let parse = |text: String| NetAddress::parse(&text).unwrap();
    let name = format!("spinio-doors-{name}-{}", std::process::id());
    let (address, door) = (parse(format!("unix:@{name}")), parse(format!("unix:@spinio-net-2/unix:@{name}")));
    let net = open();
    net.listen(&address, 64).unwrap();
    (net, address, door)
}

fn new_socket(kind: u16) -> OwnedFd {
    // SAFETY: made in this line.
    unsafe { OwnedFd::from_raw_fd(socket::new_socket(AF_UNIX, kind).unwrap()) }
}

fn announce(channel: &OwnedFd, anchor: &OwnedFd) -> Result<(), Errno> {
    let packet = Packet::Announce { kernel: false, peer: None };
    send_packet(channel.as_raw_fd(), &packet.encode(), Some(anchor.as_raw_fd()))
}

/// The next packet, if it comes in time; none at the end of the channel.
fn hear(channel: &OwnedFd, within: Duration) -> Option<Packet> {
    let wanted = Some(within.as_nanos() as u64);
    assert!(wait_socket(channel.as_raw_fd(), Until::Readable, wanted).unwrap(), "no answer within {within:?}");
    let mut bytes = [0; PACKET_BYTES];
    let (len, _) = receive_packet(channel.as_raw_fd(), &mut bytes).unwrap();
    Packet::decode(&bytes[..len])
}

/// Does something while no descriptor is left, neither here nor to the proxy, which is to be silent and asleep until there are some.
fn without_descriptors(net: &Net, channel: &OwnedFd, does: impl FnOnce() -> Result<(), Errno>) {
    let before = limit().rlim_cur;
    // Descriptor 0 is in use everywhere; with a limit of 0 poll would fail.
    set_limit(1);
    let begun = (Instant::now(), net.stats().proxy_ns);
    let done = does();
    let early = wait_socket(channel.as_raw_fd(), Until::Readable, Some(300_000_000));
    // The proxy first: what passes between the two is no time of its work.
    let worked = net.stats().proxy_ns - begun.1;
    let passed = begun.0.elapsed();
    set_limit(before);
    assert_eq!((done, early), (Ok(()), Ok(false)), "it is accepted without a descriptor");
    assert!(worked < passed.as_nanos() as u64 / 2, "the proxy spins: {worked} ns of {passed:?}");
}

#[test]
fn program_that_came_when_no_descriptor_was_left_is_served_once_there_are_some() {
    let _alone = alone();
    let (net, address, door) = listening("short");
    let (channel, anchor) = (new_socket(SEQPACKET), new_socket(STREAM));
    socket::bind(anchor.as_raw_fd(), &AF_UNIX.to_ne_bytes()).unwrap();
    without_descriptors(&net, &channel, || {
        socket::connect(channel.as_raw_fd(), door.bytes())?;
        announce(&channel, &anchor)
    });
    assert_eq!(hear(&channel, PATIENCE), Some(Packet::Welcome));
    without_descriptors(&net, &channel, || socket::connect(anchor.as_raw_fd(), address.bytes()));
    assert!(matches!(hear(&channel, PATIENCE), Some(Packet::Offer { .. })));
    net.close().unwrap();
}

#[test]
fn program_is_told_that_the_net_has_no_descriptor_left() {
    let _alone = alone();
    let (net, address, door) = listening("few");
    // Other threads of the net close some of its descriptors.
    let settle = |count: usize| {
        let begun = Instant::now();
        while proxy_descriptors().len() != count {
            assert!(begun.elapsed() < PATIENCE, "the proxy has {:?}, not {count}", proxy_descriptors());
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let before = proxy_descriptors().len();
    let knock = |channels: usize| {
        let channel = new_socket(SEQPACKET);
        socket::connect(channel.as_raw_fd(), door.bytes()).unwrap();
        settle(before + channels);
        channel
    };
    let refused = Some(Packet::Refused(Refusal::Descriptors));
    let anchor = new_socket(STREAM);
    socket::bind(anchor.as_raw_fd(), &AF_UNIX.to_ne_bytes()).unwrap();
    let channel = knock(1);
    let none = leave(0);
    announce(&channel, &anchor).unwrap();
    assert_eq!(hear(&channel, PATIENCE), refused, "none for the announced socket");
    drop((none, channel));
    settle(before);
    // The announced socket has a larger number than all that are left: that it is closed leaves no other one.
    let (channel, other) = (knock(1), knock(2));
    announce(&channel, &anchor).unwrap();
    assert_eq!(hear(&channel, PATIENCE), Some(Packet::Welcome));
    drop(other);
    settle(before + 2);
    let one = leave(1);
    socket::connect(anchor.as_raw_fd(), address.bytes()).unwrap();
    assert_eq!(hear(&channel, PATIENCE), refused, "none for the process of the program");
    drop(one);
    let stats = net.stats();
    assert_eq!((stats.kept_by_descriptors, stats.kept_by_granules), (2, 0));
    net.close().unwrap();
}

#[test]
fn one_channel_too_many_is_refused_at_once() {
    let _alone = alone();
    let (before, most) = (limit(), 1024);
    // This test and the proxy have a descriptor each of all channels.
    set_limit(before.rlim_max.min(4096));
    if limit().rlim_cur < most as u64 + 100 {
        return println!("skipped: a process has at most {} descriptors here", before.rlim_max);
    }
    let (net, address, door) = listening("many");
    let knock = || {
        let channel = new_socket(SEQPACKET);
        // The backlog of the door is shorter.
        while socket::connect(channel.as_raw_fd(), door.bytes()) == Err(Errno::AGAIN) {
            std::thread::sleep(Duration::from_millis(1));
        }
        channel
    };
    let mut channels: Vec<OwnedFd> = (0..most).map(|_| knock()).collect();
    let mut shortest = Duration::MAX;
    for _ in 0..20 {
        let begun = Instant::now();
        // One that has announced nothing yet, so that the answer comes before, and programs, which announce at once.
        let (early, program) = (knock(), Socket::connect(&address, SocketOptions::default()).unwrap());
        assert_eq!(hear(&early, PATIENCE), Some(Packet::Refused(Refusal::Memory)));
        // The proxy closes it after the answer.
        assert_eq!(hear(&early, PATIENCE), None);
        assert_eq!(announce(&early, &new_socket(STREAM)), Err(Errno::PIPE));
        assert_eq!(program.transport(), ("kernel", "the net has no memory left for programs"));
        shortest = shortest.min(begun.elapsed());
    }
    let client = open();
    client.connect(&address).unwrap();
    let stats = client.stats();
    assert_eq!((stats.kept_by_granules, stats.kept_by_time), (1, 0));
    // A busy machine may hold up some of them.
    assert!(shortest < AT_ONCE, "{shortest:?}");
    assert_eq!(net.stats().kept_by_granules, 41);
    // The others are as before.
    announce(&channels[0], &new_socket(STREAM)).unwrap();
    assert_eq!(hear(&channels.swap_remove(0), PATIENCE), Some(Packet::Welcome));
    client.close().unwrap();
    net.close().unwrap();
    set_limit(before.rlim_cur);
}

/// What connects is another socket, which has the same address as the announced one: the two are no client and its net.
#[test]
fn connection_of_another_socket_than_the_announced_one_stays_with_linux() {
    let _alone = alone();
    let net = open();
    let listening = NetAddress::parse("tcp://127.0.0.1:0").unwrap();
    let number = net.listen(&listening, 64).unwrap();
    let address = net.address(number).unwrap();
    let door = NetAddress::parse(&format!("unix:@spinio-net-2/{address}")).unwrap();
    let sharing = |at: Option<&NetAddress>| {
        // SAFETY: made in this line.
        let made = unsafe { OwnedFd::from_raw_fd(socket::new_socket(socket::AF_INET, STREAM).unwrap()) };
        let on: i32 = 1;
        // SAFETY: the number lives across the call.
        let set = unsafe {
            let value = (&raw const on).cast();
            libc::setsockopt(made.as_raw_fd(), libc::SOL_SOCKET, libc::SO_REUSEPORT, value, 4)
        };
        assert_eq!(set, 0);
        socket::bind(made.as_raw_fd(), at.unwrap_or(&listening).bytes()).unwrap();
        let name = NetAddress::of(socket::getsockname(made.as_raw_fd()).unwrap().bytes());
        (made, name)
    };
    for announces in [false, true] {
        let (connects, name) = sharing(None);
        let (other, _) = sharing(Some(&name));
        let channel = new_socket(SEQPACKET);
        socket::connect(channel.as_raw_fd(), door.bytes()).unwrap();
        announce(&channel, if announces { &connects } else { &other }).unwrap();
        assert_eq!(hear(&channel, PATIENCE), Some(Packet::Welcome));
        drop(other);
        match socket::connect(connects.as_raw_fd(), address.bytes()) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(errno) => panic!("{errno}"),
        }
        if announces {
            assert!(matches!(hear(&channel, PATIENCE), Some(Packet::Offer { .. })));
        } else {
            let offered = wait_socket(channel.as_raw_fd(), Until::Readable, Some(300_000_000));
            assert_eq!(offered, Ok(false), "memory is offered to another process");
        }
    }
    net.close().unwrap();
}
