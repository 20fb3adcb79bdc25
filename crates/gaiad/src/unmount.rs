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
//! The daemon ends when the file system is mounted nowhere any more. Where it is mounted elsewhere too (other_mounts.rs),
//! unmounting here does not end it: programs there go on.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use spinio_fuse::mount::{self, MountEntry};
use spinio_pagecache::messages::{Reply, Request};

use crate::backing::Access;
use crate::channel::{ask_within, refuse, send};
use crate::clients::Clients;
use crate::other_mounts::other_mounts;
use crate::status::{self, status};
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
    write_out(&point, &entry)?;
    let supervisor = Running::of(&entry);
    mount::unmount(&point).map_err(|e| {
        if e.is_busy() {
            return error("in use; `fuser -vm` or `lsof +f --` names the programs".into());
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

/// Writes what GPU programs have released, while the daemon still has it if that fails.
fn write_out(point: &Path, entry: &MountEntry) -> Result<(), MountError> {
    sync_files(point)?;
    for _ in 0..ATTEMPTS {
        let (mut refused, mut is_done) = (None, false);
        let asked = ask_within(&socket_of(entry), Request::WriteOut, None, |reply| {
            match reply {
                Reply::ServerStatus(_) => is_done = true,
                Reply::FileStatus(file) => refused = Some((path_below(point, file.path), file.dirty)),
                _ => return Err(Errno::PROTO),
            }
            Ok(())
        });
        match (asked, refused) {
            (Ok(()), _) if is_done => return Ok(()),
            (Err(error), Some((path, pages))) => return Err(not_written(&path, pages, error)),
            // The server has died; the next one answers.
            (Ok(()) | Err(Errno::CONNRESET | Errno::PIPE), _) => std::thread::sleep(PAUSE),
            // There is no daemon that has anything.
            (Err(Errno::NOENT | Errno::CONNREFUSED), _) if await_end(&Running::of(entry), Duration::ZERO) => {
                return Ok(());
            }
            (Err(Errno::PROTO), _) => {
                let why = "the daemon is of another version of SPIN, whose command unmounts it with all written";
                return Err(MountError::new(format!("{}: {why}", point.display())));
            }
            (Err(error), _) => {
                let why = "the server cannot be asked to write what GPU programs have released";
                return Err(MountError::new(format!("{}: {why}: {error}", point.display())));
            }
        }
    }
    Err(MountError::new(format!("{}: its servers die while they write released pages", point.display())))
}

/// Also what the Linux kernel has of these files. Those that cannot be opened, or have another name by now, are left to the
/// server.
fn sync_files(point: &Path) -> Result<(), MountError> {
    let Ok(status) = status(point) else { return Ok(()) };
    for file in status.files.iter().filter(|file| file.dirty > 0) {
        let path = path_below(point, file.path.as_bytes());
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(opened) = rustix::fs::open(&path, flags, Mode::empty()) else { continue };
        rustix::fs::fsync(&opened).map_err(|error| not_written(&path, file.dirty, error))?;
    }
    Ok(())
}

fn path_below(point: &Path, path: &[u8]) -> PathBuf {
    point.join(OsStr::from_bytes(path.strip_prefix(b"/").unwrap_or(path)))
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
        let written = opened.and_then(|fd| all.content.fsync(file.node, fd.as_fd(), false));
        // A file that was forgotten meanwhile has written out what it had.
        if let Err(error) = written
            && !file.is_gone()
        {
            if status::send_file(all, socket, &file).is_ok() {
                let _ = send(socket, |out| refuse(out, error));
            }
            return;
        }
    }
    let _ = send(socket, |out| Reply::ServerStatus(status::server_status(all)).encode(out));
}
