//! Pinned files: reads from registered pages, writers that are not blocked, and no read returns old bytes.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

mod maps;
mod refused;
mod writers;

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use spinio_batch::{Batches, ReadOp};
use spinio_device::ErrorKind;
use spinio_device::emulated::Emulated;
use spinio_io::{PinError, Runtime, Settings};
use spinio_plan::{Reason, Route};
use spinio_sys::{Errno, linux};
use spinio_testkit::buffer::emulated;
use spinio_testkit::mount_fixture::{self, MountFixture};
use spinio_testkit::{Buffer, FaultyDevice, Operation, as_user, eventually, file, with_deadline};

const SIZE: usize = (2 << 20) + 777;

struct Subject {
    fixture: MountFixture,
    path: PathBuf,
    file: File,
}

impl Subject {
    fn new() -> Subject {
        let fixture = mount_fixture::create("tree").unwrap();
        let path = fixture.file("subject");
        drop(file::create_filled(&path, SIZE as u64));
        let file = File::open(&path).unwrap();
        wait_no_writer(&file);
        Subject { fixture, path, file }
    }

    fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }
}

/// A child that another test forked meanwhile has the file open for writing until it executes a program.
fn wait_no_writer(file: &File) {
    eventually("no process has it open for writing", || {
        linux::take_read_lease(file.as_raw_fd(), linux::gettid()) != Err(Errno::AGAIN)
    });
    let _ = linux::release_lease(file.as_raw_fd());
}

fn settings() -> Settings {
    Settings { bounce_limit: 8 << 20, kernel_cache_dir: None, ..Settings::default() }
}

/// Pins, or prints why that cannot be tested here.
fn pin_or_skip(runtime: &Runtime, subject: &Subject, device: &'static Emulated) -> bool {
    wait_no_writer(&subject.file);
    match runtime.pin_file(subject.fd(), Some(device)) {
        Ok(_) => true,
        Err(PinError::NoLeases) => {
            eprintln!("skipped: no leases here");
            false
        }
        Err(e) => panic!("{e}"),
    }
}

fn bytes_by(runtime: &Runtime, route: Route) -> u64 {
    runtime.stats().rows.iter().filter(|l| l.route == route).map(|l| l.bytes).sum()
}

/// Operations of 600 bytes throughout the file.
fn pieces(subject: &Subject, buffer: &Buffer) -> Vec<ReadOp> {
    let piece = |i: u64| ReadOp {
        fd: subject.fd(),
        offset: i * 7919 % (SIZE as u64 - 600),
        len: 600,
        address: buffer.addr().0 + i * 640,
        ..ReadOp::default()
    };
    (0..400).map(piece).collect()
}

fn check(pieces: &[ReadOp], buffer: &Buffer, version: u8) {
    for p in pieces {
        assert_eq!(p.result, 600);
        let at = (p.address - buffer.addr().0) as usize;
        assert!(buffer.range_bytes(at..at + 600) == file::bytes(p.offset, 600, version), "{p:?}");
    }
}

/// Another thread unpins.
fn wait_no_pins(device: &Emulated) {
    with_deadline("the pages are unpinned", || {
        while device.resources_in_use().pins > 0 {
            std::thread::yield_now();
        }
    });
}

