//! Stored cost models and measured reads, through the whole runtime.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

use spinio_io::kernel::Syscalls;
use spinio_io::model::{self, MeasuredRead, ModelKey};
use spinio_io::{Buffer as Like, Runtime, Settings};
use spinio_plan::{Calibration, Cost, Fit, QueueCost, Reason, Route, RouteFit, Segment};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};
use spinio_testkit::buffer::{Buffer, emulated};
use spinio_testkit::file::{bytes, cached_pages, create_filled, evict};

const MIB: u64 = 1 << 20;

/// A directory on the disk that holds the build, so that eviction and O_DIRECT are real.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory")
}

/// An uncached file. `None`, with a message, if the file system does not evict its pages.
fn cold(dir: &Path, len: u64) -> Option<File> {
    let file = create_filled(&dir.join("data"), len);
    evict(&file);
    if cached_pages(&file) == Some(0) {
        return Some(file);
    }
    println!("skipped: this file system does not evict pages");
    None
}

fn settings(directory: Option<&Path>) -> Settings {
    Settings { cost_model_dir: directory.map(|f| f.to_str().expect("text").to_owned()), ..Settings::default() }
}

fn one(route: Route, len: u64) -> Segment {
    Segment { offset: 0, len, route, reason: Reason::BySetting, refused: None }
}

fn explained(runtime: &Runtime, file: &File, buffer: &Buffer) -> (String, f64) {
    let like = Like::of(&buffer.allocation());
    let explanation = runtime.explain(file.as_raw_fd(), 0, 4 * MIB, like).expect("explained");
    (explanation.model, explanation.prediction.total)
}

/// Stores a calibration in the directory that the next runtime reads.
fn store(directory: &Path, key: &ModelKey, costs: impl IntoIterator<Item = (Route, (Cost, QueueCost))>) {
    fn fit<T>(value: T) -> Fit<T> {
        Fit { value, r2: 1.0, error: 0.0 }
    }
    let measured = |(route, (cost, queue))| RouteFit { route, cost: fit(cost), queue: fit(queue) };
    let stored = Calibration {
        storage: key.storage.clone(),
        file_system: key.file_system.clone(),
        device: key.device.clone(),
        measured_at: 1_795_305_600,
        threads: 64,
        routes: costs.into_iter().map(measured).collect(),
        writeback: None,
    };
    std::fs::write(model::file_path(directory.to_str().expect("text"), key), stored.to_text()).expect("written");
}

#[test]
fn stored_model_applies_to_its_device_only() {
    let dir = directory();
    let file = create_filled(&dir.path().join("data"), 8 * MIB);
    let device = emulated("size=64M");
    let buffer = Buffer::new(device, 8 << 20);
    let (default, before) = explained(&Runtime::new(settings(None)), &file, &buffer);
    assert!(default.contains("not calibrated"), "{default}");

    let runtime = Runtime::new(settings(Some(dir.path())));
    let key = runtime.trial(file.as_raw_fd(), buffer.target(0)).expect("a measured read").key();
    assert!(!key.storage.is_empty() && !key.file_system.is_empty(), "{key:?}");
    assert!(key.device.contains("emulated"), "{key:?}");
    let slow = (Cost::new(5e6, 0, 1e9).expect("a cost"), QueueCost::new(5e6, 0.0, 1e9));
    store(dir.path(), &key, [Route::Copy, Route::Dma].map(|route| (route, slow)));
    let (name, after) = explained(&Runtime::new(settings(Some(dir.path()))), &file, &buffer);
    assert_eq!(name, "calibrated 2026-11-22");
    assert!(after > 2.0 * before, "{after} after {before}");

    let other = Buffer::new(emulated("size=32M"), 8 << 20);
    let (name, _) = explained(&Runtime::new(settings(Some(dir.path()))), &file, &other);
    assert!(name.contains("not calibrated"), "{name}");
}

