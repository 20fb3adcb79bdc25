//! The invalidator: a process that makes the kernel drop pages (INVAL), for the server.
//!
//! INVAL of a dirty page waits, and cannot be interrupted, until a server has answered its WRITE. A server that is killed
//! while one of its own threads waits like that would not end before another server answers, and the supervisor starts
//! none before it has ended, since a thread of the old one may still be writing to a file. So no thread of a server
//! waits there: this process does, which outlives servers and does nothing else.
//!
//! ```text
//!   server ── node, runs of bytes, one end of a socket ──> any thread of the invalidator ── INVAL ──> kernel
//!          <────────────── one byte through that socket ── when all have returned
//! ```
//!
//! It also asks the kernel to forget nodes, which may wait likewise: a message for node 0, with their numbers.
//!
//! Known flaw: if supervisor and server are killed while it waits, the mount stays until `umount -f`: only then the
//! kernel gives up the WRITE.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::io::Errno;
use spinio_fuse::Connection;
use spinio_pagecache::{PAGE, offset_of};
use spinio_sys::injection_point;
use spinio_sys::linux::packets::{self, Wait};

use crate::report::report;

/// Requests at a time; one waits for the dirty pages of its own file only.
const THREADS: usize = 4;
/// Runs in one message.
const RUNS: usize = 256;
/// A node, then an offset and a length for each run.
const MESSAGE: usize = 8 + RUNS * 16;

/// In place of a node: the rest are nodes to forget.
const NO_NODE: u64 = 0;
/// Answers.
const DONE: u8 = 1;
const NOT_DONE: u8 = 2;

/// How long to wait for descriptors or memory.
const SHORTAGE: Duration = Duration::from_millis(10);

/// The server's side.
#[derive(Debug)]
pub(crate) struct Invalidator {
    requests: OwnedFd,
    /// Calls, and the pages that they were for.
    counters: [AtomicU64; 2],
}

impl Invalidator {
    /// `requests`: a socket whose other end the process has.
    pub(crate) fn new(requests: OwnedFd) -> Invalidator {
        Invalidator { requests, counters: Default::default() }
    }

    /// Drops pages of a node from the kernel's page cache, after dirty ones were written back. No thread that handles
    /// requests may call it, nor one with a lock that such a thread needs.
    ///
    /// Without the process the server ends: the next one gets a new process, and invalidates what is committed.
    pub(crate) fn invalidate(&self, node: u64, runs: &[Range<u64>]) {
        if runs.is_empty() {
            return;
        }
        self.counters[0].fetch_add(1, Relaxed);
        self.counters[1].fetch_add(runs.iter().map(|run| run.end - run.start).sum(), Relaxed);
        for runs in runs.chunks(RUNS) {
            while let Err(error) = self.request(node, runs) {
                if !matches!(error, Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) {
                    report!("the process that invalidates pages has ended ({error}): starting again");
                    std::process::exit(1);
                }
                std::thread::sleep(SHORTAGE);
            }
        }
    }

    /// Calls of [`Invalidator::invalidate`] with pages, and these pages.
    pub(crate) fn counters(&self) -> (u64, u64) {
        (self.counters[0].load(Relaxed), self.counters[1].load(Relaxed))
    }

    /// Asks the kernel to forget nodes that no program uses; as many as fit into a message. False: it cannot.
    pub(crate) fn prune(&self, nodes: &[u64]) -> bool {
        let mut message = NO_NODE.to_ne_bytes().to_vec();
        message.extend(nodes.iter().flat_map(|node| node.to_ne_bytes()));
        match self.send(&message) {
            Ok(done) => done == DONE,
            // Descriptors or memory are short, or the process has ended: then this one ends soon.
            Err(_) => {
                std::thread::sleep(SHORTAGE);
                true
            }
        }
    }

    fn request(&self, node: u64, runs: &[Range<u64>]) -> Result<(), Errno> {
        let mut message = Vec::with_capacity(MESSAGE);
        message.extend(node.to_ne_bytes());
        for (offset, len) in runs.iter().map(byte_range) {
            message.extend(offset.to_ne_bytes());
            message.extend(len.to_ne_bytes());
        }
        self.send(&message).map(drop)
    }

    /// Sends a message, and waits for the answer.
    fn send(&self, message: &[u8]) -> Result<u8, Errno> {
        let (ours, theirs) = packets::pair()?;
        packets::send(&self.requests, message, &[theirs.as_fd()], Wait::Yes)?;
        drop(theirs);
        injection_point!("server: invalidation asked for");
        let mut done = [0];
        match rustix::io::retry_on_intr(|| rustix::io::read(&ours, &mut done))? {
            1 => Ok(done[0]),
            // The process has ended.
            _ => Err(Errno::PIPE),
        }
    }
}

/// The process: until no server and no supervisor has the other end of the socket.
pub(crate) fn run(device: OwnedFd, requests: OwnedFd) -> Result<(), Errno> {
    let connection = Connection::new(device);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            let body = || while let Some(()) = serve_one(&connection, &requests) {};
            std::thread::Builder::new()
                .name("gaia-inval".to_owned())
                .spawn_scoped(scope, body)
                .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::AGAIN))?;
        }
        Ok(())
    })
}

/// `None` after the last request.
fn serve_one(connection: &Connection, requests: &OwnedFd) -> Option<()> {
    let (mut message, mut reply) = ([0; MESSAGE], Vec::<OwnedFd>::new());
    let received = packets::receive(requests, &mut message, 1, &mut reply, Wait::Yes).ok()?;
    let (node, rest) = message[..received.bytes].split_first_chunk::<8>()?;
    let node = u64::from_ne_bytes(*node);
    let mut done = DONE;
    injection_point!("invalidator: request received");
    if node == NO_NODE {
        let nodes: Vec<u64> = rest.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect();
        if connection.prune(&nodes).is_err() {
            done = NOT_DONE;
        }
    } else {
        for run in rest.chunks_exact(16) {
            let word = |at: usize| run[at..at + 8].try_into().map_or(0, i64::from_ne_bytes);
            drop_pages(connection, node, (word(0), word(8)));
        }
    }
    injection_point!("invalidator: pages invalidated");
    let _ = reply.pop().map(|reply| packets::send(reply, &[done], &[], Wait::Yes));
    Some(())
}

fn drop_pages(connection: &Connection, node: u64, (offset, len): (i64, i64)) {
    match connection.inval_inode(node, offset, len) {
        // ENOENT: it has nothing of the file. The others: it is unmounted.
        Ok(()) | Err(Errno::NOENT | Errno::NODEV | Errno::NOTCONN | Errno::PERM) => {}
        Err(error) => report!("cannot invalidate pages of node {node}: {error}"),
    }
}

fn byte_range(run: &Range<u64>) -> (i64, i64) {
    (offset_of(run.start) as i64, ((run.end - run.start) * PAGE as u64) as i64)
}
