//! Acquire and release in the order of a stream, on the emulated device.

#![expect(unsafe_code, reason = "device memory")]

mod common;

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use rustix::io::Errno;
use spinio_device::emulated::Emulated;
use spinio_device::{Device, StreamId, WaitMode, set_thread_stream};
use spinio_gaia::{Access, Map, StreamRelease};
use spinio_testkit::deadline::TIMEOUT;

use crate::common::TestMount;
use crate::common::gpu::{PAGE, device, open};

const LEN: u64 = 4 * PAGE as u64;

#[test]
fn server_role() {
    common::server_role();
}

/// A mount with a file of 4 pages, each byte 7.
fn mounted() -> Option<(TestMount, File)> {
    let mount = TestMount::new(|dir| std::fs::write(dir.join("file"), [7; LEN as usize]).unwrap())?;
    let file = open(&mount.dir.join("file"));
    Some((mount, file))
}

fn map(file: &File, access: Access, device: &'static Emulated) -> Arc<Map> {
    Arc::new(Map::new(file.as_raw_fd(), 0, LEN, access, device).unwrap())
}

fn byte(file: &File, at: usize) -> u8 {
    let mut byte = [0];
    file.read_exact_at(&mut byte, at as u64).unwrap();
    byte[0]
}

type Body = Box<dyn FnOnce() + Send>;

unsafe extern "C" fn call(argument: *mut c_void) {
    // SAFETY: made by `launch` for this call.
    let body = unsafe { Box::from_raw(argument.cast::<Body>()) };
    body();
}

/// A GPU kernel of the program.
fn launch(device: &Emulated, stream: StreamId, body: impl FnOnce() + Send + 'static) {
    let body: Body = Box::new(body);
    // SAFETY: the function is called once with its box.
    unsafe { device.launch(stream, call, Box::into_raw(Box::new(body)).cast()) }.unwrap();
}

fn store(device: &Emulated, stream: StreamId, at: u64, byte: u8) {
    // SAFETY: device memory is accessible while a kernel runs.
    launch(device, stream, move || unsafe { (at as *mut u8).write_volatile(byte) });
}

fn add_one(device: &Emulated, stream: StreamId, at: u64) {
    launch(device, stream, move || {
        let at = at as *mut u8;
        // SAFETY: as above.
        unsafe { at.write_volatile(at.read_volatile().wrapping_add(1)) };
    });
}

/// What a kernel on the stream loads.
fn loaded(device: &Emulated, stream: StreamId, at: u64) -> mpsc::Receiver<u8> {
    let (sender, receiver) = mpsc::channel();
    // SAFETY: as above.
    launch(device, stream, move || sender.send(unsafe { (at as *const u8).read_volatile() }).unwrap());
    receiver
}

/// A kernel that runs until it is told to end.
fn busy(device: &Emulated, stream: StreamId) -> mpsc::Sender<()> {
    let (sender, receiver) = mpsc::channel::<()>();
    launch(device, stream, move || {
        let _ = receiver.recv();
    });
    sender
}

type Published = Arc<Mutex<Option<Result<u64, Errno>>>>;

fn release(map: &Arc<Map>, stream: StreamId) -> Published {
    let published = Published::default();
    let out = Arc::clone(&published);
    let report = move |result: &Result<u64, spinio_gaia::Error>| {
        let errno = |e: &spinio_gaia::Error| Errno::from_raw_os_error(e.errno.raw_os_error());
        *out.lock().unwrap() = Some(result.as_ref().copied().map_err(errno));
    };
    map.release_async(0, LEN, StreamRelease::new(stream, report)).unwrap();
    published
}

fn acquire(map: &Arc<Map>, stream: StreamId) {
    map.acquire_async(0, LEN, Access::Write, stream).unwrap();
}

fn finish(device: &Emulated, stream: StreamId) {
    device.synchronize(stream, WaitMode::Block).unwrap();
}

