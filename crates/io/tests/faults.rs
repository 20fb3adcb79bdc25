//! A fault below the engines must not break the caller: the call finishes on another route or returns the actual error.
//! It never hangs, never reports bytes that it did not deliver, and leaks neither a pin nor a descriptor.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use spinio_device::ErrorKind;
use spinio_device::emulated::{Emulated, POISON, ResourceCounts};
use spinio_io::kernel::Syscalls;
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::{Errno, linux};
use spinio_testkit::buffer::emulated;
use spinio_testkit::mount_fixture::{self, MountFixture};
use spinio_testkit::{
    Buffer, Call, Effect, FaultyDevice, FaultySyscalls, Operation, Rng, as_user, eventually, file, leak_check,
    with_deadline,
};

const SIZE: usize = (3 << 20) + 5000;

/// A file with runs of cached pages and runs of uncached ones, so that a read takes every route.
struct TestFile {
    _place: MountFixture,
    path: PathBuf,
    file: File,
}

impl TestFile {
    fn new() -> TestFile {
        let place = mount_fixture::create("tree").unwrap();
        let path = place.file("subject");
        let file = file::create_filled(&path, SIZE as u64);
        file::evict(&file);
        TestFile { _place: place, path, file }
    }

    /// Restores the same residency: the last third is uncached, and so are some pages before it.
    fn mix_residency(&self) {
        // No page is dirty, so no page has to be written back first.
        file::advise(&self.file, 0, 0, libc::POSIX_FADV_DONTNEED);
        let pages = SIZE as u64 / 4096 * 2 / 3;
        file::load_pages(&self.path, (0..pages).filter(|page| !(100..180).contains(page)));
    }
}

fn settings() -> Settings {
    Settings { dma_min: 64 << 10, bounce_limit: 8 << 20, ..Settings::default() }
}

/// The result of a read whose bytes were compared with the file.
type Outcome = Result<usize, Errno>;

/// Reads `len` bytes of the subject. Fails if a reported byte is wrong, or if more than `len` bytes were written.
fn read(runtime: &Runtime, subject: &TestFile, to: (&Buffer, spinio_io::Target), from: usize, len: usize) -> Outcome {
    let (buffer, target) = to;
    buffer.fill(POISON);
    let outcome =
        with_deadline("a read with faults", || runtime.read(subject.file.as_raw_fd(), Some(from as u64), target, len));
    let got = *outcome.as_ref().unwrap_or(&0);
    let expected = file::bytes(from as u64, got, 0);
    let wrong = buffer.range_bytes(0..got).iter().zip(&expected).position(|(a, b)| a != b);
    assert_eq!(wrong, None, "the first byte that was reported but not delivered, of {outcome:?}");
    buffer.assert_poison_from(len);
    outcome.map_err(|e| e.kind.errno())
}

/// Waits until an idle runtime has released the device's resources, and fails if it never does.
fn assert_all_released(device: &Emulated, except: ResourceCounts, what: &str) {
    let in_use = || ResourceCounts { pinned_blocks: 0, fences: 0, ..device.resources_in_use() };
    eventually(&format!("{what}: only {except:?} in use"), || in_use() == except);
}

#[test]
fn device_operation_failures() {
    let subject = TestFile::new();
    // Slow, so that a copy that is not waited for is not complete by chance.
    let inner = emulated("size=64M,latency_us=500");
    let buffer = Buffer::new(inner, SIZE);
    let (mut failures, mut errors) = (0, HashSet::new());
    for operation in Operation::ALL {
        let refusal = if operation == Operation::Pin { ErrorKind::PinRefused } else { ErrorKind::NoMemory };
        for kind in [ErrorKind::Driver, refusal] {
            for (nth, times) in [(1, 1), (2, 1), (4, 2), (1, u64::MAX)] {
                let what = format!("{operation:?} call {nth}, {times} times, {kind:?}");
                let device = FaultyDevice::wrap(inner);
                let runtime = Runtime::new(settings());
                let target = buffer.target_via(device, 0);
                subject.mix_residency();
                device.inject(operation, nth, times, kind);
                for (from, len) in [(0, SIZE), (5, 3000)] {
                    let outcome = read(&runtime, &subject, (&buffer, target), from, len);
                    let true_error = if kind == ErrorKind::NoMemory { Errno::NOMEM } else { Errno::IO };
                    match outcome {
                        Ok(got) => assert!(got > 0, "{what}: 0 bytes, before the end of the file"),
                        Err(errno) => assert_eq!(errno, true_error, "{what}"),
                    }
                    errors.insert(outcome.err());
                    if matches!(operation, Operation::Pin | Operation::CopyPinned | Operation::Staging) {
                        assert_eq!(outcome, Ok(len), "{what}: there are other routes");
                    }
                }
                failures += device.failures();
                device.clear_faults();
                subject.mix_residency();
                let after = read(&runtime, &subject, (&buffer, target), 0, SIZE);
                assert_eq!(after, Ok(SIZE), "{what}: the read after it");
                let expected = ResourceCounts { allocations: 1, ..ResourceCounts::default() };
                assert_all_released(inner, expected, &what);
            }
        }
    }
    assert!(failures > 50, "only {failures} operations failed: the faults do not reach the engines");
    assert_eq!(errors, HashSet::from([None, Some(Errno::IO), Some(Errno::NOMEM)]));
}

