//! Reads through the whole runtime into the emulated device: all routes and residencies.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use spinio_device::{DeviceKind, registry};
use spinio_io::kernel::{LinuxSyscalls, Syscalls};
use spinio_io::{Buffer as Like, FdChange, Runtime, Settings, Target};
use spinio_plan::{Reason, Residency, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Advice, Fd, fs_magic};
use spinio_testkit::buffer::{Buffer, emulated};
use spinio_testkit::{Call, FaultySyscalls, eventually, in_child};

const MIB: usize = 1 << 20;

fn target(len: usize) -> Target {
    let addr = registry::alloc(DeviceKind::Emulated, 0, len, false).expect("device memory");
    let allocation = registry::find(addr.0 as *const u8, len).expect("the allocation made above");
    Target { allocation, addr }
}

fn contents(len: usize) -> Vec<u8> {
    (0..len as u64 / 8).flat_map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes()).collect()
}

/// A file on the disk that holds the build, so that eviction and O_DIRECT are real.
fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.write_all(bytes).unwrap();
    file.sync_all().unwrap();
    file
}

fn evict(file: &File, offset: u64, len: u64) {
    linux::fadvise(file.as_raw_fd(), offset, len, Advice::DontNeed).unwrap();
}

/// Leaves only the chosen MiB in the page cache.
fn keep_cached(file: &File, mib: impl Iterator<Item = usize>) {
    evict(file, 0, 0);
    // Without read-ahead, which would cache adjacent pages.
    linux::fadvise(file.as_raw_fd(), 0, 0, Advice::Random).unwrap();
    let mut page = vec![0u8; MIB];
    for mib in mib {
        file.read_exact_at(&mut page, (mib * MIB) as u64).unwrap();
    }
}

fn routes(runtime: &Runtime) -> Vec<Route> {
    let mut routes: Vec<_> = runtime.stats().rows.iter().filter(|l| l.bytes > 0).map(|l| l.route).collect();
    routes.dedup();
    routes
}

fn check(runtime: &Runtime, file: &File, bytes: &[u8], offset: usize, len: usize) {
    let to = target(len + 64);
    let got = runtime.read(file.as_raw_fd(), Some(offset as u64), to, len).unwrap();
    let expected = bytes.len().saturating_sub(offset).min(len);
    assert_eq!(got, expected, "length at {offset}+{len}");
    let mut out = vec![0; len + 64];
    runtime.fetch(to, &mut out).unwrap();
    assert!(out[..got] == bytes[offset.min(bytes.len())..][..got], "bytes at {offset}+{len}");
    assert!(out[got..].iter().all(|&b| b == out[len + 63]), "bytes past the end were written");
    registry::free(to.addr).unwrap();
}

#[test]
fn cached_file_is_copied_and_long_one_uses_dma() {
    let bytes = contents(24 * MIB);
    let file = file(&bytes);
    let runtime = Runtime::new(Settings { dma_min: 4 << 20, ..Settings::default() });
    check(&runtime, &file, &bytes, 4097, MIB);
    assert_eq!(routes(&runtime), [Route::Copy]);
    check(&runtime, &file, &bytes, 123, 20 * MIB);
    assert!(routes(&runtime).contains(&Route::Dma), "{:?}", runtime.stats());
}

#[test]
fn registering_stops_after_two_unpin_stalls() {
    let bytes = contents(8 * MIB);
    let file = file(&bytes);
    let runtime = Runtime::new(Settings { dma_min: 1 << 20, ..Settings::default() });
    let buffer = Buffer::new(emulated("size=64M,unpin_us=60000"), 8 * MIB);
    let by_dma = || -> u64 { runtime.stats().rows.iter().filter(|l| l.route == Route::Dma).map(|l| l.bytes).sum() };
    let read = || {
        let before = by_dma();
        assert_eq!(runtime.read(file.as_raw_fd(), Some(0), buffer.target(0), 8 * MIB).unwrap(), 8 * MIB);
        assert!(buffer.range_bytes(0..8 * MIB) == bytes, "wrong bytes");
        by_dma() - before
    };
    assert_eq!(read(), 8 * MIB as u64);
    // Each request unpins the pages that the one before registered.
    let attempts = (0..20).take_while(|_| read() > 0).count();
    assert!((1..20).contains(&attempts), "{attempts} more requests registered");
    assert_eq!(read(), 0);
    let like = Like::of(&buffer.allocation());
    let segments = runtime.explain(file.as_raw_fd(), 0, 8 << 20, like).unwrap().schedule.segments;
    assert!(segments.iter().all(|s| (s.route, s.refused) == (Route::Copy, Some(Reason::PinStalls))), "{segments:?}");
}

