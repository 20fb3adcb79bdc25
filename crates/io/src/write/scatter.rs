//! Several ranges of one of SPIN's own files, each written by one call of the kernel, several at a time.
//!
//! ```text
//!   caller    gather group 0 │ gather group 1 │ wait for 0 │ gather group 2 ...      a group: half of the staging memory
//!   keepers                  │ range, range, range ...     │ range, range ...         up to 8 calls under way
//! ```
//!
//! For storage that wants requests of a certain shape, such as whole stripes of RAID-5, and is faster with several of
//! them under way. Nothing is promised about the order in which ranges reach the file: it is no POSIX write.
//!
//! Ranges that may be written only while something holds (a lease, for bytes of others) ask for it one by one, each just
//! before its call. So when it ends, what is under way is one request a keeper, and what was not begun stays unwritten.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::Fd;

use super::gather::{BufferSource, StagedWrite, streams_after_app};
use super::{Part, Result, staging_limit};
use crate::ctx::Writer;
use spinio_files::ShadowFile;
use spinio_host::lock;
use spinio_host::pool::SHADOW_WORKERS as KEEPERS;
use spinio_host::pool::Task;
use spinio_host::syscalls::Syscalls;
use spinio_stats::Direction;
use spinio_transfer::Error;

/// A range that one call of the kernel writes.
struct RangeWrite {
    at: u64,
    vectors: Vec<[usize; 2]>,
}

/// Ranges that keepers take one after another.
struct RangeWriter {
    kernel: &'static dyn Syscalls,
    fd: Fd,
    route: Route,
    ranges: Vec<RangeWrite>,
    next: AtomicUsize,
    /// Asked before each: whether it may be written.
    still_allowed: Option<Arc<WriteCheck>>,
    /// One has failed, or may not be written: no further one is begun.
    stopped: AtomicBool,
    remaining: Mutex<Remaining>,
    all_done: Condvar,
}

/// What is to hold when a range is written.
type WriteCheck = dyn Fn() -> bool + Send + Sync;

/// What is left of ranges.
struct Remaining {
    /// How many are still to be accounted for.
    pending: usize,
    /// The first in the file that failed.
    failed: Option<(u64, Errno)>,
    /// Those that nobody tried.
    unwritten: Vec<usize>,
}

impl Task for RangeWriter {
    fn execute(&self) {
        loop {
            let number = self.next.fetch_add(1, Relaxed);
            let Some(range) = self.ranges.get(number) else { return };
            // Whatever happens, the range is accounted for: somebody waits for it.
            let write = || {
                let begin = !self.stopped.load(Relaxed) && self.still_allowed.as_ref().is_none_or(|may| may());
                begin.then(|| self.write_groups(range))
            };
            let wrote = catch_unwind(AssertUnwindSafe(write)).unwrap_or(Some(Err(Errno::IO)));
            let mut remaining = lock(&self.remaining);
            match wrote {
                Some(Ok(())) => {}
                None => {
                    self.stopped.store(true, Relaxed);
                    remaining.unwritten.push(number);
                }
                Some(Err(errno)) => {
                    self.stopped.store(true, Relaxed);
                    if remaining.failed.is_none_or(|(at, _)| range.at < at) {
                        remaining.failed = Some((range.at, errno));
                    }
                }
            }
            remaining.pending -= 1;
            if remaining.pending == 0 {
                self.all_done.notify_all();
            }
        }
    }
}

impl RangeWriter {
    fn write_groups(&self, range: &RangeWrite) -> core::result::Result<(), Errno> {
        let mut vectors = range.vectors.clone();
        let mut at = range.at;
        while !vectors.is_empty() {
            // SAFETY: the caller holds the gathered memory until all ranges are accounted for.
            let wrote = match unsafe { self.kernel.pwritev(self.route, self.fd, &vectors, Some(at), 0) } {
                Ok(0) => return Err(Errno::IO),
                Ok(wrote) => wrote,
                Err(Errno::INTR) => continue,
                Err(e) => return Err(e),
            };
            at += wrote as u64;
            advance(&mut vectors, wrote);
        }
        Ok(())
    }