#[test]
fn syscall_failures() {
    let subject = TestFile::new();
    let device = emulated("size=64M,bar=8M,p2p=1");
    let (plain, mapped) = (Buffer::new(device, SIZE), Buffer::host_mapped(device, SIZE));
    let mut hits = [0; 2];
    let reads = [Route::Copy, Route::Store, Route::Direct, Route::P2p].map(Call::Pread);
    let effects = |call: Call| match call {
        Call::Pread(_) => vec![
            Effect::Fail(Errno::INTR),
            Effect::Fail(Errno::IO),
            Effect::Fail(Errno::AGAIN),
            Effect::Fail(Errno::REMOTEIO),
            Effect::Fail(Errno::INVAL),
            Effect::Short(1),
            Effect::Short(512),
        ],
        _ => vec![Effect::Fail(Errno::NOENT), Effect::Fail(Errno::PERM), Effect::Fail(Errno::NOSYS)],
    };
    let others = [Call::Reopen, Call::DirectAlign, Call::FileSystem, Call::Cachestat, Call::Map, Call::NewShadowTable];
    for call in reads.into_iter().chain(others) {
        for effect in effects(call) {
            for nth in [1, 2, 3] {
                for (which, buffer) in [&plain, &mapped].into_iter().enumerate() {
                    let what = format!("{call:?} call {nth}: {effect:?}");
                    let kernel = FaultySyscalls::new();
                    let runtime = Runtime::with_kernel(settings(), kernel);
                    kernel.inject(call, nth, 1, effect);
                    subject.mix_residency();
                    let outcome = read(&runtime, &subject, (buffer, buffer.target(0)), 0, SIZE);
                    hits[which] += kernel.injected();
                    match (call, effect) {
                        // There is no other route after the page cache: its error is returned.
                        (Call::Pread(Route::Copy | Route::Store), Effect::Fail(errno)) if errno != Errno::INTR => {
                            assert!(outcome.is_ok_and(|got| got > 0) || outcome == Err(errno), "{what}: {outcome:?}");
                        }
                        // A short read of the kernel may be returned as one.
                        (Call::Pread(Route::Copy | Route::Store), Effect::Short(_)) => {
                            assert!(outcome.is_ok_and(|got| got > 0), "{what}: {outcome:?}");
                        }
                        _ => assert_eq!(outcome, Ok(SIZE), "{what}: there are other routes"),
                    }
                    kernel.clear_faults();
                    let after = read(&runtime, &subject, (buffer, buffer.target(0)), 0, SIZE);
                    assert_eq!(after, Ok(SIZE), "{what}: the read after it");
                }
            }
        }
    }
    assert!(hits.iter().all(|&h| h > 20), "{hits:?}: the faults do not reach the engines");
    assert_all_released(device, ResourceCounts { allocations: 2, ..ResourceCounts::default() }, "kernel faults");
}

