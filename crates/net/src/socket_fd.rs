//! Descriptors of the proxy's table, and where one of another table is.
//!
//! ```text
//!   own sockets ── SocketFd ── close(2) by the proxy
//!   what others have made or may fill: their sockets, files, channels ── ForeignFd ── Closer, a thread ── close(2), which may wait
//! ```
//!
//! The last close of a socket with SO_LINGER and unsent bytes waits, and so may that of a file; Linux closes descriptors that wait in the
//! queue of a UNIX socket together with it.
//!
//! Known flaws: if a close never returns, as of a file system that does not answer, later foreign descriptors stay open. Where the table is
//! full (RLIMIT_NOFILE), the Linux kernel closes what it cannot receive, on the proxy's thread.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use spinio_sys::Errno;
use spinio_sys::linux::channel::receive_packet_with_rights;
use spinio_sys::linux::rights::Rights;
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
            receiver.into_iter().for_each(drop);
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
