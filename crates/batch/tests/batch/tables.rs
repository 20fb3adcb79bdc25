//! Batches that go on by themselves, of threads whose descriptors are not the program's.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use spinio_device::emulated::POISON;
use spinio_batch::{Batches, Done, Piece};
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, Call, Effect, FaultyKernel, Rng, in_a_while, within};

use crate::subject::{SIZE, Subject, check, pieces, settings};

/// Runs a batch beside a thread that waits for it, and only looks.
fn beside(runtime: &Runtime, batch: &mut [Piece]) -> Done {
    // SAFETY: the pieces are used by nobody else until the wait is over; descriptors and memory stay.
    let ticket = unsafe { runtime.submit(batch) }.unwrap();
    in_a_while("a batch nobody waits for", || ticket.is_done());
    ticket.wait()
}

/// On a thread with a table of its own, in which `number` means `file`.
fn apart(number: Fd, file: &File, body: impl FnOnce() + Send) {
    within("a thread with a table of its own", || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: from here on this thread alone has its table, in which the number is nobody else's.
                assert!(unsafe { libc::unshare(libc::CLONE_FILES) == 0 && libc::dup2(file.as_raw_fd(), number) >= 0 });
                body();
            });
        });
    });
}

/// The runtime's helpers exist, and one of them has worked.
fn warmed(runtime: &Runtime, subject: &Subject, buffer: &Buffer) {
    let mut batch = pieces(&mut Rng::of_run(60), &[subject.fd()], buffer, 500, 5000);
    within("a batch of the first thread", || beside(runtime, &mut batch));
    check(&batch, buffer);
    buffer.fill(POISON);
}

fn kernels() -> [(&'static str, &'static FaultyKernel); 2] {
    let silent = FaultyKernel::new();
    silent.always(Call::OneTable, Effect::Fail(Errno::PERM));
    [("the kernel tells", FaultyKernel::new()), ("nobody tells", silent)]
}

#[test]
fn pieces_mean_what_their_thread_means() {
    let (subject, other) = (Subject::new(), Subject::new());
    fs::write(&other.path, vec![0xAB; SIZE]).unwrap();
    let device = emulated("size=64M");
    // Descriptors whose pieces are read one at a time, and others.
    let direct = |s: &Subject| OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&s.path).unwrap();
    for (what, kernel) in kernels() {
        let runtime = Runtime::with_kernel(Settings { batch_threads: 3, ..settings() }, kernel);
        let buffer = Buffer::new(device, 16 << 20);
        warmed(&runtime, &subject, &buffer);
        let number = other.fd();
        apart(number, &subject.file, || {
            let mut batch = pieces(&mut Rng::of_run(61), &[number], &buffer, 1000, 5000);
            beside(&runtime, &mut batch);
            check(&batch, &buffer);
        });
        let (theirs, ours) = (direct(&other), direct(&subject));
        let number = theirs.as_raw_fd();
        apart(number, &ours, || {
            buffer.fill(POISON);
            let piece = |i: u64| Piece {
                fd: number,
                offset: i * 8192,
                len: 4096,
                address: buffer.addr().0 + i * 4096,
                ..Piece::default()
            };
            let mut batch: Vec<Piece> = (0..20).map(piece).collect();
            let done = beside(&runtime, &mut batch);
            assert_eq!((done.failed, done.bytes), (0, 20 * 4096), "{what}");
            check(&batch, &buffer);
        });
    }
}

#[test]
fn held_pieces_too() {
    let (mut subject, other) = (Subject::new(), Subject::new());
    fs::write(&other.path, vec![0xAB; SIZE]).unwrap();
    let device = emulated("size=64M");
    // Nobody may have it open for writing.
    subject.file = File::open(&subject.path).unwrap();
    let file = &subject.file;
    for (what, kernel) in kernels() {
        let runtime = Runtime::with_kernel(settings(), kernel);
        let buffer = Buffer::new(device, 16 << 20);
        warmed(&runtime, &subject, &buffer);
        let number = other.fd();
        apart(number, file, || {
            in_a_while("nobody has it open for writing", || {
                linux::take_read_lease(number, linux::gettid()) != Err(Errno::AGAIN)
            });
            let _ = linux::drop_lease(number);
            if let Err(why) = runtime.hold(number, Some(device)) {
                return println!("skipped: {why}");
            }
            let mut batch = pieces(&mut Rng::of_run(62), &[number], &buffer, 1000, 5000);
            beside(&runtime, &mut batch);
            check(&batch, &buffer);
            let routes = runtime.stats();
            let held = routes.lines.iter().any(|l| l.route == Route::Gather && l.bytes > 0);
            assert!(held, "{what}: nothing was gathered");
            runtime.release(number).unwrap();
        });
    }
}

/// Whoever waits may be another thread than the one that submitted.
#[test]
fn who_waits_reads_no_file_of_his_own() {
    let (subject, other) = (Subject::new(), Subject::new());
    fs::write(&other.path, vec![0xAB; SIZE]).unwrap();
    let device = emulated("size=64M");
    for (_, kernel) in kernels() {
        let runtime = Runtime::with_kernel(settings(), kernel);
        let buffer = Buffer::new(device, 16 << 20);
        warmed(&runtime, &subject, &buffer);
        let mut batch = pieces(&mut Rng::of_run(63), &[subject.fd()], &buffer, 1000, 5000);
        // SAFETY: as in `beside`.
        let ticket = unsafe { runtime.submit(&mut batch[..]) }.unwrap();
        apart(subject.fd(), &other.file, || {
            ticket.wait();
        });
        check(&batch, &buffer);
    }
}
