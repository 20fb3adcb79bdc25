//! A panic on the calling thread: when it arrives at the caller, nobody uses his memory any more.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use spinio_device::Allocation;
use spinio_io::kernel::{Kernel, Linux};
use spinio_batch::{Batches, Piece};
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{Fd, Ring};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, FaultyDevice, Operation, file, place, within};

use crate::subject::{SIZE, Subject, assert_nothing_lent, settings};

/// A kernel that takes its time, counts its reads, and has no ring.
#[derive(Debug, Default)]
struct Slow {
    begun: AtomicUsize,
    inside: AtomicUsize,
}

impl Kernel for Slow {
    unsafe fn pread(
        &self,
        route: Route,
        fd: Fd,
        buf: *mut u8,
        len: usize,
        offset: u64,
        flags: u32,
    ) -> Result<usize, Errno> {
        self.begun.fetch_add(1, SeqCst);
        self.inside.fetch_add(1, SeqCst);
        std::thread::sleep(Duration::from_micros(300));
        // SAFETY: passed on to the caller.
        let read = unsafe { Linux.pread(route, fd, buf, len, offset, flags) };
        self.inside.fetch_sub(1, SeqCst);
        read
    }

    fn ring(&self, _: u32) -> Result<Ring, Errno> {
        Err(Errno::NOSYS)
    }
}

/// Runs a batch that panics; fails if anything of it goes on.
fn panics(what: &str, kernel: &Slow, runtime: &Runtime, batch: &mut [Piece], known: &[Allocation]) {
    let ended = within(what, || catch_unwind(AssertUnwindSafe(|| runtime.batch_into(batch, known))));
    let (inside, begun) = (kernel.inside.load(SeqCst), kernel.begun.load(SeqCst));
    assert!(ended.is_err(), "{what}: nothing panicked");
    assert_eq!(inside, 0, "{what}: somebody still reads");
    assert!(batch.iter().all(|p| p.result == -i64::from(Errno::IO.raw_os_error())), "{what}: pieces count as read");
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(kernel.begun.load(SeqCst), begun, "{what}: somebody reads on");
}

#[test]
fn helpers_are_out_before_a_panic_is() {
    let inner = emulated("size=64M");
    let place = place::on("tree").unwrap();
    let subject = Subject::new();
    let scattered = file::written(&place.file("scattered"), 4096);
    scattered.set_len(8 << 30).unwrap();
    let scattered = std::os::fd::AsRawFd::as_raw_fd(&scattered);
    let buffer = Buffer::new(inner, 4 << 20);
    let piece =
        |i: u64, fd, offset| Piece { fd, offset, len: 200, address: buffer.addr().0 + i * 256, ..Piece::default() };
    // A crowd, which the caller registers, and many others, which readers or mates copy meanwhile.
    let near = subject.fd();
    let crowd = |count: u64| (0..count).map(move |i| piece(i, near, i * 509 % (SIZE as u64 - 200)));
    let rest = |count: u64| (0..count).map(move |i| piece(8000 + i, scattered, i * 1_000_003));
    let mixed =
        Settings { batch_threads: 6, routes: vec![Route::Copy, Route::Store, Route::Dma, Route::Gather], ..settings() };
    let absent = Settings { batch_threads: 6, ..settings() };
    let cases: [(&str, &Settings, u64, u64, Operation, u64); 4] = [
        ("registering beside readers", &mixed, 4000, 6000, Operation::Pin, 1),
        ("registering beside mates", &mixed, 4000, 700, Operation::Pin, 1),
        ("waiting for a registered part", &mixed, 4000, 6000, Operation::Drain, 1),
        ("sending what storage brought", &absent, 0, 6000, Operation::Gather, 1),
    ];
    for (what, settings, near, far, operation, nth) in cases {
        let kernel: &'static Slow = Box::leak(Box::default());
        let device = FaultyDevice::before(inner);
        let runtime = Runtime::with_kernel(settings.clone(), kernel);
        let known = [buffer.target_through(device, 0).allocation];
        let mut batch: Vec<Piece> = crowd(near).chain(rest(far)).collect();
        device.panic(operation, nth);
        panics(what, kernel, &runtime, &mut batch, &known);
        // The ring has all its blocks still, and everybody is ready for the next.
        let done = within(what, || runtime.batch_into(&mut batch, &known)).unwrap();
        assert_eq!((done.failed, done.bytes), (0, 200 * (near + far)), "{what}");
        drop(runtime);
        assert_nothing_lent(inner, 1);
    }
}
