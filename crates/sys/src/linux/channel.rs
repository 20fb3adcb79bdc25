//! Packets between processes of one machine, over UNIX sockets: bytes with at most one descriptor, and who the peer is.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::datagram::recv_with_rights;
use super::files::{Fd, close};
use super::raw::syscall;
use super::rights;
use super::signals::SignalGuard;

type Result<T> = core::result::Result<T, Errno>;

const SOL_SOCKET: usize = 1;
const SO_PEERCRED: usize = 17;
const SO_RCVTIMEO: usize = 20;
const SO_SNDTIMEO: usize = 21;
const SCM_RIGHTS: i32 = 1;
const MSG_PEEK: usize = 2;
const MSG_DONTWAIT: usize = 0x40;
const MSG_NOSIGNAL: usize = 0x4000;
const MSG_CMSG_CLOEXEC: usize = 0x4000_0000;
const POLLIN: u16 = 1;
const POLLOUT: u16 = 4;
const POLLRDHUP: u16 = 0x2000;

/// `struct cmsghdr` with one descriptor, and its padding.
#[repr(C, align(8))]
struct Rights {
    len: usize,
    level: i32,
    kind: i32,
    fd: Fd,
    padding: i32,
}

/// The length that `struct cmsghdr` counts: without the padding.
const RIGHTS_BYTES: usize = size_of::<Rights>() - 4;

/// `struct msghdr` with one part.
#[repr(C)]
struct Message {
    name: usize,
    name_len: u32,
    parts: *const [usize; 2],
    part_count: usize,
    control: *mut Rights,
    control_len: usize,
    flags: u32,
}

impl Message {
    fn new(parts: &[usize; 2], control: *mut Rights, control_len: usize) -> Message {
        Message { name: 0, name_len: 0, parts, part_count: 1, control, control_len, flags: 0 }
    }
}

/// Sends a packet, with a duplicate of a descriptor. It does not wait.
pub fn send_packet(via: Fd, bytes: &[u8], fd: Option<Fd>) -> Result<()> {
    let part = [bytes.as_ptr() as usize, bytes.len()];
    let sent = fd.unwrap_or(-1);
    let mut rights = Rights { len: RIGHTS_BYTES, level: SOL_SOCKET as i32, kind: SCM_RIGHTS, fd: sent, padding: 0 };
    let message = match fd {
        Some(_) => Message::new(&part, &mut rights, size_of::<Rights>()),
        None => Message::new(&part, core::ptr::null_mut(), 0),
    };
    let flags = MSG_DONTWAIT | MSG_NOSIGNAL;
    // SAFETY: the message and all that it refers to live across the call.
    unsafe { syscall(k::__NR_sendmsg, [via as usize, &raw const message as usize, flags, 0, 0, 0]) }.map(drop)
}

/// Receives a packet: its length, 0 at the end, and the descriptor that came with it. It does not wait.
pub fn receive_packet(via: Fd, bytes: &mut [u8]) -> Result<(usize, Option<Fd>)> {
    let part = [bytes.as_mut_ptr() as usize, bytes.len()];
    let mut rights = Rights { len: 0, level: 0, kind: 0, fd: -1, padding: 0 };
    // Without the padding, where a second descriptor would have room: the Linux kernel closes what has none.
    let mut message = Message::new(&part, &mut rights, RIGHTS_BYTES);
    let flags = MSG_DONTWAIT | MSG_CMSG_CLOEXEC;
    let at = &raw mut message as usize;
    // SAFETY: the message and all that it refers to live across the call; all bits are valid for integers.
    let count = unsafe { syscall(k::__NR_recvmsg, [via as usize, at, flags, 0, 0, 0]) }?;
    let has_fd = message.control_len >= RIGHTS_BYTES && rights.len == RIGHTS_BYTES && rights.kind == SCM_RIGHTS;
    Ok((count, has_fd.then_some(rights.fd)))
}

/// The same with all descriptors that came with it.
pub fn receive_packet_with_rights(via: Fd, bytes: &mut [u8], rights: &mut rights::Rights) -> Result<usize> {
    // SAFETY: the bytes live across the call.
    unsafe { recv_with_rights(via, bytes.as_mut_ptr(), bytes.len(), rights) }
}

