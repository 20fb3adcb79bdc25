//! What a server holds: the answer to `spinio gaia status`, and the question.
//!
//! A connection that begins with Status instead of a ticket gets a list and its end. Only root and the daemon's own user
//! get it, because it names files.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use spinio_fuse::mount;
use spinio_pagecache::messages::{
    self, MapKind, Reply, Request, ServerLimits, ServerStatus, Stats, UserStatus, UserUse,
};

use crate::backing::{Access, proc_path};
use crate::channel::{WITHIN, ask, refuse, send};
use crate::clients::Clients;
use crate::files::File;
use crate::supervisor::{MountError, is_gaia, is_trusted, mount_of, mount_point, socket_of};

/// A mount of GAIA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Where.
    pub point: PathBuf,
    /// The number of its FUSE connection.
    pub connection: u32,
    /// Who made it; a mount of root's is for all users.
    pub user: u32,
}

/// What a server holds of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileStatus {
    /// Below the mount.
    pub path: String,
    /// Maps of it.
    pub maps: u64,
    /// Of these, maps in place.
    pub in_place: u64,
    /// Processes that have these maps.
    pub owners: u64,
    /// Pages that were released and are not in the file yet.
    pub dirty: u64,
    /// Counters.
    pub stats: Stats,
}

/// What the server of a mount holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountStatus {
    /// Of all files.
    pub server: ServerStatus,
    /// Users who have some of it. Pages that an earlier server has left are of none.
    pub users: Vec<UserStatus>,
    /// Files that are mapped, or have pages that are not written to the file.
    pub files: Vec<FileStatus>,
}

/// The mounts of GAIA that this process sees.
///
/// # Errors
/// If /proc cannot be read.
pub fn mounts() -> std::io::Result<Vec<Mount>> {
    let gaia = mount::mounts()?.into_iter().filter(is_gaia);
    Ok(gaia.map(|m| Mount { point: m.point, connection: m.minor, user: m.user.unwrap_or_default() }).collect())
}

/// Asks the server of the mount at a directory.
///
/// # Errors
/// If there is none, or it does not answer.
pub fn status(directory: &Path) -> Result<MountStatus, MountError> {
    let error = |words: String| MountError::new(format!("{}: {words}", directory.display()));
    let point = mount_point(directory).map_err(|e| error(e.to_string()))?;
    let Some(entry) = mount_of(&point).map_err(|e| error(e.to_string()))? else {
        return Err(error("GAIA is not mounted here".into()));
    };
    if !is_trusted(&entry) {
        return Err(error("a mount of another user: only that user may ask what it holds".into()));
    }
    status_at(&socket_of(&entry), WITHIN).map_err(|e| match e {
        Errno::PERM => error("only root may ask what a mount of all users holds".into()),
        Errno::NOENT | Errno::CONNREFUSED => error("the daemon of this mount has ended".into()),
        Errno::AGAIN => error(format!("the server has not answered for {} s", WITHIN.as_secs())),
        Errno::PROTO => error("the daemon of this mount is of another version of SPIN".into()),
        e => error(format!("cannot ask the server: {e}")),
    })
}

/// Asks the server at `path`, which has `within` for each reply: AGAIN, if it takes longer.
pub(crate) fn status_at(path: &Path, within: Duration) -> Result<MountStatus, Errno> {
    let (mut server, mut users, mut files) = (None, Vec::new(), Vec::new());
    ask(path, Request::Status, within, |reply| {
        match reply {
            Reply::ServerStatus(status) => server = Some(status),
            Reply::UserStatus(status) => users.push(status),
            Reply::FileStatus(messages::FileStatus { maps, in_place, owners, dirty, stats, path }) => {
                let path = String::from_utf8_lossy(path).into_owned();
                files.push(FileStatus { path, maps, in_place, owners, dirty, stats });
            }
            _ => return Err(Errno::PROTO),
        }
        Ok(())
    })?;
    files.sort_by(|a: &FileStatus, b| a.path.cmp(&b.path));
    users.sort_by_key(|status| status.user);
    Ok(MountStatus { server: server.ok_or(Errno::CONNRESET)?, users, files })
}

