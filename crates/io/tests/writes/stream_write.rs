//! Stream-ordered writes.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicIsize, Ordering::Acquire};

use spinio_device::{Device, ErrorKind, StreamId, WaitMode};
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::{
    Buffer, Call, Effect, FaultyDevice, FaultySyscalls, Operation, file, mount_fixture, with_deadline,
};

/// Larger than the smallest bounce buffer pool.
const SIZE: usize = (5 << 20) + 5;
const UNSET: isize = isize::MIN;

fn result() -> &'static AtomicIsize {
    Box::leak(Box::new(AtomicIsize::new(UNSET)))
}

fn write_on_stream(
    runtime: &Runtime,
    fd: i32,
    at: u64,
    from: spinio_io::Target,
    stream: StreamId,
    result: &'static AtomicIsize,
) -> Result<(), Errno> {
    // SAFETY: the result is never freed.
    unsafe { runtime.write_async(fd, at, from, SIZE, stream, result) }.map_err(|e| e.kind.errno())
}

#[test]
fn queued_write_runs_in_stream_order() {
    let device = emulated("size=64M");
    let runtime = Runtime::new(Settings::default());
    let place = mount_fixture::create("tree").unwrap();
    let (path, other) = (place.file("file"), place.file("other"));
    let stream = device.new_stream().unwrap();
    let buffer = Buffer::new(device, SIZE);
    let copies: Vec<_> = (0..4).map(|version| file::bytes(0, SIZE, version)).collect();
    // SAFETY: the bytes live until the stream is synchronized below.
    let copy_in = |n: usize| unsafe { device.copy_in(stream, buffer.addr(), copies[n].as_ptr(), SIZE) }.unwrap();
    let file = File::create(&path).unwrap();
    let results = [result(), result(), result()];
    device.pause();
    for (n, result) in results.into_iter().enumerate() {
        copy_in(n);
        write_on_stream(&runtime, file.as_raw_fd(), (n * SIZE) as u64, buffer.target(0), stream, result).unwrap();
    }
    copy_in(3);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0, "written before the stream reached it");
    assert!(results.iter().all(|r| r.load(Acquire) == UNSET));
    // The program closes the file, and its fd number is reused.
    let other_file = File::create(&other).unwrap();
    // With one system call, since other tests open files too.
    // SAFETY: both are this test's own.
    assert_eq!(unsafe { libc::dup2(other_file.as_raw_fd(), file.as_raw_fd()) }, file.as_raw_fd());
    device.resume();
    with_deadline("the stream", || device.synchronize(stream, WaitMode::Block)).unwrap();
    assert!(results.iter().all(|r| r.load(Acquire) == SIZE as isize));
    assert!(std::fs::read(&path).unwrap() == copies[..3].concat());
    assert_eq!(other_file.metadata().unwrap().len(), 0, "another file was written");
}

#[test]
fn unqueueable_write_runs_synchronously() {
    let inner = emulated("size=64M,latency_us=200");
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    let buffer = Buffer::new(inner, SIZE);
    buffer.write_at(0, &file::bytes(0, SIZE, 1));
    type Fault = fn(&FaultySyscalls, &FaultyDevice);
    let cases: [(&str, u64, Fault); 3] = [
        ("no pidfd_getfd", 128 << 20, |kernel, _| {
            kernel.inject_always(Call::DupFromThread, Effect::Fail(Errno::NOSYS))
        }),
        ("no host functions", 128 << 20, |_, device| {
            device.inject(Operation::LaunchHostFunc, 1, 9, ErrorKind::Unsupported)
        }),
        ("a small bounce buffer pool", 2 << 20, |_, _| ()),
    ];
    for (what, staging, inject) in cases {
        let (kernel, device) = (FaultySyscalls::new(), FaultyDevice::wrap(inner));
        inject(kernel, device);
        let runtime = Runtime::with_kernel(Settings { bounce_limit: staging, ..Settings::default() }, kernel);
        let file = File::create(&path).unwrap();
        let result = result();
        write_on_stream(&runtime, file.as_raw_fd(), 7, buffer.target_via(device, 0), StreamId(0), result).unwrap();
        inner.synchronize(StreamId(0), WaitMode::Block).unwrap();
        assert_eq!(result.load(Acquire), SIZE as isize, "{what}");
        assert!(std::fs::read(&path).unwrap()[7..] == file::bytes(0, SIZE, 1), "{what}");
    }
}

