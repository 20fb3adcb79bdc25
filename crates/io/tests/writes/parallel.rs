//! Chunks of long direct writes in flight concurrently: when that is allowed, and what the file holds when one fails.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, OnceLock};
use std::time::Duration;

use spinio_device::ErrorKind;
use spinio_device::emulated::Emulated;
use spinio_io::kernel::{LinuxSyscalls, Syscalls};
use spinio_io::{Runtime, Settings, install_cancel_poll};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{
    Buffer, Call, Effect, FaultyDevice, FaultySyscalls, Operation, eventually, file, mount_fixture, with_deadline,
};

type Result<T> = core::result::Result<T, Errno>;

const CHUNK: usize = 4 << 20;
/// Larger than the staging memory, and no multiple of a chunk.
const SIZE: usize = (64 << 20) + 8192;
/// After a failure, up to this many bytes past the count may be new.
const IN_FLIGHT: usize = 6 * CHUNK;

fn settings() -> Settings {
    Settings { bounce_limit: 60 << 20, threads: 4, ..Settings::default() }
}

fn open(path: &Path, flags: i32) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).custom_flags(flags).open(path).unwrap()
}

/// One device for all tests: a process can have only a few.
fn device() -> &'static Emulated {
    static DEVICE: OnceLock<&Emulated> = OnceLock::new();
    DEVICE.get_or_init(|| emulated("size=512M"))
}

/// A device buffer that holds version 1.
fn buffer() -> Buffer {
    let buffer = Buffer::new(device(), SIZE);
    buffer.write_at(0, &file::bytes(0, SIZE, 1));
    buffer
}

/// Delays the first direct write until a second one starts, or until the timeout.
struct ConcurrencyProbe {
    timeout: Duration,
    observed: Mutex<Observed>,
    changed: Condvar,
    /// pidfd_getfd fails.
    deny_getfd: bool,
}

#[derive(Default, Clone, Copy)]
struct Observed {
    active: usize,
    max_active: usize,
    longest: usize,
    calls: usize,
}

impl Syscalls for ConcurrencyProbe {
    unsafe fn pwritev(
        &self,
        route: Route,
        fd: Fd,
        vectors: &[[usize; 2]],
        at: Option<u64>,
        flags: u32,
    ) -> Result<usize> {
        if route == Route::Direct {
            let mut seen = self.observed.lock().unwrap();
            seen.active += 1;
            seen.calls += 1;
            seen.max_active = seen.max_active.max(seen.active);
            seen.longest = seen.longest.max(vectors.iter().map(|v| v[1]).sum());
            self.changed.notify_all();
            if seen.calls == 1 {
                seen = self.changed.wait_timeout_while(seen, self.timeout, |s| s.max_active < 2).unwrap().0;
            }
            drop(seen);
        }
        // SAFETY: passed on to the caller.
        let wrote = unsafe { LinuxSyscalls.pwritev(route, fd, vectors, at, flags) };
        if route == Route::Direct {
            self.observed.lock().unwrap().active -= 1;
        }
        wrote
    }

    fn dup_from_thread(&self, tid: u32, fd: Fd) -> Result<Fd> {
        if self.deny_getfd { Err(Errno::PERM) } else { LinuxSyscalls.dup_from_thread(tid, fd) }
    }
}

/// Writes version 1 at the start of a file, and returns the calls that the kernel saw.
fn observe_write(path: &Path, flags: i32, at: Option<u64>, deny_getfd: bool, timeout: Duration) -> Observed {
    let (observed, changed) = Default::default();
    let kernel: &'static ConcurrencyProbe =
        Box::leak(Box::new(ConcurrencyProbe { timeout, observed, changed, deny_getfd }));
    let runtime = Runtime::with_kernel(settings(), kernel);
    let (buffer, subject) = (buffer(), open(path, flags));
    let wrote = with_deadline("a long write", || runtime.write(subject.as_raw_fd(), at, buffer.target(0), SIZE));
    assert_eq!(wrote.map_err(|e| e.kind.errno()), Ok(SIZE));
    if at.is_none() {
        assert_eq!(linux::lseek(subject.as_raw_fd(), 0, libc::SEEK_CUR), Ok(SIZE as u64));
    }
    let bytes = std::fs::read(path).unwrap();
    let from = if flags & libc::O_APPEND == 0 { 0 } else { bytes.len() - SIZE };
    assert!(bytes[from..][..SIZE] == file::bytes(0, SIZE, 1), "wrong bytes");
    *kernel.observed.lock().unwrap()
}