#[test]
fn slow_page_cache_is_bypassed() {
    let dir = directory();
    const LEN: u64 = 8 * MIB;
    const BLOCK: usize = 128 << 10;
    let Some(file) = cold(dir.path(), LEN) else { return };
    let buffer = Buffer::new(emulated("size=64M"), LEN as usize);
    let routes_of = |runtime: &Runtime| {
        for at in (0..LEN).step_by(BLOCK) {
            let got = runtime.read(file.as_raw_fd(), Some(at), buffer.target(at as usize), BLOCK);
            assert_eq!(got.expect("read"), BLOCK);
        }
        assert!(buffer.range_bytes(0..LEN as usize) == bytes(0, LEN as usize, 0), "wrong bytes");
        let lines = runtime.stats().rows;
        let by = |which: &dyn Fn(Route, Reason) -> bool| -> u64 {
            lines.iter().filter(|l| which(l.route, l.reason)).map(|l| l.bytes).sum()
        };
        (by(&|_, reason| reason == Reason::ReadAhead), by(&|route, _| route == Route::Direct))
    };
    let runtime = Runtime::new(settings(Some(dir.path())));
    let key = runtime.trial(file.as_raw_fd(), buffer.target(0)).expect("a measured read").key();
    let cost =
        |fixed, bandwidth| (Cost::new(fixed, 0, bandwidth).expect("a cost"), QueueCost::new(fixed, 0.0, bandwidth));
    // 2.5 ms a request through the page cache and 0.33 ms with O_DIRECT; then the two are swapped.
    let (fast, slow) = (cost(200_000.0, 1e9), cost(0.0, 50e6));
    store(dir.path(), &key, [(Route::Copy, slow), (Route::Direct, fast)]);
    assert_eq!(routes_of(&Runtime::new(settings(Some(dir.path())))), (0, LEN));
    assert_eq!(cached_pages(&file), Some(0), "the bypass left pages in the page cache");
    store(dir.path(), &key, [(Route::Copy, fast), (Route::Direct, slow)]);
    let (through, bypassed) = routes_of(&Runtime::new(settings(Some(dir.path()))));
    assert!(through > 0 && bypassed <= MIB, "{through} bytes by read-ahead, {bypassed} by O_DIRECT");
}

/// Runs a measured read and checks the bytes.
fn run(trial: &MeasuredRead<'_>, buffer: &Buffer, segments: &[Segment]) {
    buffer.fill(0);
    let spent = trial.run(8192, segments).unwrap_or_else(|e| panic!("{segments:?}: {e}"));
    assert!(spent > Duration::ZERO);
    let len = segments.iter().map(|s| s.len).sum::<u64>() as usize;
    assert!(buffer.range_bytes(0..len) == bytes(8192, len, 0), "{segments:?}");
}

#[test]
fn measured_read_follows_schedule() {
    let dir = directory();
    let file = create_filled(&dir.path().join("data"), 8 * MIB);
    let device = emulated("size=64M,bar=16M");
    let buffer = Buffer::host_mapped(device, 4 << 20);
    let runtime = Runtime::new(settings(None));
    let trial = runtime.trial(file.as_raw_fd(), buffer.target(0)).expect("a measured read");
    for route in [Route::Copy, Route::Dma, Route::Store, Route::Direct] {
        if let Err(reason) = trial.allows(route) {
            println!("skipped {route}: {reason}");
            continue;
        }
        for len in [512, 4096, 300_000, 2 * MIB] {
            run(&trial, &buffer, &[one(route, len)]);
        }
        let part = |i: u64| Segment { offset: i * 65536, ..one(route, 65536) };
        run(&trial, &buffer, &[3, 0, 2, 1].map(part));
    }
    assert!(trial.allows(Route::P2p).is_err() && trial.allows(Route::Gather).is_err());
}

/// Storage whose direct reads fail.
struct FailingStorage;

impl Syscalls for FailingStorage {
    unsafe fn pread(&self, route: Route, fd: Fd, buf: *mut u8, len: usize, at: u64, _: u32) -> Result<usize, Errno> {
        if route == Route::Direct {
            return Err(Errno::IO);
        }
        // SAFETY: passed on to the caller.
        unsafe { linux::pread(fd, buf, len, at) }
    }
}

#[test]
fn measured_read_rejects_fallback_and_invalid_schedules() {
    let dir = directory();
    let file = create_filled(&dir.path().join("data"), 4 * MIB);
    let buffer = Buffer::new(emulated("size=64M"), 2 << 20);
    let runtime = Runtime::with_kernel(settings(None), &FailingStorage);
    let trial = runtime.trial(file.as_raw_fd(), buffer.target(0)).expect("a measured read");
    if trial.allows(Route::Direct).is_ok() {
        assert!(trial.run(0, &[one(Route::Direct, MIB)]).is_err(), "a read by another route was accepted");
    }
    let gap = [one(Route::Copy, 4096), Segment { offset: 8192, ..one(Route::Copy, 4096) }];
    for segments in [&[][..], &gap, &[one(Route::Copy, 0)], &[one(Route::Copy, 3 * MIB)], &[one(Route::Copy, u64::MAX)]]
    {
        assert!(trial.run(0, segments).is_err(), "{segments:?}");
    }
    assert!(trial.run(3 * MIB + 1, &[one(Route::Copy, MIB)]).is_err());
    assert!(trial.run(3 * MIB, &[one(Route::Copy, MIB)]).is_ok());
}
