//! A net that a test plays, to which a program connects.

#![allow(dead_code, clippy::allow_attributes, reason = "each test file uses its own part")]
#![expect(unsafe_code, reason = "memory that a program shares with a net")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use spinio_net::{NetAddress, Socket, SocketOptions};
use spinio_ring::granule::{self, END_WORDS, Packet};
use spinio_ring::peer::Mark;
use spinio_ring::{Position, Word};
use spinio_sys::linux::channel::{Until, receive_packet, send_packet, wait_socket};
use spinio_sys::linux::{self, socket};

pub(crate) const RING: u64 = 4096;
pub(crate) const GENERATION: u16 = 7;
const SEQPACKET: u16 = 5;

pub(crate) fn first() -> Position {
    Position::of(u64::MAX - 100)
}

/// A descriptor that is closed with this.
pub(crate) fn owned(fd: linux::Fd) -> OwnedFd {
    // SAFETY: the caller has just made it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

pub(crate) fn listening(kind: u16, name: &NetAddress) -> OwnedFd {
    let fd = owned(socket::new_socket(socket::AF_UNIX, kind).unwrap());
    socket::bind(fd.as_raw_fd(), name.bytes()).unwrap();
    socket::listen(fd.as_raw_fd(), 8).unwrap();
    fd
}

pub(crate) fn accept(listener: &OwnedFd) -> OwnedFd {
    wait_socket(listener.as_raw_fd(), Until::Readable, None).unwrap();
    owned(socket::accept(listener.as_raw_fd()).unwrap().0)
}

/// What the net has: the granule, mapped, and what keeps the connection.
pub(crate) struct Offered {
    start: *mut u8,
    pub(crate) anchor: OwnedFd,
    pub(crate) channel: OwnedFd,
    _listener: OwnedFd,
}

impl Offered {
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped until the process ends.
        unsafe { std::slice::from_raw_parts(self.start.cast(), granule::WORDS) }
    }

    /// A word of the kernel's end.
    pub(crate) fn say(&self, word: usize, position: Position, generation: u16) {
        self.words()[END_WORDS + word].store_release(Mark { position, generation, flags: 0 }.word());
    }

    /// What the program says.
    pub(crate) fn mark(&self, word: usize) -> Mark {
        Mark::of(self.words()[word].load_acquire())
    }
}

/// A program connects, and the net offers it this file.
pub(crate) fn connect(name: &str, file: OwnedFd) -> (Socket, Offered) {
    let parse = |text: String| NetAddress::parse(&text).unwrap();
    let name = format!("spinio-programs-{name}-{}", std::process::id());
    let address = parse(format!("unix:@{name}"));
    let listener = listening(1, &address);
    let door = listening(SEQPACKET, &parse(format!("unix:@spinio-net-2/unix:@{name}")));
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
    (socket, Offered { start, anchor, channel: holder.join().unwrap(), _listener: listener })
}

pub(crate) fn connect_well(name: &str) -> (Socket, Offered) {
    let file = owned(linux::sized_memfd(c"programs", granule::bytes(RING)).unwrap());
    let (socket, offered) = connect(name, file);
    assert_eq!(socket.transport().0, "shared");
    (socket, offered)
}
