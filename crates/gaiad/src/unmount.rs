//! Unmounting by path, from another process than the supervisor.
//!
//! ```text
//!   umount ── fsync of files that have released pages ──> kernel ──> server       also what is dirty in the kernel
//!          ── WriteOut ──> server: writes out all files ──> Failed: refused, all is still there
//!                                                       └─> ServerStatus ── umount(2) ── the daemon ends
//! ```
//!
//! The server finds files that no path leads to from here: those without a name, or whose path is too long.
//!
//! Writing out may take long, so there is no limit for it; but a server that does not answer Status meanwhile, on another
//! connection, counts as none. An older daemon, which does not know WriteOut, is left only
//! when it has nothing to write.
//!
//! The daemon ends when the file system is mounted nowhere any more. Where it is mounted elsewhere too (other_mounts.rs),
//! unmounting here does not end it: programs there go on.

use std::ffi::OsStr;
use std::fmt::Display;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use spinio_fuse::mount;
use spinio_pagecache::messages::{Reply, Request};

use crate::backing::Access;
use crate::channel::{WITHIN, ask_while, refuse, send};
use crate::clients::Clients;
use crate::explain;
use crate::files::Others;
use crate::other_mounts::other_mounts;
use crate::status;
use crate::supervisor::{MountError, Running, await_end, is_trusted, mount_of, mount_point, socket_of};

/// How long the daemon may take to end after the mount is gone.
const END: Duration = Duration::from_secs(30);
/// The same while it is mounted elsewhere too. A container that starts has a copy of all mounts for a moment.
const OTHERS: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Servers that may die before one has written all, and the pause after each.
const ATTEMPTS: usize = 20;
const PAUSE: Duration = Duration::from_millis(50);

/// Unmounts GAIA from a directory, and waits until all is written and the daemon has ended.
///
/// # Errors
/// If it is not mounted there, or in use, or if released bytes cannot be written: they would be lost. After it was
/// unmounted: if its daemon does not end, since the file system is mounted elsewhere too.
pub fn unmount(directory: &Path) -> Result<(), MountError> {
    let error = |words: String| MountError::new(format!("{}: {words}", directory.display()));
    let point = mount_point(directory).map_err(|e| error(e.to_string()))?;
    let Some(entry) = mount_of(&point).map_err(|e| error(e.to_string()))? else {
        return Err(error("GAIA is not mounted here".into()));
    };
    let own = rustix::process::getuid().as_raw();
    if !is_trusted(&entry) || !mount::is_privileged() && entry.user != Some(own) {
        return Err(error("is a mount of another user, who can unmount it so that nothing is lost".into()));
    }
    let daemon = Daemon { point: &point, socket: &socket_of(&entry), within: WITHIN };
    daemon.write_out(|| await_end(&Running::of(&entry), Duration::ZERO))?;
    let supervisor = Running::of(&entry);
    mount::unmount(&point).map_err(|e| {
        if e.is_busy() {
            return error(match daemon.maps() {
                Some(maps) => format!("in use: {maps}"),
                None => "in use; `fuser -vm` or `lsof +f --` names the programs".into(),
            });
        }
        error(format!("cannot unmount: {e}"))
    })?;
    let begun = Instant::now();
    while !await_end(&supervisor, LOOK_EVERY) {
        let waited = begun.elapsed();
        let others = if waited > OTHERS { other_mounts(&entry.kind, entry.minor, entry.id) } else { Vec::new() };
        if let Some(other) = others.first() {
            return Err(error(format!("unmounted here, but {other}: its daemon serves it there")));
        }
        if waited > END {
            return Err(error("unmounted, but its daemon still runs".into()));
        }
    }
    Ok(())
}

/// The daemon of a mount.
struct Daemon<'a> {
    point: &'a Path,
    socket: &'a Path,
    /// How long its server may take to answer a question that needs no writing.
    within: Duration,
}

