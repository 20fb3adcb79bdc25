//! Writers of a pinned file: they are not blocked, and no read returns old bytes.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::Command;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use spinio_batch::Batches;
use spinio_device::emulated::Emulated;
use spinio_io::stats::Direction;
use spinio_io::{PinError, Runtime};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::oracle::Versions;
use spinio_testkit::{Buffer, Call, Effect, FaultySyscalls, eventually, file, with_deadline};

use crate::{SIZE, Subject, bytes_by, check, pieces, pin_or_skip, settings, wait_no_pins};

/// Resumes a paused device, also where an assertion fails: no thread must wait for it for ever.
struct ResumeOnDrop(&'static Emulated);

impl Drop for ResumeOnDrop {
    fn drop(&mut self) {
        self.0.resume();
    }
}

#[test]
fn writers_proceed_and_reads_are_fresh() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(device, 4 << 20);
    for version in 1..6u8 {
        if !pin_or_skip(&runtime, &subject, device) {
            return;
        }
        let mut batch = pieces(&subject, &buffer);
        runtime.batch(&mut batch).unwrap();
        check(&batch, &buffer, version - 1);
        with_deadline("a writer", || {
            if version % 2 == 0 {
                // The kernel makes truncate(2) wait as well.
                let path = std::ffi::CString::new(subject.path.to_str().unwrap()).unwrap();
                // SAFETY: a NUL-terminated path.
                assert_eq!(unsafe { libc::truncate(path.as_ptr(), 0) }, 0);
                assert_eq!(device.resources_in_use().pins, 0, "truncated while pages were pinned");
            }
            let writer = OpenOptions::new().write(true).open(&subject.path).unwrap();
            assert_eq!(device.resources_in_use().pins, 0, "open for writing while pages were pinned");
            assert!(!runtime.is_pinned(subject.fd()));
            writer.write_all_at(&file::bytes(0, SIZE, version), 0).unwrap();
            // Not while the writer has it open.
            assert_eq!(runtime.pin_file(subject.fd(), Some(device)), Err(PinError::OpenForWriting));
        });
        let mut batch = pieces(&subject, &buffer);
        runtime.batch(&mut batch).unwrap();
        check(&batch, &buffer, version);
    }
    drop(runtime);
    wait_no_pins(device);
}

/// Another process opens the file to read it, and truncates it: the kernel breaks no lease for that.
fn truncate_in_other_process(path: &std::path::Path) {
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    let mut other = Command::new("true");
    // SAFETY: between fork and exec it makes system calls only.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(&mut other, move || {
            match libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_TRUNC | libc::O_CLOEXEC) {
                -1 => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            }
        });
    }
    assert!(other.status().unwrap().success());
}

#[test]
fn truncation_without_lease_break_unpins() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(device, 4 << 20);
    for mapped in [false, true] {
        std::fs::write(&subject.path, file::bytes(0, SIZE, 3)).unwrap();
        if !pin_or_skip(&runtime, &subject, device) {
            return;
        }
        let map = mapped.then(|| runtime.map(subject.fd(), 0, 5000, device).unwrap());
        truncate_in_other_process(&subject.path);
        // Whether the change was reported yet or not.
        assert_eq!(runtime.read(subject.fd(), Some(0), buffer.target(0), SIZE).unwrap(), 0);
        with_deadline("the report of the change", || {
            while runtime.is_pinned(subject.fd()) || map.as_ref().is_some_and(|map| !map.revoke_requested()) {
                std::thread::yield_now();
            }
        });
        drop(map);
        wait_no_pins(device);
    }
    // Without inotify no read returns old bytes either.
    std::fs::write(&subject.path, file::bytes(0, SIZE, 3)).unwrap();
    let kernel = FaultySyscalls::new();
    kernel.inject_always(Call::Inotify, Effect::Fail(Errno::MFILE));
    let no_inotify = Runtime::with_kernel(settings(), kernel);
    assert!(pin_or_skip(&no_inotify, &subject, device));
    truncate_in_other_process(&subject.path);
    assert_eq!(no_inotify.read(subject.fd(), Some(0), buffer.target(0), SIZE).unwrap(), 0);
    let mut batch = pieces(&subject, &buffer);
    no_inotify.batch(&mut batch).unwrap();
    assert!(batch.iter().all(|p| p.result == 0), "{:?}", batch[0]);
}

