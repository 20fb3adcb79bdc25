//! Acquires that ask the server nothing, because nothing can have changed; and each way in which something can.

#![expect(unsafe_code, reason = "mappings and device memory")]

mod common;

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::FallocateFlags;
use spinio_device::emulated::{Config, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::{Access, Advice, Map};
use spinio_testkit::eventually;

use crate::common::TestMount;
use crate::common::gpu::{Gpu, PAGE, open};

const PAGES: usize = 8;
const LEN: usize = PAGES * PAGE;

#[test]
fn server_role() {
    common::server_role();
}

/// A map for reading, by a descriptor for reading.
struct Reader {
    device: &'static Emulated,
    map: Map,
}

impl Reader {
    fn new(path: &Path) -> Reader {
        let file = File::open(path).unwrap();
        let device = Emulated::start(Config::parse("size=64M").unwrap()).unwrap();
        Reader { device, map: Map::new(file.as_raw_fd(), 0, LEN as u64, Access::Read, device).unwrap() }
    }

    /// Acquires all pages; whether that sent no message.
    fn acquire(&self) -> bool {
        self.acquire_part(0, LEN)
    }

    fn acquire_part(&self, offset: usize, len: usize) -> bool {
        let before = self.map.info().acquires_unchanged;
        self.map.acquire(offset as u64, len as u64, Access::Read).unwrap();
        self.map.info().acquires_unchanged > before
    }

    fn load(&self, at: usize) -> u8 {
        let mut byte = 0;
        let from = DeviceAddr(self.map.address() + at as u64);
        // SAFETY: the byte lives until the device was synchronized.
        unsafe { self.device.copy_out(StreamId(0), &mut byte, from, 1) }.unwrap();
        self.device.synchronize(StreamId(0), WaitMode::Block).unwrap();
        byte
    }

    /// Acquires until that asks nothing: the Linux kernel tells the server of the last close after `close` returns.
    fn settle(&self) {
        eventually("an acquire without a message", || self.acquire());
    }
}

fn mounted() -> Option<(TestMount, std::path::PathBuf)> {
    let mount = TestMount::new(|dir| std::fs::write(dir.join("file"), vec![1; LEN]).unwrap())?;
    let path = mount.dir.join("file");
    Some((mount, path))
}

#[test]
fn acquires_without_a_writer_need_no_server() {
    let Some((mount, path)) = mounted() else { return };
    let reader = Reader::new(&path);
    assert!(!reader.acquire(), "the first acquire fetches");
    reader.settle();
    mount.stop_server();
    assert!(reader.acquire() && reader.acquire_part(PAGE, 2 * PAGE));
    assert_eq!(reader.load(LEN - 1), 1);
    mount.continue_server();
}

#[test]
fn acquire_on_a_mount_that_has_ended_fails() {
    // The mount of another user ends with the last descriptor, and the map has one.
    let Some((mut mount, path)) = common::is_root().then(mounted).flatten() else { return };
    let reader = Reader::new(&path);
    reader.settle();
    // As `umount -f` does.
    spinio_fuse::mount::abort(&mount.dir).unwrap();
    mount.await_supervisor();
    assert!(reader.map.acquire(0, LEN as u64, Access::Read).is_err());
}

#[test]
fn writer_is_asked_for_until_it_closes_the_file() {
    let Some((_mount, path)) = mounted() else { return };
    let reader = Reader::new(&path);
    reader.settle();
    let writer = OpenOptions::new().write(true).open(&path).unwrap();
    // Nothing is written yet, but it could be at any time.
    assert!(!reader.acquire() && !reader.acquire());
    for byte in 2..10 {
        writer.write_all_at(&[byte], 100).unwrap();
        assert!(!reader.acquire());
        assert_eq!(reader.load(100), byte);
    }
    writer.write_all_at(&[77], 100).unwrap();
    drop(writer);
    reader.acquire();
    assert_eq!(reader.load(100), 77);
    reader.settle();
    assert_eq!(reader.load(100), 77);
}

#[test]
fn stores_of_a_mapping_whose_descriptor_is_closed_are_seen() {
    let Some((_mount, path)) = mounted() else { return };
    let reader = Reader::new(&path);
    reader.settle();
    let file = open(&path);
    let protection = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
    // SAFETY: a fresh mapping.
    let at = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), LEN, protection, rustix::mm::MapFlags::SHARED, &file, 0).unwrap()
    };
    drop(file);
    for byte in 2..5 {
        // SAFETY: inside the mapping.
        unsafe { at.cast::<u8>().add(PAGE).write_volatile(byte) };
        assert!(!reader.acquire());
        assert_eq!(reader.load(PAGE), byte);
    }
    // SAFETY: inside the mapping, which is not used afterwards.
    unsafe {
        at.cast::<u8>().add(PAGE).write_volatile(9);
        rustix::mm::munmap(at, LEN).unwrap();
    }
    reader.acquire();
    assert_eq!(reader.load(PAGE), 9);
    reader.settle();
    assert_eq!(reader.load(PAGE), 9);
}

