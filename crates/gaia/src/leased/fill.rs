//! Fill: new chunks get the bytes of the file, and are handed over to the daemon.
//!
//! ```text
//!   from the file             create, map ── read into all of them ── make read-only ── hand over
//!
//!   from another device       create 1 │ create 2 │     │ hand over 1, create 3 │ ... │ hand over n │ make all read-only
//!   its copies                         │ copy 1         │ copy 2                │ ... │             │
//! ```
//!
//! To make a chunk read-only, CUDA waits for the copies that are under way: 22 ms for 8 GiB chunk by chunk, 1.5 ms after the
//! last copy (benches/gaia/leased_steps.cu). So chunks that were copied are handed over before that. Until the acquire returns, a
//! stray store of this program reaches them.
//!
//! Copies are refused where the devices cannot access each other's memory. Then the first chunks that have not arrived are
//! read from the file, and the others are given back: other processes may read some of them.
//!
//! The daemon names only chunks of the same content, and of the same user: what is copied is as good as what a program of
//! that user could have handed over itself, and is mapped read-only.
//!
//! Known flaw: a chunk that is just being read on the other device is read from the file here too.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::AsFd;

use spinio_device::{ErrorKind, PeerChunk, PeerChunks, PeerError};
use spinio_pagecache::leased_messages::{Content, PeerRefusal, Source};
use spinio_sys::{Errno, linux};

use super::chunks::NewChunk;
use super::connection::Connection;
use super::map::{Map, State};
use crate::owned_fd::OwnedFd;
use crate::{Error, Result};

/// Bytes that are copied from another device together, if they are more than a chunk: for small chunks, of which the calls take longer
/// than the copies.
const GROUP: u64 = 16 << 20;

/// Copies on another device of chunks that are to be filled.
pub(super) struct Copies {
    pub(super) peer: [u8; 16],
    pub(super) descriptors: Vec<OwnedFd>,
}

/// What became of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filled {
    /// All have their bytes, or others may fill them.
    All,
    /// The device had no memory for all, and the daemon has made room.
    RoomWasMade,
    /// The file has less bytes than its size says: it was just truncated, or is no file of bytes, as in /sys.
    EndsEarly,
}

/// Chunks that the daemon expects.
pub(super) struct Fill<'a> {
    map: &'a Map,
    state: &'a mut State,
    content: Content,
    /// Those that were not handed over yet.
    chunks: Range<u64>,
    /// The first of them, mapped for stores.
    created: VecDeque<NewChunk>,
    /// Those that were handed over and are mapped for stores still.
    unsealed: Range<u64>,
    /// The device has no memory for the one after those.
    full: bool,
}

