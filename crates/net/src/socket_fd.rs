//! Descriptors of the proxy's table, and where one of another table is.

use spinio_sys::Errno;
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
