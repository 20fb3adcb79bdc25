//! Kernels that break the rules: a thread of this test writes what a kernel can write.

#![expect(unsafe_code, reason = "memory that kernels write")]

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use spinio_device::registry;
use spinio_net::{Handle, Net, NetAddress, Options, Socket, SocketOptions};
use spinio_ring::datagram::Header;
use spinio_ring::doorbell::{self, Entry, Op};
use spinio_ring::granule;
use spinio_ring::layout::{
    DOORBELL_BYTES, DOORBELLS, Descriptor, EVENT_SETS, LINE_BYTES, MAILBOX_BYTES, PAGE, RECORD_BYTES, Sizes,
    WAIT_BYTES, header, record,
};
use spinio_ring::line::{Consumed, EOF, ERR, Received, Sent};
use spinio_ring::mailbox::{Address, Call, Reply, Request};
use spinio_ring::{Position, Word, peer};
use spinio_sys::Errno;

/// A deadline, so that a hang is a failure.
const DEADLINE: Duration = Duration::from_secs(60);

/// The words that kernels and proxy share, and claims as kernels have them in device memory.
struct Kernel {
    handle: Handle,
    claims: [AtomicU64; 2],
}

impl Kernel {
    fn new(net: &Net) -> Kernel {
        Kernel { handle: net.handle(), claims: Default::default() }
    }

    fn sizes(&self) -> Sizes {
        Sizes { sockets: self.handle.sockets, mailboxes: self.handle.mailboxes }
    }

    fn words(&self, offset: usize, bytes: usize) -> &[AtomicU64] {
        self.words_at(self.handle.pinned as usize + offset, bytes)
    }

    fn words_at(&self, address: usize, bytes: usize) -> &[AtomicU64] {
        // SAFETY: kernels of the emulated GPU see pinned memory at its own address; it lives as long as the net, and all
        // accesses to it are atomic.
        unsafe { core::slice::from_raw_parts(address as *const AtomicU64, bytes / 8) }
    }

    fn ring(&self, op: Op, position: u64, socket: u32, epoch: u32) {
        self.enter(Entry::new(op, Position::of(position), socket, epoch));
    }

    fn enter(&self, entry: Entry) {
        let queue = self.words(self.sizes().doorbells(), DOORBELLS * DOORBELL_BYTES);
        let head = &self.words(0, 4096)[header::DOORBELL_HEAD];
        while !doorbell::push(queue, &self.claims[0], &self.claims[1], head, entry) {
            std::thread::yield_now();
        }
    }

    fn device_line(&self, socket: i32) -> &[AtomicU64] {
        let index = Descriptor::of(socket as u32).index as usize;
        self.words(self.sizes().device_lines() + index * LINE_BYTES, LINE_BYTES)
    }

    fn host_line(&self, socket: i32) -> &[AtomicU64] {
        let index = Descriptor::of(socket as u32).index as usize;
        self.words(self.sizes().host_lines() + index * LINE_BYTES, LINE_BYTES)
    }
}

const CONNECTIONS: usize = 16;
const RING_BYTES: usize = 4096;
/// Of the calls of programs.
const DONTWAIT: u32 = 0x40;

fn open() -> Net {
    let (connections, ring_bytes) = (CONNECTIONS as u32, RING_BYTES as u32);
    let options = Options { sockets: 64, connections, ring_bytes, idle_us: 500, ..Options::default() };
    Net::open(registry::emulated().unwrap(), options).unwrap()
}

/// A connection of a net to this test.
fn connection(net: &Net) -> (i32, TcpStream) {
    try_connection(net).unwrap()
}

/// The same with a net that may refuse.
fn try_connection(net: &Net) -> spinio_net::Result<(i32, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = NetAddress::parse(&format!("tcp://{}", listener.local_addr().unwrap())).unwrap();
    let socket = net.connect(&address)?;
    let (peer, _) = listener.accept().unwrap();
    peer.set_read_timeout(Some(DEADLINE)).unwrap();
    Ok((socket, peer))
}

fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !reached() {
        assert!(begun.elapsed() < DEADLINE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The connection works in both directions, from position 0.
fn works(kernel: &Kernel, socket: i32, peer: &mut TcpStream) {
    let Descriptor { index, epoch } = Descriptor::of(socket as u32);
    kernel.ring(Op::Send, 5, index, epoch);
    let mut got = [0; 5];
    peer.read_exact(&mut got).unwrap();
    peer.write_all(b"12345678").unwrap();
    let received = || Received::of(kernel.device_line(socket)[0].load_acquire());
    until("the bytes do not arrive", || received().position == Position::of(8));
    let consumed = Consumed { position: Position::of(8), epoch };
    kernel.host_line(socket)[0].store_release(consumed.word());
}

#[test]
fn wrong_position_resets_its_connection_and_no_other() {
    let net = open();
    let kernel = Kernel::new(&net);
    let wrong: [fn(&Kernel, i32); 3] = [
        // More than the ring has room for.
        |kernel, socket| {
            let Descriptor { index, epoch } = Descriptor::of(socket as u32);
            kernel.ring(Op::Send, 4097, index, epoch);
        },
        // Backwards, by more than a ring.
        |kernel, socket| {
            let Descriptor { index, epoch } = Descriptor::of(socket as u32);
            kernel.ring(Op::Send, u64::MAX - 4103, index, epoch);
        },
        // Bytes that have not arrived.
        |kernel, socket| {
            let Descriptor { index, epoch } = Descriptor::of(socket as u32);
            let consumed = Consumed { position: Position::of(1), epoch };
            kernel.host_line(socket)[0].store_release(consumed.word());
            kernel.ring(Op::Credit, 0, index, epoch);
        },
    ];
    let (good, mut good_peer) = connection(&net);
    for (done, break_rule) in (1..).zip(wrong) {
        let (bad, mut bad_peer) = connection(&net);
        break_rule(&kernel, bad);
        let error = bad_peer.read(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        until("the kernel is not told", || Sent::of(kernel.device_line(bad)[1].load_acquire()).errno == 104);
        assert_eq!(net.stats().violations, done);
        let Descriptor { index, epoch } = Descriptor::of(bad as u32);
        kernel.ring(Op::Close, 0, index, epoch);
    }
    works(&kernel, good, &mut good_peer);
    until("closed sockets are not freed", || net.stats().open == 1);
    net.close().unwrap();
}

#[test]
fn close_that_is_seen_before_a_send_says_how_far_it_goes() {
    let net = open();
    let kernel = Kernel::new(&net);
    let (socket, mut peer) = connection(&net);
    let Descriptor { index, epoch } = Descriptor::of(socket as u32);
    for (op, position) in [(Op::Send, 5), (Op::Close, 4000), (Op::Send, 4000), (Op::Send, 40)] {
        kernel.ring(op, position, index, epoch);
    }
    let mut got = Vec::new();
    peer.read_to_end(&mut got).unwrap();
    assert_eq!(got.len(), 4000);
    assert_eq!(net.stats().violations, 0);
    // More than there is room for.
    let (socket, mut peer) = connection(&net);
    let Descriptor { index, epoch } = Descriptor::of(socket as u32);
    kernel.ring(Op::Close, 4097, index, epoch);
    assert_eq!(peer.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    until("closed sockets are not freed", || net.stats().open == 0);
    assert_eq!(net.stats().violations, 1);
    net.close().unwrap();
}

#[test]
fn shutdown_that_is_seen_before_a_send_says_how_far_it_goes() {
    let net = open();
    let kernel = Kernel::new(&net);
    let (socket, mut peer) = connection(&net);
    let Descriptor { index, epoch } = Descriptor::of(socket as u32);
    let mailbox = kernel.words(kernel.sizes().mailboxes(), MAILBOX_BYTES);
    let (call, address, descriptor) = (Ok(Call::Shutdown), Address::EMPTY, socket as u32);
    Request { call, flags: 0, number: 1, descriptor, argument: 1, address, time_limit: 0 }.store(&mailbox[..16]);
    kernel.ring(Op::Control, 4000, 0, 0);
    let mut got = Vec::new();
    peer.read_to_end(&mut got).unwrap();
    assert_eq!(got.len(), 4000);
    assert!(Reply::load(&mailbox[16..], 1).is_some_and(|reply| reply.result == 0));
    kernel.ring(Op::Send, 4000, index, epoch);
    kernel.ring(Op::Close, 4000, index, epoch);
    until("closed sockets are not freed", || net.stats().open == 0);
    assert_eq!(net.stats().violations, 0);
    net.close().unwrap();
}

#[test]
fn bytes_sent_after_a_reset_do_not_change_the_error() {
    let net = open();
    let kernel = Kernel::new(&net);
    let (good, mut good_peer) = connection(&net);
    let (bad, bad_peer) = connection(&net);
    let descriptor = Descriptor::of(bad as u32);
    reset(bad_peer);
    let errno = || Sent::of(kernel.device_line(bad)[1].load_acquire()).errno;
    until("the kernel is not told", || errno() == 104);
    // Which Linux answers with EPIPE.
    kernel.ring(Op::Send, 5, descriptor.index, descriptor.epoch);
    works(&kernel, good, &mut good_peer);
    assert_eq!(errno(), 104);
    assert!(Received::of(kernel.device_line(bad)[0].load_acquire()).flags & ERR != 0);
    net.close().unwrap();
}

/// Closes a connection with a reset.
fn reset(peer: TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let (value, len) = ((&raw const linger).cast(), size_of::<libc::linger>() as libc::socklen_t);
    // SAFETY: the structure lives across the call.
    let done = unsafe { libc::setsockopt(peer.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, value, len) };
    assert_eq!(done, 0);
}

/// A socket that a kernel asks for: its descriptor.
fn new_socket(kernel: &Kernel, number: u32, domain: u32, kind: u32) -> i32 {
    let mailbox = kernel.words(kernel.sizes().mailboxes(), MAILBOX_BYTES);
    let (call, address) = (Ok(Call::Socket), Address::EMPTY);
    let request =
        Request { call, flags: 0, number, descriptor: 0, argument: domain << 16 | kind, address, time_limit: 0 };
    request.store(&mailbox[..16]);
    kernel.ring(Op::Control, 0, 0, 0);
    let mut result = 0;
    until("the call is not answered", || {
        let reply = Reply::load(&mailbox[16..], number);
        reply.inspect(|reply| result = reply.result).is_some()
    });
    result
}

#[test]
fn second_request_of_a_mailbox_before_the_first_answer_is_a_violation() {
    let net = open();
    let kernel = Kernel::new(&net);
    let listener = net.listen(&NetAddress::parse("tcp://127.0.0.1:0").unwrap(), 1).unwrap();
    let mailbox = kernel.words(kernel.sizes().mailboxes(), MAILBOX_BYTES);
    let (call, address, descriptor) = (Ok(Call::Accept), Address::EMPTY, listener as u32);
    Request { call, flags: 0, number: 1, descriptor, argument: 0, address, time_limit: 0 }.store(&mailbox[..16]);
    kernel.ring(Op::Control, 0, 0, 0);
    assert_eq!(net.stats().violations, 0);
    kernel.ring(Op::Control, 0, 0, 0);
    until("the second request is taken", || net.stats().violations == 1);
    net.close().unwrap();
}

#[test]
fn record_that_does_not_fit_breaks_its_socket_and_no_other() {
    let net = open();
    let kernel = Kernel::new(&net);
    let (good, mut good_peer) = connection(&net);
    // Longer than the doorbell says; longer than the ring; an address that no system has.
    let wrong = [(17, 0), (u32::MAX, 0), (100_000, 16), (0, 200)];
    for (done, (stored, address_len)) in (1..).zip(wrong) {
        let bad = new_socket(&kernel, done, 1, 2);
        let Descriptor { index, epoch } = Descriptor::of(bad as u32);
        let record = kernel.words(kernel.sizes().records() + index as usize * 32, 32);
        let ring = kernel.words((record[record::SEND].load_acquire() >> 8) as usize, 32);
        let header = Header { stored, address_len, ..Header::default() };
        ring.iter().zip(header.words()).for_each(|(word, value)| word.store_release(value));
        kernel.ring(Op::Send, 48, index, epoch);
        until("the kernel is not told", || Sent::of(kernel.device_line(bad)[1].load_acquire()).errno == 104);
        assert_eq!(net.stats().violations, u64::from(done));
        kernel.ring(Op::Close, 0, index, epoch);
    }
    works(&kernel, good, &mut good_peer);
    until("closed sockets are not freed", || net.stats().open == 1);
    net.close().unwrap();
}

#[test]
fn doorbells_of_stale_and_impossible_sockets_are_ignored() {
    let net = open();
    let kernel = Kernel::new(&net);
    let (socket, mut peer) = connection(&net);
    let Descriptor { index, epoch } = Descriptor::of(socket as u32);
    for (index, epoch) in [(index, epoch + 1), (index + 1, epoch), (63, 0), (64, 1), (u32::MAX, 0x7fff)] {
        for op in [Op::Send, Op::Credit, Op::Rearm, Op::Close] {
            kernel.ring(op, 77, index, epoch);
        }
    }
    kernel.ring(Op::Control, 0, u32::MAX, 0);
    kernel.ring(Op::Control, 0, kernel.handle.mailboxes, 0);
    works(&kernel, socket, &mut peer);
    assert_eq!((net.stats().violations, net.stats().open), (2, 1));
    net.close().unwrap();
}

/// Both ends of a connection inside the net.
fn inner_connection(net: &Net, kernel: &Kernel, listener: &NetAddress, accepting: i32, number: u32) -> [i32; 2] {
    let client = net.connect(listener).unwrap();
    [client, accept(kernel, accepting, number)]
}

/// A connection that a kernel accepts.
fn accept(kernel: &Kernel, listener: i32, number: u32) -> i32 {
    accept_within(kernel, listener, number, 0)
}

/// The same with a time limit in nanoseconds, or -errno.
fn accept_within(kernel: &Kernel, listener: i32, number: u32, limit: u64) -> i32 {
    let mailbox = kernel.words(kernel.sizes().mailboxes(), MAILBOX_BYTES);
    let (call, descriptor) = (Ok(Call::Accept), listener as u32);
    let address = Address::of_words(std::array::from_fn(|word| if word == 0 { limit } else { 0 }), 0);
    Request { call, flags: 0, number, descriptor, argument: 0, address, time_limit: 0 }.store(&mailbox[..16]);
    kernel.ring(Op::Control, 0, 0, 0);
    let mut accepted = 0;
    until("nothing is accepted", || {
        let reply = Reply::load(&mailbox[16..], number);
        reply.inspect(|reply| accepted = reply.result).is_some()
    });
    accepted
}

#[test]
fn any_time_limit_of_accept_is_taken() {
    let net = open();
    let kernel = Kernel::new(&net);
    let listener = net.listen(&NetAddress::parse("tcp://127.0.0.1:0").unwrap(), 8).unwrap();
    let address = net.address(listener).unwrap().to_string();
    let connect = || TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap();
    assert_eq!(accept_within(&kernel, listener, 1, 1), -Errno::AGAIN.raw_os_error());
    std::thread::scope(|scope| {
        // One that ends long after the connection comes, and after the end of the clock.
        for (number, limit) in (2..).zip([DEADLINE.as_nanos() as u64, u64::MAX]) {
            let client = scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                connect()
            });
            assert!(accept_within(&kernel, listener, number, limit) > 0);
            client.join().unwrap();
        }
    });
    net.close().unwrap();
}

#[test]
fn memory_of_a_program_is_used_again_once_kernel_and_program_have_left() {
    let net = open();
    let kernel = Kernel::new(&net);
    let name = format!("unix:@spinio-hostile-{}", std::process::id());
    let address = NetAddress::parse(&name).unwrap();
    let listener = net.listen(&address, 8).unwrap();
    // The net has memory for four programs.
    let connect = |number| {
        let socket = Socket::connect(&address, SocketOptions::default()).unwrap();
        (socket.transport().0, socket, accept(&kernel, listener, number))
    };
    let mut programs: Vec<_> = (1..=4).map(connect).collect();
    assert!(programs.iter().all(|(transport, ..)| *transport == "shared"));
    let close = |socket: i32, open| {
        net.close_socket(socket).unwrap();
        until("a socket is not closed", || net.stats().open == open);
    };
    close(programs[0].2, 4);
    let (transport, socket, accepted) = connect(5);
    assert_eq!(transport, "kernel", "the first program has not left");
    drop(socket);
    close(accepted, 4);
    drop(programs.remove(0));
    let mut number = 6;
    let (socket, accepted) = loop {
        let (transport, socket, accepted) = connect(number);
        number += 1;
        if transport == "shared" {
            break (socket, accepted);
        }
        // The proxy has not heard yet that the first program has left.
        close(accepted, 4);
    };
    drop(socket);
    let (transport, ..) = connect(number);
    assert_eq!(transport, "kernel", "the kernel has not left");
    close(accepted, 5);
    net.close().unwrap();
}

#[test]
fn doorbells_of_an_end_inside_the_net_move_no_byte_and_end_no_other_connection() {
    let net = open();
    let kernel = Kernel::new(&net);
    let listener = net.listen(&NetAddress::parse("tcp://127.0.0.1:0").unwrap(), 8).unwrap();
    let address = net.address(listener).unwrap();
    // More often than there are pairs.
    for number in 1..=20 {
        let ends = inner_connection(&net, &kernel, &address, listener, number);
        assert_eq!(net.stats().upgraded, u64::from(number));
        let line = |socket| Sent::of(kernel.device_line(socket)[1].load_acquire()).errno;
        assert_eq!(ends.map(line), [peer::MOVED; 2]);
        let [a, b] = ends.map(|socket| Descriptor::of(socket as u32));
        for position in [1, 4097, u64::MAX, 0x1_0000_ffff, 0x1234_5678_9abc] {
            for op in [Op::Send, Op::Credit, Op::Rearm, Op::Ready] {
                kernel.ring(op, position, a.index, a.epoch);
            }
        }
        kernel.ring(Op::Close, 0, a.index, a.epoch);
        let received = || Received::of(kernel.device_line(ends[1])[0].load_acquire());
        until("the other end is not told", || received().flags & EOF != 0);
        kernel.ring(Op::Ready, 1, b.index, b.epoch);
        kernel.ring(Op::Close, 0, b.index, b.epoch);
        until("closed sockets are not freed", || net.stats().open == 1);
    }
    let stats = net.stats();
    assert_eq!((stats.bytes_sent, stats.bytes_received, stats.violations, stats.kept_by_memory), (0, 0, 0, 0));
    net.close().unwrap();
}

fn is_shut_down(done: spinio_net::Result<i32>) -> bool {
    done.is_err_and(|e| e.errno.raw_os_error() == 108)
}

#[test]
fn doorbell_that_is_claimed_and_never_written_breaks_its_net_only_once_the_queue_is_full() {
    let net = open();
    let kernel = Kernel::new(&net);
    let claim = || kernel.claims[0].store_release(kernel.claims[0].load_acquire() + 1);
    let (late, mut late_peer) = connection(&net);
    let Descriptor { index, epoch } = Descriptor::of(late as u32);
    // One that is written after others.
    let written_late = [kernel.claims[0].load_acquire().into(), AtomicU64::new(0)];
    claim();
    let (first, mut first_peer) = connection(&net);
    works(&kernel, first, &mut first_peer);
    let entry = Entry::new(Op::Close, Position::of(0), index, epoch);
    let queue = kernel.words(kernel.sizes().doorbells(), DOORBELLS * DOORBELL_BYTES);
    assert!(doorbell::push(
        queue,
        &written_late[0],
        &written_late[1],
        &kernel.words(0, 4096)[header::DOORBELL_HEAD],
        entry
    ));
    assert_eq!(late_peer.read(&mut [0; 8]).unwrap(), 0);
    // Some that are never written.
    (0..20).for_each(|_| claim());
    let (second, mut second_peer) = connection(&net);
    works(&kernel, second, &mut second_peer);
    assert_eq!(net.stats().violations, 0);
    // More than the queue has, of which the proxy takes all that have a place.
    let credit = Entry::new(Op::Credit, Position::of(0), 0, 0);
    let head = &kernel.words(0, 4096)[header::DOORBELL_HEAD];
    for entered in 0.. {
        if !doorbell::push(queue, &kernel.claims[0], &kernel.claims[1], head, credit) {
            assert!(entered > DOORBELLS - 100);
            break;
        }
    }
    until("the net is not broken", || Sent::of(kernel.device_line(second)[1].load_acquire()).errno == 71);
    assert_eq!(net.stats().violations, 20);
    assert!(is_shut_down(net.listen(&NetAddress::parse("tcp://127.0.0.1:0").unwrap(), 1)));
    net.close().unwrap();
}

#[test]
fn random_words_everywhere_leave_the_program_and_other_nets_alone() {
    // `cargo x net-soak` runs it longer, under the address sanitizer.
    let seconds = std::env::var("SPINIO_SOAK_SECONDS").ok().and_then(|text| text.parse().ok());
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(0));
    for pass in 1.. {
        random_words(0x1234_5678_9abc_def0 + pass);
        if Instant::now() >= end {
            println!("random words: {pass} nets");
            break;
        }
    }
}

fn random_words(mut seed: u64) {
    println!("seed {seed:#x}");
    let (net, other) = (open(), open());
    let (kernel, other_kernel) = (Kernel::new(&net), Kernel::new(&other));
    let sizes = kernel.sizes();
    let listener = net.listen(&NetAddress::parse("tcp://127.0.0.1:0").unwrap(), 8).unwrap();
    let inner = net.address(listener).unwrap();
    // UNIX sockets, since random addresses of others would be those of other machines.
    let datagrams = [1, 2].map(|number| new_socket(&kernel, number, 1, 2));
    let programs = [3, 4].map(|number| {
        let program = Socket::connect(&inner, SocketOptions::default()).unwrap();
        assert_eq!(program.transport().0, "shared");
        (program, accept(&kernel, listener, number))
    });
    let rings = kernel.words(sizes.rings(), 2 * CONNECTIONS * RING_BYTES);
    let granules = programs.each_ref().map(|(_, socket)| {
        let index = Descriptor::of(*socket as u32).index as usize;
        let record = kernel.words(sizes.records() + index * RECORD_BYTES, RECORD_BYTES);
        let address = record[record::GRANULE].load_acquire() as usize;
        kernel.words_at(address, granule::bytes(RING_BYTES as u64) as usize)
    });
    let areas = [
        kernel.words(sizes.doorbells(), DOORBELLS * DOORBELL_BYTES),
        kernel.words(sizes.host_lines(), 64 * LINE_BYTES),
        kernel.words(sizes.mailboxes(), 2048 * MAILBOX_BYTES),
        kernel.words(sizes.event_sets(), PAGE + EVENT_SETS as usize * PAGE),
        kernel.words(sizes.records(), 64 * RECORD_BYTES),
        kernel.words(sizes.device_lines(), 64 * LINE_BYTES),
        kernel.words(sizes.waits(), 64 * WAIT_BYTES),
        rings,
        // Its words, more often than its rings.
        &granules[0][..granule::WORDS],
        granules[1],
    ];
    let mut peers = Vec::new();
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for round in 0..400_usize {
        if round % 40 == 0 && net.stats().open < 10 {
            // A doorbell that closes the socket may be among those that wait.
            match try_connection(&net) {
                Ok(made) => peers.push(made),
                Err(error) => assert_eq!(error.errno.raw_os_error(), 9, "{error}"),
            }
            // Ends of a connection inside the net, of which the listening socket may be gone.
            let _ = net.connect(&inner);
        }
        for _ in 0..500 {
            let area = areas[random() as usize % areas.len()];
            // Indices, epochs and positions that exist, more often than chance has them.
            let word = match random() % 4 {
                0 => random(),
                1 => random() & 0x8000_0001_0000_003f | 1 << 32,
                2 => random() & 0x8007_0000_0000_1fff,
                _ => (random() % 9) | (random() << 32),
            };
            area[random() as usize % area.len()].store_release(word);
        }
        // A record of a datagram that may be right, at a place where one may begin.
        let header = Header {
            stored: (random() % 5000) as u32,
            address_len: (random() % 120) as u8,
            flags: random() as u8,
            address: [random(), random()],
            ..Header::default()
        };
        let at = random() as usize % (rings.len() / 4) * 4;
        rings[at..].iter().zip(header.words()).for_each(|(word, value)| word.store_release(value));
        let Descriptor { index, epoch } = Descriptor::of(datagrams[round % 2] as u32);
        kernel.ring(Op::Send, random() % 1024 * 16, index, epoch);
        for (program, _) in &programs {
            let mut bytes = [0; 100];
            // SAFETY: the bytes live across the calls. What these say is the kernel's doing, and of no matter.
            let _ = unsafe { program.recv(bytes.as_mut_ptr(), bytes.len(), DONTWAIT) };
            // SAFETY: as above.
            let _ = unsafe { program.send(bytes.as_ptr(), bytes.len(), DONTWAIT) };
        }
        // Complete entries too, in the order in which the proxy takes them.
        let ops = [Op::Send, Op::Credit, Op::Rearm, Op::Close, Op::Control, Op::Ready];
        let op = ops[random() as usize % ops.len()];
        kernel.ring(op, random() % 5000, random() as u32 % 70, random() as u32 % 3);
        if round % 100 == 99 {
            let (socket, mut peer) = connection(&other);
            works(&other_kernel, socket, &mut peer);
            let Descriptor { index, epoch } = Descriptor::of(socket as u32);
            other_kernel.ring(Op::Close, 0, index, epoch);
        }
    }
    until("no word was refused", || net.stats().violations > 0);
    assert_eq!(other.stats().violations, 0);
    // The proxy still answers, and ends. A doorbell that closes the new socket may be among those that wait.
    until("the proxy does not answer", || {
        let listened = net.listen(&NetAddress::parse("tcp://127.0.0.1:0").unwrap(), 1);
        let named = listened.and_then(|listener| net.address(listener));
        let _ = named.as_ref().inspect_err(|error| println!("{error}"));
        named.is_ok() || is_shut_down(named.map(|_| 0))
    });
    net.stop().unwrap();
    net.close().unwrap();
    other.close().unwrap();
}
