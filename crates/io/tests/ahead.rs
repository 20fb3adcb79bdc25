//! What device reads leave in the page cache, and what they leave alone.

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
use spinio_testkit::{Buffer, Call, Effect, FaultySyscalls, eventually};

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
    /// A file that is on storage only; `None`, told, where its pages cannot be made to leave.
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
                println!("skipped: {left:?} pages of a file stay cached whatever is advised");
                None
            }
        }
    }

    fn cached(&self, range: std::ops::Range<u64>) -> Option<u64> {
        linux::cachestat(self.file.as_raw_fd(), range.start, range.end - range.start).ok().map(|c| c.cached)
    }

    /// All of a range is cached. False, told, where that does not show what SPIN does.
    fn stays_cached(&self, range: std::ops::Range<u64>, what: &str) -> bool {
        let (cached, all) = (self.cached(range.clone()), (range.end - range.start) / PAGE);
        if cached == Some(all) {
            return true;
        }
        assert!(self.eviction_detector.pages_were_evicted(), "{what}: {cached:?} of {all} pages are cached");
        false
    }

    /// Reads a range block by block, and compares some of it.
    fn read_sequentially(&self, runtime: &Runtime, from: u64, to: u64, block: usize) {
        let mut at = from;
        while at < to {
            let target = self.buffer.target(0);
            let got = runtime.read(self.file.as_raw_fd(), Some(at), target, block).unwrap();
            assert_eq!(got, block.min((to - at) as usize));
            if at % (8 * MIB) < block as u64 {
                let strict = self.buffer.range_bytes(0..got);
                assert!(strict == file::bytes(at, got, 0), "other bytes than the file's at {at}");
            }
            at += got as u64;
        }
    }

    /// Pages that one stream may leave: the set, what was there before the first look, what came since the last.
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
    let bound = subject.max_pages_left(&runtime, 512);
    assert!(bound < SIZE / PAGE / 2, "the window of this disk is too large for the test");
    subject.read_sequentially(&runtime, 0, SIZE, BLOCK);
    eventually("the rest is dropped", || subject.cached(0..SIZE).unwrap() <= bound);
    eventually("the set is full and not fuller", || runtime.stats().gauge(Gauge::ReadaheadPages).0 == 512);
}

#[test]
fn previously_cached_pages_stay() {
    let Some(subject) = Subject::new() else { return };
    let runtime = Runtime::new(settings());
    // Runs of four pages, as large as folios of a small read-ahead; apart by more than a folio of a large one.
    let cached_before: Vec<u64> =
        (0..SIZE / (8 * MIB)).flat_map(|i| (0..16).map(move |p| i * 2048 + 1024 + p)).collect();
    file::load_pages(&subject.path, cached_before.iter().copied());
    let bound = subject.max_pages_left(&runtime, 512);
    let before: Vec<u64> =
        cached_before.iter().copied().filter(|p| subject.cached(p * PAGE..(p + 1) * PAGE) == Some(1)).collect();
    assert!(!before.is_empty() || subject.eviction_detector.pages_were_evicted());
    subject.read_sequentially(&runtime, 0, SIZE, BLOCK);
    eventually("ours is dropped", || subject.cached(0..SIZE).unwrap() <= bound + cached_before.len() as u64 * 4);
    for page in before {
        if !subject.stays_cached(page * PAGE..(page + 1) * PAGE, "what was somebody else's") {
            return;
        }
    }
}

#[test]
fn mapped_pages_stay() {
    let Some(subject) = Subject::new() else { return };
    let runtime = Runtime::new(settings());
    // Of the set by now, and the oldest of it soon.
    let (at, len) = (8 * MIB, MIB / 4);
    subject.read_sequentially(&runtime, 0, at + len, BLOCK);
    // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
    let mapped = unsafe {
        let (read, shared) = (linux::PROT_READ, linux::MAP_SHARED);
        linux::mmap(std::ptr::null_mut(), len as usize, read, shared, subject.file.as_raw_fd(), at)
    };
    let mapped = mapped.unwrap();
    for page in (0..len).step_by(PAGE as usize) {
        // SAFETY: mapped above, and the file reaches so far.
        unsafe { mapped.add(page as usize).read_volatile() };
    }
    subject.read_sequentially(&runtime, at + len, SIZE, BLOCK);
    // A folio goes whole or not at all.
    let bound = subject.max_pages_left(&runtime, 512) + (len + 4 * MIB) / PAGE;
    eventually("the rest is dropped", || subject.cached(0..SIZE).unwrap() <= bound);
    subject.stays_cached(at..at + len, "what is mapped");
    // SAFETY: the mapping made above, which nobody uses any more.
    unsafe { linux::munmap(mapped, len as usize) }.unwrap();
}

