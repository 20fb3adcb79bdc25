//! A panic in the middle of a large read: when it reaches the caller, no thread uses its memory or its descriptors any
//! more.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Condvar, Mutex};
use std::thread::{self, ThreadId};
use std::time::Duration;

use spinio_io::kernel::{LinuxSyscalls, Syscalls};
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::Fd;
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, FaultyDevice, Operation, file, mount_fixture, with_deadline};

const SIZE: usize = (80 << 20) + 5000;

/// Delays each read, and counts the reads in progress.
#[derive(Debug, Default)]
struct SlowReads {
    started: AtomicUsize,
    active: AtomicUsize,
    /// The next read of any other thread panics. Reads of this one wait for that: alone it could do all of them.
    excluded: Mutex<Option<ThreadId>>,
    panicked: Condvar,
}

impl Syscalls for SlowReads {
    unsafe fn pread(
        &self,
        route: Route,
        fd: Fd,
        buf: *mut u8,
        len: usize,
        offset: u64,
        flags: u32,
    ) -> Result<usize, Errno> {
        let mut excluded = self.excluded.lock().unwrap();
        if excluded.is_some_and(|excluded_id| excluded_id != thread::current().id()) {
            *excluded = None;
            drop(excluded);
            self.panicked.notify_all();
            resume_unwind(Box::new("planned"));
        }
        drop(self.panicked.wait_while(excluded, |excluded| excluded.is_some()).unwrap());
        self.started.fetch_add(1, SeqCst);
        self.active.fetch_add(1, SeqCst);
        thread::sleep(Duration::from_millis(2));
        // SAFETY: passed on to the caller.
        let read = unsafe { LinuxSyscalls.pread(route, fd, buf, len, offset, flags) };
        self.active.fetch_sub(1, SeqCst);
        read
    }
}

#[test]
fn workers_finish_before_panic_propagates() {
    let inner = emulated("size=256M");
    let place = mount_fixture::create("tree").unwrap();
    let file = file::create_filled(&place.file("subject"), SIZE as u64);
    let buffer = Buffer::new(inner, SIZE);
    let cases = [
        (Route::Copy, Operation::CopyIn, 2),
        (Route::Copy, Operation::Synchronize, 1),
        (Route::Dma, Operation::Pin, 1),
        (Route::Dma, Operation::CopyPinned, 1),
        (Route::Direct, Operation::CopyIn, 2),
    ];
    for (route, operation, nth) in cases {
        let kernel: &'static SlowReads = Box::leak(Box::default());
        let device = FaultyDevice::wrap(inner);
        let routes = vec![route, Route::Copy, Route::Store];
        let runtime = Runtime::with_kernel(Settings { threads: 4, routes, ..Settings::default() }, kernel);
        if route == Route::Direct {
            file::evict(&file);
        }
        device.panic(operation, nth);
        let read = || runtime.read(file.as_raw_fd(), Some(0), buffer.target_via(device, 0), SIZE);
        let ended = with_deadline("a read that panics", || catch_unwind(AssertUnwindSafe(read)));
        let (active, started) = (kernel.active.load(SeqCst), kernel.started.load(SeqCst));
        if ended.is_ok() {
            println!("skipped: {operation:?} of {route:?}: the read did not need this operation");
            continue;
        }
        assert_eq!(active, 0, "{operation:?} of {route:?}: a worker still reads");
        thread::sleep(Duration::from_millis(20));
        assert_eq!(kernel.started.load(SeqCst), started, "{operation:?} of {route:?}: a worker started another read");
        assert_eq!(with_deadline("the next read", read).unwrap(), SIZE);
        assert!(buffer.bytes() == file::bytes(0, SIZE, 0), "{operation:?} of {route:?}");
    }
}

#[test]
fn read_does_not_wait_for_panicked_worker() {
    let device = emulated("size=256M");
    let place = mount_fixture::create("tree").unwrap();
    let file = file::create_filled(&place.file("subject"), SIZE as u64);
    let buffer = Buffer::new(device, SIZE);
    let kernel: &'static SlowReads = Box::leak(Box::default());
    let routes = vec![Route::Copy, Route::Store];
    let runtime = Runtime::with_kernel(Settings { threads: 4, routes, ..Settings::default() }, kernel);
    let read = || with_deadline("a read", || runtime.read(file.as_raw_fd(), Some(0), buffer.target(0), SIZE));
    *kernel.excluded.lock().unwrap() = Some(thread::current().id());
    assert_eq!(read().unwrap_err().kind.errno(), Errno::IO);
    assert_eq!(kernel.active.load(SeqCst), 0, "a worker still reads");
    assert_eq!(read().unwrap(), SIZE);
    assert!(buffer.bytes() == file::bytes(0, SIZE, 0));
}
