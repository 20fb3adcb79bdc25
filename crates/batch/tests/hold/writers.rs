//! Who wants to write a held file: he gets through, and nobody reads the past.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::Command;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use spinio_batch::Batches;
use spinio_io::{NotHeld, Runtime};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::oracle::Versions;
use spinio_testkit::{Buffer, Call, Effect, FaultyKernel, file, in_a_while, within};

use crate::{SIZE, Subject, await_no_pins, bytes_by, check, held, pieces, settings};

#[test]
fn a_writer_gets_through_and_the_past_is_never_read() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(device, 4 << 20);
    for version in 1..6u8 {
        if !held(&runtime, &subject, device) {
            return;
        }
        let mut batch = pieces(&subject, &buffer);
        runtime.batch(&mut batch).unwrap();
        check(&batch, &buffer, version - 1);
        within("a writer", || {
            if version % 2 == 0 {
                // The kernel asks truncate(2) to wait as well.
                let path = std::ffi::CString::new(subject.path.to_str().unwrap()).unwrap();
                // SAFETY: a NUL-terminated path.
                assert_eq!(unsafe { libc::truncate(path.as_ptr(), 0) }, 0);
                assert_eq!(device.outstanding().pins, 0, "truncated while pages were pinned");
            }
            let writer = OpenOptions::new().write(true).open(&subject.path).unwrap();
            assert_eq!(device.outstanding().pins, 0, "open for writing while pages were pinned");
            assert!(!runtime.is_held(subject.fd()));
            writer.write_all_at(&file::bytes(0, SIZE, version), 0).unwrap();
            // Not while he has it open.
            assert_eq!(runtime.hold(subject.fd(), Some(device)), Err(NotHeld::OpenForWriting));
        });
        let mut batch = pieces(&subject, &buffer);
        runtime.batch(&mut batch).unwrap();
        check(&batch, &buffer, version);
    }
    drop(runtime);
    await_no_pins(device);
}

/// Another process opens the file to read it, and cuts it off: the kernel breaks no lease for that.
fn cut_off_elsewhere(path: &std::path::Path) {
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
fn who_cuts_the_file_off_without_a_word_ends_the_hold_all_the_same() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(device, 4 << 20);
    for mapped in [false, true] {
        std::fs::write(&subject.path, file::bytes(0, SIZE, 3)).unwrap();
        if !held(&runtime, &subject, device) {
            return;
        }
        let map = mapped.then(|| runtime.map(subject.fd(), 0, 5000, device).unwrap());
        cut_off_elsewhere(&subject.path);
        // Whether it was told yet or not.
        assert_eq!(runtime.read(subject.fd(), Some(0), buffer.target(0), SIZE).unwrap(), 0);
        within("the news", || {
            while runtime.is_held(subject.fd()) || map.as_ref().is_some_and(|map| !map.is_wanted_back()) {
                std::thread::yield_now();
            }
        });
        drop(map);
        await_no_pins(device);
    }
    // Who is not told reads no old bytes either.
    std::fs::write(&subject.path, file::bytes(0, SIZE, 3)).unwrap();
    let kernel = FaultyKernel::new();
    kernel.always(Call::Notify, Effect::Fail(Errno::MFILE));
    let deaf = Runtime::with_kernel(settings(), kernel);
    assert!(held(&deaf, &subject, device));
    cut_off_elsewhere(&subject.path);
    assert_eq!(deaf.read(subject.fd(), Some(0), buffer.target(0), SIZE).unwrap(), 0);
    let mut batch = pieces(&subject, &buffer);
    deaf.batch(&mut batch).unwrap();
    assert!(batch.iter().all(|p| p.result == 0), "{:?}", batch[0]);
}

#[test]
fn who_does_not_want_to_wait_is_told_to_come_again() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    if !held(&runtime, &subject, device) {
        return;
    }
    let open = || OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(&subject.path);
    let refused = open().unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EAGAIN));
    within("the next try", || {
        while open().is_err() {
            std::thread::yield_now();
        }
    });
    assert_eq!(device.outstanding().pins, 0);
}

