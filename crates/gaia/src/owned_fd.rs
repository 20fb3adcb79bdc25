//! A descriptor of the link thread's table, closed there.
//!
//! Not std's: inside libspinio.so its `close` is the hooked one, which would forget what SPIN knows of the program's
//! descriptor of the same number.

#![expect(unsafe_code, reason = "borrows a raw descriptor")]

use std::os::fd::{AsFd, BorrowedFd, IntoRawFd};

use spinio_sys::linux::{self, Fd};

/// Only the thread whose table it is in may use or drop it.
#[derive(Debug)]
pub(crate) struct OwnedFd(Fd);

impl OwnedFd {
    /// Takes over a descriptor that this thread opened.
    pub(crate) fn new(fd: Fd) -> OwnedFd {
        OwnedFd(fd)
    }

    pub(crate) fn get(&self) -> Fd {
        self.0
    }
}

impl From<std::os::fd::OwnedFd> for OwnedFd {
    fn from(fd: std::os::fd::OwnedFd) -> OwnedFd {
        OwnedFd(fd.into_raw_fd())
    }
}

impl AsFd for OwnedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: it is open until the drop.
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }
}

impl Drop for OwnedFd {
    fn drop(&mut self) {
        let _ = linux::close(self.0);
    }
}