#[test]
fn prefault_ahead_of_sequential_reads_reads_no_pages() {
    let bytes = contents(48 * MIB);
    let file = file(&bytes);
    evict(&file, 0, 0);
    let pages = |from: usize| linux::cachestat(file.as_raw_fd(), from as u64, (16 * MIB) as u64).map(|c| c.cached);
    if pages(0) != Ok(0) {
        return eprintln!("skipped: this file system does not evict pages, or cachestat fails");
    }
    // One page each, as random reads leave them.
    linux::fadvise(file.as_raw_fd(), 0, 0, Advice::Random).unwrap();
    (0..32 * MIB).step_by(4096).for_each(|at| file.read_exact_at(&mut [0; 4096], at as u64).unwrap());
    linux::fadvise(file.as_raw_fd(), 0, 0, Advice::Normal).unwrap();
    let runtime = Runtime::new(Settings { dma_min: 1 << 20, ..Settings::default() });
    let buffer = Buffer::new(emulated("size=64M"), 4 * MIB);
    for _ in 0..4 {
        for at in (0..32 * MIB).step_by(4 * MIB) {
            let got = runtime.read(file.as_raw_fd(), Some(at as u64), buffer.target(0), 4 * MIB).unwrap();
            assert!(got == 4 * MIB && buffer.bytes() == bytes[at..at + got], "wrong bytes at {at}");
        }
    }
    assert!(routes(&runtime).contains(&Route::Dma), "{:?}", runtime.stats());
    assert_eq!(pages(32 * MIB), Ok(0), "pages past the end of the sequential stream were read in");
}

/// Copy workers cannot know which file an fd number refers to in such a thread.
#[test]
fn long_request_of_thread_with_unshared_fd_table_uses_no_workers() {
    let bytes = contents(96 * MIB + 4321);
    let (file, other) = (file(&bytes), file(&contents(96 * MIB)));
    let runtime =
        Runtime::new(Settings { routes: vec![Route::Copy, Route::Direct], threads: 4, ..Settings::default() });
    let buffer = Buffer::new(emulated("size=128M,pin_us=3000"), bytes.len());
    let number = other.as_raw_fd();
    let read = || runtime.read(number, Some(0), buffer.target(0), bytes.len()).unwrap();
    assert_eq!(read(), 96 * MIB);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: from here on no other thread shares this thread's fd table, so no other thread uses the number.
            assert!(unsafe { libc::unshare(libc::CLONE_FILES) == 0 && libc::dup2(file.as_raw_fd(), number) >= 0 });
            assert_eq!(read(), bytes.len());
        });
    });
    assert!(buffer.range_bytes(0..bytes.len()) == bytes[..], "wrong bytes");
    let fell_back = runtime.stats().rows.iter().any(|l| l.reason == Reason::Fallback && l.bytes > 0);
    assert!(!fell_back, "{:?}", runtime.stats());
}

#[test]
fn truncated_long_request_returns_prefix() {
    let mut bytes = contents(97 * MIB + 4321);
    let file = file(&bytes);
    let runtime = Runtime::new(Settings { dma_min: 4 << 20, threads: 4, ..Settings::default() });
    let dma = || -> u64 { runtime.stats().rows.iter().filter(|l| l.route == Route::Dma).map(|l| l.bytes).sum() };
    check(&runtime, &file, &bytes, 12_345, 96 * MIB);
    let before = dma();
    assert!(before > 0, "{:?}", runtime.stats());
    // The file shrinks during the read: the count is a prefix, whose bytes are the file's, or zeros where the kernel
    // cleared the end of a truncated page.
    let shrinks = file.try_clone().unwrap();
    let shrinking =
        std::thread::spawn(move || (70..97).rev().for_each(|mib| shrinks.set_len(mib * MIB as u64).unwrap()));
    let to = target(96 * MIB);
    let got = runtime.read(file.as_raw_fd(), Some(0), to, 96 * MIB).unwrap();
    shrinking.join().unwrap();
    assert!((70 * MIB..=96 * MIB).contains(&got), "{got} bytes");
    let mut out = vec![0; got];
    runtime.fetch(to, &mut out).unwrap();
    assert!(out[..70 * MIB] == bytes[..70 * MIB], "wrong bytes");
    assert!((70 * MIB..got).all(|at| out[at] == bytes[at] || out[at] == 0), "wrong bytes in the truncated part");
    registry::free(to.addr).unwrap();
    bytes.truncate(70 * MIB);
    check(&runtime, &file, &bytes, 0, 96 * MIB);
}

