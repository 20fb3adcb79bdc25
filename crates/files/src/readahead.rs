//! What device reads bring into the page cache, and how it leaves again.
//!
//! ```text
//!   caller   small read ──> streams.rs: time for a look? ── once in 512 KiB ──┐
//!            what it has passed and was absent when asked is ours now           │
//!            residency further ahead than the kernel reads: what will be ours  <┘   (spinio_plan::readahead)
//!              │
//!   keeper   who opened the file meanwhile? (inotify)
//!            ├─ somebody: what we brought is forgotten, nothing is dropped until he has closed it
//!            └─ nobody:   what is ours ──> the bounded set ── over ──> DONTNEED
//! ```
//!
//! The caller asks, at a microsecond a look, because the question must come before the kernel's read-ahead does, and a
//! keeper may have to wait for a processor. What keepers do can wait.
//!
//! Pieces of large requests that take the page cache although they were absent (edges, short gaps, short sequential
//! requests) join the set when the request is done.
//!
//! When the program closes the file, what is left of it in the set goes at once: nobody could drop it later.
//!
//! Only files whose residency may be asked are looked after (the owner's, or writable), and only where the kernel has
//! inotify to give; all others keep what was read, as after any read. DONTNEED is never said of a page that was
//! resident before the reader came near it, and the kernel keeps pages that are mapped, dirty or in use.
//!
//! While a cold stream is read, the caller leads the kernel's read-ahead on (spinio_plan::readahead, further.rs), so that
//! storage is busy while the device takes what has come.
//!
//! A stream through cached pages is asked about at one place in 512 KiB, every 8 MiB.
//!
//! Nothing keeps a file from being opened while its pages are dropped, and a drop may take milliseconds beside other work.
//! So the keeper looks for an open after the drop too, and has the kernel fetch the range again if there was one.
//!
//! Known flaws: inotify does not say who opened a file, so a second open by the program itself counts as somebody
//! else's. It reports two opens without another event between them as one, so after the first of the two has closed the
//! file the second is no longer counted. Who had the file open before SPIN began to watch it is not seen at all: what he
//! reads of a stretch that SPIN brought in is dropped with it, and he reads it again. A page that the program itself reads
//! into host memory is not told apart from one that only the device needed.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use spinio_plan::readahead::{
    CACHED_SURVEY_STEP, OwnedPages, READAHEAD_BYTES, SURVEY_STEP, SurveyWindow, marker_offsets, max_buffered_request,
    survey_distance, window,
};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Advice, Fd, FileKind, InotifyEvent, PAGE, Stat};

use spinio_host::lock;
use spinio_host::pool::WorkerPool;
use spinio_host::settings::{CachePolicy, Settings};
use spinio_host::shadow_fd::{PreCloseHook, ShadowFd};
use spinio_host::shares::ShareKey;
use spinio_host::syscalls::Syscalls;
use spinio_stats::Gauge;

use crate::ctx::FilesCtx;
use crate::residency::{self, ResidencyAccess};
use crate::state::{FileState, share_key};
use crate::streams::{self, SequentialDetector};
use crate::table::FileTable;

/// Streams that are told apart.
const MAX_STREAMS: usize = 64;

/// Bytes until a stream is looked at again that nothing can be done for.
const UNMANAGED_CHECK_BYTES: u64 = 1 << 30;

/// The read-ahead window while the device is not known yet: as wide as they come.
const DEFAULT_WINDOW: u64 = 8 << 20;

/// The page cache holds pages in blocks of up to this, and drops only whole ones.
const MAX_FOLIO: u64 = 2 << 20;

/// Bytes of read-ahead at once that POSIX_FADV_WILLNEED has keepers ask for, and altogether.
const PREFETCH_STEP: u64 = 2 << 20;
const PREFETCH_MAX: u64 = 64 << 20;

/// Device number and inode.
type FileKey = (u64, u64);

