//! Batches of enough operations that batch readers read them.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use spinio_batch::{Batches, ReadOp};
use spinio_device::ErrorKind;
use spinio_device::emulated::POISON;
use spinio_io::kernel::Syscalls;
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{
    Buffer, Call, Effect, FaultyDevice, FaultySyscalls, Operation, Rng, eventually, file, leak_check, mount_fixture,
    with_deadline,
};

use crate::subject::{SIZE, TestFile, assert_all_released, check, pieces, run_failing, run_through, settings};

fn reader_settings() -> Settings {
    // This many operations of so small a file would be registered.
    let routes = vec![Route::Copy, Route::Store, Route::Direct];
    Settings { bounce_limit: 4 << 20, batch_threads: 6, routes, ..settings() }
}

/// Enough operations that batch readers are woken.
fn many_ops(rng: &mut Rng, subject: &TestFile, buffer: &Buffer) -> Vec<ReadOp> {
    pieces(rng, &[subject.fd()], buffer, 4000, 5000)
}

#[test]
fn readers_return_same_bytes_as_single_reads() {
    let subject = TestFile::new();
    let device = emulated("size=64M");
    let buffer = Buffer::new(device, 16 << 20);
    let runtime = Runtime::new(reader_settings());
    let mut rng = Rng::from_env(31);
    for _ in 0..6 {
        buffer.fill(POISON);
        let mut batch = many_ops(&mut rng, &subject, &buffer);
        with_deadline("a batch", || runtime.batch(&mut batch)).unwrap();
        check(&batch, &buffer);
    }
    let mut names: Vec<String> = Vec::new();
    // A thread has its name once it has got a processor.
    eventually("there is a reader thread", || {
        let all = fs::read_dir("/proc/self/task").unwrap().map(|task| fs::read(task.unwrap().path().join("comm")));
        names = all.flatten().map(|name| String::from_utf8_lossy(&name).trim_end().to_owned()).collect();
        names.iter().any(|name| name == "spinio-batchrd")
    });
    // Those of SPIN have the names that ARCHITECTURE.md lists.
    const THREADS: [&str; 8] = [
        "spinio-fdroot",
        "spinio-shadow",
        "spinio-copy",
        "spinio-batchrd",
        "spinio-lease",
        "spinio-unpin",
        "spinio-batch",
        "spinio-nvrtc",
    ];
    let of_spin = names.iter().filter(|name| name.starts_with("spinio") && !name.starts_with("spinio-emu"));
    assert!(of_spin.clone().all(|name| THREADS.contains(&name.as_str())), "{names:?}");
    // The program's descriptor, and the shadow descriptors: readers keep nothing open.
    with_deadline("files are closed", || {
        while leak_check::descriptors_of(&subject.path) > 3 {
            std::thread::yield_now();
        }
    });
    drop(runtime);
    assert_all_released(device, 1);
}

