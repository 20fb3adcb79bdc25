//! Descriptors of the proxy's table, and where one of another table is.
//!
//! ```text
//!   own sockets ── SocketFd ── close(2) by the proxy
//!   what others have made or may fill: their sockets, files, channels ── ForeignFd ── Closer, a thread ── close(2), which may wait
//! ```
//!
//! The last close of a socket with SO_LINGER and unsent bytes waits, so its time is cleared before. Not of those that wait in the queue of
//! a UNIX socket, which Linux closes together with it; and that of a file may wait too. None is shut down: its sender may still use it.
//!
//! Known flaws: if a close never returns, as of a file system that does not answer, later foreign descriptors stay open, at most as many as
//! the table has (RLIMIT_NOFILE). Where it is full, the Linux kernel closes what it cannot receive, on the proxy's thread. A process that
//! has kept a socket that it has sent finds its SO_LINGER cleared.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use spinio_sys::Errno;
use spinio_sys::linux::channel::receive_packet_with_rights;
use spinio_sys::linux::rights::Rights;
use spinio_sys::linux::socket::close_without_wait;
use spinio_sys::linux::spawn_signals_blocked;
use spinio_sys::linux::{Fd, close, dup_from_thread};

/// A descriptor of the proxy's table, closed with this.
#[derive(Debug)]
pub(crate) struct SocketFd(pub(crate) Fd);

impl SocketFd {
    /// It is not closed with this.
    pub(crate) fn into_fd(self) -> Fd {
        std::mem::ManuallyDrop::new(self).0
    }
}

impl Drop for SocketFd {
    fn drop(&mut self) {
        let _ = close(self.0);
    }
}

/// Closes descriptors on a thread of its own, with the table of the thread that has started it. It ends once all of these are gone.
#[derive(Clone, Debug)]
pub(crate) struct Closer(Sender<Arc<SocketFd>>);

impl Closer {
    /// Also what is disconnected once all are closed.
    pub(crate) fn start() -> Result<(Closer, Receiver<()>), Errno> {
        const STACK_BYTES: usize = 256 << 10;
        let (sender, receiver) = mpsc::channel();
        let (alive, ended) = mpsc::sync_channel::<()>(1);
        let body = move || {
            let _alive = alive;
            receiver.into_iter().for_each(|fd: Arc<SocketFd>| {
                // On this thread, since the socket may be in use: its other owners may keep its lock for long.
                let _ = close_without_wait(fd.0);
            });
        };
        spawn_signals_blocked("spinio-net-close", STACK_BYTES, body).map_err(|_| Errno::AGAIN)?;
        Ok((Closer(sender), ended))
    }

    /// Closes it soon.
    pub(crate) fn close(&self, fd: Arc<SocketFd>) {
        // It fails if the thread has ended, which it does not while there is a sender.
        let _ = self.0.send(fd);
    }

    pub(crate) fn own(&self, fd: Fd) -> ForeignFd {
        ForeignFd { fd: Some(SocketFd(fd)), closer: self.clone() }
    }

    /// Takes what came with bytes; the first descriptor.
    pub(crate) fn own_all(&self, rights: &mut Rights) -> Option<ForeignFd> {
        let mut first = None;
        rights.take(|fd| {
            let fd = self.own(fd);
            first.get_or_insert(fd);
        });
        first
    }

    /// Receives a packet: its length, 0 at the end, and the descriptor that came with it.
    pub(crate) fn receive_packet(&self, via: Fd, bytes: &mut [u8]) -> Result<(usize, Option<ForeignFd>), Errno> {
        let mut rights = Rights::default();
        let len = receive_packet_with_rights(via, bytes, &mut rights)?;
        Ok((len, self.own_all(&mut rights)))
    }
}

/// A descriptor that a [`Closer`] closes.
#[derive(Debug)]
pub(crate) struct ForeignFd {
    /// Until it is dropped.
    fd: Option<SocketFd>,
    closer: Closer,
}

impl ForeignFd {
    pub(crate) fn fd(&self) -> Fd {
        self.fd.as_ref().map_or(-1, |fd| fd.0)
    }

    /// It is not closed with this.
    pub(crate) fn into_fd(mut self) -> Fd {
        self.fd.take().map_or(-1, SocketFd::into_fd)
    }
}

impl Drop for ForeignFd {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.closer.close(Arc::new(fd));
        }
    }
}

/// Where a descriptor is: a number in the table of a thread, which waits for the answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) tid: u32,
    pub(crate) fd: Fd,
}

impl Place {
    /// A duplicate in the table of this thread.
    pub(crate) fn duplicate(self) -> Result<SocketFd, Errno> {
        dup_from_thread(self.tid, self.fd).map(SocketFd)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::IntoRawFd;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    /// Longer than a test runs.
    const PATIENCE: Duration = Duration::from_secs(120);

    /// Two ends of a connection of which the first one has sent more than the other one takes, and whose close would wait for 300 seconds.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let peer = listener.accept().unwrap().0;
        own.set_nonblocking(true).unwrap();
        while own.write(&[0; 65536]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&own, Some(Duration::from_secs(300))).unwrap();
        (own, peer)
    }

    #[test]
    fn socket_that_lingers_holds_up_no_other_close() {
        let (closer, _closed) = Closer::start().unwrap();
        let (own, _peer) = lingering();
        drop(closer.own(own.into_raw_fd()));
        let (next, mut other_end) = UnixStream::pair().unwrap();
        other_end.set_read_timeout(Some(PATIENCE)).unwrap();
        drop(closer.own(next.into_raw_fd()));
        assert_eq!(other_end.read(&mut [0]).unwrap(), 0, "the next one is closed");
    }

    #[test]
    fn socket_that_its_sender_keeps_stays_connected() {
        let (closer, closed) = Closer::start().unwrap();
        let (own, mut other_end) = UnixStream::pair().unwrap();
        let mut kept = own.try_clone().unwrap();
        drop(closer.own(own.into_raw_fd()));
        drop(closer);
        assert_eq!(closed.recv_timeout(PATIENCE), Err(mpsc::RecvTimeoutError::Disconnected), "it is closed");
        kept.write_all(b"x").unwrap();
        other_end.read_exact(&mut [0]).unwrap();
    }
}
