//! Batches against the `pread`s that they stand for: every residency, every form, every fault.

mod panics;
mod readers;
mod subject;
mod tables;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use spinio_device::emulated::POISON;
use spinio_device::{Device, ErrorKind, QueueId, Wait};
use spinio_io::{Each, Many, Piece, Runtime, Settings};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::place;
use spinio_testkit::{Buffer, Call, Effect, FaultyDevice, FaultyKernel, Operation, Rng, file, leaks, within};
use subject::{SIZE, Subject, assert_nothing_lent, check, in_vain, pieces, routes, settings, through};

#[test]
fn any_mixture_is_what_single_reads_would_have_been() {
    let subjects = [Subject::new(), Subject::new()];
    let fds: Vec<i32> = subjects.iter().map(Subject::fd).collect();
    let device = emulated("size=64M");
    let mut rng = Rng::of_run(1);
    for round in 0..24 {
        let runtime = Runtime::new(settings());
        let buffer = Buffer::new(device, 3 << 20);
        for s in &subjects {
            file::mix(&s.path, &s.file, &mut rng);
        }
        let longest = *rng.pick(&[600, 5000, 70_000, 600_000]);
        let count = 1 + rng.below(700) as usize;
        let mut batch = pieces(&mut rng, &fds, &buffer, count, longest);
        let done = within("a batch", || runtime.batch(&mut batch)).unwrap();
        assert_eq!((done.failed, done.bytes), (0, batch.iter().map(|p| p.result as u64).sum()), "round {round}");
        check(&batch, &buffer);
        drop(runtime);
        assert_nothing_lent(device, 1);
    }
}

#[test]
fn every_file_system_serves_them() {
    let device = emulated("size=64M");
    let mut rng = Rng::of_run(2);
    for kind in place::KINDS {
        let subject = match Subject::on(kind) {
            Ok(subject) => subject,
            Err(why) => {
                eprintln!("skipped: {kind}: {why}");
                continue;
            }
        };
        let runtime = Runtime::new(settings());
        for _ in 0..3 {
            let buffer = Buffer::new(device, 1 << 20);
            file::mix(&subject.path, &subject.file, &mut rng);
            let mut batch = pieces(&mut rng, &[subject.fd()], &buffer, 300, 9000);
            within("a batch", || runtime.batch(&mut batch)).unwrap();
            check(&batch, &buffer);
        }
    }
}

#[test]
fn absent_pieces_come_from_storage_and_cached_ones_do_not() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let mut rng = Rng::of_run(3);
    let run = |rng: &mut Rng| {
        let runtime = Runtime::new(settings());
        let buffer = Buffer::new(device, 1 << 20);
        let mut batch = pieces(rng, &[subject.fd()], &buffer, 200, 5000);
        runtime.batch(&mut batch).unwrap();
        check(&batch, &buffer);
        runtime
    };
    file::fetch(&subject.path, 0..SIZE as u64 / 4096 + 1);
    assert_eq!(routes(&run(&mut rng)), [Route::Copy]);
    file::evict(&subject.file);
    if file::cached_pages(&subject.file) != Some(0) {
        return eprintln!("skipped: this file system keeps its pages");
    }
    let runtime = run(&mut rng);
    assert_eq!(routes(&runtime), [Route::Direct]);
    assert_eq!(file::cached_pages(&subject.file), Some(0), "the page cache was left alone");
    // Each page was read once, or nearly: pieces overlap, and what they share is one read.
    let calls = runtime.stats();
    assert_eq!(calls.lines.len(), 1);
}

#[test]
fn arrays_say_the_same_as_pieces() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(device, 1 << 20);
    let offsets: Vec<u64> = (0..256).map(|i| i * 7919 % SIZE as u64).collect();
    let mut results = vec![-1; 256];
    let many = Many {
        fd: subject.fd(),
        offsets: Each::Of(&offsets),
        lens: Each::Same(4096),
        addresses: Each::Step(buffer.addr().0, 4096),
        results: &mut results,
    };
    let done = runtime.batch_file(many, &[buffer.allocation()]).unwrap();
    assert_eq!((done.failed, done.bytes as i64), (0, results.iter().sum()));
    let as_pieces: Vec<Piece> = (0..256)
        .map(|i| Piece {
            fd: subject.fd(),
            offset: offsets[i],
            len: 4096,
            address: buffer.addr().0 + i as u64 * 4096,
            result: results[i],
            ..Piece::default()
        })
        .collect();
    check(&as_pieces, &buffer);
    let many = Many {
        fd: 0,
        offsets: Each::Of(&[1, 2]),
        lens: Each::Same(1),
        addresses: Each::Same(0),
        results: &mut results[..3],
    };
    assert_eq!(runtime.batch_file(many, &[]).unwrap_err().kind.errno(), Errno::INVAL);
    assert_eq!(runtime.batch(&mut []).unwrap(), spinio_io::Done::default());
}

