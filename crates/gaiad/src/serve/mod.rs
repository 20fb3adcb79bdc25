//! The daemon of leased files: one copy of a file on each GPU, for all processes of a user, without a mount.
//!
//! ```text
//!   process A ── Hello + descriptor of the file ──> client.rs ── exclusion.rs: a read lease on a descriptor of its own
//!     │  Fill: creates chunks, reads the file into them      │
//!     └─ Filled + descriptor of the chunk ─────────────────> store.rs: file, user, device -> chunks
//!   process B ── Hello ──> Chunks + descriptors <────────────┘
//!   a writer  ── open(O_WRONLY) ──> the lease breaks ──> watcher: the content has ended, its chunks are dropped
//! ```
//!
//! The daemon calls no device and reads no file. It keeps descriptors, which keep the memory, and says who fills what.
//! A chunk counts as present only if the file was excluded from writes from before the fill until after it.
//!
//! **Chunks are copies**, so a writer does not wait for them: the lease is given back at once. Maps keep the old bytes
//! until their next acquire, which fails with ETXTBSY while a process has the file open for writing.
//!
//! **Users share nothing**: the user, from SO_PEERCRED, is part of the key of a file, and limits count for each user. A
//! process that fills a chunk with other bytes than the file's deceives processes of its own user only, also on the other
//! devices that copy the chunk: those maps are read-only too.
//!
//! Known flaws:
//! - A user who may open a file for reading but does not own it gets a lease only from root's daemon; of another, only
//!   files that are immutable, sealed, or on a read-only file system.
//! - The chunks of a file that was deleted stay until the next client connects, or `spinio gaia status` asks.
//! - Maps that have not acquired since a file was written keep the memory of its old chunks, which no limit counts.

mod channel;
mod client;
mod entry;
mod exclusion;
mod query;
mod store;

use std::fs::{DirBuilder, Permissions};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit};
use rustix::thread::CapabilitySet;
use spinio_sys::{injection_point, linux};

use crate::MountError;
use crate::privileges::{self, Raised, Role};
use crate::report::report;

use self::store::Store;

pub use self::query::{DaemonStatus, LeasedFileStatus, drop_unused, query_daemon, stop_daemon};

/// A client that does not fill a chunk within this time loses it to one that waits.
const FILL_WITHIN: Duration = Duration::from_secs(20);

/// After a failed accept: descriptors or memory of clients that end will do.
const PAUSE: Duration = Duration::from_secs(1);

/// A bound socket; removed when dropped.
#[derive(Debug)]
pub struct Daemon {
    path: PathBuf,
    socket: OwnedFd,
    limit: Option<u64>,
    fill_within: Duration,
    _lock: OwnedFd,
}

