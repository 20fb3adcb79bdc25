//! The supervisor: makes the mount, keeps what must outlive the server, and replaces the server when it dies.
//!
//! ```text
//!   Supervisor::mount    checks, /dev/fuse, mount over the directory, INIT, state memory, socket for clients
//!   Supervisor::run      ┌─> spawn a server, hand it everything (link.rs)
//!                        │      │ until: its death ── by a signal or an error ──┐   status 0: unmounted, done
//!                        │      │        Keep / Drop of descriptors             │   stop: unmount
//!                        └──────┴──────────── wait a little if it lived shortly ┘
//! ```
//!
//! It reads no request, opens no file of the mount and has few lines, so that it does not die. A server that cannot
//! live ([`SHORT_LIVES`] in a row, each by its own fault) ends the mount: its users get ENOTCONN instead of waiting for
//! ever.

mod checks;
mod runtime_dir;

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, pidfd_open};
use spinio_fuse::{Connection, mount, negotiate};
use spinio_pagecache::change_counters::{self, SERVER_WORDS};
use spinio_sys::injection_point;
use spinio_sys::linux::packets::{self, Wait};

use crate::link::{Link, Message, Use};
use crate::other_mounts::other_mounts;
use crate::privileges::{self, Role};
use crate::report::report;
use crate::shared_counters::SharedCounters;
use crate::state::StateMemory;

pub use checks::{NAME, connection_of};
pub(crate) use checks::{is_gaia, is_trusted, mount_of, mount_point};
use runtime_dir::Claim;
pub(crate) use runtime_dir::{Running, await_end, socket_of};

/// A server that lived for less lived shortly.
const SHORT: Duration = Duration::from_secs(1);
/// Servers in a row that lived shortly, after which the mount ends.
const SHORT_LIVES: u32 = 20;
/// Between looks at a server that cannot be waited for.
const PAUSE: Duration = Duration::from_millis(100);
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// The longest wait before the next server.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Why there is no mount; one line for the user.
#[derive(Debug)]
pub struct MountError(String);

impl MountError {
    pub(crate) fn new(words: impl Into<String>) -> MountError {
        MountError(words.into())
    }
}

impl fmt::Display for MountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MountError {}

/// How the mount ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Unmounted.
    Unmounted,
    /// The servers died one after the other; what was not written back is lost.
    GaveUp,
}

/// A mount and what its server needs. Dropped without [`Supervisor::run`], it unmounts.
#[derive(Debug)]
pub struct Supervisor {
    mounted: Mounted,
    connection: Connection,
    directory: OwnedFd,
    /// The same for reading only, of which clients get files.
    for_clients: Option<OwnedFd>,
    state: StateMemory,
    claim: Claim,
    /// What the server would not find again.
    kept: HashMap<(Use, u64), OwnedFd>,
    /// Counts servers, for clients.
    servers: SharedCounters,
    /// It has mounted by itself, and unmounts so.
    privileged: bool,
    /// The process that waits for the kernel, and the socket of its requests.
    invalidator: Option<(Child, OwnedFd)>,
}

/// The mount; ended when dropped.
#[derive(Debug)]
struct Mounted {
    point: PathBuf,
    connection: u32,
    id: u64,
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if mount::mount_at(&self.point).ok().flatten().is_some_and(|m| m.id == self.id) {
            let _ = mount::abort(&self.point);
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // Clients whose pages are as they were ask from now on, and are told that there is no server any more.
        change_counters::count_server(self.servers.words());
    }
}

impl Supervisor {
    /// Mounts over a directory. `pages_bytes`: state memory for the page table.
    ///
    /// # Errors
    /// With nothing left mounted.
    pub fn mount(directory: &Path, pages_bytes: usize) -> Result<Supervisor, MountError> {
        let checks::Checked { point, target, directory, for_clients, flags } = checks::check(directory)?;
        let privileged = mount::is_privileged();
        let (device, entry) = checks::mount_over(&point, &target, flags)?;
        // It would keep the file system below mounted for as long as this process lives.
        drop(target);
        let mounted = Mounted { point, connection: entry.minor, id: entry.id };
        let connection = Connection::new(device);
        let failed = |what: &str, e: Errno| MountError::new(format!("{what}: {e}"));
        let negotiated = negotiate(&connection).map_err(|e| MountError::new(e.to_string()))?;
        if !negotiated.has_resend() {
            report!(
                "this kernel cannot send requests again (before Linux 6.9): if the server dies, programs \
                 that wait for it wait for ever"
            );
        }
        if !negotiated.waits_for_writeback() {
            report!("files below this mount cannot be mapped into GPU memory: this takes Linux 6.16 or later");
        }
        let state = StateMemory::create(negotiated, pages_bytes).map_err(|e| failed("no state memory", e))?;
        let claim = Claim::make(mounted.connection)
            .map_err(|e| MountError::new(format!("cannot make the socket for clients: {e}")))?;
        // Descriptors that the server would not find again are kept here.
        let limit = rustix::process::getrlimit(Resource::Nofile);
        let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
        let servers = SharedCounters::new(SERVER_WORDS).map_err(|e| failed("no memory for a counter", e))?;
        let kept = HashMap::new();
        let invalidator = None;
        Ok(Supervisor {
            mounted,
            connection,
            directory,
            for_clients,
            state,
            claim,
            kept,
            servers,
            privileged,
            invalidator,
        })
    }

