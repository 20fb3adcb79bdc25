//! A read that waits for the other end of a pipe or socket holds no resource that other reads need.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use spinio_device::emulated::Emulated;
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::linux;
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, eventually, file, mount_fixture, with_deadline};

const MIB: usize = 1 << 20;

/// Number of waiting threads.
const WAITING: usize = 64;

/// Both ends of a socket or of a pipe.
fn ends(number: usize) -> (OwnedFd, OwnedFd) {
    if number.is_multiple_of(2) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (ours.into(), theirs.into())
    } else {
        let (reader, writer) = std::io::pipe().unwrap();
        (reader.into(), writer.into())
    }
}

/// Whether a thread is blocked in a read of this descriptor.
fn is_in_read(tid: u32, fd: i32) -> bool {
    let call = std::fs::read_to_string(format!("/proc/self/task/{tid}/syscall")).unwrap_or_default();
    call.starts_with(&format!("0 {fd:#x} "))
}

/// Runs `others` while `WAITING` threads wait in a read of `len` bytes; then each gets its bytes.
fn with_waiting_reads(device: &'static Emulated, runtime: &Runtime, len: usize, others: impl FnOnce()) {
    let buffer = Buffer::new(device, WAITING * len);
    let pairs: Vec<_> = (0..WAITING).map(ends).collect();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let buffer = &buffer;
        let readers: Vec<_> = pairs
            .iter()
            .enumerate()
            .map(|(at, (reader, _))| {
                let (sender, fd) = (sender.clone(), reader.as_raw_fd());
                scope.spawn(move || {
                    sender.send((linux::gettid(), fd)).unwrap();
                    runtime.read(fd, None, buffer.target(at * len), len)
                })
            })
            .collect();
        let waiting: Vec<_> = receiver.iter().take(WAITING).collect();
        eventually("all threads block in the kernel", || waiting.iter().all(|&(tid, fd)| is_in_read(tid, fd)));
        // A worker of the runtime of the last turn may be the last to release what that one had.
        eventually("no streams and fences of the device are in use", || {
            let used = device.resources_in_use();
            (used.streams, used.fences) == (0, 0)
        });
        others();
        for (at, (_, writer)) in pairs.iter().enumerate() {
            let mut writer = File::from(writer.try_clone().unwrap());
            writer.write_all(&file::bytes(at as u64, 3000, 1)).unwrap();
        }
        for (at, reader) in readers.into_iter().enumerate() {
            assert_eq!(reader.join().unwrap().unwrap(), 3000);
            assert!(buffer.range_bytes(at * len..at * len + 3000) == file::bytes(at as u64, 3000, 1), "bytes of {at}");
        }
    });
}

#[test]
fn waiting_unseekable_reads_hold_no_buffers_or_streams() {
    const SIZE: usize = 12 * MIB;
    let place = mount_fixture::create("tree").unwrap();
    let source = file::create_filled(&place.file("subject"), SIZE as u64);
    let device = emulated("size=256M");
    for staging in [4 << 20, 128 << 20] {
        for len in [MIB, 5000] {
            let runtime = Runtime::new(Settings { bounce_limit: staging, ..Settings::default() });
            with_deadline("reads next to waiting ones", || {
                with_waiting_reads(device, &runtime, len, || {
                    let buffer = Buffer::new(device, SIZE);
                    let read = |len| runtime.read(source.as_raw_fd(), Some(0), buffer.target(0), len).unwrap();
                    assert_eq!((read(4096), read(SIZE)), (4096, SIZE));
                    file::evict(&source);
                    assert_eq!(read(SIZE), SIZE);
                    assert!(buffer.bytes() == file::bytes(0, SIZE, 0));
                });
            });
        }
    }
}

#[test]
fn unseekable_read_returns_available_bytes_of_one_message() {
    let device = emulated("size=64M");
    let runtime = Runtime::new(Settings::default());
    let buffer = Buffer::new(device, 4 * MIB);
    let (ours, theirs) = std::os::unix::net::UnixDatagram::pair().unwrap();
    theirs.send(&file::bytes(0, 100_000, 1)).unwrap();
    theirs.send(&file::bytes(0, 500, 2)).unwrap();
    assert_eq!(runtime.read(ours.as_raw_fd(), None, buffer.target(0), MIB).unwrap(), 100_000);
    assert!(buffer.range_bytes(0..100_000) == file::bytes(0, 100_000, 1));
    assert_eq!(runtime.read(ours.as_raw_fd(), None, buffer.target(0), 100).unwrap(), 100);
    assert!(buffer.range_bytes(0..100) == file::bytes(0, 100, 2));
    // A character device fills the whole buffer.
    let zero = File::open("/dev/zero").unwrap();
    for len in [5000, 4 * MIB] {
        buffer.fill(7);
        assert_eq!(runtime.read(zero.as_raw_fd(), None, buffer.target(0), len).unwrap(), len);
        assert!(buffer.range_bytes(0..len).iter().all(|&b| b == 0), "{len}");
    }
    // The end of a pipe.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(writer);
    for len in [100, MIB] {
        assert_eq!(runtime.read(reader.as_raw_fd(), None, buffer.target(0), len).unwrap(), 0);
    }
    let copied: u64 = runtime.stats().rows.iter().filter(|l| l.route == Route::Copy).map(|l| l.bytes).sum();
    assert_eq!(copied, (100_000 + 100 + 5000 + 4 * MIB) as u64);
}

#[test]
fn proc_files_are_read_to_their_end() {
    let device = emulated("size=64M");
    let runtime = Runtime::new(Settings::default());
    let buffer = Buffer::new(device, MIB);
    let mut expected = Vec::new();
    File::open("/proc/filesystems").unwrap().read_to_end(&mut expected).unwrap();
    for (at, len) in [(None, 10_000), (Some(0), 10_000), (None, MIB), (Some(0), MIB)] {
        let subject = File::open("/proc/filesystems").unwrap();
        let got = runtime.read(subject.as_raw_fd(), at, buffer.target(0), len).unwrap();
        assert_eq!(got, expected.len());
        assert!(buffer.range_bytes(0..got) == expected);
    }
}
