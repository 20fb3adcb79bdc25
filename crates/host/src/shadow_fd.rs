//! Descriptors of the shadow table, owned by any thread.
//!
//! A number is valid only in the table that it was opened in, so a thread of the program cannot close one: it defers
//! the close to a shadow worker.

use std::sync::Arc;

use spinio_sys::linux::Fd;

use crate::shares::ShareKey;

/// A descriptor to be closed, and its pre-close hook.
pub struct PendingClose {
    /// The number, in its own table.
    pub fd: Fd,
    /// The share that the close takes.
    pub key: ShareKey,
    /// Called first.
    pub pre_close: Option<PreCloseHook>,
}

/// A pool whose workers close descriptors of their table.
pub trait Closer: Send + Sync {
    /// Has a worker close it, at some later time.
    fn defer_close(&self, pending: PendingClose);
}

/// Called by a worker with a descriptor that it is about to close.
pub type PreCloseHook = Box<dyn FnOnce(Fd) + Send + Sync>;

/// Closes descriptors of a pool's table, from any thread.
#[derive(Clone)]
pub struct CloseQueue {
    pub(crate) closer: Arc<dyn Closer>,
    pub(crate) key: ShareKey,
}

/// A descriptor in a pool's table: only its workers may use the number.
pub struct ShadowFd {
    fd: Fd,
    close_queue: CloseQueue,
    hook: Option<PreCloseHook>,
}

impl ShadowFd {
    /// Takes over a descriptor that a worker opened.
    pub fn new(fd: Fd, close_queue: CloseQueue) -> ShadowFd {
        ShadowFd { fd, close_queue, hook: None }
    }

    /// Sets the hook that a worker calls before it closes this. It must not panic.
    pub fn set_pre_close(&mut self, hook: PreCloseHook) {
        self.hook = Some(hook);
    }

    /// The number, for a worker.
    pub fn get(&self) -> Fd {
        self.fd
    }

    /// The share of the workers that its file takes.
    pub fn share_key(&self) -> ShareKey {
        self.close_queue.key
    }
}

impl Drop for ShadowFd {
    fn drop(&mut self) {
        let CloseQueue { closer, key } = &self.close_queue;
        closer.defer_close(PendingClose { fd: self.fd, key: *key, pre_close: self.hook.take() });
    }
}
