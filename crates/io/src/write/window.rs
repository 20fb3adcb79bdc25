//! The chunks of a long write that are in flight: one, which the caller writes while the next is copied; or up to six, through
//! the program's own O_DIRECT descriptor, so that storage never waits for the next one.
//!
//! ```text
//!   caller    copy 0 │ copy 1 │ ... │ copy 5 │ wait for 0 │ copy 6 │ wait for 1 │ copy 7 ...
//!   helpers          └ write 0 ........... ┘              └ write 6 ........... ┘
//!                             └ write 1 .............. ┘               └ write 7 ...
//! ```
//!
//! One call after the other leaves storage idle in between: while the last requests of a call come in, while its caller
//! wakes up, and until the first of the next are on their way. Seen: 0.25 ms of every 5. And small portions in the same
//! blocks again and again take a fraction of the staging memory: two portions of 32 MiB made a first write wait 10 ms for
//! memory to be made.
//!
//! The count is an unbroken front: portions are waited for in the order of the file, and nothing counts behind the first
//! that fails or is short. But what is behind it may have reached the file. So this is only for bytes that the file has
//! already, where a write adds nothing: no end is moved, and no room can be lacking. What remains is what O_DIRECT means
//! to a host as well, whose requests are under way side by side: where storage fails, bytes behind the failure may be new.
//! Writes that go around the page cache by SPIN's own choice stay in order, since their program has not asked for that.
//!
//! Keepers write, through the program's very descriptor (`pidfd_getfd`); where a sandbox refuses that, the mates do, who see
//! the program's table. All of them may be busy, and mates even with waiting for the blocks that lie here: so what nobody
//! has begun after a while the caller writes himself.
//!
//! Known flaws:
//! - On file systems that write no block in place (btrfs, xfs where blocks are shared) room can be lacking all the same; so it
//!   can where blocks that lie behind the end of the file make up for its holes.
//! - While a server (NFS, FUSE) does not answer, one write keeps up to six of the eight keepers waiting, and two keep all;
//!   reads of other files then wait too.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKind};

use super::gather::StagedWrite;
use super::stream_write::dup_app_fd;
use super::write_once::{IOV_MAX, WriteVia};
use super::{Result, WriteRequest, pinned_reason, staging_limit};
use spinio_files::{is_shadow, share_key};
use spinio_host::is_cancelled;
use spinio_host::lock;
use spinio_host::{pool::WorkerPool, shadow_fd::ShadowFd};

/// Bytes of a portion. Enough for storage to be busy with; little enough for several to be under way in a part of the ring.
pub(super) const PARALLEL_CHUNK: usize = 4 << 20;

/// How many are under way at most.
const MAX_IN_FLIGHT: usize = 6;

/// How long the end of the shared descriptor is waited for.
const CLOSE_WAIT: Duration = Duration::from_millis(20);

/// How long somebody is waited for who begins a portion.
const START_WAIT: Duration = Duration::from_millis(10);

/// Who writes, and through which descriptor.
pub(super) struct Writers<'a> {
    pool: &'a WorkerPool,
    fd: Fd,
    /// The number is of the program's table, and has to mean this file.
    file: Option<(u64, u64)>,
    /// The program's descriptor in the keepers' table.
    shadow_fd: Option<ShadowFd>,
}

impl Writers<'_> {
    /// What ends with the last descriptor (locks, say) shall end with the program's.
    pub(super) fn close(self, dev: u64) {
        if self.shadow_fd.is_some() {
            drop(self.shadow_fd);
            self.pool.wait_closed(Some(dev), CLOSE_WAIT);
        }
    }
}

/// How far a portion is.
#[derive(Default)]
enum State {
    #[default]
    Queued,
    /// A helper writes it.
    Started,
    Done(core::result::Result<usize, Errno>),
    /// No helper will.
    Withdrawn,
}

/// What the caller and a helper tell each other about a portion.
#[derive(Default)]
struct ChunkState {
    state: Mutex<State>,
    changed: Condvar,
}

impl ChunkState {
    /// Whether a helper may begin it.
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