    /// Gives up the privileges that only mounting takes; to be called before other threads are made. [`Supervisor::run`]
    /// does so too.
    ///
    /// # Errors
    /// The kernel's.
    pub fn drop_privileges(&self) -> std::io::Result<()> {
        Ok(privileges::keep(Role::Supervisor { unmounts: self.privileged })?)
    }

    /// Limits the files that the Linux kernel may know at a time, for tests; before [`Supervisor::run`].
    pub fn limit_nodes(&self, records: u64) {
        self.state.limit_nodes(records);
    }

    /// Where it is mounted.
    pub fn point(&self) -> &Path {
        &self.mounted.point
    }

    /// The number of its FUSE connection.
    pub fn connection(&self) -> u32 {
        self.mounted.connection
    }

    /// The socket for clients.
    pub fn socket(&self) -> &Path {
        self.claim.socket_path()
    }

    /// Where a daemon without a terminal can write what it reports; removed at the end if it is empty.
    pub fn log(&self) -> &Path {
        self.claim.log_path()
    }

    /// Runs servers until unmount. `server` makes the command of a server, which must call [`crate::server_role`];
    /// `spawned` is given its process number. When `stop` becomes readable, the directory is unmounted, or detached
    /// from the tree if programs use it: then it is served until they do not.
    ///
    /// This process must have no file of the mount open: the child that becomes the next server inherits it, and
    /// closing it, before that server runs, waits for write-back, which needs that server.
    ///
    /// # Errors
    /// If a system call fails that cannot be repeated.
    pub fn run(
        mut self,
        mut server: impl FnMut() -> std::io::Result<Command>,
        mut spawned: impl FnMut(u32),
        stop: &impl AsFd,
    ) -> std::io::Result<Ended> {
        self.drop_privileges()?;
        let mut short_lives = 0;
        let mut stopping = false;
        let mut any_lived = false;
        loop {
            let born = Instant::now();
            match self.start(&mut server) {
                Ok((mut child, link)) => {
                    any_lived = true;
                    spawned(child.id());
                    let failed = match self.hand_over(&link) {
                        // The server is dead already, which is dealt with below.
                        Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => false,
                        Err(error) => {
                            report!("cannot hand the mount over to a server: {error}");
                            // It waits for the rest.
                            let _ = child.kill();
                            true
                        }
                    };
                    let status = self.attend(&mut child, &link, stop, &mut stopping)?;
                    if status.success() {
                        return Ok(Ended::Unmounted);
                    }
                    // SIGKILL comes from outside: the next server is not worse for it.
                    let is_killed = status.signal() == Some(Signal::KILL.as_raw());
                    if !failed && (born.elapsed() >= SHORT || is_killed) {
                        short_lives = 0;
                        continue;
                    }
                }
                Err(error) if !any_lived => return Err(error),
                // The end of the mount would lose what its programs have written; memory and processes may be short
                // for a moment only.
                Err(error) => report!("cannot start a server: {error}"),
            }
            short_lives += 1;
            if short_lives >= SHORT_LIVES {
                return Ok(Ended::GaveUp);
            }
            // 0, 10, 20, 40 ... ms.
            let wait = Duration::from_millis(5 << short_lives.min(10)).min(WAIT_MAX);
            if short_lives > 1 {
                std::thread::sleep(wait);
            }
        }
    }

    /// Starts a server, which waits for what it needs.
    fn start(&mut self, server: &mut impl FnMut() -> std::io::Result<Command>) -> std::io::Result<(Child, Link)> {
        let (ours, theirs) = Link::pair()?;
        self.ensure_invalidator(server)?;
        // In a group of its own: an interrupt from the terminal is for the supervisor.
        let child = server()?.process_group(0).stdin(Stdio::from(theirs.into_fd())).spawn()?;
        injection_point!("supervisor: server started");
        Ok((child, ours))
    }

    /// Starts the invalidator, unless there is one.
    fn ensure_invalidator(&mut self, server: &mut impl FnMut() -> std::io::Result<Command>) -> std::io::Result<()> {
        if let Some((child, requests)) = &mut self.invalidator {
            if is_open(requests)? && child.try_wait()?.is_none() {
                return Ok(());
            }
            // Its descriptors are closed, and it waits for nothing any more: it is ending.
            child.wait()?;
        }
        let (link, theirs) = Link::pair()?;
        let (requests, served) = packets::pair()?;
        let child = server()?.process_group(0).stdin(Stdio::from(theirs.into_fd())).spawn()?;
        link.send(Message::Invalidate, &[self.connection.as_fd(), served.as_fd()])?;
        self.invalidator = Some((child, requests));
        injection_point!("supervisor: invalidator started");
        Ok(())
    }