#[test]
fn reader_fallback_uses_caller() {
    let subject = TestFile::new();
    let inner = emulated("size=64M");
    let mut rng = Rng::from_env(32);
    type Fault<'a> = &'a dyn Fn(&FaultyDevice, &FaultySyscalls);
    let faults: [(&str, Fault<'_>); 8] = [
        ("no descriptor can be had", &|_, k| k.inject_always(Call::DupFromThread, Effect::Fail(Errno::MFILE))),
        ("some readers have none", &|_, k| k.inject_every(Call::DupFromThread, 2, Effect::Fail(Errno::PERM))),
        ("reads are interrupted", &|_, k| k.inject_every(Call::Pread(Route::Copy), 3, Effect::Fail(Errno::INTR))),
        ("reads stop half-way", &|_, k| k.inject_every(Call::Pread(Route::Copy), 3, Effect::Short(100))),
        ("no kernel to gather with", &|d, _| {
            d.inject(Operation::LoadGatherKernel, 1, u64::MAX, ErrorKind::Unsupported)
        }),
        ("a launch fails", &|d, _| d.inject(Operation::Gather, 2, 1, ErrorKind::Driver)),
        ("every launch fails", &|d, _| d.inject(Operation::Gather, 1, u64::MAX, ErrorKind::Driver)),
        ("pinned memory is refused", &|d, _| d.inject(Operation::Staging, 1, u64::MAX, ErrorKind::NoMemory)),
    ];
    for (what, fault) in faults {
        let (device, kernel) = (FaultyDevice::wrap(inner), FaultySyscalls::new());
        fault(device, kernel);
        let runtime = Runtime::with_kernel(reader_settings(), kernel);
        let buffer = Buffer::new(inner, 16 << 20);
        let mut batch = many_ops(&mut rng, &subject, &buffer);
        let done = run_through(device, &runtime, &buffer, &mut batch, what);
        assert_eq!(done.failed, 0, "{what}");
        check(&batch, &buffer);
        drop(runtime);
        assert_all_released(inner, 1);
    }
}

#[test]
fn device_failure_under_readers_is_reported() {
    let subject = TestFile::new();
    let inner = emulated("size=64M");
    let both = [Operation::Synchronize, Operation::Fence];
    for operations in [&both[..1], &[Operation::AcquireStream], &both[1..], &both] {
        let device = FaultyDevice::wrap(inner);
        // Not the order of the batch alone.
        let from = if operations.len() > 1 { 2 } else { 1 };
        operations.iter().for_each(|&operation| device.inject(operation, from, u64::MAX, ErrorKind::Driver));
        let runtime = Runtime::new(reader_settings());
        let buffer = Buffer::new(inner, 16 << 20);
        let mut batch = many_ops(&mut Rng::from_env(33), &subject, &buffer);
        run_failing(device, &runtime, &buffer, &mut batch, &format!("{operations:?}"));
        drop(runtime);
        assert_all_released(inner, 1);
    }
}

#[test]
fn concurrent_batches_share_readers_and_small_pool() {
    let subject = TestFile::new();
    let device = emulated("size=256M");
    let runtime = Runtime::new(reader_settings());
    with_deadline("batches of several threads", || {
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let (subject, runtime) = (&subject, &runtime);
                scope.spawn(move || {
                    let mut rng = Rng::from_env(140 + seed);
                    for _ in 0..4 {
                        let buffer = Buffer::new(device, 16 << 20);
                        let mut batch = many_ops(&mut rng, subject, &buffer);
                        runtime.batch(&mut batch).unwrap();
                        check(&batch, &buffer);
                    }
                });
            }
        });
    });
}

/// Moves this thread to a processor, if it may run there.
fn run_on(cpu: usize) -> bool {
    // SAFETY: a set of bits, and a pointer to it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set) == 0
    }
}

/// Small reads keep a buffer open on each processor where there were any: here all of the pool.
#[test]
fn readers_get_buffers_that_small_reads_keep_open() {
    let subject = TestFile::new();
    let device = emulated("size=64M");
    let (buffer, page) = (Buffer::new(device, 16 << 20), Buffer::new(device, 4096));
    let runtime = Runtime::new(reader_settings());
    let mut rng = Rng::from_env(160);
    // Whether the readers or the caller come first is chance.
    for _ in 0..20 {
        for cpu in 0..64 {
            let read = || run_on(cpu).then(|| runtime.read(subject.fd(), Some(0), page.target(0), 4096).unwrap());
            std::thread::scope(|scope| scope.spawn(read).join()).unwrap();
        }
        buffer.fill(POISON);
        let mut batch = many_ops(&mut rng, &subject, &buffer);
        with_deadline("a batch after small reads", || runtime.batch(&mut batch)).unwrap();
        check(&batch, &buffer);
    }
}

