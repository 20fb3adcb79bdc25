//! CPU programs that share memory with a net: this test plays the net, and writes what a right one and a wrong one can write.
//! What happens at random: the fuzz target `granules`. With kernels: `device/tests/net_shared.cpp`.

#![expect(unsafe_code, reason = "memory that a program shares with a net")]

mod signals;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use spinio_net::{NetAddress, Poll, PollSource, Socket, SocketOptions, poll};
use spinio_ring::event::{ERR, IN};
use spinio_ring::granule::{self, END_WORDS, Packet};
use spinio_ring::peer::{CLOSED, CONSUMED, Mark, RESET, TAIL};
use spinio_ring::{Position, Word};
use spinio_sys::linux::channel::{Until, receive_packet, receive_with, send_packet, wait_socket};
use spinio_sys::linux::{self, socket};

const RING: u64 = 4096;
const GENERATION: u16 = 7;
const SEQPACKET: u16 = 5;
const DONTWAIT: u32 = 0x40;

fn first() -> Position {
    Position::of(u64::MAX - 100)
}

/// A descriptor that is closed with this.
fn owned(fd: linux::Fd) -> OwnedFd {
    // SAFETY: the caller has just made it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn listening(kind: u16, name: &NetAddress) -> OwnedFd {
    let fd = owned(socket::new_socket(socket::AF_UNIX, kind).unwrap());
    socket::bind(fd.as_raw_fd(), name.bytes()).unwrap();
    socket::listen(fd.as_raw_fd(), 8).unwrap();
    fd
}

fn accept(listener: &OwnedFd) -> OwnedFd {
    wait_socket(listener.as_raw_fd(), Until::Readable, None).unwrap();
    owned(socket::accept(listener.as_raw_fd()).unwrap().0)
}

/// What the net has: the granule, mapped, and what keeps the connection.
struct Offered {
    start: *mut u8,
    anchor: OwnedFd,
    _kept: [OwnedFd; 2],
}

impl Offered {
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped until the process ends.
        unsafe { std::slice::from_raw_parts(self.start.cast(), granule::WORDS) }
    }

    /// A word of the kernel's end.
    fn say(&self, word: usize, position: Position, generation: u16) {
        self.words()[END_WORDS + word].store_release(Mark { position, generation, flags: 0 }.word());
    }

    /// What the program says.
    fn mark(&self, word: usize) -> Mark {
        Mark::of(self.words()[word].load_acquire())
    }
}

/// A program connects, and the net offers it this file.
fn connect(name: &str, file: OwnedFd) -> (Socket, Offered) {
    let parse = |text: String| NetAddress::parse(&text).unwrap();
    let name = format!("spinio-programs-{name}-{}", std::process::id());
    let address = parse(format!("unix:@{name}"));
    let listener = listening(1, &address);
    let door = listening(SEQPACKET, &parse(format!("unix:@spinio-net-1/unix:@{name}")));
    let (protection, bytes) = (linux::PROT_READ | linux::PROT_WRITE, granule::bytes(RING) as usize);
    // SAFETY: the Linux kernel chooses the address.
    let start = unsafe {
        linux::mmap(std::ptr::null_mut(), bytes, protection, linux::MAP_SHARED, file.as_raw_fd(), 0).unwrap()
    };
    let holder = std::thread::spawn(move || {
        let channel = accept(&door);
        let hear = || {
            let mut bytes = [0; granule::PACKET_BYTES];
            wait_socket(channel.as_raw_fd(), Until::Readable, None).unwrap();
            let (len, _) = receive_packet(channel.as_raw_fd(), &mut bytes).unwrap();
            Packet::decode(&bytes[..len])
        };
        let tell = |packet: Packet, file| send_packet(channel.as_raw_fd(), &packet.encode(), file).unwrap();
        assert!(matches!(hear(), Some(Packet::Announce { .. })));
        tell(Packet::Welcome, None);
        let offer = Packet::Offer { size_log2: 12, generation: GENERATION, first: first(), peer: None };
        tell(offer, Some(file.as_raw_fd()));
        // None, if the program does not want this file.
        if hear() == Some(Packet::Agreed) {
            tell(Packet::Go { peer: false }, None);
        }
        channel
    });
    let socket = Socket::connect(&address, SocketOptions::default()).unwrap();
    let anchor = accept(&listener);
    (socket, Offered { start, anchor, _kept: [listener, holder.join().unwrap()] })
}

