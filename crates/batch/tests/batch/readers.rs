//! Batches of so many pieces that threads with descriptor tables of their own read them.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use spinio_device::ErrorKind;
use spinio_device::emulated::POISON;
use spinio_io::kernel::Kernel;
use spinio_batch::{Batches, Piece};
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, Call, Effect, FaultyDevice, FaultyKernel, Operation, Rng, file, leaks, place, within};

use crate::subject::{SIZE, Subject, assert_nothing_lent, check, in_vain, pieces, settings, through};

fn apart() -> Settings {
    // So many pieces of so small a file would be registered.
    let routes = vec![Route::Copy, Route::Store, Route::Direct];
    Settings { staging: 4 << 20, batch_threads: 6, routes, ..settings() }
}

/// So many that readers are called.
fn many(rng: &mut Rng, subject: &Subject, buffer: &Buffer) -> Vec<Piece> {
    pieces(rng, &[subject.fd()], buffer, 4000, 5000)
}

#[test]
fn readers_bring_what_single_reads_would_have() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let buffer = Buffer::new(device, 16 << 20);
    let runtime = Runtime::new(apart());
    let mut rng = Rng::of_run(31);
    for _ in 0..6 {
        buffer.fill(POISON);
        let mut batch = many(&mut rng, &subject, &buffer);
        within("a batch", || runtime.batch(&mut batch)).unwrap();
        check(&batch, &buffer);
    }
    let names = fs::read_dir("/proc/self/task").unwrap().map(|task| fs::read(task.unwrap().path().join("comm")));
    assert!(names.flatten().any(|name| name.starts_with(b"spinio-reader")), "nobody read");
    // The program's descriptor, and the twins: readers keep nothing.
    within("files are closed", || {
        while leaks::descriptors_of(&subject.path) > 3 {
            std::thread::yield_now();
        }
    });
    drop(runtime);
    assert_nothing_lent(device, 1);
}

#[test]
fn what_readers_cannot_do_the_caller_does() {
    let subject = Subject::new();
    let inner = emulated("size=64M");
    let mut rng = Rng::of_run(32);
    type Fault<'a> = &'a dyn Fn(&FaultyDevice, &FaultyKernel);
    let faults: [(&str, Fault<'_>); 8] = [
        ("no descriptor can be had", &|_, k| k.always(Call::Share, Effect::Fail(Errno::MFILE))),
        ("some readers have none", &|_, k| k.now_and_then(Call::Share, 2, Effect::Fail(Errno::PERM))),
        ("reads are interrupted", &|_, k| k.now_and_then(Call::Pread(Route::Copy), 3, Effect::Fail(Errno::INTR))),
        ("reads stop half-way", &|_, k| k.now_and_then(Call::Pread(Route::Copy), 3, Effect::Short(100))),
        ("no kernel to gather with", &|d, _| d.fail(Operation::PrepareGather, 1, u64::MAX, ErrorKind::Unsupported)),
        ("a launch fails", &|d, _| d.fail(Operation::Gather, 2, 1, ErrorKind::Driver)),
        ("every launch fails", &|d, _| d.fail(Operation::Gather, 1, u64::MAX, ErrorKind::Driver)),
        ("pinned memory is refused", &|d, _| d.fail(Operation::Staging, 1, u64::MAX, ErrorKind::NoMemory)),
    ];
    for (what, fault) in faults {
        let (device, kernel) = (FaultyDevice::before(inner), FaultyKernel::new());
        fault(device, kernel);
        let runtime = Runtime::with_kernel(apart(), kernel);
        let buffer = Buffer::new(inner, 16 << 20);
        let mut batch = many(&mut rng, &subject, &buffer);
        let done = through(device, &runtime, &buffer, &mut batch, what);
        assert_eq!(done.failed, 0, "{what}");
        check(&batch, &buffer);
        drop(runtime);
        assert_nothing_lent(inner, 1);
    }
}

#[test]
fn a_device_that_fails_under_readers_is_told() {
    let subject = Subject::new();
    let inner = emulated("size=64M");
    let both = [Operation::Drain, Operation::Fence];
    for operations in [&both[..1], &[Operation::LeaseQueue], &both[1..], &both] {
        let device = FaultyDevice::before(inner);
        // Not the order of the batch alone.
        let from = if operations.len() > 1 { 2 } else { 1 };
        operations.iter().for_each(|&operation| device.fail(operation, from, u64::MAX, ErrorKind::Driver));
        let runtime = Runtime::new(apart());
        let buffer = Buffer::new(inner, 16 << 20);
        let mut batch = many(&mut Rng::of_run(33), &subject, &buffer);
        in_vain(device, &runtime, &buffer, &mut batch, &format!("{operations:?}"));
        drop(runtime);
        assert_nothing_lent(inner, 1);
    }
}

#[test]
fn batches_of_several_threads_share_readers_and_a_small_ring() {
    let subject = Subject::new();
    let device = emulated("size=256M");
    let runtime = Runtime::new(apart());
    within("batches of several threads", || {
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let (subject, runtime) = (&subject, &runtime);
                scope.spawn(move || {
                    let mut rng = Rng::of_run(140 + seed);
                    for _ in 0..4 {
                        let buffer = Buffer::new(device, 16 << 20);
                        let mut batch = many(&mut rng, subject, &buffer);
                        runtime.batch(&mut batch).unwrap();
                        check(&batch, &buffer);
                    }
                });
            }
        });
    });
}

