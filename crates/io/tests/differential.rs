//! Compares a read into device memory with the same read into host memory.
//!
//! Random files (sizes, holes, unwritten extents), residencies, offsets and lengths, on every file system that this
//! machine and user can have, with several settings: the bytes, the count, the errno and the file offset afterwards are
//! the same, and nothing is written past the reported count.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};

use spinio_device::emulated::{Emulated, POISON};
use spinio_io::settings::Ordering;
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, Rng, as_user, file, mount_fixture, with_deadline};

const MAX_LEN: u64 = 3 << 20;

/// Runtimes with different settings.
fn runtimes() -> Vec<Runtime> {
    let only = |routes: &[Route]| Settings { routes: routes.to_vec(), ..Settings::default() };
    let all = vec![
        Settings::default(),
        Settings { dma_min: 64 << 10, ..Settings::default() },
        Settings { dma_min: 0, ordering: Ordering::Strict, bounce_limit: 2 << 20, threads: 7, ..Settings::default() },
        only(&[Route::Copy, Route::Store]),
        only(&[Route::Copy, Route::Store, Route::Direct]),
        Settings { dma_min: 4096, ..only(&[Route::Copy, Route::Store, Route::Dma]) },
        Settings { threads: 1, ..Settings::default() },
    ];
    all.into_iter().map(Runtime::new).collect()
}

/// The result of a call, and the descriptor's offset afterwards.
type CallResult = (Result<usize, Errno>, Option<u64>);

fn seek(fd: Fd, to: u64) {
    let _ = linux::lseek(fd, to as i64, libc::SEEK_SET);
}

fn file_offset(fd: Fd) -> Option<u64> {
    linux::lseek(fd, 0, libc::SEEK_CUR).ok()
}

/// One read. `own_offset`: at the descriptor's own offset, which is set to `from` first.
#[derive(Clone, Copy, Debug)]
struct Call {
    fd: Fd,
    from: u64,
    own_offset: bool,
    len: usize,
}

/// Reads into the device and into host memory; fails unless the results agree.
fn compare(device: &'static Emulated, runtime: &Runtime, call: Call, rng: &mut Rng, what: &str) {
    let Call { fd, from, own_offset: own, len } = call;
    let flags = linux::status_flags(fd).unwrap_or(0);
    // The memory a device read goes through is always aligned enough for O_DIRECT.
    let skew = if flags & libc::O_DIRECT != 0 || rng.chance(50) { 0 } else { rng.below(5000) as usize };
    let slack = rng.below(5000) as usize;
    let host_mapped = rng.chance(20);
    let size = (skew + len + slack).max(1);
    let buffer = if host_mapped { Buffer::host_mapped(device, size) } else { Buffer::new(device, size) };
    let at = (!own).then_some(from);

    seek(fd, if own { from } else { 7 });
    let ours: CallResult =
        (runtime.read(fd, at, buffer.target(skew), len).map_err(|e| e.kind.errno()), file_offset(fd));

    seek(fd, if own { from } else { 7 });
    // With the alignment of the device memory.
    let mut host = vec![POISON; skew + len + 2 * linux::PAGE];
    let start = host.as_mut_ptr().align_offset(linux::PAGE) + skew % linux::PAGE;
    let at_host = host[start..].as_mut_ptr();
    // SAFETY: `len` bytes follow.
    let got = unsafe {
        match at {
            Some(at) => linux::pread(fd, at_host, len, at),
            None => linux::read(fd, at_host, len),
        }
    };
    let theirs: CallResult = (got, file_offset(fd));

    let context = format!("{what}: {len} bytes at {from}, own offset: {own}, host-mapped: {host_mapped}, skew {skew}");
    assert_eq!(ours, theirs, "{context}");
    let got = got.unwrap_or(0);
    let device_bytes = buffer.bytes();
    let wrong = device_bytes[skew..skew + got].iter().zip(&host[start..start + got]).position(|(a, b)| a != b);
    assert_eq!(wrong, None, "{context}: the first wrong byte");
    let around = device_bytes[..skew].iter().chain(&device_bytes[skew + got..]);
    let written = around.filter(|&&b| b != POISON).count();
    assert_eq!(written, 0, "{context}: bytes outside the {got} reported were written");
}

