//! Held files: what is read out of kept pins, who gets through to write, and that nobody reads the past.

mod refused;

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use spinio_device::emulated::Emulated;
use spinio_device::{ErrorKind, QueueId};
use spinio_io::{NotHeld, Piece, Runtime, Settings};
use spinio_plan::{Reason, Route};
use spinio_sys::{Errno, linux};
use spinio_testkit::buffer::emulated;
use spinio_testkit::oracle::Versions;
use spinio_testkit::place::{self, Place};
use spinio_testkit::{Buffer, Call, Effect, FaultyDevice, FaultyKernel, Operation, file, in_a_while, user, within};

const SIZE: usize = (2 << 20) + 777;

struct Subject {
    place: Place,
    path: PathBuf,
    file: File,
}

impl Subject {
    fn new() -> Subject {
        let place = place::on("tree").unwrap();
        let path = place.file("subject");
        drop(file::written(&path, SIZE as u64));
        let file = File::open(&path).unwrap();
        await_no_writer(&file);
        Subject { place, path, file }
    }

    fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }
}

/// A child that another test forked meanwhile has the file open for writing until it executes something.
fn await_no_writer(file: &File) {
    in_a_while("nobody has it open for writing", || {
        linux::take_read_lease(file.as_raw_fd(), linux::gettid()) != Err(Errno::AGAIN)
    });
    let _ = linux::drop_lease(file.as_raw_fd());
}

fn settings() -> Settings {
    Settings { staging: 8 << 20, kernels: None, ..Settings::default() }
}

/// Holds, or says why that cannot be tested here.
fn held(runtime: &Runtime, subject: &Subject, device: &'static Emulated) -> bool {
    await_no_writer(&subject.file);
    match runtime.hold(subject.fd(), Some(device)) {
        Ok(()) => true,
        Err(NotHeld::NoLeases) => {
            eprintln!("skipped: no leases here");
            false
        }
        Err(e) => panic!("{e}"),
    }
}

fn bytes_by(runtime: &Runtime, route: Route) -> u64 {
    runtime.stats().lines.iter().filter(|l| l.route == route).map(|l| l.bytes).sum()
}

/// Pieces of 600 bytes all over the file.
fn pieces(subject: &Subject, buffer: &Buffer) -> Vec<Piece> {
    let piece = |i: u64| Piece {
        fd: subject.fd(),
        offset: i * 7919 % (SIZE as u64 - 600),
        len: 600,
        address: buffer.addr().0 + i * 640,
        ..Piece::default()
    };
    (0..400).map(piece).collect()
}

fn check(pieces: &[Piece], buffer: &Buffer, version: u8) {
    for p in pieces {
        assert_eq!(p.result, 600);
        let at = (p.address - buffer.addr().0) as usize;
        assert!(buffer.part(at..at + 600) == file::bytes(p.offset, 600, version), "{p:?}");
    }
}

/// Pins that are given back by another thread.
fn await_no_pins(device: &Emulated) {
    within("the pins go", || {
        while device.outstanding().pins > 0 {
            std::thread::yield_now();
        }
    });
}

#[test]
fn reads_and_batches_come_out_of_the_kept_pins() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    file::evict(&subject.file);
    if !held(&runtime, &subject, device) {
        return;
    }
    let pins = device.outstanding().pins;
    assert!(pins >= 3 && runtime.is_held(subject.fd()) && runtime.held_bytes() >= SIZE as u64);
    let buffer = Buffer::new(device, 4 << 20);
    for (offset, len) in [(0, SIZE), (1, 1 << 20), ((1 << 20) - 5000, 300_000), (SIZE - 70_000, 100_000)] {
        let got = runtime.read(subject.fd(), Some(offset as u64), buffer.target(0), len).unwrap();
        let expected = len.min(SIZE - offset);
        assert_eq!(got, expected);
        assert!(buffer.part(0..got) == file::bytes(offset as u64, got, 0));
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
    odd[3] = Piece { len: 500_000, offset: 900_000, address: buffer.addr().0 + (1 << 20), ..odd[3] };
    odd[4].offset = SIZE as u64 - 100;
    odd[5].fd = -1;
    runtime.batch(&mut odd).unwrap();
    assert_eq!((odd[3].result, odd[4].result, odd[5].result, odd[6].result), (500_000, 100, -9, 600));
    assert!(buffer.part(1 << 20..(1 << 20) + 500_000) == file::bytes(900_000, 500_000, 0));
    assert_eq!(bytes_by(&runtime, Route::Gather), done.bytes + odd.iter().map(|p| p.result.max(0) as u64).sum::<u64>());
    assert_eq!(device.outstanding().pins, pins, "nothing was pinned anew");
    let like = spinio_io::Buffer::of(&buffer.target(0).allocation);
    let told = runtime.explain(subject.fd(), 5000, 1 << 20, like).unwrap();
    let [segment] = told.schedule.segments[..] else { panic!("{:?}", told.schedule) };
    assert_eq!((segment.offset, segment.len, segment.route, segment.reason), (0, 1 << 20, Route::Dma, Reason::Held));
    assert_eq!(runtime.explain(subject.fd(), 0, 100, like).unwrap().schedule.segments[0].reason, Reason::Small);
    // As often as it was held.
    runtime.hold(subject.fd(), None).unwrap();
    runtime.release(subject.fd()).unwrap();
    assert!(runtime.is_held(subject.fd()));
    runtime.release(subject.fd()).unwrap();
    assert!(!runtime.is_held(subject.fd()));
    assert_eq!((device.outstanding().pins, runtime.held_bytes()), (0, 0), "gone when the call returns");
    assert_eq!(runtime.release(subject.fd()), Err(NotHeld::Gone));
    let told = runtime.explain(subject.fd(), 5000, 1 << 20, like).unwrap();
    assert_ne!(told.schedule.segments[0].reason, Reason::Held);
}

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
        assert!(bytes_by(&runtime, Route::Copy) >= done.bytes, "it was read on another route");
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