#[test]
fn nonblocking_writer_gets_eagain() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    if !pin_or_skip(&runtime, &subject, device) {
        return;
    }
    let open = || OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(&subject.path);
    let refused = open().unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EAGAIN));
    with_deadline("the next try", || {
        while open().is_err() {
            std::thread::yield_now();
        }
    });
    assert_eq!(device.resources_in_use().pins, 0);
}

#[test]
fn concurrent_readers_and_writer_are_consistent() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    if !pin_or_skip(&runtime, &subject, device) {
        return;
    }
    let (versions, finished, rounds) = (Versions::new(), AtomicBool::new(false), AtomicUsize::new(0));
    // Also when a reader panics, or the writer would wait for it.
    struct DoneOnDrop<'a>(&'a AtomicBool);
    impl Drop for DoneOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, SeqCst);
        }
    }
    with_deadline("readers and a writer", || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..40 {
                    let writer = OpenOptions::new().write(true).open(&subject.path).unwrap();
                    versions.write(|version| writer.write_all_at(&file::bytes(0, SIZE, version), 0).unwrap());
                    drop(writer);
                    // A reader has begun and ended a round meanwhile, and pinned the file.
                    let before = rounds.load(SeqCst);
                    eventually("readers continue", || finished.load(SeqCst) || rounds.load(SeqCst) >= before + 4);
                }
                finished.store(true, SeqCst);
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    let _over = DoneOnDrop(&finished);
                    let buffer = Buffer::new(device, 1 << 20);
                    while !finished.load(SeqCst) {
                        let _ = runtime.pin_file(subject.fd(), Some(device));
                        let mut batch = pieces(&subject, &buffer);
                        let (done, window) = versions.read(|| runtime.batch(&mut batch).unwrap());
                        assert_eq!(done.failed, 0);
                        for p in &batch {
                            let at = (p.address - buffer.addr().0) as usize;
                            let wrong = window.first_wrong(p.offset, &buffer.range_bytes(at..at + 600), |_, _| false);
                            assert_eq!(wrong, None, "of {window:?}");
                        }
                        let read = || runtime.read(subject.fd(), Some(5000), buffer.target(0), 600_000).unwrap();
                        let (got, window) = versions.read(read);
                        assert_eq!(window.first_wrong(5000, &buffer.range_bytes(0..got), |_, _| false), None);
                        rounds.fetch_add(1, SeqCst);
                    }
                });
            }
        });
    });
    assert!(bytes_by(&runtime, Route::Gather) > 0);
}

#[test]
fn writer_waits_for_running_batch() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    if !pin_or_skip(&runtime, &subject, device) {
        return;
    }
    let buffer = Buffer::new(device, 1 << 20);
    let mut batch = pieces(&subject, &buffer);
    device.pause();
    // SAFETY: the operations stay until the handle was waited for.
    let ticket = unsafe { runtime.submit(&raw mut batch[..]) }.unwrap();
    let writer_done = AtomicBool::new(false);
    with_deadline("a batch and a writer", || {
        std::thread::scope(|scope| {
            let paused = ResumeOnDrop(device);
            scope.spawn(|| {
                let writer = OpenOptions::new().write(true).open(&subject.path).unwrap();
                writer_done.store(true, SeqCst);
                writer.write_all_at(&file::bytes(0, SIZE, 9), 0).unwrap();
            });
            // A read that comes now does not use the pages.
            eventually("the writer waits", || !runtime.is_pinned(subject.fd()));
            std::thread::sleep(Duration::from_millis(60));
            assert!(!writer_done.load(SeqCst), "the device still reads the old pages");
            drop(paused);
            assert_eq!(ticket.wait().unwrap().failed, 0);
        });
    });
    check(&batch, &buffer, 0);
    let mut batch = pieces(&subject, &buffer);
    runtime.batch(&mut batch).unwrap();
    check(&batch, &buffer, 9);
}

