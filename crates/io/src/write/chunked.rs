//! Writes that are larger than the staging memory: in chunks, each a single system call.
//!
//! ```text
//!   device   copy 0 │ copy 1 │ copy 2 ...
//!   kernel          │ write 0 ......... │ write 1 .........
//! ```
//!
//! Where a write cannot run out of space, chunks of the program's own O_DIRECT descriptor are in flight concurrently:
//! `window.rs`.
//!
//! With O_DIRECT a chunk ends where a stripe of an array with parity ends, so that the array need not read old parity.
//! Stripes are ranges of the block device, not of the file: the `stripes` module of crate `files` maps them.
//!
//! At the descriptor's own offset the whole range is reserved first, with one relative `lseek`, so that other users of
//! the offset continue after it; the part that was not written is released.
//!
//! The kernel refuses a misaligned O_DIRECT write, or accepts it (btrfs), but must not accept a part of it. So the
//! first chunk has the same misalignment at its end as the whole write: a file system that accepts the one accepts the
//! other.
//!
//! Known flaw: the physical offset of a byte that was never written is unknown. So the first two chunks of a new file
//! end anywhere in a stripe, and the later ones at the stripe ends that the beginning of the file predicts.

use std::ops::Range;
use std::sync::Arc;

use spinio_device::StreamOrder;
use spinio_plan::{Reason, Route};
use spinio_sys::linux::{self, FileKind};

use super::gather::{BufferSource, StagedWrite, streams_after_app};
use super::window::PARALLEL_CHUNK;
use super::write_once::WriteVia;
use super::{Result, WriteRequest, staging_limit};
use crate::read::app_fd_calls::ReservedOffset;
use spinio_files::FileState;
use spinio_files::stripes::StripeMap;
use spinio_transfer::Error;
use spinio_transfer::bounce::BUFFER_SIZE;

/// Largest chunk in bytes: enough to keep storage busy, and small enough that the next chunk fits next to it.
const CHUNK: u64 = 32 << 20;

/// Bytes of the first chunk, during whose copy no other one is written.
const FIRST_CHUNK: usize = 8 << 20;

const RWF_APPEND: u32 = 0x10;

/// A file on an array with parity, and what is known of its physical offsets there.
struct StripeEnds {
    file: Arc<FileState>,
    stripes: Option<Arc<StripeMap>>,
}

