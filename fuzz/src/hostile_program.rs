//! A net whose programs break every rule: packets and descriptors at its door, words in the memory, connections that come at
//! the wrong time or not at all. A kernel, which this plays, accepts, arms and closes beside it.
//!
//! It must hold: no panic and no hang of the proxy; an honest program beside it shares memory and its kernel hears of its bytes;
//! afterwards the net has no socket, no descriptor and no granule less than before.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use arbitrary::{Result, Unstructured};
use spinio_device::registry;
use spinio_net::{Net, NetAddress, Options, Socket, SocketOptions};
use spinio_ring::doorbell::{self, Entry, Op};
use spinio_ring::event::{HUP, IN, OUT, RDHUP, Taker};
use spinio_ring::granule::{self, Packet};
use spinio_ring::layout::{
    DOORBELL_BYTES, DOORBELLS, Descriptor, EVENTS, MAILBOX_BYTES, PAGE, Sizes, event_words, header,
};
use spinio_ring::mailbox::{Address, Call, DONTWAIT, Reply, Request};
use spinio_ring::{Position, Word};

use crate::hostile_packets::{self as packets, DEADLINE, Mapped, descriptors};
use crate::{RING, word};

/// Granules are a quarter of the connections.
const CONNECTIONS: u32 = 16;
const STEPS: usize = 16;
/// At which streams begin, and up to which a kernel that closes has sent.
const FIRST: u64 = (1 << 48) - 1000;
/// How long a hostile program waits for an answer, which may never be due.
const ANSWER: Duration = Duration::from_millis(20);

/// The net, and what its kernel has.
struct World {
    net: Net,
    set: i32,
    proxy: u32,
    proxy_descriptors: usize,
    claims: [AtomicU64; 2],
    taker: ([AtomicU64; 4], Vec<AtomicU64>),
    calls: AtomicU64,
    names: AtomicU64,
}

fn world() -> &'static World {
    static WORLD: OnceLock<World> = OnceLock::new();
    WORLD.get_or_init(|| {
        let options = Options {
            sockets: 64,
            connections: CONNECTIONS,
            ring_bytes: RING as u32,
            idle_us: 100,
            first_position: FIRST,
            ..Options::default()
        };
        let net = Net::open(registry::emulated().expect("the emulated device"), options).expect("a net");
        let set = net.set().expect("a set");
        let proxy = thread_called("spinio-net");
        let copies = (0..2 * EVENTS).map(|_| AtomicU64::new(0)).collect();
        World {
            net,
            set,
            proxy,
            proxy_descriptors: descriptors(proxy),
            claims: Default::default(),
            taker: (Default::default(), copies),
            calls: AtomicU64::new(0),
            names: AtomicU64::new(0),
        }
    })
}

fn thread_called(name: &str) -> u32 {
    let threads = std::fs::read_dir("/proc/self/task").expect("threads").map(|entry| entry.expect("a thread").path());
    let mut found =
        threads.filter(|thread| std::fs::read_to_string(thread.join("comm")).is_ok_and(|comm| comm.trim_end() == name));
    let path = found.next().expect("the proxy runs");
    path.file_name().and_then(|name| name.to_str()?.parse().ok()).expect("a number")
}

fn next(counter: &AtomicU64) -> u64 {
    counter.fetch_add(1, std::sync::atomic::Ordering::SeqCst) + 1
}

fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !reached() {
        assert!(begun.elapsed() < DEADLINE, "{what}");
        std::thread::sleep(Duration::from_micros(20));
    }
}

impl World {
    fn sizes(&self) -> Sizes {
        let handle = self.net.handle();
        Sizes { sockets: handle.sockets, mailboxes: handle.mailboxes }
    }

    fn words(&self, offset: usize, bytes: usize) -> &[AtomicU64] {
        // SAFETY: kernels of the emulated GPU see pinned memory at its own address, and the net stays open.
        unsafe {
            std::slice::from_raw_parts((self.net.handle().pinned as usize + offset) as *const AtomicU64, bytes / 8)
        }
    }

    fn ring(&self, op: Op, socket: Descriptor) {
        let queue = self.words(self.sizes().doorbells(), DOORBELLS * DOORBELL_BYTES);
        let head = &self.words(0, PAGE)[header::DOORBELL_HEAD];
        let entry = Entry::new(op, Position::of(FIRST), socket.index, socket.epoch);
        until("the doorbells are full", || doorbell::push(queue, &self.claims[0], &self.claims[1], head, entry));
    }

