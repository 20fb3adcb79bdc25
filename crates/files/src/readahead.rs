//! Which pages device reads add to the page cache, and when they are dropped again.
//!
//! ```text
//!   caller          small read ──> sequential.rs: check due? ── once in 512 KiB ──┐
//!                   what it has passed and was absent when surveyed is owned now  │
//!                   residency further ahead than Linux reads: owned later        <┘   (spinio_plan::readahead)
//!                     │
//!   shadow worker   which processes opened the file meanwhile? (inotify)
//!                   ├─ another one: what SPIN read in is forgotten; nothing is dropped until it has closed the file
//!                   └─ none:        owned pages ──> the bounded set ── over the limit ──> DONTNEED
//! ```
//!
//! The caller surveys, at a microsecond each time, because the survey must precede the read-ahead of the Linux kernel,
//! and a shadow worker may have to wait for a processor. The work of shadow workers is not urgent.
//!
//! Pieces of large requests that use the page cache although they were absent (edges, short gaps, short sequential
//! requests) join the set when the request is complete.
//!
//! When the program closes the file, its pages in the set are dropped at once: no later request could drop them.
//!
//! Only files whose residency may be queried are managed (owned by this user, or writable), and only if inotify is
//! available; pages of all others stay cached, as after any read. DONTNEED is never used for a page that was resident
//! before the reader came near it, and Linux keeps pages that are mapped, dirty or in use.
//!
//! A stream through cached pages is probed at one place in 512 KiB, every 8 MiB.
//!
//! Nothing prevents an open of the file while its pages are dropped, and a drop may take milliseconds under load. So
//! the shadow worker checks for an open after the drop too, and makes Linux read the range again if there was one.
//!
//! Known flaws: inotify does not report which process opened a file, so a second open by the program itself counts as
//! another process's. It merges two opens without another event between them, so after the first of the two has closed
//! the file the second is no longer counted. A process that had the file open before SPIN began to watch it is not seen
//! at all: pages that it reads in a range that SPIN read in are dropped too, and it reads them again. A page that the
//! program itself reads into host memory is not distinguished from one that only the device needed.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{
    AtomicI64,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use spinio_plan::readahead::{
    CACHED_SURVEY_STEP, OwnedPages, SURVEY_STEP, SurveyWindow, max_buffered_request, survey_distance,
};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Advice, Fd, FileKey, FileKind, InotifyEvent, PAGE, Stat};

use spinio_host::lock;
use spinio_host::pool::WorkerPool;
use spinio_host::settings::{CachePolicy, Settings};
use spinio_host::shadow_fd::{PreCloseHook, ShadowFd};
use spinio_host::shares::ShareKey;
use spinio_host::syscalls::Syscalls;
use spinio_stats::Gauge;

use crate::ctx::FilesCtx;
use crate::residency::{self, ResidencyAccess};
use crate::sequential::{self, SequentialDetector};
use crate::state::{FileState, share_key};
use crate::table::FileTable;

/// Streams that are tracked.
const MAX_STREAMS: usize = 64;

/// Bytes until a stream of an unmanaged file is checked again.
const UNMANAGED_CHECK_BYTES: u64 = 1 << 30;

/// The read-ahead window while the device is not known yet: the widest in use.
const DEFAULT_WINDOW: u64 = 8 << 20;

/// The largest folio: the page cache drops only whole folios.
const MAX_FOLIO: u64 = 2 << 20;

/// Bytes of read-ahead that shadow workers request for POSIX_FADV_WILLNEED.
const PREFETCH_MAX: u64 = 64 << 20;
/// Of these, per call: the read-ahead window of the disk, of which Linux reads no more than one, within these limits. A
/// smaller window is that of a disk whose requests are longer, which Linux reads then.
const MIN_PREFETCH_STEP: u64 = 64 << 10;
const MAX_PREFETCH_STEP: u64 = 2 << 20;
/// Per call where the window is not known: the default of Linux.
const DEFAULT_PREFETCH_STEP: u64 = 128 << 10;

/// The set of a runtime, and its watch over files.
pub struct ReadaheadCache {
    policy: CachePolicy,
    owned: Mutex<OwnedPages<FileKey>>,
    /// The active streams, the most recently checked last.
    streams: Mutex<Vec<Arc<SequentialStream>>>,
    /// The inotify descriptor, in the shadow table.
    inotify: OnceLock<Option<ShadowFd>>,
    /// The number of opens of a watched file that are not SPIN's, by watch.
    other_opens: Mutex<HashMap<i32, Arc<AtomicI64>>>,
    /// The managed files.
    files: Mutex<HashMap<FileKey, Watch>>,
    ctx: Arc<FilesCtx>,
    kept: Weak<FileTable>,
    detector: Arc<SequentialDetector>,
    weak_self: Weak<ReadaheadCache>,
}

