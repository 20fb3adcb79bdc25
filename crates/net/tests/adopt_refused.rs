//! A socket that a net cannot take stays as the program has it. The Linux kernel refuses the net's epoll_ctl here, as it does once a user
//! has max_user_watches of them.

#![expect(unsafe_code, reason = "a filter for system calls, and fcntl")]

use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use spinio_device::registry;
use spinio_net::{Net, Options};
use spinio_sys::Errno;
use tempfile::TempDir;

/// From now on EPOLL_CTL_ADD fails with ENOSPC in this thread and in those that it starts.
fn refuse_epoll_add() {
    const NUMBER: u32 = 0;
    /// Of the lower half of the second argument, in `struct seccomp_data`.
    const OPERATION: u32 = 24;
    let load =
        |at| libc::sock_filter { code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, jt: 0, jf: 0, k: at };
    let is = |value, otherwise| {
        let code = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        libc::sock_filter { code, jt: 0, jf: otherwise, k: value }
    };
    let result = |k| libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k };
    let mut filter = [
        load(NUMBER),
        is(libc::SYS_epoll_ctl as u32, 3),
        load(OPERATION),
        is(libc::EPOLL_CTL_ADD as u32, 1),
        result(libc::SECCOMP_RET_ERRNO | libc::ENOSPC as u32),
        result(libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its filter live across the calls.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

fn is_nonblocking(fd: &impl AsRawFd) -> bool {
    // SAFETY: no memory is involved.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) & libc::O_NONBLOCK != 0 }
}

#[test]
fn socket_that_is_refused_keeps_its_linger() {
    let net = Net::open(registry::emulated().unwrap(), Options::default()).unwrap();
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    let linger = Some(Duration::from_secs(30));
    rustix::net::sockopt::set_socket_linger(&socket, linger).unwrap();
    assert_eq!(net.adopt(socket.as_raw_fd()).unwrap_err().errno, Errno::NOTCONN);
    // All that another thread closes is closed then.
    net.close().unwrap();
    assert_eq!(rustix::net::sockopt::socket_linger(&socket).unwrap(), linger);
}

#[test]
fn socket_that_cannot_be_adopted_keeps_its_flags() {
    refuse_epoll_add();
    let options = Options { sockets: 64, connections: 16, ring_bytes: 4096, ..Options::default() };
    let net = Net::open(registry::emulated().unwrap(), options).unwrap();
    let folder = TempDir::new().unwrap();
    let (stream, _peer) = UnixStream::pair().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    for nonblocking in [false, true] {
        stream.set_nonblocking(nonblocking).unwrap();
        listener.set_nonblocking(nonblocking).unwrap();
        for fd in [stream.as_raw_fd(), listener.as_raw_fd()] {
            assert_eq!(net.adopt(fd).unwrap_err().errno, Errno::NOSPC);
        }
        assert_eq!((is_nonblocking(&stream), is_nonblocking(&listener)), (nonblocking, nonblocking));
    }
    assert_eq!(net.stats().open, 0);
    net.close().unwrap();
}