#[test]
fn batch_with_more_files_than_reader_keeps_open() {
    let place = mount_fixture::create("tree").unwrap();
    let device = emulated("size=64M");
    let files: Vec<File> = (0..150).map(|n| file::create_filled(&place.file(&n.to_string()), 20_000 + n)).collect();
    let runtime = Runtime::new(reader_settings());
    let buffer = Buffer::new(device, 8000 * 100);
    let piece = |i: u64| {
        let (fd, address) = (files[(i * 7 % 150) as usize].as_raw_fd(), buffer.addr().0 + i * 100);
        ReadOp { fd, offset: i * 131 % 19_000, len: 100, address, ..ReadOp::default() }
    };
    let mut batch: Vec<ReadOp> = (0..8000).map(piece).collect();
    let done = with_deadline("a batch", || runtime.batch(&mut batch)).unwrap();
    assert_eq!((done.failed, done.bytes), (0, 800_000));
    for (p, seen) in batch.iter().zip(buffer.bytes().chunks(100)) {
        assert!(seen == file::bytes(p.offset, 100, 0), "{p:?}");
    }
}

/// The program replaces the file under the number during the batch.
#[test]
fn reused_fd_number_never_mixes_files_in_batch() {
    let subject = TestFile::new();
    let place = mount_fixture::create("tree").unwrap();
    fs::write(place.file("other"), vec![0xAB; SIZE]).unwrap();
    let other = File::open(place.file("other")).unwrap();
    let number = subject.file.try_clone().unwrap();
    let device = emulated("size=64M");
    let runtime = Runtime::new(reader_settings());
    let put = |file: &File| {
        // SAFETY: `number` is ours to replace, and stays open all the time.
        assert!(unsafe { libc::dup2(file.as_raw_fd(), number.as_raw_fd()) } >= 0);
    };
    for seed in 0..30 {
        put(&subject.file);
        let mut rng = Rng::from_env(150 + seed);
        let buffer = Buffer::new(device, 16 << 20);
        let mut batch = pieces(&mut rng, &[number.as_raw_fd()], &buffer, 4000, 5000);
        let begun = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(seed * 100));
                put(&other);
            });
            with_deadline("a batch whose number is taken", || runtime.batch(&mut batch)).is_ok()
        });
        let seen = buffer.bytes();
        // All of them are of one of the files, the one when the batch began; else it failed.
        let (mut one, mut another) = (0, 0);
        for p in batch.iter().filter(|p| begun && p.result > 64) {
            let bytes = &seen[(p.address - buffer.addr().0) as usize..][..p.result as usize];
            if bytes == file::bytes(p.offset, p.result as usize, 0) {
                one += 1;
            } else {
                assert!(bytes.iter().all(|&b| b == 0xAB), "{p:?}");
                another += 1;
            }
        }
        assert!(one == 0 || another == 0, "{one} operations of one file and {another} of the other");
    }
}

/// Readers that are slow, and then can open nothing: the buffers supplied to them are all that there are.
#[derive(Debug)]
struct NoFds {
    share_calls: AtomicUsize,
    reopen_calls: AtomicUsize,
    leased: AtomicBool,
    errno: Errno,
}

impl NoFds {
    fn leaked(errno: Errno) -> &'static NoFds {
        let (share_calls, reopen_calls, leased) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        Box::leak(Box::new(NoFds { share_calls, reopen_calls, leased, errno }))
    }
}

impl Syscalls for NoFds {
    fn dup_from_thread(&self, _: u32, _: Fd) -> Result<Fd, Errno> {
        self.share_calls.fetch_add(1, Relaxed);
        std::thread::sleep(Duration::from_millis(3));
        Err(self.errno)
    }

    fn reopen(&self, tid: u32, fd: Fd, flags: i32) -> Result<Fd, Errno> {
        self.reopen_calls.fetch_add(1, Relaxed);
        linux::open(&CString::new(format!("/proc/{tid}/fd/{fd}")).unwrap(), flags, 0)
    }

    fn is_leased(&self, _: Fd) -> bool {
        self.leased.load(Relaxed)
    }
}