/// A stream of reads of one descriptor. It has its own lock, so that a survey of it blocks no other stream.
struct SequentialStream {
    key: FileKey,
    fd: Fd,
    state: Mutex<StreamState>,
}

/// The progress of a stream.
#[derive(Default)]
struct StreamState {
    surveyed: SurveyWindow,
    survey_distance: u64,
    /// Owned and not in the set yet; and whether a shadow worker is queued for it.
    consumed: Vec<Range<u64>>,
    worker_queued: bool,
}

/// The state of a managed file.
struct Watch {
    wd: i32,
    other_opens: Arc<AtomicI64>,
    /// The read-ahead window of its disk; 0 if unknown.
    read_ahead: u64,
    /// The last contiguous range that was dropped.
    last_dropped: Range<u64>,
}

impl StreamState {
    /// The stream has reached `at`.
    fn update(
        &mut self,
        cache: &ReadaheadCache,
        fd: Fd,
        known: Option<&FileState>,
        at: u64,
        (size, doubled): (u64, bool),
    ) {
        let window_hint = known.map(|file| file.block_stack().read_ahead());
        let end = known.map_or(size, |file| file.size.max(size)).next_multiple_of(PAGE as u64);
        let surveyed = &mut self.surveyed;
        self.survey_distance = survey_distance(window_hint.unwrap_or(DEFAULT_WINDOW), doubled, surveyed.survey_step());
        self.consumed.extend(surveyed.advance(at, self.survey_distance));
        if let Some(range) = surveyed.next_survey(at, self.survey_distance).filter(|range| range.start < end) {
            let range = range.start..range.end.min(end);
            let probe = surveyed.any_absent() || !spot_check_cached(cache.ctx.sys, fd, &range);
            let absent = if probe { residency::absent_runs(cache.ctx.sys, fd, range.clone()) } else { Vec::new() };
            surveyed.record_survey(range, absent);
        }
        cache.detector.schedule_check(
            fd,
            surveyed.survey_step(),
            max_buffered_request(window_hint.unwrap_or(0), doubled),
        );
    }
}

impl ReadaheadCache {
    /// An empty set.
    pub fn new(
        settings: &Settings,
        ctx: &Arc<FilesCtx>,
        kept: &Arc<FileTable>,
        detector: &Arc<SequentialDetector>,
    ) -> Arc<ReadaheadCache> {
        let pages = if settings.readahead_keep == CachePolicy::Auto { settings.readahead_pages } else { 0 };
        let limit = pages.saturating_mul(PAGE as u64);
        Arc::new_cyclic(|weak_self| ReadaheadCache {
            policy: settings.readahead_keep,
            owned: Mutex::new(OwnedPages::new(limit)),
            streams: Mutex::default(),
            inotify: OnceLock::new(),
            other_opens: Mutex::default(),
            files: Mutex::default(),
            ctx: Arc::clone(ctx),
            kept: Arc::downgrade(kept),
            detector: Arc::clone(detector),
            weak_self: weak_self.clone(),
        })
    }

    /// Whether anything is ever dropped.
    pub fn is_enabled(&self) -> bool {
        self.policy != CachePolicy::Keep
    }

    /// A stream of small or short reads has reached `at` (none: the descriptor's own offset).
    #[cold]
    pub fn check_stream(&self, fd: Fd, at: Option<u64>) {
        const SEEK_CUR: i32 = 1;
        let sys = self.ctx.sys;
        let Some(kept) = self.kept.upgrade() else { return };
        let Ok(stat) = sys.fstat(fd) else { return };
        let advice = sequential::advice_for(fd, &stat);
        if !self.is_enabled() || stat.kind == FileKind::Other || advice == Advice::Random {
            return self.detector.schedule_check(fd, CACHED_SURVEY_STEP, 0);
        }
        let Some(at) = at.or_else(|| sys.lseek(fd, 0, SEEK_CUR).ok()) else { return };
        let key = stat.key();
        // Dropped after the lock is released: dropping a file takes it.
        let file = kept.find(key);
        let stream = self.stream_of(key, fd);
        let mut state = lock(&stream.state);
        state.update(self, fd, file.as_deref(), at, (stat.size, advice == Advice::Sequential));
        // Also if nothing was passed: another process may have opened or closed the file.
        let start_worker = !std::mem::replace(&mut state.worker_queued, true);
        drop(state);
        if start_worker {
            let tid = linux::gettid();
            self.run_on_worker(share_key(&stat), move |cache, shadow| {
                match kept.get_here(sys, shadow, tid, fd, stat) {
                    Ok(file) => cache.commit(shadow, &file, Vec::new()),
                    Err(_) => cache.ignore(key),
                }
            });
        }
    }

