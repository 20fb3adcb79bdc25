//! The files of a mount outside it: the socket for clients, and a lock that lasts as long as its supervisor.
//!
//! `NUMBER.sock`, `NUMBER.lock`, and `NUMBER.log` of a daemon in the background, where NUMBER is that of the FUSE
//! connection, in
//!
//! ```text
//!   /run/spinio/gaia              root's mounts, for all users
//!   $XDG_RUNTIME_DIR/spinio/gaia  those of another user, who alone has access; or if that is not set, or is not its own:
//!   /tmp/spinio-UID/gaia
//! ```
//!
//! Who made a mount is in the table of mounts, so that other processes find its files.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use spinio_fuse::mount::MountEntry;

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
        let directory = make_directory()?;
        let lock_path = lock_path(&directory, connection);
        let lock = lock(&lock_path)?;
        let socket_path = socket_path(&directory, connection);
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

/// Of root.
const RUN: &str = "/run";
const BELOW: &str = "spinio/gaia";

/// The directory for files of mounts that this process makes.
fn make_directory() -> std::io::Result<PathBuf> {
    let user = rustix::process::geteuid();
    if user.is_root() {
        let directory = Path::new(RUN).join(BELOW);
        // Any user may connect: what counts there is a ticket.
        DirBuilder::new().recursive(true).mode(0o755).create(&directory)?;
        return Ok(directory);
    }
    let directory = match runtime_dir().filter(|base| is_private(base, user.as_raw(), 0o022)) {
        Some(base) => base.join(BELOW),
        None => {
            let base = temporary(user.as_raw());
            match DirBuilder::new().mode(0o700).create(&base) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            if !is_private(&base, user.as_raw(), 0o077) {
                let words = format!("{} is not a directory of this user alone", base.display());
                return Err(std::io::Error::other(words));
            }
            base.join("gaia")
        }
    };
    DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
    Ok(directory)
}

fn runtime_dir() -> Option<PathBuf> {
    std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|base| base.is_absolute())
}

/// Any user may make it: it must be verified.
fn temporary(user: u32) -> PathBuf {
    PathBuf::from(format!("/tmp/spinio-{user}"))
}

/// Whether it is a directory of this user, without these permissions.
fn is_private(directory: &Path, user: u32, forbidden: u32) -> bool {
    let found = std::fs::symlink_metadata(directory);
    found.is_ok_and(|found| found.is_dir() && found.uid() == user && found.mode() & forbidden == 0)
}

/// The directory that has the files of a mount, which any process may have made.
fn directory_of(mount: &MountEntry) -> PathBuf {
    let user = match mount.user {
        None | Some(0) => return Path::new(RUN).join(BELOW),
        Some(user) => user,
    };
    let own = runtime_dir().filter(|_| user == rustix::process::geteuid().as_raw());
    // This process need not have the environment of that one.
    let bases = own.into_iter().chain([PathBuf::from(format!("{RUN}/user/{user}"))]);
    let runtime = bases.filter(|base| is_private(base, user, 0o022)).map(|base| base.join(BELOW));
    let temporary = temporary(user);
    let is_private = is_private(&temporary, user, 0o077);
    let found = runtime.chain(is_private.then(|| temporary.join("gaia")));
    let mut with_socket = found.filter(|directory| socket_path(directory, mount.minor).try_exists().unwrap_or(true));
    with_socket.next().unwrap_or_else(|| Path::new(RUN).join(BELOW))
}

/// The socket for clients of a mount.
pub(crate) fn socket_of(mount: &MountEntry) -> PathBuf {
    socket_path(&directory_of(mount), mount.minor)
}

fn socket_path(directory: &Path, connection: u32) -> PathBuf {
    directory.join(format!("{connection}.sock"))
}

fn lock_path(directory: &Path, connection: u32) -> PathBuf {
    directory.join(format!("{connection}.lock"))
}

/// Locks a file, which is made if it is not there. A supervisor whose mount is gone may still have it for a moment: the
/// Linux kernel gives the number of the connection away before.
fn lock(path: &Path) -> std::io::Result<File> {
    let begun = Instant::now();
    loop {
        // No other user may open it: who has it locked holds up mounts with this number, and the end of this one.
        let lock = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            // Else that supervisor has removed it.
            Ok(()) if is_at(&lock, path)? => {
                // One that an earlier version left is open to others.
                rustix::fs::fchmod(&lock, Mode::from_raw_mode(0o600))?;
                return Ok(lock);
            }
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
    pub(crate) fn of(mount: &MountEntry) -> Running {
        Running(File::open(lock_path(&directory_of(mount), mount.minor)).ok())
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

    /// A mount of this process's user.
    fn entry(minor: u32) -> MountEntry {
        let user = Some(rustix::process::geteuid().as_raw());
        MountEntry { id: 0, minor, point: PathBuf::from("/"), kind: String::new(), user }
    }

    #[test]
    fn number_of_a_mount_that_just_ended_is_waited_for() {
        // Of no connection.
        const NUMBER: u32 = u32::MAX;
        let first = Claim::make(NUMBER).unwrap();
        let running = Running::of(&entry(NUMBER));
        assert!(!await_end(&running, Duration::ZERO));
        let ends = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(first);
        });
        let second = Claim::make(NUMBER).unwrap();
        ends.join().unwrap();
        let (socket, lock) = (second.socket_path().to_owned(), second.lock_path.clone());
        assert!(socket.exists() && lock.exists());
        assert_eq!(lock.metadata().unwrap().mode() & 0o777, 0o600);
        assert_eq!(socket_of(&entry(NUMBER)), socket, "another process finds it");
        assert!(await_end(&running, Duration::ZERO), "the first has ended");
        assert!(!await_end(&Running::of(&entry(NUMBER)), Duration::ZERO), "the second has not");
        drop(second);
        assert!(!socket.exists() && !lock.exists());
    }

    #[test]
    fn private_directory_is_one_that_no_other_user_can_change() {
        let dir = tempfile::tempdir().unwrap();
        let user = rustix::process::geteuid().as_raw();
        let with = |mode| {
            std::fs::set_permissions(dir.path(), Permissions::from_mode(mode)).unwrap();
            (is_private(dir.path(), user, 0o022), is_private(dir.path(), user, 0o077))
        };
        assert_eq!((with(0o700), with(0o755), with(0o720)), ((true, true), (true, false), (false, false)));
        with(0o700);
        assert!(!is_private(dir.path(), user + 1, 0o077));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(!is_private(&link, user, 0o077) && !is_private(&dir.path().join("none"), user, 0o077));
    }
}
