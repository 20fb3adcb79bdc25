//! Batches against the `pread`s that they replace: every residency, every form, every fault.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

mod absent;
mod faults;
mod panics;
mod readers;
mod registered;
mod shared;
mod subject;
mod tables;

use std::fs::File;
use std::os::fd::AsRawFd;

use spinio_batch::{Arg, Batches, ReadArrays, ReadOp};
use spinio_device::emulated::{Emulated, POISON};
use spinio_device::{Device, StreamId, WaitMode};
use spinio_io::{Error, Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, Rng, file, in_child, mount_fixture, with_deadline};
use subject::{SIZE, TestFile, assert_all_released, check, pieces, routes, settings};

#[test]
fn any_mixture_equals_single_reads() {
    let subjects = [TestFile::new(), TestFile::new()];
    let fds: Vec<i32> = subjects.iter().map(TestFile::fd).collect();
    let device = emulated("size=64M");
    let mut rng = Rng::from_env(1);
    for round in 0..24 {
        let runtime = Runtime::new(settings());
        let buffer = Buffer::new(device, 3 << 20);
        for s in &subjects {
            file::randomize_residency(&s.path, &s.file, &mut rng);
        }
        let longest = *rng.choose(&[600, 5000, 70_000, 600_000]);
        let count = 1 + rng.below(700) as usize;
        let mut batch = pieces(&mut rng, &fds, &buffer, count, longest);
        let done = with_deadline("a batch", || runtime.batch(&mut batch)).unwrap();
        assert_eq!((done.failed, done.bytes), (0, batch.iter().map(|p| p.result as u64).sum()), "round {round}");
        check(&batch, &buffer);
        drop(runtime);
        assert_all_released(device, 1);
    }
}

#[test]
fn batches_work_on_every_file_system() {
    let device = emulated("size=64M");
    let mut rng = Rng::from_env(2);
    for kind in mount_fixture::KINDS {
        let subject = match TestFile::on(kind) {
            Ok(subject) => subject,
            Err(why) => {
                eprintln!("skipped: {kind}: {why}");
                continue;
            }
        };
        let runtime = Runtime::new(settings());
        for _ in 0..3 {
            let buffer = Buffer::new(device, 1 << 20);
            file::randomize_residency(&subject.path, &subject.file, &mut rng);
            let mut batch = pieces(&mut rng, &[subject.fd()], &buffer, 300, 9000);
            with_deadline("a batch", || runtime.batch(&mut batch)).unwrap();
            check(&batch, &buffer);
        }
    }
}

#[test]
fn only_absent_ops_are_read_from_storage() {
    let subject = TestFile::new();
    let device = emulated("size=64M");
    let mut rng = Rng::from_env(3);
    let run = |rng: &mut Rng| {
        let runtime = Runtime::new(settings());
        let buffer = Buffer::new(device, 1 << 20);
        let mut batch = pieces(rng, &[subject.fd()], &buffer, 200, 5000);
        runtime.batch(&mut batch).unwrap();
        check(&batch, &buffer);
        runtime
    };
    file::load_pages(&subject.path, 0..SIZE as u64 / 4096 + 1);
    assert_eq!(routes(&run(&mut rng)), [Route::Copy]);
    file::evict(&subject.file);
    if file::cached_pages(&subject.file) != Some(0) {
        return eprintln!("skipped: this file system keeps its pages");
    }
    let runtime = run(&mut rng);
    assert_eq!(routes(&runtime), [Route::Direct]);
    assert_eq!(file::cached_pages(&subject.file), Some(0), "the page cache was left alone");
    // Each page was read once, or nearly: operations overlap, and a shared page is read once.
    let calls = runtime.stats();
    assert_eq!(calls.rows.len(), 1);
}

