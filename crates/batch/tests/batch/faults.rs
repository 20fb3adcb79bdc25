//! Failures: an operation fails as its own `pread` would, and affects no other.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use spinio_batch::{Batches, ReadOp};
use spinio_device::ErrorKind;
use spinio_device::emulated::POISON;
use spinio_io::Runtime;
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::{
    Buffer, Call, Effect, FaultyDevice, FaultySyscalls, Operation, Rng, file, leak_check, with_deadline,
};

use crate::subject::{SIZE, TestFile, assert_all_released, check, pieces, run_failing, run_through, settings};

#[test]
fn each_op_fails_as_its_own_pread() {
    let subject = TestFile::new();
    let device = emulated("size=64M");
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(device, 64 << 10);
    let write_only = File::options().write(true).open(&subject.path).unwrap();
    let directory = File::open(subject.path.parent().unwrap()).unwrap();
    let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(&subject.path).unwrap();
    let (out, into) = spinio_sys::linux::pipe().unwrap();
    let mut host = [0u8; 100];
    let base = buffer.addr().0;
    let piece = |fd: i32, offset: u64, len: u64, address: u64| ReadOp { fd, offset, len, address, ..ReadOp::default() };
    let fd = subject.fd();
    let mut batch = vec![
        piece(fd, 5, 100, base),
        piece(-1, 0, 10, base + 1000),
        piece(write_only.as_raw_fd(), 0, 10, base + 1000),
        piece(directory.as_raw_fd(), 0, 10, base + 1000),
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
        // The buffer ends before the operation does: as much as fits is read.
        piece(fd, 0, 4096, base + (64 << 10) - 10),
        piece(fd, 77, 200, base + 3000),
    ];
    let done = runtime.batch(&mut batch).unwrap();
    let code_of = |errno: Errno| -i64::from(errno.raw_os_error());
    let results: Vec<i64> = batch.iter().map(|p| p.result).collect();
    let expected = [
        100,
        code_of(Errno::BADF),
        code_of(Errno::BADF),
        code_of(Errno::ISDIR),
        code_of(Errno::SPIPE),
        code_of(Errno::INVAL),
        code_of(Errno::INVAL),
        0,
        0,
        0,
        3,
        100,
        code_of(Errno::FAULT),
        4096,
        10,
        200,
    ];
    assert_eq!(results, expected);
    assert_eq!((done.failed, done.bytes), (7, 100 + 3 + 100 + 4096 + 10 + 200));
    assert_eq!(buffer.range_bytes(0..100), file::bytes(5, 100, 0));
    assert_eq!(buffer.range_bytes(2000..2003), file::bytes(SIZE as u64 - 3, 3, 0));
    assert_eq!(buffer.range_bytes(3000..3200), file::bytes(77, 200, 0));
    assert_eq!(buffer.range_bytes(4096..8192), file::bytes(0, 4096, 0));
    assert_eq!(host[..], file::bytes(50, 100, 0));
    assert!(buffer.range_bytes(1000..2000).iter().all(|&b| b == POISON));
    for end in [out, into] {
        spinio_sys::linux::close(end).unwrap();
    }
}

#[test]
fn short_and_failed_preads_end_ops_early() {
    let subject = TestFile::new();
    let device = emulated("size=64M");
    let kernel = FaultySyscalls::new();
    // Every read through the page cache is short once: the rest is read again.
    kernel.inject_every(Call::Pread(Route::Copy), 2, Effect::Short(1));
    let runtime = Runtime::with_kernel(settings(), kernel);
    let buffer = Buffer::new(device, 1 << 20);
    let mut batch = pieces(&mut Rng::from_env(4), &[subject.fd()], &buffer, 300, 5000);
    runtime.batch(&mut batch).unwrap();
    check(&batch, &buffer);
    assert!(kernel.injected() > 0);
    // An error in the middle of an operation gives the bytes before it, one at its start an errno.
    kernel.clear_faults();
    kernel.inject(Call::Pread(Route::Copy), 1, 1, Effect::Fail(Errno::IO));
    kernel.inject(Call::Pread(Route::Copy), 1, 1, Effect::Short(1));
    kernel.inject(Call::Pread(Route::Copy), 1, 1, Effect::Fail(Errno::IO));
    let base = buffer.addr().0;
    let mut two = [0, 1].map(|i| ReadOp {
        fd: subject.fd(),
        offset: 0,
        len: 1000,
        address: base + i * 1000,
        ..ReadOp::default()
    });
    let done = runtime.batch(&mut two).unwrap();
    assert_eq!((two[0].result, two[1].result, done.failed), (-5, 500, 1));
}

