//! Shadow files (files that SPIN opened itself) are read and written like any other, and the program does not see them.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use spinio_device::{DeviceAddr, DeviceKind, ErrorKind, StreamId, registry};
use spinio_io::kernel::{LinuxSyscalls, Syscalls};
use spinio_io::{Part, Runtime, Settings, Target};
use spinio_plan::Route;
use spinio_sys::{Errno, linux};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, FaultyDevice, Operation, wait_exclusive, with_deadline};

fn c(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn target(len: usize) -> Target {
    let addr = registry::alloc(DeviceKind::Emulated, 0, len, false).unwrap();
    Target { allocation: registry::find(addr.0 as *const u8, len).unwrap(), addr }
}

/// The files of a directory that are in the program's fd table.
fn open_files(directory: &Path) -> Vec<PathBuf> {
    let targets = std::fs::read_dir("/proc/self/fd").unwrap().map(|e| std::fs::read_link(e.unwrap().path()));
    targets.filter_map(Result::ok).filter(|target| target.starts_with(directory)).collect()
}

fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 31 + seed) % 251) as u8).collect()
}

#[test]
fn shadow_files_are_hidden_from_app_fd_table() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = Runtime::new(Settings::default());
    for (number, len) in [5, 4096, 100_000, 9 << 20].into_iter().enumerate() {
        let (from, to) = (directory.path().join(format!("in{number}")), directory.path().join(format!("out{number}")));
        std::fs::write(&from, bytes(len, number)).unwrap();
        let device = target(len + 100);
        let input = runtime.open(&c(&from), linux::O_RDONLY, 0).unwrap();
        let output = runtime.open(&c(&to), linux::O_RDWR | linux::O_CREAT, 0o600).unwrap();
        assert_eq!(open_files(directory.path()), [""; 0].map(PathBuf::from));
        // Twice, since the second read finds the state that the first one cached.
        for _ in 0..2 {
            assert_eq!(runtime.read(input.fd(), Some(0), device, len + 100).unwrap(), len);
        }
        let skip = len / 3;
        let rest = Target { addr: DeviceAddr(device.addr.0 + skip as u64), ..device };
        assert_eq!(runtime.write(output.fd(), Some(skip as u64), rest, len - skip).unwrap(), len - skip);
        assert_eq!(runtime.write(output.fd(), Some(0), device, skip).unwrap(), skip);
        assert_eq!(std::fs::read(&to).unwrap(), bytes(len, number));
        assert_eq!(output.run_blocking(|fd| linux::fstat(fd).map(|s| s.size)).unwrap(), len as u64);
        drop((input, output));
        registry::free(device.addr).unwrap();
    }
}

#[test]
fn open_errors_are_reported() {
    let runtime = Runtime::new(Settings::default());
    assert_eq!(runtime.open(c"/missing/file", linux::O_RDONLY, 0).err(), Some(Errno::NOENT));
    let read_only = runtime.open(c"/proc/self/exe", linux::O_RDONLY, 0).unwrap();
    let device = target(100);
    assert!(runtime.write(read_only.fd(), Some(0), device, 100).is_err());
    registry::free(device.addr).unwrap();
}

#[test]
fn app_fds_are_unaffected_by_shadow_files() {
    let directory = tempfile::tempdir().unwrap();
    let name: &CStr = &c(&directory.path().join("locked"));
    std::fs::write(directory.path().join("locked"), bytes(100_000, 1)).unwrap();
    let runtime = Runtime::new(Settings::default());
    let app_file = std::fs::File::open(directory.path().join("locked")).unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&app_file);
    let device = target(100_000);
    let shadow_file = runtime.open(name, linux::O_RDONLY, 0).unwrap();
    assert_eq!(runtime.read(fd, Some(50_000), device, 100_000).unwrap(), 50_000);
    assert_eq!(runtime.read(shadow_file.fd(), Some(50_000), device, 100_000).unwrap(), 50_000);
    drop(shadow_file);
    assert_eq!(runtime.read(fd, Some(99_999), device, 100_000).unwrap(), 1);
    registry::free(device.addr).unwrap();
}

