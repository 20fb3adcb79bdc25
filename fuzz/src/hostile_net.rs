//! A program whose socket meets a net that breaks every rule: the holder of a door sends any packets with any descriptors, and
//! writes any words into the memory, between the calls of the program and during them.
//!
//! It must hold: no call crashes, hangs, or touches a byte outside of its buffer and the ring; the bytes are those in the ring;
//! the words of the program say what its calls returned; no descriptor is left. If both sides do not agree on memory, the
//! connection goes through Linux.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use arbitrary::{Result, Unstructured};
use spinio_net::{NetAddress, Socket, SocketOptions};
use spinio_ring::granule::{END_WORDS, Packet, WORDS, bytes, ring};
use spinio_ring::peer::{CONSUMED, Mark, TAIL, WATCH};
use spinio_ring::{Position, Word};

use crate::hostile_packets::{self as packets, DEADLINE, Mapped, descriptors};
use crate::{RING, position, word};

const STEPS: usize = 24;
const LONGEST: usize = 3 * RING as usize;
const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
const DONTWAIT: u32 = 0x40;
/// AGAIN, PIPE, PROTO, CONNRESET
const ERRORS: [i32; 4] = [11, 32, 71, 104];

struct Doors {
    listener: OwnedFd,
    door: OwnedFd,
    address: NetAddress,
}

fn doors() -> &'static Doors {
    static DOORS: OnceLock<Doors> = OnceLock::new();
    DOORS.get_or_init(|| {
        let name = format!("spinio-fuzz-net-{}", std::process::id());
        let listener = packets::listening(libc::SOCK_STREAM, &name);
        let door = packets::listening(libc::SOCK_SEQPACKET, &format!("spinio-net-2/unix:@{name}"));
        Doors { listener, door, address: NetAddress::parse(&format!("unix:@{name}")).expect("an address") }
    })
}

/// What the holder of the door sends: packets, with descriptors.
struct Script {
    packets: Vec<(Vec<u8>, Vec<OwnedFd>)>,
    size: u64,
    generation: u16,
    first: Position,
    /// The offer is one that may be accepted.
    is_right: bool,
}

impl Script {
    fn of(input: &mut Unstructured<'_>) -> Result<Script> {
        let size_log2 = match input.int_in_range(0..=15_u8)? {
            15 => input.arbitrary()?,
            more => 12 + more % 3,
        };
        let generation = 1 + input.int_in_range(0..=0x3ffe)?;
        let first = position(input, 0)?;
        let size = 1 << (size_log2 % 20);
        let (mut is_right, mut files) = ((12..=22).contains(&size_log2), Vec::new());
        match input.int_in_range(0..=9)? {
            5 => files.push(packets::memory_file(bytes(size), 0)),
            6 => files.push(packets::memory_file(bytes(size) - 1, SEALS)),
            7 => files.push(packets::socket(libc::SOCK_STREAM)),
            // It cannot be written.
            8 => files.push(packets::memory_file(bytes(size), SEALS | libc::F_SEAL_WRITE)),
            9 => {}
            _ => files.push(packets::memory_file(bytes(size), SEALS)),
        }
        let seals = |file: &OwnedFd| {
            // SAFETY: a descriptor of ours.
            unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) == SEALS }
        };
        is_right &= files.first().is_some_and(seals) && size_log2 < 20;
        is_right &= !files.is_empty() && length(&files[0]) >= bytes(size);
        for _ in 0..input.int_in_range(0..=7_u8)?.saturating_sub(5) {
            files.push(packets::socket(libc::SOCK_STREAM));
        }
        let offer = Packet::Offer { size_log2, generation, first, peer: None }.encode();
        let mut packets = vec![
            (Packet::Welcome.encode(), Vec::new()),
            (offer, files),
            (Packet::Go { peer: false }.encode(), Vec::new()),
        ];
        for _ in 0..input.int_in_range(0..=7_u8)?.saturating_sub(4) {
            let at = input.int_in_range(0..=3)?;
            let files = if input.ratio(1, 4)? { vec![packets::socket(libc::SOCK_STREAM)] } else { Vec::new() };
            packets.insert(at, (packets::hostile(input)?, files));
        }
        if input.ratio(1, 8)? {
            packets.truncate(input.int_in_range(0..=3)?);
        }
        Ok(Script { packets, size, generation, first, is_right })
    }

    /// Holds the door for one program: the channel, which ends when that is dropped.
    fn play(&self, door: &OwnedFd) -> OwnedFd {
        let channel = packets::accept(door);
        let (announced, socket) = packets::receive(&channel, DEADLINE).expect("a program announces its socket");
        assert!(matches!(Packet::decode(&announced), Some(Packet::Announce { .. })) && socket.is_some());
        for (bytes, files) in &self.packets {
            let files: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
            packets::send(&channel, bytes, &files);
        }
        // Nothing more comes: the program need not wait.
        // SAFETY: a descriptor of ours.
        unsafe { libc::shutdown(channel.as_raw_fd(), libc::SHUT_WR) };
        channel
    }
}

