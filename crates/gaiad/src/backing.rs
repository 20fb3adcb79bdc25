//! Descriptors of the backing file system: opened when they are needed, a bounded number kept.
//!
//! ```text
//!   node ──> kept? ─────────> that one
//!        ├─> held inode? ───> reopen its descriptor through /proc/self/fd ──EACCES──> held content?
//!        └─> by handle: open_by_handle_at(mount, handle)
//!            keep what was opened, close the least recently used
//! ```
//!
//! **With CAP_DAC_READ_SEARCH** ([`Find::Handle`]) a node is opened by its handle, and only *orphans* are held: files
//! and directories without a name that the kernel still uses (open, mapped, a working directory). By handle they can be
//! opened only while some descriptor keeps the inode, also across a crash of the server. So before the last name goes, a
//! descriptor goes to the supervisor, which keeps it until the kernel forgets the node. The alternative, renaming the
//! file into a hidden directory as NFS does, leaves debris after a crash of the machine, and shows one link where POSIX
//! wants none.
//!
//! **Without it** ([`Find::Descriptor`], a user's own mount) each node is held as an orphan is, from its first look-up
//! until the kernel forgets it. A name would not do: a path leads to the file no more once a program has removed the
//! search permission of a directory on it, or has renamed one while the server was being replaced. Such a server is also
//! bound by the modes of files: what a program has opened, and may use until it closes it, the server may not be able to
//! open a second time. The content of such files (created with mode 0444, as git does; `chmod` while they are open) is
//! held too.
//!
//! There the number of nodes is limited by RLIMIT_NOFILE; with handles by the node table (nodes.rs). From half of it on
//! the kernel is asked to forget files that no
//! program uses (Linux 6.18); from three quarters on, a program that lists a directory gets names only; and at the limit
//! a look-up waits a little.
//!
//! Known flaws: beyond the limit, with an older kernel or so many files in use, a look-up fails with ENFILE. A file that
//! its owner may not read can be opened by no program (EACCES).

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use spinio_fuse::abi::ROOT_NODE;
use spinio_sys::injection_point;
use spinio_sys::linux::{handle_of, open_by_handle};

use crate::link::{Link, Message, Use};
use crate::nodes::{Identity, Nodes};

/// Descriptors kept at most; a quarter of what the process may have, if that is less. Clients may have five sixteenths
/// (server.rs), and orphans three eighths.
const KEPT_FDS: usize = 4096;
/// Where each node has a descriptor: what no part of this list has.
const SPARE_FDS: usize = 128;

/// Nodes that the kernel is asked to forget at a time, and how long it may take before the next ones are chosen.
const PRUNE: usize = 256;
const PRUNE_PAUSES: usize = 10;
const PRUNE_PAUSE: Duration = Duration::from_millis(1);
/// At the limit of nodes: threads that wait at a time, since others must hear what is forgotten, and how long.
const WAITING: usize = 2;
const WAIT: Duration = Duration::from_secs(1);

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

/// How a node is found that has no descriptor in the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Find {
    /// By its file handle.
    Handle,
    /// There is none: all have one.
    Descriptor,
}

/// The descriptors.
#[derive(Debug)]
pub struct Backing {
    mount: OwnedFd,
    /// The same through a mount that is for reading only.
    for_clients: Option<OwnedFd>,
    find: Find,
    nodes: Arc<Nodes>,
    kept: Mutex<Kept>,
    /// Inodes that the supervisor keeps too.
    inodes: Mutex<Inodes>,
    inode_limit: usize,
    /// There are fewer than before.
    forgotten: Condvar,
    /// There are many.
    many: Condvar,
    /// Content that the supervisor keeps too.
    contents: Mutex<HashMap<u64, HeldContent>>,
    content_limit: usize,
    supervisor: Link,
}

#[derive(Debug, Default)]
struct Inodes {
    fds: HashMap<u64, Arc<OwnedFd>>,
    /// Those that the kernel may forget, oldest first; also some that it has forgotten.
    order: VecDeque<u64>,
    /// Threads that wait for one to be forgotten.
    waiting: usize,
}