    /// Waits until all are accounted for; those that nobody tried.
    fn wait(&self) -> core::result::Result<Vec<usize>, (u64, Errno)> {
        let mut remaining = lock(&self.remaining);
        while remaining.pending > 0 {
            remaining = self.all_done.wait(remaining).unwrap_or_else(PoisonError::into_inner);
        }
        remaining.failed.map_or_else(|| Ok(std::mem::take(&mut remaining.unwritten)), Err)
    }
}

/// Leaves out the first bytes.
fn advance(vectors: &mut Vec<[usize; 2]>, mut bytes: usize) {
    vectors.retain_mut(|[at, len]| {
        let skipped = bytes.min(*len);
        (*at, *len, bytes) = (*at + skipped, *len - skipped, bytes - skipped);
        *len > 0
    });
}

/// The vectors of the first `len` bytes, which are taken out.
fn take_front(vectors: &mut std::collections::VecDeque<[usize; 2]>, mut len: usize) -> Vec<[usize; 2]> {
    let mut out = Vec::new();
    while len > 0
        && let Some([at, all]) = vectors.pop_front()
    {
        let n = len.min(all);
        out.push([at, n]);
        if n < all {
            vectors.push_front([at + n, all - n]);
        }
        len -= n;
    }
    out
}

impl Writer {
    /// Writes parts at offsets of a file, each in one call of the kernel; returns when all are written. The error
    /// tells the first offset that failed; others may be written or not.
    pub fn write_ranges(self: &Arc<Self>, file: &ShadowFile, ranges: &[(u64, Part)], route: Route) -> Result<()> {
        self.write_ranges_recorded(file, ranges, route, None).map(drop)
    }

