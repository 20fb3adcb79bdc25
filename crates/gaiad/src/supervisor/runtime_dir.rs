//! The files of a mount outside it: the socket for clients, and a lock that lasts as long as its supervisor.
//!
//! `/run/spinio/gaia/NUMBER.sock`, `NUMBER.lock`, and `NUMBER.log` of a daemon in the background, where NUMBER is that of
//! the FUSE connection; without rights there, below `$XDG_RUNTIME_DIR`.

use std::fs::{DirBuilder, File, Permissions};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// The files of a running mount; removed when dropped.
#[derive(Debug)]
pub(super) struct Claim {
    socket_path: PathBuf,
    lock_path: PathBuf,
    log_path: PathBuf,
    listener: UnixListener,
    _lock: File,
}

impl Claim {
    pub(super) fn make(connection: u32) -> std::io::Result<Claim> {
        let directory = directory();
        // Any user may connect: what counts there is a ticket.
        DirBuilder::new().recursive(true).mode(0o755).create(&directory)?;
        let lock_path = directory.join(format!("{connection}.lock"));
        let lock = File::create(&lock_path)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        let socket_path = socket_path(connection);
        // Of an earlier mount with this number.
        let _ = std::fs::remove_file(&socket_path);
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(&socket_path)?)?;
        std::fs::set_permissions(&socket_path, Permissions::from_mode(0o666))?;
        rustix::net::listen(&socket, 128)?;
        let log_path = directory.join(format!("{connection}.log"));
        Ok(Claim { socket_path, lock_path, log_path, listener: UnixListener::from(socket), _lock: lock })
    }

    pub(super) fn socket_path(&self) -> &Path {
        &self.socket_path
    }

    pub(super) fn log_path(&self) -> &Path {
        &self.log_path
    }

    pub(super) fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket_path);
        let _ = std::fs::remove_file(&self.lock_path);
        // Unless it says something.
        if std::fs::metadata(&self.log_path).is_ok_and(|log| log.len() == 0) {
            let _ = std::fs::remove_file(&self.log_path);
        }
    }
}

fn directory() -> PathBuf {
    let base = if rustix::process::geteuid().is_root() { None } else { std::env::var_os("XDG_RUNTIME_DIR") };
    base.map_or_else(|| PathBuf::from("/run"), PathBuf::from).join("spinio/gaia")
}

/// The socket for clients of a mount.
pub(crate) fn socket_path(connection: u32) -> PathBuf {
    directory().join(format!("{connection}.sock"))
}

/// Waits until the supervisor of a connection has ended; false if it still runs after `limit`.
pub(crate) fn await_end(connection: u32, limit: Duration) -> bool {
    let path = directory().join(format!("{connection}.lock"));
    let begun = Instant::now();
    loop {
        let Ok(lock) = File::open(&path) else { return true };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return true;
        }
        if begun.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
