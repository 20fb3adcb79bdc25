//! Which pages device reads leave in the page cache, and which pages they must not drop.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spinio_io::kernel::{LinuxSyscalls, Syscalls};
use spinio_io::settings::CachePolicy;
use spinio_io::stats::{Gauge, RouteRow};
use spinio_io::{Runtime, Settings};
use spinio_plan::readahead::{DETECT_BYTES, SURVEY_STEP};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Advice, Fd};
use spinio_testkit::buffer::emulated;
use spinio_testkit::file::{self, EvictionDetector};
use spinio_testkit::mount_fixture::{self, MountFixture};
use spinio_testkit::{AdviceLog, Buffer, Call, Effect, FaultySyscalls, eventually};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
const SIZE: u64 = 96 * MIB;
const BLOCK: usize = 32 << 10;

struct Subject {
    _fixture: MountFixture,
    path: PathBuf,
    file: File,
    buffer: Buffer,
    eviction_detector: EvictionDetector,
}

impl Subject {
    /// An uncached file. `None`, with a message, if the file system does not evict its pages.
    fn new() -> Option<Subject> {
        let fixture = mount_fixture::create("tree").unwrap();
        let path = fixture.file("subject");
        let file = file::create_filled(&path, SIZE);
        file::evict(&file);
        let buffer = Buffer::new(emulated("size=64M"), MIB as usize);
        let witness = EvictionDetector::new(&fixture.file("witness"));
        let subject = Subject { _fixture: fixture, path, file, buffer, eviction_detector: witness };
        match subject.cached(0..SIZE) {
            Some(0) => Some(subject),
            left => {
                println!("skipped: {left:?} pages of a file stay cached after POSIX_FADV_DONTNEED");
                None
            }
        }
    }

    fn cached(&self, range: std::ops::Range<u64>) -> Option<u64> {
        linux::cachestat(self.file.as_raw_fd(), range.start, range.end - range.start).ok().map(|c| c.cached)
    }

    /// The absent pages of a range: how many the runtime dropped, and how many Linux evicted by itself.
    fn absent(&self, range: std::ops::Range<u64>, log: &AdviceLog) -> (usize, usize) {
        let pages = range.step_by(PAGE as usize);
        let absent: Vec<u64> = pages.filter(|at| self.cached(*at..at + PAGE) == Some(0)).collect();
        let dropped = absent.iter().filter(|at| log.is_dropped(&self.file, **at)).count();
        (dropped, absent.len() - dropped)
    }

    /// Asserts that the runtime dropped no page of a range, and that what it read there is cached.
    fn stays_cached(&self, range: std::ops::Range<u64>, what: &str, log: &AdviceLog) {
        let pages = (range.end - range.start) / PAGE;
        let (dropped, evicted) = self.absent(range, log);
        assert_eq!(dropped, 0, "{what}: of {pages} pages so many were dropped");
        if evicted > 0 {
            println!("{what}: Linux evicted {evicted} of {pages} pages by itself");
        }
        assert!((evicted as u64) < pages, "{what}: no page is cached");
    }

    /// Reads a range block by block, and compares a part of it.
    fn read_sequentially(&self, runtime: &Runtime, from: u64, to: u64, block: usize) {
        let mut at = from;
        while at < to {
            let target = self.buffer.target(0);
            let got = runtime.read(self.file.as_raw_fd(), Some(at), target, block).unwrap();
            assert_eq!(got, block.min((to - at) as usize));
            if at % (8 * MIB) < block as u64 {
                let strict = self.buffer.range_bytes(0..got);
                assert!(strict == file::bytes(at, got, 0), "wrong bytes at {at}");
            }
            at += got as u64;
        }
    }

    /// Pages that one sequential stream may leave: the read-ahead set, the pages read before the first survey, and the
    /// pages read since the last one.
    fn max_pages_left(&self, runtime: &Runtime, set: u64) -> u64 {
        let window = runtime.storage(self.file.as_raw_fd()).unwrap().read_ahead().max(512 << 10);
        set + (DETECT_BYTES + 2 * window + 2 * SURVEY_STEP) / PAGE
    }
}

fn settings() -> Settings {
    Settings { ordering: spinio_io::settings::Ordering::Strict, bounce_limit: 8 << 20, ..Settings::default() }
}

