//! The test file of batches, and the assertions on a batch that ran.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use spinio_batch::{BatchResult, Batches, ReadOp};
use spinio_device::emulated::{Emulated, POISON, ResourceCounts};
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_testkit::deadline::TIMEOUT;
use spinio_testkit::mount_fixture::{self, MountFixture};
use spinio_testkit::{Buffer, FaultyDevice, Rng, file, with_deadline};

pub(crate) const SIZE: usize = (2 << 20) + 777;

pub(crate) struct TestFile {
    _place: MountFixture,
    pub(crate) path: PathBuf,
    pub(crate) file: File,
}

impl TestFile {
    pub(crate) fn on(kind: &'static str) -> Result<TestFile, String> {
        let place = mount_fixture::create(kind)?;
        let path = place.file("subject");
        let file = file::create_filled(&path, SIZE as u64);
        file.sync_all().unwrap();
        Ok(TestFile { _place: place, path, file })
    }

    pub(crate) fn new() -> TestFile {
        TestFile::on("tree").unwrap()
    }

    pub(crate) fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }
}

pub(crate) fn settings() -> Settings {
    Settings { bounce_limit: 8 << 20, kernel_cache_dir: None, ..Settings::default() }
}

/// Operations of random offset and length, some past the end; each has its own range of the buffer, with a few unused
/// bytes between them.
pub(crate) fn pieces(rng: &mut Rng, fds: &[i32], buffer: &Buffer, count: usize, longest: u64) -> Vec<ReadOp> {
    let mut to = 0;
    let mut all = Vec::new();
    for _ in 0..count {
        let len = match rng.below(4) {
            0 => 512,
            1 => 4096,
            _ => rng.near_page_edge(longest),
        };
        let mut offset = rng.near_page_edge(SIZE as u64 + 9000);
        if rng.chance(40) {
            offset = offset / 512 * 512;
        }
        if rng.chance(10) && !all.is_empty() {
            let earlier: &ReadOp = rng.choose(&all);
            offset = earlier.offset;
        }
        to += rng.below(3) * 16 + u64::from(rng.chance(30));
        if to + len > buffer.len() as u64 {
            break;
        }
        let address = buffer.addr().0 + to;
        all.push(ReadOp { fd: *rng.choose(fds), offset, len, address, ..ReadOp::default() });
        to += len;
    }
    all
}

/// Reads operations through a device that wraps the buffer's.
pub(crate) fn run_through(
    device: &'static FaultyDevice,
    runtime: &Runtime,
    buffer: &Buffer,
    pieces: &mut [ReadOp],
    what: &str,
) -> BatchResult {
    let known = [buffer.target_via(device, 0).allocation];
    with_deadline(what, || runtime.batch_with_allocations(pieces, &known)).unwrap()
}

/// As [`run_through`], where nothing can arrive: each operation with bytes is reported as failed. The device has no
/// faults afterwards.
pub(crate) fn run_failing(
    device: &'static FaultyDevice,
    runtime: &Runtime,
    buffer: &Buffer,
    pieces: &mut Vec<ReadOp>,
    what: &str,
) {
    pieces.retain(|p| p.offset < SIZE as u64 && p.len > 0);
    let done = run_through(device, runtime, buffer, pieces, what);
    assert_eq!((done.failed, done.bytes), (pieces.len(), 0), "{what}");
    device.clear_faults();
}

/// Fails unless each operation has the bytes of the file, and every other byte of the buffer untouched.
pub(crate) fn check(pieces: &[ReadOp], buffer: &Buffer) {
    let mut expected = vec![POISON; buffer.len()];
    for (n, p) in pieces.iter().enumerate() {
        let within = p.len.min((SIZE as u64).saturating_sub(p.offset)) as usize;
        assert_eq!(p.result, within as i64, "operation {n}: {p:?}");
        let at = (p.address - buffer.addr().0) as usize;
        expected[at..at + within].copy_from_slice(&file::bytes(p.offset, within, 0));
    }
    let seen = buffer.bytes();
    if let Some(at) = seen.iter().zip(&expected).position(|(a, b)| a != b) {
        let whose = pieces.iter().position(|p| (p.address..p.address + p.len).contains(&(buffer.addr().0 + at as u64)));
        panic!("byte {at} is {:#x}, not {:#x}: operation {whose:?}", seen[at], expected[at]);
    }
}

pub(crate) fn routes(runtime: &Runtime) -> Vec<Route> {
    let mut routes: Vec<_> = runtime.stats().rows.iter().filter(|l| l.bytes > 0).map(|l| l.route).collect();
    routes.sort();
    routes.dedup();
    routes
}

/// Waits until a dropped runtime has released everything to the device: a worker that started too late for its last
/// batch may be the last to release.
pub(crate) fn assert_all_released(device: &Emulated, buffers: usize) {
    let nothing = ResourceCounts { allocations: buffers, ..ResourceCounts::default() };
    let begun = std::time::Instant::now();
    while device.resources_in_use() != nothing && begun.elapsed() < TIMEOUT {
        std::thread::yield_now();
    }
    assert_eq!(device.resources_in_use(), nothing);
}