/// The server's part.
pub(crate) fn serve(all: &Clients, socket: &OwnedFd) {
    if !may_ask(socket) {
        let _ = send(socket, |out| refuse(out, Errno::PERM));
        return;
    }
    let mut sent = send(socket, |out| Reply::ServerStatus(server_status(all)).encode(out));
    for status in users(all, socket) {
        sent = sent.and_then(|()| send(socket, |out| Reply::UserStatus(status).encode(out)));
    }
    for file in all.content.files().all() {
        if sent.is_err() {
            return;
        }
        sent = send_file(all, socket, &file);
    }
}

/// Whether the other end is root or the daemon's own user.
pub(crate) fn may_ask(socket: &OwnedFd) -> bool {
    let own = rustix::process::geteuid();
    socket_peercred(socket).is_ok_and(|peer| peer.uid.is_root() || peer.uid == own)
}

/// What the server holds of all files.
pub(crate) fn server_status(all: &Clients) -> ServerStatus {
    let (connections, mapped) = all.quotas.used();
    let slots = u64::from(all.content.slots());
    let [limits, of_user] = all.quotas.limits();
    let most = all.release_memory.most() as u64;
    let of_user = UserUse { connections: of_user.connections as u64, mapped: of_user.pages, used: most };
    ServerStatus {
        pid: u64::from(std::process::id()),
        seconds: all.since.elapsed().as_secs(),
        // Without this one.
        connections: connections as u64 - 1,
        mapped,
        used: slots.saturating_sub(all.content.files().slots().free_slots() as u64),
        slots,
        replaced: all.replaced,
        totals: all.totals(),
        limits: ServerLimits { connections: limits.connections as u64, mapped: limits.pages, of_user },
    }
}

/// Users who have something, without the connection of the one who asks.
fn users(all: &Clients, socket: &OwnedFd) -> Vec<UserStatus> {
    let mut users: HashMap<u32, UserUse> = HashMap::new();
    for (user, (connections, mapped)) in all.quotas.users() {
        users.insert(user, UserUse { connections: connections as u64, mapped, used: 0 });
    }
    for (user, used) in all.release_memory.used() {
        users.entry(user).or_default().used = used as u64;
    }
    if let Some(has) = socket_peercred(socket).ok().and_then(|peer| users.get_mut(&peer.uid.as_raw())) {
        has.connections = has.connections.saturating_sub(1);
    }
    users.retain(|_, has| *has != UserUse::default());
    users.into_iter().map(|(user, has)| UserStatus { user: user.into(), has }).collect()
}

/// What it holds of one.
pub(crate) fn send_file(all: &Clients, socket: &OwnedFd, file: &File) -> Result<(), Errno> {
    let opened = all.backing.open(file.node, Access::Read);
    let path_of = |fd: &OwnedFd| rustix::fs::readlink(proc_path(fd), Vec::new()).map(std::ffi::CString::into_bytes);
    let path = opened.and_then(|fd| path_of(&fd)).unwrap_or_else(|_| b"(unnamed)".to_vec());
    // The directory is the root of a mount of its own, except where that takes a capability that this process has not.
    let above = path_of(all.backing.mount()).unwrap_or_default();
    let path = path.strip_prefix(&above[..]).filter(|rest| rest.starts_with(b"/")).unwrap_or(&path).to_vec();
    let (dirty, stats) = {
        let pages = file.pages_now();
        (pages.dirty().count() as u64, file_stats(&pages))
    };
    let holders = file.holders().clone();
    let owners = holders.values().map(|(peer, _)| peer.pid).collect::<HashSet<_>>().len() as u64;
    let in_place = holders.values().filter(|(_, kind)| *kind != MapKind::Replica).count() as u64;
    let maps = file.maps() as u64;
    let status = messages::FileStatus { maps, in_place, owners, dirty, stats, path: &path };
    send(socket, |out| Reply::FileStatus(status).encode(out))
}

/// The counters of a file.
pub(crate) fn file_stats(pages: &spinio_pagecache::FilePages) -> Stats {
    let spinio_pagecache::Counters { commits, merged, unchanged, published, .. } = pages.counters();
    let twins = pages.pending().iter().flat_map(|(_, runs)| runs).map(|run| run.end - run.start).sum();
    Stats { commits, merged, unchanged, twins, published }
}
