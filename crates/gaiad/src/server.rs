//! The server: threads that answer requests, until unmount or death.
//!
//! ```text
//!   Start, Kept..., Go (link.rs)
//!      │
//!   attach: node table and journal from state memory
//!      │
//!   RESEND ──> one thread takes what comes with the mark "sent again", and one request more ──> drop the rest of the
//!      │                                                                                        journal
//!   workers: take one of these, then receive, handle, reply, ...
//! ```
//!
//! The kernel puts requests that are sent again before all others, so the first one without the mark says that there
//! are no more.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};
use spinio_fuse::abi::ForgetOne;
use spinio_fuse::{Connection, Operation, REQUEST_BYTES, Received, Request};
use spinio_sys::injection_point;
use spinio_sys::linux::{self, packets::Wait};

use crate::accept;
use crate::arrivals::Arrivals;
use crate::backing::{Access, Backing};
use crate::buffer::resident_buffer;
use crate::clients::Clients;
use crate::content::Content;
use crate::files::Others;
use crate::handlers::{Handlers, Reply, identity, stat};
use crate::invalidator::Invalidator;
use crate::journal::Journal;
use crate::late::{self, Late, LateRequest};
use crate::link::{self, Link, Message, Use};
use crate::nodes::Nodes;
use crate::quotas::Limits;
use crate::report::report;
use crate::seek::Seeker;
use crate::state::StateMemory;

/// Descriptors that the process may have, where there is no limit.
const MOST_FDS: u64 = 1 << 20;
/// Connections of clients at most.
const CLIENTS: u64 = 4096;
/// Descriptors of a connection, with two more during a release.
const CLIENT_FDS: u64 = 5;
/// Each has a buffer in memory, and the Linux kernel has 64 writes on their way at most.
const WORKERS: (usize, usize) = (4, 64);

/// Serves until the file system is unmounted. `link` is the socket that the supervisor gave, and `fds` came
/// with its first message.
///
/// # Errors
/// If the server cannot begin; the supervisor starts another one.
pub fn serve(link: Link, fds: Vec<OwnedFd>) -> Result<(), Errno> {
    // Writing back dirty pages of the mount must not wait for this process to get memory. Needs CAP_SYS_RESOURCE.
    let _ = rustix::process::configure_io_flusher_behavior(true);
    // A mode in a request is final.
    rustix::process::umask(rustix::fs::Mode::empty());
    injection_point!("server: started");
    let (connection, handlers, clients, listener) = attach(link, fds)?;
    injection_point!("server: attached");
    let first = resend(&connection, &handlers)?;
    injection_point!("server: journal cleared");
    let first = Mutex::new(first);
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get() * 2).clamp(WORKERS.0, WORKERS.1);
    accept::start(&clients, listener)?;
    let (late, nodes) = Late::new();
    let (connection, handlers, first, late) = (&*connection, &handlers, &first, &late);
    let errno = |e: std::io::Error| Errno::from_io_error(&e).unwrap_or(Errno::AGAIN);
    std::thread::scope(|scope| {
        let served_late = || {
            let ready = |node, opens: bool, within| {
                clients.content.files().wait_for_arrival(node, within);
                if !opens {
                    return Ok(());
                }
                let opened = clients.backing.open_waiting(node, Access::Write);
                // A descriptor for reading that is kept would hide that there are none.
                let read = |error| match late::may_pass(error) {
                    true => Err(error),
                    false => clients.backing.open_waiting(node, Access::Read),
                };
                opened.or_else(read).map(drop)
            };
            forget_again(connection, handlers, late);
            late.run(nodes, ready, |requests| answer_late(connection, handlers, late, requests));
        };
        std::thread::Builder::new().name("gaia-late".to_owned()).spawn_scoped(scope, served_late).map_err(errno)?;
        let served = std::thread::scope(|scope| {
            for number in 0..workers {
                let body = || work(connection, handlers, first, late);
                let name = format!("gaia-fuse-{number}");
                std::thread::Builder::new().name(name).spawn_scoped(scope, body).map_err(errno)?;
            }
            Ok(())
        });
        late.end();
        served
    })?;
    injection_point!("server: unmounted");
    handlers.content().finish();
    injection_point!("server: all written");
    Ok(())
}

type Attached = (Arc<Connection>, Handlers, Arc<Clients>, OwnedFd);