fn bytes_by(runtime: &Runtime, which: impl Fn(&RouteRow) -> bool) -> u64 {
    runtime.stats().rows.iter().filter(|line| which(line)).map(|line| line.bytes).sum()
}

fn open_as_other(path: &Path) -> File {
    File::open(path).unwrap()
}

#[test]
fn sequential_reads_leave_bounded_pages() {
    let Some(subject) = Subject::new() else { return };
    let runtime = Runtime::new(settings());
    let limit = subject.max_pages_left(&runtime, 512);
    assert!(limit < SIZE / PAGE / 2, "the read-ahead window of this disk is too large for the test");
    subject.read_sequentially(&runtime, 0, SIZE, BLOCK);
    eventually("the other pages are dropped", || subject.cached(0..SIZE).unwrap() <= limit);
    eventually("the set holds exactly 512 pages", || runtime.stats().gauge(Gauge::ReadaheadPages).0 == 512);
}

#[test]
fn previously_cached_pages_stay() {
    let Some(subject) = Subject::new() else { return };
    let kernel = FaultySyscalls::with_ring();
    let runtime = Runtime::with_kernel(settings(), kernel);
    // Runs of four pages, the folio size of a small read-ahead. Their distance is larger than a folio of a large one.
    let cached_before: Vec<u64> =
        (0..SIZE / (8 * MIB)).flat_map(|i| (0..16).map(move |p| i * 2048 + 1024 + p)).collect();
    file::load_pages(&subject.path, cached_before.iter().copied());
    let limit = subject.max_pages_left(&runtime, 512);
    let before: Vec<u64> =
        cached_before.iter().copied().filter(|p| subject.cached(p * PAGE..(p + 1) * PAGE) == Some(1)).collect();
    assert!(!before.is_empty() || subject.eviction_detector.pages_were_evicted());
    subject.read_sequentially(&runtime, 0, SIZE, BLOCK);
    eventually("the pages that SPIN read in are dropped", || {
        subject.cached(0..SIZE).unwrap() <= limit + cached_before.len() as u64 * 4
    });
    for page in before {
        let (dropped, _) = subject.absent(page * PAGE..(page + 1) * PAGE, kernel.advice());
        assert_eq!(dropped, 0, "page {page} was cached before");
    }
}

#[test]
fn mapped_pages_stay() {
    let Some(subject) = Subject::new() else { return };
    let kernel = FaultySyscalls::with_ring();
    let runtime = Runtime::with_kernel(settings(), kernel);
    // This range is in the read-ahead set now, and will soon be its oldest entry.
    let (at, len) = (8 * MIB, MIB / 4);
    subject.read_sequentially(&runtime, 0, at + len, BLOCK);
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let mapped = unsafe {
        let (read, shared) = (linux::PROT_READ, linux::MAP_SHARED);
        linux::mmap(std::ptr::null_mut(), len as usize, read, shared, subject.file.as_raw_fd(), at)
    };
    let mapped = mapped.unwrap();
    for page in (0..len).step_by(PAGE as usize) {
        // SAFETY: mapped above, and the file is that long.
        unsafe { mapped.add(page as usize).read_volatile() };
    }
    subject.read_sequentially(&runtime, at + len, SIZE, BLOCK);
    // The kernel drops a folio as a whole or not at all.
    let limit = subject.max_pages_left(&runtime, 512) + (len + 4 * MIB) / PAGE;
    eventually("the other pages are dropped", || subject.cached(0..SIZE).unwrap() <= limit);
    subject.stays_cached(at..at + len, "the mapped range", kernel.advice());
    // SAFETY: the mapping made above, which is not used any more.
    unsafe { linux::munmap(mapped, len as usize) }.unwrap();
}