#[test]
fn readers_and_writers_side_by_side_see_what_was_written_before() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    if !held(&runtime, &subject, device) {
        return;
    }
    let (versions, over, rounds) = (Versions::new(), AtomicBool::new(false), AtomicUsize::new(0));
    // Also when a reader panics, or the writer would wait for it.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, SeqCst);
        }
    }
    within("readers and a writer", || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..40 {
                    let writer = OpenOptions::new().write(true).open(&subject.path).unwrap();
                    versions.write(|version| writer.write_all_at(&file::bytes(0, SIZE, version), 0).unwrap());
                    drop(writer);
                    // A reader has begun and ended a round meanwhile, and held the file.
                    let before = rounds.load(SeqCst);
                    in_a_while("readers go on", || over.load(SeqCst) || rounds.load(SeqCst) >= before + 4);
                }
                over.store(true, SeqCst);
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    let _over = Over(&over);
                    let buffer = Buffer::new(device, 1 << 20);
                    while !over.load(SeqCst) {
                        let _ = runtime.hold(subject.fd(), Some(device));
                        let mut batch = pieces(&subject, &buffer);
                        let (done, window) = versions.read(|| runtime.batch(&mut batch).unwrap());
                        assert_eq!(done.failed, 0);
                        for p in &batch {
                            let at = (p.address - buffer.addr().0) as usize;
                            let wrong = window.first_wrong(p.offset, &buffer.part(at..at + 600), |_, _| false);
                            assert_eq!(wrong, None, "of {window:?}");
                        }
                        let read = || runtime.read(subject.fd(), Some(5000), buffer.target(0), 600_000).unwrap();
                        let (got, window) = versions.read(read);
                        assert_eq!(window.first_wrong(5000, &buffer.part(0..got), |_, _| false), None);
                        rounds.fetch_add(1, SeqCst);
                    }
                });
            }
        });
    });
    assert!(bytes_by(&runtime, Route::Gather) > 0);
}

#[test]
fn a_writer_waits_for_a_batch_under_way_and_not_longer() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    if !held(&runtime, &subject, device) {
        return;
    }
    let buffer = Buffer::new(device, 1 << 20);
    let mut batch = pieces(&subject, &buffer);
    device.hold();
    // SAFETY: the pieces stay until the ticket was waited for.
    let ticket = unsafe { runtime.submit(&raw mut batch[..]) }.unwrap();
    let through = AtomicBool::new(false);
    within("a batch and a writer", || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let writer = OpenOptions::new().write(true).open(&subject.path).unwrap();
                through.store(true, SeqCst);
                writer.write_all_at(&file::bytes(0, SIZE, 9), 0).unwrap();
            });
            std::thread::sleep(Duration::from_millis(60));
            assert!(!through.load(SeqCst), "the device still reads the old pages");
            // Who comes now does not use them.
            assert!(!runtime.is_held(subject.fd()));
            device.resume();
            assert_eq!(ticket.wait().failed, 0);
        });
    });
    check(&batch, &buffer, 0);
    let mut batch = pieces(&subject, &buffer);
    runtime.batch(&mut batch).unwrap();
    check(&batch, &buffer, 9);
}

#[test]
fn a_lease_that_was_broken_by_force_is_noticed_before_and_after_a_use() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    for after in [0, 1] {
        let kernel = FaultyKernel::new();
        // Every word of the lease is void at once, so that each use asks; then the lease is gone.
        kernel.always(Call::BreakTime, Effect::Fail(Errno::IO));
        let runtime = Runtime::with_kernel(settings(), kernel);
        if !held(&runtime, &subject, device) {
            return;
        }
        let buffer = Buffer::new(device, 1 << 20);
        let mut batch = pieces(&subject, &buffer);
        // The watcher may be asking too, once, because the hold is new.
        std::thread::sleep(Duration::from_millis(20));
        kernel.hit(Call::HasLease, 1 + after, u64::MAX, Effect::Fail(Errno::IO));
        let done = runtime.batch(&mut batch).unwrap();
        assert_eq!(done.failed, 0);
        check(&batch, &buffer, 0);
        let stats = runtime.stats();
        let elsewhere: u64 = stats.lines.iter().filter(|l| l.reason != Reason::Held).map(|l| l.bytes).sum();
        assert!(elsewhere >= done.bytes, "it was read out of the pins: {stats:?}");
        kernel.heal();
        drop(runtime);
        await_no_pins(device);
    }
}

/// The same of large reads, which come out of the pins by themselves.
#[test]
fn a_read_that_a_forced_break_overtook_is_made_again() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    // Before the use, after it, and neither.
    for before in [0, 1, u64::MAX - 1] {
        let kernel = FaultyKernel::new();
        kernel.always(Call::BreakTime, Effect::Fail(Errno::IO));
        let runtime = Runtime::with_kernel(settings(), kernel);
        if !held(&runtime, &subject, device) {
            return;
        }
        let buffer = Buffer::new(device, SIZE);
        // The watcher may be asking too, once, because the hold is new.
        std::thread::sleep(Duration::from_millis(20));
        kernel.hit(Call::HasLease, 1 + before, u64::MAX, Effect::Fail(Errno::IO));
        assert_eq!(runtime.read(subject.fd(), Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
        assert!(buffer.bytes() == file::bytes(0, SIZE, 0));
        let held: Vec<_> = runtime.stats().lines.into_iter().filter(|l| l.reason == Reason::Held).collect();
        let bytes: u64 = held.iter().map(|l| l.bytes).sum();
        assert_eq!(bytes, if before > 1 { SIZE as u64 } else { 0 }, "the lease had gone after {before} questions");
        kernel.heal();
        drop(runtime);
        await_no_pins(device);
    }
}