#[test]
fn reads_succeed_without_broken_routes() {
    let subject = TestFile::new();
    let device = emulated("size=64M,bar=8M,p2p=1");
    let (plain, mapped) = (Buffer::new(device, SIZE), Buffer::host_mapped(device, SIZE));
    let always: [(&str, &[(Call, Effect)]); 7] = [
        ("no /proc", &[(Call::Reopen, Effect::Fail(Errno::NOENT))]),
        ("no shadow fd table", &[(Call::NewShadowTable, Effect::Fail(Errno::NOSYS))]),
        ("no cachestat", &[(Call::Cachestat, Effect::Fail(Errno::PERM))]),
        ("no mapping", &[(Call::Map, Effect::Fail(Errno::NODEV)), (Call::Cachestat, Effect::Fail(Errno::NOSYS))]),
        (
            "direct reads fail",
            &[
                (Call::Pread(Route::Direct), Effect::Fail(Errno::IO)),
                (Call::Pread(Route::P2p), Effect::Fail(Errno::REMOTEIO)),
            ],
        ),
        (
            "direct reads are short",
            &[(Call::Pread(Route::Direct), Effect::Short(512)), (Call::Pread(Route::P2p), Effect::Short(512))],
        ),
        ("peer-to-peer DMA corrupts", &[(Call::Pread(Route::P2p), Effect::Corrupt)]),
    ];
    for (what, faults) in always {
        let kernel = FaultySyscalls::new();
        let runtime = Runtime::with_kernel(settings(), kernel);
        faults.iter().for_each(|&(call, effect)| kernel.inject_always(call, effect));
        for buffer in [&plain, &mapped] {
            for (from, len) in [(0, SIZE), (4096, 1 << 20), (777, 300_000), (9, 100), (SIZE - 70_000, 100_000)] {
                subject.mix_residency();
                let outcome = read(&runtime, &subject, (buffer, buffer.target(0)), from, len);
                assert_eq!(outcome, Ok(len.min(SIZE - from)), "{what}: {len} bytes at {from}");
            }
        }
        assert!(kernel.injected() > 0, "{what}: the fault was not injected");
        if faults.iter().any(|f| f.1 == Effect::Corrupt) {
            let trusted = runtime.stats().rows.iter().any(|l| l.route == Route::P2p && l.bytes > 0);
            assert!(!trusted, "{what}: the path was trusted: {:?}", runtime.stats());
        }
    }
}

#[test]
fn intermittent_faults_with_many_threads() {
    let subject = &TestFile::new();
    let inner = emulated("size=64M,bar=8M,p2p=1");
    let kernel = FaultySyscalls::new();
    let device = FaultyDevice::wrap(inner);
    let runtime = &Runtime::with_kernel(settings(), kernel);
    kernel.inject_every(Call::Pread(Route::Copy), 13, Effect::Short(1));
    kernel.inject_every(Call::Pread(Route::Direct), 3, Effect::Fail(Errno::IO));
    kernel.inject_every(Call::Pread(Route::P2p), 3, Effect::Fail(Errno::INVAL));
    kernel.inject_every(Call::Map, 2, Effect::Fail(Errno::NOMEM));
    device.inject(Operation::Pin, 3, 40, ErrorKind::PinRefused);
    std::thread::scope(|scope| {
        for seed in 0..3 {
            scope.spawn(move || {
                let mut rng = Rng::from_env(seed);
                let buffer = if seed == 0 { Buffer::host_mapped(inner, SIZE) } else { Buffer::new(inner, SIZE) };
                for round in 0..25 {
                    if round % 4 == seed {
                        subject.mix_residency();
                    }
                    let from = rng.near_page_edge(SIZE as u64) as usize;
                    let len = (1 + rng.near_page_edge(SIZE as u64) as usize).min(SIZE - from);
                    let outcome = read(runtime, subject, (&buffer, buffer.target_via(device, 0)), from, len);
                    // A small read returns the kernel's short read, as a host read would.
                    let small = len <= 64 << 10;
                    assert!(outcome == Ok(len) || small && outcome.is_ok_and(|got| got > 0), "{len}: {outcome:?}");
                }
            });
        }
    });
    assert_all_released(inner, ResourceCounts::default(), "many threads");
}

