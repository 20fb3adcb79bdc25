//! Sockets of programs that share no memory: their calls end when they should, whatever signals come.

#![expect(unsafe_code, reason = "calls with raw buffers")]

mod signals;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use spinio_net::{NetAddress, Poll, PollSource, Socket, SocketOptions, poll};
use spinio_ring::event::{ERR, IN};
use spinio_sys::Errno;
use tempfile::TempDir;

use self::signals::call_with_signals;

const WAITALL: u32 = 0x100;
/// Between two signals.
const EACH: Duration = Duration::from_millis(20);
const LIMIT_MS: u32 = 200;
const LIMIT: Duration = Duration::from_millis(200);

fn limited() -> SocketOptions {
    SocketOptions { receive_timeout_ms: LIMIT_MS, send_timeout_ms: LIMIT_MS, ..SocketOptions::default() }
}

fn address(text: &str) -> NetAddress {
    NetAddress::parse(text).unwrap()
}

/// A program connects to this test, which is no net.
fn connect(options: SocketOptions) -> (Socket, UnixStream) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let socket = Socket::connect(&address(&format!("unix://{}", path.display())), options).unwrap();
    assert_eq!(socket.transport().0, "kernel");
    (socket, listener.accept().unwrap().0)
}

fn recv(socket: &Socket, len: usize, flags: u32) -> Result<usize, Errno> {
    let mut buffer = vec![0; len];
    // SAFETY: the buffer lives across the call.
    unsafe { socket.recv(buffer.as_mut_ptr(), len, flags) }
}

fn send(socket: &Socket, bytes: &[u8]) -> Result<usize, Errno> {
    // SAFETY: the bytes live across the call.
    unsafe { socket.send(bytes.as_ptr(), bytes.len(), 0) }
}

/// It did not end early. A call that begins its limit anew at each signal does not return.
fn took_the_limit(took: Duration) {
    assert!(took >= LIMIT, "{took:?}");
}

#[test]
fn limit_of_a_receive_passes_while_signals_come() {
    let (socket, _peer) = connect(limited());
    let ((received, borrowed), took) = call_with_signals(EACH, usize::MAX, move || {
        let received = recv(&socket, 10, 0);
        assert_eq!(socket.borrow(10, 0).unwrap_err(), Errno::AGAIN);
        (received, socket.borrow(10, 0).map(|_| ()))
    });
    assert_eq!((received, borrowed), (Err(Errno::AGAIN), Err(Errno::AGAIN)));
    took_the_limit(took / 3);
}

#[test]
fn limit_of_a_send_passes_while_signals_come() {
    let (socket, _peer) = connect(limited());
    let ((sent, committed), took) = call_with_signals(EACH, usize::MAX, move || {
        let sent = send(&socket, &[1; 16 << 20]).unwrap();
        let (_, len) = socket.reserve(64 << 10, 0).unwrap();
        (sent, socket.commit(len))
    });
    assert!((1..16 << 20).contains(&sent));
    assert_eq!(committed, Err(Errno::AGAIN));
    took_the_limit(took / 2);
}

#[test]
fn signals_cut_no_send_and_no_receive_of_all() {
    const BYTES: usize = 16 << 20;
    let (socket, mut peer) = connect(SocketOptions::default());
    let echo = std::thread::spawn(move || {
        std::thread::sleep(5 * EACH);
        let mut bytes = vec![0; BYTES];
        peer.read_exact(&mut bytes).unwrap();
        for part in bytes.chunks(BYTES / 4) {
            std::thread::sleep(5 * EACH);
            peer.write_all(part).unwrap();
        }
        peer
    });
    let (results, _) = call_with_signals(EACH, usize::MAX, move || {
        let sent: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
        let count = send(&socket, &sent);
        let mut received = vec![0; BYTES];
        // SAFETY: the buffer lives across the call.
        let all = unsafe { socket.recv(received.as_mut_ptr(), BYTES, WAITALL) };
        (count, all, sent == received)
    });
    assert_eq!(results, (Ok(BYTES), Ok(BYTES), true));
    echo.join().unwrap();
}

#[test]
fn commit_sends_all_while_signals_come() {
    let (socket, mut peer) = connect(SocketOptions::default());
    let reader = std::thread::spawn(move || {
        std::thread::sleep(5 * EACH);
        let mut bytes = Vec::new();
        peer.read_to_end(&mut bytes).unwrap();
        bytes.len()
    });
    call_with_signals(EACH, usize::MAX, move || {
        for _ in 0..64 {
            let (_, len) = socket.reserve(64 << 10, 0).unwrap();
            assert_eq!(len, 64 << 10);
            socket.commit(len).unwrap();
        }
    });
    assert_eq!(reader.join().unwrap(), 64 * (64 << 10));
}