#[test]
fn evicted_file_is_read_directly_and_stays_uncached() {
    let bytes = contents(8 * MIB);
    let file = file(&bytes);
    evict(&file, 0, 0);
    let runtime = Runtime::new(Settings::default());
    check(&runtime, &file, &bytes, 0, 8 * MIB);
    assert_eq!(routes(&runtime), [Route::Direct], "{:?}", runtime.stats());
    let left = linux::cachestat(file.as_raw_fd(), 0, 8 << 20).unwrap();
    assert!(left.cached < 16, "{} pages are in the page cache", left.cached);
}

#[test]
fn half_cached_file_uses_both_routes() {
    let bytes = contents(16 * MIB);
    let file = file(&bytes);
    keep_cached(&file, (1..16).step_by(2));
    let runtime = Runtime::new(Settings::default());
    check(&runtime, &file, &bytes, 1, 16 * MIB - 1);
    let found = routes(&runtime);
    assert!(found.contains(&Route::Direct) && found.contains(&Route::Copy), "{:?}", runtime.stats());
}

#[test]
fn wrong_cached_assumption_is_corrected() {
    let bytes = contents(2 * MIB);
    let file = file(&bytes);
    let runtime = Runtime::new(Settings::default());
    check(&runtime, &file, &bytes, 0, 2 * MIB);
    check(&runtime, &file, &bytes, 0, 2 * MIB);
    keep_cached(&file, 0..1);
    check(&runtime, &file, &bytes, 0, 2 * MIB);
    check(&runtime, &file, &bytes, 77, 2 * MIB);
}

#[test]
fn small_reads_advance_descriptor_offset() {
    let bytes = contents(300_000);
    let file = file(&bytes);
    let runtime = Runtime::new(Settings::default());
    let to = target(400_000);
    linux::lseek(file.as_raw_fd(), 0, 0).unwrap();
    let mut at = 0;
    for len in [1, 4096, 65_536, 100_000, 70_000, 100_000] {
        let expected = len.min(bytes.len() - at);
        let got = runtime.read(file.as_raw_fd(), None, to, len).unwrap();
        assert_eq!(got, expected);
        let mut out = vec![0; got];
        runtime.fetch(to, &mut out).unwrap();
        assert!(out == bytes[at..at + got]);
        at += got;
        assert_eq!(linux::lseek(file.as_raw_fd(), 0, 1).unwrap(), at as u64);
    }
    registry::free(to.addr).unwrap();
}

#[test]
fn read_stops_at_end_of_allocation() {
    let bytes = contents(MIB);
    let file = file(&bytes);
    let runtime = Runtime::new(Settings::default());
    let to = target(200_000);
    assert_eq!(runtime.read(file.as_raw_fd(), Some(0), to, MIB).unwrap(), 200_000);
    let end = Target { addr: to.addr.offset(200_000), ..to };
    assert!(runtime.read(file.as_raw_fd(), Some(0), end, 1).is_err());
    registry::free(to.addr).unwrap();
}

#[test]
fn replaced_descriptor_never_mixes_two_files() {
    let bytes = contents(32 * MIB);
    let file = file(&bytes);
    let other = self::file(&vec![0xee; 32 * MIB]);
    for threads in [1, 3] {
        let runtime = Runtime::new(Settings { threads, dma_min: u64::MAX, ..Settings::default() });
        for _ in 0..20 {
            // SAFETY: duplicates a descriptor of this test.
            let shared = unsafe { libc::dup(file.as_raw_fd()) };
            let to = target(32 * MIB);
            let got = std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(std::time::Duration::from_micros(500));
                    // SAFETY: replaces a descriptor that only this test uses.
                    unsafe { libc::dup2(other.as_raw_fd(), shared) };
                });
                runtime.read(shared, Some(0), to, 32 * MIB)
            });
            if let Ok(got) = got {
                let mut out = vec![0; got];
                runtime.fetch(to, &mut out).unwrap();
                // On a slow machine the number may have been reused before the read began.
                let is_whole = out == bytes[..got] || out.iter().all(|&b| b == 0xee);
                assert!(is_whole, "{threads} threads: bytes of two files among {got}");
            }
            registry::free(to.addr).unwrap();
            // SAFETY: closes what was made above.
            unsafe { libc::close(shared) };
        }
    }
}