#[test]
fn no_descriptor_or_mapping_leaks() {
    let subject = TestFile::new();
    let device = emulated("size=64M");
    let buffer = Buffer::new(device, SIZE);
    let before = leak_check::thread_descriptors();
    {
        let kernel = FaultySyscalls::new();
        let runtime = Runtime::with_kernel(settings(), kernel);
        let mut most = 0;
        for round in 0..30u64 {
            let call = [Call::Reopen, Call::Map, Call::Pread(Route::Direct), Call::Cachestat][round as usize % 4];
            kernel.inject(call, 1 + round % 3, 1, Effect::Fail(Errno::IO));
            subject.mix_residency();
            assert_eq!(read(&runtime, &subject, (&buffer, buffer.target(0)), 0, SIZE), Ok(SIZE));
            kernel.clear_faults();
            most = most.max(leak_check::descriptors_of(&subject.path));
        }
        // The test's own descriptor, a shadow descriptor for the page cache and one with O_DIRECT.
        assert!(most <= 3, "{most} descriptors of one file");
        assert!(leak_check::mappings_of(&subject.path) <= 4, "mappings are not unmapped");
        drop(runtime);
    }
    // Workers close their descriptors when they end.
    eventually("neither descriptors nor mappings are left after the runtime is dropped", || {
        leak_check::descriptors_of(&subject.path) <= 1 && leak_check::mappings_of(&subject.path) == 0
    });
    // Other tests of this program open and close a few files meanwhile.
    assert!(leak_check::thread_descriptors() < before + 50, "descriptors in the program's table");
}

/// Reads chunk by chunk on the caller's thread: bytes that arrived before a failure are waited for and reported.
#[test]
fn failure_in_the_middle_of_app_fd_read() {
    let subject = TestFile::new();
    let inner = emulated("size=64M,latency_us=2000");
    let buffer = Buffer::new(inner, SIZE);
    for operation in [Operation::CopyIn, Operation::Staging] {
        let (kernel, device) = (FaultySyscalls::new(), FaultyDevice::wrap(inner));
        kernel.inject_always(Call::Reopen, Effect::Fail(Errno::NOENT));
        device.inject(operation, 2, 1, ErrorKind::Driver);
        let runtime = Runtime::with_kernel(settings(), kernel);
        let outcome = read(&runtime, &subject, (&buffer, buffer.target_via(device, 0)), 0, SIZE);
        let expected = match operation {
            // The bounce buffer pool works with the buffers that it has.
            Operation::Staging => outcome == Ok(SIZE),
            _ => outcome.is_ok_and(|got| (1..SIZE).contains(&got)),
        };
        assert!(expected, "{operation:?}: {outcome:?}");
        assert_eq!(device.failures(), 1, "{operation:?}: the fault was not injected");
    }
}

const RESTRICTED: &str = "SPINIO_TEST_POOR";

/// Does nothing when run as a test: the body of the child process of the next test.
#[test]
fn child_in_restricted_process() {
    if std::env::var_os(RESTRICTED).is_none() {
        return;
    }
    let subject = TestFile::new();
    let device = emulated("size=64M,bar=8M,p2p=1");
    let runtime = Runtime::new(settings());
    for buffer in [Buffer::new(device, SIZE), Buffer::host_mapped(device, SIZE)] {
        for (from, len) in [(0, SIZE), (777, 300_000), (9, 100)] {
            subject.mix_residency();
            assert_eq!(read(&runtime, &subject, (&buffer, buffer.target(0)), from, len), Ok(len));
        }
    }
}

/// The process may not lock memory, and a seccomp filter refuses system calls that are newer than Linux 5.11 or often
/// forbidden.
#[test]
fn restricted_process_reads_correctly() {
    for refused in [
        [libc::SYS_io_uring_setup, CACHESTAT],
        [libc::SYS_statx, libc::SYS_vmsplice],
        [libc::SYS_preadv2, libc::SYS_mincore],
    ] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "child_in_restricted_process"]).env(RESTRICTED, "1");
        // SAFETY: between fork and exec only system calls are made.
        unsafe { child.pre_exec(move || no_locked_memory().and_then(|()| refuse(refused))) };
        let output = with_deadline("a restricted process", || child.output()).unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("1 passed"), "without {refused:?}:\n{text}");
    }
}

const CACHESTAT: i64 = 451;

fn no_locked_memory() -> io::Result<()> {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `none` lives across the call.
    if unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &none) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Installs a seccomp filter that returns ENOSYS for two system calls.
