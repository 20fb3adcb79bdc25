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

use spinio_plan::readahead::{Ahead, Brought, CACHED_STEP, FURTHER, STEP, largest, lead, marks, window};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Advice, Fd, FileKind, News, PAGE, Stat};

use spinio_host::lock;
use spinio_host::pool::Crew;
use spinio_host::settings::{Cache, Settings};
use spinio_host::shadow_fd::{Farewell, PrivateFd};
use spinio_host::syscalls::Kernel;
use spinio_stats::Gauge;

use crate::ctx::FilesCtx;
use crate::residency::{self, Rights};
use crate::state::File;
use crate::streams::{self, Streams};
use crate::table::Files;

/// Streams that are told apart.
const WAYS: usize = 64;

/// Bytes until a stream is looked at again that nothing can be done for.
const LONG: u64 = 1 << 30;

/// The read-ahead window while the device is not known yet: as wide as they come.
const WINDOW: u64 = 8 << 20;

/// The page cache holds pages in blocks of up to this, and drops only whole ones.
const FOLIO: u64 = 2 << 20;

/// Bytes of read-ahead at once that POSIX_FADV_WILLNEED has keepers ask for, and altogether.
const PREFETCH_STEP: u64 = 2 << 20;
const PREFETCH_MOST: u64 = 64 << 20;

/// Device number and inode.
type Key = (u64, u64);

/// The set of a runtime, and its watch over files.
pub struct ReadAhead {
    cache: Cache,
    /// Bytes that the kernel is led ahead of a reader: no more than the set may hold.
    further: u64,
    set: Mutex<Brought<Key>>,
    /// The streams under way, the one that was looked at last at the end.
    ways: Mutex<Vec<Arc<Stream>>>,
    /// The descriptor that brings news, of the keepers' table.
    notify: OnceLock<Option<PrivateFd>>,
    /// How many others have a watched file open.
    watched: Mutex<HashMap<i32, Arc<AtomicI64>>>,
    /// The files that are looked after.
    files: Mutex<HashMap<Key, Watched>>,
    ctx: Arc<FilesCtx>,
    kept: Weak<Files>,
    streams: Arc<Streams>,
    me: Weak<ReadAhead>,
}

/// A stream of reads of one descriptor. Whoever looks at it asks the kernel meanwhile, and keeps no other stream waiting.
struct Stream {
    key: Key,
    fd: Fd,
    way: Mutex<Way>,
}

/// How far a stream has come.
#[derive(Default)]
struct Way {
    ahead: Ahead,
    lead: u64,
    /// Ours, and not in the set yet; and whether a keeper is called for it.
    passed: Vec<Range<u64>>,
    called: bool,
}

/// What is kept about a file that is looked after.
struct Watched {
    watch: i32,
    others: Arc<AtomicI64>,
    /// What was dropped last, without a gap.
    dropped: Range<u64>,
}

impl Way {
    /// The stream has come to `at`.
    fn go_on(&mut self, home: &ReadAhead, fd: Fd, known: Option<&File>, at: u64, (size, widened): (u64, bool)) {
        let told = known.map(|file| file.geometry().read_ahead());
        let end = known.map_or(size, |file| file.size.max(size)).next_multiple_of(PAGE as u64);
        let stream = &mut self.ahead;
        self.lead = lead(told.unwrap_or(WINDOW), widened, stream.step());
        self.passed.extend(stream.passed(at, self.lead));
        if let Some(range) = stream.to_ask(at, self.lead).filter(|range| range.start < end) {
            let range = range.start..range.end.min(end);
            let ask = stream.is_cold() || !is_sampled_cached(home.ctx.sys, fd, &range);
            let absent = if ask { residency::absent_runs(home.ctx.sys, fd, range.clone()) } else { Vec::new() };
            stream.answered(range, absent);
        }
        home.streams.look_in(fd, stream.step(), largest(told.unwrap_or(0), widened));
        // A wide window needs nobody.
        if let Some(window) = told.map(|told| window(told, widened)).filter(|window| *window < home.further)
            && stream.is_cold()
        {
            home.streams.lead(fd, at, window, stream.reach().min(end));
        }
    }
}

