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

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::Fd;

use super::gather::{Gathered, Into, Order};
use super::{Part, Result, bound};
use crate::ctx::Writer;
use spinio_host::pool::SHADOW_WORKERS as KEEPERS;
use spinio_host::pool::Task;
use spinio_host::syscalls::Kernel;
use spinio_host::lock;
use spinio_stats::Direction;
use spinio_files::OwnFile;
use spinio_transfer::Error;

/// A range that one call of the kernel writes.
struct Range {
    at: u64,
    vectors: Vec<[usize; 2]>,
}

/// Ranges that keepers take one after another.
struct Ranges {
    kernel: &'static dyn Kernel,
    fd: Fd,
    route: Route,
    ranges: Vec<Range>,
    next: AtomicUsize,
    /// Asked before each: whether it may be written.
    may: Option<Arc<Check>>,
    /// One has failed, or may not be written: no further one is begun.
    stopped: AtomicBool,
    left: Mutex<Left>,
    over: Condvar,
}

/// What is to hold when a range is written.
type Check = dyn Fn() -> bool + Send + Sync;

/// What is left of ranges.
struct Left {
    /// How many are still to be accounted for.
    open: usize,
    /// The first in the file that failed.
    failed: Option<(u64, Errno)>,
    /// Those that nobody tried.
    unwritten: Vec<usize>,
}

impl Task for Ranges {
    fn help(&self) {
        loop {
            let number = self.next.fetch_add(1, Relaxed);
            let Some(range) = self.ranges.get(number) else { return };
            // Whatever happens, the range is accounted for: somebody waits for it.
            let write = || {
                let begin = !self.stopped.load(Relaxed) && self.may.as_ref().is_none_or(|may| may());
                begin.then(|| self.write(range))
            };
            let wrote = catch_unwind(AssertUnwindSafe(write)).unwrap_or(Some(Err(Errno::IO)));
            let mut left = lock(&self.left);
            match wrote {
                Some(Ok(())) => {}
                None => {
                    self.stopped.store(true, Relaxed);
                    left.unwritten.push(number);
                }
                Some(Err(errno)) => {
                    self.stopped.store(true, Relaxed);
                    if left.failed.is_none_or(|(at, _)| range.at < at) {
                        left.failed = Some((range.at, errno));
                    }
                }
            }
            left.open -= 1;
            if left.open == 0 {
                self.over.notify_all();
            }
        }
    }
}

impl Ranges {
    fn write(&self, range: &Range) -> core::result::Result<(), Errno> {
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
            skip(&mut vectors, wrote);
        }
        Ok(())
    }

    /// Waits until all are accounted for; those that nobody tried.
    fn wait(&self) -> core::result::Result<Vec<usize>, (u64, Errno)> {
        let mut left = lock(&self.left);
        while left.open > 0 {
            left = self.over.wait(left).unwrap_or_else(PoisonError::into_inner);
        }
        left.failed.map_or_else(|| Ok(std::mem::take(&mut left.unwritten)), Err)
    }
}

/// Leaves out the first bytes.
fn skip(vectors: &mut Vec<[usize; 2]>, mut bytes: usize) {
    vectors.retain_mut(|[at, len]| {
        let gone = bytes.min(*len);
        (*at, *len, bytes) = (*at + gone, *len - gone, bytes - gone);
        *len > 0
    });
}