fn refuse(calls: [i64; 2]) -> io::Result<()> {
    let step = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let equals = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let ret = libc::BPF_RET | libc::BPF_K;
    let mut program = [
        // The system call number is the first word of `struct seccomp_data`.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(equals, 1, 0, calls[0] as u32),
        step(equals, 0, 1, calls[1] as u32),
        step(ret, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        step(ret, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the filter lives across the calls.
    let failed = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
            || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter) != 0
    };
    if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[test]
fn again_as_ordinary_user() {
    as_user::rerun_as_nobody("again_as_ordinary_user");
}

/// If the copy to the device fails after the kernel's read, the offset is restored: the next call reads the same bytes.
#[test]
fn failed_small_read_restores_offset() {
    let subject = TestFile::new();
    let inner = emulated("size=64M");
    let (buffer, device) = (Buffer::new(inner, 4096), FaultyDevice::wrap(inner));
    let (runtime, target, fd) = (Runtime::new(settings()), buffer.target_via(device, 0), subject.file.as_raw_fd());
    linux::lseek(fd, 777, libc::SEEK_SET).unwrap();
    device.inject(Operation::CopyIn, 1, 1, ErrorKind::Driver);
    let failed = runtime.read(fd, None, target, 4096);
    assert_eq!((failed.map_err(|e| e.kind.errno()), device.failures()), (Err(Errno::IO), 1));
    assert_eq!(linux::lseek(fd, 0, libc::SEEK_CUR), Ok(777));
    device.clear_faults();
    assert_eq!(runtime.read(fd, None, target, 4096).unwrap(), 4096);
    assert!(buffer.bytes() == file::bytes(777, 4096, 0));
}

/// Replaces the descriptor by another file before the second read through it.
struct ReplacesFd {
    reads: AtomicUsize,
    other_fd: i32,
}

impl Syscalls for ReplacesFd {
    unsafe fn pread(
        &self,
        _route: Route,
        fd: i32,
        buf: *mut u8,
        len: usize,
        at: u64,
        flags: u32,
    ) -> Result<usize, Errno> {
        // SAFETY: both are this test's own.
        if self.reads.fetch_add(1, SeqCst) == 1 && unsafe { libc::dup2(self.other_fd, fd) } < 0 {
            return Err(Errno::BADF);
        }
        // SAFETY: passed on to the caller.
        unsafe { linux::pread_flags(fd, buf, len, at, flags) }
    }
}

#[test]
fn reused_fd_number_ends_read() {
    let place = mount_fixture::create("tree").unwrap();
    let (path, other) = (place.file("ours"), place.file("other"));
    drop((file::create_filled(&path, 6 << 20), std::fs::write(&other, vec![7u8; 6 << 20]).unwrap()));
    let open = |path| {
        use std::os::unix::fs::OpenOptionsExt;
        std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
    };
    // An O_DIRECT descriptor of the program is read chunk by chunk through that descriptor.
    let (ours, theirs) = (open(&path), open(&other));
    let kernel = Box::leak(Box::new(ReplacesFd { reads: AtomicUsize::new(0), other_fd: theirs.as_raw_fd() }));
    let runtime = Runtime::with_kernel(settings(), kernel);
    let buffer = Buffer::new(emulated("size=64M"), 6 << 20);
    buffer.fill(POISON);
    let got = runtime.read(ours.as_raw_fd(), Some(0), buffer.target(0), 6 << 20).unwrap();
    assert!(kernel.reads.load(SeqCst) > 1 && (1..6 << 20).contains(&got), "{got} bytes");
    assert!(buffer.range_bytes(0..got) == file::bytes(0, got, 0), "bytes of the other file");
    assert!(buffer.range_bytes(got..6 << 20).iter().all(|b| *b == POISON), "bytes past the count were written");
}

/// A read at the descriptor's own offset whose device fails: the next read continues where this one's bytes end.
#[test]
fn offset_is_at_end_of_delivered_bytes_after_device_failure() {
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("ours");
    drop(file::create_filled(&path, 8 << 20));
    let open = |flags| {
        use std::os::unix::fs::OpenOptionsExt;
        std::fs::OpenOptions::new().read(true).custom_flags(flags).open(&path).unwrap()
    };
    let inner = emulated("size=64M");
    let buffer = Buffer::new(inner, 8 << 20);
    for (flags, len) in [(libc::O_DIRECT, 8 << 20), (0, 8 << 20), (0, 4096)] {
        for operation in [Operation::CopyIn, Operation::Synchronize] {
            for nth in 1..4 {
                let (device, opened) = (FaultyDevice::wrap(inner), open(flags));
                let runtime = Runtime::new(settings());
                device.inject(operation, nth, 1, ErrorKind::Driver);
                let got = runtime.read(opened.as_raw_fd(), None, buffer.target_via(device, 0), len);
                let offset = linux::lseek(opened.as_raw_fd(), 0, libc::SEEK_CUR).unwrap();
                assert_eq!(offset, got.unwrap_or(0) as u64, "{flags:#o} {len} {operation:?} {nth}");
            }
        }
    }
}