#[test]
fn calls_begin_after_earlier_work_and_later_work_waits_for_them() {
    let Some((_mount, file)) = mounted() else { return };
    let device = device();
    let gpu = map(&file, Access::Write, device);
    for stream in [StreamId(0), device.new_stream().unwrap()] {
        let end = busy(device, stream);
        acquire(&gpu, stream);
        let before = loaded(device, stream, gpu.address() + 1);
        store(device, stream, gpu.address(), 100);
        let published = release(&gpu, stream);
        store(device, stream, gpu.address() + 2, 9);
        // The acquire has not begun: it sees what is written only now.
        file.write_all_at(&[50], 1).unwrap();
        file.write_all_at(&[0], 0).unwrap();
        assert_eq!((before.try_recv().ok(), *published.lock().unwrap(), byte(&file, 0)), (None, None, 0));
        end.send(()).unwrap();
        assert_eq!(before.recv(), Ok(50));
        finish(device, stream);
        assert_eq!(*published.lock().unwrap(), Some(Ok(PAGE as u64)));
        assert_eq!((byte(&file, 0), byte(&file, 1)), (100, 50));
        assert_eq!(byte(&file, 2), 7, "a store after the release was published");
        // As on a GPU, such a store is lost or kept; the next acquire brings the file's bytes if it is told to.
        gpu.acquire(0, LEN, Access::Write).unwrap();
        gpu.discard(0, LEN).unwrap();
        file.write_all_at(&[1], 1).unwrap();
    }
}

#[test]
fn streams_that_are_not_stopped_go_on() {
    let Some((mount, file)) = mounted() else { return };
    let device = device();
    let gpu = map(&file, Access::Write, device);
    let (stopped, other) = (device.new_stream().unwrap(), device.new_stream().unwrap());
    // The stream is at its stop until the server answers.
    mount.stop_server();
    acquire(&gpu, stopped);
    let after = loaded(device, stopped, gpu.address());
    let memory = device.alloc(PAGE, false).unwrap();
    assert_eq!(loaded(device, other, memory.0).recv_timeout(TIMEOUT), Ok(spinio_device::emulated::POISON));
    finish(device, other);
    assert!(after.try_recv().is_err());
    mount.continue_server();
    assert_eq!(after.recv(), Ok(7));
    finish(device, stopped);
}

#[test]
fn many_epochs_of_several_streams_and_maps_lose_no_update() {
    const ROUNDS: usize = 40;
    let Some((_mount, file)) = mounted() else { return };
    let device = device();
    let one = map(&file, Access::Write, device);
    let streams: Vec<StreamId> = (0..4).map(|_| device.new_stream().unwrap()).collect();
    // Streams of one map use different pages; other maps use different bytes of these pages.
    let others: Vec<Arc<Map>> = (0..2).map(|_| map(&file, Access::Write, device)).collect();
    for _ in 0..ROUNDS {
        for (n, stream) in streams.iter().enumerate() {
            let (offset, page) = ((n * PAGE) as u64, PAGE as u64);
            one.acquire_async(offset, page, Access::Write, *stream).unwrap();
            add_one(device, *stream, one.address() + offset);
            one.release_async(offset, page, StreamRelease::new(*stream, |_| ())).unwrap();
        }
        for (n, other) in others.iter().enumerate() {
            acquire(other, StreamId(0));
            add_one(device, StreamId(0), other.address() + 10 + n as u64);
            release(other, StreamId(0));
        }
    }
    std::thread::scope(|scope| {
        // A call that waits, on the stream that has calls queued, while another thread queues more.
        let waiting = scope.spawn(|| {
            set_thread_stream(streams[0]);
            for _ in 0..10 {
                one.acquire(0, PAGE as u64, Access::Read).unwrap();
                one.sync(0, 1).unwrap();
            }
        });
        for _ in 0..ROUNDS {
            one.acquire_async(0, PAGE as u64, Access::Write, streams[0]).unwrap();
            add_one(device, streams[0], one.address());
            one.release_async(0, PAGE as u64, StreamRelease::new(streams[0], |_| ())).unwrap();
        }
        waiting.join().unwrap();
    });
    streams.iter().for_each(|stream| finish(device, *stream));
    finish(device, StreamId(0));
    one.sync(0, LEN).unwrap();
    let (once, twice) = (7 + ROUNDS as u8, 7 + 2 * ROUNDS as u8);
    assert_eq!([0, 1, 2, 3].map(|n| byte(&file, n * PAGE)), [twice, once, once, once]);
    assert_eq!((byte(&file, 10), byte(&file, 11)), (once, once));
}