#[test]
fn what_cannot_be_gathered_out_of_the_pins_is_read_another_way() {
    let subject = Subject::new();
    let inner = emulated("size=64M");
    for (operation, nth, times) in [
        (Operation::Gather, 1, 1),
        (Operation::Gather, 1, u64::MAX),
        (Operation::PrepareGather, 1, u64::MAX),
        (Operation::CopyPinned, 1, u64::MAX),
        (Operation::Staging, 1, u64::MAX),
    ] {
        let device = FaultyDevice::before(inner);
        let runtime = Runtime::new(settings());
        if let Err(NotHeld::NoLeases) = runtime.hold(subject.fd(), Some(device)) {
            return eprintln!("skipped: no leases here");
        }
        device.fail(operation, nth, times, ErrorKind::Driver);
        let buffer = Buffer::new(inner, 4 << 20);
        let to = buffer.target_through(device, 0);
        let mut batch = pieces(&subject, &buffer);
        let done = runtime.batch_into(&mut batch, &[to.allocation]).unwrap();
        assert_eq!(done.failed, 0, "{operation:?}");
        check(&batch, &buffer, 0);
        let got = runtime.read(subject.fd(), Some(9), to, SIZE).unwrap();
        assert!(buffer.part(0..got) == file::bytes(9, SIZE - 9, 0), "{operation:?}");
        runtime.release(subject.fd()).unwrap();
        assert_eq!(inner.outstanding().pins, 0);
    }
}

#[test]
fn a_forked_child_has_no_part_in_it() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    if !held(&runtime, &subject, device) {
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
    within("a writer beside the child", || {
        let writer = OpenOptions::new().write(true).open(&subject.path).unwrap();
        assert_eq!(device.outstanding().pins, 0);
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
fn a_map_ends_in_the_process_that_made_it() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    if !held(&runtime, &subject, device) {
        return;
    }
    let other = runtime.map(subject.fd(), 0, 4096, device).unwrap();
    let mut mapped = Some(runtime.map(subject.fd(), 5000, 3 << 19, device).unwrap());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Inside the locks of the hold, most of the time: where a child would wait for it.
        scope.spawn(|| {
            while !stop.load(SeqCst) {
                std::hint::black_box(other.is_wanted_back());
            }
        });
        for _ in 0..100 {
            // SAFETY: the child looks at the map, drops it and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let theirs = mapped.take().unwrap();
                let odd = theirs.is_here() || theirs.is_wanted_back();
                drop(theirs);
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(i32::from(odd)) };
            }
            let mut status = 0;
            within("a child that drops a map", || {
                // SAFETY: asks about our own child.
                unsafe { libc::waitpid(child, &mut status, 0) };
            });
            assert_eq!(status, 0);
        }
        stop.store(true, SeqCst);
    });
    let mapped = mapped.unwrap();
    assert!(mapped.is_here() && !mapped.is_wanted_back());
    assert!(device.outstanding().pins > 0, "a child gave back what its parent reads");
    drop((mapped, other));
}

#[test]
fn a_map_is_read_by_the_programs_own_kernels_and_keeps_writers_waiting() {
    struct Sum {
        from: *const u8,
        len: usize,
        sum: u64,
    }
    unsafe extern "C" fn sum(argument: *mut core::ffi::c_void) {
        // SAFETY: the test passes a `Sum` and keeps it until the launch is done.
        let all = unsafe { &mut *argument.cast::<Sum>() };
        // SAFETY: the mapped range, as long as the map is there.
        let bytes = unsafe { core::slice::from_raw_parts(all.from, all.len) };
        all.sum = bytes.iter().map(|&b| u64::from(b)).sum();
    }
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    if !held(&runtime, &subject, device) {
        return;
    }
    assert_eq!(runtime.map(subject.fd(), 10, SIZE as u64, device).unwrap_err(), NotHeld::Range);
    let other = Runtime::new(settings());
    assert_eq!(other.map(subject.fd(), u64::MAX, 2, device).unwrap_err(), NotHeld::Range);
    assert!(!other.is_held(subject.fd()), "held for nothing");
    let mapped = runtime.map(subject.fd(), 5000, 3 << 19, device).unwrap();
    assert!(!mapped.is_wanted_back());
    let mut all = Sum { from: mapped.address() as *const u8, len: mapped.len() as usize, sum: 0 };
    // SAFETY: `all` stays until `finish` returns.
    unsafe { device.launch(QueueId(0), sum, (&raw mut all).cast()) }.unwrap();
    device.finish(QueueId(0)).unwrap();
    assert_eq!(all.sum, file::bytes(5000, 3 << 19, 0).iter().map(|&b| u64::from(b)).sum::<u64>());
    let through = AtomicBool::new(false);
    within("a map and a writer", || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                drop(OpenOptions::new().write(true).open(&subject.path).unwrap());
                through.store(true, SeqCst);
            });
            in_a_while("the map is wanted back", || mapped.is_wanted_back());
            assert!(!through.load(SeqCst));
            drop(mapped);
        });
    });
    assert!(through.load(SeqCst));
    await_no_pins(device);
    let address = runtime.map_kept(subject.fd(), 0, 100, device).unwrap();
    assert_eq!(runtime.is_wanted_back(address), Some(false));
    assert!(runtime.unmap(address) && !runtime.unmap(address));
    assert_eq!(runtime.is_wanted_back(address), None);
}

#[test]
fn an_ordinary_user_can_do_all_this_with_his_own_files() {
    user::rerun("an_ordinary_user_can_do_all_this_with_his_own_files");
}
