//! Kernels that ask for files with random words: only files below their directory are read or changed, and sockets go on.

#![expect(unsafe_code, reason = "memory that kernels write")]

use std::ffi::CString;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use spinio_device::registry;
use spinio_net::{FileOptions, Handle, Net, NetAddress, Options};
use spinio_ring::doorbell::{self, Entry, Op};
use spinio_ring::layout::{
    DOORBELL_BYTES, DOORBELLS, Descriptor, FILE_BUFFER_BYTES, FILE_BUFFERS, FIRST_FILE, MAILBOX_BYTES, Sizes, header,
};
use spinio_ring::mailbox::{Address, Call, DONTWAIT, Reply, Request};
use spinio_ring::{Position, Word};

const DEADLINE: Duration = Duration::from_secs(300);
const MAILBOXES: u32 = 16;
const ROUNDS: u32 = 150;
const PATHS: [&[u8]; 9] =
    [b"a", b"b", b"new", b"../secret", b"out/secret", b"/etc/passwd", b"", b"sub", b"\xff\xff/../../secret"];

struct Kernel {
    handle: Handle,
    claims: [AtomicU64; 2],
}

impl Kernel {
    fn words(&self, offset: usize, bytes: usize) -> &[AtomicU64] {
        // SAFETY: kernels of the emulated GPU see pinned memory at its own address; it lives as long as the net, and all
        // accesses of this test to it are atomic.
        unsafe { core::slice::from_raw_parts((self.handle.pinned as usize + offset) as *const AtomicU64, bytes / 8) }
    }

    fn sizes(&self) -> Sizes {
        Sizes { sockets: self.handle.sockets, mailboxes: self.handle.mailboxes }
    }

    fn mailbox(&self, mailbox: u32) -> (&[AtomicU64], &[AtomicU64]) {
        self.words(self.sizes().mailboxes() + mailbox as usize * MAILBOX_BYTES, MAILBOX_BYTES).split_at(16)
    }

    fn ask(&self, mailbox: u32, request: &Request) {
        request.store(self.mailbox(mailbox).0);
        self.ring(Op::Control, 0, mailbox, 0);
    }

    fn ring(&self, op: Op, position: u64, socket: u32, epoch: u32) {
        let queue = self.words(self.sizes().doorbells(), DOORBELLS * DOORBELL_BYTES);
        let head = &self.words(0, 4096)[header::DOORBELL_HEAD];
        let entry = Entry::new(op, Position::of(position), socket, epoch);
        while !doorbell::push(queue, &self.claims[0], &self.claims[1], head, entry) {
            std::thread::yield_now();
        }
    }