/// The set of a runtime, and its watch over files.
pub struct ReadaheadCache {
    policy: CachePolicy,
    /// Bytes that the kernel is led ahead of a reader: no more than the set may hold.
    distance: u64,
    owned: Mutex<OwnedPages<FileKey>>,
    /// The streams under way, the one that was looked at last at the end.
    streams: Mutex<Vec<Arc<SequentialStream>>>,
    /// The descriptor that brings news, of the keepers' table.
    inotify: OnceLock<Option<ShadowFd>>,
    /// How many others have a watched file open.
    other_opens: Mutex<HashMap<i32, Arc<AtomicI64>>>,
    /// The files that are looked after.
    files: Mutex<HashMap<FileKey, Watch>>,
    ctx: Arc<FilesCtx>,
    kept: Weak<FileTable>,
    detector: Arc<SequentialDetector>,
    weak_self: Weak<ReadaheadCache>,
}

/// A stream of reads of one descriptor. Whoever looks at it asks the kernel meanwhile, and keeps no other stream waiting.
struct SequentialStream {
    key: FileKey,
    fd: Fd,
    state: Mutex<StreamState>,
}

/// How far a stream has come.
#[derive(Default)]
struct StreamState {
    surveyed: SurveyWindow,
    survey_distance: u64,
    /// Ours, and not in the set yet; and whether a keeper is called for it.
    consumed: Vec<Range<u64>>,
    worker_queued: bool,
}

/// What is kept about a file that is looked after.
struct Watch {
    wd: i32,
    other_opens: Arc<AtomicI64>,
    /// What was dropped last, without a gap.
    last_dropped: Range<u64>,
}

impl StreamState {
    /// The stream has come to `at`.
    fn update(
        &mut self,
        home: &ReadaheadCache,
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
            let probe = surveyed.any_absent() || !spot_check_cached(home.ctx.sys, fd, &range);
            let absent = if probe { residency::absent_runs(home.ctx.sys, fd, range.clone()) } else { Vec::new() };
            surveyed.record_survey(range, absent);
        }
        home.detector.schedule_check(
            fd,
            surveyed.survey_step(),
            max_buffered_request(window_hint.unwrap_or(0), doubled),
        );
        // A wide window needs nobody.
        if let Some(window) = window_hint.map(|told| window(told, doubled)).filter(|window| *window < home.distance)
            && surveyed.any_absent()
        {
            home.detector.allow_readahead(fd, at, window, surveyed.surveyed_end().min(end));
        }
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
            distance: READAHEAD_BYTES.min(limit),
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

    /// A stream of small or short reads has come to `at` (none: where the descriptor stands).
    #[cold]
    pub fn check_stream(&self, fd: Fd, at: Option<u64>) {
        const SEEK_CUR: i32 = 1;
        let sys = self.ctx.sys;
        let Some(kept) = self.kept.upgrade() else { return };
        let Ok(stat) = sys.fstat(fd) else { return };
        let advice = streams::advice_for(fd, &stat);
        if !self.is_enabled() || stat.kind == FileKind::Other || advice == Advice::Random {
            return self.detector.schedule_check(fd, CACHED_SURVEY_STEP, 0);
        }
        let Some(at) = at.or_else(|| sys.lseek(fd, 0, SEEK_CUR).ok()) else { return };
        let key = (stat.dev, stat.ino);
        // Let go of behind the lock: a file that ends takes it.
        let file = kept.find(key);
        let stream = self.stream_of(key, fd);
        let mut state = lock(&stream.state);
        state.update(self, fd, file.as_deref(), at, (stat.size, advice == Advice::Sequential));
        // Also where nothing was passed: somebody may have opened or closed the file.
        let start_worker = !std::mem::replace(&mut state.worker_queued, true);
        drop(state);
        if start_worker {
            let tid = linux::gettid();
            self.run_on_worker(share_key(&stat), move |home, crew| match kept.get_here(sys, crew, tid, fd, stat) {
                Ok(file) => home.commit(crew, &file, Vec::new()),
                Err(_) => home.ignore(key),
            });
        }
    }

