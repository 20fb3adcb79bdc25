//! The device as its users see it: memory is tested here, enqueued work and pins of file pages in separate files.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

mod devices;
mod ordering;
mod pins;
mod replica;
mod shared_memory;

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;

use spinio_sys::{Errno, linux};

use super::*;

fn device(text: &str) -> &'static Emulated {
    Emulated::start(Config::parse(text).unwrap()).unwrap()
}

const DEFAULT_STREAM: StreamId = StreamId(0);

/// Copies in and waits.
fn write_device(device: &Emulated, dst: DeviceAddr, bytes: &[u8]) {
    // SAFETY: the bytes stay until the drain returns.
    unsafe { device.copy_in(DEFAULT_STREAM, dst, bytes.as_ptr(), bytes.len()) }.unwrap();
    device.synchronize(DEFAULT_STREAM, WaitMode::Block).unwrap();
}

/// Copies out and waits.
fn read_device(device: &Emulated, src: DeviceAddr, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: the bytes stay until the drain returns.
    unsafe { device.copy_out(DEFAULT_STREAM, bytes.as_mut_ptr(), src, len) }.unwrap();
    device.synchronize(DEFAULT_STREAM, WaitMode::Block).unwrap();
    bytes
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|n| ((n + seed) * 7 % 251) as u8).collect()
}

fn pread_into(addr: DeviceAddr) -> core::result::Result<usize, Errno> {
    let zeros = File::open("/dev/zero").unwrap();
    // SAFETY: device memory, or an address the kernel refuses.
    unsafe { linux::pread(zeros.as_raw_fd(), addr.0 as *mut u8, 16, 0) }
}

/// A file and a read-only mapping of all of it.
fn mapped(bytes: &[u8]) -> (File, *const u8) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    File::create(&path).unwrap().write_all(bytes).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    // SAFETY: a fresh mapping replaces nothing.
    let at = unsafe { linux::mmap(core::ptr::null_mut(), bytes.len(), 1, 1, file.as_raw_fd(), 0) }.unwrap();
    (file, at)
}

#[test]
fn kernel_refuses_device_memory_but_accepts_bar() {
    let device = device("size=1M,bar=64K");
    let plain = device.alloc(5000, false).unwrap();
    let bar = device.alloc(5000, true).unwrap();
    assert_eq!(pread_into(plain), Err(Errno::FAULT));
    assert_eq!(pread_into(bar), Ok(16));
    assert_eq!(read_device(device, bar, 20), [[0; 16].as_slice(), &[POISON; 4]].concat());
    let found = registry::find(bar.0 as *const u8, 1).unwrap();
    assert!(found.host_mapped && !found.p2p_mapped);
    device.free(bar).unwrap();
    assert_eq!(pread_into(bar), Err(Errno::FAULT));
    device.free(plain).unwrap();
    assert_eq!(device.resources_in_use(), ResourceCounts::default());
}

#[test]
fn fresh_and_reused_memory_is_poisoned() {
    let device = device("size=1M");
    let first = device.alloc(10_000, false).unwrap();
    assert_eq!(read_device(device, first, 10_000), vec![POISON; 10_000]);
    write_device(device, first, &[1; 10_000]);
    device.free(first).unwrap();
    let second = device.alloc(10_000, false).unwrap();
    assert_eq!(second, first);
    assert_eq!(read_device(device, second, 10_000), vec![POISON; 10_000]);
}

#[test]
fn find_stops_at_allocation_end_and_after_free() {
    let device = device("size=1M");
    let addr = device.alloc(5000, false).unwrap();
    let find = |n: u64| registry::find(addr.offset(n).0 as *const u8, 1);
    let found = find(4999).unwrap();
    assert_eq!((found.start, found.len, found.device.id()), (addr, 5000, device.id()));
    assert!(find(5000).is_none());
    assert!(find(1 << 20).is_none());
    assert!(registry::find(&raw const found as *const u8, 1).is_none());
    // SAFETY: refused, so nothing is copied.
    let past = unsafe { device.copy_in(DEFAULT_STREAM, addr.offset(4999), [0u8; 2].as_ptr(), 2) };
    assert_eq!(past.unwrap_err().kind, ErrorKind::BadAddress);
    device.free(addr).unwrap();
    assert!(find(0).is_none());
    assert_eq!(device.free(addr).unwrap_err().kind, ErrorKind::BadAddress);
    assert_eq!(device.alloc(2 << 20, false).unwrap_err().kind, ErrorKind::NoMemory);
    assert_eq!(device.alloc(1, true).unwrap_err().kind, ErrorKind::NoMemory);
}

#[test]
fn pinned_blocks_are_aligned_and_reused() {
    let device = device("size=1M");
    let block = device.alloc_pinned(70_000).unwrap();
    assert!(block.len >= 70_000 && (block.ptr as usize).is_multiple_of(linux::PAGE));
    device.free_pinned(block);
    assert_eq!(device.alloc_pinned(block.len).unwrap(), block);
}

#[test]
fn no_fd_leaks_into_app_table() {
    let own_fds = || {
        let fds = std::fs::read_dir("/proc/thread-self/fd").unwrap();
        let names = fds.filter_map(|e| std::fs::read_link(e.unwrap().path()).ok());
        let names = names.map(|t| t.to_string_lossy().into_owned());
        names.filter(|n| n.contains("spinio-emulated") || n.starts_with("pipe:")).collect::<Vec<_>>()
    };
    // Pipes that the test was started with.
    let before = own_fds();
    let device = device("size=1M,bar=64K");
    let (_file, at) = mapped(&[1; 4096]);
    // SAFETY: the mapping is never unmapped.
    let pin = unsafe { device.pin(at, 4096) }.unwrap();
    assert_eq!(own_fds(), before);
    device.unpin(pin);
}

#[test]
fn forked_child_has_no_device() {
    let device = device("size=1M");
    let addr = device.alloc(4096, false).unwrap();
    // SAFETY: the child only loads, makes system calls and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let none = registry::find(addr.0 as *const u8, 1).is_none();
        let refused = device.alloc(1, false) == Err(DeviceError::new(ErrorKind::ContextLost, "use after fork"));
        let drained = device.synchronize(DEFAULT_STREAM, WaitMode::Block).is_err();
        // SAFETY: ends the child at once, without the test harness's exit handlers.
        unsafe { libc::_exit(i32::from(!(none && refused && drained))) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0);
    write_device(device, addr, &[9; 4096]);
    assert_eq!(read_device(device, addr, 4096), [9; 4096]);
}

#[test]
fn find_is_correct_during_alloc_and_free() {
    let device = device("size=1M");
    let fixed = device.alloc(8192, false).unwrap();
    let rounds = if cfg!(debug_assertions) { 2_000 } else { 20_000 };
    std::thread::scope(|scope| {
        let churn = scope.spawn(move || {
            for n in 0..rounds {
                let addr = device.alloc(1 + n % 9000, false).unwrap();
                assert_eq!(registry::find(addr.0 as *const u8, 1).unwrap().len, 1 + n as u64 % 9000);
                device.free(addr).unwrap();
                assert!(registry::find(addr.0 as *const u8, 1).is_none());
            }
        });
        while !churn.is_finished() {
            let found = registry::find(fixed.offset(8191).0 as *const u8, 1).unwrap();
            assert_eq!((found.start, found.len), (fixed, 8192));
            assert!(registry::find(&raw const fixed as *const u8, 1).is_none());
        }
    });
}
