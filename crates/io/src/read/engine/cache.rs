//! `copy` and `store`: bytes of the page cache, moved by the CPU.
//!
//! ```text
//!   copy    page cache ──pread──> bounce buffer ──DMA──> device
//!   store   page cache ──pread────────────────────────> host-mapped device memory
//! ```

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, RWF_NOWAIT};

use super::Engine;
use crate::policy::COPY_FASTER_THREADS;
use crate::read::work::{Outcome, Piece};
use spinio_device::{FenceGuard, WaitMode};
use spinio_files::FdIdentity;
use spinio_host::syscalls::pread_full;
use spinio_transfer::Error;
use spinio_transfer::bounce::{BounceBuffer, ShareGuard};

/// Copies that a thread has queued on the device at once, where many threads copy.
const MAX_QUEUED_COPIES: usize = 2;

/// And all threads, unless each has one. A copy that another thread of the program queues comes after all of theirs: 38 us
/// for each, 1.4 ms (p99) after 12 threads with two each.
const MAX_QUEUED_IN_ALL: usize = 16;

/// Bytes of a request from which on threads nap while they wait for the device: on an H200, 8 GiB reads at 0.19 processor seconds
/// a GB instead of 0.24, as fast. A nap may last 100 us, a twentieth of the time of 64 MiB.
const NAP_MIN: u64 = 256 << 20;

/// How often a piece is read while its descriptor is replaced and restored.
const TRIES: usize = 4;

/// How reading a piece through the page cache ended.
enum ReadEnd {
    /// All bytes are there.
    Full,
    /// The next byte is not in the page cache (only where the piece was assumed to be cached).
    NotCached,
    /// End of file, or the kernel's error.
    Short(Option<Errno>),
}