/// Process and user at the other end, as of its `connect` or `listen`.
pub fn peer_credentials(fd: Fd) -> Result<(u32, u32)> {
    let (mut value, mut len) = ([0_u32; 3], 12_u32);
    let args = [fd as usize, SOL_SOCKET, SO_PEERCRED, value.as_mut_ptr() as usize, &raw mut len as usize, 0];
    // SAFETY: both live across the call.
    unsafe { syscall(k::__NR_getsockopt, args) }?;
    Ok((value[0], value[1]))
}

/// A process, as a descriptor of it.
#[derive(Debug)]
pub struct ProcessFd(Fd);

impl ProcessFd {
    /// `pidfd_open`.
    pub fn open(pid: u32) -> Result<ProcessFd> {
        // SAFETY: no memory is involved.
        unsafe { syscall(k::__NR_pidfd_open, [pid as usize, 0, 0, 0, 0, 0]) }.map(|fd| ProcessFd(fd as Fd))
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        wait_for(self.0, POLLIN, Some(0)).is_ok_and(|events| events != 0)
    }
}

impl Drop for ProcessFd {
    fn drop(&mut self) {
        let _ = close(self.0);
    }
}

/// What a wait on a socket is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// Bytes, the end of the stream, or an error.
    Readable,
    /// Room, or an error.
    Writable,
}

/// Waits for a socket, at most so many nanoseconds: whether it is ready. A signal ends the wait.
pub fn wait_socket(fd: Fd, until: Until, nanoseconds: Option<u64>) -> Result<bool> {
    let events = match until {
        Until::Readable => POLLIN | POLLRDHUP,
        Until::Writable => POLLOUT,
    };
    match wait_for(fd, events, nanoseconds) {
        Err(Errno::INTR) => Ok(false),
        other => other.map(|events| events != 0),
    }
}

fn wait_for(fd: Fd, events: u16, nanoseconds: Option<u64>) -> Result<u16> {
    let mut polls = [PollFd { fd, events, ready: 0 }];
    poll(&mut polls, nanoseconds)?;
    Ok(polls[0].ready)
}

/// `struct pollfd`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PollFd {
    /// Less than 0: it is passed over.
    pub fd: Fd,
    /// Those that are waited for.
    pub events: u16,
    /// Those that have come.
    pub ready: u16,
}

/// Waits until some of the descriptors are ready, at most so many nanoseconds: how many are.
pub fn poll(polls: &mut [PollFd], nanoseconds: Option<u64>) -> Result<usize> {
    poll_with_mask(polls, nanoseconds, 0, 0)
}

/// The same; signals that the guard blocks are delivered in it, and only in it. EINTR: some were, and nothing is ready.
pub fn poll_with_signals(polls: &mut [PollFd], nanoseconds: Option<u64>, blocked: &SignalGuard) -> Result<usize> {
    let mask = blocked.previous_mask();
    poll_with_mask(polls, nanoseconds, &raw const mask as usize, size_of_val(&mask))
}

fn poll_with_mask(polls: &mut [PollFd], nanoseconds: Option<u64>, mask: usize, mask_bytes: usize) -> Result<usize> {
    // The Linux kernel stores there what is left.
    let mut timeout = nanoseconds.map(|ns| [ns / 1_000_000_000, ns % 1_000_000_000]);
    let time = timeout.as_mut().map_or(0, |timeout| timeout.as_mut_ptr() as usize);
    // SAFETY: the descriptors, the time and the mask, if there is one, live across the call.
    unsafe { syscall(k::__NR_ppoll, [polls.as_mut_ptr() as usize, polls.len(), time, mask, mask_bytes, 0]) }
}

/// `recvfrom` with flags.
///
/// # Safety
/// The range must be writable.
pub unsafe fn receive_with(fd: Fd, to: *mut u8, len: usize, flags: u32) -> Result<usize> {
    // SAFETY: guaranteed by the caller.
    unsafe { syscall(k::__NR_recvfrom, [fd as usize, to as usize, len, flags as usize, 0, 0]) }
}

/// `sendto` with flags, that raises no signal.
///
/// # Safety
/// The range must be readable.
pub unsafe fn send_with(fd: Fd, from: *const u8, len: usize, flags: u32) -> Result<usize> {
    let flags = flags as usize | MSG_NOSIGNAL;
    // SAFETY: guaranteed by the caller.
    unsafe { syscall(k::__NR_sendto, [fd as usize, from as usize, len, flags, 0, 0]) }
}

