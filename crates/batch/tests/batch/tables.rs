//! Asynchronous batches, of threads whose fd table is not the program's.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use spinio_batch::{BatchResult, Batches, ReadOp};
use spinio_device::emulated::POISON;
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, Call, Effect, FaultySyscalls, Rng, eventually, with_deadline};

use crate::subject::{SIZE, TestFile, check, pieces, settings};

/// Runs a batch while this thread polls it and does not wait.
fn run_in_background(runtime: &Runtime, batch: &mut [ReadOp]) -> BatchResult {
    // SAFETY: no other thread uses the operations until the wait is over; descriptors and memory stay.
    let handle = unsafe { runtime.submit(batch) }.unwrap();
    eventually("a batch that no thread waits for", || handle.is_done().unwrap());
    handle.wait().unwrap()
}

/// Runs `body` on a thread with an unshared fd table, in which `number` refers to `file`.
fn on_thread_with_own_fd_table(number: Fd, file: &File, body: impl FnOnce() + Send) {
    with_deadline("a thread with an unshared table", || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: from here on this thread alone has its table, in which no other thread uses the number.
                assert!(unsafe { libc::unshare(libc::CLONE_FILES) == 0 && libc::dup2(file.as_raw_fd(), number) >= 0 });
                body();
            });
        });
    });
}

/// The runtime's workers exist, and one of them has worked.
fn warm_up(runtime: &Runtime, subject: &TestFile, buffer: &Buffer) {
    let mut batch = pieces(&mut Rng::from_env(60), &[subject.fd()], buffer, 500, 5000);
    with_deadline("a batch of the first thread", || run_in_background(runtime, &mut batch));
    check(&batch, buffer);
    buffer.fill(POISON);
}

fn kernels() -> [(&'static str, &'static FaultySyscalls); 2] {
    let no_kcmp = FaultySyscalls::new();
    no_kcmp.inject_always(Call::SameFdTable, Effect::Fail(Errno::PERM));
    [("with kcmp", FaultySyscalls::new()), ("without kcmp", no_kcmp)]
}

#[test]
fn ops_use_fd_table_of_submitting_thread() {
    let (subject, other) = (TestFile::new(), TestFile::new());
    fs::write(&other.path, vec![0xAB; SIZE]).unwrap();
    let device = emulated("size=64M");
    // Descriptors whose operations are read one at a time, and others.
    let direct = |s: &TestFile| OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&s.path).unwrap();
    for (what, kernel) in kernels() {
        let runtime = Runtime::with_kernel(Settings { batch_threads: 3, ..settings() }, kernel);
        let buffer = Buffer::new(device, 16 << 20);
        warm_up(&runtime, &subject, &buffer);
        let number = other.fd();
        on_thread_with_own_fd_table(number, &subject.file, || {
            let mut batch = pieces(&mut Rng::from_env(61), &[number], &buffer, 1000, 5000);
            run_in_background(&runtime, &mut batch);
            check(&batch, &buffer);
        });
        let (other_direct, subject_direct) = (direct(&other), direct(&subject));
        let number = other_direct.as_raw_fd();
        on_thread_with_own_fd_table(number, &subject_direct, || {
            buffer.fill(POISON);
            let piece = |i: u64| ReadOp {
                fd: number,
                offset: i * 8192,
                len: 4096,
                address: buffer.addr().0 + i * 4096,
                ..ReadOp::default()
            };
            let mut batch: Vec<ReadOp> = (0..20).map(piece).collect();
            let done = run_in_background(&runtime, &mut batch);
            assert_eq!((done.failed, done.bytes), (0, 20 * 4096), "{what}");
            check(&batch, &buffer);
        });
    }
}

#[test]
fn pinned_ops_use_fd_table_of_submitting_thread() {
    let (mut subject, other) = (TestFile::new(), TestFile::new());
    fs::write(&other.path, vec![0xAB; SIZE]).unwrap();
    let device = emulated("size=64M");
    // No process may have it open for writing.
    subject.file = File::open(&subject.path).unwrap();
    let file = &subject.file;
    for (what, kernel) in kernels() {
        let runtime = Runtime::with_kernel(settings(), kernel);
        let buffer = Buffer::new(device, 16 << 20);
        warm_up(&runtime, &subject, &buffer);
        let number = other.fd();
        on_thread_with_own_fd_table(number, file, || {
            eventually("no process has it open for writing", || {
                linux::take_read_lease(number, linux::gettid()) != Err(Errno::AGAIN)
            });
            let _ = linux::release_lease(number);
            if let Err(why) = runtime.pin_file(number, Some(device)) {
                return println!("skipped: {why}");
            }
            let mut batch = pieces(&mut Rng::from_env(62), &[number], &buffer, 1000, 5000);
            run_in_background(&runtime, &mut batch);
            check(&batch, &buffer);
            let routes = runtime.stats();
            let pinned = routes.rows.iter().any(|l| l.route == Route::Gather && l.bytes > 0);
            assert!(pinned, "{what}: nothing was gathered");
            runtime.unpin_file(number).unwrap();
        });
    }
}

/// The waiting thread may be another thread than the one that submitted.
#[test]
fn waiting_thread_does_not_read_its_own_files() {
    let (subject, other) = (TestFile::new(), TestFile::new());
    fs::write(&other.path, vec![0xAB; SIZE]).unwrap();
    let device = emulated("size=64M");
    for (_, kernel) in kernels() {
        let runtime = Runtime::with_kernel(settings(), kernel);
        let buffer = Buffer::new(device, 16 << 20);
        warm_up(&runtime, &subject, &buffer);
        let mut batch = pieces(&mut Rng::from_env(63), &[subject.fd()], &buffer, 1000, 5000);
        // SAFETY: as in `run_in_background`.
        let handle = unsafe { runtime.submit(&mut batch[..]) }.unwrap();
        on_thread_with_own_fd_table(subject.fd(), &other.file, || {
            handle.wait().unwrap();
        });
        check(&batch, &buffer);
    }
}