#[test]
fn open_by_other_stops_dropping() {
    let Some(subject) = Subject::new() else { return };
    let runtime = Runtime::new(settings());
    subject.read_sequentially(&runtime, 0, SIZE / 4, BLOCK);
    eventually("the file is looked after", || runtime.stats().gauge(Gauge::ReadaheadPages).0 > 0);
    let other = open_as_other(&subject.path);
    let mut bytes = vec![0; (SIZE / 2) as usize];
    other.read_exact_at(&mut bytes, 0).unwrap();
    if !subject.stays_cached(0..SIZE / 2, "what another reads") {
        return;
    }
    subject.read_sequentially(&runtime, SIZE / 4, SIZE, BLOCK);
    eventually("the set is forgotten", || runtime.stats().gauge(Gauge::ReadaheadPages).0 == 0);
    if !subject.stays_cached(0..SIZE / 2, "what another has read") {
        return;
    }
    // Once he has closed it, a new stream is bounded again.
    drop(other);
    file::evict(&subject.file);
    let bound = subject.max_pages_left(&runtime, 512);
    subject.read_sequentially(&runtime, 0, SIZE, BLOCK);
    eventually("the rest is dropped", || subject.cached(0..SIZE).unwrap() <= bound);
}

#[test]
fn pages_read_by_other_stay_when_set_is_full() {
    let (Some(other_subject), Some(subject)) = (Subject::new(), Subject::new()) else { return };
    let runtime = Runtime::new(settings());
    other_subject.read_sequentially(&runtime, 0, 4 * MIB, BLOCK);
    eventually("the file is looked after", || runtime.stats().gauge(Gauge::ReadaheadPages).0 > 0);
    let other = open_as_other(&other_subject.path);
    other.read_exact_at(&mut vec![0; 4 << 20], 0).unwrap();
    // Nobody of ours reads that file any more: another one's stream pushes its pages out of the set.
    let bound = subject.max_pages_left(&runtime, 512);
    subject.read_sequentially(&runtime, 0, SIZE, BLOCK);
    eventually("the rest is dropped", || subject.cached(0..SIZE).unwrap() <= bound);
    // What was being dropped when he opened the file is fetched again.
    let all = Some(4 * MIB / PAGE);
    eventually("what another has read is there", || {
        other_subject.cached(0..4 * MIB) == all || other_subject.eviction_detector.pages_were_evicted()
    });
}

/// Opens a file and reads it when SPIN has the kernel drop pages: after the last look at who has it open.
struct OpensDuringDrop {
    path: PathBuf,
    range: std::ops::Range<u64>,
    opened: OnceLock<File>,
    drops: AtomicU64,
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
        LinuxSyscalls.advise(fd, offset, len, advice)
    }
}

#[test]
fn range_dropped_during_an_open_is_fetched_again() {
    let Some(subject) = Subject::new() else { return };
    let range = 0..16 * MIB;
    let path = subject.path.clone();
    let opens = OpensDuringDrop { path, range: range.clone(), opened: OnceLock::new(), drops: AtomicU64::new(0) };
    let kernel: &'static OpensDuringDrop = Box::leak(Box::new(opens));
    let runtime = Runtime::with_kernel(settings(), kernel);
    subject.read_sequentially(&runtime, 0, range.end, BLOCK);
    eventually("pages are dropped", || kernel.opened.get().is_some());
    let all = Some(range.end / PAGE);
    eventually("what another has read is there", || {
        subject.cached(range.clone()) == all || subject.eviction_detector.pages_were_evicted()
    });
    subject.read_sequentially(&runtime, range.end, SIZE, BLOCK);
    eventually("the set is forgotten", || runtime.stats().gauge(Gauge::ReadaheadPages).0 == 0);
    assert_eq!(kernel.drops.load(Relaxed), 1, "pages were dropped while another had the file open");
    subject.stays_cached(range, "what another has read");
}

