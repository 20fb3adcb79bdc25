//! Acquire: asks the daemon until all chunks of the range are mapped.
//!
//! ```text
//!   Acquire ──> Chunks: import, map read-only ──┐
//!           ──> Fill: create, map, read the file into them, make them read-only, hand them over   │
//!               (or, in place of the file, copy what another device has: fill.rs) ──┐           │
//!           <── again ──────────────────────────┴─────────────────────────────────────────────────┘
//!           ──> Ready
//! ```
//!
//! After an error other than a refusal the connection is ended: the daemon would count chunks as mapped that are not.

use std::ops::Range;

use spinio_host::lock;
use spinio_pagecache::leased_messages::Content;
use spinio_sys::Errno;

use super::connection::{Answer, dup_from};
use super::fill::{Copies, Fill, Filled, no_memory};
use super::map::{Map, State};
use crate::call_checks::wait_for_stream;
use crate::{Access, Error, Result};

/// Daemons that end during one acquire.
const ATTEMPTS: usize = 4;
/// Times that chunks of others are dropped because the device has no memory for one.
const EVICTIONS: usize = 16;
/// Reads of one content that end before the size: a writer that truncates the file ends the content.
const ENDED_EARLY: usize = 4;
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
        let (mut last, mut contents, mut evictions, mut ended_early) = (0, 0, 0, 0);
        loop {
            let (offset, len) = (range.start, range.end - range.start);
            let answer = self.link.run(move |connection| connection.acquire(offset, len))?;
            let (Answer::Chunks { content, .. } | Answer::Fill { content, .. } | Answer::Ready { content }) = answer;
            if content.id != last {
                (last, contents, ended_early) = (content.id, contents + 1, 0);
                if contents > CONTENTS {
                    return Err(Error::new(Errno::TXTBSY, "The file was written again and again"));
                }
                if state.chunks.has_others(content.id) {
                    // What is replaced now must not be in use.
                    wait_for_stream(self.device)?;
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
                    match Fill::new(self, state, content, chunks).run(copies.as_ref())? {
                        Filled::All => {}
                        Filled::RoomWasMade => {
                            evictions += 1;
                            if evictions > EVICTIONS {
                                return Err(no_memory().into_refusal());
                            }
                        }
                        Filled::EndsEarly => {
                            ended_early += 1;
                            if ended_early > ENDED_EARLY {
                                let sentence = "The file ends before the size that it says to have";
                                return Err(Error::new(Errno::IO, sentence).into_refusal());
                            }
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
}
