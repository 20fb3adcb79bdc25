//! Bytes of released pages that are on their way from device memory to their slots.
//!
//! ```text
//!   keep ── list and descriptors of chunks to the supervisor ── commit (handoff.rs) ── start
//!                    │                                                                   │ device process copies
//!                    │ the server is killed                                              v
//!                    └──> next server: adopt ── committed? ── starts again ──────────> Drop at the supervisor, then
//!                                                   └ no: Drop                         the file's requests go on
//! ```
//!
//! The list says which bytes of which chunk belong where in the state memory. It is a memory file that the supervisor
//! keeps, as it keeps the descriptors, so what is committed is complete there. Until the bytes have arrived the file's
//! pages are used by nothing ([`File::pages`](crate::files::File::pages)): so no slot of the list has become another page's
//! when a second server copies again.
//!
//! If the device cannot give the bytes, they are zeros from then on: the next fsync fails with EIO, once, and the log says so.
//!
//! Known flaw: all requests of the file wait until the last byte is there, not only those for bytes that are not; while
//! they do, they occupy threads of the server.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use spinio_pagecache::PAGE;
use spinio_pagecache::messages::{HandOver, ReleaseId};
use spinio_sys::injection_point;

use crate::content::Content;
use crate::device_process::{CopyRange, DeviceChunk, DeviceProcess, Target};
use crate::files::File;
use crate::link::{Link, Message, Use};
use crate::lock::lock;
use crate::report::report;
use crate::state::StateMemory;
use crate::threads::spawn;

/// Chunks that are copied at the same time.
const WIDTH: usize = 6;
/// Words of a list before its ranges, and of a range.
const HEAD: usize = 5;
const RANGE: usize = 4;
/// Bits of a number of the supervisor's that say which chunk of an arrival it is; 0 is the list.
const CHUNK_BITS: u32 = 8;

/// What a release has handed over.
pub(crate) struct Arrival {
    id: ReleaseId,
    node: u64,
    device: [u8; 16],
    chunks: Vec<DeviceChunk>,
    /// Of each chunk.
    ranges: Vec<Vec<CopyRange>>,
}

/// The same, once the supervisor keeps it. Dropped, it is not kept any more.
pub(crate) struct Kept {
    arrival: Arrival,
    number: u64,
    arrivals: Arc<Arrivals>,
}

/// The arrivals of a mount.
#[derive(Debug)]
pub(crate) struct Arrivals {
    devices: Arc<DeviceProcess>,
    slots: Target,
    state: OwnedFd,
    supervisor: Link,
}

impl Arrival {
    pub(crate) fn new(
        id: ReleaseId,
        node: u64,
        device: [u8; 16],
        chunks: Vec<DeviceChunk>,
        ranges: Vec<Vec<CopyRange>>,
    ) -> Arrival {
        Arrival { id, node, device, chunks, ranges }
    }

    fn to_words(&self) -> Vec<u64> {
        let half = |at: usize| self.device[at..at + 8].try_into().map_or(0, u64::from_ne_bytes);
        let mut words = vec![self.id, self.node, half(0), half(8), self.chunks.len() as u64];
        words.extend(self.chunks.iter().map(DeviceChunk::len));
        for (chunk, ranges) in (0..).zip(&self.ranges) {
            words.extend(ranges.iter().flat_map(|range| [chunk, range.from, range.to, range.len]));
        }
        words
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.arrivals.forget(self.number, self.arrival.chunks.len());
    }
}

impl Arrivals {
    /// None yet. `supervisor`: the link to it.
    pub(crate) fn new(
        state: &StateMemory,
        supervisor: Link,
        devices: Arc<DeviceProcess>,
    ) -> Result<Arc<Arrivals>, Errno> {
        let clone = || state.as_fd().try_clone_to_owned().map_err(|_| Errno::MFILE);
        let slots = devices.target(clone()?);
        Ok(Arc::new(Arrivals { devices, slots, state: clone()?, supervisor }))
    }