#[test]
fn error_that_follows_a_part_of_the_bytes_is_what_the_next_call_returns() {
    let (socket, mut peer) = connect(SocketOptions::default());
    // The peer closes with a byte that it has not received.
    assert_eq!(send(&socket, b"x"), Ok(1));
    peer.write_all(b"01234").unwrap();
    drop(peer);
    assert_eq!(recv(&socket, 10, WAITALL), Ok(5));
    let mut polls = [Poll { source: PollSource::Socket(&socket), events: IN, ready: 0 }];
    poll(&mut polls, Some(0)).unwrap();
    assert_ne!(polls[0].ready & ERR, 0);
    assert_eq!(recv(&socket, 10, WAITALL), Err(Errno::CONNRESET), "the stream has not ended");
    assert_eq!(recv(&socket, 10, WAITALL), Ok(0));
    assert_eq!(send(&socket, b"x"), Err(Errno::PIPE));
}

/// UNIX connections that wait in a backlog until it is full.
fn fill(listener: &UnixListener, address: &NetAddress) -> Vec<Socket> {
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 1) }, 0);
    let options = SocketOptions { send_timeout_ms: 1, ..SocketOptions::default() };
    std::iter::from_fn(|| Socket::connect(address, options).ok()).collect()
}

#[test]
fn connection_waits_for_a_full_backlog_until_its_limit_while_signals_come() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let to = address(&format!("unix://{}", path.display()));
    let waiting = fill(&listener, &to);
    let (failed, took) = call_with_signals(EACH, usize::MAX, {
        let to = to.clone();
        move || Socket::connect(&to, limited()).err().map(|error| error.errno)
    });
    assert_eq!(failed, Some(Errno::AGAIN));
    took_the_limit(took);
    let acceptor = std::thread::spawn(move || {
        std::thread::sleep(LIMIT);
        let begun = Instant::now();
        (begun, (0..=waiting.len()).map(|_| listener.accept().unwrap().0).collect::<Vec<_>>())
    });
    let ((connected, ended), _) = call_with_signals(EACH, usize::MAX, move || {
        (Socket::connect(&to, SocketOptions::default()).map(drop), Instant::now())
    });
    assert_eq!(connected, Ok(()));
    let (accepted_from, _connections) = acceptor.join().unwrap();
    assert!(ended >= accepted_from, "it did not wait");
}

#[test]
fn tcp_connection_that_is_not_answered_ends_at_its_limit_while_signals_come() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
    let name = listener.local_addr().unwrap();
    // With a full backlog Linux drops what comes. On a busy machine one may be late although there is room, but not one after the other.
    let (mut waiting, mut dropped) = (Vec::new(), 0);
    while dropped < 4 {
        match TcpStream::connect_timeout(&name, LIMIT / 2) {
            Ok(stream) => {
                waiting.push(stream);
                dropped = 0;
            }
            Err(_) => dropped += 1,
        }
        assert!(waiting.len() < 100, "the backlog has no end");
    }
    let to = address(&format!("tcp://{name}"));
    let (failed, took) = call_with_signals(EACH, usize::MAX, {
        let to = to.clone();
        move || Socket::connect(&to, limited()).err().map(|error| error.errno)
    });
    assert_eq!(failed, Some(Errno::INPROGRESS));
    took_the_limit(took);
    let acceptor = std::thread::spawn(move || {
        std::thread::sleep(LIMIT);
        let accepted: Vec<TcpStream> = (0..=waiting.len()).map(|_| listener.accept().unwrap().0).collect();
        drop(waiting);
        accepted
    });
    let (connected, _) =
        call_with_signals(EACH, usize::MAX, move || Socket::connect(&to, SocketOptions::default()).map(drop));
    assert_eq!(connected, Ok(()), "it waits without a limit");
    drop(acceptor.join().unwrap());
}

#[test]
fn refused_tcp_connection_says_so() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = address(&format!("tcp://{}", listener.local_addr().unwrap()));
    let (socket, mut peer) = (Socket::connect(&to, limited()).unwrap(), listener.accept().unwrap().0);
    assert_eq!(send(&socket, b"hello"), Ok(5));
    peer.read_exact(&mut [0; 5]).unwrap();
    drop(listener);
    let refused = Socket::connect(&to, SocketOptions::default()).err().map(|error| error.errno);
    assert_eq!(refused, Some(Errno::CONNREFUSED));
}
