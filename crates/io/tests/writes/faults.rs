//! A fault below a write must not break the caller: the count is the number of bytes in the file, the error is the
//! actual one, no call hangs, and no resource leaks.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use spinio_device::ErrorKind;
use spinio_io::kernel::Syscalls;
use spinio_io::{Runtime, Settings};
use spinio_plan::{Reason, Route};
use spinio_sys::{Errno, linux};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{
    Buffer, Call, Effect, FaultyDevice, FaultySyscalls, Operation, file, mount_fixture, wait_exclusive, with_deadline,
};

const SIZE: usize = 6 << 20;

/// Bounce buffer limits: large enough for a single system call, and too small.
fn settings() -> [Settings; 2] {
    [8 << 20, 4 << 20].map(|staging| Settings { bounce_limit: staging, ..Settings::default() })
}

/// Writes version 1 over version 0; fails unless exactly the reported bytes are in the file.
fn write(
    runtime: &Runtime,
    target: spinio_io::Target,
    file: &File,
    fd: &File,
    len: usize,
    what: &str,
) -> Result<usize, Errno> {
    file.write_all_at(&file::bytes(0, SIZE, 0), 0).unwrap();
    let outcome = with_deadline(what, || runtime.write(fd.as_raw_fd(), Some(0), target, len));
    let wrote = *outcome.as_ref().unwrap_or(&0);
    let mut seen = vec![0; SIZE];
    file.read_exact_at(&mut seen, 0).unwrap();
    assert!(seen[..wrote] == file::bytes(0, wrote, 1), "{what}: reported, but not in the file: {outcome:?}");
    assert!(seen[wrote..] == file::bytes(wrote as u64, SIZE - wrote, 0), "{what}: in the file, but not reported");
    outcome.map_err(|e| e.kind.errno())
}

#[test]
fn device_operation_failures() {
    let place = mount_fixture::create("tree").unwrap();
    let subject = file::create_filled(&place.file("subject"), SIZE as u64);
    // Slow, so that a copy that is not waited for is not complete by chance.
    let inner = emulated("size=64M,latency_us=500");
    let buffer = Buffer::new(inner, SIZE);
    buffer.write_at(0, &file::bytes(0, SIZE, 1));
    let before = inner.resources_in_use();
    let mut failures = 0;
    for operation in Operation::ALL {
        let kinds = if operation == Operation::Staging { 2 } else { 1 };
        for kind in [ErrorKind::Driver, ErrorKind::NoMemory].into_iter().take(kinds) {
            for (nth, times) in [(1, 1), (2, 1), (3, 2), (1, u64::MAX)] {
                for settings in settings() {
                    let what = format!("{operation:?} call {nth}, {times} times, {kind:?}");
                    let device = FaultyDevice::wrap(inner);
                    let runtime = Runtime::new(settings);
                    let target = buffer.target_via(device, 0);
                    device.inject(operation, nth, times, kind);
                    for len in [SIZE, 3000] {
                        let outcome = write(&runtime, target, &subject, &subject, len, &what);
                        match outcome {
                            Ok(wrote) => assert!(wrote > 0, "{what}: 0 bytes"),
                            Err(errno) => assert!([Errno::IO, Errno::NOMEM].contains(&errno), "{what}: {errno}"),
                        }
                        if operation == Operation::Staging {
                            assert_eq!(outcome, Ok(len), "{what}: there is other memory");
                        }
                    }
                    failures += device.failures();
                    device.clear_faults();
                    let after = write(&runtime, target, &subject, &subject, SIZE, &what);
                    assert_eq!(after, Ok(SIZE), "{what}: the write after it");
                    if !matches!(
                        operation,
                        Operation::Staging | Operation::Synchronize | Operation::Wait | Operation::Query
                    ) {
                        let lines = runtime.stats().rows;
                        let pinned = lines.iter().all(|l| l.reason != Reason::NoPinnedMemory);
                        assert!(pinned, "{what}: bounce buffers were lost");
                    }
                    drop(runtime);
                    assert_eq!(inner.resources_in_use().streams, before.streams, "{what}: a stream was leaked");
                    assert_eq!(inner.resources_in_use().fences, before.fences, "{what}: a fence was leaked");
                }
            }
        }
    }
    assert!(failures > 30, "only {failures} operations failed: the faults do not reach the writes");
}

