//! Requests that a kernel leaves in mailboxes: any call with any arguments, beside doorbells and words at the wrong time.
//!
//! ```text
//!   request: words of an input ──> Request::load, as the proxy reads it: what is read is stored to the same words
//!          └─ made sensible enough not to leave this machine ──> mailbox of a net of this process ──> a reply, whatever it says
//!   after each input the net still answers an honest request, and is left without the sockets of the input
//! ```
#![no_main]

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use spinio_device::registry;
use spinio_net::{Handle, Net, NetAddress, Options};
use spinio_ring::doorbell::{self, Entry, Op};
use spinio_ring::layout::{
    ADDRESS_BYTES, DOORBELL_BYTES, DOORBELLS, Descriptor, LINE_BYTES, MAILBOX_BYTES, Sizes, header,
};
use spinio_ring::mailbox::{Address, Call, DONTWAIT, Reply, Request};
use spinio_ring::{Position, Word};

/// Turns a hang into a failure.
const DEADLINE: Duration = Duration::from_secs(20);
const STEPS: usize = 24;
/// How long a call may wait, in nanoseconds.
const LONGEST_WAIT: u64 = 500_000;
const CALLS: [Call; 18] = [
    Call::Socket,
    Call::Bind,
    Call::Listen,
    Call::Accept,
    Call::Connect,
    Call::Shutdown,
    Call::SocketName,
    Call::PeerName,
    Call::SetOption,
    Call::GetOption,
    Call::Set,
    Call::Add,
    Call::OpenFile,
    Call::CloseFile,
    Call::ReadFile,
    Call::WriteFile,
    Call::StatFile,
    Call::SendFile,
];

fuzz_target!(|bytes: &[u8]| {
    let mut input = Unstructured::new(bytes);
    // An input that ends is no error.
    let _ = decode(&mut input);
    let _ = Kernel::get().play(&mut Unstructured::new(bytes));
});

/// What is loaded of any words is stored to words that are loaded as the same.
fn decode(input: &mut Unstructured<'_>) -> Result<()> {
    let words: Vec<AtomicU64> = (0..16).map(|_| Ok(AtomicU64::new(input.arbitrary()?))).collect::<Result<_>>()?;
    let request = Request::load(&words);
    let (_, len) = request.address.bytes();
    assert!(
        len <= ADDRESS_BYTES
            && request.call.is_ok() == CALLS.iter().any(|call| *call as u64 == words[0].load_acquire() & 0xff)
    );
    let again: Vec<AtomicU64> = (0..16).map(|_| AtomicU64::new(0)).collect();
    request.store(&again);
    assert_eq!(Request::load(&again), request);
    let number = (words[0].load_acquire() >> 32) as u32;
    assert!(Reply::load(&words, number).is_some() && Reply::load(&words, number.wrapping_add(1)).is_none());
    Ok(())
}

/// A thread that writes what kernels can write.
struct Kernel {
    net: Net,
    handle: Handle,
    listener: i32,
    claims: [AtomicU64; 2],
    numbers: AtomicU64,
}