#[test]
fn failure_is_reported_once_and_drops_what_was_queued() {
    let Some((mount, file)) = mounted() else { return };
    let device = device();
    let (gpu, stream) = (map(&file, Access::Write, device), device.new_stream().unwrap());
    // The memory is there, so that no call waits for those before it.
    gpu.acquire(0, LEN, Access::Read).unwrap();
    gpu.release(0, LEN).unwrap();
    let end = busy(device, stream);
    // A release without an acquire.
    let first = release(&gpu, stream);
    acquire(&gpu, stream);
    store(device, stream, gpu.address(), 100);
    let second = release(&gpu, stream);
    end.send(()).unwrap();
    finish(device, stream);
    let results = || (*first.lock().unwrap(), *second.lock().unwrap());
    assert_eq!(results(), (Some(Err(Errno::INVAL)), Some(Err(Errno::INVAL))));
    let failure = gpu.acquire_async(0, LEN, Access::Write, stream).unwrap_err();
    assert_eq!(failure.errno, Errno::INVAL);
    assert!(
        failure.to_string().contains("earlier release") && failure.to_string().contains("not acquired"),
        "{failure}"
    );
    assert_eq!(byte(&file, 0), 7);
    // Reported once: now all works again.
    acquire(&gpu, stream);
    store(device, stream, gpu.address(), 101);
    let third = release(&gpu, stream);
    finish(device, stream);
    assert_eq!((*third.lock().unwrap(), byte(&file, 0)), (Some(Ok(PAGE as u64)), 101));

    // The server dies in an epoch: the release, and what is queued when that is reported, do not run.
    acquire(&gpu, stream);
    store(device, stream, gpu.address(), 102);
    finish(device, stream);
    mount.kill_server();
    let lost = release(&gpu, stream);
    finish(device, stream);
    assert_eq!(*lost.lock().unwrap(), Some(Err(Errno::STALE)));
    let end = busy(device, stream);
    let failure = gpu.sync(0, LEN).unwrap_err();
    assert_eq!(failure.errno, Errno::STALE);
    acquire(&gpu, stream);
    store(device, stream, gpu.address(), 103);
    let redone = release(&gpu, stream);
    end.send(()).unwrap();
    finish(device, stream);
    assert_eq!((*redone.lock().unwrap(), byte(&file, 0)), (Some(Ok(PAGE as u64)), 103));
}

#[test]
fn call_that_was_queued_before_the_report_does_not_run() {
    let Some((_mount, file)) = mounted() else { return };
    let device = device();
    let gpu = map(&file, Access::Write, device);
    let (slow, other) = (device.new_stream().unwrap(), device.new_stream().unwrap());
    let page = PAGE as u64;
    gpu.acquire_async(0, page, Access::Write, slow).unwrap();
    store(device, slow, gpu.address(), 100);
    let (sender, stopped) = mpsc::channel();
    device.stop_stream(slow, Box::new(move |stop| sender.send(stop).unwrap())).unwrap();
    let results = Arc::new(Mutex::new(Vec::new()));
    let out = Arc::clone(&results);
    gpu.release_async(0, page, StreamRelease::new(slow, move |result| out.lock().unwrap().push(result.is_ok())))
        .unwrap();
    // Of a page that was not acquired.
    gpu.release_async(page, page, StreamRelease::new(other, |_| ())).unwrap();
    finish(device, other);
    assert_eq!(gpu.acquire_async(0, page, Access::Write, other).unwrap_err().errno, Errno::INVAL);
    assert!(results.lock().unwrap().is_empty());
    drop(stopped.recv().unwrap());
    finish(device, slow);
    assert_eq!((results.lock().unwrap().clone(), byte(&file, 0)), (vec![false], 7));
    assert_eq!(gpu.release(0, page).unwrap(), page, "the epoch goes on");
}

