//! A request is cancelled when its thread's poll returns true: it ends early with the count of bytes that have arrived,
//! or with EINTR if there are none. Later requests are not affected.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use spinio_batch::{Batches, ReadOp};
use spinio_device::emulated::POISON;
use spinio_io::{CancelPoll, Runtime, Settings, install_cancel_poll};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::mount_fixture::{self, MountFixture};
use spinio_testkit::{Buffer, Call, Effect, FaultySyscalls, eventually, file, with_deadline};

const SIZE: usize = (80 << 20) + 5000;

fn settings() -> Settings {
    Settings { bounce_limit: 64 << 20, ..Settings::default() }
}

thread_local!(static POLLS_LEFT: Cell<u32> = const { Cell::new(0) });

/// The poll returns true at its `nth` call on this thread.
fn cancel_at_poll(nth: u32) -> CancelPoll {
    fn poll() -> bool {
        POLLS_LEFT.set(POLLS_LEFT.get() - 1);
        POLLS_LEFT.get() == 0
    }
    POLLS_LEFT.set(nth);
    install_cancel_poll(poll, Duration::ZERO)
}

fn subject() -> (MountFixture, File) {
    let place = mount_fixture::create("tree").unwrap();
    let file = file::create_filled(&place.file("subject"), SIZE as u64);
    (place, file)
}

/// The result of a cancelled read; fails if bytes that it counts have not arrived.
fn read(runtime: &Runtime, file: &File, buffer: &Buffer, nth: u32) -> Result<usize, Errno> {
    buffer.fill(POISON);
    let got = with_deadline("an interrupted read", || {
        let _asking = cancel_at_poll(nth);
        runtime.read(file.as_raw_fd(), Some(0), buffer.target(0), SIZE)
    });
    let delivered = *got.as_ref().unwrap_or(&0);
    assert!(
        buffer.range_bytes(0..delivered) == file::bytes(0, delivered, 0),
        "{delivered} bytes are counted that have not arrived"
    );
    got.map_err(|e| e.kind.errno())
}