/// SO_RCVTIMEO and SO_SNDTIMEO in nanoseconds; 0: none.
pub fn set_timeouts(fd: Fd, nanoseconds: [u64; 2]) -> Result<()> {
    for (name, ns) in [SO_RCVTIMEO, SO_SNDTIMEO].into_iter().zip(nanoseconds) {
        let time = [ns / 1_000_000_000, ns % 1_000_000_000 / 1000];
        let args = [fd as usize, SOL_SOCKET, name, time.as_ptr() as usize, size_of_val(&time), 0];
        // SAFETY: the time lives across the call.
        unsafe { syscall(k::__NR_setsockopt, args) }?;
    }
    Ok(())
}

/// Whether bytes wait (1), the stream has ended (0), or the connection has failed; EAGAIN: none of these.
pub fn look(fd: Fd) -> Result<usize> {
    let mut byte = 0_u8;
    // SAFETY: the byte lives across the call.
    unsafe { receive_with(fd, &raw mut byte, 1, (MSG_PEEK | MSG_DONTWAIT) as u32) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::linux::socket_move::Passage;
    use crate::linux::{geteuid, getpid, memfd};

    #[test]
    fn packets_keep_their_boundaries_and_descriptors_and_tell_of_the_end() {
        let passage = Passage::new().unwrap();
        let file = memfd(c"packet").unwrap();
        let mut bytes = [0; 16];
        assert_eq!(receive_packet(passage.inner, &mut bytes), Err(Errno::AGAIN));
        assert_eq!(wait_socket(passage.inner, Until::Readable, Some(0)), Ok(false));
        send_packet(passage.outer, b"one", Some(file)).unwrap();
        send_packet(passage.outer, b"three", None).unwrap();
        assert_eq!(wait_socket(passage.inner, Until::Readable, None), Ok(true));
        let (len, fd) = receive_packet(passage.inner, &mut bytes).unwrap();
        assert_eq!(&bytes[..len], b"one");
        close(fd.unwrap()).unwrap();
        assert_eq!(receive_packet(passage.inner, &mut bytes), Ok((5, None)));
        assert_eq!(peer_credentials(passage.inner), Ok((getpid(), geteuid())));
        assert!(!ProcessFd::open(getpid()).unwrap().has_ended());
        super::super::socket::shutdown(passage.outer, 2).unwrap();
        assert_eq!(receive_packet(passage.inner, &mut bytes), Ok((0, None)));
        assert_eq!(look(passage.inner), Ok(0));
        close(file).unwrap();
    }

    #[test]
    fn of_several_descriptors_in_a_packet_one_is_received_and_none_stays_open() {
        let passage = Passage::new().unwrap();
        // What the peer sends is the only other descriptor of the pipe's writing end.
        for count in 1..=4 {
            let (reader, writer) = std::io::pipe().unwrap();
            send_descriptors(passage.outer, writer.as_raw_fd(), count);
            drop(writer);
            let fd = receive_packet(passage.inner, &mut [0; 8]).unwrap().1.unwrap();
            assert_eq!(wait_for(reader.as_raw_fd(), POLLIN, Some(0)), Ok(0), "one is open");
            close(fd).unwrap();
            assert_ne!(wait_for(reader.as_raw_fd(), POLLIN, Some(0)), Ok(0), "of {count}, one is left");
        }
    }

    /// Sends a packet with a descriptor several times, as any program can.
    fn send_descriptors(via: Fd, fd: Fd, count: usize) {
        let mut control = [0_u64; 8];
        let len = 16 + 4 * count;
        control[0] = len as u64;
        control[1] = SOL_SOCKET as u64 | (SCM_RIGHTS as u64) << 32;
        let pair = fd as u64 | (fd as u64) << 32;
        control[2..].fill(pair);
        let part = [b"several".as_ptr() as usize, 7];
        let message = Message::new(&part, control.as_mut_ptr().cast(), len.next_multiple_of(8));
        // SAFETY: the message and all that it refers to live across the call.
        unsafe { syscall(k::__NR_sendmsg, [via as usize, &raw const message as usize, 0, 0, 0, 0]) }.unwrap();
    }
}
