//! A panic on the calling thread: when the caller receives it, no thread uses its memory any more.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use spinio_batch::{Batches, ReadOp};
use spinio_device::Allocation;
use spinio_io::kernel::{LinuxSyscalls, Syscalls};
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{Fd, Ring};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, FaultyDevice, Operation, file, mount_fixture, with_deadline};

use crate::subject::{SIZE, TestFile, assert_all_released, settings};

/// Slow system calls that count reads and have no ring.
#[derive(Debug, Default)]
struct Slow {
    started: AtomicUsize,
    active: AtomicUsize,
}

impl Syscalls for Slow {
    unsafe fn pread(
        &self,
        route: Route,
        fd: Fd,
        buf: *mut u8,
        len: usize,
        offset: u64,
        flags: u32,
    ) -> Result<usize, Errno> {
        self.started.fetch_add(1, SeqCst);
        self.active.fetch_add(1, SeqCst);
        std::thread::sleep(Duration::from_micros(300));
        // SAFETY: passed on to the caller.
        let read = unsafe { LinuxSyscalls.pread(route, fd, buf, len, offset, flags) };
        self.active.fetch_sub(1, SeqCst);
        read
    }

    fn new_io_uring(&self, _: u32) -> Result<Ring, Errno> {
        Err(Errno::NOSYS)
    }
}

/// Runs a batch that panics; fails if any thread of it continues.
fn assert_batch_panics(what: &str, kernel: &Slow, runtime: &Runtime, batch: &mut [ReadOp], known: &[Allocation]) {
    let ended = with_deadline(what, || catch_unwind(AssertUnwindSafe(|| runtime.batch_with_allocations(batch, known))));
    let (inside, begun) = (kernel.active.load(SeqCst), kernel.started.load(SeqCst));
    assert!(ended.is_err(), "{what}: nothing panicked");
    assert_eq!(inside, 0, "{what}: a thread still reads");
    assert!(batch.iter().all(|p| p.result == -i64::from(Errno::IO.raw_os_error())), "{what}: operations count as read");
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(kernel.started.load(SeqCst), begun, "{what}: a thread continues to read");
}

#[test]
fn workers_finish_before_panic_propagates() {
    let inner = emulated("size=64M");
    let place = mount_fixture::create("tree").unwrap();
    let subject = TestFile::new();
    let scattered = file::create_filled(&place.file("scattered"), 4096);
    scattered.set_len(8 << 30).unwrap();
    let scattered = std::os::fd::AsRawFd::as_raw_fd(&scattered);
    let buffer = Buffer::new(inner, 4 << 20);
    let piece =
        |i: u64, fd, offset| ReadOp { fd, offset, len: 200, address: buffer.addr().0 + i * 256, ..ReadOp::default() };
    // Dense operations, which the caller registers, and many others, which readers or copy workers copy meanwhile.
    let near = subject.fd();
    let dense = |count: u64| (0..count).map(move |i| piece(i, near, i * 509 % (SIZE as u64 - 200)));
    let rest = |count: u64| (0..count).map(move |i| piece(8000 + i, scattered, i * 1_000_003));
    let mixed =
        Settings { batch_threads: 6, routes: vec![Route::Copy, Route::Store, Route::Dma, Route::Gather], ..settings() };
    let absent = Settings { batch_threads: 6, ..settings() };
    let cases: [(&str, &Settings, u64, u64, Operation, u64); 4] = [
        ("registering concurrently with readers", &mixed, 4000, 6000, Operation::Pin, 1),
        ("registering concurrently with copy workers", &mixed, 4000, 700, Operation::Pin, 1),
        ("waiting for a registered part", &mixed, 4000, 6000, Operation::Synchronize, 1),
        ("sending buffers read from storage", &absent, 0, 6000, Operation::Gather, 1),
    ];
    for (what, settings, near, far, operation, nth) in cases {
        let kernel: &'static Slow = Box::leak(Box::default());
        let device = FaultyDevice::wrap(inner);
        let runtime = Runtime::with_kernel(settings.clone(), kernel);
        let known = [buffer.target_via(device, 0).allocation];
        let mut batch: Vec<ReadOp> = dense(near).chain(rest(far)).collect();
        device.panic(operation, nth);
        assert_batch_panics(what, kernel, &runtime, &mut batch, &known);
        // The pool still has all its buffers, and every thread is ready for the next batch.
        let done = with_deadline(what, || runtime.batch_with_allocations(&mut batch, &known)).unwrap();
        assert_eq!((done.failed, done.bytes), (0, 200 * (near + far)), "{what}");
        drop(runtime);
        assert_all_released(inner, 1);
    }
}