/// More threads wait for the lease than there are shadow workers, and the lease holder needs a worker to continue.
#[test]
fn waiting_openers_block_no_worker() {
    const OPENERS: usize = 20;
    let directory = tempfile::tempdir().unwrap();
    let (path, unrelated) = (directory.path().join("leased"), directory.path().join("unrelated"));
    std::fs::write(&path, b"old").unwrap();
    std::fs::write(&unrelated, b"new").unwrap();
    let runtime = Runtime::new(Settings::default());
    if let Err(e) = wait_exclusive(&path) {
        return eprintln!("skipped: leases are not available: {e}");
    }
    let shadow_file = Arc::new(runtime.open(&c(&path), linux::O_RDWR, 0).unwrap());
    let lease = shadow_file.take_write_lease().unwrap();
    let (waiting, opened) = (AtomicUsize::new(0), AtomicUsize::new(0));
    with_deadline("an opener", || {
        std::thread::scope(|scope| {
            let opened_under_lease = lease.with_lease(|| {
                for _ in 0..OPENERS {
                    scope.spawn(|| {
                        waiting.fetch_add(1, SeqCst);
                        let file = runtime.open(&c(&path), linux::O_RDWR, 0).unwrap();
                        opened.fetch_add(1, SeqCst);
                        drop(file);
                    });
                }
                while waiting.load(SeqCst) < OPENERS {
                    std::thread::yield_now();
                }
                std::thread::sleep(Duration::from_millis(200));
                let unrelated_file = runtime.open(&c(&unrelated), linux::O_RDONLY, 0).unwrap();
                assert_eq!(unrelated_file.run_blocking(|fd| linux::fstat(fd).map(|s| s.size)), Ok(3));
                opened.load(SeqCst)
            });
            assert_eq!(opened_under_lease, Some(0), "opened while the lease was in use");
        });
    });
    assert_eq!(opened.load(SeqCst), OPENERS);
    // After the wait it is like any open file: not in non-blocking mode.
    let file = runtime.open(&c(&path), linux::O_RDWR, 0).unwrap();
    assert_eq!(file.run_blocking(linux::status_flags).unwrap() as u32 & linux::O_NONBLOCK, 0);
}

#[test]
fn lease_ends_on_open_but_not_while_in_use() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("leased");
    std::fs::write(&path, b"old").unwrap();
    let runtime = Runtime::new(Settings::default());
    let shadow_file = Arc::new(runtime.open(&c(&path), linux::O_RDWR, 0).unwrap());
    let other = std::fs::File::open(&path).unwrap();
    assert_eq!(shadow_file.take_write_lease().err(), Some(Errno::AGAIN), "another descriptor is open");
    drop(other);
    let mut broken = 0;
    for round in 0..3 {
        let lease = match shadow_file.take_write_lease() {
            Ok(lease) => lease,
            Err(e) if e != Errno::AGAIN && round == 0 => return eprintln!("skipped: leases are not available: {e}"),
            Err(e) => panic!("round {round}: {e}"),
        };
        assert_eq!(lease.with_lease(|| 7), Some(7));
        let used = AtomicBool::new(false);
        let begun = Instant::now();
        with_deadline("the opener", || {
            std::thread::scope(|scope| {
                let opener = lease.with_lease(|| {
                    let opener = scope.spawn(|| {
                        let file = std::fs::OpenOptions::new().write(round % 2 == 0).read(true).open(&path);
                        // Closed here, so that no other descriptor is open in the next round.
                        file.is_ok() && used.load(SeqCst)
                    });
                    std::thread::sleep(Duration::from_millis(100));
                    used.store(true, SeqCst);
                    opener
                });
                assert!(opener.unwrap().join().unwrap(), "round {round}");
            });
        });
        // SPIN released the lease by itself; the kernel did not have to break it by force.
        broken += usize::from(linux::lease_break_time().is_some_and(|seconds| begun.elapsed().as_secs() >= seconds));
        assert_eq!(lease.with_lease(|| 7), None);
    }
    // A busy machine may hold up a round for as long, but not all.
    assert!(broken < 3, "the kernel breaks the lease by force");
    // A lease that is dropped is released at once: the opener does not wait.
    drop(shadow_file.take_write_lease().unwrap());
    drop(std::fs::File::open(&path).unwrap());
}

#[test]
fn write_ranges_stops_when_disallowed() {
    const LEN: usize = 300_000;
    const COUNT: usize = 20;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ranges");
    // Several groups of ranges, and one.
    for staging in [2 << 20, 128 << 20] {
        let runtime = Runtime::new(Settings { bounce_limit: staging, ..Settings::default() });
        for times in [0, 1, 7, COUNT] {
            std::fs::write(&path, bytes(COUNT * LEN, 1)).unwrap();
            let shadow_file = runtime.open(&c(&path), linux::O_RDWR, 0).unwrap();
            let new = bytes(COUNT * LEN, 2);
            let part = |n: usize| Part::Host(new[n * LEN..].as_ptr(), LEN);
            let ranges: Vec<_> = (0..COUNT).map(|n| ((n * LEN) as u64, part(n))).collect();
            let queries = Arc::new(AtomicUsize::new(0));
            let still_allowed = move || queries.fetch_add(1, SeqCst) < times;
            let mut unwritten = runtime.write_ranges_while(&shadow_file, &ranges, Route::Copy, still_allowed).unwrap();
            unwritten.sort_unstable();
            unwritten.dedup();
            assert_eq!(unwritten.len(), COUNT - times, "bounce buffer limit {staging}");
            let got = std::fs::read(&path).unwrap();
            for n in 0..COUNT {
                let (range, version) = (n * LEN..(n + 1) * LEN, if unwritten.contains(&n) { 1 } else { 2 });
                assert!(got[range.clone()] == bytes(COUNT * LEN, version)[range], "range {n} of {unwritten:?}");
            }
        }
        let lines = runtime.stats().rows;
        assert_eq!(lines.iter().map(|l| l.bytes).sum::<u64>(), ((1 + 7 + COUNT) * LEN) as u64, "{lines:?}");
    }
}