#[test]
fn each_piece_fails_as_its_own_pread_and_touches_no_other() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(device, 64 << 10);
    let write_only = File::options().write(true).open(&subject.path).unwrap();
    let folder = File::open(subject.path.parent().unwrap()).unwrap();
    let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(&subject.path).unwrap();
    let (out, into) = spinio_sys::linux::pipe().unwrap();
    let mut host = [0u8; 100];
    let base = buffer.addr().0;
    let piece = |fd: i32, offset: u64, len: u64, address: u64| Piece { fd, offset, len, address, ..Piece::default() };
    let fd = subject.fd();
    let mut batch = vec![
        piece(fd, 5, 100, base),
        piece(-1, 0, 10, base + 1000),
        piece(write_only.as_raw_fd(), 0, 10, base + 1000),
        piece(folder.as_raw_fd(), 0, 10, base + 1000),
        piece(out, 0, 10, base + 1000),
        piece(fd, u64::MAX, 10, base + 1000),
        piece(fd, 0, u64::MAX, base + 1000),
        piece(fd, SIZE as u64, 10, base + 1000),
        piece(fd, SIZE as u64 + 5000, 10, base + 1000),
        piece(fd, 7, 0, base + 1000),
        piece(fd, SIZE as u64 - 3, 10, base + 2000),
        piece(fd, 50, 100, host.as_mut_ptr() as u64),
        piece(fd, 50, 100, 8),
        piece(direct.as_raw_fd(), 0, 4096, base + 4096),
        // The buffer ends before the piece does: what fits is read.
        piece(fd, 0, 4096, base + (64 << 10) - 10),
        piece(fd, 77, 200, base + 3000),
    ];
    let done = runtime.batch(&mut batch).unwrap();
    let no = |errno: Errno| -i64::from(errno.raw_os_error());
    let results: Vec<i64> = batch.iter().map(|p| p.result).collect();
    let expected = [
        100,
        no(Errno::BADF),
        no(Errno::BADF),
        no(Errno::ISDIR),
        no(Errno::SPIPE),
        no(Errno::INVAL),
        no(Errno::INVAL),
        0,
        0,
        0,
        3,
        100,
        no(Errno::FAULT),
        4096,
        10,
        200,
    ];
    assert_eq!(results, expected);
    assert_eq!((done.failed, done.bytes), (7, 100 + 3 + 100 + 4096 + 10 + 200));
    assert_eq!(buffer.part(0..100), file::bytes(5, 100, 0));
    assert_eq!(buffer.part(2000..2003), file::bytes(SIZE as u64 - 3, 3, 0));
    assert_eq!(buffer.part(3000..3200), file::bytes(77, 200, 0));
    assert_eq!(buffer.part(4096..8192), file::bytes(0, 4096, 0));
    assert_eq!(host[..], file::bytes(50, 100, 0));
    assert!(buffer.part(1000..2000).iter().all(|&b| b == POISON));
    for end in [out, into] {
        spinio_sys::linux::close(end).unwrap();
    }
}

#[test]
fn long_pieces_are_cut_and_told_as_one() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    for evicted in [false, true] {
        let buffer = Buffer::new(device, 8 << 20);
        if evicted {
            file::evict(&subject.file);
        }
        let base = buffer.addr().0;
        let mut batch: Vec<Piece> = [(3u64, 1 << 20), (1 << 20, SIZE as u64), (0, 5 << 20)]
            .iter()
            .enumerate()
            .map(|(i, &(offset, len))| {
                let address = base + [0, 1_100_000, 3_000_000][i];
                Piece { fd: subject.fd(), offset, len, address, ..Piece::default() }
            })
            .collect();
        runtime.batch(&mut batch).unwrap();
        check(&batch, &buffer);
    }
}

