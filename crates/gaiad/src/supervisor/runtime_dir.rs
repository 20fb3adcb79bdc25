//! The files of a mount outside it: the socket for clients, and a lock that lasts as long as its supervisor.
//!
//! `/run/spinio/gaia/NUMBER.sock`, `NUMBER.lock`, and `NUMBER.log` of a daemon in the background, where NUMBER is that of
//! the FUSE connection; without rights there, below `$XDG_RUNTIME_DIR`.

use std::fs::{DirBuilder, File, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// How long a supervisor may take to end once its mount is gone.
const LOCK_WITHIN: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(10);

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
        let lock_path = lock_path(connection);
        let lock = lock(&lock_path)?;
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

fn lock_path(connection: u32) -> PathBuf {
    directory().join(format!("{connection}.lock"))
}

/// Locks a file, which is made if it is not there. A supervisor whose mount is gone may still have it for a moment: the
/// Linux kernel gives the number of the connection away before.
fn lock(path: &Path) -> std::io::Result<File> {
    let begun = Instant::now();
    loop {
        let lock = File::create(path)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            // Else that supervisor has removed it.
            Ok(()) if is_at(&lock, path)? => return Ok(lock),
            Err(error) if error != Errno::WOULDBLOCK || begun.elapsed() > LOCK_WITHIN => return Err(error.into()),
            _ => std::thread::sleep(PAUSE),
        }
    }
}

/// Whether the path still names this file.
fn is_at(file: &File, path: &Path) -> std::io::Result<bool> {
    let named = match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        named => named?,
    };
    let open = file.metadata()?;
    Ok((open.dev(), open.ino()) == (named.dev(), named.ino()))
}

/// The supervisor of a connection, while it runs. To be taken before the mount ends: then another mount may get its
/// number.
#[derive(Debug)]
pub(crate) struct Running(Option<File>);

impl Running {
    pub(crate) fn of(connection: u32) -> Running {
        Running(File::open(lock_path(connection)).ok())
    }
}

/// Waits until a supervisor has ended; false if it still runs after `limit`.
pub(crate) fn await_end(supervisor: &Running, limit: Duration) -> bool {
    let begun = Instant::now();
    loop {
        let Some(lock) = &supervisor.0 else { return true };
        if flock(lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return true;
        }
        if begun.elapsed() > limit {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_a_mount_that_just_ended_is_waited_for() {
        // Of no connection.
        const NUMBER: u32 = u32::MAX;
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: not root");
            return;
        }
        let first = Claim::make(NUMBER).unwrap();
        let running = Running::of(NUMBER);
        assert!(!await_end(&running, Duration::ZERO));
        let ends = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(first);
        });
        let second = Claim::make(NUMBER).unwrap();
        ends.join().unwrap();
        assert!(second.socket_path().exists() && lock_path(NUMBER).exists());
        assert!(await_end(&running, Duration::ZERO), "the first has ended");
        assert!(!await_end(&Running::of(NUMBER), Duration::ZERO), "the second has not");
        drop(second);
        assert!(!socket_path(NUMBER).exists() && !lock_path(NUMBER).exists());
    }
}
