//! A read sees every write that returned before it began, also when it reads page-cache pages by DMA.
//!
//! Pinned pages do not belong to the file any more once a process writes the file with O_DIRECT, truncates it or
//! punches a hole: reusing such a pin would return old bytes. These tests run a writer of each kind between reads and
//! concurrently with them, on every file system. Each byte identifies the version that it belongs to.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use spinio_device::emulated::Emulated;
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::linux;
use spinio_testkit::buffer::emulated;
use spinio_testkit::mount_fixture::{self, MountFixture};
use spinio_testkit::oracle::Versions;
use spinio_testkit::{Buffer, Rng, as_user, file, with_deadline};

/// Not a whole number of pages, so that the last one is part of the file and of a pin.
const SIZE: usize = (1 << 20) + 4096 + 777;
/// The part that is written with O_DIRECT: the whole pages.
const ALIGNED: usize = (1 << 20) + 4096;

fn runtimes() -> [(&'static str, Runtime); 3] {
    let routes = |routes: &[Route]| Settings { routes: routes.to_vec(), dma_min: 4096, ..Settings::default() };
    [
        ("dma", Runtime::new(routes(&[Route::Copy, Route::Store, Route::Dma]))),
        ("direct", Runtime::new(routes(&[Route::Copy, Route::Store, Route::Direct]))),
        ("all", Runtime::new(routes(&Route::ALL))),
    ]
}

/// Ways to overwrite the whole file with a version. Each returns when the bytes are in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    Buffered,
    Direct,
    Mapped,
    Truncater,
    Puncher,
}

const WRITERS: [Writer; 5] = [Writer::Buffered, Writer::Direct, Writer::Mapped, Writer::Truncater, Writer::Puncher];

/// A file, and the descriptors that its writers need.
struct TestFile {
    path: std::path::PathBuf,
    file: File,
    direct: Option<File>,
}

/// Memory for O_DIRECT.
#[repr(C, align(4096))]
struct Aligned([u8; ALIGNED]);

impl TestFile {
    fn new(place: &MountFixture) -> TestFile {
        let path = place.file("subject");
        let file = file::create_filled(&path, SIZE as u64);
        let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(&path).ok();
        TestFile { path, file, direct }
    }

    /// Writes a version; false if this file system does not support this kind of writer.
    fn write(&self, writer: Writer, version: u8) -> bool {
        let all = || self.file.write_all_at(&file::bytes(0, SIZE, version), 0).unwrap();
        match writer {
            Writer::Buffered => all(),
            Writer::Direct => {
                let Some(direct) = &self.direct else { return false };
                let mut block = Box::new(Aligned([0; ALIGNED]));
                block.0.copy_from_slice(&file::bytes(0, ALIGNED, version));
                if direct.write_all_at(&block.0, 0).is_err() {
                    return false;
                }
                self.file.write_all_at(&file::bytes(ALIGNED as u64, SIZE - ALIGNED, version), ALIGNED as u64).unwrap();
            }
            Writer::Mapped => {
                let (read_write, shared) = (3, 1);
                let fd = self.file.as_raw_fd();
                let bytes = file::bytes(0, SIZE, version);
                // SAFETY: a fresh mapping of the whole file, stored to and unmapped here; no thread truncates
                // meanwhile.
                unsafe {
                    let at = linux::mmap(core::ptr::null_mut(), SIZE, read_write, shared, fd, 0).unwrap();
                    core::ptr::copy_nonoverlapping(bytes.as_ptr(), at, SIZE);
                    linux::munmap(at, SIZE).unwrap();
                }
            }
            Writer::Truncater => {
                self.file.set_len(0).unwrap();
                all();
            }
            Writer::Puncher => {
                if file::punch_hole(&self.file, 0, SIZE as u64).is_err() {
                    return false;
                }
                all();
            }
        }
        true
    }
}

/// Reads and returns the bytes.
fn read(device: &'static Emulated, runtime: &Runtime, file: &File, from: usize, len: usize) -> Vec<u8> {
    let buffer = Buffer::new(device, len.max(1));
    let got = runtime.read(file.as_raw_fd(), Some(from as u64), buffer.target(0), len).unwrap();
    buffer.range_bytes(0..got)
}

fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    if one.len() != other.len() {
        return Some(one.len().min(other.len()));
    }
    one.iter().zip(other).position(|(a, b)| a != b)
}

#[test]
fn read_after_write_sees_it() {
    let device = emulated("size=64M");
    mount_fixture::for_each_kind(|place| {
        let subject = TestFile::new(place);
        for (name, runtime) in &runtimes() {
            for writer in WRITERS {
                for version in 1..=4 {
                    // Cached, so that it can be read by DMA; read once, so that pins exist that could be stale.
                    file::load_pages(&subject.path, 0..SIZE.div_ceil(4096) as u64);
                    read(device, runtime, &subject.file, 0, SIZE);
                    if !subject.write(writer, version) {
                        println!("skipped on {}: {writer:?} is not supported", place.kind);
                        break;
                    }
                    let seen = read(device, runtime, &subject.file, 0, SIZE);
                    let wrong = first_difference(&seen, &file::bytes(0, SIZE, version));
                    assert_eq!(wrong, None, "{}: {writer:?}, {name}, version {version}: first wrong byte", place.kind);
                }
            }
        }
    });
}

