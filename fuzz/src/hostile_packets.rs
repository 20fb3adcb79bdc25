//! Packets with descriptors, sockets with names, and files to share, by plain system calls: what any process can send.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use arbitrary::{Result, Unstructured};
use spinio_ring::granule::{self, Packet};

/// Turns a hang into a failure.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// A UNIX socket.
pub fn socket(kind: i32) -> OwnedFd {
    // SAFETY: a new descriptor.
    unsafe {
        let fd = libc::socket(libc::AF_UNIX, kind | libc::SOCK_CLOEXEC, 0);
        assert!(fd >= 0);
        OwnedFd::from_raw_fd(fd)
    }
}

/// `bind`, or `connect`, to an abstract name; an empty one is chosen by the Linux kernel. Whether it worked.
pub fn name(socket: &OwnedFd, name: &str, connects: bool) -> bool {
    // SAFETY: all zeros are valid.
    let mut at: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    at.sun_family = libc::AF_UNIX as u16;
    for (to, from) in at.sun_path.iter_mut().skip(1).zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    let len = 2 + if name.is_empty() { 0 } else { 1 + name.len() };
    let call = if connects { libc::connect } else { libc::bind };
    // SAFETY: the address lives across the call.
    unsafe { call(socket.as_raw_fd(), (&raw const at).cast(), len as u32) == 0 }
}

/// A socket that listens at an abstract name.
pub fn listening(kind: i32, at: &str) -> OwnedFd {
    let socket = socket(kind);
    // SAFETY: a descriptor of ours.
    assert!(name(&socket, at, false) && unsafe { libc::listen(socket.as_raw_fd(), 64) } == 0);
    socket
}

/// The next connection.
pub fn accept(listener: &OwnedFd) -> OwnedFd {
    // SAFETY: a new descriptor.
    unsafe {
        let fd = libc::accept4(listener.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), libc::SOCK_CLOEXEC);
        assert!(fd >= 0);
        OwnedFd::from_raw_fd(fd)
    }
}

/// Sends a packet with any number of descriptors. One that the other end does not take any more is lost.
pub fn send(socket: &OwnedFd, bytes: &[u8], files: &[RawFd]) {
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = [0_u64; 16];
    // SAFETY: all zeros are valid; the parts live across the call, and the control bytes have room for 8 descriptors.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        if !files.is_empty() {
            let len = size_of_val(files) as u32;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(len) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(len) as usize;
            std::ptr::copy_nonoverlapping(files.as_ptr(), libc::CMSG_DATA(header).cast(), files.len());
        }
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
    }
}

/// The next packet and its descriptor: None at the end, or if nothing comes in a time.
pub fn receive(socket: &OwnedFd, time: Duration) -> Option<(Vec<u8>, Option<OwnedFd>)> {
    let mut bytes = vec![0_u8; 256];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = [0_u64; 8];
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: all zeros are valid; all parts live across the calls; the descriptor is new.
    unsafe {
        let begun = Instant::now();
        // Timers of the fuzzer interrupt it.
        while libc::poll(&raw mut poll, 1, time.as_millis() as i32) != 1 {
            if begun.elapsed() >= time {
                return None;
            }
        }
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control));
        let got = libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC);
        if got <= 0 {
            return None;
        }
        bytes.truncate(got as usize);
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        let file =
            (!header.is_null()).then(|| OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()));
        Some((bytes, file))
    }
}

/// A file that is offered as memory.
pub fn memory_file(bytes: u64, seals: i32) -> OwnedFd {
    // SAFETY: a new descriptor.
    unsafe {
        let fd = libc::memfd_create(c"fuzz-granule".as_ptr(), libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC);
        assert!(fd >= 0 && libc::ftruncate(fd, bytes as i64) == 0 && libc::fcntl(fd, libc::F_ADD_SEALS, seals) == 0);
        OwnedFd::from_raw_fd(fd)
    }
}

/// A packet of another kind, or none.
pub fn hostile(input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let mut bytes = Packet::Ring.encode();
    bytes[7] = input.int_in_range(0..=8)?;
    let more = input.int_in_range(0..=granule::PACKET_BYTES + 100)?;
    bytes.extend(std::iter::repeat_n(input.arbitrary::<u8>()?, more));
    for _ in 0..input.int_in_range(0..=4)? {
        let at = input.choose_index(bytes.len())?;
        bytes[at] = input.arbitrary()?;
    }
    // A packet without bytes would be the end.
    let len = input.int_in_range(0..=bytes.len() - 1)?;
    bytes.truncate(bytes.len() - len);
    Ok(bytes)
}

/// A mapping of memory that is shared.
pub struct Mapped {
    start: *mut u8,
    bytes: usize,
}

impl Mapped {
    pub fn new(file: &OwnedFd, bytes: usize) -> Mapped {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the Linux kernel chooses the address.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert!(start != libc::MAP_FAILED);
        Mapped { start: start.cast(), bytes }
    }

    pub fn words(&self) -> &[std::sync::atomic::AtomicU64] {
        // SAFETY: mapped as long as this lives, aligned to a page, and at least a page.
        unsafe { std::slice::from_raw_parts(self.start.cast(), granule::WORDS) }
    }

    /// A byte of a ring.
    pub fn byte(&self, at: usize) -> &std::sync::atomic::AtomicU8 {
        assert!(at < self.bytes);
        // SAFETY: inside the mapping.
        unsafe { &*self.start.add(at).cast() }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: nothing uses it any more.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// Device memory that a net offers to others, and keeps.
const OFFERED: usize = 16;

/// How many descriptors the table of a thread has: of this process, or of a thread with a table of its own. Those of processes
/// are left out: a net keeps that of the last one that had a granule. So is the device memory that it offers.
pub fn descriptors(thread: u32) -> usize {
    let all = std::fs::read_dir(format!("/proc/self/task/{thread}/fd")).expect("a thread of this process");
    let links =
        all.filter_map(|entry| Some(std::fs::read_link(entry.ok()?.path()).ok()?.to_string_lossy().into_owned()));
    let links: Vec<String> = links.filter(|link| !link.ends_with("[pidfd]")).collect();
    let offered = links.iter().filter(|link| link.contains("spinio-chunk")).count();
    links.len() - offered.min(OFFERED)
}