#[test]
fn cancelled_read_is_short() {
    let (_place, file) = subject();
    let device = emulated("size=512M");
    for route in [Route::Copy, Route::Dma, Route::Direct] {
        let runtime = Runtime::new(Settings { routes: vec![route, Route::Copy, Route::Store], ..settings() });
        let buffer = Buffer::new(device, SIZE);
        for question in 1..4 {
            // Workers may be done before the first poll of this thread.
            eventually("a cancelled read is short", || {
                file::evict(&file);
                match read(&runtime, &file, &buffer, question) {
                    Ok(got) => got < SIZE,
                    Err(errno) => errno == Errno::INTR,
                }
            });
        }
        buffer.fill(POISON);
        assert_eq!(runtime.read(file.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
        assert!(buffer.bytes() == file::bytes(0, SIZE, 0), "{route:?}");
    }
}

#[test]
fn cancelled_read_leaves_offset_after_bytes_read() {
    let (_place, file) = subject();
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(emulated("size=256M"), SIZE);
    eventually("a cancelled read is short", || {
        runtime.unreserve(file.as_raw_fd(), &runtime.reserve(file.as_raw_fd(), 0).unwrap(), 0);
        let got = {
            let _asking = cancel_at_poll(2);
            runtime.read(file.as_raw_fd(), None, buffer.target(0), SIZE)
        };
        let delivered = got.unwrap_or(0);
        assert_eq!(runtime.reserve(file.as_raw_fd(), 0).unwrap().start, delivered as u64);
        delivered < SIZE
    });
}

#[test]
fn without_workers_read_ends_at_the_poll() {
    let (_place, file) = subject();
    let kernel = FaultySyscalls::new();
    kernel.inject_always(Call::NewShadowTable, Effect::Fail(Errno::NOMEM));
    let runtime = Runtime::with_kernel(settings(), kernel);
    let buffer = Buffer::new(emulated("size=256M"), SIZE);
    assert_eq!(read(&runtime, &file, &buffer, 1), Ok(2 << 20));
    assert_eq!(read(&runtime, &file, &buffer, 3), Ok(6 << 20));
}

#[test]
fn cancelled_write_ends_after_a_chunk() {
    let place = mount_fixture::create("tree").unwrap();
    let out = file::create(&place.file("out"));
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(emulated("size=256M"), SIZE);
    buffer.write_at(0, &file::bytes(0, SIZE, 3));
    for (question, expected) in [(1, 8 << 20), (2, 40 << 20), (100, SIZE)] {
        out.set_len(0).unwrap();
        let wrote = with_deadline("an interrupted write", || {
            let _asking = cancel_at_poll(question);
            runtime.write(out.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap()
        });
        assert_eq!((wrote, out.metadata().unwrap().len()), (expected, expected as u64));
        let mut seen = vec![0; expected];
        out.read_exact_at(&mut seen, 0).unwrap();
        assert!(seen == file::bytes(0, expected, 3));
    }
}

thread_local!(static NESTED: Cell<Option<&'static dyn Fn()>> = const { Cell::new(None) });

/// While it lives `what` runs at each poll of this thread; the number of polls.
fn run_at_each_poll(what: impl Fn() + 'static) -> (CancelPoll, &'static Cell<u32>) {
    fn poll() -> bool {
        NESTED.get().unwrap()();
        false
    }
    let polls: &'static Cell<u32> = Box::leak(Box::default());
    NESTED.set(Some(Box::leak(Box::new(move || {
        what();
        polls.set(polls.get() + 1);
    }))));
    (install_cancel_poll(poll, Duration::ZERO), polls)
}

/// A poll function may make requests too.
#[test]
fn poll_callback_finds_bounce_buffers() {
    const OTHER: usize = 20 << 20;
    let (place, source) = subject();
    let out = file::create(&place.file("out"));
    let device = emulated("size=512M");
    let (buffer, other) = (Buffer::new(device, SIZE), Buffer::new(device, OTHER));
    let (fd, target) = (source.as_raw_fd(), other.target(0));
    let runtime = |settings| -> &'static Runtime { Box::leak(Box::new(Runtime::new(settings))) };
    let nested_reads = |runtime: &'static Runtime| {
        run_at_each_poll(move || {
            assert_eq!(runtime.read(fd, Some(0), target, 4096).unwrap(), 4096);
            assert_eq!(runtime.read(fd, Some(0), target, OTHER).unwrap(), OTHER);
        })
    };
    // A write has half of the buffers, however few there are.
    let small = runtime(Settings { bounce_limit: 16 << 20, ..settings() });
    buffer.write_at(0, &file::bytes(0, SIZE, 3));
    let wrote = with_deadline("a write and the requests of its polls", || {
        let (_poll, polls) = nested_reads(small);
        (small.write(out.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(), polls.get())
    });
    assert!(wrote.0 == SIZE && wrote.1 > 3, "{wrote:?}");
    let mut seen = vec![0; SIZE];
    out.read_exact_at(&mut seen, 0).unwrap();
    assert!(seen == file::bytes(0, SIZE, 3) && other.bytes() == file::bytes(0, OTHER, 0));
    for route in [Route::Copy, Route::Dma, Route::Direct] {
        let runtime = runtime(Settings { routes: vec![route, Route::Copy, Route::Store], ..settings() });
        // Workers may be done before the first poll of this thread.
        eventually("a read polls", || {
            buffer.fill(POISON);
            other.fill(POISON);
            file::evict(&source);
            let (got, polls) = with_deadline("a read and the requests of its polls", || {
                let (_poll, polls) = nested_reads(runtime);
                (runtime.read(fd, Some(0), buffer.target(0), SIZE).unwrap(), polls.get())
            });
            assert!(got == SIZE && buffer.bytes() == file::bytes(0, SIZE, 0), "{route:?}: {got}");
            assert!(polls == 0 || other.bytes() == file::bytes(0, OTHER, 0), "{route:?}");
            polls > 0
        });
    }
}

#[test]
fn cancelled_batch_leaves_ops_not_started() {
    const PIECE: usize = 8 << 10;
    let (_place, file) = subject();
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(emulated("size=256M"), SIZE);
    let pieces = |range: std::ops::Range<usize>| -> Vec<ReadOp> {
        let piece = |i: usize| ReadOp {
            fd: file.as_raw_fd(),
            offset: (2 * i * PIECE) as u64,
            len: PIECE as u64,
            address: buffer.addr().0 + (i * PIECE) as u64,
            result: 7,
            ..ReadOp::default()
        };
        range.map(piece).collect()
    };
    let mut some = Vec::new();
    // Readers may be done before the first poll of this thread.
    eventually("operations are cancelled", || {
        file::evict(&file);
        some = pieces(0..SIZE / PIECE / 2);
        let _asking = cancel_at_poll(1);
        runtime.batch(&mut some).unwrap().failed > 0
    });
    for (i, piece) in some.iter().enumerate() {
        match piece.result {
            result if result == PIECE as i64 => {
                assert!(
                    buffer.range_bytes(i * PIECE..(i + 1) * PIECE) == file::bytes(piece.offset, PIECE, 0),
                    "operation {i}"
                );
            }
            result => assert_eq!(result, -i64::from(Errno::INTR.raw_os_error()), "operation {i}"),
        }
    }
    let mut some = pieces(0..100);
    assert_eq!(runtime.batch(&mut some).unwrap().failed, 0);
}