#[test]
fn read_after_truncation_or_hole_sees_it() {
    let device = emulated("size=64M");
    mount_fixture::for_each_kind(|place| {
        for (name, runtime) in &runtimes() {
            let what = format!("{}, {name}", place.kind);
            let subject = TestFile::new(place);
            let file = &subject.file;
            let again = || read(device, runtime, file, 0, SIZE);
            let original = file::bytes(0, SIZE, 0);
            file::load_pages(&subject.path, 0..SIZE.div_ceil(4096) as u64);
            assert_eq!(first_difference(&again(), &original), None, "{what}");

            let mut expected = original.clone();
            if file::punch_hole(file, 100_000, 500_000).is_ok() {
                expected[100_000..600_000].fill(0);
                assert_eq!(first_difference(&again(), &expected), None, "{what}: after a hole");
            }
            for len in [900_001, 70_000, 5] {
                file.set_len(len as u64).unwrap();
                assert_eq!(first_difference(&again(), &expected[..len]), None, "{what}: truncated to {len}");
            }
            file.set_len(SIZE as u64).unwrap();
            expected[5..].fill(0);
            assert_eq!(first_difference(&again(), &expected), None, "{what}: extended again");
        }
    });
}

/// One writer and two readers run concurrently with a thread that drops pages.
fn check_concurrent_reads(place: &MountFixture, writer: Writer, name: &str, runtime: &Runtime, rounds: u64) {
    let device = emulated("size=16M");
    let subject = TestFile::new(place);
    if !subject.write(writer, 0) {
        return println!("skipped on {}: {writer:?} is not supported", place.kind);
    }
    let (versions, stop) = (Versions::new(), AtomicBool::new(false));
    let (subject, versions, over) = (&subject, &versions, &stop);
    std::thread::scope(|scope| {
        for seed in 0..2 {
            scope.spawn(move || {
                let mut rng = Rng::from_env(seed);
                let buffer = Buffer::new(device, SIZE);
                loop {
                    let last = over.load(SeqCst);
                    let (from, len) = match rng.below(3) {
                        0 => (0, SIZE),
                        _ => (rng.near_page_edge(SIZE as u64) as usize, 1 + rng.near_page_edge(SIZE as u64) as usize),
                    };
                    let len = len.min(SIZE - from);
                    let (got, window) = versions.read(|| {
                        let target = buffer.target(0);
                        let got = runtime.read(subject.file.as_raw_fd(), Some(from as u64), target, len).unwrap();
                        // A small read may return before its bytes reach the device, but not before it has taken them
                        // from the file.
                        got
                    });
                    let what = format!("{}, {writer:?}, {name}: {len} bytes at {from}, {window:?}", place.kind);
                    // While the file is truncated, or has holes, a read may be short or see zeros.
                    let no_writes = window.oldest == window.newest;
                    let cuts = writer == Writer::Truncater && !no_writes;
                    let zeros = matches!(writer, Writer::Truncater | Writer::Puncher) && !no_writes;
                    assert!(got == len || cuts, "{what}: only {got} bytes");
                    let wrong = window.first_wrong(from as u64, &buffer.range_bytes(0..got), |_, b| zeros && b == 0);
                    assert_eq!(wrong, None, "{what}: first wrong byte");
                    if last {
                        return;
                    }
                }
            });
        }
        scope.spawn(move || {
            let file = File::open(&subject.path).unwrap();
            while !over.load(SeqCst) {
                file::advise(&file, 0, 0, libc::POSIX_FADV_DONTNEED);
                file::load_pages(&subject.path, (0..SIZE as u64 / 4096).step_by(7));
                std::thread::yield_now();
            }
        });
        scope.spawn(move || {
            // Also when a write panics: the readers would not end otherwise.
            struct StopOnDrop<'a>(&'a AtomicBool);
            impl Drop for StopOnDrop<'_> {
                fn drop(&mut self) {
                    self.0.store(true, SeqCst);
                }
            }
            let _over = StopOnDrop(over);
            for _ in 0..rounds {
                versions.write(|version| assert!(subject.write(writer, version)));
            }
        });
    });
}

#[test]
fn read_concurrent_with_writer_sees_what_host_read_could() {
    for kind in ["tree", "tmpfs", "xfs"] {
        let place = match mount_fixture::create(kind) {
            Ok(place) => place,
            Err(why) => {
                println!("skipped on {kind}: {why}");
                continue;
            }
        };
        for (name, runtime) in &runtimes() {
            for writer in WRITERS {
                let what = format!("{kind}, {writer:?}, {name}");
                with_deadline(&what, || check_concurrent_reads(&place, writer, name, runtime, 12));
            }
        }
    }
}

#[test]
fn dma_route_is_used() {
    let device = emulated("size=16M");
    let place = mount_fixture::create("tree").unwrap();
    let subject = TestFile::new(&place);
    let runtime = &runtimes()[0].1;
    // Pinning fails from time to time if this user has too many pipes.
    for _ in 0..100 {
        file::load_pages(&subject.path, 0..SIZE.div_ceil(4096) as u64);
        read(device, runtime, &subject.file, 0, SIZE);
        if runtime.stats().rows.iter().any(|l| l.route == Route::Dma && l.bytes > 0) {
            return;
        }
    }
    panic!("no bytes were read by DMA, so that these tests prove nothing: {:?}", runtime.stats());
}

#[test]
fn again_as_ordinary_user() {
    as_user::rerun_as_nobody("again_as_ordinary_user");
}
