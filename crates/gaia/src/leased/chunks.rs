//! The addresses of a map, and the chunks that are mapped there.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use spinio_device::{Chunk, DeviceAddr, DeviceError, SharedMemory};
use spinio_pagecache::leased_messages::{Content, ContentId, MAX_CHUNK, MIN_CHUNK};

use spinio_sys::Errno;

use crate::owned_fd::OwnedFd;
use crate::{Error, Result};

/// What is mapped at an offset of the file.
#[derive(Clone, Copy, Debug)]
struct Slot {
    len: u64,
    content: ContentId,
    /// Memory of zeros, past the end of the file.
    zeros: bool,
}

/// Reserved addresses, and chunks of the file there. Unmapped when dropped.
pub(super) struct Chunks {
    device: &'static dyn SharedMemory,
    start: DeviceAddr,
    /// Bytes of the file that have addresses.
    span: Range<u64>,
    /// By offset in the file.
    slots: BTreeMap<u64, Slot>,
    zeros: Option<Chunk>,
}

/// A chunk that this process is filling.
pub(super) struct NewChunk {
    device: &'static dyn SharedMemory,
    /// Until it is mapped.
    handle: Option<Chunk>,
    fd: OwnedFd,
}

impl Chunks {
    /// Reserves addresses for a range of a file.
    pub(super) fn reserve(device: &'static dyn SharedMemory, range: Range<u64>) -> Result<Chunks> {
        let span = range.start / MAX_CHUNK * MAX_CHUNK..range.end.next_multiple_of(MAX_CHUNK);
        let start =
            device.reserve(span.end - span.start).map_err(|e| Error::device(e, "reserve addresses for a map"))?;
        Ok(Chunks { device, start, span, slots: BTreeMap::new(), zeros: None })
    }

    /// The device address of a byte of the file.
    pub(super) fn address(&self, offset: u64) -> DeviceAddr {
        self.start.offset(offset - self.span.start)
    }

    pub(super) fn is_mapped(&self, content: Content, chunk: u64) -> bool {
        self.slots.get(&(chunk * content.chunk_bytes())).is_some_and(|slot| slot.content == content.id && !slot.zeros)
    }

    /// Whether all of a range is mapped, of whatever content.
    pub(super) fn covers(&self, range: &Range<u64>) -> bool {
        let end = self.slots.range(..range.end).fold(range.start, |end, (at, slot)| match *at <= end {
            true => end.max(at + slot.len),
            false => end,
        });
        end >= range.end
    }

    /// Bytes of device memory that are mapped.
    pub(super) fn bytes(&self) -> u64 {
        self.slots.values().filter(|slot| !slot.zeros).map(|slot| slot.len).sum()
    }

    /// Whether a chunk of another content is mapped: memory that a kernel may still use.
    pub(super) fn has_others(&self, content: ContentId) -> bool {
        self.slots.values().any(|slot| slot.content != content)
    }

    /// Allocates a chunk of the content.
    pub(super) fn create(&self, content: Content, chunk: u64) -> core::result::Result<NewChunk, DeviceError> {
        let (handle, fd) = self.device.create_chunk(content.len_of(chunk))?;
        Ok(NewChunk { device: self.device, handle: Some(handle), fd: OwnedFd::from(fd) })
    }

    /// Maps a chunk that another process has filled.
    pub(super) fn import(&mut self, content: Content, chunk: u64, fd: &OwnedFd) -> Result<()> {
        let imported = self.device.import_chunk(fd.as_fd(), content.len_of(chunk));
        let handle = imported.map_err(|e| Error::device(e, "import a chunk of the file"))?;
        self.map(content, chunk, handle)?;
        self.protect(content, chunk..chunk + 1, false).inspect_err(|_| self.discard(content, chunk))
    }

    /// Maps a new chunk, without access.
    pub(super) fn map_new(&mut self, content: Content, chunk: u64, new: &mut NewChunk) -> Result<()> {
        let handle = new.handle.take().ok_or_else(|| Error::of(Errno::INVAL, "map a chunk of the file"))?;
        self.map(content, chunk, handle)
    }

