//! Descriptors of the backing file system: opened by file handle when they are needed, a bounded number kept.
//!
//! ```text
//!   node ──> orphan? ──> reopen its descriptor through /proc/self/fd
//!        └─> kept? ────> that one
//!        └─> open_by_handle_at(mount, handle), keep it, close the least recently used
//! ```
//!
//! **Orphans**: files and directories without a name that the kernel still uses (open, mapped, a working directory). By
//! handle they can be opened only while some descriptor keeps the inode, also across a crash of the server. So before
//! the last name goes, a descriptor goes to the supervisor, which keeps it until the kernel forgets the node. The
//! alternative, renaming the file into a hidden directory as NFS does, leaves debris after a crash of the machine, and
//! shows one link where POSIX wants none.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use spinio_sys::linux::open_by_handle;

use crate::link::{Link, Message};
use crate::nodes::{Identity, Nodes};

/// Descriptors kept at most; a quarter of what the process may have, if that is less. Orphans may have three
/// eighths, and clients five sixteenths (server.rs).
const KEPT_FDS: usize = 4096;

/// What a descriptor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Attributes, names in a directory (O_PATH).
    Path,
    /// Content.
    Read,
    /// Content, in both directions: the kernel also reads files that programs opened for writing only.
    Write,
}

/// The descriptors.
#[derive(Debug)]
pub struct Backing {
    mount: OwnedFd,
    nodes: Arc<Nodes>,
    kept: Mutex<Kept>,
    orphans: Mutex<HashMap<u64, Arc<OwnedFd>>>,
    orphan_limit: usize,
    supervisor: Link,
}

#[derive(Debug)]
struct Kept {
    limit: usize,
    /// With the time of the last use.
    fds: HashMap<(u64, Access), (Arc<OwnedFd>, u64)>,
    /// Oldest first; an entry whose time is not the last use is not the oldest.
    order: VecDeque<((u64, Access), u64)>,
    time: u64,
}

impl Backing {
    /// `mount`: the backing directory, not O_PATH. `fds`: descriptors that the process may have.
    pub fn new(mount: OwnedFd, nodes: Arc<Nodes>, supervisor: Link, fds: usize) -> Backing {
        let (limit, orphan_limit) = ((fds / 4).min(KEPT_FDS), fds / 8 * 3);
        let kept = Kept { limit: limit.max(1), fds: HashMap::new(), order: VecDeque::new(), time: 0 };
        Backing { mount, nodes, kept: Mutex::new(kept), orphans: Mutex::default(), orphan_limit, supervisor }
    }

    /// The backing directory.
    pub fn mount(&self) -> &OwnedFd {
        &self.mount
    }

    /// A descriptor of a node. It does not wait for another process: clients get descriptors of files, and may take
    /// leases on them, with which they hold up programs that open the file for writing.
    ///
    /// # Errors
    /// ESTALE: there is no such node or inode. EAGAIN: the file has a lease, which is being broken (45 s).
    pub fn open(&self, node: u64, access: Access) -> Result<Arc<OwnedFd>, Errno> {
        self.open_with(node, access, OFlags::NONBLOCK)
    }

    /// As `open`, where an error would lose bytes: waits until a lease is broken.
    ///
    /// # Errors
    /// ESTALE: there is no such node or inode.
    pub fn open_waiting(&self, node: u64, access: Access) -> Result<Arc<OwnedFd>, Errno> {
        self.open_with(node, access, OFlags::empty())
    }

    fn open_with(&self, node: u64, access: Access, wait: OFlags) -> Result<Arc<OwnedFd>, Errno> {
        if let Some(fd) = self.kept().get((node, access)) {
            return Ok(fd);
        }
        let identity = self.nodes.get(node)?;
        let flags = match (access, identity.file_type) {
            (Access::Path, _) => OFlags::PATH | OFlags::NOFOLLOW,
            // Opening a device or a pipe would have effects; the kernel does it itself.
            (_, kind) if kind != FileType::RegularFile && kind != FileType::Directory => return Err(Errno::INVAL),
            (Access::Read, _) => OFlags::RDONLY | wait,
            (Access::Write, _) => OFlags::RDWR | wait,
        };
        let orphan = self.orphans().get(&node).cloned();
        let fd = Arc::new(match orphan {
            Some(orphan) if access == Access::Path => return Ok(orphan),
            Some(orphan) => reopen(&orphan, flags)?,
            None => open_by_handle(self.mount.as_fd(), &identity.handle, flags.bits())?,
        });
        self.keep(node, access, &fd);
        Ok(fd)
    }

