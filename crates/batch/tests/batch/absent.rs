//! Operations that need storage: when their reads begin, and what they need.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use spinio_batch::{Batches, ReadOp};
use spinio_device::ErrorKind;
use spinio_io::kernel::{LinuxSyscalls, Syscalls};
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{Fd, Ring};
use spinio_testkit::buffer::emulated;
use spinio_testkit::mount_fixture::{self, MountFixture};
use spinio_testkit::{Buffer, Call, Effect, FaultyDevice, FaultySyscalls, Operation, file};

use crate::subject::{assert_all_released, routes, run_through, settings};

/// Bytes of an operation, and from one to the next: too far to be read together.
const LEN: u64 = 200;
const STEP: u64 = 1_000_003;

/// Counts the reads that storage has completed.
#[derive(Debug, Default)]
struct Counting {
    completed: AtomicU64,
    without_ring: AtomicBool,
}

impl Syscalls for Counting {
    unsafe fn pread(
        &self,
        route: Route,
        fd: Fd,
        buf: *mut u8,
        len: usize,
        offset: u64,
        flags: u32,
    ) -> Result<usize, Errno> {
        // SAFETY: passed on to the caller.
        let read = unsafe { LinuxSyscalls.pread(route, fd, buf, len, offset, flags) };
        self.completed.fetch_add(u64::from(route == Route::Direct), SeqCst);
        read
    }

    fn new_io_uring(&self, entries: u32) -> Result<Ring, Errno> {
        if self.without_ring.load(SeqCst) { Err(Errno::NOSYS) } else { LinuxSyscalls.new_io_uring(entries) }
    }

    fn on_completion(&self, result: Result<usize, Errno>) -> Result<usize, Errno> {
        self.completed.fetch_add(1, SeqCst);
        result
    }
}

fn path(place: &MountFixture) -> PathBuf {
    place.file("scattered")
}

/// A sparse file, with bytes only where operations read.
fn scattered(place: &MountFixture) -> File {
    use std::os::unix::fs::FileExt;
    let scattered = file::create_filled(&path(place), 4096);
    scattered.set_len(8 << 30).unwrap();
    for i in (0..1000).step_by(7) {
        scattered.write_all_at(&file::bytes(i * STEP, LEN as usize, 0), i * STEP).unwrap();
    }
    scattered.sync_all().unwrap();
    file::evict(&scattered);
    scattered
}

#[test]
fn first_reads_complete_while_pool_grows() {
    let inner = emulated("size=64M");
    let place = mount_fixture::create("tree").unwrap();
    let file = scattered(&place);
    if file::cached_pages(&file) != Some(0) {
        return eprintln!("skipped: this file system keeps its pages");
    }
    for without_ring in [false, true] {
        let kernel: &'static Counting = Box::leak(Box::default());
        kernel.without_ring.store(without_ring, SeqCst);
        let device = FaultyDevice::wrap(inner);
        let runtime = Runtime::with_kernel(Settings { bounce_limit: 64 << 20, ..settings() }, kernel);
        let buffer = Buffer::new(inner, 1 << 20);
        let address = |i: u64| buffer.addr().0 + i * 256;
        let piece = |i: u64| ReadOp {
            fd: file.as_raw_fd(),
            offset: i * STEP,
            len: LEN,
            address: address(i),
            ..ReadOp::default()
        };
        let mut batch: Vec<ReadOp> = (0..1000).map(piece).collect();
        // The bounce buffer pool begins with one buffer. The second request for memory gets none until that buffer's
        // reads are complete: the first read must begin before all buffers are available.
        device.stall_until(Operation::Staging, 2, || kernel.completed.load(SeqCst) > 0);
        let done = run_through(device, &runtime, &buffer, &mut batch, "a batch while staging grows");
        assert_eq!((done.failed, done.bytes), (0, 1000 * LEN));
        assert!(device.calls(Operation::Staging) >= 2, "one buffer was enough");
        let seen = buffer.bytes();
        for i in 0..1000u64 {
            let written = file::bytes(i * STEP, LEN as usize, 0);
            let expected = if i % 7 == 0 { written } else { vec![0; LEN as usize] };
            let at = (i * 256) as usize;
            assert!(seen[at..at + LEN as usize] == expected[..], "operation {i}");
        }
        drop((runtime, buffer));
        assert_all_released(inner, 0);
    }
}