impl Daemon {
    /// Binds the socket. `limit`: bytes of chunks for each user and device.
    ///
    /// # Errors
    /// If a daemon has it, or it cannot be made.
    pub fn bind(path: &Path, limit: Option<u64>) -> Result<Daemon, MountError> {
        let error = |what: &str, e: &dyn std::fmt::Display| MountError::new(format!("{}: {what}: {e}", path.display()));
        let lock_path = PathBuf::from(format!("{}.lock", path.display()));
        if let Some(directory) = path.parent() {
            let made = DirBuilder::new().recursive(true).mode(0o755).create(directory);
            made.map_err(|e| error("cannot create its directory", &e))?;
        }
        // Another user may have put a link there. It is never removed: a daemon that waits for it would hold another one.
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let lock = rustix::fs::open(&lock_path, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|e| error("cannot create its lock", &e))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|e| match e {
            Errno::AGAIN => MountError::new(format!("{}: a daemon serves this socket already", path.display())),
            e => error("cannot lock it", &e),
        })?;
        // Of a daemon that was killed, unless the path is of something else.
        if std::fs::symlink_metadata(path).is_ok_and(|there| there.file_type().is_socket()) {
            let _ = std::fs::remove_file(path);
        }
        let socket = listen(path).map_err(|e| error("cannot make the socket", &e))?;
        injection_point!("serve: socket bound");
        Ok(Daemon { path: path.to_owned(), socket, limit, fill_within: FILL_WITHIN, _lock: lock })
    }

    /// Sets the time within which a client has to fill a chunk that others wait for; 20 s by default.
    pub fn set_fill_within(&mut self, fill_within: Duration) {
        self.fill_within = fill_within;
    }

    /// Gives up privileges that serving does not take; to be called before other threads are made. [`Daemon::run`] does
    /// so too.
    ///
    /// # Errors
    /// The kernel's.
    pub fn drop_privileges(&self) -> std::io::Result<()> {
        Ok(privileges::keep(Role::Leases)?)
    }

    /// Serves until `stop` is readable, or a client of the same user asks it to end.
    ///
    /// # Errors
    /// If it cannot begin.
    pub fn run(&self, stop: &impl AsFd) -> Result<(), MountError> {
        let failed = |e: Errno| MountError::new(format!("cannot serve: {e}"));
        self.drop_privileges().map_err(|e| MountError::new(format!("cannot give up privileges: {e}")))?;
        let limit = rustix::process::getrlimit(Resource::Nofile);
        let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
        let (ended, end) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(failed)?;
        let descriptors = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let descriptors = usize::try_from(descriptors).unwrap_or(usize::MAX);
        let store = start_watcher(self.limit, descriptors, self.fill_within, end).map_err(failed)?;
        loop {
            match wait(&[self.socket.as_fd(), stop.as_fd(), ended.as_fd()]) {
                Ok([_, false, false]) => {}
                Ok(_) => {
                    injection_point!("serve: end begun");
                    return Ok(());
                }
                Err(e) => return Err(failed(e)),
            }
            match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC) {
                Ok(socket) => {
                    injection_point!("serve: client accepted");
                    let store = Arc::clone(&store);
                    let thread = std::thread::Builder::new().name("gaia-client".into());
                    // If there is no thread for it, the client is disconnected.
                    let _ = thread.spawn(move || client::serve(&store, &socket));
                }
                Err(Errno::INTR | Errno::CONNABORTED | Errno::AGAIN) => {}
                Err(error) => {
                    report!("cannot accept a client: {error}");
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _raised = Raised::new(CapabilitySet::DAC_OVERRIDE);
        let _ = std::fs::remove_file(&self.path);
        injection_point!("serve: socket removed");
    }
}

fn listen(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // Root's daemon serves all users, another one its own only: its directory is closed, and clients are asked.
    let mode = if rustix::process::geteuid().is_root() { 0o666 } else { 0o600 };
    let permitted = std::fs::set_permissions(path, Permissions::from_mode(mode));
    permitted.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

/// Waits until one is readable; which of them are.
fn wait<const N: usize>(fds: &[BorrowedFd<'_>; N]) -> Result<[bool; N], Errno> {
    let mut polled = fds.each_ref().map(|fd| PollFd::new(fd, PollFlags::IN));
    rustix::io::retry_on_intr(|| poll(&mut polled, None))?;
    Ok(polled.each_ref().map(|fd| !fd.revents().is_empty()))
}

/// The store, and the thread that gives broken leases back.
fn start_watcher(
    limit: Option<u64>,
    descriptors: usize,
    fill_within: Duration,
    end: OwnedFd,
) -> Result<Arc<Store>, Errno> {
    let (sender, started) = mpsc::channel();
    let (give, take) = mpsc::channel::<Arc<Store>>();
    let watch = move || {
        let _ = sender.send(linux::gettid());
        if let Ok(store) = take.recv() {
            loop {
                linux::wait_lease_break(None);
                store.end_written();
            }
        }
    };
    linux::spawn_signals_blocked("gaia-lease", 256 << 10, watch).map_err(|_| Errno::AGAIN)?;
    let watcher = started.recv().map_err(|_| Errno::AGAIN)?;
    let store = Arc::new(Store::new(limit, descriptors, fill_within, watcher, end));
    let _ = give.send(Arc::clone(&store));
    Ok(store)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_of_another_file_is_no_socket_to_replace() {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        let path = dir.path().join("precious");
        std::fs::write(&path, b"bytes").unwrap();
        assert!(Daemon::bind(&path, None).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"bytes");
    }
}