    /// What was written, if a helper begins it in such a time; `None`: none does any more.
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

/// A portion that a helper writes, and its memory, which stays until he is done with it.
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
    /// Whether portions of a range may be under way side by side.
    pub(super) fn can_write_parallel(&self, range: &Range<usize>, via: WriteVia) -> bool {
        let app_direct = via.route == Route::Direct && via.shadow_fd.is_none() && !is_shadow(self.fd);
        let Some(at) = self.at.filter(|_| app_direct && self.flags == 0 && !self.is_append()) else { return false };
        let allocated = match self.stat.kind {
            FileKind::Block => true,
            FileKind::Regular => {
                let filled = self.stat.blocks.saturating_mul(512) >= self.stat.size;
                let end = at + range.end as u64;
                // The signal of a limit is for the thread that makes the call.
                filled && end <= self.stat.size.min(linux::file_size_limit())
            }
            FileKind::Other => false,
        };
        // One more is being copied; and half of the memory is for others, as in any long write.
        let enough_staging = staging_limit(self.ctx) / 2 >= ((MAX_IN_FLIGHT + 1) * PARALLEL_CHUNK) as u64;
        allocated && enough_staging && range.len() > 2 * PARALLEL_CHUNK
    }

    /// Those who can write; `None` if nobody can.
    pub(super) fn writers(&self) -> Option<Writers<'_>> {
        let shadow = self.ctx.files.shadow_workers()?;
        let file = (self.stat.dev, self.stat.ino);
        if let Some(shadow_fd) = dup_app_fd(self.ctx, self.fd, file) {
            return Some(Writers { pool: shadow, fd: shadow_fd.get(), file: None, shadow_fd: Some(shadow_fd) });
        }
        let workers = self.ctx.files.workers().copy().filter(|mates| mates.shares_fd_table() != Some(false))?;
        Some(Writers { pool: workers, fd: self.fd, file: Some(file), shadow_fd: None })
    }

    /// A range, gathered chunk by chunk; the contiguous prefix that was written. Without `writers` the caller writes, and the
    /// only chunk in flight is the one that it writes while the next one is copied.
    pub(super) fn write_window(
        &self,
        writers: Option<&Writers<'_>>,
        range: &Range<usize>,
        via: WriteVia,
        mut gather: impl FnMut(usize) -> Result<StagedWrite>,
    ) -> Result<usize> {
        let depth = if writers.is_some() { MAX_IN_FLIGHT } else { 1 };
        let mut in_flight: VecDeque<ChunkInFlight> = VecDeque::with_capacity(depth);
        // To the end of what is copied, and to the end of what is written.
        let (mut copied, mut done) = (range.start, range.start);
        let mut ended = loop {
            let next = (copied < range.end).then(|| gather(copied));
            // While it is copied.
            if (next.is_none() || in_flight.len() == depth)
                && let Some(oldest) = in_flight.pop_front()
            {
                match self.finish_chunk(&oldest, writers, via, &mut done) {
                    Ok(true) => {}
                    Ok(false) => break Ok(()),
                    Err(error) => break Err(error),
                }
                // The poll may need bounce buffers too.
                drop(oldest);
                if done < range.end && is_cancelled() {
                    break Ok(());
                }
            } else if next.is_none() {
                break Ok(());
            }
            let Some(next) = next else { continue };
            let started = Instant::now();
            match next.and_then(|mut portion| portion.wait().map(|()| portion)) {
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

    /// Waits for a portion, and adds what was written of it to the front if it goes on from there. Whether that was all of it.
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
        let why = pinned_reason(chunk.staged.is_pinned(), via.reason);
        self.ctx.files.stats().record_piece(&self.span, via.route, why, *done as u64, wrote as u64, chunk.started);
        *done += wrote;
        Ok(wrote == chunk.staged.len)
    }

    /// Lets a helper write a portion.
    fn start_chunk(&self, writers: &Writers<'_>, via: WriteVia, chunk: &ChunkInFlight) {
        let (kernel, fd, route) = (self.ctx.files.sys(), writers.fd, via.route);
        let at = self.at.map(|at| at + chunk.from as u64);
        let mut vectors = chunk.staged.vectors.clone();
        vectors.truncate(IOV_MAX);
        let file = writers.file;
        let write = move || match file {
            Some(key) if !kernel.is_file(fd, key) => Err(Errno::BADF),
            // SAFETY: the memory stays until what was begun is over; host parts are the program's, for the kernel to judge.
            _ => unsafe { kernel.pwritev(route, fd, &vectors, at, 0) },
        };
        let state = Arc::clone(&chunk.state);
        writers.pool.for_key(share_key(&self.stat)).spawn(move || {
            if state.try_start() {
                // Whatever happens, somebody waits for an answer.
                state.finish(catch_unwind(AssertUnwindSafe(write)).unwrap_or(Err(Errno::IO)));
            }
        });
    }
}