#[test]
fn a_truncated_file_ends_pieces_where_it_ends() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let kernel = FaultyKernel::new();
    // Every read through the page cache stops half-way once: the rest is asked for again.
    kernel.now_and_then(Call::Pread(Route::Copy), 2, Effect::Short(1));
    let runtime = Runtime::with_kernel(settings(), kernel);
    let buffer = Buffer::new(device, 1 << 20);
    let mut batch = pieces(&mut Rng::of_run(4), &[subject.fd()], &buffer, 300, 5000);
    runtime.batch(&mut batch).unwrap();
    check(&batch, &buffer);
    assert!(kernel.hits() > 0);
    // An error in the middle of a piece is bytes before it, one at its start an errno.
    kernel.heal();
    kernel.hit(Call::Pread(Route::Copy), 1, 1, Effect::Fail(Errno::IO));
    kernel.hit(Call::Pread(Route::Copy), 1, 1, Effect::Short(1));
    kernel.hit(Call::Pread(Route::Copy), 1, 1, Effect::Fail(Errno::IO));
    let base = buffer.addr().0;
    let mut two =
        [0, 1].map(|i| Piece { fd: subject.fd(), offset: 0, len: 1000, address: base + i * 1000, ..Piece::default() });
    let done = runtime.batch(&mut two).unwrap();
    assert_eq!((two[0].result, two[1].result, done.failed), (-5, 500, 1));
}

#[test]
fn what_breaks_under_a_batch_does_not_break_the_batch() {
    let subject = Subject::new();
    let inner = emulated("size=64M");
    let mut rng = Rng::of_run(5);
    type Fault<'a> = &'a dyn Fn(&FaultyDevice, &FaultyKernel);
    let faults: [(&str, Fault<'_>); 8] = [
        ("no kernel to gather with", &|d, _| d.fail(Operation::PrepareGather, 1, u64::MAX, ErrorKind::Unsupported)),
        ("the first launch fails", &|d, _| d.fail(Operation::Gather, 1, 1, ErrorKind::Driver)),
        ("every launch fails", &|d, _| d.fail(Operation::Gather, 1, u64::MAX, ErrorKind::Driver)),
        ("pinned memory is refused", &|d, _| d.fail(Operation::Staging, 1, u64::MAX, ErrorKind::NoMemory)),
        ("there is no ring", &|_, k| k.always(Call::Ring, Effect::Fail(Errno::NOSYS))),
        ("storage fails", &|_, k| k.always(Call::Pread(Route::Direct), Effect::Fail(Errno::IO))),
        ("storage fails now and then", &|_, k| k.now_and_then(Call::Pread(Route::Direct), 3, Effect::Fail(Errno::IO))),
        ("storage stops half-way", &|_, k| k.now_and_then(Call::Pread(Route::Direct), 2, Effect::Short(512))),
    ];
    for (what, fault) in faults {
        for evicted in [false, true] {
            let (device, kernel) = (FaultyDevice::before(inner), FaultyKernel::new());
            fault(device, kernel);
            let runtime = Runtime::with_kernel(settings(), kernel);
            let buffer = Buffer::new(inner, 1 << 20);
            file::mix(&subject.path, &subject.file, &mut rng);
            if evicted {
                file::evict(&subject.file);
            }
            let mut batch = pieces(&mut rng, &[subject.fd()], &buffer, 300, 5000);
            let done = through(device, &runtime, &buffer, &mut batch, what);
            assert_eq!(done.failed, 0, "{what}");
            check(&batch, &buffer);
            drop(runtime);
            assert_nothing_lent(inner, 1);
        }
    }
    within("the twins are closed", || {
        while leaks::descriptors_of(&subject.path) > 1 {
            std::thread::yield_now();
        }
    });
}

#[test]
fn what_cannot_be_delivered_is_told() {
    let subject = Subject::new();
    let inner = emulated("size=64M");
    for operation in [Operation::Drain, Operation::LeaseQueue, Operation::Fence, Operation::CopyIn] {
        let device = FaultyDevice::before(inner);
        device.fail(Operation::PrepareGather, 1, u64::MAX, ErrorKind::Unsupported);
        device.fail(operation, 1, u64::MAX, ErrorKind::Driver);
        let runtime = Runtime::new(settings());
        let buffer = Buffer::new(inner, 1 << 20);
        let mut batch = pieces(&mut Rng::of_run(6), &[subject.fd()], &buffer, 50, 5000);
        in_vain(device, &runtime, &buffer, &mut batch, &format!("{operation:?}"));
        assert!(batch.iter().all(|p| p.result == -i64::from(Errno::IO.raw_os_error())), "{operation:?}");
        drop(runtime);
        assert_nothing_lent(inner, 1);
    }
}

#[test]
fn a_batch_begins_behind_what_was_queued_and_returns_when_all_has_arrived() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(device, 1 << 20);
    for evicted in [false, true] {
        if evicted {
            file::evict(&subject.file);
        }
        let earlier = vec![1u8; 1 << 20];
        let mut batch = pieces(&mut Rng::of_run(7), &[subject.fd()], &buffer, 100, 5000);
        device.hold();
        // SAFETY: `earlier` stays until the end.
        unsafe { device.copy_in(QueueId(0), buffer.addr(), earlier.as_ptr(), earlier.len()) }.unwrap();
        // SAFETY: the pieces stay until the ticket was waited for.
        let ticket = unsafe { runtime.submit(&raw mut batch[..]) }.unwrap();
        std::thread::sleep(std::time::Duration::from_millis(40));
        assert!(!ticket.is_done(), "it was done before its bytes had arrived");
        device.resume();
        let done = within("a ticket", || ticket.wait());
        assert_eq!(done.failed, 0);
        device.drain(QueueId(0), Wait::Sleep).unwrap();
        for p in &batch {
            let at = (p.address - buffer.addr().0) as usize;
            let got = p.result as usize;
            assert!(buffer.part(at..at + got) == file::bytes(p.offset, got, 0), "what was queued before came later");
        }
    }
}