/// The content of a file that its mode forbids to open.
#[derive(Clone, Debug)]
struct HeldContent {
    fd: Arc<OwnedFd>,
    /// This server has seen all programs that opened the file.
    all_seen: bool,
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
    /// `mount`: the backing directory, not O_PATH. `fds`: descriptors that the process may have; `clients`: how many of
    /// them clients may use.
    pub fn new(mount: OwnedFd, nodes: Arc<Nodes>, supervisor: Link, fds: usize, clients: usize) -> Backing {
        let kept_limit = (fds / 4).clamp(1, KEPT_FDS);
        let find = if can_open_by_handle(&mount) { Find::Handle } else { Find::Descriptor };
        let (inode_limit, content_limit) = match find {
            Find::Handle => (fds / 8 * 3, 0),
            Find::Descriptor => (fds.saturating_sub(kept_limit + clients + fds / 16 + SPARE_FDS), fds / 16),
        };
        let root = (find == Find::Descriptor).then(|| reopen(&mount, OFlags::PATH).ok()).flatten();
        let fds = root.map(|fd| (ROOT_NODE, Arc::new(fd))).into_iter().collect();
        let inodes = Mutex::new(Inodes { fds, ..Inodes::default() });
        let kept = Kept { limit: kept_limit, fds: HashMap::new(), order: VecDeque::new(), time: 0 };
        let (kept, contents) = (Mutex::new(kept), Mutex::default());
        let (forgotten, many) = (Condvar::new(), Condvar::new());
        Backing {
            mount,
            for_clients: None,
            find,
            nodes,
            kept,
            inodes,
            inode_limit,
            forgotten,
            many,
            contents,
            content_limit,
            supervisor,
        }
    }

    /// With the directory of which clients get files.
    pub fn with_view_for_clients(self, directory: OwnedFd) -> Backing {
        Backing { for_clients: Some(directory), ..self }
    }

    /// The backing directory.
    pub fn mount(&self) -> &OwnedFd {
        &self.mount
    }