#[test]
fn keep_and_drop_policies() {
    let Some(subject) = Subject::new() else { return };
    let runtime = Runtime::new(Settings { readahead_keep: CachePolicy::Keep, ..settings() });
    subject.read_sequentially(&runtime, 0, SIZE, BLOCK);
    if !subject.stays_cached(0..SIZE, "what is to be kept") {
        return;
    }
    assert_eq!(runtime.stats().gauge(Gauge::ReadaheadPages).1, 0);
    drop(runtime);
    file::evict(&subject.file);
    let runtime = Runtime::new(Settings { readahead_keep: CachePolicy::Drop, ..settings() });
    let bound = subject.max_pages_left(&runtime, 0);
    subject.read_sequentially(&runtime, 0, SIZE, BLOCK);
    eventually("all is dropped", || subject.cached(0..SIZE).unwrap() <= bound);
    eventually("nothing is in the set", || runtime.stats().gauge(Gauge::ReadaheadPages).0 == 0);
}

#[test]
fn advice_is_followed() {
    let Some(subject) = Subject::new() else { return };
    let runtime = Runtime::new(settings());
    let fd = subject.file.as_raw_fd();
    spinio_io::record_advice(fd, Advice::Random);
    subject.read_sequentially(&runtime, 0, SIZE, BLOCK);
    if !subject.stays_cached(0..SIZE, "who reads at random knows why") {
        return;
    }
    file::evict(&subject.file);
    subject.read_sequentially(&runtime, 0, SIZE / 4, 128 << 10);
    let copied = bytes_by(&runtime, |l| l.route == Route::Direct);
    assert!(copied >= SIZE / 4, "{copied} bytes went around the page cache");
    // Requests that follow nothing, but are said to: none goes around.
    file::evict(&subject.file);
    spinio_io::record_advice(fd, Advice::Sequential);
    let scattered: Vec<u64> = (0..5).map(|i| (4 - i) * 16 * MIB).collect();
    let by_read_ahead = || bytes_by(&runtime, |l| l.reason == Reason::ReadAhead);
    let before = (by_read_ahead(), bytes_by(&runtime, |l| l.route == Route::Direct));
    scattered.iter().for_each(|&at| subject.read_sequentially(&runtime, at, at + (128 << 10), 128 << 10));
    assert!(by_read_ahead() > before.0);
    assert_eq!(bytes_by(&runtime, |l| l.route == Route::Direct), before.1, "went around the page cache");
    // The same without a word.
    file::evict(&subject.file);
    spinio_io::record_advice(fd, Advice::Normal);
    scattered.iter().for_each(|&at| subject.read_sequentially(&runtime, at, at + (128 << 10), 128 << 10));
    assert!(bytes_by(&runtime, |l| l.route == Route::Direct) > before.1, "nothing went around the page cache");
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
        "only the first follows nothing, but {direct} bytes do"
    );
    eventually("what it left is bounded", || {
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
    assert_eq!(subject.cached(0..SIZE), Some(0), "the direct route leaves nothing behind");
}

#[test]
fn cold_stream_makes_one_syscall_per_read() {
    for block in [16 << 10, 128 << 10, 512 << 10] {
        let Some(subject) = Subject::new() else { return };
        let kernel = FaultySyscalls::new();
        let runtime = Runtime::with_kernel(settings(), kernel);
        let calls = || [Call::Pread(Route::Copy), Call::Stat, Call::Flags].map(|call| kernel.calls(call));
        let (begin, end) = (4 * MIB, 36 * MIB);
        subject.read_sequentially(&runtime, 0, begin, block);
        let before = calls();
        subject.read_sequentially(&runtime, begin, end, block);
        let [reads, stats, flags] = std::array::from_fn(|i| calls()[i] - before[i]);
        assert_eq!(reads, (end - begin) / block as u64, "of {block} bytes: one call each");
        assert_eq!(flags, 0, "of {block} bytes");
        // A look asks which file it is; and a keeper opens it again at the first.
        assert!(stats <= (end - begin) / SURVEY_STEP + 4, "of {block} bytes: {stats}");
    }
}

#[test]
fn cold_stream_offset_and_eof() {
    let Some(subject) = Subject::new() else { return };
    let runtime = Runtime::new(settings());
    let fd = subject.file.as_raw_fd();
    let mut lengths = [128 << 10, 512 << 10, 70_001, 300_000, 4096, 65_537, 512 << 10, 1 << 20].into_iter().cycle();
    let by_stream = |runtime: &Runtime| bytes_by(runtime, |l| l.reason == Reason::ReadAhead);
    // Reads at the descriptor's own offset and at a given one take turns; it ends short, and then with nothing.
    let (mut at, mut turn) = (SIZE - 24 * MIB, 0);
    linux::lseek(fd, at as i64, 0).unwrap();
    loop {
        let (len, own) = (lengths.next().unwrap(), turn % 5 != 3);
        // A host that read it too would leave nothing cold.
        let expected = len.min((SIZE - at) as usize);
        let got = runtime.read(fd, (!own).then_some(at), subject.buffer.target(0), len).unwrap();
        assert_eq!(got, expected, "{len} bytes at {at}");
        assert!(subject.buffer.range_bytes(0..got) == file::bytes(at, got, 0), "other bytes than the file's at {at}");
        if own {
            assert_eq!(linux::lseek(fd, 0, 1), Ok(at + got as u64), "the offset moves by what was read");
        } else {
            linux::lseek(fd, (at + got as u64) as i64, 0).unwrap();
        }
        if got == 0 {
            break;
        }
        (at, turn) = (at + got as u64, turn + 1);
    }
    assert!(by_stream(&runtime) > 0, "none of it was a stream's");
    // Where the stream would have gone on there is nothing: what is read is what lies where the program says.
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
    assert!(got > 0 && got < block, "{got} bytes, as the kernel had them");
    subject.read_sequentially(&runtime, 2 * MIB, 8 * MIB, block);
    // The number means another file from now on, which is read where the stream would have gone on.
    let other = subject.path.with_extension("other");
    std::fs::write(&other, vec![7u8; 9 << 20]).unwrap();
    let other = File::open(&other).unwrap();
    // SAFETY: both are descriptors of this test.
    assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), fd) }, fd);
    let got = next(8 * MIB).unwrap();
    assert!(got == block && subject.buffer.range_bytes(0..got).iter().all(|b| *b == 7), "bytes of the file that went");
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
        let bound = subject.max_pages_left(&runtime, 512);
        eventually("the rest is dropped", || subject.cached(0..SIZE).unwrap() <= bound);
    }
    eventually("the set is full and not fuller", || runtime.stats().gauge(Gauge::ReadaheadPages).0 == 512);
}