impl Daemon<'_> {
    fn error(&self, words: impl Display) -> MountError {
        MountError::new(format!("{}: {words}", self.point.display()))
    }

    /// Writes what GPU programs have released, while the daemon still has it if that fails.
    fn write_out(&self, has_ended: impl Fn() -> bool) -> Result<(), MountError> {
        self.sync_files()?;
        for _ in 0..ATTEMPTS {
            let (mut refused, mut is_done) = (None, false);
            let asked = ask_while(
                self.socket,
                Request::WriteOut,
                self.within,
                || self.check_serves(),
                |reply| {
                    match reply {
                        Reply::ServerStatus(_) => is_done = true,
                        Reply::FileStatus(file) => refused = Some((path_below(self.point, file.path), file.dirty)),
                        _ => return Err(Errno::PROTO),
                    }
                    Ok(())
                },
            );
            match (asked, refused) {
                (Ok(()), _) if is_done => return Ok(()),
                (Err(error), Some((path, pages))) => return Err(not_written(&path, pages, error)),
                // The server has died; the next one answers.
                (Ok(()) | Err(Errno::CONNRESET | Errno::PIPE), _) => std::thread::sleep(PAUSE),
                // There is no daemon that has anything.
                (Err(Errno::NOENT | Errno::CONNREFUSED), _) if has_ended() => return Ok(()),
                (Err(Errno::PROTO), _) => return self.check_all_written(),
                (Err(Errno::AGAIN), _) => return Err(self.is_silent()),
                (Err(error), _) => {
                    let why = "the server cannot be asked to write what GPU programs have released";
                    return Err(self.error(format_args!("{why}: {error}")));
                }
            }
        }
        Err(self.error("its servers die while they write released pages"))
    }

    /// AGAIN if no server answers. One that has died has closed the connection that is waited for.
    fn check_serves(&self) -> Result<(), Errno> {
        match status::status_at(self.socket, self.within) {
            Err(Errno::AGAIN) => Err(Errno::AGAIN),
            _ => Ok(()),
        }
    }

    fn is_silent(&self) -> MountError {
        let seconds = self.within.as_secs();
        self.error(format_args!("still mounted: its server, which may have unwritten pages, is silent for {seconds} s"))
    }

    /// For a daemon that cannot be asked to write.
    fn check_all_written(&self) -> Result<(), MountError> {
        const OTHER_VERSION: &str = "still mounted: its daemon is of another version of SPIN";
        let Ok(status) = status::status_at(self.socket, self.within) else {
            return Err(self.error(format_args!("{OTHER_VERSION}, whose command unmounts it with all written")));
        };
        match status.files.iter().map(|file| file.dirty).sum() {
            0u64 => Ok(()),
            pages => Err(self.error(format_args!("{OTHER_VERSION}, and has yet to write {pages} released pages"))),
        }
    }

    /// Also what the Linux kernel has of these files. Those that cannot be opened, or have another name by now, are left to
    /// the server.
    fn sync_files(&self) -> Result<(), MountError> {
        let status = match status::status_at(self.socket, self.within) {
            Ok(status) => status,
            Err(Errno::AGAIN) => return Err(self.is_silent()),
            Err(_) => return Ok(()),
        };
        for file in status.files.iter().filter(|file| file.dirty > 0) {
            let Some(opened) = self.open(file) else { continue };
            let failed = |error| not_written(&path_below(self.point, file.path.as_bytes()), file.dirty, error);
            rustix::fs::fsync(&opened).map_err(failed)?;
        }
        Ok(())
    }

    /// Opens a file that the server has named.
    fn open(&self, file: &status::FileStatus) -> Option<OwnedFd> {
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let point = rustix::fs::open(self.point, directory, Mode::empty()).ok()?;
        let name = OsStr::from_bytes(below(file.path.as_bytes()));
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // Users may have put links on the way, or mounts: root opens nothing that is not of this mount.
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        rustix::fs::openat2(&point, name, flags, Mode::empty(), resolve).ok()
    }

    /// What keeps the mount in use and is named by no tool that looks at the descriptors of processes: those of maps are in
    /// tables of their own.
    fn maps(&self) -> Option<String> {
        let status = status::status_at(self.socket, self.within).ok()?;
        let file = status.files.iter().find(|file| file.maps > 0)?;
        let maps: u64 = status.files.iter().map(|file| file.maps).sum();
        let path = path_below(self.point, file.path.as_bytes());
        let explained = self.open(file).and_then(|opened| explain::explain(&opened.into()).ok().flatten());
        let holder = explained.and_then(|explained| explained.holders.first().copied());
        let process = holder.map(|holder| format!(" by process {}", holder.pid)).unwrap_or_default();
        let (s, first) = if maps == 1 { ("", "") } else { ("s", ", the first one") };
        Some(format!("{maps} map{s} of GPU programs{first} of {}{process}", path.display()))
    }
}