fn length(rng: &mut Rng) -> usize {
    match rng.below(8) {
        0 => rng.below(3) as usize,
        1 => rng.near_page_edge(64 << 10) as usize,
        2 => (64 << 10) + rng.below(3) as usize - 1,
        3 => MAX_LEN as usize + 5000,
        _ => rng.near_page_edge(MAX_LEN) as usize,
    }
}

fn random_files(place: &mount_fixture::MountFixture, files: u64, reads: u64) {
    // Slow, so that a copy that is not waited for is not complete by chance.
    let device = emulated("size=256M,bar=32M,p2p=1,latency_us=300");
    let runtimes = runtimes();
    let mut rng = Rng::from_env(place.kind.len() as u64 * 1000);
    for n in 0..files {
        let path = place.file(&format!("file{}", n % 4));
        let size = if rng.chance(20) { rng.below(9000) } else { rng.near_page_edge(MAX_LEN) };
        let file = if rng.chance(30) {
            file::create_filled(&path, size)
        } else {
            file::create_random_layout(&path, size, &mut rng)
        };
        for _ in 0..reads {
            let which = rng.below(runtimes.len() as u64) as usize;
            file::randomize_residency(&path, &file, &mut rng);
            let from = match rng.below(8) {
                0 => size + rng.below(2 << 20),
                1 => size.saturating_sub(rng.below(70_000)),
                2 => 0,
                _ => rng.near_page_edge(size + 1),
            };
            let len = length(&mut rng);
            let own = rng.chance(25);
            let what = format!("{} file {n} of {size} bytes, runtime {which}", place.kind);
            with_deadline(&what, || {
                compare(
                    device,
                    &runtimes[which],
                    Call { fd: file.as_raw_fd(), from, own_offset: own, len },
                    &mut rng,
                    &what,
                )
            });
        }
    }
}

#[test]
fn random_files_on_every_file_system() {
    mount_fixture::for_each_kind(|place| random_files(place, 20, 6));
}

/// The test above takes its routes at random. This one checks that each route can be taken.
#[test]
fn every_route_is_used() {
    let device = emulated("size=64M,bar=16M,p2p=1,latency_us=300");
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    let file = file::create_filled(&path, MAX_LEN);
    for (route, cached, mapped) in [
        (Route::Copy, true, false),
        (Route::Dma, true, false),
        (Route::Direct, false, false),
        (Route::P2p, false, true),
    ] {
        let dma_min = if route == Route::Dma { 64 << 10 } else { 1 << 30 };
        let runtime = Runtime::new(Settings { dma_min, ..Settings::default() });
        // Other processes may read pages in or drop them, and use up the pipes that pinning needs.
        let taken = (0..100).any(|_| {
            file::evict(&file);
            if cached {
                file::load_pages(&path, 0..MAX_LEN / file::PAGE);
            }
            let size = MAX_LEN as usize;
            let buffer = if mapped { Buffer::host_mapped(device, size) } else { Buffer::new(device, size) };
            assert_eq!(runtime.read(file.as_raw_fd(), Some(0), buffer.target(0), size).unwrap(), size);
            assert!(buffer.bytes() == file::bytes(0, size, 0), "{route}: wrong bytes");
            runtime.stats().rows.iter().any(|l| l.route == route && l.bytes > 0)
        });
        assert!(taken, "no bytes by {route}: {:?}", runtime.stats());
    }
}

#[test]
fn reads_from_descriptors_of_every_kind() {
    let device = emulated("size=64M,bar=8M");
    let runtimes = runtimes();
    let mut rng = Rng::from_env(5);
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("file");
    file::evict(&file::create_filled(&path, 1 << 20));
    let with = |flags: i32| OpenOptions::new().read(true).custom_flags(flags).open(&path).unwrap();
    let direct = with(libc::O_DIRECT);
    let path_only = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&path).unwrap();
    let write_only = OpenOptions::new().write(true).open(&path).unwrap();
    let directory = File::open(place.path()).unwrap();
    let zeros = File::open("/dev/zero").unwrap();
    let version = File::open("/proc/version").unwrap();
    let symbols = File::open("/proc/kallsyms").unwrap();
    let files = [
        ("O_DIRECT", direct.as_raw_fd()),
        ("O_PATH", path_only.as_raw_fd()),
        ("write only", write_only.as_raw_fd()),
        ("directory", directory.as_raw_fd()),
        ("/dev/zero", zeros.as_raw_fd()),
        ("/proc/version", version.as_raw_fd()),
        ("/proc/kallsyms", symbols.as_raw_fd()),
        ("no descriptor", 9999),
        ("negative descriptor", -1),
    ];
    for (what, fd) in files {
        for (from, len) in [(0, 4096), (4096, 512 << 10), (0, 2 << 20), (77, 100), (77, 200_000), (1 << 20, 200_000)] {
            for own in [false, true] {
                for runtime in &runtimes[..4] {
                    with_deadline(what, || {
                        compare(device, runtime, Call { fd, from, own_offset: own, len }, &mut rng, what)
                    });
                }
            }
        }
    }
}

