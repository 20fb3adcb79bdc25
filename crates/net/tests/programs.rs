//! CPU programs that share memory with a net: this test plays the net, and writes what a right one and a wrong one can write.
//! What happens at random: the fuzz target `granules`. With kernels: `device/tests/net_shared.cpp`.

#![expect(unsafe_code, reason = "memory that a program shares with a net")]

mod fake_net;
mod signals;

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use spinio_net::{NetAddress, Poll, PollSource, Socket, SocketOptions, poll};
use spinio_ring::Position;
use spinio_ring::event::{ERR, IN};
use spinio_ring::granule;
use spinio_ring::peer::{CLOSED, CONSUMED, RESET, TAIL};
use spinio_sys::linux::channel::receive_with;
use spinio_sys::linux::{self, socket};

use self::fake_net::{GENERATION, RING, accept, connect, connect_well, first, listening, owned};

const DONTWAIT: u32 = 0x40;

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
        let result = told.recv_timeout(Duration::from_secs(300)).expect("give_back does not return");
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
        net.say(TAIL, fake_net::first().after(10), GENERATION);
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
        let (result, _) = signals::call_with_signals(wait, 1, move || events(&polled, 600_000_000_000));
        assert_eq!(result, Err(4));
    }
}
