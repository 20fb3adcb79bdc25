//! One client: a map and its owner, from hello to the end of the connection.
//!
//! Bytes of pages go through the window, a sealed memory file of two pages for each page of the map, and a stage. The server reads
//! and writes it with system calls, never through a mapping, and copies a page before it looks at it: the client may
//! change it at any time. What a client may do follows from its ticket alone.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, MutexGuard};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use spinio_pagecache::messages::{
    self, Access, Fill, MAX_MESSAGE, MAX_RUNS, MapKind, ReleaseId, Reply, Request, Run, STAGE, Source, Ticket,
};
use spinio_pagecache::{self as pagecache, OwnerId, PAGE, PeerCopy};
use spinio_sys::injection_point;
use spinio_sys::linux::packets::{self, Wait};

use crate::admission::Peer;
use crate::channel::{Received, receive_in_time, refuse, send};
use crate::clients::Clients;
use crate::draft::{CONTINUE_WITHIN, Draft, Part};
use crate::file_backing::{self, FileBacking, errno};
use crate::files::{self, File, Use};
use crate::quotas::Counted;
use crate::release_memory::OfUser;
use crate::status;
use crate::tickets::Grant;

/// Pages in the window for one reply.
const BATCH: u64 = 2048;
/// Pages in one reply, and so in one read of the client from the file into device memory: 64 MiB are copied through bounce
/// buffers. A longer read registers the page cache with the driver, which costs more than it saves where each page is
/// read once: the first acquire of 1 GiB on an H200 took 44 ms with 64 MiB and 58 to 68 ms with 256 MiB.
const REPLY: u64 = 16 << 10;
/// So many pages that are copied from another device count as one of those, 16 GiB in one reply: they pass no bounce buffers.
/// Before each reply the copies are waited for, and meanwhile the other map is not used.
const PEER_PAGES: u64 = 256;
/// A run of fewer pages is not copied from another device, whose memory has to be mapped for it.
const LEAST_FROM_PEER: u64 = 256;
/// Owners are counted from 1.
const NO_OWNER: OwnerId = OwnerId(0);
/// Runs of pages, and pages that have changed, that are planned while the lock of the file is held. The server holds two
/// copies of each of the latter at most, and so many slots that would be free otherwise.
const STEP: usize = 1024;

/// Why a request is not answered.
pub(crate) enum Failure {
    /// It changed nothing.
    Refused(Errno),
    /// Now the server does not know what the client has of its pages: it is told why, and the connection ends.
    Broken(Errno),
    /// The connection ends, as if the server had died.
    Ended,
}