impl Kernel {
    fn get() -> &'static Kernel {
        static KERNEL: OnceLock<Kernel> = OnceLock::new();
        KERNEL.get_or_init(|| {
            let options = Options { sockets: 64, connections: 16, ring_bytes: 4096, idle_us: 50, ..Options::default() };
            let net = Net::open(registry::emulated().expect("an emulated device"), options).expect("a net");
            let name = format!("unix:@spinio-fuzz-mailboxes-{}", std::process::id());
            let listener = net.listen(&NetAddress::parse(&name).expect("an address"), 4).expect("a listener");
            let (claims, numbers) = (Default::default(), AtomicU64::new(1));
            Kernel { handle: net.handle(), net, listener, claims, numbers }
        })
    }

    fn sizes(&self) -> Sizes {
        Sizes { sockets: self.handle.sockets, mailboxes: self.handle.mailboxes }
    }

    fn words(&self, offset: usize, bytes: usize) -> &[AtomicU64] {
        // SAFETY: kernels of the emulated GPU see pinned memory at its own address; it lives as long as the net, and all
        // accesses to it are atomic.
        unsafe { core::slice::from_raw_parts((self.handle.pinned as usize + offset) as *const AtomicU64, bytes / 8) }
    }

    fn mailbox(&self, number: u32) -> (&[AtomicU64], &[AtomicU64]) {
        self.words(self.sizes().mailboxes() + number as usize * MAILBOX_BYTES, MAILBOX_BYTES).split_at(16)
    }

    fn ring(&self, op: Op, position: u64, socket: u32, epoch: u32) {
        let queue = self.words(self.sizes().doorbells(), DOORBELLS * DOORBELL_BYTES);
        let head = &self.words(0, 4096)[header::DOORBELL_HEAD];
        let entry = Entry::new(op, Position::of(position), socket, epoch);
        while !doorbell::push(queue, &self.claims[0], &self.claims[1], head, entry) {
            std::thread::yield_now();
        }
    }

    /// A call, and its reply, which always comes.
    fn call(&self, mailbox: u32, mut request: Request, position: u64) -> Reply {
        let number = self.numbers.load_acquire();
        self.numbers.store_release(number + 1);
        request.number = number as u32;
        let (words, reply) = self.mailbox(mailbox);
        request.store(words);
        self.ring(Op::Control, position, mailbox, 0);
        let begun = Instant::now();
        loop {
            if let Some(reply) = Reply::load(reply, request.number) {
                assert!(reply.address.bytes().1 <= ADDRESS_BYTES);
                return reply;
            }
            assert!(begun.elapsed() < DEADLINE, "no reply to {request:?}");
            std::thread::yield_now();
        }
    }

    fn close(&self, socket: i32) {
        let Descriptor { index, epoch } = Descriptor::of(socket as u32);
        self.ring(Op::Close, 0, index, epoch);
    }

    fn play(&self, input: &mut Unstructured<'_>) -> Result<()> {
        let mut sockets = vec![self.listener];
        let done = self.steps(input, &mut sockets);
        // Accepted or made by the input.
        for socket in sockets.drain(1..) {
            self.close(socket);
        }
        let name = Request { call: Ok(Call::SocketName), descriptor: self.listener as u32, ..NOTHING };
        let reply = self.call(0, name, 0);
        assert!(reply.result == 0 && reply.address.bytes().1 > 2, "an honest request: {reply:?}");
        let begun = Instant::now();
        while self.net.stats().open > 1 {
            // A connection that waits to be accepted is closed with the socket that was connected; one of another input too.
            assert!(begun.elapsed() < DEADLINE, "sockets are left: {:?}", self.net.stats());
            std::thread::yield_now();
        }
        done
    }

    fn steps(&self, input: &mut Unstructured<'_>, sockets: &mut Vec<i32>) -> Result<()> {
        for _ in 0..STEPS {
            if input.is_empty() {
                break;
            }
            let known = sockets[input.choose_index(sockets.len())?] as u32;
            match input.int_in_range(0..=9)? {
                0 => {
                    // Doorbells of sockets at any time.
                    let ops = [Op::Send, Op::Credit, Op::Rearm, Op::Armed, Op::Ready];
                    let Descriptor { index, epoch } = Descriptor::of(known);
                    if index != Descriptor::of(self.listener as u32).index {
                        self.ring(*input.choose(&ops)?, input.arbitrary()?, index, epoch);
                    }
                }
                1 => {
                    // A mailbox that there is not.
                    self.ring(Op::Control, 0, self.handle.mailboxes + u32::from(input.arbitrary::<u8>()?), 0);
                }
                2 => {
                    let index = Descriptor::of(known).index as usize;
                    let line = self.words(self.sizes().host_lines() + index * LINE_BYTES, LINE_BYTES);
                    line[input.choose_index(line.len())?].store_release(input.arbitrary()?);
                }
                _ => {
                    let (request, position) = self.request(input, known)?;
                    let reply = self.call(input.int_in_range(0..=self.handle.mailboxes - 1)?, request, position);
                    if reply.result > 0 && matches!(request.call, Ok(Call::Socket | Call::Accept)) {
                        sockets.push(reply.result);
                    }
                }
            }
        }
        Ok(())
    }

    fn request(&self, input: &mut Unstructured<'_>, known: u32) -> Result<(Request, u64)> {
        let call =
            if input.ratio(15, 16)? { Ok(*input.choose(&CALLS)?) } else { Err(100 + input.arbitrary::<u8>()? % 100) };
        let descriptor = if input.ratio(7, 8)? { known } else { input.arbitrary()? };
        let argument = match (call, input.int_in_range(0..=7)?) {
            (_, 7) => input.arbitrary()?,
            (Ok(Call::Socket), _) => *input.choose(&[1, 2, 10])? << 16 | *input.choose(&[1, 2, 5])?,
            (Ok(Call::Add), _) => input.int_in_range(0..=3)? << 16 | *input.choose(&[0, 1, 4, 5, 0x2000])?,
            (Ok(Call::SetOption | Call::GetOption), _) => {
                *input.choose(&[1, 6, 41])? << 16 | u32::from(input.arbitrary::<u8>()?)
            }
            _ => input.int_in_range(0..=3)?,
        };
        // The honest socket stays as it is.
        let changes = !matches!(call, Ok(Call::Accept | Call::SocketName | Call::PeerName | Call::GetOption));
        let descriptor = if descriptor as i32 == self.listener && changes { 0 } else { descriptor };
        let flags = if input.arbitrary()? { DONTWAIT } else { input.arbitrary::<u16>()? & !DONTWAIT };
        let address = match call {
            Ok(Call::Accept) => Address::of_words([1 + input.int_in_range(0..=LONGEST_WAIT)?; 14], 0),
            Ok(Call::Bind | Call::Connect) => self.address(input)?,
            _ => Address::of_words(input.arbitrary()?, input.arbitrary()?),
        };
        // Of connect: the time limit in microseconds.
        let position = match call {
            Ok(Call::Connect) => 1 + input.int_in_range(0..=LONGEST_WAIT)? / 1000,
            _ => input.arbitrary()?,
        };
        Ok((Request { call, flags, descriptor, argument, address, ..NOTHING }, position))
    }

    /// An address on this machine, of which any byte may be wrong that does not lead elsewhere.
    fn address(&self, input: &mut Unstructured<'_>) -> Result<Address> {
        let mut bytes = [0_u8; ADDRESS_BYTES];
        input.fill_buffer(&mut bytes)?;
        let family = *input.choose(&[0_u16, 1, 1, 2, 2, 10, 10, 99])?;
        bytes[..2].copy_from_slice(&family.to_ne_bytes());
        let mut len = input.int_in_range(0..=ADDRESS_BYTES + 10)?;
        match family {
            // Names without a file.
            1 => bytes[2] = 0,
            2 => bytes[4..8].copy_from_slice(&[127, 0, 0, 1]),
            10 => {
                bytes[8..24].fill(0);
                bytes[23] = 1;
            }
            // To no address.
            _ => len = len.min(2),
        }
        if family == 1 && input.arbitrary()? {
            let name = self.net.address(self.listener).expect("a name").to_string();
            let name = name.strip_prefix("unix:@").expect("an abstract name").as_bytes();
            bytes[3..3 + name.len()].copy_from_slice(name);
            len = 3 + name.len();
        }
        Ok(Address::new(&bytes[..len.min(ADDRESS_BYTES)]))
    }
}

const NOTHING: Request =
    Request { call: Err(0), flags: 0, number: 0, descriptor: 0, argument: 0, address: Address::EMPTY, time_limit: 0 };