/// The vectors of the first `len` bytes, which are taken out.
fn split(vectors: &mut std::collections::VecDeque<[usize; 2]>, mut len: usize) -> Vec<[usize; 2]> {
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
    pub fn write_apart(self: &Arc<Self>, file: &OwnFile, ranges: &[(u64, Part)], route: Route) -> Result<()> {
        self.write_watched_apart(file, ranges, route, None).map(drop)
    }

    /// As [`Writer::write_apart`], each range only if a keeper is told just before it that it may be. Which may not, and
    /// were not written.
    pub fn write_apart_if(
        self: &Arc<Self>,
        file: &OwnFile,
        ranges: &[(u64, Part)],
        route: Route,
        may: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Vec<usize>> {
        self.write_watched_apart(file, ranges, route, Some(Arc::new(may)))
    }

    fn write_watched_apart(
        self: &Arc<Self>,
        file: &OwnFile,
        ranges: &[(u64, Part)],
        route: Route,
        may: Option<Arc<Check>>,
    ) -> Result<Vec<usize>> {
        let asked: usize = ranges.iter().map(|r| r.1.len()).sum();
        let Some(&(first, _)) = ranges.first() else { return Ok(Vec::new()) };
        let stats = self.files.stats();
        let watch = stats.begin(Direction::Write, file.fd(), Some(first), asked as u64);
        let begun = Instant::now();
        let unwritten = write(self, file, ranges, route, may.as_ref());
        let wrote = unwritten.as_ref().map(|left| asked - left.iter().map(|&n| ranges[n].1.len()).sum::<usize>());
        if let Ok(wrote) = wrote {
            let why = if route == Route::Direct { Reason::WholeStripes } else { Reason::IntoCache };
            stats.piece(&watch, route, why, 0, wrote as u64, begun);
        }
        stats.end(&watch, &wrote.map_err(Error::errno));
        unwritten
    }
}

/// The ranges that were not written because they may not be.
fn write(
    ctx: &Arc<Writer>,
    file: &OwnFile,
    ranges: &[(u64, Part)],
    route: Route,
    may: Option<&Arc<Check>>,
) -> Result<Vec<usize>> {
    let parts: Vec<Part> = ranges.iter().map(|r| r.1).collect();
    let device_error = |e| Error::device(e, "write", ranges[0].0, parts.iter().map(|p| p.len() as u64).sum());
    let order = Order::leased(&parts).map_err(device_error)?;
    let most = bound(ctx) as usize / 2;
    let mut under_way: Option<UnderWay> = None;
    let mut from = 0;
    while from < ranges.len() {
        let mut to = from;
        let mut bytes = 0;
        while to < ranges.len() && (to == from || bytes + parts[to].len() <= most) {
            bytes += parts[to].len();
            to += 1;
        }
        let gather = || {
            let mut gathered = Gathered::begin(ctx, &order, &parts[from..to], Into::Ring, ranges[from].0)?.fenced()?;
            gathered.wait().map(|()| gathered)
        };
        let gathered = gather();
        let mut unwritten = finish(under_way.take())?;
        if !unwritten.is_empty() {
            unwritten.extend(from..ranges.len());
            return Ok(unwritten);
        }
        let gathered = gathered?;
        let task = begin(ctx, file, &ranges[from..to], &gathered, (route, may.map(Arc::clone)));
        under_way = Some(UnderWay { first: from, task, _gathered: gathered });
        from = to;
    }
    finish(under_way)
}

/// A group of ranges that is being written, and its memory. Where it is dropped, by an error or a panic, no further range
/// is begun, and those that are being written are waited for: their memory goes with it.
struct UnderWay {
    /// Number of its first range.
    first: usize,
    task: Arc<Ranges>,
    _gathered: Gathered,
}

fn begin(
    ctx: &Writer,
    file: &OwnFile,
    ranges: &[(u64, Part)],
    gathered: &Gathered,
    (route, may): (Route, Option<Arc<Check>>),
) -> Arc<Ranges> {
    let mut vectors = gathered.vectors.iter().copied().collect();
    let ranges: Vec<Range> =
        ranges.iter().map(|(at, part)| Range { at: *at, vectors: split(&mut vectors, part.len()) }).collect();
    let count = ranges.len();
    let task = Arc::new(Ranges {
        kernel: ctx.files.sys(),
        fd: file.fd(),
        route,
        ranges,
        next: AtomicUsize::new(0),
        may,
        stopped: AtomicBool::new(false),
        left: Mutex::new(Left { open: count, failed: None, unwritten: Vec::new() }),
        over: Condvar::new(),
    });
    if let Some(keepers) = ctx.files.shadow_workers() {
        keepers.post(task.clone(), count.min(KEEPERS));
    }
    task
}

/// Waits for ranges under way; their memory is given back after that. Those that were not written.
fn finish(under_way: Option<UnderWay>) -> Result<Vec<usize>> {
    let Some(group) = under_way else { return Ok(Vec::new()) };
    let unwritten = group.task.wait().map_err(|(at, errno)| {
        let found = group.task.ranges.iter().find(|r| r.at == at);
        Error::kernel(errno, "write", at, found.map_or(0, |r| r.vectors.iter().map(|v| v[1] as u64).sum()))
    })?;
    Ok(unwritten.into_iter().map(|number| group.first + number).collect())
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.task.stopped.store(true, Relaxed);
        let _ = self.task.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_split_and_skipped_by_bytes() {
        let mut all = [[100, 10], [200, 5], [300, 1]].into_iter().collect();
        assert_eq!(split(&mut all, 3), [[100, 3]]);
        assert_eq!(split(&mut all, 9), [[103, 7], [200, 2]]);
        assert_eq!(split(&mut all, 99), [[202, 3], [300, 1]]);
        let mut all = vec![[100, 10], [200, 5]];
        skip(&mut all, 12);
        assert_eq!(all, [[202, 3]]);
        skip(&mut all, 3);
        assert!(all.is_empty());
    }
}
