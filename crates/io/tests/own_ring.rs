//! Absent reads that P2P moves whole, by the calling thread alone: right bytes, no other thread, and the ordinary way where
//! that fails.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::Barrier;

use spinio_io::{Runtime, Settings};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, FileKey};
use spinio_testkit::buffer::emulated;
use spinio_testkit::faulty_syscalls::{Call, Effect};
use spinio_testkit::mount_fixture::{self, MountFixture};
use spinio_testkit::{Buffer, FaultySyscalls, Rng, eventually, file, in_child};

const MIB: usize = 1 << 20;
const SIZE: usize = 32 * MIB;
const DEVICE: &str = "size=64M,bar=40M,p2p=1";

fn absent_file(fixture: &MountFixture) -> Option<File> {
    file::create_evicted(&fixture.file("file"), SIZE as u64)
}

fn read(runtime: &Runtime, file: &File, buffer: &Buffer, from: usize, len: usize) -> Result<usize, Errno> {
    runtime.read(file.as_raw_fd(), Some(from as u64), buffer.target(0), len).map_err(|e| e.kind.errno())
}

/// Whether the buffer has these bytes of the file.
fn is_right(buffer: &Buffer, from: usize, len: usize) -> bool {
    buffer.range_bytes(0..len) == file::bytes(from as u64, len, 0)
}

/// Bytes that took a route.
fn moved(runtime: &Runtime, route: Route) -> u64 {
    runtime.stats().rows.iter().filter(|row| row.route == route).map(|row| row.bytes).sum()
}

/// A runtime whose calling thread has read by its own ring, with its kernel; `None` where there is no such ring.
fn warm(file: &File, buffer: &Buffer) -> Option<(Runtime, &'static FaultySyscalls)> {
    let kernel = FaultySyscalls::new();
    let runtime = Runtime::with_kernel(Settings::default(), kernel);
    assert_eq!(read(&runtime, file, buffer, 0, MIB), Ok(MIB));
    if kernel.calls(Call::OwnRingRead) == 0 {
        eprintln!("skipped: no P2P, or no ring of a thread, here");
        return None;
    }
    Some((runtime, kernel))
}

#[test]
fn each_thread_reads_by_itself_and_the_bytes_are_right() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture) else { return };
    let device = emulated(DEVICE);
    let Some((runtime, kernel)) = warm(&file, &Buffer::host_mapped(device, MIB)) else { return };
    let before = kernel.calls(Call::OwnRingRead);
    let workers_before = kernel.calls(Call::Pread(Route::P2p)) - before;
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (runtime, file) = (&runtime, &file);
            scope.spawn(move || {
                let (mut rng, buffer) = (Rng::from_env(thread), Buffer::host_mapped(device, 8 * MIB));
                for _ in 0..40 {
                    let len = [16 << 10, 64 << 10, 256 << 10, MIB, 8 * MIB][rng.below(5) as usize];
                    let from = 4096 * (1 + rng.below(((SIZE - len) / 4096) as u64 - 1) as usize);
                    assert_eq!(read(runtime, file, &buffer, from, len), Ok(len));
                    assert!(is_right(&buffer, from, len), "{len} bytes at {from}");
                }
            });
        }
    });
    assert!(kernel.calls(Call::OwnRingRead) >= before + 160, "all are reads of the callers");
    let by_workers = kernel.calls(Call::Pread(Route::P2p)) - kernel.calls(Call::OwnRingRead);
    assert_eq!(by_workers, workers_before, "no worker has read");
    assert!(file::cached_pages(&file).is_none_or(|pages| pages == 0), "they pass the page cache");
}

#[test]
fn failures_and_short_reads_end_like_a_plain_read() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture) else { return };
    let buffer = Buffer::host_mapped(emulated(DEVICE), 4 * MIB);
    for effect in [
        Effect::Fail(Errno::IO),
        Effect::Fail(Errno::REMOTEIO),
        Effect::Fail(Errno::BADF),
        Effect::Fail(Errno::AGAIN),
        Effect::Short(512),
        Effect::Short(1),
    ] {
        for times in [1, 2, u64::MAX] {
            let Some((runtime, kernel)) = warm(&file, &buffer) else { return };
            kernel.inject(Call::Pread(Route::P2p), 1, times, effect);
            for (from, len) in [(MIB, 4 * MIB), (6 * MIB, 64 << 10)] {
                file::evict(&file);
                assert_eq!(read(&runtime, &file, &buffer, from, len), Ok(len), "{effect:?} {times}");
                assert!(is_right(&buffer, from, len), "{effect:?} {times}");
            }
            assert!(kernel.injected() > 0, "{effect:?} was not injected");
        }
    }
}