impl From<Errno> for Failure {
    fn from(error: Errno) -> Failure {
        Failure::Refused(error)
    }
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// A request for a map.
pub(crate) struct Hello {
    pub(crate) ticket: Ticket,
    pub(crate) access: Access,
    /// Pages of the file.
    pub(crate) first: u64,
    pub(crate) pages: u64,
    pub(crate) kind: MapKind,
    pub(crate) peer: Peer,
}

/// Serves a client until it ends the connection, or sends what no client sends.
pub(crate) fn serve(all: &Clients, socket: &OwnedFd, hello: &Hello, mut counted: Counted<'_>) {
    let Hello { ticket, access, first, pages, kind, peer } = *hello;
    let Some(grant) = all.tickets().take(&ticket) else {
        // Of a server that has ended, or used twice: the client asks for another.
        let _ = send(socket, |out| refuse(out, Errno::STALE));
        return;
    };
    let client = if access == Access::Write && grant.access == Access::Read {
        Err(Errno::ACCESS)
    } else if !counted.is_within() {
        Err(Errno::USERS)
    } else if !counted.map(pages) {
        Err(Errno::NOMEM)
    } else {
        Client::new(all, &grant, access, first..first + pages, (peer, kind))
    };
    let mut client = match client {
        Ok(client) => client,
        Err(error) => {
            let _ = send(socket, |out| refuse(out, error));
            return;
        }
    };
    injection_point!("server: map made");
    let _ = set_socket_timeout(socket, Timeout::Recv, None);
    // A client that reads no replies would keep what its release has.
    let _ = set_socket_timeout(socket, Timeout::Send, Some(CONTINUE_WITHIN));
    if client.say_hello(socket).is_err() {
        return;
    }
    injection_point!("server: hello answered");
    let (mut buffer, mut limited, mut descriptors) = (vec![0; MAX_MESSAGE + 1], false, Vec::new());
    loop {
        let bytes = match receive_in_time(socket, &mut buffer, &mut descriptors) {
            Received::Message(bytes) => bytes,
            // Nothing of it is done, so its epoch goes on: an ordinary release takes no descriptors.
            Received::WithoutDescriptors => {
                descriptors.clear();
                if send(socket, |out| refuse(out, Errno::NFILE)).is_err() {
                    return;
                }
                continue;
            }
            Received::Nothing => {
                client.expire();
                let _ = set_socket_timeout(socket, Timeout::Recv, None);
                limited = false;
                continue;
            }
            Received::End => return,
        };
        let Ok(request) = messages::parse_request(bytes) else { return };
        injection_point!("server: client's request received");
        let mut out = Vec::new();
        let (error, ends) = match client.answer(request, std::mem::take(&mut descriptors), &mut out) {
            Ok(()) => (None, false),
            Err(Failure::Refused(error)) => (Some(error), false),
            Err(Failure::Broken(error)) => (Some(error), true),
            Err(Failure::Ended) => return,
        };
        if let Some(error) = error {
            out.clear();
            refuse(&mut out, error);
        }
        if !out.is_empty() && send(socket, |message| message.append(&mut out)).is_err() || ends {
            return;
        }
        injection_point!("server: client's request answered");
        let unfinished = client.release.is_some();
        if unfinished != limited {
            let _ = set_socket_timeout(socket, Timeout::Recv, unfinished.then_some(CONTINUE_WITHIN));
            limited = unfinished;
        }
    }
}

/// A map.
pub(crate) struct Client<'a> {
    pub(crate) all: &'a Clients,
    pub(crate) file: Use,
    pub(crate) owner: OwnerId,
    pub(crate) access: Access,
    /// Pages of the file.
    pub(crate) pages: Range<u64>,
    pub(crate) backing: OwnedFd,
    pub(crate) window: Arc<OwnedFd>,
    /// What the acquire has not planned yet.
    rest: Range<u64>,
    writing: Access,
    /// False: the client overwrites what it has not.
    fetch: bool,
    /// The client takes pages from the mount, as the Linux kernel has them.
    in_place: bool,
    /// What the client must fetch and was not told yet.
    queue: VecDeque<pagecache::Fill>,
    /// What it was told and has not confirmed, and what is copied from another map.
    told: Vec<(Range<u64>, Option<PeerCopy>)>,
    /// The maps of its program from which it can copy.
    peers: Vec<OwnerId>,
    /// Of its user, for releases.
    pub(crate) memory: OfUser,
    pub(crate) release: Option<Draft<'a>>,
    /// A release that the client did not continue in time.
    pub(crate) expired: Option<ReleaseId>,
    /// The device whose memory it has handed over.
    pub(crate) handed_from: Option<[u8; 16]>,
}

impl Drop for Client<'_> {
    fn drop(&mut self) {
        self.queue.clear();
        self.file.lent().end(self.owner, &self.pages);
        self.file.pages_now().drop_owner(self.owner);
        self.file.holders().remove(&self.owner);
    }
}

