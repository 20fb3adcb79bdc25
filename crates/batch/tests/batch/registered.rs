//! Operations that are gathered from pages registered for one batch alone.

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use spinio_batch::{Batches, ReadOp};
use spinio_device::ErrorKind;
use spinio_io::{Runtime, Settings};
use spinio_plan::{Reason, Route};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, FaultyDevice, Operation, Rng, file, mount_fixture, with_deadline};

use crate::subject::{SIZE, TestFile, assert_all_released, check, pieces, routes, run_through, settings};

#[test]
fn dense_ops_are_gathered_from_registered_pages() {
    let subject = TestFile::new();
    let inner = emulated("size=64M");
    let mut rng = Rng::from_env(9);
    for (what, pins, gathered) in [("all", u64::MAX, true), ("none", 0, false), ("some", 1, true)] {
        let device = FaultyDevice::wrap(inner);
        if pins < u64::MAX {
            device.inject(Operation::Pin, pins + 1, u64::MAX, ErrorKind::PinRefused);
        }
        let runtime = Runtime::new(Settings { batch_threads: 1, ..settings() });
        file::load_pages(&subject.path, 0..SIZE as u64 / 4096 + 1);
        let buffer = Buffer::new(inner, 16 << 20);
        let mut batch = pieces(&mut rng, &[subject.fd()], &buffer, 4000, 5000);
        let done = run_through(device, &runtime, &buffer, &mut batch, what);
        assert_eq!(done.failed, 0, "{what}");
        check(&batch, &buffer);
        let by = routes(&runtime);
        assert_eq!((by.contains(&Route::Gather), by.contains(&Route::Copy)), (gathered, pins < u64::MAX), "{what}");
        // Later writes are seen by the next batch: no pin is used twice.
        subject.file.write_all_at(&file::bytes(0, 4096, 0), 0).unwrap();
        drop(runtime);
        assert_all_released(inner, 1);
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
            assert!(buffer.range_bytes(at..at + got) == file::bytes(p.offset, got, version), "{version}");
        }
    }
    assert!(routes(&runtime).contains(&Route::Gather));
}

/// A file that takes too long to register compared with copying its operations, and operations that take too long to
/// copy meanwhile: both are done at once.
const LONG: u64 = 256 << 20;
const MANY: u64 = 48_000;
const LEN: u64 = 512;

fn scattered_ops(rng: &mut Rng, fd: i32, buffer: &Buffer) -> Vec<ReadOp> {
    let to = |i: u64| buffer.addr().0 + i * LEN;
    let piece = |i| ReadOp { fd, offset: rng.below(LONG - LEN), len: LEN, address: to(i), ..ReadOp::default() };
    (0..MANY).map(piece).collect()
}

fn hybrid_settings() -> Settings {
    Settings { batch_threads: 9, ..settings() }
}

#[test]
fn hybrid_batch_registers_front_and_copies_back() {
    let place = mount_fixture::create("tree").unwrap();
    let file = file::create_filled(&place.file("long"), LONG);
    file::load_pages(&place.file("long"), 0..LONG / 4096);
    let inner = emulated("size=64M");
    let mut rng = Rng::from_env(10);
    // Pages are registered as long as the device takes them.
    for pins in [u64::MAX, 0, 1, 9] {
        let device = FaultyDevice::wrap(inner);
        if pins < u64::MAX {
            device.inject(Operation::Pin, pins + 1, u64::MAX, ErrorKind::PinRefused);
        }
        let buffer = Buffer::new(inner, (MANY * LEN) as usize);
        let (mut gathered, mut copied) = (false, false);
        with_deadline("both at once", || {
            // Either of them may do all of one batch. A runtime each: on a busy machine unpinning may take long, and a
            // runtime in which that happens twice registers nothing more.
            for round in 0.. {
                let runtime = Runtime::new(hybrid_settings());
                let mut batch = scattered_ops(&mut rng, file.as_raw_fd(), &buffer);
                let done = run_through(device, &runtime, &buffer, &mut batch, "a batch");
                assert_eq!((done.failed, done.bytes), (0, MANY * LEN), "{pins}");
                let bytes = buffer.bytes();
                for (p, bytes) in batch.iter().zip(bytes.chunks(LEN as usize)) {
                    assert!(p.result == LEN as i64 && bytes == file::bytes(p.offset, LEN as usize, 0), "{p:?}");
                }
                let rows = runtime.stats().rows;
                let by = |route, reason| rows.iter().any(|l| l.bytes > 0 && (l.route, l.reason) == (route, reason));
                gathered |= by(Route::Gather, Reason::CachedLarge);
                copied |= by(Route::Copy, Reason::Cached);
                let finished = if pins == u64::MAX { gathered && copied } else { round == 1 };
                if finished {
                    break;
                }
            }
        });
        assert_all_released(inner, 1);
    }
}

#[test]
fn batch_concurrent_with_writer_and_truncation_sees_old_or_new_bytes() {
    let place = mount_fixture::create("tree").unwrap();
    let file = file::create_filled(&place.file("long"), LONG);
    let device = emulated("size=64M");
    let stop = std::sync::atomic::AtomicBool::new(false);
    let going = || !stop.load(std::sync::atomic::Ordering::Relaxed);
    with_deadline("batches with concurrent writers", || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut rng = Rng::from_env(11);
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
            let mut rng = Rng::from_env(12);
            let runtime = Runtime::new(hybrid_settings());
            for _ in 0..6 {
                let buffer = Buffer::new(device, (MANY * LEN) as usize);
                let mut batch = scattered_ops(&mut rng, file.as_raw_fd(), &buffer);
                runtime.batch(&mut batch).unwrap();
                for (p, seen) in batch.iter().zip(buffer.bytes().chunks(LEN as usize)) {
                    let got = usize::try_from(p.result).expect("no operation fails");
                    let may = file::bytes(p.offset, got, 0).into_iter().zip(file::bytes(p.offset, got, 1));
                    let good = seen.iter().zip(may).all(|(&seen, (a, b))| [a, b, 0].contains(&seen));
                    assert!(good, "{p:?}");
                }
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    });
}