    /// The stream of a descriptor, which becomes the most recent one.
    fn stream_of(&self, key: FileKey, fd: Fd) -> Arc<SequentialStream> {
        let mut streams = lock(&self.streams);
        let position = streams.iter().position(|stream| stream.key == key && stream.fd == fd);
        let stream = match position {
            Some(at) => streams.remove(at),
            None => Arc::new(SequentialStream { key, fd, state: Mutex::default() }),
        };
        if streams.len() >= MAX_STREAMS {
            streams.remove(0);
        }
        streams.push(Arc::clone(&stream));
        stream
    }

    /// The streams of a file.
    fn file_streams(&self, key: FileKey) -> Vec<Arc<SequentialStream>> {
        lock(&self.streams).iter().filter(|stream| stream.key == key).map(Arc::clone).collect()
    }

    /// Takes ownership of pieces that the page cache read in for a large request.
    pub fn add_owned(&self, file: &Arc<FileState>, runs: Vec<Range<u64>>) {
        if runs.is_empty() || !self.is_enabled() {
            return;
        }
        let (file, advices) = (Arc::clone(file), file.advices.load(SeqCst));
        self.run_on_worker(file.storage, move |cache, shadow| {
            // Advice that came since has made the pages the program's.
            let runs = if file.advices.load(SeqCst) == advices { runs } else { Vec::new() };
            cache.commit(shadow, &file, runs);
        });
    }

    /// Queues work on a shadow worker, in the share of a file system.
    fn run_on_worker(&self, key: ShareKey, work: impl FnOnce(&ReadaheadCache, &WorkerPool) + Send + 'static) {
        let (Some(shadow), Some(cache)) = (self.ctx.workers.shadow(), self.weak_self.upgrade()) else { return };
        shadow.for_key(key).spawn_detached(move || {
            if let Some(workers) = cache.ctx.workers.shadow() {
                work(&cache, workers);
            }
        });
    }

    /// Adds the passed pages, and `more`, to the set, unless another process has opened the file. On a shadow worker.
    fn commit(&self, workers: &WorkerPool, file: &Arc<FileState>, mut more: Vec<Range<u64>>) {
        // Before pages are taken over: advice that comes in between counts.
        let advices = file.advices.load(SeqCst);
        let Some(others) = self.watch_file(workers, file) else { return self.ignore(file.key()) };
        self.drain_inotify();
        let streams = self.file_streams(file.key());
        if others.load(Relaxed) > 0 {
            streams.iter().for_each(|stream| *lock(&stream.state) = StreamState::default());
            let mut owned = lock(&self.owned);
            owned.remove_file(file.key());
            return self.ctx.stats().set_gauge(Gauge::ReadaheadPages, owned.bytes() / PAGE as u64);
        }
        for stream in streams {
            let mut state = lock(&stream.state);
            more.append(&mut state.consumed);
            state.worker_queued = false;
        }
        self.insert_and_trim(file, advices, more);
    }

    /// A file that cannot be managed: its readers check again only after [`UNMANAGED_CHECK_BYTES`].
    fn ignore(&self, key: FileKey) {
        lock(&self.streams).retain(|stream| {
            if stream.key == key {
                self.detector.schedule_check(stream.fd, UNMANAGED_CHECK_BYTES, 0);
            }
            stream.key != key
        });
    }

    /// Adds runs to the set, and drops what is over the limit.
    fn insert_and_trim(&self, file: &Arc<FileState>, advices: u64, runs: Vec<Range<u64>>) {
        let (excess, bytes) = {
            let mut owned = lock(&self.owned);
            // `forget` counts before it takes this lock.
            if file.advices.load(SeqCst) == advices {
                runs.into_iter().for_each(|run| owned.add(file.key(), run));
            }
            (owned.pop_over_limit(), owned.bytes())
        };
        for (key, run) in excess {
            if key == file.key() {
                self.drop_owned(file, run);
            } else if let Some(other) = self.kept.upgrade().and_then(|kept| kept.find(key)) {
                self.drop_owned(&other, run);
            }
        }
        self.ctx.stats().set_gauge(Gauge::ReadaheadPages, bytes / PAGE as u64);
    }