    /// Leads the kernel's read-ahead on, where that is due. What it brings was asked about, and so counts as ours.
    pub fn extend_readahead(&self, fd: Fd) {
        let Some((at, window, limit)) = self.detector.readahead_due(fd) else { return };
        let mut previous = 0;
        while let Ok(pages) = self.ctx.sys.cachestat(fd, at, self.distance)
            && pages.cached > previous
            && let Some(offsets) = marker_offsets(at, pages.cached * PAGE as u64, window, self.distance, limit)
        {
            previous = pages.cached;
            for offset in offsets {
                let _ = self.ctx.sys.trigger_readahead(fd, offset);
            }
        }
    }

    /// The stream of a descriptor, the newest from now on.
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

    /// Pieces of a large request that the page cache had to fetch for it are ours.
    pub fn add_owned(&self, file: &Arc<FileState>, runs: Vec<Range<u64>>) {
        if runs.is_empty() || !self.is_enabled() {
            return;
        }
        let file = Arc::clone(file);
        self.run_on_worker(file.storage, move |home, crew| home.commit(crew, &file, runs));
    }

    /// Has a shadow worker do something, some time.
    fn run_on_worker(&self, key: ShareKey, work: impl FnOnce(&ReadaheadCache, &WorkerPool) + Send + 'static) {
        let (Some(crew), Some(home)) = (self.ctx.workers.shadow(), self.weak_self.upgrade()) else { return };
        crew.for_key(key).spawn_detached(move || {
            if let Some(workers) = home.ctx.workers.shadow() {
                work(&home, workers);
            }
        });
    }

    /// Takes in what has been passed, and `more`, unless somebody else has opened the file. On a keeper.
    fn commit(&self, workers: &WorkerPool, file: &Arc<FileState>, mut more: Vec<Range<u64>>) {
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
        self.insert_and_trim(file, more);
    }

    /// A file that cannot be looked after: its readers need not look for a long while.
    fn ignore(&self, key: FileKey) {
        lock(&self.streams).retain(|stream| {
            if stream.key == key {
                self.detector.schedule_check(stream.fd, UNMANAGED_CHECK_BYTES, 0);
            }
            stream.key != key
        });
    }