#[test]
fn allocated_bytes_are_written_in_parallel() {
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("subject");
    for (what, flags, at, deny_getfd) in [
        ("own descriptor", libc::O_DIRECT, Some(0), false),
        ("own descriptor, own offset", libc::O_DIRECT, None, false),
        ("own descriptor, pidfd_getfd denied", libc::O_DIRECT, Some(0), true),
        ("synchronous", libc::O_DIRECT | libc::O_DSYNC, Some(0), false),
    ] {
        file::evict(&file::create_filled(&path, SIZE as u64));
        let seen = observe_write(&path, flags, at, deny_getfd, Duration::from_secs(300));
        assert!(seen.max_active > 1, "{what}: the chunks were written one after the other");
        assert!(
            seen.max_active <= IN_FLIGHT / CHUNK && seen.longest == CHUNK,
            "{what}: {} of {}",
            seen.max_active,
            seen.longest
        );
    }
}

/// A write that extends a file, or fills its holes, can fail for lack of space. A program without O_DIRECT does not
/// expect new bytes past a failure. In both cases no later chunk may be written yet.
#[test]
fn extending_or_buffered_writes_stay_in_order() {
    let place = mount_fixture::create("tree").unwrap();
    for what in ["new", "shorter", "a hole", "appended", "cache bypass"] {
        let path = place.file(what);
        let mut flags = libc::O_DIRECT;
        match what {
            "new" => {}
            "shorter" => drop(file::create_filled(&path, (SIZE - 4096) as u64)),
            "a hole" => file::punch_hole(&file::create_filled(&path, SIZE as u64), 8192, 1 << 20).unwrap(),
            "appended" => {
                drop(file::create_filled(&path, SIZE as u64));
                flags |= libc::O_APPEND;
            }
            _ => {
                file::evict(&file::create_filled(&path, SIZE as u64));
                flags = libc::O_DSYNC;
            }
        }
        assert_eq!(observe_write(&path, flags, Some(0), false, Duration::from_millis(200)).max_active, 1, "{what}");
    }
}

/// Checks the file after a partial write of version 1 over version 0: the contiguous prefix is the count; after it, up
/// to `IN_FLIGHT` bytes are whole pages of either version. Whether some of those pages have version 1.
fn check_partial_write(what: &str, file: &File, wrote: usize) -> bool {
    let mut seen = vec![0; SIZE];
    file.read_exact_at(&mut seen, 0).unwrap();
    let (old, new) = (file::bytes(0, SIZE, 0), file::bytes(0, SIZE, 1));
    assert!(seen[..wrote] == new[..wrote], "{what}: {wrote} bytes are reported, but not in the file");
    let end = SIZE.min(wrote.next_multiple_of(CHUNK) + IN_FLIGHT);
    assert!(seen[end..] == old[end..], "{what}: written far past the {wrote} bytes that are reported");
    let mut beyond_count = false;
    for at in (wrote..end).step_by(4096) {
        let page = at..(at + 4096).min(end);
        let is_new = seen[page.clone()] == new[page.clone()];
        assert!(is_new || seen[page.clone()] == old[page], "{what}: neither version at {at}");
        beyond_count |= is_new;
    }
    beyond_count
}