#[test]
fn arrays_and_ops_give_same_results() {
    let subject = TestFile::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(device, 1 << 20);
    let offsets: Vec<u64> = (0..256).map(|i| i * 7919 % SIZE as u64).collect();
    let mut results = vec![-1; 256];
    let arrays = ReadArrays {
        fd: subject.fd(),
        offsets: Arg::Slice(&offsets),
        lens: Arg::Same(4096),
        addresses: Arg::Stride(buffer.addr().0, 4096),
        results: &mut results,
    };
    let done = runtime.batch_file(arrays, &[buffer.allocation()]).unwrap();
    assert_eq!((done.failed, done.bytes as i64), (0, results.iter().sum()));
    let as_ops: Vec<ReadOp> = (0..256)
        .map(|i| ReadOp {
            fd: subject.fd(),
            offset: offsets[i],
            len: 4096,
            address: buffer.addr().0 + i as u64 * 4096,
            result: results[i],
            ..ReadOp::default()
        })
        .collect();
    check(&as_ops, &buffer);
    let arrays = ReadArrays {
        fd: 0,
        offsets: Arg::Slice(&[1, 2]),
        lens: Arg::Same(1),
        addresses: Arg::Same(0),
        results: &mut results[..3],
    };
    assert_eq!(runtime.batch_file(arrays, &[]).unwrap_err().kind.errno(), Errno::INVAL);
    assert_eq!(runtime.batch(&mut []).unwrap(), spinio_batch::BatchResult::default());
}

#[test]
fn long_ops_are_split_and_report_one_result() {
    let subject = TestFile::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    for evicted in [false, true] {
        let buffer = Buffer::new(device, 8 << 20);
        if evicted {
            file::evict(&subject.file);
        }
        let base = buffer.addr().0;
        let mut batch: Vec<ReadOp> = [(3u64, 1 << 20), (1 << 20, SIZE as u64), (0, 5 << 20)]
            .iter()
            .enumerate()
            .map(|(i, &(offset, len))| {
                let address = base + [0, 1_100_000, 3_000_000][i];
                ReadOp { fd: subject.fd(), offset, len, address, ..ReadOp::default() }
            })
            .collect();
        runtime.batch(&mut batch).unwrap();
        check(&batch, &buffer);
    }
}

#[test]
fn batch_starts_after_queued_work_and_returns_when_complete() {
    let subject = TestFile::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(device, 1 << 20);
    for evicted in [false, true] {
        if evicted {
            file::evict(&subject.file);
        }
        let earlier = vec![1u8; 1 << 20];
        let mut batch = pieces(&mut Rng::from_env(7), &[subject.fd()], &buffer, 100, 5000);
        device.pause();
        // SAFETY: `earlier` stays until the end.
        unsafe { device.copy_in(StreamId(0), buffer.addr(), earlier.as_ptr(), earlier.len()) }.unwrap();
        // SAFETY: the operations stay until the handle was waited for.
        let handle = unsafe { runtime.submit(&raw mut batch[..]) }.unwrap();
        std::thread::sleep(std::time::Duration::from_millis(40));
        assert!(!handle.is_done().unwrap(), "it was done before its bytes had arrived");
        device.resume();
        let done = with_deadline("a batch handle", || handle.wait().unwrap());
        assert_eq!(done.failed, 0);
        device.synchronize(StreamId(0), WaitMode::Block).unwrap();
        for p in &batch {
            let at = (p.address - buffer.addr().0) as usize;
            let got = p.result as usize;
            assert!(
                buffer.range_bytes(at..at + got) == file::bytes(p.offset, got, 0),
                "work that was queued before arrived later"
            );
        }
    }
}