#[test]
fn open_by_other_stops_dropping() {
    let Some(subject) = Subject::new() else { return };
    let kernel = FaultySyscalls::with_ring();
    let runtime = Runtime::with_kernel(settings(), kernel);
    subject.read_sequentially(&runtime, 0, SIZE / 4, BLOCK);
    eventually("the file has pages in the set", || runtime.stats().gauge(Gauge::ReadaheadPages).0 > 0);
    let other = open_as_other(&subject.path);
    kernel.advice().clear();
    let mut bytes = vec![0; (SIZE / 2) as usize];
    other.read_exact_at(&mut bytes, 0).unwrap();
    subject.read_sequentially(&runtime, SIZE / 4, SIZE, BLOCK);
    eventually("the set is empty", || runtime.stats().gauge(Gauge::ReadaheadPages).0 == 0);
    // A drop that was under way is undone a moment later.
    eventually("what was dropped is read in again", || subject.absent(0..SIZE / 2, kernel.advice()).0 == 0);
    subject.stays_cached(0..SIZE / 2, "the range that another opener has read", kernel.advice());
    // Once the other opener has closed the file, a new sequential stream is bounded again.
    drop(other);
    file::evict(&subject.file);
    let limit = subject.max_pages_left(&runtime, 512);
    subject.read_sequentially(&runtime, 0, SIZE, BLOCK);
    eventually("the other pages are dropped", || subject.cached(0..SIZE).unwrap() <= limit);
}

#[test]
fn pages_read_by_other_stay_when_set_is_full() {
    let (Some(other_subject), Some(subject)) = (Subject::new(), Subject::new()) else { return };
    let kernel = FaultySyscalls::with_ring();
    let runtime = Runtime::with_kernel(settings(), kernel);
    other_subject.read_sequentially(&runtime, 0, 4 * MIB, BLOCK);
    eventually("the file has pages in the set", || runtime.stats().gauge(Gauge::ReadaheadPages).0 > 0);
    let other = open_as_other(&other_subject.path);
    kernel.advice().clear();
    other.read_exact_at(&mut vec![0; 4 << 20], 0).unwrap();
    // The runtime does not read that file any more. A sequential stream of another file evicts its pages from the set.
    let limit = subject.max_pages_left(&runtime, 512);
    subject.read_sequentially(&runtime, 0, SIZE, BLOCK);
    eventually("the other pages are dropped", || subject.cached(0..SIZE).unwrap() <= limit);
    // Pages that were being dropped when the other opener opened the file are read in again.
    eventually("what was dropped is read in again", || other_subject.absent(0..4 * MIB, kernel.advice()).0 == 0);
    other_subject.stays_cached(0..4 * MIB, "the range that another opener has read", kernel.advice());
}

/// Opens a file and reads it when SPIN has the kernel drop pages: after the last check whether another process has it
/// open.
struct OpensDuringDrop {
    path: PathBuf,
    range: std::ops::Range<u64>,
    opened: OnceLock<File>,
    drops: AtomicU64,
    log: AdviceLog,
}

impl Syscalls for OpensDuringDrop {
    fn advise(&self, fd: Fd, offset: u64, len: u64, advice: Advice) -> Result<(), Errno> {
        if advice == Advice::DontNeed {
            self.drops.fetch_add(1, Relaxed);
            self.opened.get_or_init(|| {
                let file = open_as_other(&self.path);
                let mut bytes = vec![0; (self.range.end - self.range.start) as usize];
                file.read_exact_at(&mut bytes, self.range.start).unwrap();
                file
            });
        }
        LinuxSyscalls.advise(fd, offset, len, advice)?;
        self.log.record(fd, offset, len, advice);
        Ok(())
    }
}

#[test]
fn range_dropped_during_open_is_read_in_again() {
    let Some(subject) = Subject::new() else { return };
    let range = 0..16 * MIB;
    let path = subject.path.clone();
    let (opened, drops, log) = (OnceLock::new(), AtomicU64::new(0), AdviceLog::default());
    let kernel: &'static OpensDuringDrop =
        Box::leak(Box::new(OpensDuringDrop { path, range: range.clone(), opened, drops, log }));
    let runtime = Runtime::with_kernel(settings(), kernel);
    subject.read_sequentially(&runtime, 0, range.end, BLOCK);
    eventually("pages are dropped", || kernel.opened.get().is_some());
    eventually("what was dropped is read in again", || subject.absent(range.clone(), &kernel.log).0 == 0);
    subject.read_sequentially(&runtime, range.end, SIZE, BLOCK);
    eventually("the set is empty", || runtime.stats().gauge(Gauge::ReadaheadPages).0 == 0);
    assert_eq!(kernel.drops.load(Relaxed), 1, "pages were dropped while another opener had the file open");
    subject.stays_cached(range, "the range that another opener has read", &kernel.log);
}