fn length(file: &OwnedFd) -> u64 {
    // SAFETY: all zeros are valid, and the structure lives across the call.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        libc::fstat(file.as_raw_fd(), &raw mut stat);
        stat.st_size as u64
    }
}

pub fn play(input: &mut Unstructured<'_>) -> Result<()> {
    let doors = doors();
    let before = descriptors(std::process::id());
    let script = Script::of(input)?;
    let (socket, channel) = std::thread::scope(|scope| {
        let holder = scope.spawn(|| script.play(&doors.door));
        let options = SocketOptions { receive_timeout_ms: 1, send_timeout_ms: 1, ..SocketOptions::default() };
        let socket = Socket::connect(&doors.address, options).expect("the listening socket has room");
        (socket, holder.join().expect("no panic"))
    });
    let mut peer = UnixStream::from(packets::accept(&doors.listener));
    if socket.transport().0 == "shared" {
        assert!(script.is_right, "memory that may not be used");
        let file = script.packets[1].1.first().expect("the offer has a file");
        let memory = Mapped::new(file, bytes(script.size) as usize);
        let mut game = Game {
            socket,
            memory,
            peer,
            first: script.first,
            consumed: script.first,
            tail: script.first,
            script: &script,
        };
        for _ in 0..STEPS {
            if input.is_empty() {
                break;
            }
            game.step(input)?;
        }
    } else {
        // SAFETY: the bytes live across the call.
        assert_eq!(unsafe { socket.send(b"hello".as_ptr(), 5, 0) }, Ok(5));
        let mut got = [0; 5];
        peer.read_exact(&mut got).expect("the bytes go through Linux");
        assert_eq!(&got, b"hello");
        drop((socket, peer));
    }
    drop((channel, script));
    assert_eq!(descriptors(std::process::id()), before, "a descriptor is left");
    Ok(())
}

struct Game<'a> {
    socket: Socket,
    memory: Mapped,
    peer: UnixStream,
    first: Position,
    /// Up to where the program has received, and sent.
    consumed: Position,
    tail: Position,
    script: &'a Script,
}