    /// A kernel accepts: the socket, or -errno.
    fn accept(&self, listener: i32, flags: u16) -> i32 {
        let mailbox = self.words(self.sizes().mailboxes(), MAILBOX_BYTES);
        let (call, number) = (Ok(Call::Accept), next(&self.calls) as u32);
        Request {
            call,
            flags,
            number,
            descriptor: listener as u32,
            argument: 0,
            address: Address::EMPTY,
            time_limit: 0,
        }
        .store(&mailbox[..16]);
        self.ring(Op::Control, Descriptor { index: 0, epoch: 0 });
        let mut result = 0;
        until("the call is not answered", || {
            Reply::load(&mailbox[16..], number).inspect(|reply| result = reply.result).is_some()
        });
        result
    }

    /// Takes the events of the set: whether one is of this socket.
    fn hears(&self, socket: i32, events: u16) -> bool {
        let set = self.set as usize - 1;
        let queue = self.words(self.sizes().event_sets() + PAGE + set * PAGE, PAGE);
        let words = self.words(self.sizes().event_sets(), PAGE);
        let taken = &words[set * (PAGE / 16 / 8) + event_words::TAKEN];
        let taker = Taker { queue, taken, claims: &self.taker.0, copies: &self.taker.1 };
        taker.gather();
        std::iter::from_fn(|| taker.claim()).any(|entry| entry.socket.number() == socket && entry.events & events != 0)
    }

    /// A new listening socket, and its name.
    fn listens(&self) -> (String, i32) {
        let name = format!("spinio-fuzz-program-{}-{}", std::process::id(), next(&self.names));
        let address = NetAddress::parse(&format!("unix:@{name}")).expect("an address");
        (name, self.net.listen(&address, CONNECTIONS).expect("a name that is free"))
    }

    /// A program that keeps to the rules, and for which there is a granule.
    fn honest(&self, name: &str) -> Socket {
        let address = NetAddress::parse(&format!("unix:@{name}")).expect("an address");
        let socket = Socket::connect(&address, SocketOptions::default()).expect("the net listens");
        assert_eq!(socket.transport().0, "shared", "{}", socket.transport().1);
        socket
    }

    /// Waits until nothing is left of a play.
    fn is_as_before(&self) {
        until("a socket is left", || self.net.stats().open == 0);
        until("a descriptor is left", || descriptors(self.proxy) == self.proxy_descriptors);
    }

    fn close(&self, socket: i32) {
        self.ring(Op::Close, Descriptor::of(socket as u32));
    }
}

pub fn play(input: &mut Unstructured<'_>) -> Result<()> {
    let world = world();
    let (name, listener) = world.listens();
    let honest = world.honest(&name);
    let accepted = world.accept(listener, 0);
    assert!(accepted > 0);

    let mut peer = Peer {
        world,
        name,
        listener,
        channel: None,
        anchor: None,
        memory: None,
        stage: 0,
        offer: (0, Position::of(0)),
        accepted: Vec::new(),
    };
    let mut result = Ok(());
    for _ in 0..STEPS {
        result = peer.step(input);
        if result.is_err() || input.is_empty() {
            break;
        }
    }
    let others = std::mem::take(&mut peer.accepted);
    drop(peer);

    world.net.add(world.set, accepted, IN).expect("a socket of the net");
    // SAFETY: the byte lives across the call.
    assert_eq!(unsafe { honest.send([7].as_ptr(), 1, 0) }, Ok(1));
    until("the kernel does not hear of an honest program", || world.hears(accepted, IN));
    drop(honest);
    for socket in others.into_iter().chain([accepted, listener]) {
        world.close(socket);
    }
    world.is_as_before();
    let (name, listener) = world.listens();
    let all: Vec<Socket> = (0..CONNECTIONS / 4).map(|_| world.honest(&name)).collect();
    drop(all);
    world.close(listener);
    world.is_as_before();
    result
}

/// A program without manners.
struct Peer<'a> {
    world: &'a World,
    name: String,
    listener: i32,
    channel: Option<OwnedFd>,
    anchor: Option<OwnedFd>,
    memory: Option<Mapped>,
    /// Steps of the protocol that were right.
    stage: u8,
    /// Generation, and where both directions begin.
    offer: (u16, Position),
    accepted: Vec<i32>,
}

