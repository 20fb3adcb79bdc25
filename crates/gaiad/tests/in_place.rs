//! Maps that are read in place: the pages of the Linux kernel's page cache, without a replica.

#![expect(unsafe_code, reason = "mappings and device memory")]

mod common;

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use spinio_device::emulated::Emulated;
use spinio_device::{Device, DeviceAddr, ReplicaMemory, StreamId, WaitMode};
use spinio_gaia::{Access, Map};
use spinio_testkit::eventually;

use crate::common::TestMount;
use crate::common::gpu::{Gpu, PAGE, device, open};

const PAGES: usize = 8;
const LEN: usize = PAGES * PAGE;

#[test]
fn server_role() {
    common::server_role();
}

/// A map in place, its device, and memory of it for a byte.
struct InPlace(Map, &'static Emulated, DeviceAddr);

impl InPlace {
    fn new(path: &Path) -> InPlace {
        let file = File::open(path).unwrap();
        let device = device();
        let memory = device.alloc_replica(PAGE as u64).unwrap();
        InPlace(Map::in_place(file.as_raw_fd(), 0, LEN as u64, device).unwrap(), device, memory)
    }

    /// Acquires all pages; the bytes that were registered for it.
    fn acquire(&self) -> u64 {
        let before = self.0.info().bytes_registered;
        self.0.acquire(0, LEN as u64, Access::Read).unwrap();
        self.0.info().bytes_registered - before
    }

    fn load(&self, at: usize) -> u8 {
        // As the device has it: of a page that the Linux kernel has replaced, the old byte.
        self.0.copy_registered(self.2, at as u64, 1).unwrap();
        let mut byte = 0;
        // SAFETY: the byte lives until the device was synchronized.
        unsafe { self.1.copy_out(StreamId(0), &mut byte, self.2, 1) }.unwrap();
        self.1.synchronize(StreamId(0), WaitMode::Block).unwrap();
        // Kernels of the emulated device run on the CPU, and load from the map's addresses.
        // SAFETY: they are mapped by the acquire, and stay until the map is dropped.
        let loaded = unsafe { (self.0.address() as *const u8).add(at).read_volatile() };
        // Another program may have stored since.
        assert!(loaded >= byte, "a kernel loads {loaded}, the device has {byte}");
        byte
    }
}

fn mounted() -> Option<(TestMount, PathBuf)> {
    let mount = TestMount::new(|dir| std::fs::write(dir.join("file"), vec![1; LEN - 100]).unwrap())?;
    let path = mount.dir.join("file");
    Some((mount, path))
}

#[test]
fn bytes_of_the_file_are_read_without_device_memory_and_zeros_past_its_end() {
    let Some((_mount, path)) = mounted() else { return };
    let map = InPlace::new(&path);
    assert_eq!(map.acquire(), LEN as u64);
    assert_eq!(map.0.acquire(0, LEN as u64, Access::Read).unwrap(), LEN as u64 - 100);
    assert_eq!((map.load(0), map.load(LEN - 101), map.load(LEN - 100)), (1, 1, 0));
    let info = map.0.info();
    assert_eq!((info.device_bytes, info.bytes_from_file), (0, 0), "{info:?}");
    eventually("an acquire without a message", || {
        map.acquire();
        map.0.info().acquires_unchanged > 0
    });
    assert_eq!(map.acquire(), 0);
    assert_eq!(map.0.release(0, LEN as u64).unwrap(), 0);
}

#[test]
fn write_and_stores_of_cpu_programs_are_seen() {
    let Some((_mount, path)) = mounted() else { return };
    let map = InPlace::new(&path);
    map.acquire();
    let (address, file) = (map.0.address(), open(&path));
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping.
    let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), LEN, protection, MapFlags::SHARED, &file, 0).unwrap() };
    for byte in 2..6 {
        file.write_all_at(&[byte], 100).unwrap();
        // SAFETY: inside the mapping.
        unsafe { at.cast::<u8>().add(PAGE).write_volatile(byte) };
        map.acquire();
        assert_eq!((map.load(100), map.load(PAGE), map.load(PAGE + 1)), (byte, byte, 1));
    }
    assert_eq!(map.0.address(), address);
    // SAFETY: the mapping, which nothing uses any more.
    unsafe { rustix::mm::munmap(at, LEN).unwrap() };
}

