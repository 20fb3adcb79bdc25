//! Where the pages of a file are: the answer to `spinio gaia explain`, and the question.
//!
//! A connection that begins with Explain and a ticket gets ranges, the maps of the file, and the end. Who may open the
//! file may ask.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use rustix::io::Errno;
use spinio_pagecache::messages::{
    self, Holder, MAX_RUNS, RangeState, Reply, Request, Run, TICKET_IOCTL, TICKET_REPLY, Ticket, TicketReply,
};
use spinio_pagecache::{CopyState, OwnerId, PAGE, PageInfo};
use spinio_sys::linux;

use crate::channel::{WITHIN, ask, refuse, send};
use crate::clients::Clients;
use crate::files;

/// Steps of a description while the lock of the file is held.
const STEPS: usize = 1024;

/// A range of a file of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExplainedRange {
    /// Its first byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// How its pages are.
    pub state: RangeState,
}

/// A file of a mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExplainedFile {
    /// All of it, in order.
    pub ranges: Vec<ExplainedRange>,
    /// Its maps.
    pub holders: Vec<Holder>,
}

/// Asks the server of the mount that the file is below; `None`: it is below no mount of GAIA.
///
/// # Errors
/// If the server does not answer.
pub fn explain(file: &File) -> io::Result<Option<ExplainedFile>> {
    let Some(ticket) = ticket_if_mounted(file)? else { return Ok(None) };
    let size = file.metadata()?.len();
    let path = PathBuf::from(OsString::from_vec(ticket.path().to_vec()));
    let mut explained = ExplainedFile::default();
    ask(&path, Request::Explain { ticket: ticket.ticket }, WITHIN, |reply| {
        match reply {
            Reply::Explained { ranges } => {
                let in_bytes = ranges.iter().map(|(run, state)| {
                    let offset = run.first * PAGE as u64;
                    let len = (u64::from(run.count) * PAGE as u64).min(size.saturating_sub(offset));
                    ExplainedRange { offset, len, state }
                });
                add_ranges(&mut explained.ranges, in_bytes.filter(|range| range.len > 0));
            }
            Reply::Holder(holder) => explained.holders.push(holder),
            _ => return Err(Errno::PROTO),
        }
        Ok(())
    })?;
    Ok(Some(explained))
}

/// Whether a file is below a mount of GAIA.
///
/// # Errors
/// If the server does not answer.
pub fn is_below_mount(file: &File) -> io::Result<bool> {
    ticket_if_mounted(file).map(|ticket| ticket.is_some())
}

fn ticket_if_mounted(file: &File) -> io::Result<Option<TicketReply>> {
    match ticket(file) {
        Ok(ticket) => Ok(ticket),
        Err(Errno::NOTTY | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::BADF) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Neighbours of different messages may be the same.
fn add_ranges(to: &mut Vec<ExplainedRange>, more: impl Iterator<Item = ExplainedRange>) {
    for range in more {
        match to.last_mut() {
            Some(last) if last.state == range.state && last.offset + last.len == range.offset => last.len += range.len,
            _ => to.push(range),
        }
    }
}

fn ticket(file: &File) -> Result<Option<TicketReply>, Errno> {
    let mut bytes = [0; TICKET_REPLY];
    linux::ioctl_read(file.as_raw_fd(), TICKET_IOCTL, &mut bytes)?;
    Ok(TicketReply::from_bytes(&bytes))
}

/// The server's part.
pub(crate) fn serve(all: &Clients, socket: &OwnedFd, ticket: &Ticket) {
    let Some(grant) = all.tickets().take(ticket) else {
        let _ = send(socket, |out| refuse(out, Errno::STALE));
        return;
    };
    if let Err(error) = send_file(all, socket, grant.node) {
        let _ = send(socket, |out| refuse(out, error));
    }
}

fn send_file(all: &Clients, socket: &OwnedFd, node: u64) -> Result<(), Errno> {
    let file = all.backing.open(node, crate::backing::Access::Read)?;
    let pages = (rustix::fs::fstat(file.as_fd())?.st_size as u64).div_ceil(PAGE as u64);
    // Without the guard, since a client may read slowly; the file is described as it was found.
    let found = all.content.files().hold_now(node).file().cloned();
    let mut totals: BTreeMap<OwnerId, Holder> = BTreeMap::new();
    match &found {
        Some(found) => send_ranges(socket, found, pages, &mut totals)?,
        None => send_runs(socket, &[(0..pages, RangeState::default())])?,
    }
    for (owner, (peer, kind)) in found.iter().flat_map(|found| found.holders().clone()) {
        let of_map = found.as_ref().and_then(|found| {
            let table = found.pages_now();
            Some((table.pages_of(owner)?, table.pages_from_peers(owner)))
        });
        let Some((range, from_peers)) = of_map else { continue };
        let counted = totals.remove(&owner).unwrap_or_default();
        let (first, pages) = (range.start, range.end - range.start);
        let holder = Holder { pid: peer.pid.into(), user: peer.user.into(), first, pages, from_peers, kind, ..counted };
        send(socket, |out| Reply::Holder(holder).encode(out))?;
    }
    Ok(())
}

fn send_ranges(
    socket: &OwnedFd,
    file: &files::File,
    pages: u64,
    totals: &mut BTreeMap<OwnerId, Holder>,
) -> Result<(), Errno> {
    let mut at = 0;
    while at < pages {
        let (runs, end) = file.pages_now().explain(at..pages, STEPS);
        at = end;
        for (run, info) in &runs {
            for (owner, copy) in &info.copies {
                let total = totals.entry(*owner).or_default();
                let count = run.end - run.start;
                match copy {
                    CopyState::Current => total.current += count,
                    CopyState::Stale => total.stale += count,
                    CopyState::Open => total.open += count,
                    CopyState::Filling => {}
                }
            }
        }
        let states: Vec<_> = runs.into_iter().map(|(run, info)| (run, state(&info))).collect();
        send_runs(socket, &states)?;
    }
    Ok(())
}

fn state(info: &PageInfo) -> RangeState {
    let count = |state| info.copies.iter().filter(|(_, copy)| *copy == state).count().min(255) as u8;
    RangeState {
        unwritten: info.unwritten,
        invalidating: info.invalidating,
        current: count(CopyState::Current),
        stale: count(CopyState::Stale),
        open: count(CopyState::Open),
    }
}

fn send_runs(socket: &OwnedFd, runs: &[(Range<u64>, RangeState)]) -> Result<(), Errno> {
    // A run of a message has less than 2^32 pages.
    let parts = runs.iter().flat_map(|(run, state)| {
        let most = u64::from(u32::MAX);
        let starts = (run.start..run.end).step_by(most as usize);
        starts.map(move |first| (Run { first, count: (run.end - first).min(most) as u32 }, *state))
    });
    let parts: Vec<(Run, RangeState)> = parts.collect();
    parts.chunks(MAX_RUNS).try_for_each(|chunk| send(socket, |out| messages::explained(out, chunk)))
}
