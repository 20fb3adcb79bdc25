//! The connection: one descriptor of /dev/fuse, from which several threads read.
//!
//! Requests that a thread has read stay with the connection until they are answered, so they survive the process as
//! long as another one keeps the descriptor: [`Connection::resend`] makes the kernel queue them again (Linux 6.9).

use std::ffi::CStr;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use zerocopy::IntoBytes;

use crate::abi::{self, OutHeader, notify};

/// What comes of waiting for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// A request of this many bytes.
    Request(usize),
    /// None after all: it was interrupted, or another thread has it.
    Nothing,
    /// The file system was unmounted, or its connection aborted.
    Unmounted,
}

/// An open /dev/fuse that belongs to a mount.
#[derive(Debug)]
pub struct Connection {
    device: OwnedFd,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

impl Connection {
    /// Uses the descriptor of a mount.
    pub fn new(device: OwnedFd) -> Connection {
        Connection { device }
    }

    /// Another descriptor of the same open file.
    ///
    /// # Errors
    /// The kernel's.
    pub fn try_clone(&self) -> std::io::Result<Connection> {
        self.device.try_clone().map(Connection::new)
    }

    /// Waits for a request.
    ///
    /// # Errors
    /// The kernel's, of a read that will not succeed when repeated.
    pub fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno> {
        match rustix::io::read(&self.device, buffer) {
            Ok(bytes) => Ok(Received::Request(bytes)),
            // ENOENT: the caller was interrupted before the request was read.
            Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => Ok(Received::Nothing),
            Err(Errno::NODEV | Errno::CONNABORTED) => Ok(Received::Unmounted),
            Err(error) => Err(error),
        }
    }

    /// Takes a request that waits, or [`Received::Nothing`]. Meanwhile no other thread may receive, of this process or
    /// another with this open file.
    ///
    /// # Errors
    /// As [`Connection::receive`].
    pub fn receive_waiting(&self, buffer: &mut [u8]) -> Result<Received, Errno> {
        let flags = fcntl_getfl(&self.device)?;
        fcntl_setfl(&self.device, flags | OFlags::NONBLOCK)?;
        let received = self.receive(buffer);
        // A process that is killed before this leaves it: `make_waiting`.
        fcntl_setfl(&self.device, flags - OFlags::NONBLOCK)?;
        received
    }

    /// Makes [`Connection::receive`] wait: an earlier process that was killed in [`Connection::receive_waiting`] may have
    /// left the open file so that each thread would ask again and again. To be called before any thread receives.
    ///
    /// # Errors
    /// The kernel's.
    pub fn make_waiting(&self) -> Result<(), Errno> {
        fcntl_setfl(&self.device, fcntl_getfl(&self.device)? - OFlags::NONBLOCK)
    }

    /// Whether a request is waiting, or the mount is gone.
    ///
    /// # Errors
    /// The kernel's.
    pub fn is_readable(&self) -> Result<bool, Errno> {
        let mut descriptors = [PollFd::new(&self.device, PollFlags::IN)];
        Ok(poll(&mut descriptors, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? > 0)
    }

    /// Answers a request with the parts of a reply, one after the other.
    ///
    /// # Errors
    /// The kernel's. ENOENT, if the request was aborted, counts as success.
    pub fn reply(&self, unique: u64, parts: &[&[u8]]) -> Result<(), Errno> {
        self.answer(0, unique, parts)
    }

    /// Answers a request with an error.
    ///
    /// # Errors
    /// As [`Connection::reply`].
    pub fn reply_error(&self, unique: u64, error: Errno) -> Result<(), Errno> {
        self.answer(-error.raw_os_error(), unique, &[])
    }

    fn answer(&self, error: i32, unique: u64, parts: &[&[u8]]) -> Result<(), Errno> {
        match self.send(error, unique, parts) {
            Err(Errno::NOENT) => Ok(()),
            result => result,
        }
    }

    /// Drops pages of a node from the page cache, after writing back dirty ones; `length` 0: to the end. Waits for
    /// requests that hold these pages, so no thread that handles requests of the node may call it.
    ///
    /// # Errors
    /// ENOENT if the kernel does not know the node.
    pub fn inval_inode(&self, node: u64, offset: i64, length: i64) -> Result<(), Errno> {
        let out = abi::InvalInodeOut { node, offset, length };
        self.send(notify::INVAL_INODE, 0, &[out.as_bytes()])
    }

    /// Drops a name from the cache of directory entries. It takes a lock of the directory, so no handler may call it.
    ///
    /// # Errors
    /// ENOENT if the kernel does not know it.
    pub fn inval_entry(&self, parent: u64, name: &CStr) -> Result<(), Errno> {
        let name_length = name.count_bytes() as u32;
        let out = abi::InvalEntryOut { parent, name_length, flags: 0 };
        self.send(notify::INVAL_ENTRY, 0, &[out.as_bytes(), name.to_bytes_with_nul()])
    }

    /// Makes the kernel forget nodes that no program uses; it says which by FORGET, later. No handler may call it.
    ///
    /// # Errors
    /// EINVAL before Linux 6.18.
    pub fn prune(&self, nodes: &[u64]) -> Result<(), Errno> {
        let count = u32::try_from(nodes.len()).map_err(|_| Errno::INVAL)?;
        let out = abi::PruneOut { count, padding: 0, spare: 0 };
        self.send(notify::PRUNE, 0, &[out.as_bytes(), nodes.as_bytes()])
    }

    /// Queues every request again that was read and not answered.
    ///
    /// # Errors
    /// EINVAL before Linux 6.9.
    pub fn resend(&self) -> Result<(), Errno> {
        self.send(notify::RESEND, 0, &[])
    }

    fn send(&self, error: i32, unique: u64, parts: &[&[u8]]) -> Result<(), Errno> {
        const MOST: usize = 4;
        let len = size_of::<OutHeader>() + parts.iter().map(|p| p.len()).sum::<usize>();
        let header = OutHeader { len: u32::try_from(len).map_err(|_| Errno::INVAL)?, error, unique };
        let mut slices = [IoSlice::new(&[]); MOST];
        slices[0] = IoSlice::new(header.as_bytes());
        let used = parts.len() + 1;
        for (slice, part) in slices.get_mut(1..used).ok_or(Errno::INVAL)?.iter_mut().zip(parts) {
            *slice = IoSlice::new(part);
        }
        let written = rustix::io::writev(&self.device, &slices[..used])?;
        if written == len { Ok(()) } else { Err(Errno::IO) }
    }
}
