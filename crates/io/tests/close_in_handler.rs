//! `close` of a pinned file, as in a signal handler that has interrupted `malloc`: it takes no memory, and waits for no
//! lock with which another thread takes memory.
//!
//! The allocator of this program stands for `malloc`: it counts what a thread takes and returns, and holds another
//! thread at an allocation, as that thread would wait for the arena of the interrupted one.

#![expect(unsafe_code, reason = "an allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Release},
};
use std::time::{Duration, Instant};

use spinio_device::emulated::Emulated;
use spinio_io::{PinError, runtime};
use spinio_sys::linux::Fd;
use spinio_testkit::buffer::emulated;
use spinio_testkit::deadline::TIMEOUT;
use spinio_testkit::{file, wait_exclusive};

struct Malloc;

thread_local! {
    /// Memory that this thread took and returned.
    static CALLS: Cell<u64> = const { Cell::new(0) };
    /// At which of them it is held, from now on; 0: at none.
    static HELD_AT: Cell<u64> = const { Cell::new(0) };
}

/// A thread is held.
static HELD: AtomicBool = AtomicBool::new(false);
/// It may continue.
static CONTINUE: AtomicBool = AtomicBool::new(false);

fn count_call() {
    CALLS.set(CALLS.get() + 1);
    match HELD_AT.get() {
        0 => {}
        1 => {
            HELD_AT.set(0);
            HELD.store(true, Release);
            while !CONTINUE.load(Acquire) {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        left => HELD_AT.set(left - 1),
    }
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Malloc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_call();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count_call();
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static MALLOC: Malloc = Malloc;

/// Both tests use the runtime of the process.
static TURN: Mutex<()> = Mutex::new(());

const SIZE: u64 = 1 << 20;

fn new_file(dir: &tempfile::TempDir, name: &str) -> File {
    let path = dir.path().join(name);
    drop(file::create_filled(&path, SIZE));
    wait_exclusive(&path).unwrap();
    File::open(&path).unwrap()
}

/// Pins, or prints why that cannot be tested here.
fn pin_or_skip(fd: Fd, device: &'static Emulated) -> bool {
    match runtime().pin_file(fd, Some(device)) {
        Ok(_) => true,
        Err(PinError::NoLeases) => {
            eprintln!("skipped: no leases here");
            false
        }
        Err(e) => panic!("{e}"),
    }
}

#[test]
fn close_of_a_pinned_file_takes_and_returns_no_memory() {
    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let device = emulated("size=64M");
    for (name, close) in
        [("one", spinio_io::on_close as fn(Fd)), ("range", |fd| spinio_io::on_close_range(fd as u32, fd as u32))]
    {
        let file = new_file(&dir, name);
        if !pin_or_skip(file.as_raw_fd(), device) {
            return;
        }
        let before = CALLS.get();
        close(file.as_raw_fd());
        assert_eq!(CALLS.get() - before, 0, "{name}");
        assert!(!runtime().is_pinned(file.as_raw_fd()), "{name}");
    }
}

#[test]
fn close_does_not_wait_for_a_thread_that_takes_memory_while_it_pins() {
    let _turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let device = emulated("size=64M");
    let other = new_file(&dir, "other");
    if !pin_or_skip(other.as_raw_fd(), device) {
        return;
    }
    let mut held = 0;
    // Each allocation of the other thread once, until it makes fewer.
    for at in 1.. {
        let file = new_file(&dir, &format!("file {at}"));
        let fd = file.as_raw_fd();
        HELD.store(false, Release);
        CONTINUE.store(false, Release);
        let was_held = std::thread::scope(|scope| {
            let pins = scope.spawn(move || {
                HELD_AT.set(at);
                // It fails where the file is closed first.
                let _ = runtime().pin_file(fd, Some(device));
                HELD_AT.set(0);
            });
            while !HELD.load(Acquire) && !pins.is_finished() {
                std::thread::yield_now();
            }
            if !HELD.load(Acquire) {
                return false;
            }
            let closes = scope.spawn(move || spinio_io::on_close_range(fd as u32, fd as u32));
            let begun = Instant::now();
            while !closes.is_finished() && begun.elapsed() < TIMEOUT {
                std::thread::sleep(Duration::from_millis(1));
            }
            let closed = closes.is_finished();
            CONTINUE.store(true, Release);
            assert!(closed, "close waits for allocation {at} of a thread that pins");
            true
        });
        spinio_io::on_close(fd);
        if !was_held {
            break;
        }
        held += 1;
    }
    assert!(held > 20, "{held}");
}
