//! The chunks of a long write that are in flight: one, which the caller writes while the next is copied; or up to six,
//! through the program's own O_DIRECT descriptor, so that storage never waits for the next one.
//!
//! ```text
//!   caller    copy 0 │ copy 1 │ ... │ copy 5 │ wait for 0 │ copy 6 │ wait for 1 │ copy 7 ...
//!   workers          └ write 0 ........... ┘              └ write 6 ........... ┘
//!                             └ write 1 .............. ┘               └ write 7 ...
//! ```
//!
//! Sequential calls leave storage idle between them: while the last requests of a call complete, while its caller wakes
//! up, and until the first requests of the next call are submitted. Seen: 0.25 ms of every 5. And small chunks that
//! reuse the same bounce buffers need a fraction of the staging memory: two chunks of 32 MiB made a first write wait
//! 10 ms for memory to be allocated.
//!
//! The count is a contiguous prefix: chunks are waited for in the order of the file, and no byte after the first chunk
//! that fails or is short counts. But bytes after it may have reached the file. So this is only for bytes that the file
//! has already, where a write does not move the end of the file and cannot run out of space. What remains also holds
//! for O_DIRECT writes of host memory, whose requests are in flight concurrently: if storage fails, bytes after the
//! failure may be new. Writes that bypass the page cache by SPIN's choice stay in order, since their program did not
//! request O_DIRECT.
//!
//! Shadow workers write, through a duplicate of the program's descriptor (`pidfd_getfd`). Where a sandbox refuses that,
//! copy workers write, which share the program's fd table. All of them may be busy, and copy workers may even wait for
//! the bounce buffers that this write holds. So the caller itself writes a chunk that no worker has started in time.
//!
//! Known flaws:
//! - File systems that do not write blocks in place (btrfs, xfs where blocks are shared) can run out of space all the
//!   same; so can a file whose holes are balanced by blocks past its end.
//! - While a server (NFS, FUSE) does not answer, one write occupies up to six of the eight shadow workers that its file
//!   system may have (host/src/shares.rs); other requests on that file system then wait too.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKey, FileKind};

use super::gather::StagedWrite;
use super::stream_write::dup_app_fd;
use super::write_once::{IOV_MAX, WriteVia};
use super::{Result, WriteRequest, pinned_reason, staging_limit};
use spinio_files::{is_shadow, share_key};
use spinio_host::is_cancelled;
use spinio_host::lock;
use spinio_host::{pool::WorkerPool, shadow_fd::ShadowFd};

/// Bytes of a chunk. Large enough to keep storage busy; small enough that several in flight fit in a part of the pool.
pub(super) const PARALLEL_CHUNK: usize = 4 << 20;

/// Most chunks in flight.
const MAX_IN_FLIGHT: usize = 6;

/// How long to wait for the close of the duplicated descriptor.
const CLOSE_WAIT: Duration = Duration::from_millis(20);

/// How long to wait until a worker starts a chunk.
const START_WAIT: Duration = Duration::from_millis(10);

/// The workers that write, and their descriptor.
pub(super) struct Writers<'a> {
    pool: &'a WorkerPool,
    fd: Fd,
    /// Set if `fd` is a number in the program's fd table: it must refer to this file.
    file: Option<FileKey>,
    /// The duplicate of the program's descriptor in the shadow fd table.
    shadow_fd: Option<ShadowFd>,
}

impl Writers<'_> {
    /// Waits for the close: state that ends with the last descriptor (locks, for example) must end when the program
    /// closes its own.
    pub(super) fn close(self, dev: u64) {
        if self.shadow_fd.is_some() {
            drop(self.shadow_fd);
            self.pool.wait_closed(Some(dev), CLOSE_WAIT);
        }
    }
}

/// State of a chunk.
#[derive(Default)]
enum State {
    #[default]
    Queued,
    /// A worker writes it.
    Started,
    Done(core::result::Result<usize, Errno>),
    /// No worker will start it any more.
    Withdrawn,
}

