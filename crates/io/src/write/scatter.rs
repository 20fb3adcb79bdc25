//! Several ranges of a shadow file, each written by a single system call, several at a time.
//!
//! ```text
//!   caller    gather group 0 │ gather group 1 │ wait for 0 │ gather group 2 ...   a group: half of the staging memory
//!   workers                  │ range, range, range ...     │ range, range ...      up to 8 calls in flight
//! ```
//!
//! For storage that needs requests of a certain shape, such as full stripes of RAID-5, and is faster with several of
//! them in flight. The order in which ranges reach the file is not specified: this is no POSIX write.
//!
//! A caller may allow ranges only while a condition holds (a lease, for bytes that others wrote). The condition is
//! checked for each range, just before its call. So when it ends, one request per shadow worker is in flight at most,
//! and ranges that were not started stay unwritten.

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
use spinio_host::pool::{SHADOW_WORKERS, Task};
use spinio_host::syscalls::Syscalls;
use spinio_stats::Direction;
use spinio_transfer::Error;

/// A range that a single system call writes.
struct RangeWrite {
    at: u64,
    vectors: Vec<[usize; 2]>,
}

/// Ranges that shadow workers take one after another.
struct RangeWriter {
    kernel: &'static dyn Syscalls,
    fd: Fd,
    route: Route,
    ranges: Vec<RangeWrite>,
    next: AtomicUsize,
    /// Called before each range: whether it may be written.
    still_allowed: Option<Arc<WriteCheck>>,
    /// A range has failed, or may not be written: no further one is started.
    stopped: AtomicBool,
    remaining: Mutex<Remaining>,
    all_done: Condvar,
}

/// The condition that must hold when a range is written.
type WriteCheck = dyn Fn() -> bool + Send + Sync;

/// The ranges that are not done.
struct Remaining {
    /// Number of ranges without an outcome.
    pending: usize,
    /// The failed range with the lowest offset.
    failed: Option<(u64, Errno)>,
    /// Ranges that no worker tried to write.
    unwritten: Vec<usize>,
}

impl Task for RangeWriter {
    fn execute(&self) {
        loop {
            let number = self.next.fetch_add(1, Relaxed);
            let Some(range) = self.ranges.get(number) else { return };
            // The range gets an outcome also after a panic: the caller waits for it.
            let write = || {
                let allowed = !self.stopped.load(Relaxed) && self.still_allowed.as_ref().is_none_or(|check| check());
                allowed.then(|| self.write_range(range))
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
    fn write_range(&self, range: &RangeWrite) -> core::result::Result<(), Errno> {
        let mut vectors = range.vectors.clone();
        let mut at = range.at;
        while !vectors.is_empty() {
            // SAFETY: the caller keeps the gathered memory until all ranges have an outcome.
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

    /// Waits until all ranges have an outcome; the ranges that no worker tried to write.
    fn wait(&self) -> core::result::Result<Vec<usize>, (u64, Errno)> {
        let mut remaining = lock(&self.remaining);
        while remaining.pending > 0 {
            remaining = self.all_done.wait(remaining).unwrap_or_else(PoisonError::into_inner);
        }
        remaining.failed.map_or_else(|| Ok(std::mem::take(&mut remaining.unwritten)), Err)
    }
}

/// Removes the first bytes.
pub(super) fn advance(vectors: &mut Vec<[usize; 2]>, mut bytes: usize) {
    vectors.retain_mut(|[at, len]| {
        let skipped = bytes.min(*len);
        (*at, *len, bytes) = (*at + skipped, *len - skipped, bytes - skipped);
        *len > 0
    });
}

/// Removes and returns the vectors of the first `len` bytes.
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
    /// Writes parts at offsets of a file, each in a single system call; returns when all are written. The error has the
    /// lowest offset that failed; other ranges may be written or not.
    pub fn write_ranges(self: &Arc<Self>, file: &ShadowFile, ranges: &[(u64, Part)], route: Route) -> Result<()> {
        self.write_ranges_recorded(file, ranges, route, None).map(drop)
    }

    /// As [`Writer::write_ranges`], but each range only if `still_allowed` returns true just before its call. Returns
    /// the numbers of the ranges that were not written.
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
            let reason = if route == Route::Direct { Reason::FullStripes } else { Reason::IntoCache };
            stats.record_piece(&span, route, reason, 0, wrote as u64, started);
        }
        stats.end(&span, &wrote.map_err(Error::errno));
        unwritten
    }
}

/// Writes the ranges; returns those that were not written because they were not allowed.
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
        let staged = staged?;
        let task = start_group(ctx, file, &ranges[from..to], &staged, (route, still_allowed.map(Arc::clone)));
        in_flight = Some(GroupInFlight { first: from, task, _staged: staged });
        from = to;
    }
    wait_group(in_flight)
}

/// A group of ranges that is being written, and its memory. If it is dropped after an error or a panic, no further
/// range is started, and the ranges in flight are waited for, since their memory is freed with it.
struct GroupInFlight {
    /// The number of its first range.
    first: usize,
    task: Arc<RangeWriter>,
    _staged: StagedWrite,
}

fn start_group(
    ctx: &Writer,
    file: &ShadowFile,
    ranges: &[(u64, Part)],
    staged: &StagedWrite,
    (route, still_allowed): (Route, Option<Arc<WriteCheck>>),
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
        still_allowed,
        stopped: AtomicBool::new(false),
        remaining: Mutex::new(Remaining { pending: count, failed: None, unwritten: Vec::new() }),
        all_done: Condvar::new(),
    });
    if let Some(shadow) = ctx.files.shadow_workers() {
        shadow.for_key(file.share_key()).submit(task.clone(), count.min(SHADOW_WORKERS));
    }
    task
}

/// Waits for the ranges of a group, and then releases their memory. Returns the ranges that were not written.
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