#[test]
fn edges_of_large_reads_are_owned() {
    let Some(subject) = Subject::new() else { return };
    let runtime = Runtime::new(Settings { routes: vec![Route::Copy, Route::Store], ..settings() });
    // Without direct routes all of it comes through the page cache, and all of it is ours.
    let long = Buffer::new(emulated("size=64M"), 8 << 20);
    for at in [64 * MIB + 100, 4 * MIB + 100, 32 * MIB + 100] {
        let got = runtime.read(subject.file.as_raw_fd(), Some(at), long.target(0), 8 << 20).unwrap();
        assert!(long.range_bytes(0..got) == file::bytes(at, got, 0));
    }
    eventually("the set holds no more than it may", || {
        let (now, most) = runtime.stats().gauge(Gauge::ReadaheadPages);
        now > 0 && most <= 512
    });
    let window = runtime.storage(subject.file.as_raw_fd()).unwrap().read_ahead();
    // The kernel's read-ahead behind each of them is nobody's.
    let bound = 512 + 3 * (2 * window + 2 * MIB) / PAGE;
    eventually("the rest is dropped", || subject.cached(0..SIZE).unwrap() <= bound);
}

#[test]
fn missing_syscalls_disable_dropping() {
    for (call, errno) in [(Call::Inotify, Errno::MFILE), (Call::Cachestat, Errno::PERM), (Call::Advise, Errno::INVAL)] {
        let Some(subject) = Subject::new() else { return };
        let kernel = FaultySyscalls::new();
        kernel.inject_always(call, Effect::Fail(errno));
        let runtime = Runtime::with_kernel(settings(), kernel);
        subject.read_sequentially(&runtime, 0, SIZE / 4, BLOCK);
        if !subject.stays_cached(0..SIZE / 4, &format!("{call:?}")) {
            return;
        }
    }
}

#[test]
fn lost_inotify_events_stop_dropping() {
    let Some(subject) = Subject::new() else { return };
    let kernel = FaultySyscalls::new();
    // The descriptor and the watch are made; what it says cannot be heard.
    kernel.inject(Call::Inotify, 3, u64::MAX, Effect::Fail(Errno::IO));
    let runtime = Runtime::with_kernel(settings(), kernel);
    subject.read_sequentially(&runtime, 0, SIZE / 4, BLOCK);
    subject.stays_cached(0..SIZE / 4, "news that are lost");
}