    fn hand_over(&self, link: &Link) -> Result<(), Errno> {
        let requests = self.invalidator.as_ref().map(|(_, requests)| requests.as_fd());
        let everything = [
            self.connection.as_fd(),
            self.state.as_fd(),
            self.directory.as_fd(),
            self.claim.listener().as_fd(),
            requests.ok_or(Errno::PIPE)?,
            self.servers.as_fd(),
            self.for_clients.as_ref().unwrap_or(&self.directory).as_fd(),
        ];
        // The server before it is dead, and this one has answered nothing.
        change_counters::count_server(self.servers.words());
        link.send(Message::Start, &everything)?;
        injection_point!("supervisor: some descriptors handed over");
        for what in [Use::Inode, Use::Content, Use::Handed] {
            let all = self.kept.iter().filter(|((kept, _), _)| *kept == what);
            link.send_kept(what, all.map(|((_, node), fd)| (*node, fd.as_fd())))?;
        }
        link.send(Message::Go, &[])?;
        injection_point!("supervisor: all handed over");
        Ok(())
    }

    /// Until the server is dead.
    fn attend(
        &mut self,
        child: &mut Child,
        link: &Link,
        stop: &impl AsFd,
        stopping: &mut bool,
    ) -> std::io::Result<ExitStatus> {
        let pid = Pid::from_child(child);
        let (mut process, mut link_open) = (None, true);
        loop {
            process = process.or_else(|| pidfd_open(pid, PidfdFlags::empty()).ok());
            let mut waited: Vec<_> = process.iter().map(|process| PollFd::new(process, PollFlags::IN)).collect();
            if link_open {
                waited.push(PollFd::new(link, PollFlags::IN));
            }
            if !*stopping {
                waited.push(PollFd::new(stop, PollFlags::IN));
            }
            // For want of descriptors or memory the server is looked at now and then: as long as it lives, the mount does.
            let limit = process.is_none().then_some(LOOK_EVERY);
            if rustix::io::retry_on_intr(|| poll(&mut waited, limit.as_ref())).is_err() {
                std::thread::sleep(PAUSE);
            }
            // Its status is kept for `wait`.
            let dead = child.try_wait()?.is_some();
            let stop_now = !*stopping && waited.last().is_some_and(|w| !w.revents().is_empty());
            // Also what a dead server has sent.
            while link_open {
                match link.receive(Wait::No) {
                    Ok(Some(got)) => self.keep(got.message, got.fds),
                    Err(Errno::AGAIN) => break,
                    Ok(None) | Err(_) => link_open = false,
                }
            }
            if dead {
                injection_point!("supervisor: server dead");
                return child.wait();
            }
            if stop_now {
                *stopping = true;
                self.stop();
            }
        }
    }

    fn keep(&mut self, message: Message, fds: Vec<OwnedFd>) {
        match message {
            Message::Keep(what, node) => {
                if fds.is_empty() {
                    report!("a descriptor of the server is lost, since this process may have no more: {what:?} {node}");
                }
                drop(fds.into_iter().next().and_then(|fd| self.kept.insert((what, node), fd)));
                injection_point!("supervisor: descriptor kept");
            }
            Message::Drop(what, node) => {
                drop(self.kept.remove(&(what, node)));
                injection_point!("supervisor: descriptor dropped");
            }
            Message::Start | Message::Invalidate | Message::Devices | Message::Kept(_) | Message::Go => {}
        }
    }

    /// On a thread of its own: unmounting waits for write-back, which the server does, and the server for this process,
    /// if there are many messages.
    fn stop(&self) {
        let (point, id, connection) = (self.mounted.point.clone(), self.mounted.id, self.mounted.connection);
        let stop = move || {
            // Only what this process has mounted.
            if mount::mount_at(&point).ok().flatten().is_none_or(|m| m.id != id) {
                return;
            }
            if mount::unmount(&point).is_err() {
                match mount::detach(&point) {
                    Ok(()) => report!("{} is in use: serving it until it is not", point.display()),
                    Err(error) => report!("cannot unmount {}: {error}", point.display()),
                }
            }
            for other in other_mounts(&checks::kind(), connection, id) {
                report!("{}: {other}: serving it there until it is not", point.display());
            }
        };
        if let Err(error) = std::thread::Builder::new().name("gaia-unmount".to_owned()).spawn(stop) {
            report!("cannot unmount {}: {error}", self.mounted.point.display());
        }
    }
}

/// Whether a process has the other end of a socket.
fn is_open(socket: &impl AsFd) -> Result<bool, Errno> {
    let mut one = [PollFd::new(socket, PollFlags::empty())];
    rustix::io::retry_on_intr(|| poll(&mut one, Some(&Timespec::default())))?;
    Ok(!one[0].revents().contains(PollFlags::HUP))
}