#[test]
fn storage_writes_straight_into_memory_that_it_can_reach() {
    let subject = Subject::new();
    file::evict(&subject.file);
    if file::cached_pages(&subject.file) != Some(0) {
        return eprintln!("skipped: this file system keeps its pages");
    }
    let device = emulated("size=64M,bar=16M,p2p=1");
    let runtime = Runtime::new(settings());
    let buffer = Buffer::host_mapped(device, 2 << 20);
    buffer.fill(POISON);
    let base = buffer.addr().0;
    let mut batch: Vec<Piece> = (0..200)
        .map(|i: u64| {
            let (offset, len) = if i % 5 == 4 { (i * 4099, 700) } else { (i * 8192, 4096) };
            Piece { fd: subject.fd(), offset, len, address: base + i * 8192, ..Piece::default() }
        })
        .collect();
    runtime.batch(&mut batch).unwrap();
    check(&batch, &buffer);
    assert!(routes(&runtime).contains(&Route::P2p), "{:?}", routes(&runtime));
}

#[test]
fn a_batch_larger_than_the_staging_ring_goes_through_it() {
    let subject = Subject::new();
    let device = emulated("size=256M");
    let runtime = Runtime::new(Settings { staging: 4 << 20, batch_threads: 6, ..settings() });
    let buffer = Buffer::new(device, 48 << 20);
    for evicted in [false, true] {
        buffer.fill(POISON);
        if evicted {
            file::evict(&subject.file);
        }
        let mut rng = Rng::of_run(8);
        let mut batch = pieces(&mut rng, &[subject.fd()], &buffer, 3000, 30_000);
        within("a large batch", || runtime.batch(&mut batch)).unwrap();
        check(&batch, &buffer);
    }
    assert!(runtime.staging_bytes(&buffer.allocation()) <= 4 << 20);
}