#[test]
fn out_of_range_offsets() {
    let device = emulated("size=16M,bar=4M");
    let runtime = Runtime::new(Settings::default());
    let mut rng = Rng::new(6);
    let place = mount_fixture::create("tree").unwrap();
    let file = file::create_filled(&place.file("file"), 300_000);
    let huge = i64::MAX as u64;
    for from in [huge, huge - 1, huge - 70_000, huge + 1, u64::MAX, u64::MAX - 4095] {
        for len in [0, 1, 4096, 200_000] {
            compare(
                device,
                &runtime,
                Call { fd: file.as_raw_fd(), from, own_offset: false, len },
                &mut rng,
                "offset out of range",
            );
        }
    }
}

#[test]
fn read_never_passes_end_of_allocation() {
    let device = emulated("size=16M");
    let runtime = Runtime::new(Settings::default());
    let place = mount_fixture::create("tree").unwrap();
    let file = file::create_filled(&place.file("file"), 1 << 20);
    for (size, skew) in [(1000, 0), (1000, 999), (200_000, 0), (200_000, 100_000), (200_000, 199_999)] {
        let buffer = Buffer::new(device, size);
        let neighbour = Buffer::new(device, 300_000);
        for len in [size - skew, size - skew + 1, 1 << 20] {
            let got = runtime.read(file.as_raw_fd(), Some(5), buffer.target(skew), len).unwrap();
            assert_eq!(got, size - skew);
            assert_eq!(buffer.range_bytes(skew..size), file::bytes(5, got, 0));
            neighbour.assert_poison_from(0);
        }
        let none = runtime.read(file.as_raw_fd(), Some(5), buffer.target(size), 1);
        assert_eq!(none.map_err(|e| e.kind.errno()), Err(Errno::FAULT));
    }
}

#[test]
fn pipe_returns_available_bytes() {
    let device = emulated("size=16M");
    let runtime = Runtime::new(Settings::default());
    let (mut out, mut into) = std::io::pipe().unwrap();
    let buffer = Buffer::new(device, 1 << 20);
    for (written, requested, got) in [(1000, 1 << 20, 1000), (5, 3, 3), (0, 100, 2), (40_000, 70_000, 40_000)] {
        into.write_all(&file::bytes(9, written, 0)).unwrap();
        let read = with_deadline("pipe", || runtime.read(out.as_raw_fd(), None, buffer.target(0), requested)).unwrap();
        assert_eq!(read, got);
        let from = if written == 0 { 12 } else { 9 };
        assert_eq!(buffer.range_bytes(0..got), file::bytes(from, got, 0));
    }
    let at = runtime.read(out.as_raw_fd(), Some(0), buffer.target(0), 100).map_err(|e| e.kind.errno());
    assert_eq!(at, Err(Errno::SPIPE));
    drop(into);
    assert_eq!(runtime.read(out.as_raw_fd(), None, buffer.target(0), 1 << 20).unwrap(), 0);
    assert_eq!(out.read(&mut [0]).unwrap(), 0);
}

/// Reads the test program itself. Run as an ordinary user, it is a file of another user, whose residency cachestat does
/// not report.
#[test]
fn file_owned_by_another_user() {
    let device = emulated("size=64M,bar=16M");
    let runtimes = runtimes();
    let mut rng = Rng::from_env(8);
    let path = std::env::current_exe().unwrap();
    let file = File::open(&path).unwrap();
    let size = file.metadata().unwrap().len();
    for n in 0..60 {
        if n % 7 == 0 {
            file::advise(&file, 0, 0, libc::POSIX_FADV_DONTNEED);
        }
        let (from, len, own) = (rng.near_page_edge(size + 1), length(&mut rng), rng.chance(25));
        let runtime = &runtimes[n % runtimes.len()];
        with_deadline("a file of another user", || {
            compare(
                device,
                runtime,
                Call { fd: file.as_raw_fd(), from, own_offset: own, len },
                &mut rng,
                "test program",
            );
        });
    }
}