#[test]
fn unused_buffers_of_readers_are_released() {
    let cached = TestFile::new();
    let place = mount_fixture::create("tree").unwrap();
    let absent = file::create_filled(&place.file("absent"), 16 << 20);
    absent.sync_all().unwrap();
    let device = emulated("size=64M");
    let kernel = NoFds::leaked(Errno::MFILE);
    let runtime = Runtime::with_kernel(reader_settings(), kernel);
    let mut rng = Rng::from_env(34);
    for _ in 0..5 {
        file::evict(&absent);
        let buffer = Buffer::new(device, 24 << 20);
        let mut batch = many_ops(&mut rng, &cached, &buffer);
        // Far apart, so that they take more than one bounce buffer.
        let base = buffer.addr().0 + (20 << 20);
        let scattered_op = |i: u64| (absent.as_raw_fd(), i * 7 * 65_536 % (16 << 20), base + i * 4096);
        let pieces = (0..600).map(scattered_op);
        let cached = batch.len();
        batch.extend(pieces.map(|(fd, offset, address)| ReadOp {
            fd,
            offset,
            address,
            len: 4096,
            ..ReadOp::default()
        }));
        with_deadline("a batch whose readers leave", || runtime.batch(&mut batch)).unwrap();
        let seen = buffer.bytes();
        for (n, p) in batch.iter().enumerate() {
            let at = (p.address - buffer.addr().0) as usize;
            assert!(n < cached || p.result == 4096, "{p:?}");
            assert!(seen[at..at + p.result as usize] == file::bytes(p.offset, p.result as usize, 0), "{p:?}");
        }
    }
}

#[test]
fn readers_reopen_files_when_pidfd_getfd_is_denied() {
    let subject = TestFile::new();
    let device = emulated("size=64M");
    for errno in [Errno::PERM, Errno::NOSYS] {
        let kernel = NoFds::leaked(errno);
        let runtime = Runtime::with_kernel(reader_settings(), kernel);
        let run = || {
            let buffer = Buffer::new(device, 16 << 20);
            let mut batch = many_ops(&mut Rng::from_env(36), &subject, &buffer);
            with_deadline("a batch", || runtime.batch(&mut batch)).unwrap();
            check(&batch, &buffer);
            kernel.share_calls.load(Relaxed)
        };
        // A reader that starts late has nothing left to read.
        let Some(calls) = (0..20).map(|_| run()).find(|&calls| calls > 0) else {
            eprintln!("skipped: no reader started in time");
            continue;
        };
        let (before, mut readers) = (kernel.reopen_calls.load(Relaxed), 0);
        for _ in 0..20 {
            assert_eq!(run(), calls, "{errno}");
            readers = kernel.reopen_calls.load(Relaxed) - before;
        }
        if readers == 0 {
            eprintln!("skipped: no reader started in time");
        }
        // A lease of the program itself would be broken by that.
        kernel.leased.store(true, Relaxed);
        let opened = kernel.reopen_calls.load(Relaxed);
        (0..5).for_each(|_| assert_eq!((run(), kernel.reopen_calls.load(Relaxed)), (calls, opened)));
        with_deadline("readers leave", || {
            while leak_check::descriptors_of(&subject.path) > 3 {
                std::thread::yield_now();
            }
        });
    }
}

/// Workers started before do not know which file a number refers to in that table.
#[test]
fn batch_of_thread_with_unshared_fd_table_reads_its_files() {
    let (subject, other) = (TestFile::new(), TestFile::new());
    fs::write(&other.path, vec![0xAB; SIZE]).unwrap();
    let (number, file) = (other.fd(), &subject.file);
    let device = emulated("size=64M");
    let mut rng = Rng::from_env(35);
    // Three are too few for readers.
    for batch_threads in [3, 6] {
        let runtime = Runtime::new(Settings { batch_threads, ..reader_settings() });
        let buffer = Buffer::new(device, 16 << 20);
        let mut batch = many_ops(&mut rng, &subject, &buffer);
        with_deadline("a batch of the first thread", || runtime.batch(&mut batch)).unwrap();
        buffer.fill(POISON);
        let mut batch = pieces(&mut rng, &[number], &buffer, 4000, 5000);
        with_deadline("a batch of another table", || {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    // SAFETY: from here on this thread alone has its table, in which no other thread uses the number.
                    assert!(unsafe {
                        libc::unshare(libc::CLONE_FILES) == 0 && libc::dup2(file.as_raw_fd(), number) >= 0
                    });
                    runtime.batch(&mut batch).unwrap();
                });
            });
        });
        check(&batch, &buffer);
    }
}