fn connect_well(name: &str) -> (Socket, Offered) {
    let file = owned(linux::sized_memfd(c"programs", granule::bytes(RING)).unwrap());
    let (socket, offered) = connect(name, file);
    assert_eq!(socket.transport().0, "shared");
    (socket, offered)
}

fn recv(socket: &Socket, buffer: &mut [u8]) -> Result<usize, i32> {
    // SAFETY: the buffer lives across the call.
    unsafe { socket.recv(buffer.as_mut_ptr(), buffer.len(), DONTWAIT) }.map_err(|errno| errno.raw_os_error())
}

/// A program connects to this test, which is no net.
fn connect_plain(name: &str) -> (Socket, OwnedFd) {
    let address = NetAddress::parse(&format!("unix:@spinio-programs-{name}-{}", std::process::id())).unwrap();
    let listener = listening(1, &address);
    let socket = Socket::connect(&address, SocketOptions::default()).unwrap();
    assert_eq!(socket.transport().0, "kernel");
    (socket, accept(&listener))
}

fn send(socket: &Socket, bytes: &[u8]) -> Result<usize, i32> {
    // SAFETY: the bytes live across the call.
    unsafe { socket.send(bytes.as_ptr(), bytes.len(), DONTWAIT) }.map_err(|errno| errno.raw_os_error())
}

#[test]
fn impossible_words_of_a_net_are_eproto_and_move_no_byte() {
    let (socket, net) = connect_well("impossible");
    let mut buffer = [0xee; 2 * RING as usize];
    let back = |bytes| Position::of(first().bits() - bytes);
    for (tail, consumed) in [(first().after(RING + 1), first().after(1)), (back(1), back(RING + 1))] {
        net.say(TAIL, tail, GENERATION);
        assert_eq!(recv(&socket, &mut buffer), Err(71));
        net.say(CONSUMED, consumed, GENERATION);
        assert_eq!(send(&socket, b"x"), Err(71));
    }
    assert!(buffer.iter().all(|byte| *byte == 0xee));
    assert_eq!(net.mark(CONSUMED).position, Position::of(0), "nothing was said");
}

#[test]
fn words_of_an_earlier_use_of_the_memory_say_nothing() {
    let (socket, net) = connect_well("earlier");
    net.say(TAIL, first().after(10), GENERATION - 1);
    net.say(CONSUMED, first().after(10), GENERATION - 1);
    assert_eq!(recv(&socket, &mut [0; 10]), Err(11));
    assert_eq!(send(&socket, b"x"), Ok(1));
}

#[test]
fn program_sends_only_where_the_kernel_has_taken_the_last_bytes() {
    let (socket, net) = connect_well("room");
    assert_eq!(send(&socket, &[1; 2 * RING as usize]), Ok(RING as usize));
    assert_eq!(send(&socket, b"x"), Err(11));
    net.say(CONSUMED, first().after(10), GENERATION);
    assert_eq!(send(&socket, &[2; 100]), Ok(10));
    assert_eq!(net.mark(TAIL).position, first().after(RING + 10));
}