/// Takes what the supervisor keeps.
fn attach(link: Link, fds: Vec<OwnedFd>) -> Result<Attached, Errno> {
    let [device, state, directory, listener, invalidator, servers, for_clients] =
        <[OwnedFd; 7]>::try_from(fds).map_err(|_| Errno::PROTO)?;
    let state = Arc::new(StateMemory::attach(state)?);
    let nodes = Arc::new(Nodes::attach(state.clone()));
    nodes.set_root(&identity(&directory, &stat(&directory)?)?);
    let kept = Link::new(link.as_fd().try_clone_to_owned().map_err(|_| Errno::MFILE)?);
    let fds = fd_limit();
    let clients = (fds / 16).min(CLIENTS);
    let backing = Backing::new(directory, nodes.clone(), link, fds as usize, (clients * CLIENT_FDS) as usize);
    let backing = backing.with_view_for_clients(for_clients);
    let mut handed = Vec::new();
    loop {
        match kept.receive(Wait::Yes)? {
            Some(link::Received { message: Message::Kept(Use::Handed), nodes, fds }) => {
                handed.extend(nodes.into_iter().zip(fds));
            }
            Some(link::Received { message: Message::Kept(what), nodes, fds }) => {
                nodes.into_iter().zip(fds).for_each(|(node, fd)| backing.adopt(what, node, fd));
                injection_point!("server: kept descriptors received");
            }
            Some(link::Received { message: Message::Go, .. }) => break,
            _ => return Err(Errno::PROTO),
        }
    }
    let connection = Arc::new(Connection::new(device));
    let invalidator = Invalidator::new(invalidator);
    let backing = Arc::new(backing);
    let content = Arc::new(Content::attach(state.clone(), backing.clone())?);
    // The tables of maps may need a quarter of the memory, at 8 bytes a page.
    let limits = Limits { connections: clients as usize, pages: linux::total_memory() / 32 };
    let arrivals = Arrivals::new(&state, nodes.clone(), kept, fds as usize, content.lent().devices())?;
    // Before a file is used whose bytes are on their way.
    arrivals.adopt(handed, &content);
    let (shared, below) = (content.clone(), backing.clone());
    let clients = Clients::new(&listener, shared, below, invalidator, limits, &state, servers, arrivals)?;
    let clients = Arc::new(clients);
    let seeker = Seeker::start(connection.clone(), clients.clone())?;
    let journal = Journal::attach(state);
    let handlers = Handlers::new(nodes, backing, content, journal, clients.clone(), seeker);
    Ok((connection, handlers, clients, listener))
}

/// Descriptors that the process may have.
fn fd_limit() -> u64 {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    limit.maximum.unwrap_or(MOST_FDS)
}

/// Asks for the requests of an earlier server, and takes them.
fn resend(connection: &Connection, handlers: &Handlers) -> Result<Vec<Vec<u8>>, Errno> {
    let mut taken = Vec::new();
    let mut again = HashSet::new();
    connection.make_waiting()?;
    match connection.resend() {
        Ok(()) => {}
        // Before Linux 6.9: of no use to an earlier server's callers, but new ones are served.
        Err(Errno::INVAL) => return Ok(taken),
        Err(error) => return Err(error),
    }
    injection_point!("server: requests asked for again");
    let mut buffer = resident_buffer(REQUEST_BYTES);
    while connection.is_readable()? {
        // Without waiting: a request whose caller is killed leaves the queue, and others have been taken already.
        let len = match connection.receive_waiting(&mut buffer)? {
            Received::Request(len) => len,
            Received::Nothing => continue,
            Received::Unmounted => break,
        };
        let Ok(request) = Request::parse(&buffer[..len]) else {
            taken.push(buffer[..len].to_vec());
            continue;
        };
        // These come from queues of their own.
        let aside = matches!(
            request.operation,
            Operation::Forget { .. } | Operation::BatchForget(_) | Operation::Interrupt { .. }
        );
        let resent = request.is_resent();
        if resent {
            again.insert(request.id());
            injection_point!("server: request received again");
        }
        taken.push(buffer[..len].to_vec());
        if !resent && !aside {
            break;
        }
    }
    handlers.journal().drop_unclaimed(|request| again.contains(&request));
    Ok(taken)
}

/// Requests that have waited. Those that write all of a file come last, and wait in place: bytes that are on their way by then
/// are not theirs, and to try again for these could go on for ever.
fn answer_late(connection: &Connection, handlers: &Handlers, late: &Late, requests: Vec<LateRequest>) {
    let _ = rustix::process::configure_io_flusher_behavior(true);
    let mut reply = Reply::default();
    let writes_all = |request: &LateRequest| {
        let request = Request::parse(request.bytes());
        request.is_ok_and(|request| matches!(request.operation, Operation::Fsync(_) | Operation::Lseek(_)))
    };
    let (last, first): (Vec<_>, Vec<_>) = requests.into_iter().partition(writes_all);
    for request in first.into_iter().chain(last) {
        if let Some((node, cause)) = answer(connection, handlers, late, request.bytes(), &mut reply, Others::Wait) {
            late.wait_again(node, request, cause);
        }
    }
}

