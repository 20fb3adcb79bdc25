//! The socket of the mount: who connects gets a thread. And the threads that need no client.
//!
//! ```text
//!   accept ──> first message ── Hello ───> client.rs    a map
//!                           ├── Status ──> status.rs    what the server holds
//!                           ├── WriteOut > unmount.rs   writes it to the files
//!                           └── Explain ─> explain.rs   where the pages of a file are
//!   gaia-settle     once: invalidates what releases of an earlier server have left
//!   gaia-writeout   every second, as long as a file is mapped or has released pages: writes these to their files
//!   gaia-folios     every second then: splits large folios to which few pages at a time are written
//!   gaia-prune      where there are many: makes the kernel forget nodes
//! ```

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::SocketFlags;
use spinio_pagecache::messages::{self, MAX_MESSAGE, Request};
use spinio_sys::injection_point;

use crate::admission::{Admitted, Refusal, admit};
use crate::channel::{receive, refuse, send};
use crate::client::{self, Hello};
use crate::clients::Clients;
use crate::explain;
use crate::report::report;
use crate::status;
use crate::threads::spawn;
use crate::unmount;

const WRITE_OUT_EVERY: Duration = Duration::from_secs(1);

/// Starts the threads.
pub(crate) fn start(all: &Arc<Clients>, listener: OwnedFd) -> Result<(), Errno> {
    let settle = all.clone();
    spawn("gaia-settle", move || settle.content.files().settle_all(&settle.kernel))?;
    let content = all.content.clone();
    spawn("gaia-writeout", move || {
        loop {
            content.files().wait_for_some();
            std::thread::sleep(WRITE_OUT_EVERY);
            content.write_out();
        }
    })?;
    let content = all.content.clone();
    spawn("gaia-folios", move || {
        loop {
            content.files().wait_for_some();
            std::thread::sleep(WRITE_OUT_EVERY);
            content.files().split_folios();
        }
    })?;
    let prune = all.clone();
    spawn("gaia-prune", move || prune.backing.prune_when_full(|nodes| prune.kernel.prune(nodes)))?;
    let all = all.clone();
    spawn("gaia-accept", move || accept(&all, &listener))
}

fn accept(all: &Arc<Clients>, listener: &OwnedFd) {
    loop {
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => {
                let all = all.clone();
                // If there is no thread for it, the client is disconnected, and tries again.
                let _ = spawn("gaia-client", move || serve(&all, &socket));
            }
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            // No descriptors or memory: those of clients that end will do.
            Err(error) => {
                report!("cannot accept a client: {error}");
                std::thread::sleep(WRITE_OUT_EVERY);
            }
        }
    }
}

fn serve(all: &Clients, socket: &OwnedFd) {
    let Admitted { peer, counted } = match admit(&all.quotas, socket) {
        Ok(admitted) => admitted,
        Err(Refusal::Told(errno)) => {
            let _ = send(socket, |out| refuse(out, errno));
            return;
        }
        Err(Refusal::Closed) => return,
    };
    let mut buffer = vec![0; MAX_MESSAGE + 1];
    match receive(socket, &mut buffer).map(messages::parse_request) {
        Some(Ok(Request::Hello { ticket, access, first, pages, kind })) => {
            injection_point!("server: hello received");
            client::serve(all, socket, &Hello { ticket, access, first, pages, kind, peer }, counted);
        }
        Some(Ok(Request::Status)) => status::serve(all, socket),
        Some(Ok(Request::WriteOut)) => unmount::serve(all, socket),
        Some(Ok(Request::Explain { ticket })) => explain::serve(all, socket, &ticket),
        // Of another version, for example: the client reads ours in the reply.
        Some(Err(_)) => drop(send(socket, |out| refuse(out, Errno::PROTO))),
        _ => {}
    }
}