impl<'a> Client<'a> {
    fn new(
        all: &'a Clients,
        grant: &Grant,
        access: Access,
        pages: Range<u64>,
        holder: (Peer, MapKind),
    ) -> std::result::Result<Client<'a>, Errno> {
        let window = Arc::new(window(pages.end - pages.start)?);
        let node = grant.node;
        // For the owner's own reads too.
        let backing = all.backing.open_for_client(node, grant.access == Access::Write)?;
        let files = all.content.files();
        let (file, owner) = (files.enter(node), files.new_owner());
        file.counters()?;
        all.writers.tell(&file);
        let memory = all.release_memory.of_user(holder.0.user);
        file.holders().insert(owner, holder);
        file.pages_now().add_owner(owner, pages.clone());
        let (rest, writing) = (0..0, Access::Read);
        let (fetch, release, expired) = (true, None, None);
        let (queue, told, peers) = (VecDeque::new(), Vec::new(), Vec::new());
        Ok(Client {
            all,
            file,
            owner,
            access,
            pages,
            backing,
            window,
            rest,
            writing,
            fetch,
            in_place: false,
            queue,
            told,
            peers,
            memory,
            release,
            expired,
            handed_from: None,
        })
    }

    pub(crate) fn size(&self) -> std::result::Result<u64, Errno> {
        Ok(rustix::fs::fstat(&self.backing)?.st_size as u64)
    }

    fn say_hello(&self, socket: &OwnedFd) -> std::result::Result<(), Errno> {
        let mut out = Vec::new();
        let file = self.all.content.files().nonce().wrapping_add(self.file.node);
        Reply::Mapped { owner: self.owner.0, size: self.size()?, file }.encode(&mut out);
        let counters = self.file.counters()?.as_fd();
        let descriptors = [self.window.as_fd(), self.backing.as_fd(), counters, self.all.servers.as_fd()];
        packets::send(socket, &out, &descriptors, Wait::Yes)
    }

    fn answer(&mut self, request: Request<'_>, mut fds: Vec<OwnedFd>, out: &mut Vec<u8>) -> Result<()> {
        if !matches!(request, Request::Release { .. }) || self.file.is_gone() {
            self.release = None;
        }
        if self.file.is_gone() {
            return Err(Failure::Refused(Errno::STALE));
        }
        // There was no memory for its bases.
        if !self.file.pages_now().is_owner(self.owner) {
            return Err(Failure::Ended);
        }
        match request {
            Request::Hello { .. } | Request::Status | Request::WriteOut | Request::Explain { .. } => {
                Err(Failure::Refused(Errno::PROTO))
            }
            Request::Acquire { first, pages, access, fetch, peers } => {
                self.acquire(first, pages, access, fetch)?;
                self.peers = self.peers_of(&peers);
                let file = self.file.share();
                let _settled = self.in_place.then(|| self.settled(&file));
                self.tell(out).map_err(broken)
            }
            Request::Filled => {
                let file = self.file.share();
                let _settled = self.in_place.then(|| self.settled(&file));
                self.filled(&[]).and_then(|()| self.tell(out)).map_err(broken)
            }
            Request::FilledBut { runs } => {
                let refused = runs.iter().map(|run| self.file_pages(run.first, run.count.into()));
                let refused = refused.collect::<Result<Vec<_>>>()?;
                self.filled(&refused).and_then(|()| self.tell(out)).map_err(broken)
            }
            Request::Release { id, first, pages, last, at, total, runs } => {
                let range = self.file_pages(first, pages.into())?;
                self.release(&Part { id, range, last, at, total, runs }, out)
            }
            Request::HandOver { part, runs } => self.hand_over(&part, runs, fds, out),
            Request::Drop { first, pages, open } => {
                let range = self.file_pages(first, pages.into())?;
                if !open {
                    self.file.lent().end(self.owner, &range);
                }
                self.forget(range, open)?;
                injection_point!("server: pages dropped");
                Reply::Dropped.encode(out);
                Ok(())
            }
            Request::Lend { first, pages, bytes, device } => {
                let range = self.file_pages(first, pages.into())?;
                let fd = fds.pop().filter(|_| u64::from(pages) * PAGE as u64 <= bytes).ok_or(Errno::INVAL)?;
                let lent = self.all.content.lent();
                lent.lend(&self.file, self.owner, range, lent.chunk(device, fd, bytes), self.backing.as_fd())?;
                Reply::Lent.encode(out);
                Ok(())
            }
            Request::Was { id } => {
                // What was committed counts once programs see it.
                let _release = self.file.lock_release();
                files::settle(&self.file, &self.all.kernel);
                Reply::Was { committed: self.all.content.files().slots().was_committed(id) }.encode(out);
                Ok(())
            }
            Request::Stats => {
                Reply::Stats(status::file_stats(&self.file.pages_now())).encode(out);
                Ok(())
            }
        }
    }

    /// Pages of the map as pages of the file.
    pub(crate) fn file_pages(&self, first: u64, pages: u64) -> Result<Range<u64>> {
        let start = self.pages.start + first;
        let end = start + pages;
        if end <= self.pages.end { Ok(start..end) } else { Err(Failure::Refused(Errno::INVAL)) }
    }

    /// What an error of the page table means for a request that it did not execute.
    pub(crate) fn refusal(&self, error: &pagecache::Error) -> Failure {
        if self.file.pages_now().is_owner(self.owner) { Failure::Refused(errno(error)) } else { Failure::Ended }
    }

    fn acquire(&mut self, first: u64, pages: u64, access: Access, fetch: bool) -> Result<()> {
        let range = self.file_pages(first, pages)?;
        if access == Access::Write && self.access == Access::Read {
            return Err(Failure::Refused(Errno::ACCESS));
        }
        self.writing = access;
        self.in_place = access == Access::Read && !fetch;
        if let (Access::Write, false, Some(device)) = (access, fetch, self.handed_from) {
            // While the program computes: a context takes longer than to copy a GiB.
            self.all.arrivals.prepare(device);
        }
        (self.rest, self.fetch) = (range, fetch || self.in_place);
        // Those of an acquire that the client has not completed are planned again.
        self.queue.clear();
        self.told.clear();
        Ok(())
    }

    /// The owners that a client names as sources: those of its own process, each once; in place of others none, as a fill
    /// names one by its place. No more after the last of them: each is looked up for each run of pages.
    fn peers_of(&self, peers: &[u64]) -> Vec<OwnerId> {
        let holders = self.file.holders();
        let process = |owner: &OwnerId| holders.get(owner).map(|(peer, _)| *peer);
        let own = process(&self.owner);
        let is_own = |peer: &OwnerId| own.is_some() && process(peer) == own;
        let mut named: Vec<OwnerId> = Vec::new();
        for peer in peers.iter().map(|peer| OwnerId(*peer)) {
            named.push(if is_own(&peer) && !named.contains(&peer) { peer } else { NO_OWNER });
        }
        named.truncate(named.iter().rposition(|peer| *peer != NO_OWNER).map_or(0, |last| last + 1));
        named
    }

    /// No release is under way until this is dropped: the kernel has no page that a release has replaced. Else a client
    /// that takes pages from the kernel would take the old one, and the page would count as current.
    fn settled<'f>(&self, file: &'f File) -> MutexGuard<'f, ()> {
        let release = file.lock_release();
        files::settle(file, &self.all.kernel);
        release
    }

    /// The client has what it was told, but for some pages, which were to be copied from another map.
    fn filled(&mut self, refused: &[Range<u64>]) -> Result<()> {
        let told = std::mem::take(&mut self.told);
        let all = told.first().map_or(0, |(run, _)| run.start)..told.last().map_or(0, |(run, _)| run.end);
        let mut pages = self.file.pages_of(&all);
        let confirmed = told.into_iter().try_for_each(|(run, peer)| {
            let mut start = run.start;
            let refused = refused.iter().map(|lost| lost.start.max(run.start)..lost.end.min(run.end));
            let refused = refused.filter(|lost| peer.is_some() && !lost.is_empty());
            for lost in refused.chain(std::iter::once(run.end..run.end)) {
                let had = start..lost.start;
                let again = match peer {
                    Some(copy) => pages.filled_from(self.owner, had, copy)?,
                    None => pages.filled(self.owner, had)?,
                };
                self.queue.extend(again);
                self.queue.extend(pages.not_filled(self.owner, lost.clone())?);
                injection_point!("server: fill confirmed");
                start = lost.end;
            }
            Ok(())
        });
        drop(pages);
        confirmed.map_err(|error| self.refusal(&error))
    }

    /// Plans the next pages of the acquire; false if there are none.
    fn plan(&mut self) -> Result<bool> {
        if self.rest.is_empty() {
            return Ok(false);
        }
        let opened = {
            let rest = self.rest.clone();
            let (mut pages, step) = self.file.pages_for(|pages| {
                let owners = std::iter::once(&self.owner).chain(&self.peers).copied();
                rest.start..pages.part(owners, rest.clone(), STEP)
            });
            self.rest.start = step.end;
            match self.fetch {
                true => {
                    let peers = pagecache::Peers { owners: &self.peers, least: LEAST_FROM_PEER };
                    pages.open_from(&FileBacking(self.backing.as_fd()), self.owner, step, self.writing, peers)
                }
                false => pages.open_overwritten(self.owner, step),
            }
        };
        self.queue.extend(opened.map_err(|e| self.refusal(&e))?);
        injection_point!("server: acquire planned");
        if !self.rest.is_empty() {
            // Handlers want the lock too.
            std::thread::yield_now();
        }
        Ok(true)
    }

    /// Puts the next pages of the acquire into the window, and tells the client.
    fn tell(&mut self, out: &mut Vec<u8>) -> Result<()> {
        let mut list: Vec<Fill> = Vec::new();
        let (mut pages, mut in_window) = (0, 0);
        while pages < REPLY && in_window < BATCH && list.len() < MAX_RUNS {
            let Some(fill) = self.queue.front_mut() else {
                if self.plan()? {
                    continue;
                }
                break;
            };
            let first = fill.pages.start - self.pages.start;
            // The list ascends, as a message must; pages that are fetched again come later.
            if list.last().is_some_and(|Fill { run, .. }| run.first + u64::from(run.count) > first) {
                break;
            }
            let weight = if fill.peer.is_some() { PEER_PAGES } else { 1 };
            let in_file = matches!(fill.source, pagecache::Source::Backing);
            let part = fill.split_to(if in_file { (REPLY - pages) * weight } else { BATCH - in_window });
            if fill.pages.is_empty() {
                self.queue.pop_front();
            }
            let fill = part;
            let count = (fill.pages.end - fill.pages.start) as u32;
            let source = self.put(first, &fill)?;
            pages += u64::from(count).div_ceil(weight);
            in_window += if matches!(source, Source::Window | Source::Patch) { u64::from(count) } else { 0 };
            // A page with a base is open at once, as one that is not fetched: it needs no confirmation.
            if !matches!(source, Source::Patch | Source::Kept) {
                match self.told.last_mut() {
                    Some((run, peer)) if run.end == fill.pages.start && *peer == fill.peer => run.end = fill.pages.end,
                    _ => self.told.push((fill.pages.clone(), fill.peer)),
                }
            }
            match list.last_mut() {
                Some(Fill { run, source: last }) if *last == source && run.first + u64::from(run.count) == first => {
                    run.count += count;
                }
                _ => list.push(Fill { run: Run { first, count }, source }),
            }
        }
        messages::fills(out, self.size()?, &list);
        injection_point!("server: pages in the window");
        Ok(())
    }

    /// Puts the bytes of a fill into the window, if the client cannot read them itself.
    fn put(&self, first: u64, fill: &pagecache::Fill) -> Result<Source> {
        if !fill.fetch {
            return Ok(Source::Kept);
        }
        if self.in_place {
            return Ok(Source::File);
        }
        if let Some(copy) = fill.peer {
            let peer = self.peers.iter().position(|peer| *peer == copy.owner).ok_or(Failure::Ended)?;
            return Ok(Source::Peer(peer as u8));
        }
        let mut bytes = [0; PAGE];
        if !fill.source.copy(&mut bytes) {
            return Ok(Source::File);
        }
        let at = first * PAGE as u64;
        file_backing::write(self.window.as_fd(), at, &bytes)?;
        for page in 1..fill.pages.end - fill.pages.start {
            fill.source.copy_part(page as usize * PAGE, &mut bytes);
            file_backing::write(self.window.as_fd(), at + page * PAGE as u64, &bytes)?;
        }
        let Some(base) = &fill.base else { return Ok(Source::Window) };
        base.copy(&mut bytes);
        let half = (self.pages.end - self.pages.start) * PAGE as u64;
        file_backing::write(self.window.as_fd(), half + at, &bytes)?;
        Ok(Source::Patch)
    }
}

/// A window for a map of this many pages.
fn window(pages: u64) -> std::result::Result<OwnedFd, Errno> {
    let in_pages = pages.checked_mul(2).and_then(|pages| pages.checked_add(STAGE.into()));
    let len = in_pages.and_then(|pages| pages.checked_mul(PAGE as u64)).ok_or(Errno::NOMEM)?;
    let window = rustix::fs::memfd_create("spinio-gaia-window", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&window, len)?;
    rustix::fs::fcntl_add_seals(&window, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(window)
}

/// A step of an acquire has failed, of which pages were planned that the client was not told.
fn broken(failure: Failure) -> Failure {
    match failure {
        Failure::Refused(error) => Failure::Broken(error),
        other => other,
    }
}
