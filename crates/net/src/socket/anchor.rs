//! The TCP or UNIX connection under a socket that shares memory: it carries no bytes, and tells how the other end left.
//!
//! Linux tells an error of a connection once, to the first that asks; later calls find the end of the stream, as if nothing were
//! missing. Here an error stays, so that each call of the socket and each poll says it.

use std::sync::atomic::{AtomicI32, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};

use spinio_sys::Errno;
use spinio_sys::linux::{Fd, channel};

/// What the connection of Linux says.
#[derive(Clone, Copy, Debug)]
pub(super) enum Anchor {
    Connected,
    Ended,
    Failed(Errno),
}

/// The error of a connection, once a call has seen it.
#[derive(Debug, Default)]
pub(super) struct Failure {
    /// 0: none.
    errno: AtomicI32,
    /// One thread looks at a time: another one would see the end of the stream before the error is stored.
    look: Mutex<()>,
}

impl Failure {
    /// What is known without a look.
    pub(super) fn known(&self) -> Anchor {
        match self.errno.load(SeqCst) {
            0 => Anchor::Connected,
            errno => Anchor::Failed(Errno::from_raw_os_error(errno)),
        }
    }

    /// Looks at the connection.
    pub(super) fn look(&self, anchor: Fd) -> Anchor {
        let _one = self.look.lock().unwrap_or_else(PoisonError::into_inner);
        if let Anchor::Failed(errno) = self.known() {
            return Anchor::Failed(errno);
        }
        let failed = match channel::look(anchor) {
            Err(Errno::AGAIN | Errno::INTR) => return Anchor::Connected,
            Ok(0) => return Anchor::Ended,
            // The proxy sends nothing there.
            Ok(1..) => Errno::PROTO,
            Err(errno) => errno,
        };
        self.errno.store(failed.raw_os_error(), SeqCst);
        Anchor::Failed(failed)
    }
}
