//! A read behaves as `cudaMemcpy` on the default stream: it runs after the work queued before it, and before the work
//! queued after it.
//!
//! The tests pause the copy engine of the device, so that a read that does not wait fails every time.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use spinio_device::{Device, StreamId, set_thread_stream};
use spinio_io::settings::Ordering;
use spinio_io::{Runtime, Settings};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, file, mount_fixture, with_deadline};

const SIZE: usize = 1 << 20;

/// Runs a read on another thread while the engine is paused; fails if the read returns before the engine resumes.
fn assert_waits(what: &str, device: &'static spinio_device::emulated::Emulated, read: impl FnOnce() + Send) {
    let returned = AtomicBool::new(false);
    with_deadline(what, || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                read();
                returned.store(true, SeqCst);
            });
            // The read must not return, however long the engine is paused.
            std::thread::sleep(Duration::from_millis(40));
            let early = returned.load(SeqCst);
            device.resume();
            assert!(!early, "{what} returned before its bytes arrived");
        });
    });
}

#[test]
fn small_reads_return_when_bytes_are_staged() {
    let place = mount_fixture::create("tree").unwrap();
    let file = file::create_filled(&place.file("file"), SIZE as u64);
    let device = emulated("size=64M");
    let buffer = Buffer::new(device, 100 * 4096);
    let runtime = Runtime::new(Settings::default());
    device.pause();
    with_deadline("small reads", || {
        for n in 0..100usize {
            // Each second read overwrites a first one, so that a wrong order is seen.
            let first = runtime.read(file.as_raw_fd(), Some(0), buffer.target(n * 4096), 4096).unwrap();
            let at = Some((n * 4096) as u64);
            let second = runtime.read(file.as_raw_fd(), at, buffer.target(n * 4096), 4096).unwrap();
            assert_eq!((first, second), (4096, 4096));
        }
    });
    // A later write to the file must not change what was read.
    file.write_all_at(&[0; SIZE], 0).unwrap();
    device.resume();
    assert!(buffer.bytes() == file::bytes(0, 100 * 4096, 0));
}

#[test]
fn large_and_strict_reads_return_when_bytes_arrived() {
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    let file = file::create_filled(&path, SIZE as u64);
    let device = emulated("size=64M");
    let buffer = &Buffer::new(device, SIZE);
    let strict = &Runtime::new(Settings { ordering: Ordering::Strict, ..Settings::default() });
    let relaxed = &Runtime::new(Settings { dma_min: 64 << 10, ..Settings::default() });
    for cached in [true, false] {
        for (what, runtime, len) in
            [("a strict read", strict, 4096), ("a large read", relaxed, SIZE), ("a large strict read", strict, SIZE)]
        {
            file::evict(&file);
            if cached {
                file::load_pages(&path, 0..SIZE as u64 / file::PAGE);
            }
            device.pause();
            assert_waits(what, device, || {
                assert_eq!(runtime.read(file.as_raw_fd(), Some(0), buffer.target(0), len).unwrap(), len);
            });
            assert!(buffer.range_bytes(0..len) == file::bytes(0, len, 0), "{what}");
        }
    }
}

/// On the default stream, and on a stream of the program that the thread has chosen.
#[test]
fn reads_are_ordered_with_app_copies() {
    let place = mount_fixture::create("tree").unwrap();
    let file = &file::create_filled(&place.file("file"), SIZE as u64);
    let device = emulated("size=64M");
    let runtime = &Runtime::new(Settings { dma_min: 64 << 10, ..Settings::default() });
    let (before, after) = (vec![1u8; SIZE], vec![2u8; SIZE]);
    for stream in [StreamId(0), device.new_stream().unwrap()] {
        for len in [4096, SIZE] {
            let buffer = &Buffer::new(device, SIZE);
            let copy = |bytes: &[u8]| {
                // SAFETY: the bytes outlive the last `synchronize` below.
                unsafe { device.copy_in(stream, buffer.addr(), bytes.as_ptr(), len) }.unwrap();
            };
            device.pause();
            copy(&before);
            let read = || {
                set_thread_stream(stream);
                assert_eq!(runtime.read(file.as_raw_fd(), Some(0), buffer.target(0), len).unwrap(), len);
            };
            if len == SIZE {
                assert_waits("a large read after a copy", device, read);
                assert!(buffer.range_bytes(0..len) == file::bytes(0, len, 0), "the program's earlier copy ran last");
                copy(&after);
            } else {
                with_deadline("a small read after a copy", || {
                    std::thread::scope(|scope| scope.spawn(read).join().unwrap())
                });
                device.resume();
                device.synchronize(stream, spinio_device::WaitMode::Block).unwrap();
                assert!(buffer.range_bytes(0..len) == file::bytes(0, len, 0), "the program's earlier copy ran last");
                // The other order: read, then copy, both queued.
                device.pause();
                with_deadline("a small read before a copy", || {
                    std::thread::scope(|scope| scope.spawn(read).join().unwrap())
                });
                copy(&after);
                device.resume();
            }
            device.synchronize(stream, spinio_device::WaitMode::Block).unwrap();
            assert!(buffer.range_bytes(0..len) == after[..len], "the program's later copy ran first");
        }
    }
}
