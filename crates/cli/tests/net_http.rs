//! `examples/net/http` with clients that are slow, or malicious: none of them keeps others waiting, and none stays for ever.
//!
//! `demo.rs` has the test of its answers. The server has two blocks, and each test more slow clients than that.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::folder;
use common::net_example::{Example, PATIENCE, build};
use rustix::net::{AddressFamily, SocketType, connect, socket, sockopt};

const SLOW_CLIENTS: usize = 3;
/// More than the buffers between a kernel and a client that does not read.
const FILE_BYTES: usize = 24 << 20;
const PICTURE_BYTES: usize = 54 + 320 * 3 * 240;

/// Of the example.
const LEAST_RATE: u32 = 16 << 10;

/// Starts the server with limits in seconds, of a head and of an answer. `None`, with a message, without a compiler.
fn start(dir: &Path, head: u32, answer: u32) -> Option<Example> {
    start_with_rate(dir, head, answer, LEAST_RATE)
}

/// The same; `rate`: bytes of an answer for which its client has a second more.
fn start_with_rate(dir: &Path, head: u32, answer: u32, rate: u32) -> Option<Example> {
    let program = build("http", "-O1", dir)?;
    let files = dir.join("files");
    std::fs::create_dir(&files).unwrap();
    std::fs::write(files.join("large"), content()).unwrap();
    let (head, answer, rate) = (head.to_string(), answer.to_string(), rate.to_string());
    let limits = ["--limits", &head, &answer, "--least-rate", &rate];
    Some(Example::start(
        &program,
        &[&["tcp://127.0.0.1:0", "2", "--files", files.to_str().unwrap()], &limits[..]].concat(),
    ))
}