    /// Watches opens of the file; returns the number that are not SPIN's. `None` if they cannot be watched, or its
    /// residency may not be queried.
    fn watch_file(&self, workers: &WorkerPool, file: &FileState) -> Option<Arc<AtomicI64>> {
        if file.residency_access != ResidencyAccess::Permitted {
            return None;
        }
        let key = file.key();
        let mut files = lock(&self.files);
        if let Some(watch) = files.get(&key) {
            return Some(Arc::clone(&watch.other_opens));
        }
        let sys = self.ctx.sys;
        let start = || sys.inotify_init().ok().map(|fd| ShadowFd::new(fd, workers.close_queue()));
        let notify = self.inotify.get_or_init(start).as_ref()?;
        // Under the lock, so that no other worker reads an open of a watch that is not in the table yet.
        let mut other_opens = lock(&self.other_opens);
        let wd = sys.watch_opens(notify.get(), file.cached.get()).ok()?;
        // The same file twice has the same watch.
        let others_open = Arc::clone(other_opens.entry(wd).or_default());
        drop(other_opens);
        let read_ahead = file.block_stack().read_ahead();
        files.insert(key, Watch { wd, other_opens: Arc::clone(&others_open), read_ahead, last_dropped: 0..0 });
        let cache = self.weak_self.upgrade()?;
        file.set_before_close(Box::new(move |closed| cache.drop_on_close(key, closed)));
        Some(others_open)
    }

    /// Reads the inotify events. On a shadow worker.
    fn drain_inotify(&self) {
        let Some(Some(inotify)) = self.inotify.get() else { return };
        // Locked first: a worker that finds no events sees the counts that another worker has updated.
        let other_opens = lock(&self.other_opens);
        // Events that cannot be read may have happened.
        let events = self.ctx.sys.inotify_events(inotify.get()).unwrap_or_else(|_: Errno| vec![InotifyEvent::Overflow]);
        let adjust = |watch: &i32, change: i64| {
            if let Some(others) = other_opens.get(watch) {
                others.store((others.load(Relaxed) + change).max(0), Relaxed);
            }
        };
        for event in events {
            match event {
                InotifyEvent::Opened(watch) => adjust(&watch, 1),
                InotifyEvent::Closed(watch) => adjust(&watch, -1),
                InotifyEvent::Overflow => other_opens.values().for_each(|others| others.store(i64::MAX / 2, Relaxed)),
                InotifyEvent::WatchRemoved(_) | InotifyEvent::Modified(_) => {}
            }
        }
    }

    /// Drops `run`, and again the range that was dropped just before it: a folio across the boundary was kept then. If
    /// others have opened the file meanwhile, Linux is made to read it again. On a shadow worker.
    fn drop_range(&self, fd: Fd, (others, read_ahead): (&AtomicI64, u64), last_dropped: &Range<u64>, run: Range<u64>) {
        let (sys, start) = (self.ctx.sys, run.start.saturating_sub(MAX_FOLIO).max(last_dropped.start));
        let _ = sys.advise(fd, start, run.end - start, Advice::DontNeed);
        // Pages read by a process that opened the file during that call were dropped too.
        self.drain_inotify();
        if others.load(Relaxed) > 0 {
            prefetch_steps(start..run.end, read_ahead).for_each(|step| will_need(sys, fd, step));
        }
    }

    fn unwatch(&self, wd: i32) {
        let mut watched = lock(&self.other_opens);
        // Another state of the same file may have been created meanwhile.
        if watched.get(&wd).is_some_and(|others| Arc::strong_count(others) <= 1) {
            watched.remove(&wd);
            if let Some(Some(inotify)) = self.inotify.get() {
                self.ctx.sys.unwatch(inotify.get(), wd);
            }
        }
    }

    /// The program has given advice on a range: it is no longer managed.
    fn forget(&self, file: &FileState, range: &Range<u64>) {
        file.advices.fetch_add(1, SeqCst);
        lock(&self.owned).remove(file.key(), range);
        for stream in self.file_streams(file.key()) {
            let mut state = lock(&stream.state);
            state.surveyed.forget(range);
            state.consumed.retain(|run| run.end <= range.start || range.end <= run.start);
        }
    }

    /// The program has given advice on a range of a file.
    pub fn on_advice(&self, stat: Stat, range: Range<u64>, advice: Advice) {
        let Some(file) = self.kept.upgrade().and_then(|kept| kept.find(stat.key())) else { return };
        match advice {
            Advice::DontNeed => {
                self.forget(&file, &range);
                file.record_residency(0, false);
            }
            Advice::WillNeed => {
                self.forget(&file, &range);
                self.run_on_worker(share_key(&stat), move |cache, _| prefetch(cache.ctx.sys, &file, range));
            }
            _ => {}
        }
    }