    /// A release of this device will be handed over soon.
    pub(crate) fn prepare(&self, device: [u8; 16]) {
        self.devices.prepare(device);
    }

    /// The chunks of a message, if the device process can use them.
    pub(crate) fn import(&self, part: &HandOver, fds: Vec<OwnedFd>) -> Result<Vec<DeviceChunk>, Errno> {
        let last = fds.len().saturating_sub(1);
        let import = |(at, fd)| {
            let pages = if at == last { part.last_pages } else { part.chunk_pages };
            let chunk = self.devices.chunk(part.device, fd, u64::from(pages) * PAGE as u64);
            self.devices.import(&chunk).map(|()| chunk)
        };
        fds.into_iter().enumerate().map(import).collect()
    }

    /// Has the supervisor keep it. What it has got it keeps also if this server dies now.
    pub(crate) fn keep(self: &Arc<Arrivals>, arrival: Arrival) -> Result<Kept, Errno> {
        let mut number = [0; 8];
        getrandom(&mut number, GetRandomFlags::empty())?;
        let number = u64::from_ne_bytes(number) & u64::MAX << CHUNK_BITS;
        let list = rustix::fs::memfd_create("spinio-gaia-list", MemfdFlags::CLOEXEC)?;
        let bytes: Vec<u8> = arrival.to_words().into_iter().flat_map(u64::to_ne_bytes).collect();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            rest = &rest[rustix::io::retry_on_intr(|| rustix::io::write(&list, rest))?..];
        }
        let kept = Kept { arrival, number, arrivals: Arc::clone(self) };
        for (chunk, at) in kept.arrival.chunks.iter().zip(1..) {
            self.supervisor.send(Message::Keep(Use::Handed, number | at), &[chunk.fd()])?;
        }
        // The last: it makes the others count.
        self.supervisor.send(Message::Keep(Use::Handed, number), &[list.as_fd()])?;
        Ok(kept)
    }

    /// The list first, without which the chunks do not count.
    fn forget(&self, number: u64, chunks: usize) {
        for at in 0..=chunks as u64 {
            // Without a supervisor there will be no other server.
            let _ = self.supervisor.send(Message::Drop(Use::Handed, number | at), &[]);
        }
    }

    /// Copies what was committed. [`File::begin_arrival`] was called.
    pub(crate) fn start(self: &Arc<Arrivals>, kept: Kept, file: Arc<File>) {
        let slot = Arc::new(Mutex::new(Some(kept)));
        let (theirs, for_thread) = (Arc::clone(&slot), Arc::clone(&file));
        let take = |slot: &Mutex<Option<Kept>>| lock(slot).take();
        let spawned = spawn("gaia-arrive", move || {
            if let Some(kept) = take(&theirs) {
                arrive(kept, &for_thread);
            }
        });
        if spawned.is_err()
            && let Some(kept) = take(&slot)
        {
            arrive(kept, &file);
        }
    }

    /// What an earlier server has left with the supervisor. Called before a file is used.
    pub(crate) fn adopt(self: &Arc<Arrivals>, handed: Vec<(u64, OwnedFd)>, content: &Content) {
        let mut groups: BTreeMap<u64, BTreeMap<u64, OwnedFd>> = BTreeMap::new();
        for (number, fd) in handed {
            let within = (1 << CHUNK_BITS) - 1;
            groups.entry(number & !within).or_default().insert(number & within, fd);
        }
        for (number, mut fds) in groups {
            let (list, chunks) = (fds.remove(&0), fds.len());
            let arrival = list.and_then(|list| self.parse(&list, fds.into_values().collect()));
            let files = content.files();
            // The id is the client's, which may have used it before. The slots say whose they are.
            let is_theirs = |arrival: &Arrival| {
                let mut ranges = arrival.ranges.iter().flatten();
                files.slots().was_committed(arrival.id)
                    && ranges.all(|range| {
                        let end = range.to.checked_add(range.len);
                        end.is_some_and(|end| content.has_snapshots(range.to..end, arrival.node))
                    })
            };
            let committed = arrival.filter(is_theirs);
            let file = committed.as_ref().and_then(|arrival| files.hold_now(arrival.node).file().cloned());
            let (Some(arrival), Some(file)) = (committed, file) else {
                self.forget(number, chunks);
                continue;
            };
            file.begin_arrival();
            self.start(Kept { arrival, number, arrivals: Arc::clone(self) }, file);
        }
    }

    /// A list and its chunks; `None`: they are not complete.
    fn parse(&self, list: &OwnedFd, fds: Vec<OwnedFd>) -> Option<Arrival> {
        let len = rustix::fs::fstat(list).ok()?.st_size as usize;
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            match rustix::io::retry_on_intr(|| rustix::io::pread(list, &mut bytes[done..], done as u64)) {
                Ok(got @ 1..) => done += got,
                _ => return None,
            }
        }
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        let (head, rest) = words.split_first_chunk::<HEAD>()?;
        let [id, node, low, high, count] = *head;
        let (lens, rest) = rest.split_at_checked(usize::try_from(count).ok()?)?;
        if fds.len() != lens.len() {
            return None;
        }
        let mut device = [0; 16];
        device[..8].copy_from_slice(&low.to_ne_bytes());
        device[8..].copy_from_slice(&high.to_ne_bytes());
        let chunks = fds.into_iter().zip(lens).map(|(fd, len)| self.devices.chunk(device, fd, *len)).collect();
        let mut ranges = vec![Vec::new(); lens.len()];
        for [chunk, from, to, len] in rest.as_chunks::<RANGE>().0 {
            ranges.get_mut(usize::try_from(*chunk).ok()?)?.push(CopyRange { from: *from, to: *to, len: *len });
        }
        Some(Arrival { id, node, device, chunks, ranges })
    }

    fn copy(&self, arrival: &Arrival) -> Result<(), Errno> {
        let (next, done) = (AtomicUsize::new(0), Mutex::new(Ok(())));
        let work = || loop {
            let at = next.fetch_add(1, Relaxed);
            let (Some(chunk), Some(ranges)) = (arrival.chunks.get(at), arrival.ranges.get(at)) else { return };
            let copied = self.devices.copy(chunk, &self.slots, ranges);
            if copied.is_err() {
                *lock(&done) = copied;
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..WIDTH.min(arrival.chunks.len()) {
                // Without it the others do its part.
                let _ = std::thread::Builder::new().name("gaia-arrive".to_owned()).spawn_scoped(scope, work);
            }
            work();
        });
        done.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes are lost: what slots had before must not be seen.
    fn clear(&self, arrival: &Arrival) {
        for range in arrival.ranges.iter().flatten() {
            let (mut at, end) = (range.to, range.to + range.len);
            while at < end {
                let zeros = &[0; 64 * PAGE][..(end - at).min(64 * PAGE as u64) as usize];
                match rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.state, zeros, at)) {
                    Ok(written @ 1..) => at += written as u64,
                    // The slots cannot be written: no program may see them. The next server tries it again.
                    _ => std::process::exit(1),
                }
            }
        }
    }
}

fn arrive(kept: Kept, file: &File) {
    injection_point!("server: bytes begin to arrive");
    let (arrivals, node) = (Arc::clone(&kept.arrivals), kept.arrival.node);
    let copied = arrivals.copy(&kept.arrival);
    if let Err(error) = copied {
        report!("released bytes of node {node} are lost, since the device cannot give them: {error}");
        arrivals.clear(&kept.arrival);
    }
    injection_point!("server: bytes arrived");
    // Before the slots can become other pages'.
    drop(kept);
    file.end_arrival(copied.is_err());
}
