//! Writes of files that are larger than the staging memory: in portions, each one call of the kernel.
//!
//! ```text
//!   device   copy 0 │ copy 1 │ copy 2 ...
//!   kernel          │ write 0 ......... │ write 1 .........
//! ```
//!
//! Where nothing can be lacking, portions of the program's own O_DIRECT descriptor are under way side by side: `window.rs`.
//!
//! Around the page cache a portion ends where a stripe of an array with parity does, so that the array is spared reading
//! old parity. Stripes lie on the device, not in the file: file/stripes.rs knows where.
//!
//! At the descriptor's own offset the whole range is taken first, with one relative `lseek`, so that who shares the
//! offset goes on behind it; what was not written is given back.
//!
//! A misaligned O_DIRECT write is for the kernel to refuse, or to take all the same (btrfs does), but not to take in part.
//! So its first portion ends as the whole write does, that many bytes behind a unit: who takes the one takes the other.
//!
//! Known flaw: where a file has no byte yet, nobody knows where on the device its first ones will be. So the first two
//! portions of a new file end anywhere in a stripe, and the others where its beginning lets expect an end.

use std::ops::Range;
use std::sync::Arc;

use spinio_device::StreamOrder;
use spinio_plan::{Reason, Route};
use spinio_sys::linux::{self, FileKind};

use super::gather::{BufferSource, StagedWrite, streams_after_app};
use super::window::PARALLEL_CHUNK;
use super::write_once::WriteVia;
use super::{Result, WriteRequest, staging_limit};
use crate::read::app_fd_calls::{release_offset, reserve_offset};
use spinio_files::FileState;
use spinio_files::stripes::StripeMap;
use spinio_transfer::Error;
use spinio_transfer::bounce::BUFFER_SIZE;

/// Bytes of a portion at most: enough to keep storage busy, and the next portion has room beside it.
const CHUNK: u64 = 32 << 20;

/// Bytes of the first one, which nothing is written beside.
const FIRST_CHUNK: usize = 8 << 20;

const RWF_APPEND: u32 = 0x10;

/// A file on an array with parity, and what is known of where it lies there.
struct StripeEnds {
    file: Arc<FileState>,
    stripes: Option<Arc<StripeMap>>,
}

impl WriteRequest<'_> {
    /// Portion by portion; the unbroken front that was written.
    pub(super) fn write_chunked(&self) -> Result<usize> {
        let via = self.via_app_fd();
        let why = if via.reason == Reason::IntoCache { Reason::Chunked } else { via.reason };
        let via = WriteVia { reason: why, ..via };
        if self.is_append() {
            return self.write_chunks(0..self.len, via);
        }
        self.with_offset(|write| write.write_chunks(0..write.len, via))
    }

    /// Whether the bytes go to the end of the file, wherever that is.
    pub(super) fn is_append(&self) -> bool {
        let flags = self.ctx.files.sys().status_flags(self.fd).unwrap_or(0);
        flags & linux::O_APPEND as i32 != 0 || self.flags & RWF_APPEND != 0
    }

    /// The same write at an offset that is known, whether or not it was.
    pub(super) fn with_offset(&self, write: impl FnOnce(&WriteRequest<'_>) -> Result<usize>) -> Result<usize> {
        if self.at.is_some() {
            return write(self);
        }
        match reserve_offset(self.ctx.files.sys(), self.fd, self.len as u64) {
            Ok(start) => {
                let wrote = write(&WriteRequest { at: Some(start), ..*self });
                release_offset(self.ctx.files.sys(), self.fd, (self.len - *wrote.as_ref().unwrap_or(&0)) as u64);
                wrote
            }
            // The offset cannot be moved that far (the end of a block device, the largest file): the kernel says why.
            Err(_) => write(self),
        }
    }

    /// Where a range ends that RLIMIT_FSIZE cuts, as it would cut one call: the signal is for a write that begins there.
    fn clip_to_size_limit(&self, range: Range<usize>) -> usize {
        let start = self.at.filter(|_| !self.is_append()).unwrap_or(self.stat.size);
        let room = linux::file_size_limit().saturating_sub(start);
        match usize::try_from(room) {
            Ok(room) if self.stat.kind == FileKind::Regular && room > range.start => range.end.min(room),
            _ => range.end,
        }
    }

    /// Where portions of it should end, if that matters. What goes into the page cache the kernel gathers anyway.
    fn stripe_ends(&self, via: WriteVia) -> Option<StripeEnds> {
        self.at.filter(|_| via.route == Route::Direct)?;
        // The twins that are opened to look would break a lease of the program's.
        if via.shadow_fd.is_none() && self.ctx.files.sys().is_leased(self.fd) {
            return None;
        }
        let file = self.ctx.files.get(self.fd, self.stat).ok()?;
        let array = *file.stripes.array.as_ref().ok()?;
        (self.len as u64 >= array.width).then(|| StripeEnds { stripes: file.stripes.cached(&self.stat), file })
    }

    /// `most`, or less so that a portion from `from` on ends where a stripe does, and direct I/O still may.
    fn align_to_stripe(&self, ends: &mut StripeEnds, from: usize, max: usize) -> usize {
        let start = self.at.unwrap_or(0);
        let at = start + from as u64;
        let limit = at + max as u64;
        let covers = |known: &StripeMap| known.range.start <= at && limit <= known.range.end;
        if !ends.stripes.as_deref().is_some_and(covers) {
            // From the last portion on that is written for sure: what comes behind it will probably lie behind it. And up
            // to the end: the next portions need not ask again.
            let all = at.saturating_sub(CHUNK).max(start)..start + self.len as u64;
            ends.stripes = ends.file.stripes.survey_and_cache(
                &self.ctx.files.ctx,
                (&ends.file.cached, ends.file.size),
                &self.stat,
                all,
            );
        }
        let end = ends.stripes.as_ref().and_then(|known| known.layout.end_of_chunk(at, max as u64));
        let end = end.filter(|end| end.is_multiple_of(linux::PAGE as u64));
        end.map_or(max, |end| (end - at) as usize)
    }

    /// A range of the write; how many bytes of it were written.
    pub(super) fn write_chunks(&self, range: Range<usize>, via: WriteVia) -> Result<usize> {
        let device_error = |e| Error::device(e, "write", self.at.unwrap_or(0), self.len as u64);
        let streams = streams_after_app(self.parts).map_err(device_error)?;
        self.write_chunks_on(&streams, range, via)
    }

    /// All of it at once, behind what is on the given queues.
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
