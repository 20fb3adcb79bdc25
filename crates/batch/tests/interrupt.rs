//! A request that its thread is asked about ends early when the answer is to stop: with a count of bytes that are there,
//! or EINTR if there are none; and what comes after it is as if it had never been.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use spinio_device::emulated::POISON;
use spinio_batch::{Batches, Piece};
use spinio_io::{Interruptible, Runtime, Settings, interruptible};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_testkit::buffer::emulated;
use spinio_testkit::place::{self, Place};
use spinio_testkit::{Buffer, Call, Effect, FaultyKernel, file, in_a_while, within};

const SIZE: usize = (80 << 20) + 5000;

fn settings() -> Settings {
    Settings { staging: 64 << 20, ..Settings::default() }
}

thread_local!(static LEFT: Cell<u32> = const { Cell::new(0) });

/// The answer is to stop when this thread has been asked so often.
fn stop_at(question: u32) -> Interruptible {
    fn ask() -> bool {
        LEFT.set(LEFT.get() - 1);
        LEFT.get() == 0
    }
    LEFT.set(question);
    interruptible(ask, Duration::ZERO)
}

fn subject() -> (Place, File) {
    let place = place::on("tree").unwrap();
    let file = file::written(&place.file("subject"), SIZE as u64);
    (place, file)
}

/// What a read that is stopped said; fails if what it counts is not there.
fn read(runtime: &Runtime, file: &File, buffer: &Buffer, question: u32) -> Result<usize, Errno> {
    buffer.fill(POISON);
    let got = within("an interrupted read", || {
        let _asking = stop_at(question);
        runtime.read(file.as_raw_fd(), Some(0), buffer.target(0), SIZE)
    });
    let there = *got.as_ref().unwrap_or(&0);
    assert!(buffer.part(0..there) == file::bytes(0, there, 0), "{there} bytes are counted that are not there");
    got.map_err(|e| e.kind.errno())
}

