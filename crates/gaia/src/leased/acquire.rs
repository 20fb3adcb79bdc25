//! Acquire: asks the daemon until all chunks of the range are mapped.
//!
//! ```text
//!   Acquire ──> Chunks: import, map read-only ──┐
//!           ──> Fill: create, map, read the file into them, make them read-only, hand them over ──┐
//!               (or, in place of the file, the copies that another device has: peer.rs)           │
//!           <── again ──────────────────────────┴─────────────────────────────────────────────────┘
//!           ──> Ready
//! ```
//!
//! After an error other than a refusal the connection is ended: the daemon would count chunks as mapped that are not.

use std::ops::Range;

use spinio_device::ErrorKind;
use spinio_host::lock;
use spinio_pagecache::leased_messages::{Content, FILLS, Source};
use spinio_sys::Errno;
use spinio_sys::linux;

use super::chunks::NewChunk;
use super::connection::{Answer, Connection, dup_from};
use super::map::{Map, State};
use super::peer::{Copies, copy_chunks};
use crate::{Access, Error, Result};

/// Daemons that end during one acquire.
const ATTEMPTS: usize = 4;
/// Times that chunks of others are dropped because the device has no memory for one.
const EVICTIONS: usize = 16;
/// A file that is written again and again in one acquire.
const CONTENTS: usize = 16;

impl Map {
    /// Makes `len` bytes from `offset` as new as the file is now. Returns the bytes of the range that are in the file.
    pub fn acquire(&self, offset: u64, len: u64, access: Access) -> Result<u64> {
        if access == Access::Write {
            return Err(Error::new(Errno::ACCESS, "The map is read-only"));
        }
        let range = self.check_range(offset, len)?;
        let mut state = lock(&self.state);
        let mut attempts = 0;
        let content = loop {
            match self.attach(&mut state).and_then(|()| self.bring_up_to_date(&mut state, range.clone())) {
                Ok(content) => break content,
                Err(e) if e.is_refused() => return Err(e),
                Err(e) => {
                    self.link.run(|connection| {
                        connection.disconnect();
                        Ok(())
                    })?;
                    attempts += 1;
                    if !e.is_disconnected() || attempts == ATTEMPTS {
                        return Err(e);
                    }
                }
            }
        };
        state.info.acquires += 1;
        state.info.file_size = content.size;
        Ok(content.size.min(range.end).saturating_sub(range.start))
    }

    /// Connects to a daemon, if the one before has ended.
    fn attach(&self, state: &mut State) -> Result<()> {
        let connected = self.link.run(|connection| {
            if connection.is_connected() {
                return Ok(false);
            }
            connection.connect().map(|()| true)
        });
        match connected {
            Ok(false) => Ok(()),
            Ok(true) => {
                state.info.reattached += 1;
                Ok(())
            }
            Err(e) if e.errno == Errno::NOTSUP && !e.is_refused() => {
                let sentence = "The GAIA daemon has ended; the map keeps its bytes, and can be brought up to date once \
                                `spinio gaia serve` runs again";
                Err(Error::new(Errno::IO, sentence))
            }
            Err(e) => Err(e),
        }
    }

    fn bring_up_to_date(&self, state: &mut State, range: Range<u64>) -> Result<Content> {
        let (mut last, mut contents, mut evictions) = (0, 0, 0);
        loop {
            let (offset, len) = (range.start, range.end - range.start);
            let answer = self.link.run(move |connection| connection.acquire(offset, len))?;
            let (Answer::Chunks { content, .. } | Answer::Fill { content, .. } | Answer::Ready { content }) = answer;
            if content.id != last {
                (last, contents) = (content.id, contents + 1);
                if contents > CONTENTS {
                    return Err(Error::new(Errno::TXTBSY, "The file was written again and again"));
                }
                if state.chunks.has_others(content.id) {
                    // What is replaced now must not be in use.
                    self.wait_for_stream()?;
                }
            }
            match answer {
                Answer::Chunks { first, descriptors, .. } => {
                    for (chunk, there) in (first..).zip(descriptors) {
                        if !state.chunks.is_mapped(content, chunk) {
                            let fd = dup_from(self.link.tid(), there)?;
                            state.chunks.import(content, chunk, &fd)?;
                            state.info.bytes_shared += content.len_of(chunk);
                        }
                    }
                }
                Answer::Fill { first, count, copies, .. } => {
                    let chunks = first..first + u64::from(count);
                    let copies = match copies {
                        Some((peer, there)) => {
                            let descriptors = there.into_iter().map(|fd| dup_from(self.link.tid(), fd));
                            Some(Copies { peer, descriptors: descriptors.collect::<Result<_>>()? })
                        }
                        None => None,
                    };
                    if !self.fill(state, content, chunks, copies)? {
                        evictions += 1;
                        if evictions > EVICTIONS {
                            return Err(no_memory().into_refusal());
                        }
                    }
                }
                Answer::Ready { .. } => {
                    let bytes = content.chunk_bytes();
                    let needed = range.start / bytes..range.end.div_ceil(bytes).min(content.chunks());
                    if !needed.into_iter().all(|chunk| state.chunks.is_mapped(content, chunk)) {
                        return Err(Error::new(Errno::PROTO, "The GAIA daemon does not know what is mapped"));
                    }
                    state.chunks.map_zeros(content, range)?;
                    return Ok(content);
                }
            }
        }
    }