impl Game<'_> {
    fn step(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        match input.int_in_range(0..=9)? {
            0 => self.give(input)?,
            1 => self.receive(input)?,
            2 => self.send(input)?,
            3 => {
                // Room: the kernel has received all.
                let word = Mark { position: self.tail, generation: self.script.generation, flags: 0 }.word();
                self.memory.words()[END_WORDS + CONSUMED].store_release(word);
            }
            4 => self.write(input)?,
            5 => self.flips(input)?,
            6 => {
                let how = input.int_in_range(0..=3)?;
                assert_eq!(self.socket.shutdown(how).is_ok(), how < 3);
            }
            7 => _ = self.peer.write(b"x"),
            8 => _ = self.peer.shutdown(std::net::Shutdown::Both),
            _ => self.memory.words()[END_WORDS + WATCH].store_release(u64::MAX),
        }
        Ok(())
    }

    /// A word of the kernel's end, or of none; the program never reads its own.
    fn write(&self, input: &mut Unstructured<'_>) -> Result<()> {
        let at = END_WORDS + *input.choose(&[TAIL, CONSUMED, WATCH, 3, WORDS - END_WORDS - 1])?;
        let near = if at == END_WORDS + TAIL { self.consumed } else { self.tail };
        self.memory.words()[at].store_release(word(input, self.script.generation, near)?);
        Ok(())
    }

    /// The kernel sends, as it should.
    fn give(&self, input: &mut Unstructured<'_>) -> Result<()> {
        let bytes = 1 + input.int_in_range(0..=self.script.size - 1)?;
        for at in 0..bytes {
            let (place, value) = (self.place(self.consumed.after(at)), at as u8 ^ bytes as u8);
            self.memory.byte(place).store(value, SeqCst);
        }
        let word = Mark { position: self.consumed.after(bytes), generation: self.script.generation, flags: 0 }.word();
        self.memory.words()[END_WORDS + TAIL].store_release(word);
        Ok(())
    }

    fn place(&self, position: Position) -> usize {
        ring(self.script.size, true) as usize + position.place(self.script.size).0
    }

    fn receive(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let (len, flags) = (input.int_in_range(0..=LONGEST)?, *input.choose(&[DONTWAIT, 0, 0x42, 0x140, 0x100])?);
        let (got, buffer) = self.recv(len, flags);
        for (at, byte) in (0..).zip(&buffer[..got]) {
            let place = self.place(self.consumed.after(at));
            assert_eq!(*byte, self.memory.byte(place).load(SeqCst), "a byte that is not in the ring");
        }
        self.took(got, flags);
        Ok(())
    }

    /// Received bytes, into a buffer that ends with bytes which must stay.
    fn recv(&self, len: usize, flags: u32) -> (usize, Vec<u8>) {
        let mut buffer = vec![0xee; len + 64];
        // SAFETY: the buffer is longer.
        let got = unsafe { self.socket.recv(buffer.as_mut_ptr(), len, flags) };
        let got = got.inspect_err(|errno| assert!(ERRORS.contains(&errno.raw_os_error()), "{errno}")).unwrap_or(0);
        assert!(got <= len && buffer[got..].iter().all(|byte| *byte == 0xee), "a byte outside");
        (got, buffer)
    }

    fn took(&mut self, got: usize, flags: u32) {
        if got > 0 && flags & 2 == 0 {
            self.consumed = self.consumed.after(got as u64);
            assert_eq!(Mark::of(self.memory.words()[CONSUMED].load_acquire()).position, self.consumed);
        }
    }

    fn send(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let (len, flags) = (input.int_in_range(0..=LONGEST)?, *input.choose(&[DONTWAIT, 0])?);
        let bytes = vec![input.arbitrary::<u8>()?; len];
        self.put(&bytes, flags);
        Ok(())
    }

    fn put(&mut self, bytes: &[u8], flags: u32) {
        // SAFETY: the bytes live across the call.
        let sent = unsafe { self.socket.send(bytes.as_ptr(), bytes.len(), flags) };
        let sent = sent.inspect_err(|errno| assert!(ERRORS.contains(&errno.raw_os_error()), "{errno}")).unwrap_or(0);
        assert!(sent <= bytes.len());
        let mark = Mark::now(self.memory.words()[TAIL].load_acquire(), self.script.generation, self.first);
        // What is sent to a kernel that has closed goes nowhere, once.
        let told = mark.position.since(self.tail);
        assert!(told <= sent as u64, "the tail does not say what was sent");
        self.tail = mark.position;
    }

    /// Calls of the program while a word changes all the time.
    fn flips(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let generation = self.script.generation;
        let words = [
            (TAIL, [word(input, generation, self.consumed)?, word(input, generation, self.consumed)?]),
            (CONSUMED, [word(input, generation, self.tail)?, word(input, generation, self.tail)?]),
        ];
        let (len, flags) = (input.int_in_range(0..=LONGEST)?, *input.choose(&[DONTWAIT, 0x140])?);
        let end = AtomicBool::new(false);
        let mapped = Mapped::new(&self.script.packets[1].1[0], bytes(self.script.size) as usize);
        let shared = mapped.words();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !end.load(SeqCst) {
                    for (word, [one, other]) in words {
                        shared[END_WORDS + word].store_release(one);
                        shared[END_WORDS + word].store_release(other);
                    }
                }
            });
            for _ in 0..8 {
                let (got, _) = self.recv(len, flags);
                self.took(got, flags);
                self.put(&vec![7; len], DONTWAIT);
            }
            end.store(true, SeqCst);
        });
        Ok(())
    }
}