impl ReadAhead {
    /// An empty set.
    pub fn new(settings: &Settings, ctx: &Arc<FilesCtx>, kept: &Arc<Files>, streams: &Arc<Streams>) -> Arc<ReadAhead> {
        let pages = if settings.cache == Cache::Auto { settings.cache_pages } else { 0 };
        let limit = pages.saturating_mul(PAGE as u64);
        Arc::new_cyclic(|me| ReadAhead {
            cache: settings.cache,
            further: FURTHER.min(limit),
            set: Mutex::new(Brought::new(limit)),
            ways: Mutex::default(),
            notify: OnceLock::new(),
            watched: Mutex::default(),
            files: Mutex::default(),
            ctx: Arc::clone(ctx),
            kept: Arc::downgrade(kept),
            streams: Arc::clone(streams),
            me: me.clone(),
        })
    }

    /// Whether anything is ever dropped.
    pub fn is_on(&self) -> bool {
        self.cache != Cache::Keep
    }

    /// A stream of small or short reads has come to `at` (none: where the descriptor stands).
    #[cold]
    pub fn look(&self, fd: Fd, at: Option<u64>) {
        const SEEK_CUR: i32 = 1;
        let sys = self.ctx.sys;
        let Some(kept) = self.kept.upgrade() else { return };
        let Ok(stat) = sys.fstat(fd) else { return };
        let advice = streams::advice(fd, &stat);
        if !self.is_on() || stat.kind == FileKind::Stream || advice == Advice::Random {
            return self.streams.look_in(fd, CACHED_STEP, 0);
        }
        let Some(at) = at.or_else(|| sys.lseek(fd, 0, SEEK_CUR).ok()) else { return };
        let key = (stat.dev, stat.ino);
        // Let go of behind the lock: a file that ends takes it.
        let known = kept.find(key);
        let stream = self.stream(key, fd);
        let mut way = lock(&stream.way);
        way.go_on(self, fd, known.as_deref(), at, (stat.size, advice == Advice::Sequential));
        // Also where nothing was passed: somebody may have opened or closed the file.
        let call = !std::mem::replace(&mut way.called, true);
        drop(way);
        if call {
            let tid = linux::gettid();
            self.later(move |home, crew| match kept.get_here(sys, crew, tid, fd, stat) {
                Ok(file) => home.settle(crew, &file, Vec::new()),
                Err(_) => home.leave_alone(key),
            });
        }
    }

    /// Leads the kernel's read-ahead on, where that is due. What it brings was asked about, and so counts as ours.
    pub fn lead_on(&self, fd: Fd) {
        let Some((at, window, reach)) = self.streams.leads(fd) else { return };
        let mut before = 0;
        while let Ok(pages) = self.ctx.sys.cachestat(fd, at, self.further)
            && pages.cached > before
            && let Some(places) = marks(at, pages.cached * PAGE as u64, window, self.further, reach)
        {
            before = pages.cached;
            for place in places {
                let _ = self.ctx.sys.touch(fd, place);
            }
        }
    }

    /// The stream of a descriptor, the newest from now on.
    fn stream(&self, key: Key, fd: Fd) -> Arc<Stream> {
        let mut ways = lock(&self.ways);
        let found = ways.iter().position(|way| way.key == key && way.fd == fd);
        let stream = match found {
            Some(at) => ways.remove(at),
            None => Arc::new(Stream { key, fd, way: Mutex::default() }),
        };
        if ways.len() >= WAYS {
            ways.remove(0);
        }
        ways.push(Arc::clone(&stream));
        stream
    }

    /// The streams of a file.
    fn streams_of(&self, key: Key) -> Vec<Arc<Stream>> {
        lock(&self.ways).iter().filter(|way| way.key == key).map(Arc::clone).collect()
    }

    /// Pieces of a large request that the page cache had to fetch for it are ours.
    pub fn claim(&self, file: &Arc<File>, runs: Vec<Range<u64>>) {
        if runs.is_empty() || !self.is_on() {
            return;
        }
        let file = Arc::clone(file);
        self.later(move |home, crew| home.settle(crew, &file, runs));
    }

    /// Has a shadow worker do something, some time.
    fn later(&self, what: impl FnOnce(&ReadAhead, &Crew) + Send + 'static) {
        let (Some(crew), Some(home)) = (self.ctx.workers.shadow(), self.me.upgrade()) else { return };
        crew.send(move || {
            if let Some(crew) = home.ctx.workers.shadow() {
                what(&home, crew);
            }
        });
    }

