//! Questions to the daemon, and its answers: `spinio gaia status`, `drop`, `serve --stop`.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::Uid;
use spinio_pagecache::leased_messages::{FileStatus, PeerRefusal, Reply, Request, parse_reply};
use spinio_sys::injection_point;
use spinio_sys::linux;
use spinio_sys::linux::packets;

use super::channel::{failed, send};
use super::store::Store;
use crate::MountError;
use crate::channel::{WITHIN, converse};

/// What a daemon holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DaemonStatus {
    /// Its process.
    pub pid: u64,
    /// Seconds since it started.
    pub seconds: u64,
    /// Maps of clients.
    pub maps: u64,
    /// Bytes of chunks.
    pub bytes: u64,
    /// The most for each user and device.
    pub limit: Option<u64>,
    /// Files, sorted by path; for an ordinary user only its own.
    pub files: Vec<LeasedFileStatus>,
}

/// What it holds of a file for a user on a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeasedFileStatus {
    /// Path.
    pub path: String,
    /// User.
    pub user: u32,
    /// The device's UUID.
    pub device: [u8; 16],
    /// Maps of it.
    pub maps: u32,
    /// Chunks.
    pub chunks: u32,
    /// Their bytes.
    pub bytes: u64,
    /// Among them, those that were copied from another device.
    pub peer_bytes: u64,
    /// Why a copy on another device could not be used, the last time.
    pub refused: Option<PeerRefusal>,
    /// Bytes of the file; 0 if it was written since the last acquire.
    pub size: u64,
}

/// Asks the daemon at a socket; `None`: there is none.
///
/// # Errors
/// If it does not answer.
pub fn query_daemon(socket: &Path) -> Result<Option<DaemonStatus>, MountError> {
    let mut status = DaemonStatus::default();
    let found = ask(socket, Request::Status, |reply| match reply {
        Reply::Daemon { pid, seconds, maps, bytes, limit } => {
            status = DaemonStatus { pid, seconds, maps, bytes, limit: (limit > 0).then_some(limit), files: Vec::new() };
            true
        }
        Reply::File(FileStatus { user, device, maps, chunks, bytes, peer_bytes, refused, size, path }) => {
            let path = String::from_utf8_lossy(path).into_owned();
            let status_of = LeasedFileStatus { path, user, device, maps, chunks, bytes, peer_bytes, refused, size };
            status.files.push(status_of);
            true
        }
        _ => false,
    })?;
    status.files.sort_by(|a, b| (&a.path, a.user, a.device).cmp(&(&b.path, b.user, b.device)));
    Ok(found.then_some(status))
}

/// Makes the daemon drop what no client has mapped, of a file or of all; the bytes. `None`: there is no daemon.
///
/// # Errors
/// If it does not answer.
pub fn drop_unused(socket: &Path, file: Option<&File>) -> Result<Option<u64>, MountError> {
    let mut freed = 0;
    let request = if file.is_some() { Request::DropFile } else { Request::Drop };
    let found = ask_with(socket, request, file, |reply| match reply {
        Reply::Freed { bytes } => {
            freed = bytes;
            true
        }
        _ => false,
    })?;
    Ok(found.then_some(freed))
}

