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

use spinio_device::{PeerChunk, PeerError, SharedMemory};
use spinio_pagecache::leased_messages::{Content, PeerRefusal};

use super::chunks::Chunks;
use crate::owned_fd::OwnedFd;

/// Copies on another device of chunks that are to be filled.
pub(super) struct Copies {
    pub(super) peer: [u8; 16],
    pub(super) descriptors: Vec<OwnedFd>,
}

/// Copies chunks, which are mapped for stores, all or none; why not.
pub(super) fn copy_chunks(
    device: &'static dyn SharedMemory,
    mapped: &Chunks,
    content: Content,
    chunks: Range<u64>,
    copies: &Copies,
) -> Option<PeerRefusal> {
    let Some(memory) = device.peer_memory() else { return Some(PeerRefusal::NoAccess) };
    let to = mapped.address(chunks.start * content.chunk_bytes());
    let from: Vec<PeerChunk<'_>> = chunks
        .zip(&copies.descriptors)
        .map(|(chunk, fd)| PeerChunk { fd: fd.as_fd(), len: content.len_of(chunk) })
        .collect();
    memory.copy_from_peer(copies.peer, &from, to).err().map(|e| match e {
        PeerError::NoDevice => PeerRefusal::NoDevice,
        PeerError::NoAccess => PeerRefusal::NoAccess,
        PeerError::Import(_) => PeerRefusal::Import,
        PeerError::Copy(_) => PeerRefusal::Copy,
    })
}