    /// Drops owned pages. On a shadow worker.
    fn drop_owned(&self, file: &FileState, run: Range<u64>) {
        // Checked again: the drops before this one may have taken long.
        self.drain_inotify();
        let (others, read_ahead, dropped) = {
            let mut files = lock(&self.files);
            let Some(watch) = files.get_mut(&file.key()).filter(|w| w.other_opens.load(Relaxed) <= 0) else { return };
            let gap = run.start != watch.last_dropped.end;
            watch.last_dropped = if gap { run.clone() } else { watch.last_dropped.start..run.end };
            (Arc::clone(&watch.other_opens), watch.read_ahead, watch.last_dropped.clone())
        };
        self.drop_range(file.cached.get(), (&others, read_ahead), &dropped, run);
    }

    /// A file is dropped: the work of a shadow worker with its descriptor before it closes it.
    fn drop_on_close(self: Arc<Self>, key: FileKey, closed: bool) -> PreCloseHook {
        let watched = lock(&self.files).remove(&key);
        let Some(Watch { wd: watch, other_opens, read_ahead, last_dropped: dropped }) = watched else {
            return Box::new(|_| {});
        };
        let mut runs = lock(&self.owned).remove_file(key);
        let (removed, remaining): (Vec<_>, Vec<_>) =
            lock(&self.streams).drain(..).partition(|stream| closed && stream.key == key);
        lock(&self.streams).extend(remaining);
        for stream in removed {
            let mut state = lock(&stream.state);
            let survey_distance = state.survey_distance;
            runs.append(&mut state.consumed);
            // The stream has ended, so the pages read ahead will not be needed either.
            runs.append(&mut state.surveyed.finish(survey_distance, 0));
        }
        Box::new(move |fd| {
            self.drain_inotify();
            for run in runs {
                if other_opens.load(Relaxed) > 0 {
                    break;
                }
                let before = if run.start == dropped.end { dropped.start..run.end } else { run.clone() };
                self.drop_range(fd, (&other_opens, read_ahead), &before, run);
            }
            drop(other_opens);
            self.unwatch(watch);
        })
    }
}

/// Linux reads one window per POSIX_FADV_WILLNEED; a device reads faster than that, so the rest is requested here.
fn prefetch(sys: &dyn Syscalls, file: &FileState, range: Range<u64>) {
    let end = range.end.min(range.start.saturating_add(PREFETCH_MAX));
    let steps = prefetch_steps(range.start..end, file.block_stack().read_ahead());
    steps.skip(1).for_each(|step| will_need(sys, file.cached.get(), step));
}

/// A range in parts each of which Linux reads in one call. `read_ahead`: the window of the disk; 0 if unknown.
fn prefetch_steps(range: Range<u64>, read_ahead: u64) -> impl Iterator<Item = Range<u64>> {
    let step = if read_ahead == 0 { DEFAULT_PREFETCH_STEP } else { read_ahead };
    let step = step.clamp(MIN_PREFETCH_STEP, MAX_PREFETCH_STEP);
    range.clone().step_by(step as usize).map(move |at| at..range.end.min(at.saturating_add(step)))
}

fn will_need(sys: &dyn Syscalls, fd: Fd, range: Range<u64>) {
    let _ = sys.advise(fd, range.start, range.end - range.start, Advice::WillNeed);
}

/// Whether a range after a cached one looks cached too. Checking everything would cost a cached stream a few percent; a
/// hole that is missed stays in the page cache after it is read.
fn spot_check_cached(sys: &dyn Syscalls, fd: Fd, range: &Range<u64>) -> bool {
    let offsets = (range.start..range.end).step_by(SURVEY_STEP as usize);
    offsets.chain([range.end - PAGE as u64]).all(|at| sys.cachestat(fd, at, PAGE as u64).is_ok_and(|c| c.cached > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefetched_parts_leave_no_gap_and_fit_the_window() {
        for (read_ahead, longest) in
            [(0, 128 << 10), (128 << 10, 128 << 10), (1280 << 10, 1280 << 10), (8 << 20, 2 << 20)]
        {
            let mut end = 4096;
            for part in prefetch_steps(4096..(5 << 20) + 12_288, read_ahead) {
                assert_eq!(part.start, end, "window {read_ahead}");
                assert!(part.end > part.start && part.end - part.start <= longest, "window {read_ahead}: {part:?}");
                end = part.end;
            }
            assert_eq!(end, (5 << 20) + 12_288, "window {read_ahead}");
        }
    }
}