#[test]
fn unqueueable_write_counts_as_failed() {
    let inner = emulated("size=64M");
    let place = mount_fixture::create("tree").unwrap();
    let file = File::create(place.file("file")).unwrap();
    let buffer = Buffer::new(inner, SIZE);
    let runtime = Runtime::new(Settings::default());
    let device = FaultyDevice::wrap(inner);
    // The first copy, and one after another that is queued.
    for (number, nth) in [1, 2].into_iter().enumerate() {
        device.inject(Operation::CopyOut, nth, 1, ErrorKind::Driver);
        let result = result();
        let queued = write_on_stream(&runtime, file.as_raw_fd(), 0, buffer.target_via(device, 0), StreamId(0), result);
        assert_eq!(queued, Err(Errno::IO));
        assert_eq!(result.load(Acquire), UNSET, "the error was reported twice");
        let calls = runtime.stats().write;
        assert_eq!((calls.calls, calls.failed, calls.bytes), (number as u64 + 1, number as u64 + 1, 0));
        device.clear_faults();
    }
    assert_eq!(file.metadata().unwrap().len(), 0);
    write_on_stream(&runtime, file.as_raw_fd(), 0, buffer.target_via(device, 0), StreamId(0), result()).unwrap();
    with_deadline("the stream", || inner.synchronize(StreamId(0), WaitMode::Block)).unwrap();
    let calls = runtime.stats().write;
    assert_eq!((calls.calls, calls.failed, calls.bytes), (3, 2, SIZE as u64));
}

#[test]
fn errors_are_returned_at_once_or_in_stream_order() {
    let device = emulated("size=64M");
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    let kernel = FaultySyscalls::new();
    let runtime = Runtime::with_kernel(Settings::default(), kernel);
    let buffer = Buffer::new(device, SIZE);
    let from = buffer.target(0);
    let file = OpenOptions::new().create(true).append(true).open(&path).unwrap();
    let read_only = File::open(&path).unwrap();
    let (_out, into) = std::io::pipe().unwrap();
    let none = result();
    assert_eq!(write_on_stream(&runtime, read_only.as_raw_fd(), 0, from, StreamId(0), none), Err(Errno::BADF));
    assert_eq!(write_on_stream(&runtime, into.as_raw_fd(), 0, from, StreamId(0), none), Err(Errno::SPIPE));
    assert_eq!(write_on_stream(&runtime, 9999, 0, from, StreamId(0), none), Err(Errno::BADF));
    assert_eq!(write_on_stream(&runtime, file.as_raw_fd(), u64::MAX, from, StreamId(0), none), Err(Errno::INVAL));
    assert_eq!(
        write_on_stream(&runtime, file.as_raw_fd(), 0, buffer.target(SIZE), StreamId(0), none),
        Err(Errno::FAULT)
    );
    assert_eq!(none.load(Acquire), UNSET);
    kernel.inject(Call::Pwritev(Route::Copy), 1, 1, Effect::Fail(Errno::NOSPC));
    kernel.inject(Call::Pwritev(Route::Copy), 1, 1, Effect::Short(4096));
    let results = [result(), result(), result()];
    for result in results {
        write_on_stream(&runtime, file.as_raw_fd(), 0, from, StreamId(0), result).unwrap();
    }
    with_deadline("the stream", || device.synchronize(StreamId(0), WaitMode::Block)).unwrap();
    let results_seen: Vec<_> = results.iter().map(|r| r.load(Acquire)).collect();
    let short = (SIZE / 2 / 4096 * 4096) as isize;
    assert_eq!(results_seen, [-(Errno::NOSPC.raw_os_error() as isize), short, SIZE as isize]);
    // Appended, since the descriptor has O_APPEND.
    assert_eq!(file.metadata().unwrap().len(), short as u64 + SIZE as u64);
    // The result is optional.
    // SAFETY: the result is null.
    unsafe { runtime.write_async(file.as_raw_fd(), 0, from, SIZE, StreamId(0), std::ptr::null()) }.unwrap();
    device.synchronize(StreamId(0), WaitMode::Block).unwrap();
    assert_eq!(file.metadata().unwrap().len(), short as u64 + 2 * SIZE as u64);
}
