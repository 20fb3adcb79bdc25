//! A descriptor of the proxy's table.

use spinio_sys::linux::{Fd, close};

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
