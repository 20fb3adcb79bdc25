//! Descriptors of the keepers' table, owned by anybody.
//!
//! A number means something only in the table it was opened in, so a thread of the program that lets one go cannot close
//! it: it is buried, and a keeper does that.

use std::sync::Arc;

use spinio_sys::linux::Fd;

/// A descriptor to be closed, and what is to be done with it first.
pub struct PendingClose {
    /// The number, in the table that it lives in.
    pub fd: Fd,
    /// Done first.
    pub pre_close: Option<PreCloseHook>,
}

/// A pool whose workers close descriptors of their table.
pub trait Closer: Send + Sync {
    /// Has it closed by a worker, some time.
    fn defer_close(&self, pending: PendingClose);
}

/// Done by a helper with a descriptor that it is about to close.
pub type PreCloseHook = Box<dyn FnOnce(Fd) + Send + Sync>;

/// Closes descriptors of the crew's table, from any thread.
#[derive(Clone)]
pub struct CloseQueue(pub(crate) Arc<dyn Closer>);

/// A descriptor in the crew's table: only helpers may use the number.
pub struct ShadowFd {
    fd: Fd,
    close_queue: CloseQueue,
    hook: Option<PreCloseHook>,
}

impl ShadowFd {
    /// Takes over a descriptor that a helper opened.
    pub fn new(fd: Fd, close_queue: CloseQueue) -> ShadowFd {
        ShadowFd { fd, close_queue, hook: None }
    }

    /// What a helper is to do before it closes this. It must not panic.
    pub fn set_pre_close(&mut self, farewell: PreCloseHook) {
        self.hook = Some(farewell);
    }

    /// The number, for a helper.
    pub fn get(&self) -> Fd {
        self.fd
    }
}

impl Drop for ShadowFd {
    fn drop(&mut self) {
        self.close_queue.0.defer_close(PendingClose { fd: self.fd, pre_close: self.hook.take() });
    }
}