/// A past deadlock: the caller had a worker make a mapping while all workers waited for that mapping.
#[test]
fn first_read_of_several_ranges_completes() {
    let len = 300 * MIB;
    let file = file(b"");
    file.set_len(len as u64).unwrap();
    let warm_up = self::file(&contents(MIB));
    for threads in [1, 3, 6] {
        let runtime = Runtime::new(Settings { threads, ..Settings::default() });
        let to = target(len);
        runtime.read(warm_up.as_raw_fd(), Some(0), to, MIB).unwrap();
        let got = spinio_testkit::with_deadline("a first read of several ranges", || {
            runtime.read(file.as_raw_fd(), Some(0), to, len).unwrap()
        });
        assert_eq!(got, len);
        registry::free(to.addr).unwrap();
    }
}

/// The counters of surveyed pages and of refused routes have the values that the test computes.
#[test]
fn surveyed_pages_and_refused_routes_are_counted() {
    let bytes = contents(8 * MIB);
    let file = file(&bytes);
    let to = target(8 * MIB);
    let pages = |from: usize, len: usize| linux::cachestat(file.as_raw_fd(), from as u64, len as u64).map(|c| c.cached);
    evict(&file, 0, 0);
    if pages(0, 8 * MIB) != Ok(0) {
        return println!("skipped: pages of a file stay cached after POSIX_FADV_DONTNEED");
    }
    // The boundary is in the middle of the range that one survey covers.
    let (cold, warm) = (4 * MIB + MIB / 4, 4 * MIB - MIB / 4);
    file.read_exact_at(&mut vec![0; warm], cold as u64).unwrap();
    assert_eq!((pages(0, cold), pages(cold, warm)), (Ok(0), Ok(960)));
    let read = || {
        let runtime = Runtime::new(Settings::default());
        assert_eq!(runtime.read(file.as_raw_fd(), Some(0), to, 8 * MIB).unwrap(), 8 * MIB);
        runtime.stats()
    };
    let stats = read();
    assert_eq!((stats.pages(Residency::Absent), stats.pages(Residency::Clean)), (1088, 960));
    let refused = stats.refusals.iter().find(|r| r.reason == Reason::NoP2pMapping).expect("no memory for peer-to-peer");
    assert!(refused.count > 0 && (4 * MIB as u64..=8 * MIB as u64).contains(&refused.bytes), "{refused:?}");
    // Another process may sync this disk meanwhile, which makes the pages clean.
    eventually("dirty pages are seen", || {
        file.write_all_at(&bytes[5 * MIB..6 * MIB], 5 * MIB as u64).unwrap();
        let stats = read();
        let [absent, clean, dirty] = [Residency::Absent, Residency::Clean, Residency::Dirty].map(|r| stats.pages(r));
        assert_eq!((absent, clean + dirty), (1088, 960));
        dirty >= 256
    });
    registry::free(to.addr).unwrap();
}

/// Runs in a mount namespace where /sys and /proc are empty. Shadow descriptors and cost models need them; reads must
/// not depend on them.
#[test]
fn reads_work_without_sysfs_and_procfs() {
    const INSIDE: &str = "SPINIO_TEST_BARE";
    if std::env::var_os(INSIDE).is_some() {
        assert!(!std::path::Path::new("/sys/dev").exists() && !std::path::Path::new("/proc/self").exists());
        let bytes = contents(8 * MIB);
        let file = file(&bytes);
        let runtime = Runtime::new(Settings::default());
        check(&runtime, &file, &bytes, 77, 7 * MIB);
        evict(&file, 0, 0);
        check(&runtime, &file, &bytes, 0, 8 * MIB);
        return;
    }
    let program = std::env::current_exe().unwrap();
    let bare = "mount -t tmpfs none /sys && mount -t tmpfs none /proc && exec \"$0\" \"$@\"";
    let ran = std::process::Command::new("unshare")
        .args(["--mount", "sh", "-c", bare])
        .arg(program)
        .args(["--exact", "reads_work_without_sysfs_and_procfs"])
        .env(INSIDE, "1")
        .output();
    match ran {
        Ok(out) if String::from_utf8_lossy(&out.stdout).contains("1 passed") => {}
        Ok(out) if String::from_utf8_lossy(&out.stdout).contains("1 failed") => {
            panic!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
        }
        Ok(out) => println!("skipped: {}", String::from_utf8_lossy(&out.stderr).trim()),
        Err(e) => println!("skipped: unshare: {e}"),
    }
}