#[test]
fn release_of_another_map_is_seen() {
    let Some((_mount, path)) = mounted() else { return };
    let reader = Reader::new(&path);
    let gpu = Gpu::new(&open(&path), PAGES);
    for byte in 2..6 {
        gpu.epoch(PAGES, byte);
        // That map's descriptor is open for writing.
        assert!(!reader.acquire());
        assert_eq!((reader.load(0), reader.load(LEN - 1)), (byte, byte));
    }
    gpu.epoch(PAGES, 6);
    drop(gpu);
    reader.acquire();
    assert_eq!(reader.load(0), 6);
    reader.settle();
    assert_eq!(reader.load(0), 6);
}

#[test]
fn truncation_by_name_is_seen() {
    let Some((_mount, path)) = mounted() else { return };
    let reader = Reader::new(&path);
    reader.settle();
    rustix::fs::chmod(&path, 0o644.into()).unwrap();
    assert!(reader.acquire(), "a change of attributes is none of the content");
    truncate(&path, PAGE as u64 + 1);
    let size = reader.map.acquire(0, LEN as u64, Access::Read).unwrap();
    assert_eq!((size, reader.load(PAGE), reader.load(PAGE + 1)), (PAGE as u64 + 1, 1, 0));
    reader.settle();
    truncate(&path, LEN as u64);
    let size = reader.map.acquire(0, LEN as u64, Access::Read).unwrap();
    assert_eq!((size, reader.load(PAGE), reader.load(PAGE + 1)), (LEN as u64, 1, 0));
}

#[test]
fn growth_by_pages_of_which_no_map_has_copies_is_seen() {
    let Some((_mount, path)) = mounted() else { return };
    let watcher = Reader::new(&path);
    let device = Emulated::start(Config::parse("size=64M").unwrap()).unwrap();
    let file = File::open(&path).unwrap();
    let map = Map::new(file.as_raw_fd(), 0, 2 * LEN as u64, Access::Read, device).unwrap();
    let size = || map.acquire(0, 2 * LEN as u64, Access::Read).unwrap();
    let check = |grow: &dyn Fn(&File), grown: usize| {
        truncate(&path, LEN as u64);
        eventually("an acquire without a message", || {
            let before = map.info().acquires_unchanged;
            size() == LEN as u64 && map.info().acquires_unchanged > before
        });
        grow(&OpenOptions::new().write(true).open(&path).unwrap());
        // Without an acquire of this map, which would ask while the file has a writer.
        watcher.settle();
        assert_eq!(size(), grown as u64);
    };
    let past = 3 * LEN as u64;
    check(&|file| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, LEN as u64 + 7).unwrap(), LEN + 7);
    // Past the pages of the map: a part of a page, and whole ones.
    check(&|file| file.write_all_at(&[5; 7], past).unwrap(), 2 * LEN);
    check(&|file| file.write_all_at(&[6; 2 * PAGE], past).unwrap(), 2 * LEN);
}

/// `truncate`: no descriptor is opened.
fn truncate(path: &Path, size: u64) {
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: a string that ends with 0.
    assert_eq!(unsafe { libc::truncate(path.as_ptr(), size as i64) }, 0);
}

#[test]
fn pages_that_were_not_acquired_or_were_dropped_are_fetched() {
    let Some((_mount, path)) = mounted() else { return };
    let reader = Reader::new(&path);
    eventually("an acquire without a message", || reader.acquire_part(0, 2 * PAGE));
    assert!(!reader.acquire_part(PAGE, 2 * PAGE));
    assert_eq!(reader.load(3 * PAGE - 1), 1);
    assert!(reader.acquire_part(0, 3 * PAGE));
    reader.settle();
    reader.map.advise(0, LEN as u64, Advice::DontNeed).unwrap();
    assert!(!reader.acquire());
    assert_eq!(reader.load(0), 1);
}

#[test]
fn next_server_is_asked() {
    let Some((mount, path)) = mounted() else { return };
    let reader = Reader::new(&path);
    reader.settle();
    for byte in 2..6 {
        mount.kill_server();
        // Served by the next one, which knows of no map.
        let writer = OpenOptions::new().write(true).open(&path).unwrap();
        writer.write_all_at(&[byte], 0).unwrap();
        drop(writer);
        assert!(!reader.acquire());
        assert_eq!(reader.load(0), byte);
    }
    assert!(!reader.acquire(), "a server that replaced another one does not know who has the file open");
}
