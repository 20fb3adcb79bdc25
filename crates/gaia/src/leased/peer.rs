//! Chunks that another device has: copied from there instead of read from the file.
//!
//! ```text
//!   daemon ── FillFrom { peer } + descriptors ──> new chunk, writable ──<── peer copy ──<── chunk of the other device
//!                                                      └──<── the file, if that is refused
//! ```
//!
//! The daemon names only chunks of the same content, and of the same user: what is copied is as good as what a program of
//! that user could have handed over itself, and is mapped read-only.
//!
//! Known flaw: a chunk that is just being read on the other device is read from the file here too.

use std::ops::Range;
use std::os::fd::AsFd;

use spinio_device::{PeerError, PeerMemory, SharedMemory};
use spinio_pagecache::leased_messages::{Content, PeerRefusal};

use super::chunks::Chunks;
use crate::owned_fd::OwnedFd;

/// Copies on another device of chunks that are to be filled.
pub(super) struct Copies {
    pub(super) peer: [u8; 16],
    pub(super) descriptors: Vec<OwnedFd>,
}

/// Copies chunks, which are mapped for stores, until one cannot be copied. How many, and why not all.
pub(super) fn copy_chunks(
    device: &'static dyn SharedMemory,
    mapped: &Chunks,
    content: Content,
    chunks: Range<u64>,
    copies: &Copies,
) -> (u64, Option<PeerRefusal>) {
    let Some(memory) = device.peer_memory() else { return (0, Some(PeerRefusal::NoAccess)) };
    for (chunk, fd) in chunks.clone().zip(&copies.descriptors) {
        if let Err(why) = copy_chunk(memory, mapped, content, chunk, copies.peer, fd) {
            return (chunk - chunks.start, Some(why));
        }
    }
    (chunks.end - chunks.start, None)
}

fn copy_chunk(
    memory: &dyn PeerMemory,
    mapped: &Chunks,
    content: Content,
    chunk: u64,
    peer: [u8; 16],
    fd: &OwnedFd,
) -> Result<(), PeerRefusal> {
    let to = mapped.address(chunk * content.chunk_bytes());
    memory.copy_from_peer(peer, fd.as_fd(), content.len_of(chunk), to).map_err(|e| match e {
        PeerError::NoDevice => PeerRefusal::NoDevice,
        PeerError::NoAccess => PeerRefusal::NoAccess,
        PeerError::Import(_) => PeerRefusal::Import,
        PeerError::Copy(_) => PeerRefusal::Copy,
    })
}