#[test]
fn short_reads_take_p2p_only_at_random_and_absent() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture) else { return };
    let buffer = Buffer::host_mapped(emulated(DEVICE), MIB);
    let Some((runtime, _)) = warm(&file, &buffer) else { return };
    let by_p2p = |from: usize, len: usize| {
        let before = moved(&runtime, Route::P2p);
        assert_eq!(read(&runtime, &file, &buffer, from, len), Ok(len));
        assert!(is_right(&buffer, from, len), "{len} bytes at {from}");
        moved(&runtime, Route::P2p) - before
    };
    let kib = 1 << 10;
    file::evict(&file);
    assert_eq!(by_p2p(4 * MIB, 16 * kib), 16 * kib as u64);
    assert_eq!(by_p2p(9 * MIB, 64 * kib), 64 * kib as u64);
    assert_eq!(by_p2p(12 * MIB, 8 * kib), 0, "it is too short");
    assert_eq!(by_p2p(12 * MIB + 8 * kib, 32 * kib), 0, "it continues the last read");
    assert_eq!(by_p2p(12 * MIB, 16 * kib), 0, "its pages are cached by now");
    assert_eq!(by_p2p(0, 16 * kib), 0, "a stream begins at the start of the file");
    let direct = File::options().read(true).custom_flags(linux::O_DIRECT as i32).open(fixture.file("file")).unwrap();
    let before = moved(&runtime, Route::P2p);
    for from in [21 * MIB, 23 * MIB] {
        // The emulated device's bounce buffers are as aligned as the kernel demands.
        assert_eq!(read(&runtime, &direct, &buffer, from, 16 * kib), Ok(16 * kib));
    }
    assert_eq!(moved(&runtime, Route::P2p), before, "the program bypasses the page cache itself");
    // What explain says is what a read does.
    let explained = |from: u64| {
        let target = spinio_io::Buffer::at(buffer.target(0));
        let schedule = runtime.explain(file.as_raw_fd(), from, 32 << 10, target).unwrap().schedule;
        schedule.segments.iter().map(|s| (s.route, s.reason)).collect::<Vec<_>>()
    };
    file::evict(&file);
    assert_eq!(explained(20 * MIB as u64), [(Route::P2p, Reason::Absent)]);
    assert_eq!(explained(0)[0].1, Reason::Small);
}

/// Each question is a system call, which a short read feels.
#[test]
fn short_read_asks_the_kernel_each_question_once() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture) else { return };
    let buffer = Buffer::host_mapped(emulated(DEVICE), MIB);
    let Some((runtime, kernel)) = warm(&file, &buffer) else { return };
    file::evict(&file);
    let calls = || [Call::Cachestat, Call::Stat, Call::Flags, Call::OwnRingRead].map(|call| kernel.calls(call));
    for (from, len) in [(5 * MIB, 16 << 10), (9 * MIB, 64 << 10)] {
        let before = calls();
        assert_eq!(read(&runtime, &file, &buffer, from, len), Ok(len));
        assert!(is_right(&buffer, from, len));
        let after = calls();
        assert_eq!([0, 1, 2, 3].map(|call| after[call] - before[call]), [1; 4], "{len} bytes");
    }
}

/// A write lease is granted only while no other has the file open: neither in a descriptor nor in a ring.
#[test]
fn closed_file_is_free_although_its_reader_lives_on() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture) else { return };
    let device = emulated(DEVICE);
    let Some((runtime, kernel)) = warm(&file, &Buffer::host_mapped(device, MIB)) else { return };
    let path = fixture.file("file");
    let number = path.metadata().map(|stat| FileKey { dev: stat.dev(), ino: stat.ino() }).unwrap();
    drop(file);
    // The state of the file goes by itself after a second without use: then it says nothing, and there is another turn.
    eventually("the state of the file keeps it open", || {
        let (ready, end) = (Barrier::new(2), Barrier::new(2));
        let file = File::open(&path).unwrap();
        std::thread::scope(|scope| {
            let (runtime, ready, end) = (&runtime, &ready, &end);
            scope.spawn(move || {
                let (buffer, before) = (Buffer::host_mapped(device, MIB), kernel.calls(Call::OwnRingRead));
                let got = read(runtime, &file, &buffer, 3 * MIB, MIB);
                let by_ring = kernel.calls(Call::OwnRingRead) > before;
                drop(file);
                ready.wait();
                end.wait();
                assert_eq!((got, by_ring), (Ok(MIB), true));
            });
            ready.wait();
            let only = File::options().write(true).open(&path).unwrap();
            let lease = || linux::take_write_lease(only.as_raw_fd(), linux::gettid()).is_ok();
            let is_kept = !lease();
            runtime.reader().files.forget(number);
            eventually("the ring has let the file go", lease);
            linux::release_lease(only.as_raw_fd()).unwrap();
            end.wait();
            is_kept
        })
    });
}

#[test]
fn forked_child_reads_with_a_ring_of_its_own() {
    let fixture = mount_fixture::create("tree").unwrap();
    let Some(file) = absent_file(&fixture) else { return };
    let device = emulated(DEVICE);
    let Some((runtime, _)) = warm(&file, &Buffer::host_mapped(device, MIB)) else { return };
    in_child("reads of a child", || {
        let buffer = Buffer::host_mapped(emulated("size=32M,bar=16M,p2p=1"), MIB);
        let kernel = FaultySyscalls::new();
        let runtime = Runtime::with_kernel(Settings::default(), kernel);
        let right = |from| read(&runtime, &file, &buffer, from, MIB) == Ok(MIB) && is_right(&buffer, from, MIB);
        if !right(2 * MIB) || !right(3 * MIB) {
            return 1;
        }
        i32::from(kernel.calls(Call::OwnRingRead) == 0) * 2
    });
    let buffer = Buffer::host_mapped(device, MIB);
    assert_eq!(read(&runtime, &file, &buffer, 5 * MIB, MIB), Ok(MIB));
    assert!(is_right(&buffer, 5 * MIB, MIB));
}