#[test]
fn more_files_than_a_reader_has_open() {
    let place = place::on("tree").unwrap();
    let device = emulated("size=64M");
    let files: Vec<File> = (0..150).map(|n| file::written(&place.file(&n.to_string()), 20_000 + n)).collect();
    let runtime = Runtime::new(apart());
    let buffer = Buffer::new(device, 8000 * 100);
    let piece = |i: u64| {
        let (fd, address) = (files[(i * 7 % 150) as usize].as_raw_fd(), buffer.addr().0 + i * 100);
        Piece { fd, offset: i * 131 % 19_000, len: 100, address, ..Piece::default() }
    };
    let mut batch: Vec<Piece> = (0..8000).map(piece).collect();
    let done = within("a batch", || runtime.batch(&mut batch)).unwrap();
    assert_eq!((done.failed, done.bytes), (0, 800_000));
    for (p, seen) in batch.iter().zip(buffer.bytes().chunks(100)) {
        assert!(seen == file::bytes(p.offset, 100, 0), "{p:?}");
    }
}

/// The program puts another file under the number while it is read.
#[test]
fn no_byte_comes_from_a_file_that_took_the_number_meanwhile() {
    let subject = Subject::new();
    let place = place::on("tree").unwrap();
    fs::write(place.file("other"), vec![0xAB; SIZE]).unwrap();
    let other = File::open(place.file("other")).unwrap();
    let number = subject.file.try_clone().unwrap();
    let device = emulated("size=64M");
    let runtime = Runtime::new(apart());
    let put = |file: &File| {
        // SAFETY: `number` is ours to replace, and stays open all the time.
        assert!(unsafe { libc::dup2(file.as_raw_fd(), number.as_raw_fd()) } >= 0);
    };
    for seed in 0..30 {
        put(&subject.file);
        let mut rng = Rng::of_run(150 + seed);
        let buffer = Buffer::new(device, 16 << 20);
        let mut batch = pieces(&mut rng, &[number.as_raw_fd()], &buffer, 4000, 5000);
        let begun = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(seed * 100));
                put(&other);
            });
            within("a batch whose number is taken", || runtime.batch(&mut batch)).is_ok()
        });
        let seen = buffer.bytes();
        // All of them from the one or from the other, which it was when the batch began; else it failed.
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
        assert!(one == 0 || another == 0, "{one} pieces of one file and {another} of the other");
    }
}

/// Readers who take their time, and then can open nothing: the pages that were ready for them are all that there are.
#[derive(Debug)]
struct NothingToOpen {
    asked: AtomicUsize,
    opened: AtomicUsize,
    leased: AtomicBool,
    errno: Errno,
}

impl NothingToOpen {
    fn leaked(errno: Errno) -> &'static NothingToOpen {
        let (asked, opened, leased) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        Box::leak(Box::new(NothingToOpen { asked, opened, leased, errno }))
    }
}

impl Kernel for NothingToOpen {
    fn share(&self, _: u32, _: Fd) -> Result<Fd, Errno> {
        self.asked.fetch_add(1, Relaxed);
        std::thread::sleep(Duration::from_millis(3));
        Err(self.errno)
    }