#[test]
fn syscall_failures_and_short_writes() {
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("subject");
    let subject = file::create_filled(&path, SIZE as u64);
    let device = emulated("size=64M,bar=8M,p2p=1");
    let (plain, mapped) = (Buffer::new(device, SIZE), Buffer::host_mapped(device, SIZE));
    for buffer in [&plain, &mapped] {
        buffer.write_at(0, &file::bytes(0, SIZE, 1));
    }
    let effects = [
        Effect::Fail(Errno::INTR),
        Effect::Fail(Errno::NOSPC),
        Effect::Fail(Errno::DQUOT),
        Effect::Fail(Errno::FBIG),
        Effect::Fail(Errno::IO),
        Effect::Fail(Errno::REMOTEIO),
        Effect::Fail(Errno::INVAL),
        Effect::Short(1),
        Effect::Short(4096),
    ];
    let mut hits = 0;
    for route in [Route::Copy, Route::Direct, Route::P2p] {
        for effect in effects {
            if route != Route::Copy && effect == Effect::Short(1) {
                continue;
            }
            for nth in [1, 2] {
                for flags in [0, libc::O_DSYNC, libc::O_DIRECT] {
                    // Skip combinations that do not take the route, and second calls of single-call writes.
                    if (route == Route::Copy) == (flags == libc::O_DIRECT) {
                        continue;
                    }
                    for settings in settings() {
                        if nth == 2 && settings.bounce_limit > SIZE as u64 {
                            continue;
                        }
                        for buffer in [&plain, &mapped] {
                            if route == Route::P2p && std::ptr::eq(buffer, &plain) {
                                continue;
                            }
                            let what =
                                format!("{route} call {nth}, {effect:?}, flags {flags:o}, {}", settings.bounce_limit);
                            let kernel = FaultySyscalls::new();
                            let runtime = Runtime::with_kernel(settings.clone(), kernel);
                            let fd = OpenOptions::new().write(true).custom_flags(flags).open(&path).unwrap();
                            file::evict(&subject);
                            kernel.inject(Call::Pwritev(route), nth, 1, effect);
                            let outcome = write(&runtime, buffer.target(0), &subject, &fd, SIZE, &what);
                            hits += kernel.injected();
                            if let (Err(errno), Effect::Fail(injected)) = (outcome, effect) {
                                assert_eq!(errno, injected, "{what}");
                            }
                            if route == Route::P2p {
                                assert_eq!(outcome, Ok(SIZE), "{what}: there are other routes");
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(hits > 100, "only {hits} calls failed: the faults do not reach the writes");
}

/// A write in chunks, the edges through the page cache and the middle with O_DIRECT: the bytes in the file before the
/// failure are the count, and the offset advances by it.
#[test]
fn failure_after_unaligned_edge_reports_count() {
    const FROM: usize = 5;
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("subject");
    let buffer = Buffer::new(emulated("size=64M"), SIZE);
    buffer.write_at(0, &file::bytes(FROM as u64, SIZE, 1));
    let (edge, middle) = (Call::Pwritev(Route::Copy), Call::Pwritev(Route::Direct));
    // Which calls fail, and whether bytes are written before them.
    let cases: [(&[(Call, u64)], bool); 5] = [
        (&[(edge, 1)], false),
        (&[(edge, 2)], true),
        // A failed O_DIRECT write is retried through the page cache.
        (&[(middle, 1)], true),
        (&[(middle, 1), (edge, 2)], true),
        (&[(middle, 2), (edge, 2)], true),
    ];
    let mut counts = Vec::new();
    for (failing, some) in cases {
        for at in [Some(FROM as u64), None] {
            for effect in [Effect::Fail(Errno::NOSPC), Effect::Fail(Errno::IO), Effect::Short(4096)] {
                let what = format!("{failing:?}, {effect:?}, at {at:?}");
                let kernel = FaultySyscalls::new();
                let runtime = Runtime::with_kernel(Settings { bounce_limit: 4 << 20, ..Settings::default() }, kernel);
                let subject = file::create_filled(&path, (FROM + SIZE) as u64);
                file::evict(&subject);
                let fd = OpenOptions::new().write(true).custom_flags(libc::O_DSYNC).open(&path).unwrap();
                linux::lseek(fd.as_raw_fd(), FROM as i64, libc::SEEK_SET).unwrap();
                failing.iter().for_each(|(call, nth)| kernel.inject(*call, *nth, 1, effect));
                let outcome = with_deadline(&what, || runtime.write(fd.as_raw_fd(), at, buffer.target(0), SIZE));
                assert!(kernel.injected() > 0, "{what}: nothing failed");
                let wrote = *outcome.as_ref().unwrap_or(&0);
                let seen = std::fs::read(&path).unwrap();
                let model = [file::bytes(0, FROM, 0), file::bytes(FROM as u64, wrote, 1)].concat();
                assert!(seen[..FROM + wrote] == model, "{what}: reported, but not in the file: {outcome:?}");
                let rest = file::bytes((FROM + wrote) as u64, SIZE - wrote, 0);
                assert!(seen[FROM + wrote..] == rest, "{what}: in the file, but not reported: {outcome:?}");
                let offset = FROM + if at.is_none() { wrote } else { 0 };
                assert_eq!(linux::lseek(fd.as_raw_fd(), 0, libc::SEEK_CUR), Ok(offset as u64), "{what}");
                if let (Effect::Fail(errno), false) = (effect, some) {
                    assert_eq!(outcome.map_err(|e| e.kind.errno()), Err(errno), "{what}");
                } else {
                    assert!(wrote > 0, "{what}: {outcome:?}");
                }
                counts.push(wrote);
            }
        }
    }
    counts.sort_unstable();
    counts.dedup();
    assert!(counts.len() > 4, "too few different counts: {counts:?}");
}

/// A pipe is written in pieces: the bytes that it has taken are the count, even if the next piece fails.
#[test]
fn pipe_failure_reports_bytes_taken() {
    let buffer = Buffer::new(emulated("size=64M"), 3 << 20);
    let bytes = file::bytes(0, 3 << 20, 1);
    buffer.write_at(0, &bytes);
    for (nth, taken) in [(1, Err(Errno::PIPE)), (2, Ok(1 << 20)), (3, Ok(2 << 20)), (9, Ok(3 << 20))] {
        let kernel = FaultySyscalls::new();
        let runtime = Runtime::with_kernel(Settings::default(), kernel);
        let (mut out, into) = std::io::pipe().unwrap();
        let reader = std::thread::spawn(move || {
            let mut seen = Vec::new();
            std::io::Read::read_to_end(&mut out, &mut seen).map(|_| seen)
        });
        kernel.inject(Call::Pwritev(Route::Copy), nth, 1, Effect::Fail(Errno::PIPE));
        let wrote = with_deadline("a pipe", || runtime.write(into.as_raw_fd(), None, buffer.target(0), 3 << 20));
        drop(into);
        assert_eq!(wrote.map_err(|e| e.kind.errno()), taken, "piece {nth} fails");
        assert!(reader.join().unwrap().unwrap() == bytes[..taken.unwrap_or(0)], "piece {nth} fails");
    }
}

/// Replaces the descriptor by another file while a write through it is being gathered.
struct ReplacesFd {
    flag_calls: AtomicUsize,
    other_fd: i32,
}

impl Syscalls for ReplacesFd {
    fn status_flags(&self, fd: i32) -> Result<i32, Errno> {
        // The first call is before the write starts, the second while the bytes are being copied.
        if self.flag_calls.fetch_add(1, SeqCst) == 1 {
            // SAFETY: both are this test's own.
            unsafe { libc::dup2(self.other_fd, fd) };
        }
        linux::status_flags(fd)
    }
}

#[test]
fn reused_fd_number_is_not_written() {
    let place = mount_fixture::create("tree").unwrap();
    let buffer = Buffer::new(emulated("size=64M"), 1 << 20);
    let (ours, other) =
        (file::create_filled(&place.file("ours"), 1 << 20), file::create_filled(&place.file("other"), 1 << 20));
    let kernel = Box::leak(Box::new(ReplacesFd { flag_calls: AtomicUsize::new(0), other_fd: other.as_raw_fd() }));
    let runtime = Runtime::with_kernel(Settings::default(), kernel);
    let error = runtime.write(ours.as_raw_fd(), Some(0), buffer.target(0), 1 << 20).unwrap_err();
    assert_eq!(error.kind.errno(), Errno::BADF);
    assert!(kernel.flag_calls.load(SeqCst) > 1);
    let mut seen = vec![0; 1 << 20];
    other.read_exact_at(&mut seen, 0).unwrap();
    assert!(seen == file::bytes(0, 1 << 20, 0));
}

#[test]
fn full_disk_or_quota_ends_write_as_on_host() {
    let device = emulated("size=64M");
    for (kind, errno) in [("tmpfs", Errno::NOSPC), ("ext4", Errno::NOSPC), ("quota", Errno::DQUOT)] {
        let place = match mount_fixture::create_small(kind, 16 << 20) {
            Ok(place) => place,
            Err(why) => {
                println!("skipped on {kind}: {why}");
                continue;
            }
        };
        let buffer = Buffer::new(device, 24 << 20);
        let bytes = file::bytes(0, 24 << 20, 1);
        buffer.write_at(0, &bytes);
        let (one_call, cut) = (128 << 20, 4 << 20);
        for (staging, flags) in
            [(one_call, 0), (cut, 0), (one_call, libc::O_DIRECT), (one_call, libc::O_DSYNC), (cut, libc::O_DSYNC)]
        {
            let runtime = Runtime::new(Settings { bounce_limit: staging, ..Settings::default() });
            let path = place.file("file");
            let Ok(fd) = OpenOptions::new().create(true).write(true).custom_flags(flags).open(&path) else { continue };
            let what = format!("{kind}, {staging}, flags {flags:o}");
            let mut done = 0;
            let error = loop {
                match runtime.write(fd.as_raw_fd(), None, buffer.target(done), (24 << 20) - done) {
                    Ok(wrote) => done += wrote,
                    Err(error) => break error,
                }
                assert!(done < 24 << 20, "{what}: more bytes than free space");
            };
            assert_eq!(error.kind.errno(), errno, "{what}");
            assert_eq!(spinio_sys::linux::lseek(fd.as_raw_fd(), 0, libc::SEEK_CUR), Ok(done as u64), "{what}");
            assert!(std::fs::read(&path).unwrap() == bytes[..done], "{what}: wrong bytes");
            assert!(done > 4 << 20 || flags != 0, "{what}: only {done} bytes fitted");
            // The space is freed when no process has the file open any more, neither SPIN nor a child that another test
            // forked. It can be used again when that change is on the disk.
            drop((fd, runtime));
            wait_exclusive(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            let _ = Command::new("sync").arg("-f").arg(place.path()).status();
        }
    }
}

/// If waiting for a copy fails, its end is unknown and its bounce buffers are quarantined. Later requests still need a
/// working pool.
#[test]
fn pool_with_quarantined_buffers_still_works() {
    let place = mount_fixture::create("tree").unwrap();
    let subject = file::create_filled(&place.file("subject"), SIZE as u64);
    let inner = emulated("size=64M");
    let buffer = Buffer::new(inner, SIZE);
    let device = FaultyDevice::wrap(inner);
    let target = buffer.target_via(device, 0);
    // Without the DMA route: all bytes go through bounce buffers.
    let routes = vec![Route::Copy, Route::Store, Route::Direct];
    let runtime = Runtime::new(Settings { bounce_limit: 4 << 20, routes, ..Settings::default() });
    for round in 0..3 {
        if round == 0 {
            // Only one bounce buffer can be allocated.
            device.inject(Operation::Staging, 2, u64::MAX, ErrorKind::NoMemory);
        }
        for operation in [Operation::CopyOut, Operation::Synchronize] {
            device.inject(operation, 1, u64::MAX, ErrorKind::Driver);
        }
        assert!(runtime.write(subject.as_raw_fd(), Some(0), target, 4 << 20).is_err());
        device.clear_faults();
        let read = || runtime.read(subject.as_raw_fd(), Some(0), target, SIZE);
        assert_eq!(with_deadline("a read after lost bounce buffers", read).unwrap(), SIZE);
        assert!(buffer.bytes() == file::bytes(0, SIZE, 0));
    }
}

/// A kernel that says that no descriptor can be written, as one whose number was another file's a moment ago.
struct ReadOnlyFlags;

impl Syscalls for ReadOnlyFlags {
    fn status_flags(&self, _: linux::Fd) -> Result<i32, Errno> {
        Ok(linux::O_RDONLY as i32)
    }
}

#[test]
fn number_that_changes_its_file_gets_no_byte() {
    let place = mount_fixture::create("tree").unwrap();
    let subject = file::create_filled(&place.file("subject"), SIZE as u64);
    let buffer = Buffer::new(emulated("size=64M"), 4096);
    let runtime = Runtime::with_kernel(Settings::default(), &ReadOnlyFlags);
    assert_eq!(write(&runtime, buffer.target(0), &subject, &subject, 4096, "a probe"), Err(Errno::FAULT));
}