/// The state of a chunk, shared by the caller and a worker.
#[derive(Default)]
struct ChunkState {
    state: Mutex<State>,
    changed: Condvar,
}

impl ChunkState {
    /// Whether a worker may start it.
    fn try_start(&self) -> bool {
        let mut state = lock(&self.state);
        let queued = matches!(*state, State::Queued);
        if queued {
            *state = State::Started;
        }
        queued
    }

    fn finish(&self, wrote: core::result::Result<usize, Errno>) {
        *lock(&self.state) = State::Done(wrote);
        self.changed.notify_one();
    }

    /// The result, if a worker starts the chunk within `start_wait`; `None`: no worker will start it any more.
    fn wait(&self, start_wait: Duration) -> Option<core::result::Result<usize, Errno>> {
        let queued = |state: &mut State| matches!(state, State::Queued);
        let state = lock(&self.state);
        let (mut state, _) =
            self.changed.wait_timeout_while(state, start_wait, queued).unwrap_or_else(PoisonError::into_inner);
        loop {
            match *state {
                State::Queued => *state = State::Withdrawn,
                State::Withdrawn => return None,
                State::Done(wrote) => return Some(wrote),
                State::Started => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

/// A chunk that a worker writes, and its memory, which stays until the worker is done with it.
struct ChunkInFlight {
    state: Arc<ChunkState>,
    from: usize,
    started: Instant,
    staged: StagedWrite,
}

impl Drop for ChunkInFlight {
    fn drop(&mut self) {
        let _ = self.state.wait(Duration::ZERO);
    }
}

impl WriteRequest<'_> {
    /// Whether chunks of a range may be in flight concurrently.
    pub(super) fn can_write_parallel(&self, range: &Range<usize>, via: WriteVia) -> bool {
        let app_direct = via.route == Route::Direct && via.shadow_fd.is_none() && !is_shadow(self.fd);
        let Some(at) = self.at.filter(|_| app_direct && self.flags == 0 && !self.is_append()) else { return false };
        let allocated = match self.stat.kind {
            FileKind::Block => true,
            FileKind::Regular => {
                let no_holes = self.stat.blocks.saturating_mul(512) >= self.stat.size;
                let end = at + range.end as u64;
                // Within RLIMIT_FSIZE: its signal goes to the thread that makes the call.
                no_holes && end <= self.stat.size.min(linux::file_size_limit())
            }
            FileKind::Other => false,
        };
        // One more chunk is being copied; and half of the memory is left to other requests, as in any long write.
        let enough_staging = staging_limit(self.ctx) / 2 >= ((MAX_IN_FLIGHT + 1) * PARALLEL_CHUNK) as u64;
        allocated && enough_staging && range.len() > 2 * PARALLEL_CHUNK
    }

    /// The workers that can write; `None` if there are none.
    pub(super) fn writers(&self) -> Option<Writers<'_>> {
        let shadow = self.ctx.files.shadow_workers()?;
        let file = self.stat.key();
        if let Some(shadow_fd) = dup_app_fd(self.ctx, self.fd, file) {
            return Some(Writers { pool: shadow, fd: shadow_fd.get(), file: None, shadow_fd: Some(shadow_fd) });
        }
        let workers = self.ctx.files.workers().copy().filter(|workers| workers.shares_fd_table() != Some(false))?;
        Some(Writers { pool: workers, fd: self.fd, file: Some(file), shadow_fd: None })
    }

    /// Writes the range, gathered chunk by chunk; the length of the contiguous prefix that was written. Without
    /// `writers` the caller writes, and the only chunk in flight is the one that it writes while the next one is
    /// copied.
    pub(super) fn write_window(
        &self,
        writers: Option<&Writers<'_>>,
        range: &Range<usize>,
        via: WriteVia,
        mut gather: impl FnMut(usize) -> Result<StagedWrite>,
    ) -> Result<usize> {
        let depth = if writers.is_some() { MAX_IN_FLIGHT } else { 1 };
        let mut in_flight: VecDeque<ChunkInFlight> = VecDeque::with_capacity(depth);
        // The end of the bytes copied, and the end of the contiguous bytes written.
        let (mut copied, mut done) = (range.start, range.start);
        let mut ended = loop {
            let next = (copied < range.end).then(|| gather(copied));
            // Wait for the oldest chunk while the next one is being copied.
            if (next.is_none() || in_flight.len() == depth)
                && let Some(oldest) = in_flight.pop_front()
            {
                match self.finish_chunk(&oldest, writers, via, &mut done) {
                    Ok(true) => {}
                    Ok(false) => break Ok(()),
                    Err(error) => break Err(error),
                }
                // The cancel poll below may need bounce buffers too.
                drop(oldest);
            } else if next.is_none() {
                break Ok(());
            }
            let Some(next) = next else { continue };
            let started = Instant::now();
            match next.and_then(|mut staged| staged.wait().map(|()| staged)) {
                Ok(staged) => {
                    let from = copied;
                    copied += staged.len;
                    let chunk = ChunkInFlight { state: Arc::default(), from, started, staged };
                    if let Some(writers) = writers {
                        self.start_chunk(writers, via, &chunk);
                    }
                    in_flight.push_back(chunk);
                }
                Err(error) => break Err(error),
            }
            if copied < range.end && is_cancelled() {
                break Ok(());
            }
        };
        for chunk in in_flight {
            if let (Err(error), true) = (self.finish_chunk(&chunk, writers, via, &mut done), ended.is_ok()) {
                ended = Err(error);
            }
        }
        match ended {
            Err(error) if done == range.start => Err(error),
            _ => Ok(done - range.start),
        }
    }

    /// Waits for a chunk, and adds its bytes to the contiguous prefix if it continues there. Whether it was written
    /// completely.
    fn finish_chunk(
        &self,
        chunk: &ChunkInFlight,
        writers: Option<&Writers<'_>>,
        via: WriteVia,
        done: &mut usize,
    ) -> Result<bool> {
        if chunk.from != *done {
            return Ok(false);
        }
        let at = self.at.map(|at| at + chunk.from as u64);
        let worker_result = writers.and_then(|_| chunk.state.wait(START_WAIT));
        let wrote = worker_result
            .unwrap_or_else(|| self.write_vectors(via, &chunk.staged.vectors, at))
            .map_err(|e| self.kernel_error(e, *done))?;
        let reason = pinned_reason(chunk.staged.is_pinned(), via.reason);
        self.ctx.files.stats().record_piece(&self.span, via.route, reason, *done as u64, wrote as u64, chunk.started);
        *done += wrote;
        Ok(wrote == chunk.staged.len)
    }

    /// Has a worker write a chunk.
    fn start_chunk(&self, writers: &Writers<'_>, via: WriteVia, chunk: &ChunkInFlight) {
        let (kernel, fd, route) = (self.ctx.files.sys(), writers.fd, via.route);
        let at = self.at.map(|at| at + chunk.from as u64);
        let mut vectors = chunk.staged.vectors.clone();
        vectors.truncate(IOV_MAX);
        let file = writers.file;
        let write = move || match file {
            Some(key) if !kernel.is_file(fd, key) => Err(Errno::BADF),
            // SAFETY: the memory stays until a started write is done; host parts belong to the program, and the kernel
            // validates them.
            _ => unsafe { kernel.pwritev(route, fd, &vectors, at, 0) },
        };
        let state = Arc::clone(&chunk.state);
        writers.pool.for_key(share_key(&self.stat)).spawn(move || {
            if state.try_start() {
                // Also after a panic: the caller waits for a result.
                state.finish(catch_unwind(AssertUnwindSafe(write)).unwrap_or(Err(Errno::IO)));
            }
        });
    }
}