#[test]
fn forced_lease_break_is_detected() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    for after in [0, 1] {
        let kernel = FaultySyscalls::new();
        // Every check of the lease expires at once, so that each use checks; then the lease is lost.
        kernel.inject_always(Call::LeaseBreakTime, Effect::Fail(Errno::IO));
        let runtime = Runtime::with_kernel(settings(), kernel);
        if !pin_or_skip(&runtime, &subject, device) {
            return;
        }
        let buffer = Buffer::new(device, 1 << 20);
        let mut batch = pieces(&subject, &buffer);
        // The watcher may check too, once, because the file was just pinned.
        std::thread::sleep(Duration::from_millis(20));
        kernel.inject(Call::HasLease, 1 + after, u64::MAX, Effect::Fail(Errno::IO));
        let done = runtime.batch(&mut batch).unwrap();
        assert_eq!(done.failed, 0);
        check(&batch, &buffer, 0);
        let stats = runtime.stats();
        let other_bytes: u64 = stats.rows.iter().filter(|l| l.reason != Reason::Pinned).map(|l| l.bytes).sum();
        assert!(other_bytes >= done.bytes, "it was read from the pins: {stats:?}");
        kernel.clear_faults();
        drop(runtime);
        wait_no_pins(device);
    }
}

/// The batch is then read again, which is still the same call.
#[test]
fn batch_with_lost_lease_is_one_call() {
    const PAUSE: Duration = Duration::from_millis(60);
    let subject = Subject::new();
    let device = emulated("size=64M");
    let kernel = FaultySyscalls::new();
    kernel.inject_always(Call::LeaseBreakTime, Effect::Fail(Errno::IO));
    let runtime = Runtime::with_kernel(settings(), kernel);
    if !pin_or_skip(&runtime, &subject, device) {
        return;
    }
    let buffer = Buffer::new(device, 1 << 20);
    let mut batch = pieces(&subject, &buffer);
    std::thread::sleep(Duration::from_millis(20));
    // The check after the gather.
    kernel.inject(Call::HasLease, 2, u64::MAX, Effect::Fail(Errno::IO));
    device.pause();
    let paused = ResumeOnDrop(device);
    let checks = kernel.calls(Call::HasLease);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            eventually("the batch has begun", || kernel.calls(Call::HasLease) > checks);
            std::thread::sleep(PAUSE);
            drop(paused);
        });
        assert_eq!(runtime.batch(&mut batch).unwrap().failed, 0);
    });
    check(&batch, &buffer, 0);
    let stats = runtime.stats();
    assert!(stats.rows.iter().any(|row| row.reason != Reason::Pinned), "the lease was not lost: {stats:?}");
    let calls = stats.calls(Direction::Batch);
    assert_eq!((calls.calls, calls.failed), (1, 0));
    assert!(calls.nanos as u128 >= PAUSE.as_nanos(), "the time before the lease was lost is missing: {calls:?}");
}

/// The same for large reads, which read from the pins directly.
#[test]
fn read_is_repeated_after_forced_lease_break() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    // Before the use, after it, and neither.
    for before in [0, 1, u64::MAX - 1] {
        let kernel = FaultySyscalls::new();
        kernel.inject_always(Call::LeaseBreakTime, Effect::Fail(Errno::IO));
        let runtime = Runtime::with_kernel(settings(), kernel);
        if !pin_or_skip(&runtime, &subject, device) {
            return;
        }
        let buffer = Buffer::new(device, SIZE);
        // The watcher may check too, once, because the file was just pinned.
        std::thread::sleep(Duration::from_millis(20));
        kernel.inject(Call::HasLease, 1 + before, u64::MAX, Effect::Fail(Errno::IO));
        assert_eq!(runtime.read(subject.fd(), Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
        assert!(buffer.bytes() == file::bytes(0, SIZE, 0));
        let held: Vec<_> = runtime.stats().rows.into_iter().filter(|l| l.reason == Reason::Pinned).collect();
        let bytes: u64 = held.iter().map(|l| l.bytes).sum();
        assert_eq!(bytes, if before > 1 { SIZE as u64 } else { 0 }, "the lease was lost after {before} checks");
        kernel.clear_faults();
        drop(runtime);
        wait_no_pins(device);
    }
}
