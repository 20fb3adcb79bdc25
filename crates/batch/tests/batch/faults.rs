//! What fails: a piece as its own `pread` would, and nothing else with it.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use spinio_device::ErrorKind;
use spinio_device::emulated::POISON;
use spinio_batch::{Batches, Piece};
use spinio_io::Runtime;
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, Call, Effect, FaultyDevice, FaultyKernel, Operation, Rng, file, leaks, within};

use crate::subject::{SIZE, Subject, assert_nothing_lent, check, in_vain, pieces, settings, through};

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