#[test]
fn forked_child_does_not_wait_for_parents_batch() {
    let subject = TestFile::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(device, 1 << 20);
    let mut batch = pieces(&mut Rng::from_env(7), &[subject.fd()], &buffer, 100, 5000);
    let is_refused = |error: Option<Error>| error.is_some_and(|error| error.errno() == Errno::SRCH);
    // Also where an assertion fails: no thread must wait for the device forever.
    struct ResumeOnDrop(&'static Emulated);
    impl Drop for ResumeOnDrop {
        fn drop(&mut self) {
            self.0.resume();
        }
    }
    for is_paused in [true, false] {
        let paused = is_paused.then(|| {
            device.pause();
            ResumeOnDrop(device)
        });
        // SAFETY: the operations stay until the handle was waited for.
        let handle = unsafe { runtime.submit(&raw mut batch[..]) }.unwrap();
        // A thread runs it, or has done so.
        std::thread::sleep(std::time::Duration::from_millis(40));
        let mut handle = Some(handle);
        in_child("a wait for the parent's batch", || {
            let Some(handle) = handle.take() else { return 1 };
            let (polled, waited) = (is_refused(handle.is_done().err()), is_refused(handle.wait().err()));
            i32::from(!polled || !waited)
        });
        in_child("a handle of the parent's batch that is dropped", || {
            drop(handle.take());
            0
        });
        drop(paused);
        let done = with_deadline("the parent's batch", || handle.take().unwrap().wait().unwrap());
        assert_eq!(done.failed, 0);
    }
}

#[test]
fn p2p_reads_go_directly_into_mapped_memory() {
    let subject = TestFile::new();
    file::evict(&subject.file);
    if file::cached_pages(&subject.file) != Some(0) {
        return eprintln!("skipped: this file system keeps its pages");
    }
    let device = emulated("size=64M,bar=16M,p2p=1");
    let runtime = Runtime::new(settings());
    let buffer = Buffer::host_mapped(device, 2 << 20);
    buffer.fill(POISON);
    let base = buffer.addr().0;
    let mut batch: Vec<ReadOp> = (0..200)
        .map(|i: u64| {
            let (offset, len) = if i % 5 == 4 { (i * 4099, 700) } else { (i * 8192, 4096) };
            ReadOp { fd: subject.fd(), offset, len, address: base + i * 8192, ..ReadOp::default() }
        })
        .collect();
    runtime.batch(&mut batch).unwrap();
    check(&batch, &buffer);
    assert!(routes(&runtime).contains(&Route::P2p), "{:?}", routes(&runtime));
}

#[test]
fn batch_larger_than_bounce_pool_completes() {
    let subject = TestFile::new();
    let device = emulated("size=256M");
    let runtime = Runtime::new(Settings { bounce_limit: 4 << 20, batch_threads: 6, ..settings() });
    let buffer = Buffer::new(device, 48 << 20);
    for evicted in [false, true] {
        buffer.fill(POISON);
        if evicted {
            file::evict(&subject.file);
        }
        let mut rng = Rng::from_env(8);
        let mut batch = pieces(&mut rng, &[subject.fd()], &buffer, 3000, 30_000);
        with_deadline("a large batch", || runtime.batch(&mut batch)).unwrap();
        check(&batch, &buffer);
    }
    assert!(runtime.bounce_bytes(&buffer.allocation()) <= 4 << 20);
}

#[test]
fn residency_of_many_ops_is_sampled() {
    let subject = TestFile::new();
    let device = emulated("size=64M");
    let mut rng = Rng::from_env(10);
    for what in ["cached", "absent", "half", "all but a few"] {
        file::evict(&subject.file);
        let pages = SIZE as u64 / 4096 + 1;
        match what {
            "cached" => file::load_pages(&subject.path, 0..pages),
            "half" => file::load_pages(&subject.path, 0..pages / 2),
            "all but a few" => file::load_pages(&subject.path, (0..pages).filter(|p| p % 200 != 7)),
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
fn batch_with_many_files_and_buffers() {
    let place = mount_fixture::create("tree").unwrap();
    let device = emulated("size=64M");
    let files: Vec<File> = (0..40)
        .map(|n| {
            let file = file::create_filled(&place.file(&n.to_string()), 20_000 + n);
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
        batch.push(ReadOp { fd: file.as_raw_fd(), offset: i * 131 % 19_000, len: 100, address, ..ReadOp::default() });
    }
    let done = runtime.batch(&mut batch).unwrap();
    assert_eq!((done.failed, done.bytes), (0, 150_000));
    for (i, p) in batch.iter().enumerate() {
        let expected = file::bytes(p.offset, 100, 0);
        match i {
            i if i % 15 == 14 => assert!(host[i / 15 * 100..][..100] == expected, "{i}"),
            i => assert!(buffers[i % 30].range_bytes(i / 30 * 1000..i / 30 * 1000 + 100) == expected, "{i}"),
        }
    }
}

#[test]
fn concurrent_batches_of_several_threads() {
    let subject = TestFile::new();
    let device = emulated("size=256M");
    let runtime = Runtime::new(Settings { bounce_limit: 8 << 20, ..settings() });
    with_deadline("batches of several threads", || {
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let (subject, runtime) = (&subject, &runtime);
                scope.spawn(move || {
                    let mut rng = Rng::from_env(100 + seed);
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