    /// Takes runs into the set, and drops what is too much.
    fn insert_and_trim(&self, file: &Arc<FileState>, runs: Vec<Range<u64>>) {
        let (excess, bytes) = {
            let mut owned = lock(&self.owned);
            runs.into_iter().for_each(|run| owned.add(file.key(), run));
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

    /// Sees to it that opens of the file are watched; how many others have it open. `None` where they cannot be watched, or
    /// its residency may not be asked.
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
        // Under the lock, so that another keeper takes in no open of a watch that is not in the table yet.
        let mut other_opens = lock(&self.other_opens);
        let wd = sys.watch_opens(notify.get(), file.cached.get()).ok()?;
        // The same file twice has the same watch.
        let others_open = Arc::clone(other_opens.entry(wd).or_default());
        drop(other_opens);
        files.insert(key, Watch { wd, other_opens: Arc::clone(&others_open), last_dropped: 0..0 });
        let cache = self.weak_self.upgrade()?;
        file.set_before_close(Box::new(move |closed| cache.drop_on_close(key, closed)));
        Some(others_open)
    }

    /// Takes in the news. On a keeper.
    fn drain_inotify(&self) {
        let Some(Some(inotify)) = self.inotify.get() else { return };
        // Locked first: a keeper that finds no news finds the counts that another one has read the news for.
        let other_opens = lock(&self.other_opens);
        // What cannot be heard may have happened.
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

    /// Drops `run`, and again what was dropped just before it: a block of pages that lies across the border was kept then.
    /// Where `others` have opened the file meanwhile, the kernel is asked to fetch it again. On a keeper.
    fn drop_range(&self, fd: Fd, others: &AtomicI64, last_dropped: &Range<u64>, run: Range<u64>) {
        let (sys, start) = (self.ctx.sys, run.start.saturating_sub(MAX_FOLIO).max(last_dropped.start));
        let _ = sys.advise(fd, start, run.end - start, Advice::DontNeed);
        // What somebody has read who opened the file during that call went with the rest.
        self.drain_inotify();
        if others.load(Relaxed) > 0 {
            for at in (start..run.end).step_by(PREFETCH_STEP as usize) {
                let _ = sys.advise(fd, at, PREFETCH_STEP.min(run.end - at), Advice::WillNeed);
            }
        }
    }

    fn unwatch(&self, wd: i32) {
        let mut watched = lock(&self.other_opens);
        // Another state of the same file may have come in the meantime.
        if watched.get(&wd).is_some_and(|others| Arc::strong_count(others) <= 1) {
            watched.remove(&wd);
            if let Some(Some(inotify)) = self.inotify.get() {
                self.ctx.sys.unwatch(inotify.get(), wd);
            }
        }
    }

    /// A range of a file is the program's business from now on: it has given advice on it.
    fn forget(&self, file: &FileState, range: &Range<u64>) {
        lock(&self.owned).remove(file.key(), range);
        for stream in self.file_streams(file.key()) {
            let mut state = lock(&stream.state);
            state.surveyed.forget(range);
            state.consumed.retain(|run| run.end <= range.start || range.end <= run.start);
        }
    }

    /// The program has given advice on a range of a file.
    pub fn on_advice(&self, stat: Stat, range: Range<u64>, advice: Advice) {
        let Some(file) = self.kept.upgrade().and_then(|kept| kept.find((stat.dev, stat.ino))) else { return };
        match advice {
            Advice::DontNeed => {
                self.forget(&file, &range);
                file.record_residency(0, false);
            }
            Advice::WillNeed => {
                self.forget(&file, &range);
                self.run_on_worker(share_key(&stat), move |home, _| prefetch(home.ctx.sys, &file, range));
            }
            _ => {}
        }
    }

    /// Drops pages that we brought in. On a keeper.
    fn drop_owned(&self, file: &FileState, run: Range<u64>) {
        // Asked again: the drops before this one may have taken long.
        self.drain_inotify();
        let (others, dropped) = {
            let mut files = lock(&self.files);
            let Some(watch) = files.get_mut(&file.key()).filter(|w| w.other_opens.load(Relaxed) <= 0) else { return };
            let gap = run.start != watch.last_dropped.end;
            watch.last_dropped = if gap { run.clone() } else { watch.last_dropped.start..run.end };
            (Arc::clone(&watch.other_opens), watch.last_dropped.clone())
        };
        self.drop_range(file.cached.get(), &others, &dropped, run);
    }

    /// A file goes: what a keeper does with its descriptor before it closes it.
    fn drop_on_close(self: Arc<Self>, key: FileKey, closed: bool) -> PreCloseHook {
        let Some(Watch { wd: watch, other_opens, last_dropped: dropped }) = lock(&self.files).remove(&key) else {
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
            // Nobody goes on reading: neither will what was read ahead be needed.
            runs.append(&mut state.surveyed.finish(survey_distance, 0));
        }
        Box::new(move |fd| {
            self.drain_inotify();
            for run in runs {
                if other_opens.load(Relaxed) > 0 {
                    break;
                }
                let before = if run.start == dropped.end { dropped.start..run.end } else { run.clone() };
                self.drop_range(fd, &other_opens, &before, run);
            }
            drop(other_opens);
            self.unwatch(watch);
        })
    }
}

/// The kernel reads one window of what it is told will be needed; a device reads faster than that, so the rest follows.
fn prefetch(sys: &dyn Syscalls, file: &FileState, range: Range<u64>) {
    let end = range.end.min(range.start.saturating_add(PREFETCH_MAX));
    for at in (range.start..end).step_by(PREFETCH_STEP as usize).skip(1) {
        let _ = sys.advise(file.cached.get(), at, PREFETCH_STEP.min(end - at), Advice::WillNeed);
    }
}

/// Whether a range behind a cached one looks cached too. Asking everything would cost a cached stream a few percent; a hole
/// that is overlooked stays in the page cache.
fn spot_check_cached(sys: &dyn Syscalls, fd: Fd, range: &Range<u64>) -> bool {
    let offsets = (range.start..range.end).step_by(SURVEY_STEP as usize);
    offsets.chain([range.end - PAGE as u64]).all(|at| sys.cachestat(fd, at, PAGE as u64).is_ok_and(|c| c.cached > 0))
}