#[test]
fn releases_of_another_map_are_seen_and_registered_again() {
    let Some((_mount, path)) = mounted() else { return };
    let map = InPlace::new(&path);
    map.acquire();
    let file = open(&path);
    let gpu = Gpu::new(&file, 2);
    for byte in 2..10 {
        gpu.epoch(1, byte);
        // A page that the Linux kernel has dropped: a device would load its old bytes until it is registered again.
        assert!(map.acquire() >= PAGE as u64);
        assert_eq!((map.load(0), map.load(PAGE - 1), map.load(PAGE)), (byte, byte, 1));
    }
}

#[test]
fn map_is_right_while_others_release_all_the_time() {
    let Some((_mount, path)) = mounted() else { return };
    let (map, file) = (InPlace::new(&path), open(&path));
    let released = std::sync::atomic::AtomicU8::new(1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let gpu = Gpu::new(&file, PAGES);
            for byte in 2..120 {
                gpu.epoch(PAGES - 1, byte);
                released.store(byte, std::sync::atomic::Ordering::SeqCst);
            }
        });
        loop {
            let least = released.load(std::sync::atomic::Ordering::SeqCst);
            map.acquire();
            for page in 0..PAGES - 1 {
                assert!(map.load(page * PAGE) >= least, "page {page} is older than {least}");
            }
            if least == 119 {
                break;
            }
        }
    });
}

#[test]
fn truncated_pages_are_zeros_after_the_next_acquire_and_new_ones_are_seen() {
    let Some((_mount, path)) = mounted() else { return };
    let map = InPlace::new(&path);
    map.acquire();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(PAGE as u64 + 10).unwrap();
    assert_eq!(map.0.acquire(0, LEN as u64, Access::Read).unwrap(), PAGE as u64 + 10);
    assert_eq!((map.load(0), map.load(PAGE + 9), map.load(PAGE + 10), map.load(3 * PAGE)), (1, 1, 0, 0));
    file.write_all_at(&[7; PAGE], 3 * PAGE as u64).unwrap();
    map.acquire();
    assert_eq!((map.load(2 * PAGE), map.load(3 * PAGE), map.load(4 * PAGE - 1), map.load(4 * PAGE)), (0, 7, 7, 0));
}

#[test]
fn next_server_serves_it() {
    let Some((mount, path)) = mounted() else { return };
    let map = InPlace::new(&path);
    map.acquire();
    mount.kill_server();
    open(&path).write_all_at(&[9], 5).unwrap();
    map.acquire();
    assert_eq!((map.load(5), map.load(6), map.0.info().reattached), (9, 1, 1));
}

#[test]
fn misuse_is_refused() {
    let Some((mount, path)) = mounted() else { return };
    let map = InPlace::new(&path);
    let write = map.0.acquire(0, LEN as u64, Access::Write).unwrap_err();
    assert_eq!(write.errno, Errno::ACCESS, "{write}");
    let map = std::sync::Arc::new(map.0);
    let queued = map.acquire_async(0, LEN as u64, Access::Read, spinio_device::StreamId(0)).unwrap_err();
    assert_eq!(queued.errno, Errno::NOTSUP, "{queued}");
    let other = mount.reference.join("file");
    std::fs::write(&other, [1; PAGE]).unwrap();
    let refused =
        spinio_gaia::map_in_place(open(&other).as_raw_fd(), 0, PAGE as u64, Access::Read, device()).unwrap_err();
    assert!(refused.errno == Errno::NOTSUP && refused.to_string().contains("spinio_map"), "{refused}");
}