    fn reply(&self, mailbox: u32, number: u32) -> Reply {
        let begun = Instant::now();
        loop {
            if let Some(reply) = Reply::load(self.mailbox(mailbox).1, number) {
                return reply;
            }
            assert!(begun.elapsed() < DEADLINE, "the call is not answered");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Stores a path in a file buffer.
    fn store_path(&self, buffer: u32, path: &[u8]) {
        let words = self.words(self.handle.files as usize + buffer as usize * FILE_BUFFER_BYTES, 4096);
        for (i, word) in words.iter().enumerate() {
            let byte = |b: usize| path.get(i * 8 + b).copied().unwrap_or(0);
            word.store_release(u64::from_le_bytes(std::array::from_fn(byte)));
        }
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

#[test]
fn random_requests_touch_no_file_outside_and_no_other_socket() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("in");
    std::fs::create_dir_all(root.join("sub")).unwrap();
    std::fs::write(root.join("a"), vec![7; 300_000]).unwrap();
    std::fs::write(dir.path().join("secret"), "secret").unwrap();
    std::os::unix::fs::symlink("..", root.join("out")).unwrap();
    let files = FileOptions { root: CString::new(root.as_os_str().as_bytes()).unwrap(), write: true, count: 8 };
    let options = Options {
        sockets: 64,
        connections: 16,
        ring_bytes: 4096,
        idle_us: 200,
        files: Some(files),
        ..Options::default()
    };
    let net = Net::open(registry::emulated().unwrap(), options).unwrap();
    let kernel = Kernel { handle: net.handle(), claims: Default::default() };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = NetAddress::parse(&format!("tcp://{}", listener.local_addr().unwrap())).unwrap();
    let connect = || (net.connect(&address).unwrap(), listener.accept().unwrap().0);
    let (good, mut good_peer) = connect();
    let (target, target_peer) = connect();
    target_peer.set_read_timeout(Some(DEADLINE)).unwrap();
    let drain = std::thread::spawn(move || std::io::copy(&mut { target_peer }, &mut std::io::sink()).unwrap_or(0));
    let calls = [Call::OpenFile, Call::CloseFile, Call::ReadFile, Call::WriteFile, Call::StatFile, Call::SendFile];
    let mut random = Random(0x5eed_5eed);
    let mut opened: Vec<u32> = vec![0];
    let mut seen = [0; 6];
    for round in 1..=ROUNDS {
        let mut asked = Vec::new();
        for mailbox in 64..64 + MAILBOXES {
            let call = random.of(&calls);
            let file = Descriptor { index: FIRST_FILE + random.below(256) as u32, epoch: random.below(4) as u32 };
            let (one, other) = (random.of(&opened), random.of(&opened));
            let file = random.of(&[one, other, file.number() as u32, target as u32]);
            let buffer = random.of(&[0, 1, FILE_BUFFERS - 1, FILE_BUFFERS, u32::MAX]);
            let offset = random.of(&[0, 1, 5000, 299_990, 1 << 33, i64::MAX as u64, u64::MAX]);
            let bytes = random.of(&[0, 1, 100, FILE_BUFFER_BYTES as u64, FILE_BUFFER_BYTES as u64 + 1, u64::MAX]);
            if buffer < FILE_BUFFERS {
                let long = [b'x'; 4096];
                let path = if random.below(20) == 0 { &long[..] } else { random.of(&PATHS) };
                kernel.store_path(buffer, path);
            }
            let flags = random.of(&[0, 0, 2, 2 | 0o100, 1 | 0o1000, 3, u32::MAX]);
            let (descriptor, argument, numbers) = match call {
                Call::OpenFile => (buffer, flags, [random.below(0o10000), 0, 0]),
                Call::SendFile => (random.of(&[target as u32, target as u32, file]), file, [offset, bytes, 2_000_000]),
                _ => (file, buffer, [offset, bytes, 0]),
            };
            let words = std::array::from_fn(|i| numbers.get(i).copied().unwrap_or(0));
            let address = Address::of_words(words, random.below(256) as u8);
            let flags = random.of(&[0, DONTWAIT, u16::MAX]);
            let request =
                Request { call: Ok(call), flags, number: round, descriptor, argument, address, time_limit: 0 };
            kernel.ask(mailbox, &request);
            asked.push((mailbox, call));
        }
        for (mailbox, call) in asked {
            let reply = kernel.reply(mailbox, round);
            seen[call as usize - Call::OpenFile as usize] += u32::from(reply.result >= 0);
            match call {
                Call::OpenFile if reply.result > 0 => opened.push(reply.result as u32),
                Call::ReadFile | Call::WriteFile => assert!(reply.result <= FILE_BUFFER_BYTES as i32),
                _ => {}
            }
            if opened.len() > 16 {
                opened.remove(0);
            }
        }
    }
    assert!(seen.iter().all(|count| *count > 0), "each call succeeds now and then: {seen:?}");
    assert_eq!(std::fs::read(dir.path().join("secret")).unwrap(), b"secret");
    let names = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(names, 2, "a file was made outside the directory");

    let Descriptor { index, epoch } = Descriptor::of(good as u32);
    kernel.ring(Op::Send, 5, index, epoch);
    good_peer.set_read_timeout(Some(DEADLINE)).unwrap();
    good_peer.read_exact(&mut [0; 5]).unwrap();
    good_peer.write_all(b"x").unwrap();
    assert_eq!(net.stats().violations, 0);
    net.close().unwrap();
    drain.join().unwrap();
}
