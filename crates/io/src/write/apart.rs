//! Several ranges of one of SPIN's own files, each written by one call of the kernel, several at a time.
//!
//! ```text
//!   caller    gather group 0 │ gather group 1 │ wait for 0 │ gather group 2 ...      a group: half of the staging memory
//!   keepers                  │ range, range, range ...     │ range, range ...         up to 8 calls under way
//! ```
//!
//! For storage that wants requests of a certain shape, such as whole stripes of RAID-5, and is faster with several of
//! them under way. Nothing is promised about the order in which ranges reach the file: it is no POSIX write.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::Fd;

use super::gather::{Gathered, Into, Order};
use super::{Part, Result, bound};
use crate::core::{Core, KEEPERS};
use crate::crew::Task;
use crate::kernel::Kernel;
use crate::lock::lock;
use crate::stats::Direction;
use crate::{Error, OwnFile, Runtime};

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
    /// One has failed: no further one is begun.
    failed: AtomicBool,
    /// Ranges still to be accounted for, and the error of the first in the file that failed.
    left: Mutex<(usize, Option<(u64, Errno)>)>,
    over: Condvar,
}

impl Task for Ranges {
    fn help(&self) {
        while let Some(range) = self.ranges.get(self.next.fetch_add(1, Relaxed)) {
            // Whatever happens, the range is accounted for: somebody waits for it.
            let write = || if self.failed.load(Relaxed) { Ok(()) } else { self.write(range) };
            let wrote = catch_unwind(AssertUnwindSafe(write)).unwrap_or(Err(Errno::IO));
            let mut left = lock(&self.left);
            if let Err(errno) = wrote {
                self.failed.store(true, Relaxed);
                if left.1.is_none_or(|(at, _)| range.at < at) {
                    left.1 = Some((range.at, errno));
                }
            }
            left.0 -= 1;
            if left.0 == 0 {
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

    fn wait(&self) -> core::result::Result<(), (u64, Errno)> {
        let mut left = lock(&self.left);
        while left.0 > 0 {
            left = self.over.wait(left).unwrap_or_else(PoisonError::into_inner);
        }
        left.1.map_or(Ok(()), Err)
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

impl Runtime {
    /// Writes parts at offsets of a file, each in one call of the kernel; returns when all are written. The error
    /// tells the first offset that failed; others may be written or not.
    pub fn write_apart(&self, file: &OwnFile, ranges: &[(u64, Part)], route: Route) -> Result<()> {
        let asked: u64 = ranges.iter().map(|r| r.1.len() as u64).sum();
        let Some(&(first, _)) = ranges.first() else { return Ok(()) };
        let stats = self.core().stats();
        let watch = stats.begin(Direction::Write, file.fd(), Some(first), asked);
        let begun = Instant::now();
        let wrote = write(self.core(), file, ranges, route).map(|()| asked as usize);
        if wrote.is_ok() {
            let why = if route == Route::Direct { Reason::WholeStripes } else { Reason::IntoCache };
            stats.piece(&watch, route, why, 0, asked, begun);
        }
        stats.end(&watch, &wrote.as_ref().copied());
        wrote.map(drop)
    }
}

fn write(core: &Arc<Core>, file: &OwnFile, ranges: &[(u64, Part)], route: Route) -> Result<()> {
    let parts: Vec<Part> = ranges.iter().map(|r| r.1).collect();
    let device_error = |e| Error::device(e, "write", ranges[0].0, parts.iter().map(|p| p.len() as u64).sum());
    let order = Order::leased(&parts).map_err(device_error)?;
    let most = bound(core) as usize / 2;
    let mut under_way: Option<(Arc<Ranges>, Gathered)> = None;
    let mut ended = Ok(());
    let mut from = 0;
    while from < ranges.len() {
        let mut to = from;
        let mut bytes = 0;
        while to < ranges.len() && (to == from || bytes + parts[to].len() <= most) {
            bytes += parts[to].len();
            to += 1;
        }
        let at = ranges[from].0;
        let gathered = Gathered::fenced(core, &order, &parts[from..to], Into::Ring, at).and_then(|mut gathered| {
            gathered.wait(at)?;
            Ok(gathered)
        });
        let finished = finish(under_way.take());
        match (finished, gathered) {
            (Ok(()), Ok(gathered)) => {
                under_way = Some((begin(core, file, &ranges[from..to], &gathered, route), gathered))
            }
            (finished, gathered) => {
                ended = finished.and(gathered.map(drop));
                break;
            }
        }
        from = to;
    }
    ended.and(finish(under_way))
}

fn begin(core: &Core, file: &OwnFile, ranges: &[(u64, Part)], gathered: &Gathered, route: Route) -> Arc<Ranges> {
    let mut vectors = gathered.vectors.iter().copied().collect();
    let ranges: Vec<Range> =
        ranges.iter().map(|(at, part)| Range { at: *at, vectors: split(&mut vectors, part.len()) }).collect();
    let count = ranges.len();
    let task = Arc::new(Ranges {
        kernel: core.kernel,
        fd: file.fd(),
        route,
        ranges,
        next: AtomicUsize::new(0),
        failed: AtomicBool::new(false),
        left: Mutex::new((count, None)),
        over: Condvar::new(),
    });
    if let Some(keepers) = core.keepers() {
        keepers.post(task.clone(), count.min(KEEPERS));
    }
    task
}

/// Waits for ranges under way; their memory is given back after that.
fn finish(under_way: Option<(Arc<Ranges>, Gathered)>) -> Result<()> {
    let Some((ranges, gathered)) = under_way else { return Ok(()) };
    let waited = ranges.wait();
    drop(gathered);
    waited.map_err(|(at, errno)| {
        let len = ranges.ranges.iter().find(|r| r.at == at).map_or(0, |r| r.vectors.iter().map(|v| v[1] as u64).sum());
        Error::kernel(errno, "write", at, len)
    })
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