#[test]
fn keep_and_drop_policies() {
    let Some(subject) = Subject::new() else { return };
    let kernel = FaultySyscalls::with_ring();
    let runtime = Runtime::with_kernel(Settings { readahead_keep: CachePolicy::Keep, ..settings() }, kernel);
    subject.read_sequentially(&runtime, 0, SIZE, BLOCK);
    subject.stays_cached(0..SIZE, "policy keep", kernel.advice());
    assert_eq!(runtime.stats().gauge(Gauge::ReadaheadPages).1, 0);
    drop(runtime);
    file::evict(&subject.file);
    let runtime = Runtime::new(Settings { readahead_keep: CachePolicy::Drop, ..settings() });
    let limit = subject.max_pages_left(&runtime, 0);
    subject.read_sequentially(&runtime, 0, SIZE, BLOCK);
    eventually("all pages are dropped", || subject.cached(0..SIZE).unwrap() <= limit);
    eventually("the set is empty", || runtime.stats().gauge(Gauge::ReadaheadPages).0 == 0);
}

#[test]
fn advice_is_followed() {
    let Some(subject) = Subject::new() else { return };
    let kernel = FaultySyscalls::with_ring();
    let runtime = Runtime::with_kernel(settings(), kernel);
    let fd = subject.file.as_raw_fd();
    spinio_io::record_advice(fd, Advice::Random);
    subject.read_sequentially(&runtime, 0, SIZE, BLOCK);
    subject.stays_cached(0..SIZE, "a file with POSIX_FADV_RANDOM", kernel.advice());
    file::evict(&subject.file);
    subject.read_sequentially(&runtime, 0, SIZE / 4, 128 << 10);
    let copied = bytes_by(&runtime, |l| l.route == Route::Direct);
    assert!(copied >= SIZE / 4, "{copied} bytes bypassed the page cache");
    // Requests in no order, with POSIX_FADV_SEQUENTIAL: none bypasses the page cache.
    file::evict(&subject.file);
    spinio_io::record_advice(fd, Advice::Sequential);
    let scattered: Vec<u64> = (0..5).map(|i| (4 - i) * 16 * MIB).collect();
    let by_read_ahead = || bytes_by(&runtime, |l| l.reason == Reason::ReadAhead);
    let before = (by_read_ahead(), bytes_by(&runtime, |l| l.route == Route::Direct));
    scattered.iter().for_each(|&at| subject.read_sequentially(&runtime, at, at + (128 << 10), 128 << 10));
    assert!(by_read_ahead() > before.0);
    assert_eq!(bytes_by(&runtime, |l| l.route == Route::Direct), before.1, "a request bypassed the page cache");
    // The same without advice.
    file::evict(&subject.file);
    spinio_io::record_advice(fd, Advice::Normal);
    scattered.iter().for_each(|&at| subject.read_sequentially(&runtime, at, at + (128 << 10), 128 << 10));
    assert!(bytes_by(&runtime, |l| l.route == Route::Direct) > before.1, "no request bypassed the page cache");
}

#[test]
fn short_sequential_requests_use_kernel_readahead() {
    let Some(subject) = Subject::new() else { return };
    let runtime = Runtime::new(settings());
    let by_read_ahead = |runtime: &Runtime| bytes_by(runtime, |l| l.reason == Reason::ReadAhead);
    subject.read_sequentially(&runtime, 0, 32 * MIB, 128 << 10);
    assert!(by_read_ahead(&runtime) > 0);
    let direct = bytes_by(&runtime, |l| l.route == Route::Direct);
    assert!(
        direct <= MIB || subject.eviction_detector.pages_were_evicted(),
        "only the first request is not sequential, but {direct} bytes were read directly"
    );
    eventually("the pages left are bounded", || {
        subject.cached(0..32 * MIB).unwrap() <= subject.max_pages_left(&runtime, 512).max(31 * MIB / PAGE)
    });
    file::evict(&subject.file);
    let before = by_read_ahead(&runtime);
    let long = Buffer::new(emulated("size=64M"), 16 << 20);
    for at in (0..SIZE).step_by(16 << 20) {
        let got = runtime.read(subject.file.as_raw_fd(), Some(at), long.target(0), 16 << 20).unwrap();
        assert!(long.range_bytes(0..got) == file::bytes(at, got, 0));
    }
    assert_eq!(by_read_ahead(&runtime), before);
    assert_eq!(subject.cached(0..SIZE), Some(0), "the direct route leaves no pages in the page cache");
}