fn path_below(point: &Path, path: &[u8]) -> PathBuf {
    point.join(OsStr::from_bytes(below(path)))
}

/// The path without its first slash.
fn below(path: &[u8]) -> &[u8] {
    path.strip_prefix(b"/").unwrap_or(path)
}

fn not_written(path: &Path, pages: u64, error: Errno) -> MountError {
    MountError::new(format!("{}: {pages} released pages cannot be written: {error}", path.display()))
}

/// The server's part: writes out all files.
pub(crate) fn serve(all: &Clients, socket: &OwnedFd) {
    if !status::may_ask(socket) {
        let _ = send(socket, |out| refuse(out, Errno::PERM));
        return;
    }
    for file in all.content.files().all() {
        if file.pages_now().dirty().next().is_none() {
            continue;
        }
        let opened = all.backing.open_waiting(file.node, Access::Write);
        let written = opened.and_then(|fd| all.content.fsync(file.node, fd.as_fd(), false, Others::Wait));
        let lost = all.content.lost(file.node);
        let written = written.and(if lost > 0 { Err(Errno::IO) } else { Ok(()) });
        // A file that was forgotten meanwhile has written out what it had.
        let refused = written.err().filter(|_| !file.is_gone());
        let told = refused.is_some_and(|error| {
            status::send_file(all, socket, &file).is_ok() && send(socket, |out| refuse(out, error)).is_ok()
        });
        all.content.lost_is_told(file.node, lost, told);
        if refused.is_some() {
            return;
        }
    }
    let _ = send(socket, |out| Reply::ServerStatus(status::server_status(all)).encode(out));
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    use spinio_pagecache::messages::{self, FileStatus, MAX_MESSAGE, ServerStatus};
    use spinio_sys::linux::packets;
    use spinio_testkit::deadline::with_deadline;

    use super::*;
    use crate::channel::receive;

    /// Served by a thread that answers each connection's first message by `answer`, which keeps a connection open by `true`.
    fn listen(directory: &Path, answer: impl Fn(&OwnedFd, Request<'_>) -> bool + Send + 'static) -> PathBuf {
        let path = directory.join("socket");
        let kind = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let listener = rustix::net::socket_with(AddressFamily::UNIX, kind.0, kind.1, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 16).unwrap();
        std::thread::spawn(move || {
            let mut kept = Vec::new();
            while let Ok(socket) = rustix::net::accept(&listener) {
                let mut buffer = vec![0; MAX_MESSAGE + 1];
                let message = receive(&socket, &mut buffer).expect("a message");
                if answer(&socket, messages::parse_request(message).expect("a request")) {
                    kept.push(socket);
                }
            }
        });
        path
    }

    fn answer_status(socket: &OwnedFd, dirty: u64) {
        send(socket, |out| Reply::ServerStatus(ServerStatus::default()).encode(out)).unwrap();
        let file = FileStatus { dirty, path: b"/no such file", ..FileStatus::default() };
        send(socket, |out| Reply::FileStatus(file).encode(out)).unwrap();
    }

    /// How long a server may be silent in a test that waits for that; and one that is never silent, on a busy machine.
    const SHORT: Duration = Duration::from_millis(200);
    const LONG: Duration = Duration::from_secs(60);

    fn write_out(directory: &Path, socket: &Path, within: Duration) -> Result<(), String> {
        let daemon = Daemon { point: directory, socket, within };
        daemon.write_out(|| false).map_err(|error| error.to_string())
    }

    #[test]
    fn server_that_never_attaches_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = listen(directory.path(), |_, _| true);
        let error = write_out(directory.path(), &path, SHORT).unwrap_err();
        assert!(error.contains("still mounted") && error.contains("silent"), "{error}");
    }

    #[test]
    fn server_that_accepts_no_connection_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let connect = || packets::connect_within::<OwnedFd>(&path, Some(SHORT));
        let error = with_deadline("a full queue of connections", || {
            let waiting: Vec<OwnedFd> = std::iter::from_fn(|| connect().ok()).collect();
            assert!(!waiting.is_empty());
            write_out(directory.path(), &path, SHORT).unwrap_err()
        });
        assert!(error.contains("still mounted") && error.contains("silent"), "{error}");
    }

    #[test]
    fn server_that_falls_silent_while_it_writes_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let asked = std::sync::atomic::AtomicU32::new(0);
        let path = listen(directory.path(), move |socket, request| {
            let count = asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            // Status, WriteOut, and Status while that takes long: the third time it answers no more.
            match request {
                Request::Status if count < 3 => answer_status(socket, 1),
                Request::Status | Request::WriteOut => return true,
                _ => panic!("{request:?}"),
            }
            false
        });
        let error = write_out(directory.path(), &path, SHORT).unwrap_err();
        assert!(error.contains("silent"), "{error}");
    }

    #[test]
    fn nothing_outside_of_the_mount_is_opened() {
        let root = tempfile::tempdir().unwrap();
        let [mount, outside] = ["mount", "outside"].map(|name| root.path().join(name));
        // What is opened fails in fsync.
        for dir in [&mount, &outside] {
            std::fs::create_dir(dir).unwrap();
            let (kind, mode) = (rustix::fs::FileType::Fifo, Mode::from_raw_mode(0o600));
            rustix::fs::mknodat(rustix::fs::CWD, dir.join("pipe"), kind, mode, 0).unwrap();
        }
        std::os::unix::fs::symlink(&outside, mount.join("link")).unwrap();
        let paths = [&b"/link/pipe"[..], b"/../outside/pipe", b"/pipe"];
        let opened = paths.map(|name| {
            let directory = tempfile::tempdir().unwrap();
            let socket = listen(directory.path(), move |socket, _| {
                send(socket, |out| Reply::ServerStatus(ServerStatus::default()).encode(out)).unwrap();
                let file = FileStatus { dirty: 1, path: name, ..FileStatus::default() };
                send(socket, |out| Reply::FileStatus(file).encode(out)).unwrap();
                false
            });
            Daemon { point: &mount, socket: &socket, within: LONG }.sync_files().is_err()
        });
        assert_eq!(opened, [false, false, true]);
    }

    #[test]
    fn slow_server_that_answers_is_waited_for() {
        let waits_for_answers_within = |within| {
            let directory = tempfile::tempdir().unwrap();
            let writing = std::sync::Mutex::new(None);
            let asked = std::sync::atomic::AtomicU32::new(0);
            let path = listen(directory.path(), move |socket, request| {
                match request {
                    Request::Status => answer_status(socket, 1),
                    Request::WriteOut => *writing.lock().unwrap() = Some(rustix::io::dup(socket).unwrap()),
                    _ => panic!("{request:?}"),
                }
                // Once it was asked twice while it wrote.
                if asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 3 {
                    answer_status(writing.lock().unwrap().take().as_ref().unwrap(), 0);
                }
                false
            });
            write_out(directory.path(), &path, within) == Ok(())
        };
        // Longer, where the machine is so busy that this server itself is silent for that time.
        assert!([2, 20, 60].into_iter().any(|seconds| waits_for_answers_within(Duration::from_secs(seconds))));
    }

    #[test]
    fn older_daemon_is_left_when_it_has_written_all() {
        for dirty in [0, 3] {
            let directory = tempfile::tempdir().unwrap();
            let path = listen(directory.path(), move |socket, request| {
                match request {
                    Request::Status => answer_status(socket, dirty),
                    _ => send(socket, |out| refuse(out, Errno::PROTO)).unwrap(),
                }
                false
            });
            let left = write_out(directory.path(), &path, LONG);
            match dirty {
                0 => assert_eq!(left, Ok(())),
                _ => assert!(left.unwrap_err().contains("another version of SPIN, and has yet to write 3 released")),
            }
        }
    }
}