    fn open_again(&self, tid: u32, fd: Fd, flags: i32) -> Result<Fd, Errno> {
        self.opened.fetch_add(1, Relaxed);
        linux::open(&CString::new(format!("/proc/{tid}/fd/{fd}")).unwrap(), flags, 0)
    }

    fn is_leased(&self, _: Fd) -> bool {
        self.leased.load(Relaxed)
    }
}

#[test]
fn pages_that_no_reader_took_are_given_back() {
    let cached = Subject::new();
    let place = place::on("tree").unwrap();
    let absent = file::written(&place.file("absent"), 16 << 20);
    absent.sync_all().unwrap();
    let device = emulated("size=64M");
    let kernel = NothingToOpen::leaked(Errno::MFILE);
    let runtime = Runtime::with_kernel(apart(), kernel);
    let mut rng = Rng::of_run(34);
    for _ in 0..5 {
        file::evict(&absent);
        let buffer = Buffer::new(device, 24 << 20);
        let mut batch = many(&mut rng, &cached, &buffer);
        // Apart from each other, so that they take more than one page.
        let base = buffer.addr().0 + (20 << 20);
        let apart = |i: u64| (absent.as_raw_fd(), i * 7 * 65_536 % (16 << 20), base + i * 4096);
        let pieces = (0..600).map(apart);
        let cached = batch.len();
        batch.extend(pieces.map(|(fd, offset, address)| Piece { fd, offset, address, len: 4096, ..Piece::default() }));
        within("a batch whose readers leave", || runtime.batch(&mut batch)).unwrap();
        let seen = buffer.bytes();
        for (n, p) in batch.iter().enumerate() {
            let at = (p.address - buffer.addr().0) as usize;
            assert!(n < cached || p.result == 4096, "{p:?}");
            assert!(seen[at..at + p.result as usize] == file::bytes(p.offset, p.result as usize, 0), "{p:?}");
        }
    }
}

#[test]
fn where_no_descriptor_may_be_shared_files_are_opened_anew() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    for errno in [Errno::PERM, Errno::NOSYS] {
        let kernel = NothingToOpen::leaked(errno);
        let runtime = Runtime::with_kernel(apart(), kernel);
        let run = || {
            let buffer = Buffer::new(device, 16 << 20);
            let mut batch = many(&mut Rng::of_run(36), &subject, &buffer);
            within("a batch", || runtime.batch(&mut batch)).unwrap();
            check(&batch, &buffer);
            kernel.asked.load(Relaxed)
        };
        // A reader that comes late finds nothing to ask for.
        let Some(asked) = (0..20).map(|_| run()).find(|&asked| asked > 0) else {
            eprintln!("skipped: no reader came in time");
            continue;
        };
        let (twins, mut readers) = (kernel.opened.load(Relaxed), 0);
        for _ in 0..20 {
            assert_eq!(run(), asked, "{errno}");
            readers = kernel.opened.load(Relaxed) - twins;
        }
        if readers == 0 {
            eprintln!("skipped: no reader came in time");
        }
        // A lease of the program's own would be broken by that.
        kernel.leased.store(true, Relaxed);
        let opened = kernel.opened.load(Relaxed);
        (0..5).for_each(|_| assert_eq!((run(), kernel.opened.load(Relaxed)), (asked, opened)));
        within("readers leave", || {
            while leaks::descriptors_of(&subject.path) > 3 {
                std::thread::yield_now();
            }
        });
    }
}

/// What a number means there, helpers that were made before do not know.
#[test]
fn a_thread_of_the_program_may_have_a_table_of_its_own() {
    let (subject, other) = (Subject::new(), Subject::new());
    fs::write(&other.path, vec![0xAB; SIZE]).unwrap();
    let (number, file) = (other.fd(), &subject.file);
    let device = emulated("size=64M");
    let mut rng = Rng::of_run(35);
    // Three are too few for readers.
    for batch_threads in [3, 6] {
        let runtime = Runtime::new(Settings { batch_threads, ..apart() });
        let buffer = Buffer::new(device, 16 << 20);
        let mut batch = many(&mut rng, &subject, &buffer);
        within("a batch of the first thread", || runtime.batch(&mut batch)).unwrap();
        buffer.fill(POISON);
        let mut batch = pieces(&mut rng, &[number], &buffer, 4000, 5000);
        within("a batch of another table", || {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    // SAFETY: from here on this thread alone has its table, in which the number is nobody else's.
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