#[test]
fn crowded_pieces_are_gathered_out_of_pages_registered_for_them() {
    let subject = Subject::new();
    let inner = emulated("size=64M");
    let mut rng = Rng::of_run(9);
    for (what, pins, gathered) in [("all", u64::MAX, true), ("none", 0, false), ("some", 1, true)] {
        let device = FaultyDevice::before(inner);
        if pins < u64::MAX {
            device.fail(Operation::Pin, pins + 1, u64::MAX, ErrorKind::PinRefused);
        }
        let runtime = Runtime::new(Settings { batch_threads: 1, ..settings() });
        file::fetch(&subject.path, 0..SIZE as u64 / 4096 + 1);
        let buffer = Buffer::new(inner, 16 << 20);
        let mut batch = pieces(&mut rng, &[subject.fd()], &buffer, 4000, 5000);
        let done = through(device, &runtime, &buffer, &mut batch, what);
        assert_eq!(done.failed, 0, "{what}");
        check(&batch, &buffer);
        let by = routes(&runtime);
        assert_eq!((by.contains(&Route::Gather), by.contains(&Route::Copy)), (gathered, pins < u64::MAX), "{what}");
        // What is written afterwards is seen by the next batch: no pin is used twice.
        subject.file.write_all_at(&file::bytes(0, 4096, 0), 0).unwrap();
        drop(runtime);
        assert_nothing_lent(inner, 1);
    }
    let runtime = Runtime::new(Settings { batch_threads: 1, ..settings() });
    let buffer = Buffer::new(inner, 16 << 20);
    for version in 1..4 {
        subject.file.write_all_at(&file::bytes(0, SIZE, version), 0).unwrap();
        let mut batch = pieces(&mut rng, &[subject.fd()], &buffer, 3000, 5000);
        runtime.batch(&mut batch).unwrap();
        for p in batch.iter().filter(|p| p.result > 0).step_by(37) {
            let at = (p.address - buffer.addr().0) as usize;
            let got = p.result as usize;
            assert!(buffer.part(at..at + got) == file::bytes(p.offset, got, version), "{version}");
        }
    }
    assert!(routes(&runtime).contains(&Route::Gather));
}

#[test]
fn many_pieces_are_judged_by_a_sample() {
    let subject = Subject::new();
    let device = emulated("size=64M");
    let mut rng = Rng::of_run(10);
    for what in ["cached", "absent", "half", "all but a few"] {
        file::evict(&subject.file);
        let pages = SIZE as u64 / 4096 + 1;
        match what {
            "cached" => file::fetch(&subject.path, 0..pages),
            "half" => file::fetch(&subject.path, 0..pages / 2),
            "all but a few" => file::fetch(&subject.path, (0..pages).filter(|p| p % 200 != 7)),
            _ => {}
        }
        let runtime = Runtime::new(settings());
        let buffer = Buffer::new(device, 16 << 20);
        let mut batch = pieces(&mut rng, &[subject.fd()], &buffer, 6000, 300);
        assert!(batch.len() > 4096);
        runtime.batch(&mut batch).unwrap();
        check(&batch, &buffer);
        if what == "absent" && file::cached_pages(&subject.file) == Some(0) {
            assert_eq!(routes(&runtime), [Route::Direct]);
        }
    }
}

#[test]
fn many_files_and_many_buffers_in_one_batch() {
    let place = place::on("tree").unwrap();
    let device = emulated("size=64M");
    let files: Vec<File> = (0..40)
        .map(|n| {
            let file = file::written(&place.file(&n.to_string()), 20_000 + n);
            if n % 3 == 0 {
                file::evict(&file);
            }
            file
        })
        .collect();
    let buffers: Vec<Buffer> = (0..30).map(|_| Buffer::new(device, 50_000)).collect();
    let mut host = vec![0u8; 100 * 100];
    let runtime = Runtime::new(settings());
    let mut batch = Vec::new();
    for i in 0..1500u64 {
        let file = &files[(i * 7 % 40) as usize];
        let address = match i {
            i if i % 15 == 14 => host.as_mut_ptr() as u64 + i / 15 * 100,
            i => buffers[(i % 30) as usize].addr().0 + i / 30 * 1000,
        };
        batch.push(Piece { fd: file.as_raw_fd(), offset: i * 131 % 19_000, len: 100, address, ..Piece::default() });
    }
    let done = runtime.batch(&mut batch).unwrap();
    assert_eq!((done.failed, done.bytes), (0, 150_000));
    for (i, p) in batch.iter().enumerate() {
        let expected = file::bytes(p.offset, 100, 0);
        match i {
            i if i % 15 == 14 => assert!(host[i / 15 * 100..][..100] == expected, "{i}"),
            i => assert!(buffers[i % 30].part(i / 30 * 1000..i / 30 * 1000 + 100) == expected, "{i}"),
        }
    }
}

#[test]
fn several_threads_have_batches_at_once() {
    let subject = Subject::new();
    let device = emulated("size=256M");
    let runtime = Runtime::new(Settings { staging: 8 << 20, ..settings() });
    within("batches of several threads", || {
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let (subject, runtime) = (&subject, &runtime);
                scope.spawn(move || {
                    let mut rng = Rng::of_run(100 + seed);
                    for _ in 0..6 {
                        let buffer = Buffer::new(device, 1 << 20);
                        if rng.chance(30) {
                            file::evict(&subject.file);
                        }
                        let mut batch = pieces(&mut rng, &[subject.fd()], &buffer, 200, 5000);
                        runtime.batch(&mut batch).unwrap();
                        check(&batch, &buffer);
                    }
                });
            }
        });
    });
}