/// Records the descriptor's offset during each read.
#[derive(Debug, Default)]
struct OffsetRecorder(Mutex<Vec<u64>>);

impl Syscalls for OffsetRecorder {
    unsafe fn pread(
        &self,
        route: Route,
        fd: Fd,
        buf: *mut u8,
        len: usize,
        offset: u64,
        flags: u32,
    ) -> Result<usize, Errno> {
        if route == Route::Copy {
            self.0.lock().unwrap().extend(linux::lseek(fd, 0, 1).ok());
        }
        // SAFETY: passed on to the caller.
        unsafe { LinuxSyscalls.pread(route, fd, buf, len, offset, flags) }
    }
}

#[test]
fn shared_offset_moves_to_end_of_file_at_once() {
    let bytes = contents(5 * MIB);
    let file = file(&bytes);
    let kernel: &'static OffsetRecorder = Box::leak(Box::default());
    // Through the program's own descriptor.
    let settings = Settings { routes: vec![Route::Copy], threads: 1, ..Settings::default() };
    let runtime = Runtime::with_kernel(settings, kernel);
    let to = target(8 * MIB);
    let read = || runtime.read(file.as_raw_fd(), None, to, 8 * MIB).unwrap();
    let at = || linux::lseek(file.as_raw_fd(), 0, 1).unwrap();
    for start in [0, MIB + 1, 5 * MIB - 100_000, 5 * MIB - 10] {
        linux::lseek(file.as_raw_fd(), start as i64, 0).unwrap();
        assert_eq!(read(), 5 * MIB - start);
        assert_eq!(at(), 5 * MIB as u64);
        let seen = std::mem::take(&mut *kernel.0.lock().unwrap());
        assert!(!seen.is_empty() && seen.iter().all(|&at| at == 5 * MIB as u64), "{start}: {seen:?}");
    }
    assert_eq!((read(), at()), (0, 5 * MIB as u64));
    // Far past the end, and then bytes that were written there.
    linux::lseek(file.as_raw_fd(), 6 * MIB as i64, 0).unwrap();
    assert_eq!((read(), at()), (0, 6 * MIB as u64));
    file.write_all_at(&bytes[..MIB], 6 * MIB as u64).unwrap();
    assert_eq!((read(), at()), (MIB, 7 * MIB as u64));
    registry::free(to.addr).unwrap();
}

/// Two readers share an offset: the bytes of each are in one piece, as those of a single system call are.
#[test]
fn shared_offset_of_direct_fd_moves_at_once() {
    let bytes = contents(5 * MIB + 1000);
    let plain = file(&bytes);
    let path = format!("/proc/self/fd/{}", plain.as_raw_fd());
    let mut options = File::options();
    let direct = std::os::unix::fs::OpenOptionsExt::custom_flags(options.read(true), libc::O_DIRECT).open(path);
    let Ok(direct) = direct else { return println!("skipped: O_DIRECT is not supported") };
    let kernel: &'static OffsetRecorder = Box::leak(Box::default());
    let runtime = Runtime::with_kernel(Settings::default(), kernel);
    let to = target(8 * MIB);
    let at = || linux::lseek(direct.as_raw_fd(), 0, 1).unwrap();
    for (start, len, got) in [(0, 4 * MIB, 4 * MIB), (MIB, 8 * MIB, 4 * MIB + 1000), (5 * MIB, 128 << 10, 1000)] {
        linux::lseek(direct.as_raw_fd(), start as i64, 0).unwrap();
        assert_eq!(runtime.read(direct.as_raw_fd(), None, to, len).unwrap(), got, "{len} bytes from {start}");
        assert_eq!(at(), (start + got) as u64);
        let mut out = vec![0; got];
        runtime.fetch(to, &mut out).unwrap();
        assert!(out == bytes[start..start + got]);
        let seen = std::mem::take(&mut *kernel.0.lock().unwrap());
        assert!(!seen.is_empty() && seen.iter().all(|&at| at == (start + got) as u64), "{start}: {seen:?}");
    }
    registry::free(to.addr).unwrap();
}