#[test]
fn discard_in_stream_order_drops_stores() {
    let Some((_mount, file)) = mounted() else { return };
    let device = device();
    let (gpu, stream) = (map(&file, Access::Write, device), device.new_stream().unwrap());
    acquire(&gpu, stream);
    store(device, stream, gpu.address(), 100);
    gpu.release_async(
        0,
        LEN,
        StreamRelease::new(stream, |result| assert_eq!(result.as_ref().ok(), Some(&0))).discarding(),
    )
    .unwrap();
    acquire(&gpu, stream);
    let after = loaded(device, stream, gpu.address());
    let published = release(&gpu, stream);
    finish(device, stream);
    assert_eq!((after.recv(), *published.lock().unwrap(), byte(&file, 0)), (Ok(7), Some(Ok(0)), 7));
}

#[test]
fn misuse_fails_at_the_call() {
    let Some((_mount, file)) = mounted() else { return };
    let device = device();
    let (gpu, read_only) = (map(&file, Access::Write, device), map(&file, Access::Read, device));
    let errno = |result: Result<(), spinio_gaia::Error>| result.unwrap_err().errno;
    let stream = StreamId(0);
    assert_eq!(errno(gpu.acquire_async(0, LEN + 1, Access::Read, stream)), Errno::INVAL);
    assert_eq!(errno(gpu.acquire_async(0, 0, Access::Read, stream)), Errno::INVAL);
    assert_eq!(errno(gpu.release_async(LEN, 1, StreamRelease::new(stream, |_| ()))), Errno::INVAL);
    assert_eq!(errno(read_only.acquire_async(0, LEN, Access::Write, stream)), Errno::ACCESS);
    assert_eq!(errno(gpu.acquire_async(0, LEN, Access::Read, StreamId(77))), Errno::FAULT);
    // None of them counts as queued, or is reported later.
    acquire(&gpu, stream);
    read_only.acquire_async(0, LEN, Access::Read, stream).unwrap();
    release(&gpu, stream);
    gpu.acquire(0, LEN, Access::Write).unwrap();
}

#[test]
fn unmap_waits_for_queued_calls() {
    struct NoReader;
    impl spinio_gaia::FileReader for NoReader {
        fn open(&self, _: u32, _: i32) -> Result<Box<dyn spinio_gaia::OpenFile>, spinio_gaia::Error> {
            Err(spinio_gaia::Error::new(Errno::NOTSUP, "no reader"))
        }
    }
    let Some((_mount, file)) = mounted() else { return };
    let (device, ended) = (device(), Arc::new(AtomicU64::new(0)));
    let stream = device.new_stream().unwrap();
    let at = spinio_gaia::map(file.as_raw_fd(), 0, LEN, Access::Write, device, &NoReader).unwrap();
    spinio_gaia::with_map(at, |map, offset| map.acquire_async(offset, LEN, Access::Write, stream)).unwrap();
    let end = busy(device, stream);
    store(device, stream, at, 100);
    let out = Arc::clone(&ended);
    let report = move |result: &Result<u64, spinio_gaia::Error>| out.store(*result.as_ref().unwrap(), SeqCst);
    spinio_gaia::with_map(at, |map, offset| map.release_async(offset, LEN, StreamRelease::new(stream, report)))
        .unwrap();
    std::thread::scope(|scope| {
        let unmapping = scope.spawn(|| spinio_gaia::unmap(at).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        assert!(!unmapping.is_finished());
        end.send(()).unwrap();
    });
    assert_eq!((ended.load(SeqCst), byte(&file, 0)), (PAGE as u64, 100));
    assert!(spinio_gaia::with_map(at, |_, _| Ok(())).is_err());
    finish(device, stream);
}

#[test]
fn map_that_is_dropped_with_queued_calls_lets_its_stream_go_on() {
    let Some((_mount, file)) = mounted() else { return };
    let device = device();
    let (gpu, stream) = (map(&file, Access::Write, device), device.new_stream().unwrap());
    let end = busy(device, stream);
    acquire(&gpu, stream);
    let published = release(&gpu, stream);
    let dropping = std::thread::spawn(move || drop(gpu));
    end.send(()).unwrap();
    finish(device, stream);
    dropping.join().unwrap();
    assert!(published.lock().unwrap().is_some());
}