impl Peer<'_> {
    fn step(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        match input.int_in_range(0..=9_u8)? {
            0..=2 => self.go_on(),
            3 => {
                let packet = match input.int_in_range(0..=3)? {
                    0 => Packet::Agreed.encode(),
                    1 => Packet::Ring.encode(),
                    2 => {
                        let (kernel, peer) = (input.arbitrary()?, input.arbitrary()?);
                        Packet::Announce { kernel, peer }.encode()
                    }
                    _ => packets::hostile(input)?,
                };
                self.send(input, &packet)?;
            }
            4 => self.write(input)?,
            5 => self.accept(),
            6 => {
                // The kernel wants to hear of it.
                let events = input.choose(&[IN, OUT, IN | OUT | RDHUP, RDHUP, HUP])?;
                if let Some(socket) = self.accepted.last() {
                    let _ = self.world.net.add(self.world.set, *socket, *events);
                }
            }
            7 => self.connect(),
            8 => self.leave(input)?,
            _ => {
                for _ in 0..input.int_in_range(1..=40)? {
                    self.send(input, &Packet::Ring.encode())?;
                }
            }
        }
        Ok(())
    }

    /// The next step of the protocol, as it should be.
    fn go_on(&mut self) {
        match self.stage {
            0 => {
                let (channel, anchor) = (packets::socket(libc::SOCK_SEQPACKET), packets::socket(libc::SOCK_STREAM));
                let door = format!("spinio-net-2/unix:@{}", self.name);
                assert!(packets::name(&channel, &door, true) && packets::name(&anchor, "", false));
                (self.channel, self.anchor) = (Some(channel), Some(anchor));
            }
            1 => {
                let announce = Packet::Announce { kernel: false, peer: None }.encode();
                if let (Some(channel), Some(anchor)) = (&self.channel, &self.anchor) {
                    packets::send(channel, &announce, &[anchor.as_raw_fd()]);
                }
                if self.hear() != Some(Packet::Welcome) {
                    self.channel = None;
                }
            }
            2 => self.connect(),
            3 => match self.hear() {
                Some(Packet::Offer { size_log2, generation, first, peer: None }) if self.memory.is_some() => {
                    assert!(1 << size_log2 == RING && generation > 0);
                    self.offer = (generation, first);
                }
                _ => self.channel = None,
            },
            4 => {
                self.tell(&Packet::Agreed);
                if self.hear() != Some(Packet::Go { peer: false }) {
                    self.channel = None;
                }
            }
            5 => self.accept(),
            _ => self.tell(&Packet::Ring),
        }
        self.stage += 1;
    }

    fn connect(&mut self) {
        if let Some(anchor) = &self.anchor {
            // It may be connected already.
            packets::name(anchor, &self.name, true);
        }
    }

    fn accept(&mut self) {
        let socket = self.world.accept(self.listener, DONTWAIT);
        self.accepted.extend((socket > 0).then_some(socket));
    }

    fn tell(&self, packet: &Packet) {
        if let Some(channel) = &self.channel {
            packets::send(channel, &packet.encode(), &[]);
        }
    }

    /// An answer, if one is due: a packet, or the end.
    fn hear(&mut self) -> Option<Packet> {
        let (bytes, file) = packets::receive(self.channel.as_ref()?, ANSWER)?;
        if let Some(file) = file {
            self.memory = Some(Mapped::new(&file, granule::bytes(RING) as usize));
        }
        Packet::decode(&bytes)
    }

    fn send(&self, input: &mut Unstructured<'_>, packet: &[u8]) -> Result<()> {
        if let Some(channel) = &self.channel {
            let files: Vec<i32> =
                (0..input.int_in_range(0..=9_u8)?.saturating_sub(6)).map(|_| channel.as_raw_fd()).collect();
            packets::send(channel, packet, &files);
        }
        Ok(())
    }

    /// Words of either end, or of none.
    fn write(&self, input: &mut Unstructured<'_>) -> Result<()> {
        if let Some(memory) = &self.memory {
            let at = input.choose_index(memory.words().len())?;
            // Mostly those that mean something.
            let at = if input.ratio(3, 4)? { at % 2 + at % 6 / 3 * 16 } else { at };
            memory.words()[at].store_release(word(input, self.offer.0, self.offer.1)?);
        }
        Ok(())
    }

    /// Ends something: the channel, the connection or a direction of it, or sends where no byte may come.
    fn leave(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let anchor = self.anchor.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        match input.int_in_range(0..=5)? {
            0 => self.channel = None,
            1 => self.anchor = None,
            // SAFETY: system calls on a descriptor of ours, or on none.
            2 => _ = unsafe { libc::send(anchor, b"x".as_ptr().cast(), 1, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) },
            // SAFETY: as above.
            how => _ = unsafe { libc::shutdown(anchor, how - 3) },
        }
        Ok(())
    }
}