    /// Takes in what has been passed, and `more`, unless somebody else has opened the file. On a keeper.
    fn settle(&self, crew: &Crew, file: &Arc<File>, mut more: Vec<Range<u64>>) {
        let Some(others) = self.watch(crew, file) else { return self.leave_alone(file.key()) };
        self.hear();
        let streams = self.streams_of(file.key());
        if others.load(Relaxed) > 0 {
            streams.iter().for_each(|stream| *lock(&stream.way) = Way::default());
            let mut set = lock(&self.set);
            set.take(file.key());
            return self.ctx.stats().set(Gauge::ReadAheadPages, set.bytes() / PAGE as u64);
        }
        for stream in streams {
            let mut way = lock(&stream.way);
            more.append(&mut way.passed);
            way.called = false;
        }
        self.add(file, more);
    }

    /// A file that cannot be looked after: its readers need not look for a long while.
    fn leave_alone(&self, key: Key) {
        lock(&self.ways).retain(|way| {
            if way.key == key {
                self.streams.look_in(way.fd, LONG, 0);
            }
            way.key != key
        });
    }

    /// Takes runs into the set, and drops what is too much.
    fn add(&self, file: &Arc<File>, runs: Vec<Range<u64>>) {
        let (over, bytes) = {
            let mut set = lock(&self.set);
            runs.into_iter().for_each(|run| set.add(file.key(), run));
            (set.take_over_limit(), set.bytes())
        };
        for (key, run) in over {
            if key == file.key() {
                self.drop_pages(file, run);
            } else if let Some(other) = self.kept.upgrade().and_then(|kept| kept.find(key)) {
                self.drop_pages(&other, run);
            }
        }
        self.ctx.stats().set(Gauge::ReadAheadPages, bytes / PAGE as u64);
    }

    /// Sees to it that opens of the file are watched; how many others have it open. `None` where they cannot be watched, or
    /// its residency may not be asked.
    fn watch(&self, crew: &Crew, file: &File) -> Option<Arc<AtomicI64>> {
        if file.rights != Rights::Owner {
            return None;
        }
        let key = file.key();
        let mut files = lock(&self.files);
        if let Some(watched) = files.get(&key) {
            return Some(Arc::clone(&watched.others));
        }
        let sys = self.ctx.sys;
        let made = || sys.notify().ok().map(|fd| PrivateFd::new(fd, crew.graveyard()));
        let notify = self.notify.get_or_init(made).as_ref()?;
        // Under the lock, so that another keeper takes in no open of a watch that is not in the table yet.
        let mut watched = lock(&self.watched);
        let watch = sys.watch(notify.get(), file.cached.get()).ok()?;
        // The same file twice has the same watch.
        let others = Arc::clone(watched.entry(watch).or_default());
        drop(watched);
        files.insert(key, Watched { watch, others: Arc::clone(&others), dropped: 0..0 });
        let home = self.me.upgrade()?;
        file.set_before_close(Box::new(move |closed| home.part_from_pages(key, closed)));
        Some(others)
    }

    /// Takes in the news. On a keeper.
    fn hear(&self) {
        let Some(Some(notify)) = self.notify.get() else { return };
        // Locked first: a keeper that finds no news finds the counts that another one has read the news for.
        let watched = lock(&self.watched);
        // What cannot be heard may have happened.
        let news = self.ctx.sys.news(notify.get()).unwrap_or_else(|_: Errno| vec![News::Lost]);
        let of = |watch: &i32, change: i64| {
            if let Some(others) = watched.get(watch) {
                others.store((others.load(Relaxed) + change).max(0), Relaxed);
            }
        };
        for event in news {
            match event {
                News::Opened(watch) => of(&watch, 1),
                News::Closed(watch) => of(&watch, -1),
                News::Lost => watched.values().for_each(|others| others.store(i64::MAX / 2, Relaxed)),
                News::Ended(_) | News::Changed(_) => {}
            }
        }
    }

    /// Drops `run`, and again what was dropped just before it: a block of pages that lies across the border was kept then.
    /// Where `others` have opened the file meanwhile, the kernel is asked to fetch it again. On a keeper.
    fn drop_range(&self, fd: Fd, others: &AtomicI64, dropped: &Range<u64>, run: Range<u64>) {
        let (sys, start) = (self.ctx.sys, run.start.saturating_sub(FOLIO).max(dropped.start));
        let _ = sys.advise(fd, start, run.end - start, Advice::DontNeed);
        // What somebody has read who opened the file during that call went with the rest.
        self.hear();
        if others.load(Relaxed) > 0 {
            for at in (start..run.end).step_by(PREFETCH_STEP as usize) {
                let _ = sys.advise(fd, at, PREFETCH_STEP.min(run.end - at), Advice::WillNeed);
            }
        }
    }