    /// As [`Writer::write_apart`], each range only if a keeper is told just before it that it may be. Which may not, and
    /// were not written.
    pub fn write_ranges_while(
        self: &Arc<Self>,
        file: &ShadowFile,
        ranges: &[(u64, Part)],
        route: Route,
        still_allowed: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Vec<usize>> {
        self.write_ranges_recorded(file, ranges, route, Some(Arc::new(still_allowed)))
    }

    fn write_ranges_recorded(
        self: &Arc<Self>,
        file: &ShadowFile,
        ranges: &[(u64, Part)],
        route: Route,
        still_allowed: Option<Arc<WriteCheck>>,
    ) -> Result<Vec<usize>> {
        let requested: usize = ranges.iter().map(|r| r.1.len()).sum();
        let Some(&(first, _)) = ranges.first() else { return Ok(Vec::new()) };
        let stats = self.files.stats();
        let span = stats.begin(Direction::Write, file.fd(), Some(first), requested as u64);
        let started = Instant::now();
        let unwritten = write(self, file, ranges, route, still_allowed.as_ref());
        let wrote = unwritten.as_ref().map(|left| requested - left.iter().map(|&n| ranges[n].1.len()).sum::<usize>());
        if let Ok(wrote) = wrote {
            let why = if route == Route::Direct { Reason::FullStripes } else { Reason::IntoCache };
            stats.record_piece(&span, route, why, 0, wrote as u64, started);
        }
        stats.end(&span, &wrote.map_err(Error::errno));
        unwritten
    }
}

/// The ranges that were not written because they may not be.
fn write(
    ctx: &Arc<Writer>,
    file: &ShadowFile,
    ranges: &[(u64, Part)],
    route: Route,
    still_allowed: Option<&Arc<WriteCheck>>,
) -> Result<Vec<usize>> {
    let parts: Vec<Part> = ranges.iter().map(|r| r.1).collect();
    let device_error = |e| Error::device(e, "write", ranges[0].0, parts.iter().map(|p| p.len() as u64).sum());
    let streams = streams_after_app(&parts).map_err(device_error)?;
    let max = staging_limit(ctx) as usize / 2;
    let mut in_flight: Option<GroupInFlight> = None;
    let mut from = 0;
    while from < ranges.len() {
        let mut to = from;
        let mut bytes = 0;
        while to < ranges.len() && (to == from || bytes + parts[to].len() <= max) {
            bytes += parts[to].len();
            to += 1;
        }
        let gather = || {
            let mut staged = StagedWrite::start(ctx, &streams, &parts[from..to], BufferSource::Pool, ranges[from].0)?
                .with_fences()?;
            staged.wait().map(|()| staged)
        };
        let staged = gather();
        let mut unwritten = wait_group(in_flight.take())?;
        if !unwritten.is_empty() {
            unwritten.extend(from..ranges.len());
            return Ok(unwritten);
        }
        let gathered = staged?;
        let task = start_group(ctx, file, &ranges[from..to], &gathered, (route, still_allowed.map(Arc::clone)));
        in_flight = Some(GroupInFlight { first: from, task, _staged: gathered });
        from = to;
    }
    wait_group(in_flight)
}

/// A group of ranges that is being written, and its memory. Where it is dropped, by an error or a panic, no further range
/// is begun, and those that are being written are waited for: their memory goes with it.
struct GroupInFlight {
    /// Number of its first range.
    first: usize,
    task: Arc<RangeWriter>,
    _staged: StagedWrite,
}

fn start_group(
    ctx: &Writer,
    file: &ShadowFile,
    ranges: &[(u64, Part)],
    staged: &StagedWrite,
    (route, may): (Route, Option<Arc<WriteCheck>>),
) -> Arc<RangeWriter> {
    let mut vectors = staged.vectors.iter().copied().collect();
    let ranges: Vec<RangeWrite> =
        ranges.iter().map(|(at, part)| RangeWrite { at: *at, vectors: take_front(&mut vectors, part.len()) }).collect();
    let count = ranges.len();
    let task = Arc::new(RangeWriter {
        kernel: ctx.files.sys(),
        fd: file.fd(),
        route,
        ranges,
        next: AtomicUsize::new(0),
        still_allowed: may,
        stopped: AtomicBool::new(false),
        remaining: Mutex::new(Remaining { pending: count, failed: None, unwritten: Vec::new() }),
        all_done: Condvar::new(),
    });
    if let Some(shadow) = ctx.files.shadow_workers() {
        shadow.for_key(file.share_key()).submit(task.clone(), count.min(KEEPERS));
    }
    task
}

/// Waits for ranges under way; their memory is given back after that. Those that were not written.
fn wait_group(in_flight: Option<GroupInFlight>) -> Result<Vec<usize>> {
    let Some(group) = in_flight else { return Ok(Vec::new()) };
    let unwritten = group.task.wait().map_err(|(at, errno)| {
        let found = group.task.ranges.iter().find(|r| r.at == at);
        Error::kernel(errno, "write", at, found.map_or(0, |r| r.vectors.iter().map(|v| v[1] as u64).sum()))
    })?;
    Ok(unwritten.into_iter().map(|number| group.first + number).collect())
}

impl Drop for GroupInFlight {
    fn drop(&mut self) {
        self.task.stopped.store(true, Relaxed);
        let _ = self.task.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_split_and_advance_by_bytes() {
        let mut all = [[100, 10], [200, 5], [300, 1]].into_iter().collect();
        assert_eq!(take_front(&mut all, 3), [[100, 3]]);
        assert_eq!(take_front(&mut all, 9), [[103, 7], [200, 2]]);
        assert_eq!(take_front(&mut all, 99), [[202, 3], [300, 1]]);
        let mut all = vec![[100, 10], [200, 5]];
        advance(&mut all, 12);
        assert_eq!(all, [[202, 3]]);
        advance(&mut all, 3);
        assert!(all.is_empty());
    }
}