/// A file that is too long to be registered while its pieces could be copied, and pieces that are too many to be copied
/// meanwhile: both are done at once.
const LONG: u64 = 64 << 20;

fn scattered(rng: &mut Rng, fd: i32, buffer: &Buffer) -> Vec<Piece> {
    let to = |i: u64| buffer.addr().0 + i * 4096;
    let piece = |i| Piece { fd, offset: rng.below(LONG - 4096), len: 4096, address: to(i), ..Piece::default() };
    (0..3000).map(piece).collect()
}

fn registers_and_copies() -> Settings {
    Settings { batch_threads: 3, ..settings() }
}

#[test]
fn pieces_are_registered_from_the_front_and_copied_from_the_back_until_both_meet() {
    let place = place::on("tree").unwrap();
    let file = file::written(&place.file("long"), LONG);
    file::fetch(&place.file("long"), 0..LONG / 4096);
    let inner = emulated("size=64M");
    let mut rng = Rng::of_run(10);
    let mut seen = Vec::new();
    // Pages are registered as long as the device takes them.
    for pins in [u64::MAX, u64::MAX, u64::MAX, 0, 1, 9] {
        let device = FaultyDevice::before(inner);
        if pins < u64::MAX {
            device.fail(Operation::Pin, pins + 1, u64::MAX, ErrorKind::PinRefused);
        }
        let runtime = Runtime::new(registers_and_copies());
        let buffer = Buffer::new(inner, 3000 * 4096);
        for _ in 0..2 {
            let mut batch = scattered(&mut rng, file.as_raw_fd(), &buffer);
            let done = through(device, &runtime, &buffer, &mut batch, "a batch");
            assert_eq!((done.failed, done.bytes), (0, 3000 * 4096), "{pins}");
            let bytes = buffer.bytes();
            for (p, bytes) in batch.iter().zip(bytes.chunks(4096)) {
                assert!(p.result == 4096 && bytes == file::bytes(p.offset, 4096, 0), "{p:?}");
            }
        }
        if pins == u64::MAX {
            let lines = runtime.stats().lines;
            seen.extend(lines.iter().filter(|l| l.bytes > 0).map(|l| (l.route, l.reason)));
        }
        drop(runtime);
        assert_nothing_lent(inner, 1);
    }
    let by = |route, reason| seen.contains(&(route, reason));
    assert!(by(Route::Gather, Reason::CachedLarge) && by(Route::Copy, Reason::Cached), "{seen:?}");
}

#[test]
fn a_writer_and_a_truncater_beside_a_batch_show_it_bytes_of_before_or_after() {
    let place = place::on("tree").unwrap();
    let file = file::written(&place.file("long"), LONG);
    let device = emulated("size=64M");
    let stop = std::sync::atomic::AtomicBool::new(false);
    let going = || !stop.load(std::sync::atomic::Ordering::Relaxed);
    within("batches beside others", || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut rng = Rng::of_run(11);
                while going() {
                    let at = rng.below(LONG / 65_536) * 65_536;
                    file.write_all_at(&file::bytes(at, 65_536, 1), at).unwrap();
                }
            });
            scope.spawn(|| {
                while going() {
                    file.set_len(LONG / 2 + 5).unwrap();
                    file.set_len(LONG).unwrap();
                    std::thread::sleep(std::time::Duration::from_millis(3));
                }
            });
            let mut rng = Rng::of_run(12);
            let runtime = Runtime::new(registers_and_copies());
            for _ in 0..6 {
                let buffer = Buffer::new(device, 3000 * 4096);
                let mut batch = scattered(&mut rng, file.as_raw_fd(), &buffer);
                runtime.batch(&mut batch).unwrap();
                for (p, seen) in batch.iter().zip(buffer.bytes().chunks(4096)) {
                    let got = usize::try_from(p.result).expect("no piece fails");
                    let may = file::bytes(p.offset, got, 0).into_iter().zip(file::bytes(p.offset, got, 1));
                    let good = seen.iter().zip(may).all(|(&seen, (a, b))| [a, b, 0].contains(&seen));
                    assert!(good, "{p:?}");
                }
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    });
}