#[test]
fn pinned_reads_and_batches() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    file::evict(&subject.file);
    if !pin_or_skip(&runtime, &subject, device) {
        return;
    }
    let pins = device.resources_in_use().pins;
    assert!(pins >= 3 && runtime.is_pinned(subject.fd()) && runtime.pinned_bytes() >= SIZE as u64);
    let buffer = Buffer::new(device, 4 << 20);
    for (offset, len) in [(0, SIZE), (1, 1 << 20), ((1 << 20) - 5000, 300_000), (SIZE - 70_000, 100_000)] {
        let got = runtime.read(subject.fd(), Some(offset as u64), buffer.target(0), len).unwrap();
        let expected = len.min(SIZE - offset);
        assert_eq!(got, expected);
        assert!(buffer.range_bytes(0..got) == file::bytes(offset as u64, got, 0));
    }
    assert_eq!(bytes_by(&runtime, Route::Copy) + bytes_by(&runtime, Route::Direct), 0);
    let mut batch = pieces(&subject, &buffer);
    // Some that are not like the one before: across two pins, long, past the end.
    batch[7].offset = (1 << 20) - 300;
    batch[9].offset = SIZE as u64 - 600;
    let done = runtime.batch(&mut batch).unwrap();
    assert_eq!((done.failed, done.bytes), (0, 400 * 600));
    check(&batch, &buffer, 0);
    let mut odd = batch[..20].to_vec();
    odd[3] = ReadOp { len: 500_000, offset: 900_000, address: buffer.addr().0 + (1 << 20), ..odd[3] };
    odd[4].offset = SIZE as u64 - 100;
    odd[5].fd = -1;
    runtime.batch(&mut odd).unwrap();
    assert_eq!((odd[3].result, odd[4].result, odd[5].result, odd[6].result), (500_000, 100, -9, 600));
    assert!(buffer.range_bytes(1 << 20..(1 << 20) + 500_000) == file::bytes(900_000, 500_000, 0));
    assert_eq!(bytes_by(&runtime, Route::Gather), done.bytes + odd.iter().map(|p| p.result.max(0) as u64).sum::<u64>());
    assert_eq!(device.resources_in_use().pins, pins, "nothing was pinned again");
    let like = spinio_io::Buffer::of(&buffer.target(0).allocation);
    let explained = runtime.explain(subject.fd(), 5000, 1 << 20, like).unwrap();
    let [segment] = explained.schedule.segments[..] else { panic!("{:?}", explained.schedule) };
    assert_eq!((segment.offset, segment.len, segment.route, segment.reason), (0, 1 << 20, Route::Dma, Reason::Pinned));
    assert_eq!(runtime.explain(subject.fd(), 0, 100, like).unwrap().schedule.segments[0].reason, Reason::Small);
    // Unpinned as often as it was pinned.
    runtime.pin_file(subject.fd(), None).unwrap();
    runtime.unpin_file(subject.fd()).unwrap();
    assert!(runtime.is_pinned(subject.fd()));
    runtime.unpin_file(subject.fd()).unwrap();
    assert!(!runtime.is_pinned(subject.fd()));
    assert_eq!((device.resources_in_use().pins, runtime.pinned_bytes()), (0, 0), "unpinned when the call returns");
    assert_eq!(runtime.unpin_file(subject.fd()), Err(PinError::NotPinned));
    let explained = runtime.explain(subject.fd(), 5000, 1 << 20, like).unwrap();
    assert_ne!(explained.schedule.segments[0].reason, Reason::Pinned);
}

#[test]
fn pinned_gather_falls_back() {
    let subject = Subject::new();
    let inner = emulated("size=64M");
    for (operation, nth, times) in [
        (Operation::Gather, 1, 1),
        (Operation::Gather, 1, u64::MAX),
        (Operation::LoadGatherKernel, 1, u64::MAX),
        (Operation::CopyPinned, 1, u64::MAX),
        (Operation::Staging, 1, u64::MAX),
    ] {
        let device = FaultyDevice::wrap(inner);
        let runtime = Runtime::new(settings());
        if let Err(PinError::NoLeases) = runtime.pin_file(subject.fd(), Some(device)) {
            return eprintln!("skipped: no leases here");
        }
        device.inject(operation, nth, times, ErrorKind::Driver);
        let buffer = Buffer::new(inner, 4 << 20);
        let to = buffer.target_via(device, 0);
        let mut batch = pieces(&subject, &buffer);
        let done = runtime.batch_with_allocations(&mut batch, &[to.allocation]).unwrap();
        assert_eq!(done.failed, 0, "{operation:?}");
        check(&batch, &buffer, 0);
        let got = runtime.read(subject.fd(), Some(9), to, SIZE).unwrap();
        assert!(buffer.range_bytes(0..got) == file::bytes(9, SIZE - 9, 0), "{operation:?}");
        runtime.unpin_file(subject.fd()).unwrap();
        wait_no_pins(inner);
    }
}

#[test]
fn child_inherits_no_pinned_files() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    if !pin_or_skip(&runtime, &subject, device) {
        return;
    }
    // SAFETY: the child only waits to be ended.
    let child = unsafe { libc::fork() };
    if child == 0 {
        loop {
            // SAFETY: no memory is involved.
            unsafe { libc::pause() };
        }
    }
    with_deadline("a writer while the child runs", || {
        let writer = OpenOptions::new().write(true).open(&subject.path).unwrap();
        assert_eq!(device.resources_in_use().pins, 0);
        writer.write_all_at(b"new", 0).unwrap();
    });
    let maps = std::fs::read_to_string(format!("/proc/{child}/maps")).unwrap();
    assert!(!maps.contains(subject.path.to_str().unwrap()), "the child has the file mapped");
    // SAFETY: our own child.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, core::ptr::null_mut(), 0);
    }
}

#[test]
fn rerun_as_ordinary_user() {
    as_user::rerun_as_nobody("rerun_as_ordinary_user");
}
