//! Clients: programs that have files of the mount in GPU memory.
//!
//! ```text
//!   ioctl on a file of the mount ──> handler ──> ticket        proves that the client could open the file (tickets.rs)
//!   socket of the mount ──> accept.rs ──> a thread per client  one connection = one map = one owner (client.rs)
//! ```
//!
//! A client can stall its own thread only: no handler waits for it, and while a thread waits for its client it holds no
//! lock.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::SocketAddrUnix;
use spinio_pagecache::messages::{Access, TicketReply, Totals};

use crate::arrivals::Arrivals;
use crate::backing::Backing;
use crate::content::Content;
use crate::invalidator::Invalidator;
use crate::quotas::{Limits, Quotas};
use crate::release_memory::ReleaseMemory;
use crate::state::StateMemory;
use crate::tickets::{Grant, Tickets};
use crate::writers::Writers;

/// What the threads share.
#[derive(Debug)]
pub(crate) struct Clients {
    path: Vec<u8>,
    tickets: Tickets,
    /// Whether INVAL waits until the server has answered the WRITE of a dirty page. Maps, and holes, need that.
    pub(crate) waits_for_writeback: bool,
    pub(crate) quotas: Quotas,
    pub(crate) since: Instant,
    pub(crate) content: Arc<Content>,
    pub(crate) backing: Arc<Backing>,
    pub(crate) kernel: Invalidator,
    pub(crate) writers: Writers,
    pub(crate) release_memory: ReleaseMemory,
    pub(crate) arrivals: Arc<Arrivals>,
    /// The supervisor's counter of servers, for clients.
    pub(crate) servers: OwnedFd,
    /// Servers of the mount before this one.
    pub(crate) replaced: u64,
    /// Releases, pages whose bytes were new, pages merged.
    released: [AtomicU64; 3],
}

impl Clients {
    /// `listener`: the supervisor's listening socket, which tickets name.
    #[expect(clippy::too_many_arguments, reason = "what the threads share")]
    pub(crate) fn new(
        listener: &OwnedFd,
        content: Arc<Content>,
        backing: Arc<Backing>,
        kernel: Invalidator,
        limits: Limits,
        state: &StateMemory,
        servers: OwnedFd,
        arrivals: Arc<Arrivals>,
    ) -> Result<Clients, Errno> {
        let address = SocketAddrUnix::try_from(rustix::net::getsockname(listener)?).map_err(|_| Errno::INVAL)?;
        let path = address.path_bytes().ok_or(Errno::INVAL)?.to_vec();
        let (tickets, quotas) = (Tickets::default(), Quotas::new(limits));
        let since = Instant::now();
        let replaced = state.count_server();
        let writers = Writers::new(replaced == 0);
        let waits_for_writeback = state.negotiated().is_some_and(|negotiated| negotiated.waits_for_writeback());
        // A user's own daemon serves that user only (admission.rs).
        let release_memory = ReleaseMemory::new(content.slots() as usize, rustix::process::geteuid().is_root());
        Ok(Clients {
            path,
            tickets,
            waits_for_writeback,
            quotas,
            since,
            content,
            backing,
            kernel,
            writers,
            release_memory,
            arrivals,
            servers,
            replaced,
            released: Default::default(),
        })
    }

    /// A ticket for a client with an open file.
    ///
    /// # Errors
    /// EPROTONOSUPPORT: the Linux kernel's write-back outlives the page, so that CPU stores would be lost.
    pub(crate) fn ticket(&self, node: u64, access: Access, user: u32) -> Result<TicketReply, Errno> {
        if !self.waits_for_writeback {
            return Err(Errno::PROTONOSUPPORT);
        }
        let ticket = self.tickets.give(Grant { node, access }, user)?;
        TicketReply::new(ticket, &self.path).ok_or(Errno::NAMETOOLONG)
    }

    /// A release was committed.
    pub(crate) fn count_release(&self, published: u64, merged: u64) {
        for (counter, more) in self.released.iter().zip([1, published, merged]) {
            counter.fetch_add(more, Relaxed);
        }
    }

    /// Counters since this server started.
    pub(crate) fn totals(&self) -> Totals {
        let [commits, published, merged] = self.released.each_ref().map(|counter| counter.load(Relaxed));
        let (invalidations, invalidated) = self.kernel.counters();
        let from_devices = self.content.lent().pages();
        Totals { commits, published, merged, invalidations, invalidated, from_devices }
    }

    pub(crate) fn tickets(&self) -> &Tickets {
        &self.tickets
    }
}