/// Makes the daemon end, and waits until it has; false: there is none.
///
/// # Errors
/// If it does not, or belongs to another user.
pub fn stop_daemon(socket: &Path) -> Result<bool, MountError> {
    let before = std::fs::metadata(socket).map(|m| m.st_ino()).ok();
    if !ask(socket, Request::Stop, |reply| matches!(reply, Reply::Daemon { .. }))? {
        return Ok(false);
    }
    let begun = std::time::Instant::now();
    // One that is killed meanwhile leaves the socket.
    let is_served =
        || std::fs::metadata(socket).map(|m| m.st_ino()).ok() == before && packets::connect::<OwnedFd>(socket).is_ok();
    while is_served() {
        if begun.elapsed() > WITHIN {
            return Err(MountError::new(format!("{}: the daemon has not ended", socket.display())));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(true)
}

fn ask(path: &Path, request: Request, each: impl FnMut(Reply<'_>) -> bool) -> Result<bool, MountError> {
    ask_with(path, request, None, each)
}

/// `file`: comes with the request.
fn ask_with(
    path: &Path,
    request: Request,
    file: Option<&File>,
    mut each: impl FnMut(Reply<'_>) -> bool,
) -> Result<bool, MountError> {
    let error = |words: String| MountError::new(format!("{}: {words}", path.display()));
    let (mut message, mut answered) = (Vec::new(), false);
    request.encode(&mut message);
    let descriptors = file.map(AsFd::as_fd);
    let asked = converse(
        path,
        &message,
        descriptors.as_slice(),
        WITHIN,
        || Err(Errno::AGAIN),
        |bytes| {
            answered = true;
            match parse_reply(bytes) {
                Ok(Reply::Failed { errno }) => Err(Errno::from_raw_os_error(errno as i32)),
                Ok(reply) if each(reply) => Ok(()),
                _ => Err(Errno::PROTO),
            }
        },
    );
    match asked {
        Ok(()) => Ok(true),
        Err(Errno::NOENT | Errno::CONNREFUSED) if !answered => Ok(false),
        Err(Errno::ACCESS | Errno::PERM) => Err(error("the daemon belongs to another user".into())),
        Err(Errno::AGAIN) => Err(error(format!("the daemon has not answered for {} s", WITHIN.as_secs()))),
        Err(e) => Err(error(format!("cannot ask the daemon: {e}"))),
    }
}

/// The daemon's part.
pub(super) fn answer(store: &Store, socket: &OwnedFd, user: Uid, request: Request) {
    let privileged = user.is_root() || user == rustix::process::geteuid();
    // Another user sees, and drops, only what is its own.
    let of = (!privileged).then(|| user.as_raw());
    match request {
        Request::Drop => {
            let bytes = store.drop_unused(of, None);
            let _ = send(socket, Reply::Freed { bytes }, &[]);
        }
        Request::Stop if privileged => {
            let _ = send(socket, daemon(store, &[]), &[]);
            injection_point!("serve: end asked for");
            store.end();
        }
        Request::Status => {
            let held = store.held(of);
            let mut sent = send(socket, daemon(store, &held), &[]);
            for file in held {
                let (user, device) = (file.key.user, file.key.device);
                let (maps, chunks, bytes, size) = (file.maps, file.chunks, file.bytes, file.size);
                let (peer_bytes, refused, path) = (file.peer_bytes, file.refused, &file.path);
                let file = FileStatus { user, device, maps, chunks, bytes, peer_bytes, refused, size, path };
                sent = sent.and_then(|()| send(socket, Reply::File(file), &[]));
            }
        }
        _ => drop(send(socket, failed(Errno::PERM), &[])),
    }
}

/// Drops what no client has mapped of the file of a descriptor.
pub(super) fn drop_file(store: &Store, socket: &OwnedFd, user: Uid, file: &OwnedFd) {
    let privileged = user.is_root() || user == rustix::process::geteuid();
    let of = (!privileged).then(|| user.as_raw());
    let _ = match linux::fstat(file.as_raw_fd()) {
        Ok(stat) => send(socket, Reply::Freed { bytes: store.drop_unused(of, Some(stat.key())) }, &[]),
        Err(error) => send(socket, failed(error), &[]),
    };
}

fn daemon(store: &Store, held: &[super::store::Held]) -> Reply<'static> {
    Reply::Daemon {
        pid: std::process::id().into(),
        seconds: store.since.elapsed().as_secs(),
        maps: held.iter().map(|file| u64::from(file.maps)).sum(),
        bytes: held.iter().map(|file| file.bytes).sum(),
        limit: store.limit.unwrap_or(0),
    }
}