    fn unwatch(&self, watch: i32) {
        let mut watched = lock(&self.watched);
        // Another state of the same file may have come in the meantime.
        if watched.get(&watch).is_some_and(|others| Arc::strong_count(others) <= 1) {
            watched.remove(&watch);
            if let Some(Some(notify)) = self.notify.get() {
                self.ctx.sys.unwatch(notify.get(), watch);
            }
        }
    }

    /// A range of a file is the program's business from now on: it has given advice on it.
    fn disown(&self, file: &File, range: &Range<u64>) {
        lock(&self.set).remove(file.key(), range);
        for stream in self.streams_of(file.key()) {
            let mut way = lock(&stream.way);
            way.ahead.disown(range);
            way.passed.retain(|run| run.end <= range.start || range.end <= run.start);
        }
    }

    /// The program has given advice on a range of a file.
    pub fn advised(&self, stat: Stat, range: Range<u64>, advice: Advice) {
        let Some(file) = self.kept.upgrade().and_then(|kept| kept.find((stat.dev, stat.ino))) else { return };
        match advice {
            Advice::DontNeed => {
                self.disown(&file, &range);
                file.learn(0, false);
            }
            Advice::WillNeed => {
                self.disown(&file, &range);
                self.later(move |home, _| prefetch(home.ctx.sys, &file, range));
            }
            _ => {}
        }
    }

    /// Drops pages that we brought in. On a keeper.
    fn drop_pages(&self, file: &File, run: Range<u64>) {
        // Asked again: the drops before this one may have taken long.
        self.hear();
        let (others, dropped) = {
            let mut files = lock(&self.files);
            let Some(watched) = files.get_mut(&file.key()).filter(|w| w.others.load(Relaxed) <= 0) else { return };
            let gap = run.start != watched.dropped.end;
            watched.dropped = if gap { run.clone() } else { watched.dropped.start..run.end };
            (Arc::clone(&watched.others), watched.dropped.clone())
        };
        self.drop_range(file.cached.get(), &others, &dropped, run);
    }

    /// A file goes: what a keeper does with its descriptor before it closes it.
    fn part_from_pages(self: Arc<Self>, key: Key, closed: bool) -> Farewell {
        let Some(Watched { watch, others, dropped }) = lock(&self.files).remove(&key) else { return Box::new(|_| {}) };
        let mut runs = lock(&self.set).take(key);
        let (gone, stay): (Vec<_>, Vec<_>) = lock(&self.ways).drain(..).partition(|way| closed && way.key == key);
        lock(&self.ways).extend(stay);
        for stream in gone {
            let mut way = lock(&stream.way);
            let lead = way.lead;
            runs.append(&mut way.passed);
            // Nobody goes on reading: neither will what was read ahead be needed.
            runs.append(&mut way.ahead.leave(lead, 0));
        }
        Box::new(move |fd| {
            self.hear();
            for run in runs {
                if others.load(Relaxed) > 0 {
                    break;
                }
                let before = if run.start == dropped.end { dropped.start..run.end } else { run.clone() };
                self.drop_range(fd, &others, &before, run);
            }
            drop(others);
            self.unwatch(watch);
        })
    }
}

/// The kernel reads one window of what it is told will be needed; a device reads faster than that, so the rest follows.
fn prefetch(kernel: &dyn Kernel, file: &File, range: Range<u64>) {
    let end = range.end.min(range.start.saturating_add(PREFETCH_MOST));
    for at in (range.start..end).step_by(PREFETCH_STEP as usize).skip(1) {
        let _ = kernel.advise(file.cached.get(), at, PREFETCH_STEP.min(end - at), Advice::WillNeed);
    }
}

/// Whether a range behind a cached one looks cached too. Asking everything would cost a cached stream a few percent; a hole
/// that is overlooked stays in the page cache.
fn is_sampled_cached(kernel: &dyn Kernel, fd: Fd, range: &Range<u64>) -> bool {
    let places = (range.start..range.end).step_by(STEP as usize);
    places.chain([range.end - PAGE as u64]).all(|at| kernel.cachestat(fd, at, PAGE as u64).is_ok_and(|c| c.cached > 0))
}