    /// The nodes that it opens.
    pub(crate) fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// Whether the modes of files decide what this process may open: then [`Backing::hold_content`] is due before a mode
    /// forbids what is open.
    pub fn is_bound_by_modes(&self) -> bool {
        self.find == Find::Descriptor
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

    /// A descriptor for a client: a new open file, because the client may change its flags. It may also open it once more
    /// (`/proc/self/fd`), with other flags, and then the mount decides: the one that this process uses is for writing
    /// too, where the client's own, as that of a container, may not be.
    ///
    /// Some file systems do not find the handle of a file without a name, although it is open. Then a client
    /// that may write the file (`may_write`) gets it by the descriptor that this process has: it gains nothing by writing to
    /// it. Another client would.
    ///
    /// # Errors
    /// As [`Backing::open`].
    pub fn open_for_client(&self, node: u64, may_write: bool) -> Result<OwnedFd, Errno> {
        let reopened = || reopen(&*self.open(node, Access::Read)?, OFlags::RDONLY);
        let Some(directory) = self.for_clients.as_ref().filter(|_| self.find == Find::Handle) else {
            return reopened();
        };
        let identity = self.nodes.get(node)?;
        if identity.file_type != FileType::RegularFile {
            return Err(Errno::INVAL);
        }
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let fd = match open_by_handle(directory.as_fd(), &identity.handle, flags.bits()) {
            Err(Errno::STALE) if may_write => return reopened(),
            opened => opened?,
        };
        // That was for leases. An io_uring would end reads of it early.
        fcntl_setfl(&fd, fcntl_getfl(&fd)? - OFlags::NONBLOCK)?;
        Ok(fd)
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
        let held = self.inodes().fds.get(&node).cloned();
        let fd = Arc::new(match (held, self.find) {
            (Some(inode), _) if access == Access::Path => return Ok(inode),
            (Some(inode), _) => match reopen(&inode, flags) {
                Err(Errno::ACCESS) => return self.held_content(node, access),
                opened => opened?,
            },
            (None, Find::Handle) => open_by_handle(self.mount.as_fd(), &identity.handle, flags.bits())?,
            (None, Find::Descriptor) => return Err(Errno::STALE),
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
        let closed = self.kept().close(node, access);
        drop(closed);
    }

    /// A node is about to be given to the kernel; `fd`: its inode.
    ///
    /// # Errors
    /// ENFILE: there are too many. If the supervisor does not take the descriptor.
    pub fn found(&self, node: u64, fd: &Arc<OwnedFd>) -> Result<(), Errno> {
        if self.find == Find::Handle || self.inodes().fds.contains_key(&node) {
            return Ok(());
        }
        let inode =
            if fcntl_getfl(fd)?.contains(OFlags::PATH) { fd.clone() } else { Arc::new(reopen(fd, OFlags::PATH)?) };
        self.hold(node, &inode).map(drop)
    }

    /// The last name of this inode is about to go, or has just gone. Returns its node if it was not an orphan before.
    ///
    /// # Errors
    /// If the supervisor does not take the descriptor. ENFILE: there are too many; a program that makes more and more of
    /// them must not take the last descriptor from all others.
    pub fn orphan(&self, identity: &Identity, fd: &Arc<OwnedFd>) -> Result<Option<u64>, Errno> {
        // Held already, and until it is forgotten.
        if self.find == Find::Descriptor {
            return Ok(None);
        }
        let Some(node) = self.nodes.find(identity) else { return Ok(None) };
        Ok(self.hold(node, fd)?.then_some(node))
    }

    /// Gives an inode to the supervisor; false if it has it already.
    fn hold(&self, node: u64, fd: &Arc<OwnedFd>) -> Result<bool, Errno> {
        let mut inodes = self.inodes();
        while !inodes.fds.contains_key(&node) && inodes.fds.len() >= self.inode_limit {
            if self.find == Find::Handle || inodes.waiting >= WAITING {
                return Err(Errno::NFILE);
            }
            inodes.waiting += 1;
            let waited = self.forgotten.wait_timeout(inodes, WAIT).unwrap_or_else(PoisonError::into_inner);
            inodes = waited.0;
            inodes.waiting -= 1;
            if waited.1.timed_out() {
                return Err(Errno::NFILE);
            }
        }
        if inodes.fds.contains_key(&node) {
            return Ok(false);
        }
        // With the lock: what another thread finds here, the supervisor has.
        self.give(Use::Inode, node, fd)?;
        self.insert(&mut inodes, node, fd.clone());
        Ok(true)
    }

    fn insert(&self, inodes: &mut Inodes, node: u64, fd: Arc<OwnedFd>) {
        inodes.fds.insert(node, fd);
        if self.find == Find::Handle {
            return;
        }
        inodes.order.push_back(node);
        // Those that are forgotten must not pile up.
        if inodes.order.len() > 2 * inodes.fds.len() + 64 {
            let Inodes { fds, order, .. } = inodes;
            order.retain(|node| fds.contains_key(node));
        }
        if inodes.fds.len() > self.inode_limit / 2 {
            self.many.notify_one();
        }
    }

    /// Whether nodes should be made that the kernel has not asked for.
    pub fn has_room(&self) -> bool {
        match self.find {
            Find::Handle => self.nodes.has_room(),
            Find::Descriptor => self.inodes().fds.len() < self.inode_limit / 4 * 3,
        }
    }

    /// Keeps the number of nodes small by `prune`, which asks the kernel to forget these, if no program uses them; false:
    /// it cannot. Returns after that only.
    pub fn prune_when_full(&self, prune: impl Fn(&[u64]) -> bool) {
        let (mut fruitless, mut from) = (0, 0);
        loop {
            let (before, nodes) = self.nodes_to_prune(&mut from);
            if !prune(&nodes) {
                return;
            }
            // What the kernel forgets it says a little later.
            let is_fewer = (0..PRUNE_PAUSES).any(|_| {
                std::thread::sleep(PRUNE_PAUSE);
                let now = match self.find {
                    Find::Handle => self.nodes.used_records(),
                    Find::Descriptor => self.inodes().fds.len(),
                };
                now < before
            });
            fruitless = if is_fewer { 0 } else { fruitless + nodes.len().max(1) };
            if fruitless >= before {
                // All are in use.
                std::thread::sleep(WAIT);
                fruitless = 0;
            }
        }
    }

    /// Waits until there are many nodes; how many, and some that the kernel may forget. `from`: the record of the next one.
    fn nodes_to_prune(&self, from: &mut u32) -> (usize, Vec<u64>) {
        if self.find == Find::Handle {
            return (self.nodes.wait_for_many(), self.nodes.next_nodes(from, PRUNE));
        }
        let few = |inodes: &mut Inodes| inodes.fds.len() <= self.inode_limit / 2;
        let mut inodes = self.many.wait_while(self.inodes(), few).unwrap_or_else(PoisonError::into_inner);
        (inodes.fds.len(), oldest(&mut inodes, PRUNE))
    }

    fn give(&self, what: Use, node: u64, fd: &OwnedFd) -> Result<(), Errno> {
        let sent = self.supervisor.send(Message::Keep(what, node), &[fd.as_fd()]);
        injection_point!("server: descriptor given to the supervisor");
        match sent {
            // Without a supervisor there will be no other server either.
            Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            sent => sent,
        }
    }

    /// It keeps its name after all.
    pub fn keeps_name(&self, node: u64) {
        let inode = self.inodes().fds.remove(&node);
        if inode.is_some() {
            self.forgotten.notify_one();
            let _ = self.supervisor.send(Message::Drop(Use::Inode, node), &[]);
            injection_point!("server: descriptor taken back");
        }
    }

    /// Holds the content of a file that programs may use, before its mode may forbid to open it.
    ///
    /// # Errors
    /// ENFILE: too many are held.
    pub fn hold_content(&self, node: u64) -> Result<(), Errno> {
        match self.open(node, Access::Write).or_else(|_| self.open(node, Access::Read)) {
            Ok(fd) => self.hold_opened(node, &fd, false),
            // The server could not open it before either.
            Err(Errno::ACCESS | Errno::PERM | Errno::ROFS) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The same with a descriptor; `all_seen`: it belongs to the first program that opened the file.
    ///
    /// # Errors
    /// ENFILE: too many are held.
    pub fn hold_opened(&self, node: u64, fd: &Arc<OwnedFd>, all_seen: bool) -> Result<(), Errno> {
        let mut contents = self.contents();
        if contents.contains_key(&node) {
            return Ok(());
        }
        if contents.len() >= self.content_limit {
            return Err(Errno::NFILE);
        }
        self.give(Use::Content, node, fd)?;
        contents.insert(node, HeldContent { fd: fd.clone(), all_seen });
        Ok(())
    }

    /// Whether the content is held, and this server has seen all programs that opened the file.
    pub fn holds_content(&self, node: u64) -> Option<bool> {
        self.contents().get(&node).map(|held| held.all_seen)
    }

    /// Holds the content no longer.
    pub fn release_content(&self, node: u64) {
        let held = self.contents().remove(&node);
        if held.is_some() {
            let _ = self.supervisor.send(Message::Drop(Use::Content, node), &[]);
        }
    }

    fn held_content(&self, node: u64, access: Access) -> Result<Arc<OwnedFd>, Errno> {
        let held = self.contents().get(&node).cloned().ok_or(Errno::ACCESS)?;
        let may = fcntl_getfl(&held.fd)? & OFlags::RWMODE;
        if access == Access::Read || may == OFlags::RDWR { Ok(held.fd) } else { Err(Errno::ACCESS) }
    }

    /// Makes another name of an inode.
    ///
    /// # Errors
    /// As `linkat`.
    pub fn link(&self, inode: &OwnedFd, directory: &OwnedFd, name: &std::ffi::CStr) -> Result<(), Errno> {
        match self.find {
            Find::Handle => rustix::fs::linkat(inode, c"", directory, name, AtFlags::EMPTY_PATH),
            // The empty path takes a capability, or a descriptor that this process has opened itself.
            Find::Descriptor => {
                rustix::fs::linkat(rustix::fs::CWD, proc_path(inode), directory, name, AtFlags::SYMLINK_FOLLOW)
            }
        }
    }

    /// What an earlier server has given to the supervisor.
    pub fn adopt(&self, what: Use, node: u64, fd: OwnedFd) {
        if self.nodes.get(node).is_err() {
            let _ = self.supervisor.send(Message::Drop(what, node), &[]);
            return;
        }
        match what {
            Use::Inode => self.insert(&mut self.inodes(), node, Arc::new(fd)),
            Use::Content => {
                let held = HeldContent { fd: Arc::new(fd), all_seen: false };
                drop(self.contents().insert(node, held));
            }
            // Of arrivals.rs.
            Use::Handed => {}
        }
    }

    /// The kernel does not use the node any more.
    pub fn forget(&self, node: u64) {
        let closed = self.kept().remove(node);
        drop(closed);
        self.release_content(node);
        self.keeps_name(node);
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inodes(&self) -> MutexGuard<'_, Inodes> {
        self.inodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn contents(&self) -> MutexGuard<'_, HashMap<u64, HeldContent>> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Those that have waited longest; they are the last then.
fn oldest(inodes: &mut Inodes, most: usize) -> Vec<u64> {
    let mut nodes = Vec::new();
    for _ in 0..inodes.order.len() {
        let Some(node) = inodes.order.pop_front() else { break };
        if inodes.fds.contains_key(&node) {
            inodes.order.push_back(node);
            nodes.push(node);
        }
        if nodes.len() == most {
            break;
        }
    }
    nodes
}

/// Whether this process may open any file of the file system of a directory by its handle (CAP_DAC_READ_SEARCH).
fn can_open_by_handle(directory: &OwnedFd) -> bool {
    let opened =
        handle_of(directory.as_fd()).and_then(|handle| open_by_handle(directory.as_fd(), &handle, OFlags::PATH.bits()));
    opened.err() != Some(Errno::PERM)
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

    fn close(&mut self, node: u64, access: Access) -> Option<Arc<OwnedFd>> {
        let closed = self.fds.remove(&(node, access)).map(|(fd, _)| fd);
        // Entries of removed descriptors must not pile up, also those of one that is closed and kept again and again.
        if self.order.len() > 2 * self.fds.len() + 64 {
            let fds = &self.fds;
            let mut seen = HashSet::new();
            self.order.retain(|(key, _)| fds.contains_key(key) && seen.insert(*key));
        }
        closed
    }

    fn remove(&mut self, node: u64) -> [Option<Arc<OwnedFd>>; 3] {
        [Access::Path, Access::Read, Access::Write].map(|access| self.close(node, access))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    use super::*;
    use crate::handlers::{identity, stat};
    use crate::state::StateMemory;

    #[test]
    fn descriptors_that_are_closed_and_kept_again_leave_nothing() {
        let mut kept = Kept { limit: 8, fds: HashMap::new(), order: VecDeque::new(), time: 0 };
        let fd = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
        for node in 0..6 {
            drop(kept.insert((node, Access::Read), &fd));
        }
        for _ in 0..1000 {
            for node in 0..5 {
                assert!(kept.close(node, Access::Read).is_some());
                drop(kept.insert((node, Access::Read), &fd));
            }
            assert!(kept.order.len() <= 2 * kept.fds.len() + 65, "{}", kept.order.len());
        }
        assert_eq!(kept.fds.len(), 6);
        // All can still be evicted, the least recently used first.
        kept.limit = 0;
        let evicted = kept.insert((9, Access::Read), &fd);
        assert_eq!((evicted.len(), kept.fds.len()), (7, 0));
    }

    /// A directory of another file system stands for one that does not find the handles of files without a name.
    #[test]
    fn client_that_may_write_gets_a_file_whose_handle_is_not_found() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
        let device = |path: &Path| std::fs::metadata(path).unwrap().dev();
        if !rustix::process::geteuid().is_root() || device(dir.path()) == device(other.path()) {
            return eprintln!("skipped: not root, or one file system");
        }
        let open = |path: &Path, flags| rustix::fs::open(path, flags, Mode::empty()).unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "bytes").unwrap();
        let fd = Arc::new(open(&path, OFlags::RDWR));
        let identity = identity(&fd, &stat(&fd).unwrap()).unwrap();
        let nodes = Arc::new(Nodes::attach(Arc::new(StateMemory::small())));
        let node = nodes.look_up(&identity).unwrap();
        let (supervisor, _other_end) = Link::pair().unwrap();
        let backing = Backing::new(open(dir.path(), OFlags::RDONLY), nodes, supervisor, 16, 4);
        let backing = backing.with_view_for_clients(open(other.path(), OFlags::RDONLY));
        assert_eq!(backing.orphan(&identity, &fd), Ok(Some(node)));
        std::fs::remove_file(&path).unwrap();
        let got = backing.open_for_client(node, true).unwrap();
        assert_eq!(fcntl_getfl(&got).unwrap() & OFlags::RWMODE, OFlags::RDONLY);
        assert_eq!(std::io::read_to_string(std::fs::File::from(got)).unwrap(), "bytes");
        assert_eq!(backing.open_for_client(node, false).map(drop), Err(Errno::STALE), "it could be written");
    }
}