#[test]
fn cold_stream_makes_one_syscall_per_read() {
    for block in [16 << 10, 128 << 10, 512 << 10] {
        let Some(subject) = Subject::new() else { return };
        let kernel = FaultySyscalls::new();
        let runtime = Runtime::with_kernel(settings(), kernel);
        let counted = [Call::Pread(Route::Copy), Call::Stat, Call::Flags, Call::FileSystem];
        let calls = || counted.map(|call| kernel.calls(call));
        let (begin, end) = (4 * MIB, 36 * MIB);
        subject.read_sequentially(&runtime, 0, begin, block);
        let before = calls();
        subject.read_sequentially(&runtime, begin, end, block);
        let [reads, stats, flags, file_systems] = std::array::from_fn(|i| calls()[i] - before[i]);
        assert_eq!(reads, (end - begin) / block as u64, "requests of {block} bytes: one call each");
        assert_eq!(flags, 0, "requests of {block} bytes");
        // Each survey calls fstat once; the first one also has a shadow worker reopen the file.
        assert!(stats <= (end - begin) / SURVEY_STEP + 4, "requests of {block} bytes: {stats}");
        // Between two surveys the stream's hint says that it is a local disk.
        let surveys = (end - begin) / SURVEY_STEP.max(block as u64);
        assert!(file_systems <= surveys + 4, "requests of {block} bytes: {file_systems}");
    }
}

#[test]
fn cold_stream_offset_and_eof() {
    let Some(subject) = Subject::new() else { return };
    let runtime = Runtime::new(settings());
    let fd = subject.file.as_raw_fd();
    let mut lengths = [128 << 10, 512 << 10, 70_001, 300_000, 4096, 65_537, 512 << 10, 1 << 20].into_iter().cycle();
    let by_stream = |runtime: &Runtime| bytes_by(runtime, |l| l.reason == Reason::ReadAhead);
    // Reads at the descriptor's own offset alternate with reads at a given one. The last but one is short, the last
    // returns 0.
    let (mut at, mut turn) = (SIZE - 24 * MIB, 0);
    linux::lseek(fd, at as i64, 0).unwrap();
    loop {
        let (len, own) = (lengths.next().unwrap(), turn % 5 != 3);
        // The expected count is computed: a host read for comparison would cache the file.
        let expected = len.min((SIZE - at) as usize);
        let got = runtime.read(fd, (!own).then_some(at), subject.buffer.target(0), len).unwrap();
        assert_eq!(got, expected, "{len} bytes at {at}");
        assert!(subject.buffer.range_bytes(0..got) == file::bytes(at, got, 0), "wrong bytes at {at}");
        if own {
            assert_eq!(linux::lseek(fd, 0, 1), Ok(at + got as u64), "the offset advances by the count");
        } else {
            linux::lseek(fd, (at + got as u64) as i64, 0).unwrap();
        }
        if got == 0 {
            break;
        }
        (at, turn) = (at + got as u64, turn + 1);
    }
    assert!(by_stream(&runtime) > 0, "no request was treated as part of a sequential stream");
    // The stream is at the end of the file. A read elsewhere returns the bytes at the offset that the program gives.
    for (from, len) in [(MIB, 128 << 10), (MIB + (128 << 10), 100_000), (5 * MIB + 3, 200_000)] {
        let got = runtime.read(fd, Some(from), subject.buffer.target(0), len).unwrap();
        assert_eq!(got, len);
        assert!(subject.buffer.range_bytes(0..got) == file::bytes(from, len, 0), "after a jump to {from}");
    }
}