    /// Fills chunks. False: the device had no memory for all, and the daemon has made room.
    fn fill(&self, state: &mut State, content: Content, chunks: Range<u64>, copies: Option<Copies>) -> Result<bool> {
        let mut created = Vec::new();
        let mut full = None;
        for chunk in chunks.clone() {
            match state.chunks.create(content, chunk) {
                Ok(new) => created.push(new),
                Err(e) if e.kind == ErrorKind::NoMemory => {
                    full = Some(chunk);
                    break;
                }
                Err(e) => return Err(Error::device(e, "allocate a chunk of the file")),
            }
        }
        let filled = chunks.start..chunks.start + created.len() as u64;
        if let Err(e) = self.fill_created(state, content, filled.clone(), created, copies) {
            // They may have no bytes of the file.
            filled.for_each(|chunk| state.chunks.discard(content, chunk));
            return Err(e);
        }
        let Some(first) = full else { return Ok(true) };
        let mut freed = 0;
        for chunk in first..chunks.end {
            // The daemon makes room for one: the others fail or fit next time.
            freed += self.link.run(move |connection| connection.abandon(content.id, chunk, chunk == first))?;
        }
        if freed == 0 { Err(no_memory().into_refusal()) } else { Ok(false) }
    }

    /// Puts the file's bytes into new chunks, and hands them over.
    fn fill_created(
        &self,
        state: &mut State,
        content: Content,
        chunks: Range<u64>,
        mut new: Vec<NewChunk>,
        copies: Option<Copies>,
    ) -> Result<()> {
        if chunks.is_empty() {
            return Ok(());
        }
        let mut mapped = chunks.clone().zip(&mut new);
        mapped.try_for_each(|(chunk, new)| state.chunks.map_new(content, chunk, new))?;
        let refusal = copies.as_ref().and_then(|c| copy_chunks(self.device, &state.chunks, content, chunks.clone(), c));
        let first_read = if copies.is_some() && refusal.is_none() { chunks.end } else { chunks.start };
        // Those of a refused copy are many: others may read some of them from the file.
        let kept = if refusal.is_some() { chunks.end.min(chunks.start + FILLS) } else { chunks.end };
        let end = (kept * content.chunk_bytes()).min(content.size);
        let from = (first_read * content.chunk_bytes()).min(end);
        let mut at = from;
        while at < end {
            match self.file.read(at, self.device, state.chunks.address(at), end - at)? {
                // Truncated, so the daemon does not keep the chunks.
                0 => break,
                got => at += got,
            }
        }
        state.info.bytes_from_file += at - from;
        state.info.bytes_from_peer += from - chunks.start * content.chunk_bytes();
        if let Some(refusal) = refusal {
            state.info.peer_refused = refusal.number();
        }
        state.chunks.seal(content, chunks.clone())?;
        for (chunk, new) in chunks.zip(new) {
            let (tid, fd) = (linux::gettid(), new.raw_fd());
            let whole = at >= end && chunk < kept;
            let source = match refusal {
                _ if chunk < first_read => Source::Peer,
                Some(refusal) => Source::Refused(refusal),
                None => Source::File,
            };
            let hand_over = move |connection: &mut Connection| {
                if !whole {
                    return connection.abandon(content.id, chunk, false).map(|_| false);
                }
                connection.filled(content.id, chunk, source, tid, fd)
            };
            if !self.link.run(hand_over)? {
                state.chunks.discard(content, chunk);
            }
        }
        Ok(())
    }
}

fn no_memory() -> Error {
    Error::new(Errno::NOMEM, "The device has no memory left for the chunks of the file")
}