    /// Keeps a descriptor that was opened otherwise.
    pub fn keep(&self, node: u64, access: Access, fd: &Arc<OwnedFd>) {
        let evicted = self.kept().insert((node, access), fd);
        // Closing may take long (the last descriptor of a deleted file), so without the lock.
        drop(evicted);
    }

    /// Keeps a descriptor no longer.
    pub fn close(&self, node: u64, access: Access) {
        let closed = self.kept().fds.remove(&(node, access));
        drop(closed);
    }

    /// The last name of this inode is about to go, or has just gone. Returns its node if it was not an orphan before.
    ///
    /// # Errors
    /// If the supervisor does not take the descriptor. ENFILE: there are too many; a program that makes more and more of
    /// them must not take the last descriptor from all others.
    pub fn orphan(&self, identity: &Identity, fd: &Arc<OwnedFd>) -> Result<Option<u64>, Errno> {
        let Some(node) = self.nodes.find(identity) else { return Ok(None) };
        let mut orphans = self.orphans();
        if !orphans.contains_key(&node) && orphans.len() >= self.orphan_limit {
            return Err(Errno::NFILE);
        }
        if orphans.insert(node, fd.clone()).is_some() {
            return Ok(None);
        }
        drop(orphans);
        match self.supervisor.send(Message::Keep(node), &[fd.as_fd()]) {
            // Without a supervisor there will be no other server either.
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(Some(node)),
            Err(error) => {
                self.orphans().remove(&node);
                Err(error)
            }
        }
    }

    /// It keeps its name after all.
    pub fn keeps_name(&self, node: u64) {
        let orphan = self.orphans().remove(&node);
        if orphan.is_some() {
            let _ = self.supervisor.send(Message::Drop(node), &[]);
        }
    }

    /// An orphan of an earlier server.
    pub fn adopt(&self, node: u64, fd: OwnedFd) {
        if self.nodes.get(node).is_ok() {
            self.orphans().insert(node, Arc::new(fd));
        } else {
            let _ = self.supervisor.send(Message::Drop(node), &[]);
        }
    }

    /// The kernel does not use the node any more.
    pub fn forget(&self, node: u64) {
        let closed = self.kept().remove(node);
        drop(closed);
        self.keeps_name(node);
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn orphans(&self) -> MutexGuard<'_, HashMap<u64, Arc<OwnedFd>>> {
        self.orphans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens the file of a descriptor once more, with other flags.
pub(crate) fn reopen(fd: &OwnedFd, flags: OFlags) -> Result<OwnedFd, Errno> {
    rustix::fs::open(proc_path(fd), flags | OFlags::CLOEXEC, Mode::empty())
}

/// A path of the file of a descriptor, for calls that accept no O_PATH descriptor.
pub(crate) fn proc_path(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

impl Kept {
    fn get(&mut self, key: (u64, Access)) -> Option<Arc<OwnedFd>> {
        self.time += 1;
        let (fd, used) = self.fds.get_mut(&key)?;
        *used = self.time;
        Some(fd.clone())
    }

    fn insert(&mut self, key: (u64, Access), fd: &Arc<OwnedFd>) -> Vec<Arc<OwnedFd>> {
        self.time += 1;
        let mut closed = Vec::new();
        match self.fds.insert(key, (fd.clone(), self.time)) {
            Some((old, _)) => closed.push(old),
            None => self.order.push_back((key, self.time)),
        }
        while self.fds.len() > self.limit
            && let Some((oldest, time)) = self.order.pop_front()
        {
            match self.fds.get(&oldest) {
                Some((_, used)) if *used != time => self.order.push_back((oldest, *used)),
                Some(_) => closed.extend(self.fds.remove(&oldest).map(|(fd, _)| fd)),
                None => {}
            }
        }
        closed
    }

    fn remove(&mut self, node: u64) -> [Option<Arc<OwnedFd>>; 3] {
        let closed = [Access::Path, Access::Read, Access::Write].map(|a| self.fds.remove(&(node, a)).map(|(fd, _)| fd));
        // Entries of removed descriptors must not pile up.
        if self.order.len() > 2 * self.fds.len() + 64 {
            let fds = &self.fds;
            self.order.retain(|(key, _)| fds.contains_key(key));
        }
        closed
    }
}