#[test]
fn count_is_contiguous_prefix_when_syscall_fails() {
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("subject");
    let (buffer, subject) = (buffer(), file::create_filled(&path, SIZE as u64));
    let mut beyond_count = 0;
    for (nth, times) in [(1, 1), (2, 1), (5, 2), (17, 1), (1, u64::MAX)] {
        for effect in [Effect::Fail(Errno::IO), Effect::Short(4096)] {
            let what = format!("call {nth}, {times} times, {effect:?}");
            subject.write_all_at(&file::bytes(0, SIZE, 0), 0).unwrap();
            let kernel = FaultySyscalls::new();
            let runtime = Runtime::with_kernel(settings(), kernel);
            kernel.inject(Call::Pwritev(Route::Direct), nth, times, effect);
            let fd = open(&path, libc::O_DIRECT);
            let outcome = with_deadline(&what, || runtime.write(fd.as_raw_fd(), None, buffer.target(0), SIZE));
            assert!(kernel.injected() > 0, "{what}: nothing failed");
            let wrote = *outcome.as_ref().unwrap_or(&0);
            assert!(wrote < SIZE, "{what}");
            assert_eq!(linux::lseek(fd.as_raw_fd(), 0, libc::SEEK_CUR), Ok(wrote as u64), "{what}");
            match (outcome, effect) {
                (Err(error), Effect::Fail(errno)) => assert_eq!(error.kind.errno(), errno, "{what}"),
                (Err(error), _) => panic!("{what}: {error}"),
                (Ok(wrote), _) => assert!(wrote > 0, "{what}"),
            }
            beyond_count += usize::from(check_partial_write(&what, &subject, wrote));
            kernel.clear_faults();
            assert_eq!(
                runtime.write(fd.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(),
                SIZE,
                "{what}: the write after it"
            );
        }
    }
    println!("{beyond_count} writes left new bytes past the count");
}

#[test]
fn count_is_contiguous_prefix_when_device_fails() {
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("subject");
    let subject = file::create_filled(&path, SIZE as u64);
    let inner = emulated("size=128M,latency_us=300");
    let buffer = Buffer::new(inner, SIZE);
    buffer.write_at(0, &file::bytes(0, SIZE, 1));
    let before = inner.resources_in_use();
    for (operation, nth) in
        [(Operation::CopyOut, 1), (Operation::CopyOut, 20), (Operation::Fence, 9), (Operation::Wait, 4)]
    {
        let what = format!("{operation:?} {nth}");
        subject.write_all_at(&file::bytes(0, SIZE, 0), 0).unwrap();
        let device = FaultyDevice::wrap(inner);
        let runtime = Runtime::new(settings());
        let target = buffer.target_via(device, 0);
        device.inject(operation, nth, 1, ErrorKind::Driver);
        let fd = open(&path, libc::O_DIRECT);
        let outcome = with_deadline(&what, || runtime.write(fd.as_raw_fd(), Some(0), target, SIZE));
        assert!(device.failures() > 0, "{what}: nothing failed");
        let wrote = *outcome.as_ref().unwrap_or(&0);
        assert!(wrote < SIZE && wrote.is_multiple_of(CHUNK), "{what}: {wrote}");
        assert!(wrote > 0 || outcome.is_err(), "{what}");
        // Chunks in flight when it failed are waited for, and count.
        assert!(!check_partial_write(&what, &subject, wrote), "{what}: in the file, but not reported");
        device.clear_faults();
        assert_eq!(runtime.write(fd.as_raw_fd(), Some(0), target, SIZE).unwrap(), SIZE, "{what}: the write after it");
        drop(runtime);
        // A worker that started too late for the last write may be the last to release.
        eventually("no stream and no fence is leaked", || {
            let now = inner.resources_in_use();
            (now.streams, now.fences) == (before.streams, before.fences)
        });
    }
}

#[test]
fn cancelled_write_counts_chunks_in_flight() {
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("subject");
    let (buffer, subject) = (buffer(), file::create_filled(&path, SIZE as u64));
    let runtime = Runtime::new(settings());
    let fd = open(&path, libc::O_DIRECT);
    let wrote = with_deadline("a cancelled write", || {
        let _poll = install_cancel_poll(|| true, Duration::ZERO);
        runtime.write(fd.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap()
    });
    assert_eq!(wrote, CHUNK);
    assert!(!check_partial_write("a cancelled write", &subject, wrote));
}

/// The lock of an open file ends when the program closes it, also if a worker wrote through its descriptor.
#[test]
fn no_descriptor_is_open_after_return() {
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("subject");
    let (buffer, other) = (buffer(), file::create_filled(&path, SIZE as u64));
    let runtime = Runtime::new(settings());
    for _ in 0..5 {
        let fd = open(&path, libc::O_DIRECT);
        fd.lock().unwrap();
        assert_eq!(runtime.write(fd.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
        drop(fd);
        eventually("the lock ends with the descriptor", || other.try_lock().is_ok());
        other.unlock().unwrap();
    }
}

/// Blocks reads through the page cache until `open` is set, and counts the blocked ones.
#[derive(Default)]
struct BlockedReads {
    open: Mutex<bool>,
    changed: Condvar,
    waiting: AtomicUsize,
}

impl Syscalls for BlockedReads {
    unsafe fn pread(&self, route: Route, fd: Fd, buf: *mut u8, len: usize, at: u64, flags: u32) -> Result<usize> {
        if route == Route::Copy {
            self.waiting.fetch_add(1, SeqCst);
            drop(self.changed.wait_while(self.open.lock().unwrap(), |open| !*open).unwrap());
        }
        // SAFETY: passed on to the caller.
        unsafe { LinuxSyscalls.pread(route, fd, buf, len, at, flags) }
    }

    fn dup_from_thread(&self, _: u32, _: Fd) -> Result<Fd> {
        Err(Errno::PERM)
    }
}

/// The workers may be busy with requests that end only when the write releases its memory.
#[test]
fn write_completes_while_workers_are_busy() {
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("subject");
    let (buffer, file) = (buffer(), file::create_filled(&path, SIZE as u64));
    let read = file::create_filled(&place.file("read"), 8 << 20);
    let kernel: &'static BlockedReads = Box::leak(Box::default());
    let runtime = Runtime::with_kernel(Settings { threads: 2, dma_min: u64::MAX, ..settings() }, kernel);
    let to = Buffer::new(device(), 8 << 20);
    let fd = open(&path, libc::O_DIRECT);
    with_deadline("a long write while the workers are busy", || {
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| runtime.read(read.as_raw_fd(), Some(0), to.target(0), 8 << 20).unwrap());
            eventually("the only copy worker is blocked in a read", || kernel.waiting.load(SeqCst) == 2);
            assert_eq!(runtime.write(fd.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
            *kernel.open.lock().unwrap() = true;
            kernel.changed.notify_all();
            assert_eq!(reading.join().unwrap(), 8 << 20);
        });
    });
    assert!(!check_partial_write("without workers", &file, SIZE));
}

/// The thread that received the kernel's signal.
static SIGNALLED_TID: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_signal(_: libc::c_int) {
    SIGNALLED_TID.store(linux::gettid() as usize, SeqCst);
}

#[test]
fn size_limit_signal_reaches_writing_thread() {
    const INSIDE: &str = "SPINIO_TEST_LIMITED";
    if std::env::var_os(INSIDE).is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let child = child.args(["--exact", "parallel::size_limit_signal_reaches_writing_thread"]).env(INSIDE, "1");
        let out = child.output().unwrap();
        let stdout = String::from_utf8_lossy(&out.stdout);
        return assert!(stdout.contains("1 passed"), "{stdout}{}", String::from_utf8_lossy(&out.stderr));
    }
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("subject");
    drop(file::create_filled(&path, SIZE as u64 + 4096));
    let runtime = Runtime::new(settings());
    let (buffer, fd) = (buffer(), open(&path, libc::O_DIRECT));
    let limit = libc::rlimit { rlim_cur: 4096, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the handler only stores a number; the limit is a local.
    unsafe {
        assert_ne!(libc::signal(libc::SIGXFSZ, on_signal as *const () as libc::sighandler_t), libc::SIG_ERR);
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit), 0);
    }
    let wrote = runtime.write(fd.as_raw_fd(), Some(4096), buffer.target(0), SIZE);
    assert_eq!(wrote.map_err(|e| e.kind.errno()), Err(Errno::FBIG));
    assert_eq!(SIGNALLED_TID.load(SeqCst), linux::gettid() as usize);
}