impl Engine<'_> {
    /// Reads a piece into memory, front to back.
    fn read_piece(&self, piece: Piece, into: *mut u8) -> (usize, ReadEnd) {
        let (kernel, fd) = (self.request.sys(), self.request.cached_fd(self.role));
        let (len, offset) = (piece.len as usize, self.request.offset + piece.offset);
        let flags = if piece.assumed_cached { RWF_NOWAIT } else { 0 };
        let mut got = 0;
        while got < len {
            // SAFETY: the caller lends `len` bytes at `into`.
            let n =
                unsafe { kernel.pread(piece.route, fd, into.wrapping_add(got), len - got, offset + got as u64, flags) };
            match n {
                // With RWF_NOWAIT a short read says nothing about the end of the file.
                Ok(0) if piece.assumed_cached => return (got, ReadEnd::NotCached),
                Ok(0) => return (got, ReadEnd::Short(None)),
                Ok(n) if piece.assumed_cached && got + n < len => return (got + n, ReadEnd::NotCached),
                Ok(n) => got += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::OPNOTSUPP) if piece.assumed_cached => return (got, ReadEnd::NotCached),
                Err(errno) => return (got, ReadEnd::Short(Some(errno))),
            }
        }
        (got, ReadEnd::Full)
    }

    /// The same, with the bytes of the right file, whatever the program does with its descriptor meanwhile: the kernel
    /// would have finished a read with the file that it began with. A piece is read again where the descriptor was
    /// replaced and restored, and through the shadow descriptor where it was replaced for good.
    fn read_verified(&self, piece: Piece, into: *mut u8) -> (usize, ReadEnd) {
        let (sys, key) = (self.request.sys(), self.request.file.key());
        for _ in 0..TRIES {
            let identity = FdIdentity::of(self.request.fd);
            // While a change is in progress, and after one, the number may be that of another file already.
            if !identity.is_settled() && !sys.is_file(self.request.fd, key) {
                break;
            }
            let read = self.read_piece(piece, into);
            if identity.is_still(sys, key) {
                return read;
            }
        }
        self.read_by_shadow_worker(piece, into)
    }

    /// The same; where many threads copy, also how long it took (host/src/copy_threads.rs).
    fn read_timed(&mut self, piece: Piece, into: *mut u8) -> (usize, ReadEnd) {
        // A read of what turns out absent waits for storage, not for a processor.
        if self.request.copy_threads < COPY_FASTER_THREADS || piece.reason != Reason::Cached {
            return self.read_verified(piece, into);
        }
        let (started, processor) = (Instant::now(), linux::thread_cpu_time());
        let read = self.read_verified(piece, into);
        if matches!(read.1, ReadEnd::Full) {
            let copying = started.elapsed();
            self.sample.copying += copying;
            self.copied.0 += copying;
            self.copied.1 += linux::thread_cpu_time().saturating_sub(processor);
        }
        read
    }

    fn read_by_shadow_worker(&self, piece: Piece, into: *mut u8) -> (usize, ReadEnd) {
        let (sys, file, into) = (self.request.sys(), Arc::clone(&self.request.file), into as usize);
        let range = (self.request.offset + piece.offset, piece.len as usize);
        // SAFETY: the caller, which waits here, lends `len` bytes at `into`.
        let read = move || unsafe { pread_full(sys, piece.route, file.cached.get(), into as *mut u8, range, 1) };
        let workers = self.request.ctx.files.shadow_workers().map(|pool| pool.for_key(self.request.file.storage));
        match workers.and_then(|workers| workers.run_blocking(read)) {
            Some((got, error)) if got < range.1 => (got, ReadEnd::Short(error)),
            Some((got, _)) => (got, ReadEnd::Full),
            None => (0, ReadEnd::Short(Some(Errno::BADF))),
        }
    }

    /// Fills a buffer of a file system's share, and queues its copy.
    pub(crate) fn copy(&mut self, piece: Piece, buffer: BounceBuffer, share: Option<ShareGuard<'_>>, started: Instant) {
        let (got, ended) = self.read_timed(piece, buffer.ptr());
        drop(share);
        let reason = if buffer.pinned { piece.reason } else { Reason::NoPinnedMemory };
        self.limit_queued_copies();
        if let Err(error) = self.copy_to_device(piece, buffer, 0, got) {
            return self.fail_piece(piece, error);
        }
        self.record(piece, Route::Copy, reason, got as u64, started);
        self.finish_cached(piece, got as u64, ended);
        self.count_queued_copy();
        if self.request.copy_threads >= COPY_FASTER_THREADS
            && self.sample.is_enough()
            && self.request.ctx.files.workers().copy_threads().record(std::mem::take(&mut self.sample))
        {
            self.outcomes.push(Outcome::WakeWorkers);
        }
    }

    /// Waits until a bounce buffer becomes free.
    pub(crate) fn wait_for_buffer(&mut self) {
        let started = Instant::now();
        self.request.staging.wait_for_release();
        self.sample.waiting += started.elapsed();
    }

    /// Before a copy is queued: waits for older ones while too many are.
    fn limit_queued_copies(&mut self) {
        let queued_in_all = || self.request.staging.queued_copies.load(Relaxed);
        while self.queued_copies.len() >= MAX_QUEUED_COPIES
            || (!self.queued_copies.is_empty() && queued_in_all() >= MAX_QUEUED_IN_ALL)
        {
            let Some(oldest) = self.queued_copies.pop_front() else { return };
            let started = Instant::now();
            // An error is reported when the stream is waited for.
            let _ = if self.request.len < NAP_MIN { oldest.wait(WaitMode::Context) } else { oldest.take_turns() };
            self.request.staging.queued_copies.fetch_sub(1, Relaxed);
            self.sample.waiting += started.elapsed();
        }
    }

    /// A copy was queued.
    fn count_queued_copy(&mut self) {
        if self.request.copy_threads < COPY_FASTER_THREADS {
            return;
        }
        let Some(stream) = &self.streams[usize::from(!self.pinned.is_empty())] else { return };
        // Without a fence the copies are waited for at the end of the request only.
        if let Ok(fence) = FenceGuard::new(self.request.device(), stream.id()) {
            self.queued_copies.push_back(fence);
            self.request.staging.queued_copies.fetch_add(1, Relaxed);
        }
    }

    pub(super) fn store(&mut self, piece: Piece, started: Instant) {
        let (got, ended) = self.read_verified(piece, self.request.address(piece.offset).0 as *mut u8);
        self.record(piece, Route::Store, piece.reason, got as u64, started);
        self.finish_cached(piece, got as u64, ended);
    }

    fn finish_cached(&mut self, piece: Piece, got: u64, end: ReadEnd) {
        match end {
            ReadEnd::Full => self.pending.push((piece.offset, piece.len, got, None)),
            ReadEnd::NotCached => {
                if got > 0 {
                    self.pending.push((piece.offset, got, got, None));
                }
                self.outcomes.push(Outcome::Resurvey { offset: piece.offset + got, len: piece.len - got });
            }
            ReadEnd::Short(errno) => {
                let at = self.request.offset + piece.offset + got;
                let error = errno.map(|e| Error::kernel(e, "read", at, piece.len - got));
                self.pending.push((piece.offset, piece.len, got, error));
            }
        }
    }
}