/// A file system that reports a larger block size than its reads need, as XFS does for a file with reflinks.
struct LargeBlocks;

impl Syscalls for LargeBlocks {
    fn direct_align(&self, fd: Fd) -> Result<Option<linux::DirectAlign>, Errno> {
        Ok(LinuxSyscalls.direct_align(fd)?.map(|align| linux::DirectAlign { offset: 4096, ..align }))
    }
}

#[test]
fn app_direct_fd_accepts_alignment_of_its_file_system() {
    let bytes = contents(MIB);
    let plain = file(&bytes);
    let path = format!("/proc/self/fd/{}", plain.as_raw_fd());
    let mut options = File::options();
    let direct = std::os::unix::fs::OpenOptionsExt::custom_flags(options.read(true), libc::O_DIRECT).open(path);
    let Ok(direct) = direct else { return println!("skipped: O_DIRECT is not supported") };
    let unit = linux::direct_io_align(direct.as_raw_fd()).ok().flatten().map_or(0, |align| align.offset as usize);
    if unit == 0 || unit >= 4096 {
        return println!("skipped: the O_DIRECT alignment is {unit}");
    }
    let runtime = Runtime::with_kernel(Settings::default(), &LargeBlocks);
    let to = target(MIB);
    let read = |offset: usize, len: usize| {
        runtime.read(direct.as_raw_fd(), Some(offset as u64), to, len).map_err(|e| e.kind.errno())
    };
    for (offset, len) in [(0, (128 << 10) + unit), (unit, 128 << 10), (3 * unit, (70 << 10) + 5 * unit)] {
        assert_eq!(read(offset, len), Ok(len), "{len} bytes at {offset}");
        let mut out = vec![0; len];
        runtime.fetch(to, &mut out).unwrap();
        assert!(out == bytes[offset..offset + len], "{len} bytes at {offset}");
    }
    for (offset, len) in [(0, (128 << 10) + 1), (unit / 2, 128 << 10)] {
        assert_eq!(read(offset, len), Err(Errno::INVAL), "{len} bytes at {offset}");
    }
}

/// In a child: as in a process with hooks, which count the changes of its descriptors.
#[test]
fn kernel_is_asked_once_whether_an_o_direct_descriptor_is_of_a_local_disk() {
    let plain = file(&contents(4 * MIB));
    let path = format!("/proc/self/fd/{}", plain.as_raw_fd());
    let mut options = File::options();
    let direct = std::os::unix::fs::OpenOptionsExt::custom_flags(options.read(true), libc::O_DIRECT).open(path);
    let Ok(direct) = direct else { return println!("skipped: O_DIRECT is not supported") };
    let fd = direct.as_raw_fd();
    if !LinuxSyscalls.file_system(fd).is_ok_and(|magic| [fs_magic::EXT4, fs_magic::XFS].contains(&magic)) {
        return println!("skipped: no disk whose reads the kernel issues at once");
    }
    in_child("reads with O_DIRECT", || {
        spinio_io::set_changes_counted();
        let kernel = FaultySyscalls::new();
        // A device that has its threads in this process.
        let buffer = Buffer::new(emulated("size=64M"), MIB);
        let (runtime, to) = (Runtime::with_kernel(Settings::default(), kernel), buffer.target(0));
        let read_all = || {
            for at in (0..4 * MIB as u64).step_by(128 << 10) {
                assert_eq!(runtime.read(fd, Some(at), to, 128 << 10).unwrap(), 128 << 10);
            }
            kernel.calls(Call::FileSystem)
        };
        assert_eq!(read_all(), 1);
        drop(FdChange::begin(fd as u32, fd as u32));
        assert_eq!(read_all(), 2, "the number may be that of another file");
        0
    });
}

#[test]
fn offset_of_a_descriptor_that_cannot_be_read_is_not_reserved() {
    let file = file(&contents(8192));
    let write_only = File::options().write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    let runtime = Runtime::new(Settings::default());
    let (read_write, write_only) = (file.as_raw_fd(), write_only.as_raw_fd());
    assert_eq!(runtime.reserve(write_only, 4096).unwrap_err(), Errno::BADF);
    assert_eq!(linux::lseek(write_only, 0, 1), Ok(0));
    assert_eq!(runtime.reserve(read_write, 4096).unwrap().start, 8192);
    assert_eq!(linux::lseek(read_write, 0, 1), Ok(8192 + 4096));
}