#[test]
fn close_says_that_bytes_were_not_received() {
    for unread in [true, false] {
        let (socket, net) = connect_well(if unread { "unread" } else { "read" });
        net.say(TAIL, first().after(10), GENERATION);
        assert_eq!(recv(&socket, &mut [0; 10][..if unread { 9 } else { 10 }]), Ok(if unread { 9 } else { 10 }));
        drop(socket);
        let flags = [TAIL, CONSUMED].map(|word| net.mark(word).flags);
        assert_eq!(flags, [CLOSED | if unread { RESET } else { 0 }, CLOSED]);
    }
}

#[test]
fn memory_that_can_shrink_or_is_too_short_is_not_used() {
    let can_shrink = owned(linux::memfd(c"programs").unwrap());
    linux::ftruncate(can_shrink.as_raw_fd(), granule::bytes(RING)).unwrap();
    let short = owned(linux::sized_memfd(c"programs", granule::bytes(RING) - linux::PAGE as u64).unwrap());
    for (name, file) in [("shrinks", can_shrink), ("short", short)] {
        assert_eq!(connect(name, file).0.transport(), ("kernel", "the memory cannot be mapped"));
    }
}

#[test]
fn borrowed_bytes_that_another_call_has_received_are_enodata() {
    for ends in [true, false] {
        let (socket, peer) = connect_plain(if ends { "ended" } else { "taken" });
        // SAFETY: the bytes live across the call.
        assert_eq!(unsafe { socket::send(peer.as_raw_fd(), b"0123456789".as_ptr(), 10) }, Ok(10));
        assert_eq!(socket.borrow(10, 0).unwrap().1, 10);
        let mut taken = [0; 6];
        // SAFETY: the buffer lives across the call.
        assert_eq!(unsafe { receive_with(socket.anchor(), taken.as_mut_ptr(), 6, 0) }, Ok(6));
        if ends {
            drop(peer);
        }
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || tell.send(socket.give_back(10).map_err(|errno| errno.raw_os_error())));
        let result = told.recv_timeout(Duration::from_secs(60)).expect("give_back does not return");
        assert_eq!(result, Err(61), "the stream has ended: {ends}");
    }
}

/// The events of a socket: now, or within so many nanoseconds.
fn events(socket: &Socket, nanoseconds: u64) -> Result<u16, i32> {
    let mut polls = [Poll { source: PollSource::Socket(socket), events: IN, ready: 0 }];
    poll(&mut polls, Some(nanoseconds)).map_err(|errno| errno.raw_os_error())?;
    Ok(polls[0].ready)
}

#[test]
fn error_of_the_connection_stays_whichever_call_sees_it_first() {
    for first in 0..3 {
        let (socket, net) = connect_well(&format!("fails-{first}"));
        net.say(TAIL, self::first().after(10), GENERATION);
        // What the other end has not received makes an error of its close.
        // SAFETY: the byte lives across the call.
        assert_eq!(unsafe { socket::send(socket.anchor(), b"x".as_ptr(), 1) }, Ok(1));
        drop(net.anchor);
        std::thread::sleep(Duration::from_millis(2));
        if first == 0 {
            assert_ne!(events(&socket, 0).unwrap() & ERR, 0);
        } else if first == 1 {
            assert_eq!(send(&socket, b"x"), Err(104));
        }
        assert_eq!(recv(&socket, &mut [0; 20]), Ok(10), "what had arrived is received");
        for _ in 0..2 {
            assert_eq!(recv(&socket, &mut [0; 20]), Err(104), "the stream has not ended");
            assert_eq!(send(&socket, b"x"), Err(104));
            assert_ne!(events(&socket, 0).unwrap() & ERR, 0);
        }
    }
}

#[test]
fn each_signal_ends_a_poll_that_waits() {
    let (socket, _net) = connect_well("interrupted");
    let socket = Arc::new(socket);
    for _ in 0..10 {
        let polled = Arc::clone(&socket);
        let wait = Duration::from_millis(50);
        let (result, _) = signals::call_with_signals(wait, 1, move || events(&polled, 30_000_000_000));
        assert_eq!(result, Err(4));
    }
}