#[test]
fn cold_stream_reports_errors_and_short_reads() {
    let Some(subject) = Subject::new() else { return };
    let kernel = FaultySyscalls::new();
    let runtime = Runtime::with_kernel(settings(), kernel);
    let (fd, block) = (subject.file.as_raw_fd(), 128 << 10);
    let next = |at: u64| runtime.read(fd, Some(at), subject.buffer.target(0), block);
    subject.read_sequentially(&runtime, 0, 2 * MIB, block);
    kernel.inject(Call::Pread(Route::Copy), 1, 1, Effect::Fail(Errno::IO));
    assert_eq!(next(2 * MIB).unwrap_err().kind.errno(), Errno::IO);
    kernel.inject(Call::Pread(Route::Copy), 1, 1, Effect::Short(4096));
    let got = next(2 * MIB).unwrap();
    assert!(got > 0 && got < block, "{got} bytes, not the kernel's short count");
    subject.read_sequentially(&runtime, 2 * MIB, 8 * MIB, block);
    // From now on the fd number refers to another file, which is read where the stream would have continued.
    let other = subject.path.with_extension("other");
    std::fs::write(&other, vec![7u8; 9 << 20]).unwrap();
    let other = File::open(&other).unwrap();
    // SAFETY: both are descriptors of this test.
    assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), fd) }, fd);
    let got = next(8 * MIB).unwrap();
    assert!(got == block && subject.buffer.range_bytes(0..got).iter().all(|b| *b == 7), "bytes of the old file");
    let got = next(9 * MIB - 5000).unwrap();
    assert_eq!(got, 5000, "the other file ends there");
}

#[test]
fn concurrent_streams_share_bounded_set() {
    let subjects: Vec<Subject> = (0..4).filter_map(|_| Subject::new()).collect();
    if subjects.len() < 4 {
        return;
    }
    let runtime = Runtime::new(settings());
    std::thread::scope(|scope| {
        for (subject, block) in subjects.iter().zip([16 << 10, 64 << 10, 128 << 10, 512 << 10]) {
            let runtime = &runtime;
            scope.spawn(move || subject.read_sequentially(runtime, 0, SIZE / 2, block));
        }
    });
    for subject in &subjects {
        let limit = subject.max_pages_left(&runtime, 512);
        eventually("the other pages are dropped", || subject.cached(0..SIZE).unwrap() <= limit);
    }
    eventually("the set holds exactly 512 pages", || runtime.stats().gauge(Gauge::ReadaheadPages).0 == 512);
}

#[test]
fn edges_of_large_reads_are_in_readahead_set() {
    let Some(subject) = Subject::new() else { return };
    let runtime = Runtime::new(Settings { routes: vec![Route::Copy, Route::Store], ..settings() });
    // Without direct routes all bytes come through the page cache, and all pages belong to the read-ahead set.
    let long = Buffer::new(emulated("size=64M"), 8 << 20);
    for at in [64 * MIB + 100, 4 * MIB + 100, 32 * MIB + 100] {
        let got = runtime.read(subject.file.as_raw_fd(), Some(at), long.target(0), 8 << 20).unwrap();
        assert!(long.range_bytes(0..got) == file::bytes(at, got, 0));
    }
    eventually("the set holds 512 pages at most", || {
        let (now, most) = runtime.stats().gauge(Gauge::ReadaheadPages);
        now > 0 && most <= 512
    });
    let window = runtime.storage(subject.file.as_raw_fd()).unwrap().read_ahead();
    // The kernel's read-ahead after each of them is not in the set.
    let limit = 512 + 3 * (2 * window + 2 * MIB) / PAGE;
    eventually("the other pages are dropped", || subject.cached(0..SIZE).unwrap() <= limit);
}

#[test]
fn missing_syscalls_disable_dropping() {
    for (call, errno) in [(Call::Inotify, Errno::MFILE), (Call::Cachestat, Errno::PERM), (Call::Advise, Errno::INVAL)] {
        let Some(subject) = Subject::new() else { return };
        let kernel = FaultySyscalls::new();
        kernel.inject_always(call, Effect::Fail(errno));
        let runtime = Runtime::with_kernel(settings(), kernel);
        subject.read_sequentially(&runtime, 0, SIZE / 4, BLOCK);
        subject.stays_cached(0..SIZE / 4, &format!("{call:?}"), kernel.advice());
    }
}

#[test]
fn lost_inotify_events_stop_dropping() {
    let Some(subject) = Subject::new() else { return };
    let kernel = FaultySyscalls::new();
    // Creating the inotify descriptor and the watch succeeds; reading its events fails.
    kernel.inject(Call::Inotify, 3, u64::MAX, Effect::Fail(Errno::IO));
    let runtime = Runtime::with_kernel(settings(), kernel);
    subject.read_sequentially(&runtime, 0, SIZE / 4, BLOCK);
    subject.stays_cached(0..SIZE / 4, "with inotify events lost", kernel.advice());
}