    /// Maps a chunk in place of what is there, without access, and gives the handle back.
    fn map(&mut self, content: Content, chunk: u64, handle: Chunk) -> Result<()> {
        let at = chunk * content.chunk_bytes();
        let len = content.len_of(chunk);
        let mapped = if at < self.span.start || at + content.chunk_bytes() > self.span.end {
            Err(DeviceError::new(spinio_device::ErrorKind::BadAddress, "mapping outside of the map"))
        } else {
            self.unmap(at..at + content.chunk_bytes());
            self.device.map_without_access(self.address(at), len, handle)
        };
        let _ = self.device.release_chunk(handle);
        mapped.map_err(|e| Error::device(e, "map a chunk of the file"))?;
        self.slots.insert(at, Slot { len, content: content.id, zeros: false });
        Ok(())
    }

    /// Makes mapped chunks accessible, for loads or for stores too.
    pub(super) fn protect(&self, content: Content, chunks: Range<u64>, writable: bool) -> Result<()> {
        let at = chunks.start * content.chunk_bytes();
        let len = chunks.map(|chunk| content.len_of(chunk)).sum();
        let protected = self.device.protect_chunks(self.address(at), len, writable);
        protected.map_err(|e| Error::device(e, "make a chunk of the file accessible"))
    }

    /// Unmaps a chunk that is of no use.
    pub(super) fn discard(&mut self, content: Content, chunk: u64) {
        let at = chunk * content.chunk_bytes();
        self.unmap(at..at + content.len_of(chunk));
    }

    /// Maps zeros in the part of a range that is past the chunks of the content.
    pub(super) fn map_zeros(&mut self, content: Content, range: Range<u64>) -> Result<()> {
        let last = content.chunks().checked_sub(1);
        let end = last.map_or(0, |last| last * content.chunk_bytes() + content.len_of(last));
        let range = end.max(range.start / MIN_CHUNK * MIN_CHUNK)..range.end.next_multiple_of(MIN_CHUNK);
        for at in range.step_by(MIN_CHUNK as usize) {
            if self.slots.get(&at).is_some_and(|slot| slot.zeros) {
                continue;
            }
            let failed = |e| Error::device(e, "map zeros past the end of the file");
            let zeros = match self.zeros {
                Some(zeros) => zeros,
                None => {
                    let (zeros, fd) = self.device.create_chunk(MIN_CHUNK).map_err(failed)?;
                    drop(OwnedFd::from(fd));
                    *self.zeros.insert(zeros)
                }
            };
            self.unmap(at..at + MIN_CHUNK);
            self.device.map_chunk(self.address(at), MIN_CHUNK, zeros, false).map_err(failed)?;
            self.slots.insert(at, Slot { len: MIN_CHUNK, content: content.id, zeros: true });
        }
        // Zeros are of every content.
        self.slots.values_mut().filter(|slot| slot.zeros).for_each(|slot| slot.content = content.id);
        Ok(())
    }

    /// Unmaps what overlaps a range of the file.
    fn unmap(&mut self, range: Range<u64>) {
        let overlaps = |at: u64, slot: &Slot| at < range.end && at + slot.len > range.start;
        let found = self.slots.range(..range.end).rev().take_while(|(at, _)| **at + MAX_CHUNK > range.start);
        let found: Vec<u64> = found.filter(|(at, slot)| overlaps(**at, slot)).map(|(at, _)| *at).collect();
        for at in found {
            // What cannot be unmapped stays there, and so does the reservation.
            if let Some(slot) = self.slots.remove(&at) {
                let _ = self.device.unmap_chunk(self.address(at), slot.len);
            }
        }
    }
}

impl NewChunk {
    pub(super) fn raw_fd(&self) -> i32 {
        self.fd.as_fd().as_raw_fd()
    }
}

impl Drop for NewChunk {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            let _ = self.device.release_chunk(handle);
        }
    }
}

impl Drop for Chunks {
    fn drop(&mut self) {
        self.unmap(self.span.clone());
        if let Some(zeros) = self.zeros.take() {
            let _ = self.device.release_chunk(zeros);
        }
        let _ = self.device.free_reservation(self.start, self.span.end - self.span.start);
    }
}