/// Of 8192 operations every 32nd is sampled.
#[test]
fn few_cached_ops_do_not_delay_absent_ones() {
    let device = emulated("size=64M");
    let place = mount_fixture::create("tree").unwrap();
    let file = scattered(&place);
    if file::cached_pages(&file) != Some(0) {
        return eprintln!("skipped: this file system keeps its pages");
    }
    let buffer = Buffer::new(device, 2 << 20);
    let piece = |i: u64| {
        let address = buffer.addr().0 + i * LEN;
        ReadOp { fd: file.as_raw_fd(), offset: i * STEP, len: LEN, address, ..ReadOp::default() }
    };
    let both = [Route::Copy, Route::Direct];
    // How many samples are cached, and the routes with cachestat and without.
    for (cached, with_cachestat, without) in
        [(0, &both[1..], &both[1..]), (4, &both[1..], &both[..]), (100, &both[..], &both[..])]
    {
        for fault in [None, Some(Effect::Fail(Errno::NOSYS))] {
            file::evict(&file);
            file::load_pages(&path(&place), (0..cached).map(|i| i * 32 * STEP / 4096));
            let kernel = FaultySyscalls::new();
            if let Some(fault) = fault {
                kernel.inject_always(Call::Cachestat, fault);
            }
            let runtime = Runtime::with_kernel(Settings { batch_threads: 1, ..settings() }, kernel);
            let mut batch: Vec<ReadOp> = (0..8192).map(piece).collect();
            let done = runtime.batch(&mut batch).unwrap();
            assert_eq!((done.failed, done.bytes), (0, 8192 * LEN));
            assert_eq!(
                routes(&runtime),
                if fault.is_none() { with_cachestat } else { without },
                "{cached} cached, {fault:?}"
            );
        }
    }
}

/// Bytes of the operations that readers take.
const READER_LEN: usize = 8192;

/// Copy workers are not used with these system calls; readers are counted, and are slow.
#[derive(Debug, Default)]
struct ReadersOnly {
    readers: AtomicU64,
}

impl Syscalls for ReadersOnly {
    unsafe fn pread(
        &self,
        route: Route,
        fd: Fd,
        buf: *mut u8,
        len: usize,
        offset: u64,
        flags: u32,
    ) -> Result<usize, Errno> {
        if len == READER_LEN {
            std::thread::sleep(Duration::from_micros(50));
        }
        // SAFETY: passed on to the caller.
        unsafe { LinuxSyscalls.pread(route, fd, buf, len, offset, flags) }
    }

    fn same_fd_table(&self, _: u32, _: u32) -> Result<bool, Errno> {
        Ok(false)
    }

    fn dup_from_thread(&self, tid: u32, fd: Fd) -> Result<Fd, Errno> {
        self.readers.fetch_add(1, SeqCst);
        LinuxSyscalls.dup_from_thread(tid, fd)
    }
}

/// While the caller waits for storage no other thread sends the buffers that readers have filled.
#[test]
fn caller_waiting_for_storage_takes_back_reader_buffers() {
    const DENSE: u64 = 64 << 20;
    const LONG: u64 = 256 << 20;
    let inner = emulated("size=256M");
    let place = mount_fixture::create("tree").unwrap();
    let absent = scattered(&place);
    if file::cached_pages(&absent) != Some(0) {
        return eprintln!("skipped: this file system keeps its pages");
    }
    let (dense, long) =
        (file::create_filled(&place.file("dense"), DENSE), file::create_filled(&place.file("long"), LONG));
    // Nothing can be registered for the first operations, and readers must not read them: they are busy with the
    // others.
    let groups = [
        (&dense, 600_000, 64, DENSE / 600_000),
        (&long, 8000, READER_LEN as u64, LONG / 8000),
        (&absent, 500, LEN, STEP),
    ];
    let buffer = Buffer::new(inner, 112 << 20);
    let mut to = buffer.addr().0;
    let mut batch = Vec::new();
    for (file, count, len, step) in groups {
        for i in 0..count {
            batch.push(ReadOp { fd: file.as_raw_fd(), offset: i * step, len, address: to, ..ReadOp::default() });
            to += len;
        }
    }
    let kernel: &'static ReadersOnly = Box::leak(Box::default());
    let device = FaultyDevice::wrap(inner);
    device.inject(Operation::Pin, 1, u64::MAX, ErrorKind::PinRefused);
    device.stall_until(Operation::Pin, 1, || kernel.readers.load(SeqCst) > 0);
    let runtime = Runtime::with_kernel(Settings { bounce_limit: 4 << 20, batch_threads: 4, ..settings() }, kernel);
    let done = run_through(device, &runtime, &buffer, &mut batch, "a batch");
    assert_eq!((done.failed, done.bytes), (0, batch.iter().map(|p| p.len).sum()));
    assert!(
        kernel.readers.load(SeqCst) > 0 && routes(&runtime) == [Route::Copy, Route::Direct],
        "{:?}",
        runtime.stats()
    );
    let (seen, mut at) = (buffer.bytes(), 0);
    for p in &batch {
        let bytes = &seen[at..at + p.len as usize];
        let hole = p.fd == absent.as_raw_fd() && !(p.offset / STEP).is_multiple_of(7);
        let expected = if hole { vec![0; p.len as usize] } else { file::bytes(p.offset, p.len as usize, 0) };
        assert!(bytes == expected, "{p:?}");
        at += p.len as usize;
    }
    drop((runtime, buffer));
    assert_all_released(inner, 0);
}