/// Opening a file for writing copies it up: the first descriptor keeps showing the old file, the second shows the new
/// one.
#[test]
fn overlayfs_copy_up() {
    let place = match mount_fixture::create("overlay") {
        Ok(place) => place,
        Err(why) => return println!("skipped: {why}"),
    };
    let device = emulated("size=64M,bar=8M");
    let mut rng = Rng::new(9);
    let lower = place.path().parent().unwrap().join("lower");
    for (n, runtime) in runtimes().iter().enumerate() {
        let name = format!("file{n}");
        drop(file::create_filled(&lower.join(&name), 1 << 20));
        let path = place.file(&name);
        let old = File::open(&path).unwrap();
        let check = |file: &File, rng: &mut Rng, what: &str| {
            for (from, len) in [(0, 1 << 20), (5, 300_000), (4096, 500)] {
                compare(device, runtime, Call { fd: file.as_raw_fd(), from, own_offset: false, len }, rng, what);
            }
        };
        check(&old, &mut rng, "before copy-up");
        let new = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&new, &file::bytes(0, 700_000, 1), 1000).unwrap();
        check(&new, &mut rng, "copied up");
        check(&old, &mut rng, "the old descriptor");
        std::fs::remove_file(&path).unwrap();
        check(&new, &mut rng, "removed");
    }
}

const SHARED: &str = "SPINIO_TEST_SHARED_OFFSET";

/// Does nothing when run as a test: the body of each child process of the next test.
#[test]
fn child_that_reads_at_a_shared_offset() {
    let Some(seed) = std::env::var(SHARED).ok().and_then(|s| s.parse().ok()) else { return };
    let device = emulated("size=16M");
    let runtime = Runtime::new(Settings { dma_min: 64 << 10, ..Settings::default() });
    let mut rng = Rng::new(seed);
    loop {
        let len = if rng.chance(50) { rng.below(8000) + 1 } else { rng.below(60_000) + 65_537 } as usize * 8;
        let buffer = Buffer::new(device, len);
        let got = runtime.read(0, None, buffer.target(0), len).unwrap();
        if got == 0 {
            return;
        }
        // Every word of the file is its own index.
        let bytes = buffer.range_bytes(0..got);
        let word = |n: usize| u64::from_le_bytes(bytes[n * 8..n * 8 + 8].try_into().unwrap());
        let first = word(0);
        assert!((0..got / 8).all(|n| word(n) == first + n as u64), "one read returned bytes of two offsets");
        println!("range {} {}", first * 8, got);
    }
}

#[test]
fn processes_sharing_offset_get_every_byte_once() {
    let place = mount_fixture::create("tree").unwrap();
    let path = place.file("words");
    let words: u64 = 1 << 20;
    std::fs::write(&path, (0..words).flat_map(u64::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    let shared = File::open(&path).unwrap();
    let children: Vec<_> = (0..3)
        .map(|seed: u64| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "child_that_reads_at_a_shared_offset", "--nocapture"])
                .env(SHARED, seed.to_string())
                .stdin(Stdio::from(shared.try_clone().unwrap()))
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let mut ranges = Vec::new();
    for child in children {
        let output = with_deadline("a reader", || child.wait_with_output()).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            if let Some(numbers) = line.split("range ").nth(1) {
                let (start, len) = numbers.split_once(' ').unwrap();
                ranges.push((start.parse::<u64>().unwrap(), len.trim().parse::<u64>().unwrap()));
            }
        }
    }
    ranges.sort_unstable();
    let mut end = 0;
    for (start, len) in ranges {
        assert_eq!(start, end, "a gap, or bytes that two processes read");
        end = start + len;
    }
    assert_eq!(end, words * 8);
    assert_eq!(file_offset(shared.as_raw_fd()), Some(words * 8), "the offset stayed past the end of the file");
}

#[test]
fn again_as_ordinary_user() {
    as_user::rerun_as_nobody("again_as_ordinary_user");
}
