//! Fill: new chunks get the bytes of the file, and are handed over to the daemon.
//!
//! ```text
//!   from the file             create, map ── read into all of them ─┐
//!                                                                   ├─ make all read-only ── hand all over
//!   from another device       create 1, import 1 │ 2    │ 3    │ ...    │              │ beside: unmap the imports
//!   its copies                                   │ copy 1 │ copy 2 │ ... ─┘              │
//! ```
//!
//! To make a chunk read-only, CUDA waits for the copies that are under way: 22 ms for 8 GiB chunk by chunk, 1.5 ms after the
//! last copy (benches/gaia/leased_steps.cu). And while copies run, the calling thread has to keep ahead of them with calls of the
//! driver, so it sends no message. Other processes that wait for such chunks get them together.
//!
//! While copies run, CUDA also waits for some before it makes other memory accessible. So that is done for groups of chunks, of which all
//! else is done before, and the copies of a group are queued together.
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

use spinio_device::{DeviceAddr, ErrorKind, PeerError, PeerPiece};
use spinio_pagecache::leased_messages::{Content, PeerRefusal, Source};
use spinio_sys::{Errno, linux};

use super::chunks::NewChunk;
use super::connection::Connection;
use super::imports::Imports;
use super::map::{Map, State};
use crate::overlapped_copies::{copy_prepared, refusal};
use crate::owned_fd::OwnedFd;
use crate::{Error, Result};

/// Bytes that are copied from another device first, if they are more than a chunk: for small chunks, of which the calls take longer
/// than the copies.
const GROUP: usize = 16 << 20;
/// The later groups have up to so many times as much: CUDA may wait for a copy before it makes memory accessible, and another
/// one of the same group runs meanwhile.
const LARGEST_GROUPS: usize = 4;

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
    /// The first of them, mapped.
    created: VecDeque<NewChunk>,
    /// The device has no memory for the one after those.
    full: bool,
}

impl<'a> Fill<'a> {
    pub(super) fn new(map: &'a Map, state: &'a mut State, content: Content, chunks: Range<u64>) -> Fill<'a> {
        Fill { map, state, content, chunks, created: VecDeque::new(), full: false }
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

    /// Copies them from another device, and hands over those that have arrived. Why not all.
    fn copy(&mut self, copies: &Copies) -> Result<Option<PeerRefusal>> {
        let Some(memory) = self.map.device.peer_memory() else { return Ok(Some(PeerRefusal::NoAccess)) };
        let bytes = self.chunks.clone().map(|chunk| self.content.len_of(chunk)).sum();
        let reserved = memory.check_access(copies.peer).and_then(|()| Imports::reserve(memory, bytes));
        let mut imports = match reserved {
            Ok(imports) => imports,
            Err(why) => return Ok(Some(refusal(why))),
        };
        let pieces = self.pieces(imports.start());
        let group_bytes = GROUP.max(self.content.chunk_bytes() as usize);
        let (mut count, mut failed) = (0, Ok(()));
        let copied = copy_prepared(memory, &pieces, group_bytes..=LARGEST_GROUPS * group_bytes, |group| {
            let created = self.create(group.len() as u64).inspect_err(|e| failed = Err(e.clone())).unwrap_or(0..0);
            // Fewer if the device has no memory for all.
            let group = group.start..group.start + created.clone().count();
            if group.is_empty() {
                return Ok(0);
            }
            let mut theirs = copies.descriptors[group.clone()].iter().zip(&pieces[group.clone()]);
            theirs.try_for_each(|(fd, piece)| imports.map(fd, piece.len as u64)).map_err(PeerError::Import)?;
            // Last: CUDA may wait for copies, and after that none is under way.
            if let Err(e) = self.state.chunks.protect(self.content, created, true) {
                failed = Err(e);
                return Ok(0);
            }
            imports.grant_access().map_err(PeerError::Import)?;
            count = group.end as u64;
            Ok(group.len())
        });
        let refused = copied.err().map(refusal);
        // Else some chunks have not arrived, and which is not known.
        if refused != Some(PeerRefusal::Copy) {
            self.hand_over(count, Source::Peer, imports)?;
        }
        failed?;
        Ok(refused)
    }

    /// The copies, from an address at which the chunks lie side by side.
    fn pieces(&self, mut from: DeviceAddr) -> Vec<PeerPiece> {
        let piece = |chunk| {
            let (to, len) = (self.state.chunks.address(chunk * self.content.chunk_bytes()), self.content.len_of(chunk));
            let piece = PeerPiece { from, to, len: len as usize };
            from = from.offset(len);
            piece
        };
        self.chunks.clone().map(piece).collect()
    }

    /// Reads the file into the first of them, and hands those over. False: it ends before its size.
    fn read(&mut self, most: u64, source: Source) -> Result<bool> {
        self.create(most.saturating_sub(self.created.len() as u64))?;
        let count = most.min(self.created.len() as u64);
        let bytes = self.bytes_of(count);
        if count > 0 {
            self.state.chunks.protect(self.content, self.chunks.start..self.chunks.start + count, true)?;
        }
        let mut at = bytes.start;
        while at < bytes.end {
            match self.map.file.read(at, self.map.device, self.state.chunks.address(at), bytes.end - at)? {
                0 => return Ok(false),
                got => at += got,
            }
        }
        self.state.info.bytes_from_file += bytes.end - bytes.start;
        self.hand_over(count, source, ()).map(|()| true)
    }

    /// Allocates and maps the next ones, without access, until the device has no memory left; which.
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

    /// Makes the first `count` read-only, which have their bytes, and hands them over. Drops what is not needed any more meanwhile.
    fn hand_over<T>(&mut self, count: u64, source: Source, unneeded: T) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let bytes = self.bytes_of(count);
        let chunks = self.chunks.start..self.chunks.start + count;
        self.state.chunks.protect(self.content, chunks.clone(), false)?;
        let (tid, id) = (linux::gettid(), self.content.id);
        let fds: Vec<_> = chunks.clone().zip(self.created.iter().map(NewChunk::raw_fd)).collect();
        let filled = move |connection: &mut Connection| connection.filled(id, &fds, source, tid);
        let kept = self.map.link.run_beside(filled, || drop(unneeded))?;
        self.created.drain(..count as usize);
        self.chunks.start += count;
        if source == Source::Peer {
            self.state.info.bytes_from_peer += bytes.end - bytes.start;
        }
        for (chunk, _) in chunks.zip(kept).filter(|(_, kept)| !kept) {
            self.state.chunks.discard(self.content, chunk);
        }
        Ok(())
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
        self.discard();
    }
}

pub(super) fn no_memory() -> Error {
    Error::new(Errno::NOMEM, "The device has no memory left for the chunks of the file")
}