#[test]
fn a_read_is_cut_short() {
    let (_place, file) = subject();
    let device = emulated("size=512M");
    for route in [Route::Copy, Route::Dma, Route::Direct] {
        let runtime = Runtime::new(Settings { routes: vec![route, Route::Copy, Route::Store], ..settings() });
        let buffer = Buffer::new(device, SIZE);
        for question in 1..4 {
            // Helpers may be done before this thread is asked for the first time.
            in_a_while("a read that is stopped is cut short", || {
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
fn at_the_descriptors_own_offset_what_was_not_read_is_left() {
    let (_place, file) = subject();
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(emulated("size=256M"), SIZE);
    in_a_while("a read that is stopped is cut short", || {
        runtime.unreserve(file.as_raw_fd(), runtime.reserve(file.as_raw_fd(), 0).unwrap());
        let got = {
            let _asking = stop_at(2);
            runtime.read(file.as_raw_fd(), None, buffer.target(0), SIZE)
        };
        let there = got.unwrap_or(0);
        assert_eq!(runtime.reserve(file.as_raw_fd(), 0).unwrap(), there as u64);
        there < SIZE
    });
}

#[test]
fn without_helpers_a_read_ends_where_it_is_asked() {
    let (_place, file) = subject();
    let kernel = FaultyKernel::new();
    kernel.always(Call::Private, Effect::Fail(Errno::NOMEM));
    let runtime = Runtime::with_kernel(settings(), kernel);
    let buffer = Buffer::new(emulated("size=256M"), SIZE);
    assert_eq!(read(&runtime, &file, &buffer, 1), Ok(2 << 20));
    assert_eq!(read(&runtime, &file, &buffer, 3), Ok(6 << 20));
}

#[test]
fn a_write_ends_behind_a_portion() {
    let place = place::on("tree").unwrap();
    let out = file::create(&place.file("out"));
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(emulated("size=256M"), SIZE);
    buffer.put(0, &file::bytes(0, SIZE, 3));
    for (question, want) in [(1, 8 << 20), (2, 40 << 20), (100, SIZE)] {
        out.set_len(0).unwrap();
        let wrote = within("an interrupted write", || {
            let _asking = stop_at(question);
            runtime.write(out.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap()
        });
        assert_eq!((wrote, out.metadata().unwrap().len()), (want, want as u64));
        let mut there = vec![0; want];
        out.read_exact_at(&mut there, 0).unwrap();
        assert!(there == file::bytes(0, want, 3));
    }
}

thread_local!(static NESTED: Cell<Option<&'static dyn Fn()>> = const { Cell::new(None) });

/// While it lives this is done whenever this thread is asked; how often it was.
fn meanwhile(what: impl Fn() + 'static) -> (Interruptible, &'static Cell<u32>) {
    fn ask() -> bool {
        NESTED.get().unwrap()();
        false
    }
    let asked: &'static Cell<u32> = Box::leak(Box::default());
    NESTED.set(Some(Box::leak(Box::new(move || {
        what();
        asked.set(asked.get() + 1);
    }))));
    (interruptible(ask, Duration::ZERO), asked)
}

/// A signal's handler may move something too.
#[test]
fn who_is_asked_finds_staging_memory() {
    const OTHER: usize = 20 << 20;
    let (place, source) = subject();
    let out = file::create(&place.file("out"));
    let device = emulated("size=512M");
    let (buffer, other) = (Buffer::new(device, SIZE), Buffer::new(device, OTHER));
    let (fd, target) = (source.as_raw_fd(), other.target(0));
    let runtime = |settings| -> &'static Runtime { Box::leak(Box::new(Runtime::new(settings))) };
    let read_others = |runtime: &'static Runtime| {
        meanwhile(move || {
            assert_eq!(runtime.read(fd, Some(0), target, 4096).unwrap(), 4096);
            assert_eq!(runtime.read(fd, Some(0), target, OTHER).unwrap(), OTHER);
        })
    };
    // A write has half of what there is, however little that is.
    let small = runtime(Settings { staging: 16 << 20, ..settings() });
    buffer.put(0, &file::bytes(0, SIZE, 3));
    let wrote = within("a write and what comes into it", || {
        let (_asking, asked) = read_others(small);
        (small.write(out.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(), asked.get())
    });
    assert!(wrote.0 == SIZE && wrote.1 > 3, "{wrote:?}");
    let mut there = vec![0; SIZE];
    out.read_exact_at(&mut there, 0).unwrap();
    assert!(there == file::bytes(0, SIZE, 3) && other.bytes() == file::bytes(0, OTHER, 0));
    for route in [Route::Copy, Route::Dma, Route::Direct] {
        let runtime = runtime(Settings { routes: vec![route, Route::Copy, Route::Store], ..settings() });
        buffer.fill(POISON);
        other.fill(POISON);
        file::evict(&source);
        let got = within("a read and what comes into it", || {
            let (_asking, asked) = read_others(runtime);
            (runtime.read(fd, Some(0), buffer.target(0), SIZE).unwrap(), asked.get())
        });
        assert!(got.0 == SIZE && got.1 > 0, "{route:?}: {got:?}");
        assert!(buffer.bytes() == file::bytes(0, SIZE, 0) && other.bytes() == file::bytes(0, OTHER, 0), "{route:?}");
    }
}

#[test]
fn a_batch_leaves_out_what_it_has_not_begun() {
    const PIECE: usize = 8 << 10;
    let (_place, file) = subject();
    let runtime = Runtime::new(settings());
    let buffer = Buffer::new(emulated("size=256M"), SIZE);
    let pieces = |range: std::ops::Range<usize>| -> Vec<Piece> {
        let piece = |i: usize| Piece {
            fd: file.as_raw_fd(),
            offset: (2 * i * PIECE) as u64,
            len: PIECE as u64,
            address: buffer.addr().0 + (i * PIECE) as u64,
            result: 7,
            ..Piece::default()
        };
        range.map(piece).collect()
    };
    file::evict(&file);
    let mut some = pieces(0..SIZE / PIECE / 2);
    let failed = {
        let _asking = stop_at(1);
        runtime.batch(&mut some).unwrap().failed
    };
    assert!(failed > 0, "nothing was left out");
    for (i, piece) in some.iter().enumerate() {
        match piece.result {
            result if result == PIECE as i64 => {
                assert!(buffer.part(i * PIECE..(i + 1) * PIECE) == file::bytes(piece.offset, PIECE, 0), "piece {i}");
            }
            result => assert_eq!(result, -i64::from(Errno::INTR.raw_os_error()), "piece {i}"),
        }
    }
    let mut some = pieces(0..100);
    assert_eq!(runtime.batch(&mut some).unwrap().failed, 0);
}