#[test]
fn batch_succeeds_despite_engine_faults() {
    let subject = TestFile::new();
    let inner = emulated("size=64M");
    let mut rng = Rng::from_env(5);
    type Fault<'a> = &'a dyn Fn(&FaultyDevice, &FaultySyscalls);
    let faults: [(&str, Fault<'_>); 8] = [
        ("no kernel to gather with", &|d, _| {
            d.inject(Operation::LoadGatherKernel, 1, u64::MAX, ErrorKind::Unsupported)
        }),
        ("the first launch fails", &|d, _| d.inject(Operation::Gather, 1, 1, ErrorKind::Driver)),
        ("every launch fails", &|d, _| d.inject(Operation::Gather, 1, u64::MAX, ErrorKind::Driver)),
        ("pinned memory is refused", &|d, _| d.inject(Operation::Staging, 1, u64::MAX, ErrorKind::NoMemory)),
        ("there is no ring", &|_, k| k.inject_always(Call::NewIoUring, Effect::Fail(Errno::NOSYS))),
        ("storage fails", &|_, k| k.inject_always(Call::Pread(Route::Direct), Effect::Fail(Errno::IO))),
        ("storage fails now and then", &|_, k| k.inject_every(Call::Pread(Route::Direct), 3, Effect::Fail(Errno::IO))),
        ("storage stops half-way", &|_, k| k.inject_every(Call::Pread(Route::Direct), 2, Effect::Short(512))),
    ];
    for (what, fault) in faults {
        for evicted in [false, true] {
            let (device, kernel) = (FaultyDevice::wrap(inner), FaultySyscalls::new());
            fault(device, kernel);
            let runtime = Runtime::with_kernel(settings(), kernel);
            let buffer = Buffer::new(inner, 1 << 20);
            file::randomize_residency(&subject.path, &subject.file, &mut rng);
            if evicted {
                file::evict(&subject.file);
            }
            let mut batch = pieces(&mut rng, &[subject.fd()], &buffer, 300, 5000);
            let done = run_through(device, &runtime, &buffer, &mut batch, what);
            assert_eq!(done.failed, 0, "{what}");
            check(&batch, &buffer);
            drop(runtime);
            assert_all_released(inner, 1);
        }
    }
    with_deadline("the shadow descriptors are closed", || {
        while leak_check::descriptors_of(&subject.path) > 1 {
            std::thread::yield_now();
        }
    });
}

#[test]
fn undeliverable_ops_report_errors() {
    let subject = TestFile::new();
    let inner = emulated("size=64M");
    for operation in [Operation::Synchronize, Operation::AcquireStream, Operation::Fence, Operation::CopyIn] {
        let device = FaultyDevice::wrap(inner);
        device.inject(Operation::LoadGatherKernel, 1, u64::MAX, ErrorKind::Unsupported);
        device.inject(operation, 1, u64::MAX, ErrorKind::Driver);
        let runtime = Runtime::new(settings());
        let buffer = Buffer::new(inner, 1 << 20);
        let mut batch = pieces(&mut Rng::from_env(6), &[subject.fd()], &buffer, 50, 5000);
        run_failing(device, &runtime, &buffer, &mut batch, &format!("{operation:?}"));
        assert!(batch.iter().all(|p| p.result == -i64::from(Errno::IO.raw_os_error())), "{operation:?}");
        drop(runtime);
        assert_all_released(inner, 1);
    }
}