fn content() -> Vec<u8> {
    (0..FILE_BYTES as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// A connection with a small buffer, so that the server soon has no room for more.
fn connect_with_small_buffer(server: &Example) -> TcpStream {
    let address: SocketAddr = server.address.strip_prefix("tcp://").unwrap().parse().unwrap();
    let fd = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    sockopt::set_socket_recv_buffer_size(&fd, 65536).unwrap();
    connect(&fd, &address).unwrap();
    let stream = TcpStream::from(fd);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn get(stream: &mut TcpStream, path: &str) {
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").as_bytes()).unwrap();
}

/// Reads one answer; its head and its body.
fn answer(stream: &mut TcpStream) -> (String, Vec<u8>) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).unwrap().parse().unwrap();
    let mut body = vec![0; length];
    stream.read_exact(&mut body).unwrap();
    (head, body)
}

fn assert_is_served(server: &Example) {
    let mut stream = server.connect_tcp();
    get(&mut stream, "/");
    let (head, body) = answer(&mut stream);
    assert!(head.starts_with("HTTP/1.1 200 ") && body.starts_with(b"<!doctype html>"), "{head}");
}

/// The same where the server ends a client whose head takes a second: on a busy machine it may end this one too.
fn assert_is_served_if_in_time(server: &Example) {
    let is_served = || {
        let (mut stream, mut first, begun) = (server.connect_tcp(), [0; 13], Instant::now());
        let sent = stream.write_all(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n");
        let is_served = sent.and_then(|()| stream.read_exact(&mut first)).is_ok() && first == *b"HTTP/1.1 200 ";
        assert!(is_served || begun.elapsed() >= Duration::from_secs(1), "a client in time is not served");
        is_served
    };
    assert!((0..100).any(|_| is_served()), "no client is served");
}

#[test]
fn head_that_comes_byte_by_byte_is_ended() {
    let dir = folder();
    let Some(server) = start(dir.path(), 1, 100) else { return };
    let mut slow: Vec<_> = (0..SLOW_CLIENTS).map(|_| server.connect_tcp()).collect();
    for stream in &mut slow {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: test\r\nX: ").unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    }
    assert_is_served_if_in_time(&server);
    // A byte now and then, and less of them than there is room for a head.
    for _ in 0..600 {
        slow.retain_mut(|stream| {
            let ended = stream.write_all(b"x").is_err();
            let read = stream.read(&mut [0]);
            !ended && read.is_err_and(|e| matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
        });
        if slow.is_empty() {
            break;
        }
    }
    assert!(slow.is_empty(), "{} connections stay open without a head", slow.len());
    assert_is_served_if_in_time(&server);
}

#[test]
fn client_that_sends_on_after_the_end_holds_no_block() {
    let dir = folder();
    let Some(server) = start(dir.path(), 100, 100) else { return };
    let mut slow: Vec<_> = (0..SLOW_CLIENTS).map(|_| server.connect_tcp()).collect();
    for stream in &mut slow {
        stream.write_all(b"BAD\r\n\r\n").unwrap();
        assert!(answer(stream).0.starts_with("HTTP/1.1 400 "));
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the server sends no more");
        stream.write_all(b"x").unwrap();
    }
    assert_is_served(&server);
    // None was given up for that: the connections take bytes still.
    for stream in &mut slow {
        for _ in 0..2 {
            stream.write_all(b"x").unwrap();
            sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn slow_reader_gets_all_bytes_while_others_are_served() {
    let dir = folder();
    let Some(server) = start(dir.path(), 100, 100) else { return };
    let mut files: Vec<_> = (0..SLOW_CLIENTS).map(|_| connect_with_small_buffer(&server)).collect();
    let mut pictures = connect_with_small_buffer(&server);
    let mut requests = 0;
    // More pictures than there is room for.
    for _ in 0..100 {
        get(&mut pictures, "/mandelbrot.bmp");
        requests += 1;
    }
    for stream in &mut files {
        get(stream, "/large");
        requests += 1;
    }
    for _ in 0..3 {
        assert_is_served(&server);
        requests += 1;
    }
    let wanted = content();
    for stream in &mut files {
        let (head, body) = answer(stream);
        assert!(head.starts_with("HTTP/1.1 200 ") && body == wanted, "{head}");
    }
    for _ in 0..100 {
        let (_, body) = answer(&mut pictures);
        assert!(body.len() == PICTURE_BYTES && body.starts_with(b"BM"));
    }
    // They stay open.
    for stream in files.iter_mut().chain([&mut pictures]) {
        get(stream, "/");
        assert!(answer(stream).1.starts_with(b"<!doctype html>"));
        requests += 1;
    }
    assert!(server.interrupt().contains(&format!("requests {requests}\n")));
}

#[test]
fn client_that_never_reads_is_ended() {
    let dir = folder();
    let Some(server) = start_with_rate(dir.path(), 100, 1, u32::MAX >> 1) else { return };
    // The longer it does not read the surer it is ended, however slow the server.
    let is_ended_after = |seconds| {
        let mut stream = connect_with_small_buffer(&server);
        get(&mut stream, "/large");
        sleep(Duration::from_secs(seconds));
        let mut bytes = Vec::new();
        let mut part = vec![0; 1 << 20];
        while bytes.len() < FILE_BYTES {
            match stream.read(&mut part) {
                Ok(count) if count > 0 => bytes.extend_from_slice(&part[..count]),
                _ => return true,
            }
        }
        false
    };
    assert!([4, 16, 60].into_iter().any(is_ended_after));
    assert_is_served(&server);
}

#[test]
fn client_that_reads_too_slowly_is_ended() {
    let dir = folder();
    // 7 seconds for the file.
    let Some(server) = start_with_rate(dir.path(), 100, 4, 8 << 20) else { return };
    let mut stream = connect_with_small_buffer(&server);
    get(&mut stream, "/large");
    // It reads all the time, and would need three times as long.
    let mut part = vec![0; 64 << 10];
    let mut left = FILE_BYTES;
    while left > 0 {
        match stream.read(&mut part) {
            Ok(count) if count > 0 => left = left.saturating_sub(count),
            _ => break,
        }
        sleep(Duration::from_millis(60));
    }
    assert!(left > 0, "it got the whole file");
    assert_is_served(&server);
}