#[test]
fn failed_stream_read_releases_buffers() {
    const LEN: usize = 5 << 20;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("in");
    std::fs::write(&path, bytes(LEN, 1)).unwrap();
    let inner = emulated("size=64M");
    let buffer = Buffer::new(inner, LEN);
    let runtime = Runtime::new(Settings { bounce_limit: 4 << 20, ..Settings::default() });
    let shadow_file = Arc::new(runtime.open(&c(&path), linux::O_RDONLY, 0).unwrap());
    let device = FaultyDevice::wrap(inner);
    let target = buffer.target_via(device, 0);
    let upload = || with_deadline("an upload", || runtime.read_on_stream(&shadow_file, 0, target, LEN, StreamId(0)));
    let mut failed = 0;
    for operation in [Operation::CopyIn, Operation::Synchronize] {
        for nth in [1, 2, 3, 4] {
            if operation == Operation::Synchronize {
                // Only a device without host functions is waited for.
                device.inject(Operation::LaunchHostFunc, 1, u64::MAX, ErrorKind::Unsupported);
            }
            device.inject(operation, nth, 1, ErrorKind::Driver);
            let outcome = upload();
            let hit = device.failures() > 0;
            failed += u64::from(outcome.is_err());
            assert_eq!(runtime.stats().read.failed, failed, "{operation:?} {nth}: {:?}", outcome.err());
            assert!(hit);
            device.clear_faults();
        }
    }
    assert!(failed >= 6, "only {failed} uploads failed");
    assert_eq!(upload().unwrap().wait(), Ok(LEN));
    assert!(buffer.bytes() == bytes(LEN, 1));
    // All bounce buffers were released: none above the limit was needed.
    assert!(runtime.bounce_bytes(&buffer.allocation()) <= 4 << 20);
}

/// Delays each write, and counts the writes in progress.
#[derive(Debug, Default)]
struct SlowWrites {
    started: AtomicUsize,
    active: AtomicUsize,
}

impl Syscalls for SlowWrites {
    unsafe fn pwritev(
        &self,
        route: Route,
        fd: linux::Fd,
        vectors: &[[usize; 2]],
        at: Option<u64>,
        flags: u32,
    ) -> Result<usize, Errno> {
        self.started.fetch_add(1, SeqCst);
        self.active.fetch_add(1, SeqCst);
        std::thread::sleep(Duration::from_millis(20));
        // SAFETY: passed on to the caller.
        let wrote = unsafe { LinuxSyscalls.pwritev(route, fd, vectors, at, flags) };
        self.active.fetch_sub(1, SeqCst);
        wrote
    }
}

#[test]
fn panic_waits_for_writes_in_flight() {
    let kernel: &'static SlowWrites = Box::leak(Box::default());
    let inner = emulated("size=64M");
    let device = FaultyDevice::wrap(inner);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    // A group has two ranges.
    let runtime = Runtime::with_kernel(Settings { bounce_limit: 4 << 20, ..Settings::default() }, kernel);
    let file = runtime.open(&c(&path), linux::O_RDWR | linux::O_CREAT, 0o600).unwrap();
    let buffer = Buffer::new(inner, 8 << 20);
    buffer.write_at(0, &bytes(8 << 20, 1));
    let range = |i: usize| ((i << 20) as u64, Part::Device(buffer.target_via(device, i << 20), 1 << 20));
    let ranges: Vec<(u64, Part)> = (0..8).map(range).collect();
    // The second group is being written when the third is gathered.
    device.panic(Operation::CopyOut, 5);
    let write = || runtime.write_ranges(&file, &ranges, Route::Copy);
    let ended = with_deadline("a panic", || catch_unwind(AssertUnwindSafe(write)));
    let (active, started) = (kernel.active.load(SeqCst), kernel.started.load(SeqCst));
    assert!(ended.is_err());
    assert_eq!(active, 0, "a released bounce buffer is still being written");
    assert!((2..=4).contains(&started), "{started}");
    assert!(std::fs::read(&path).unwrap()[..2 << 20] == bytes(8 << 20, 1)[..2 << 20]);
    with_deadline("the next write", write).unwrap();
    assert!(std::fs::read(&path).unwrap() == bytes(8 << 20, 1));
}