impl<'a> Fill<'a> {
    pub(super) fn new(map: &'a Map, state: &'a mut State, content: Content, chunks: Range<u64>) -> Fill<'a> {
        let unsealed = chunks.start..chunks.start;
        Fill { map, state, content, chunks, created: VecDeque::new(), unsealed, full: false }
    }

    /// Fills them, as far as that is possible.
    pub(super) fn run(mut self, copies: Option<&Copies>) -> Result<Filled> {
        let is_whole = match copies {
            None => self.read(self.chunks.end - self.chunks.start, Source::File)?,
            Some(copies) => match self.copy(copies)? {
                None => true,
                Some(refusal) => {
                    self.state.info.peer_refused = refusal.number();
                    self.read(self.content.fills(), Source::Refused(refusal))?
                }
            },
        };
        Ok(match self.give_back()? {
            _ if !is_whole => Filled::EndsEarly,
            true => Filled::All,
            false => Filled::RoomWasMade,
        })
    }

    /// Copies them from another device, and hands them over. Why not all.
    fn copy(&mut self, copies: &Copies) -> Result<Option<PeerRefusal>> {
        let Some(memory) = self.map.device.peer_memory() else { return Ok(Some(PeerRefusal::NoAccess)) };
        let group = (GROUP / self.content.chunk_bytes()).max(1);
        let (first, mut failed) = (self.chunks.start, Ok(()));
        let mut next = |arrived: usize| {
            let group = self
                .hand_over(first + arrived as u64 * group - self.chunks.start, Source::Peer)
                .and_then(|()| self.create(group));
            let created = group.inspect_err(|e| failed = Err(e.clone())).ok().filter(|created| !created.is_empty())?;
            let to = self.state.chunks.address(created.start * self.content.chunk_bytes());
            let descriptors = &copies.descriptors[(created.start - first) as usize..];
            let lens = created.map(|chunk| self.content.len_of(chunk));
            let chunks = descriptors.iter().zip(lens).map(|(fd, len)| PeerChunk { fd: fd.as_fd(), len }).collect();
            Some(PeerChunks { chunks, to })
        };
        let copied = memory.copy_from_peer(copies.peer, &mut next);
        failed?;
        if copied.is_ok() {
            self.hand_over(self.created.len() as u64, Source::Peer)?;
        }
        self.seal()?;
        match copied {
            Ok(()) => Ok(None),
            Err(PeerError::NoDevice) => Ok(Some(PeerRefusal::NoDevice)),
            Err(PeerError::NoAccess) => Ok(Some(PeerRefusal::NoAccess)),
            Err(PeerError::Import(_)) => Ok(Some(PeerRefusal::Import)),
            Err(PeerError::Copy(_)) => Ok(Some(PeerRefusal::Copy)),
        }
    }

    /// Reads the file into the first of them, and hands those over. False: it ends before its size.
    fn read(&mut self, most: u64, source: Source) -> Result<bool> {
        self.create(most.saturating_sub(self.created.len() as u64))?;
        let count = most.min(self.created.len() as u64);
        let bytes = self.bytes_of(count);
        let mut at = bytes.start;
        while at < bytes.end {
            match self.map.file.read(at, self.map.device, self.state.chunks.address(at), bytes.end - at)? {
                0 => return Ok(false),
                got => at += got,
            }
        }
        self.state.info.bytes_from_file += bytes.end - bytes.start;
        self.hand_over(count, source).map(|()| true)
    }

    /// Allocates and maps the next ones, until the device has no memory left; which.
    fn create(&mut self, most: u64) -> Result<Range<u64>> {
        let start = self.chunks.start + self.created.len() as u64;
        let mut created = start..start;
        while !self.full && created.end < self.chunks.end.min(start.saturating_add(most)) {
            match self.state.chunks.create(self.content, created.end) {
                Ok(mut new) => {
                    self.state.chunks.map_new(self.content, created.end, &mut new)?;
                    self.created.push_back(new);
                    created.end += 1;
                }
                Err(e) if e.kind == ErrorKind::NoMemory => self.full = true,
                Err(e) => return Err(Error::device(e, "allocate a chunk of the file")),
            }
        }
        Ok(created)
    }

    /// Hands over the first `count`, which have their bytes. Those that were copied stay mapped for stores until [`Fill::seal`].
    fn hand_over(&mut self, count: u64, source: Source) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let bytes = self.bytes_of(count);
        let chunks = self.chunks.start..self.chunks.start + count;
        let (tid, id) = (linux::gettid(), self.content.id);
        let fds: Vec<_> = chunks.clone().zip(self.created.iter().map(NewChunk::raw_fd)).collect();
        let hand_over = move |connection: &mut Connection| {
            fds.into_iter().map(|(chunk, fd)| connection.filled(id, chunk, source, tid, fd)).collect::<Result<Vec<_>>>()
        };
        if source != Source::Peer {
            self.state.chunks.seal(self.content, chunks.clone())?;
        }
        let kept = self.map.link.run(hand_over)?;
        self.created.drain(..count as usize);
        self.chunks.start += count;
        if source == Source::Peer {
            self.unsealed.end = chunks.end;
            self.state.info.bytes_from_peer += bytes.end - bytes.start;
        }
        for (chunk, _) in chunks.zip(kept).filter(|(_, kept)| !kept) {
            if source == Source::Peer {
                self.seal_before(chunk)?;
            }
            self.state.chunks.discard(self.content, chunk);
        }
        Ok(())
    }

    /// Makes read-only what was handed over.
    fn seal(&mut self) -> Result<()> {
        self.seal_before(self.unsealed.end)
    }

    /// The same, up to a chunk that is unmapped now.
    fn seal_before(&mut self, chunk: u64) -> Result<()> {
        let chunks = self.unsealed.start..chunk;
        self.unsealed.start = (chunk + 1).min(self.unsealed.end);
        if chunks.is_empty() {
            return Ok(());
        }
        self.state.chunks.seal(self.content, chunks.clone()).inspect_err(|_| {
            // Other processes use them: this one must not store to them.
            chunks.for_each(|chunk| self.state.chunks.discard(self.content, chunk));
        })
    }

    /// Gives back those that were not handed over. False: the device had no memory for one, and the daemon has made room.
    fn give_back(mut self) -> Result<bool> {
        let no_memory_for = self.full.then_some(self.chunks.start + self.created.len() as u64);
        self.discard();
        let (id, chunks, mut freed) = (self.content.id, self.chunks.clone(), 0);
        for chunk in chunks {
            // The daemon makes room for one: the others fail or fit next time.
            let no_memory = no_memory_for == Some(chunk);
            freed += self.map.link.run(move |connection| connection.abandon(id, chunk, no_memory))?;
        }
        match no_memory_for {
            Some(_) if freed == 0 => Err(no_memory().into_refusal()),
            no_memory_for => Ok(no_memory_for.is_none()),
        }
    }

    /// The bytes of the file in the first `count`.
    fn bytes_of(&self, count: u64) -> Range<u64> {
        let (chunk, size) = (self.content.chunk_bytes(), self.content.size);
        let at = |chunks: u64| (chunks * chunk).min(size);
        at(self.chunks.start)..at(self.chunks.start + count)
    }

    /// Unmaps what may have no bytes of the file.
    fn discard(&mut self) {
        for (chunk, _) in (self.chunks.start..).zip(self.created.drain(..)) {
            self.state.chunks.discard(self.content, chunk);
        }
    }
}

impl Drop for Fill<'_> {
    fn drop(&mut self) {
        // Also after an error, which is reported by now.
        let _ = self.seal();
        self.discard();
    }
}

pub(super) fn no_memory() -> Error {
    Error::new(Errno::NOMEM, "The device has no memory left for the chunks of the file")
}