impl WriteRequest<'_> {
    /// Writes chunk by chunk; the length of the contiguous prefix that was written.
    pub(super) fn write_chunked(&self) -> Result<usize> {
        let via = self.via_app_fd();
        let reason = if via.reason == Reason::IntoCache { Reason::Chunked } else { via.reason };
        let via = WriteVia { reason, ..via };
        if self.is_append() {
            return self.write_chunks(0..self.len, via);
        }
        self.with_offset(|write| write.write_chunks(0..write.len, via))
    }

    /// Whether the bytes are appended at the end of the file.
    pub(super) fn is_append(&self) -> bool {
        let flags = self.ctx.files.sys().status_flags(self.fd).unwrap_or(0);
        flags & linux::O_APPEND as i32 != 0 || self.flags & RWF_APPEND != 0
    }

    /// The same write at a known offset: reserves it if the write is at the descriptor's own.
    pub(super) fn with_offset(&self, write: impl FnOnce(&WriteRequest<'_>) -> Result<usize>) -> Result<usize> {
        if self.at.is_some() {
            return write(self);
        }
        let sys = self.ctx.files.sys();
        match ReservedOffset::new(sys, self.fd, self.len as u64, &self.stat) {
            Ok(offset) => {
                let wrote = write(&WriteRequest { at: Some(offset.start), ..*self });
                offset.release(sys, self.fd, (self.len - *wrote.as_ref().unwrap_or(&0)) as u64);
                wrote
            }
            // The offset cannot be moved that far (the end of a block device, the largest file): the kernel's error for
            // the write says why.
            Err(_) => write(self),
        }
    }

    /// The end of a range after RLIMIT_FSIZE has cut it, as it would cut a single call. A write that begins at the
    /// limit is not cut: it gets the signal.
    fn clip_to_size_limit(&self, range: Range<usize>) -> usize {
        let start = self.at.filter(|_| !self.is_append()).unwrap_or(self.stat.size);
        let limit = linux::file_size_limit().saturating_sub(start);
        match usize::try_from(limit) {
            Ok(limit) if self.stat.kind == FileKind::Regular && limit > range.start => range.end.min(limit),
            _ => range.end,
        }
    }

    /// Where chunks of this write should end, if that matters. Only for direct writes: the kernel merges buffered ones
    /// anyway.
    fn stripe_ends(&self, via: WriteVia) -> Option<StripeEnds> {
        self.at.filter(|_| via.route == Route::Direct)?;
        // Opening shadow descriptors to query the extents would break a lease of the program.
        if via.shadow_fd.is_none() && self.ctx.files.sys().is_leased(self.fd) {
            return None;
        }
        let file = self.ctx.files.get(self.fd, self.stat).ok()?;
        let array = *file.stripes.array.as_ref().ok()?;
        (self.len as u64 >= array.width).then(|| StripeEnds { stripes: file.stripes.cached(&self.stat), file })
    }

    /// `max`, or less, so that a chunk from `from` on ends where a stripe ends, at an offset that is aligned for direct
    /// I/O.
    fn align_to_stripe(&self, ends: &mut StripeEnds, from: usize, max: usize) -> usize {
        let start = self.at.unwrap_or(0);
        let at = start + from as u64;
        let limit = at + max as u64;
        let covers = |known: &StripeMap| known.range.start <= at && limit <= known.range.end;
        if !ends.stripes.as_deref().is_some_and(covers) {
            // From the last chunk that is certainly written: later bytes are probably stored after it. Up to the end of
            // the write: the next chunks then need no query.
            let survey_range = at.saturating_sub(CHUNK).max(start)..start + self.len as u64;
            ends.stripes = ends.file.stripes.survey_and_cache(
                &self.ctx.files.ctx,
                (&ends.file.cached, ends.file.size),
                &self.stat,
                survey_range,
            );
        }
        let end = ends.stripes.as_ref().and_then(|known| known.layout.end_of_chunk(at, max as u64));
        let end = end.filter(|end| end.is_multiple_of(linux::PAGE as u64));
        end.map_or(max, |end| (end - at) as usize)
    }

    /// Writes a range of the write; the number of bytes written.
    pub(super) fn write_chunks(&self, range: Range<usize>, via: WriteVia) -> Result<usize> {
        let device_error = |e| Error::device(e, "write", self.at.unwrap_or(0), self.len as u64);
        let streams = streams_after_app(self.parts).map_err(device_error)?;
        self.write_chunks_on(&streams, range, via)
    }

    /// Does the whole write now, after the work on the given streams.
    pub(super) fn after_stream(&self, streams: &[StreamOrder]) -> Result<usize> {
        self.write_chunks_on(streams, 0..self.len, self.via_app_fd())
    }

    fn write_chunks_on(&self, streams: &[StreamOrder], range: Range<usize>, via: WriteVia) -> Result<usize> {
        let range = range.start..self.clip_to_size_limit(range.clone());
        let misalignment = if via.shadow_fd.is_none() { self.misalignment(range.len()) } else { 0 };
        let mut stripe_ends = self.stripe_ends(via).filter(|_| misalignment == 0);
        let parallel = misalignment == 0 && stripe_ends.is_none() && self.can_write_parallel(&range, via);
        let writers = if parallel { self.writers() } else { None };
        let max = match writers {
            Some(_) => PARALLEL_CHUNK,
            None => (staging_limit(self.ctx) / 2).min(CHUNK) as usize / BUFFER_SIZE * BUFFER_SIZE,
        };
        let gather = |from: usize| {
            let max = if from == range.start { max.min(FIRST_CHUNK) - misalignment } else { max };
            let most = stripe_ends.as_mut().map_or(max, |ends| self.align_to_stripe(ends, from, max));
            let parts = self.slice_parts(from, most.min(range.end - from));
            StagedWrite::start(self.ctx, streams, &parts, BufferSource::Pool, self.at.unwrap_or(0) + from as u64)?
                .with_fences()
        };
        let wrote = self.write_window(writers.as_ref(), &range, via, gather);
        if let Some(writers) = writers {
            writers.close(self.stat.dev);
        }
        wrote
    }
}