/// Ends the nodes that the Linux kernel has forgotten and an earlier server has not: it does not say so again.
fn forget_again(connection: &Connection, handlers: &Handlers, late: &Late) {
    let mut reply = Reply::default();
    for node in handlers.nodes().without_lookups() {
        let bytes = Request::forget(ForgetOne { node, lookups: 0 });
        if let Some((node, cause)) = answer(connection, handlers, late, &bytes, &mut reply, Others::Fail) {
            late.wait(node, bytes, cause);
        }
    }
}

fn work(connection: &Connection, handlers: &Handlers, first: &Mutex<Vec<Vec<u8>>>, late: &Late) {
    let _ = rustix::process::configure_io_flusher_behavior(true);
    let mut reply = Reply::default();
    loop {
        let taken = first.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some(bytes) = taken else { break };
        if let Some((node, cause)) = answer(connection, handlers, late, &bytes, &mut reply, Others::Fail) {
            late.wait(node, bytes, cause);
        }
    }
    let mut buffer = resident_buffer(REQUEST_BYTES);
    loop {
        match connection.receive(&mut buffer) {
            Ok(Received::Request(len)) => {
                let bytes = &buffer[..len];
                if let Some((node, cause)) = answer(connection, handlers, late, bytes, &mut reply, Others::Fail) {
                    late.wait(node, bytes.to_vec(), cause);
                }
            }
            Ok(Received::Nothing) => {}
            Ok(Received::Unmounted) => return,
            Err(error) => {
                report!("cannot read requests: {error}");
                std::process::exit(1);
            }
        }
    }
}

/// Answers a request; or says that it waits, of which node, and why. With [`Others::Wait`] it has waited already.
fn answer(
    connection: &Connection,
    handlers: &Handlers,
    late: &Late,
    bytes: &[u8],
    reply: &mut Reply,
    others: Others,
) -> Option<(u64, Errno)> {
    let request = match Request::parse(bytes) {
        Ok(request) => request,
        Err(_) => {
            // Of the header (fuse_in_header).
            let word = |at| bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_ne_bytes);
            if let (Some(unique), Some(node)) = (word(8), word(16)) {
                handlers.refused(None, node);
                let _ = connection.reply_error(unique, Errno::IO);
            }
            return None;
        }
    };
    injection_point!("server: request received");
    let (unique, node) = (request.header.unique, request.header.node);
    match request.operation {
        Operation::Forget { lookups } => {
            if let Some(cause) = handlers.content().forget_waits(node) {
                if lookups == 0 {
                    return Some((node, cause));
                }
                // They are taken back now: the next server finds a node without look-ups.
                if handlers.nodes().take_back(node, lookups) {
                    late.wait(node, Request::forget(ForgetOne { node, lookups: 0 }), cause);
                }
                return None;
            }
        }
        Operation::BatchForget(nodes) if { nodes }.any(|one| handlers.content().forget_waits(one.node).is_some()) => {
            // Each as a request of its own: only some of them wait.
            for one in nodes {
                let bytes = Request::forget(one);
                if let Some((node, cause)) = answer(connection, handlers, late, &bytes, reply, others) {
                    late.wait(node, bytes, cause);
                }
            }
            return None;
        }
        _ => {}
    }
    let mut waits = None;
    let refused = || handlers.refused(Some(&request.operation), node);
    let send = |result: Result<&Reply, Errno>| {
        let result = match result {
            Err(error) if late::may_wait(&request.operation, error) => {
                if others == Others::Wait || !late.is_full(&request.operation) {
                    waits = Some((node, error));
                    return false;
                }
                Err(Errno::NOMEM)
            }
            result => result,
        };
        let sent = match result {
            Ok(reply) => connection.reply(unique, &reply.parts()),
            Err(error) => {
                refused();
                connection.reply_error(unique, error)
            }
        };
        if let Err(error) = sent
            && error != Errno::NODEV
        {
            refused();
            report!("cannot answer a request ({}): {error}", request.header.opcode);
        }
        injection_point!("server: request answered");
        sent.is_ok()
    };
    // A request that panics would do so again in every new server.
    if catch_unwind(AssertUnwindSafe(|| handlers.handle(&request, reply, others, send))).is_err() {
        refused();
        let _ = connection.reply_error(unique, Errno::IO);
        return None;
    }
    waits
}
