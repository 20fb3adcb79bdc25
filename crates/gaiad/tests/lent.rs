//! CPU reads that are answered from device memory that programs have lent, while the file is not in the host's page cache.
//!
//! Which memory a read was answered from shows in a file whose bytes below the mount were changed past the server.

#![expect(unsafe_code, reason = "device memory")]

mod common;

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use rustix::process::{Pid, Signal, kill_process};
use spinio_device::emulated::{self, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::{Access, Advice, Map};
use spinio_sys::linux::{self, Advice as FileAdvice};
use spinio_testkit::eventually;

use crate::common::TestMount;
use crate::common::gpu::{PAGE, open};

/// A chunk and a half, and a part of a page.
const LEN: usize = (3 << 20) + 100;
/// Pages of the first chunk.
const LENT: usize = (2 << 20) / PAGE;

#[test]
fn server_role() {
    common::server_role();
}

/// One that other processes know, as the daemon's.
fn device() -> &'static Emulated {
    emulated::configure("size=64M").unwrap();
    emulated::device(0).unwrap()
}

fn byte(page: usize) -> u8 {
    (page % 200) as u8 + 1
}

struct Lent {
    path: PathBuf,
    /// The file below the mount.
    below: File,
    map: Map,
    device: &'static Emulated,
    /// Dropped last: an ordinary user cannot abort a mount that is in use, and its daemon serves it until it is not.
    mount: TestMount,
}

impl Lent {
    /// A map of the whole file, acquired and lent. `None`, with a message, where that is not possible.
    fn new(access: Access) -> Option<Lent> {
        let mut below = None;
        let mount = TestMount::new(|dir| {
            let path = dir.join("file");
            let bytes: Vec<u8> = (0..LEN).map(|i| byte(i / PAGE)).collect();
            std::fs::write(&path, bytes).unwrap();
            below = Some(OpenOptions::new().read(true).write(true).open(&path).unwrap());
        })?;
        let (path, below, device) = (mount.dir.join("file"), below.unwrap(), device());
        let file = if access == Access::Write { open(&path) } else { File::open(&path).unwrap() };
        let map = Map::new(file.as_raw_fd(), 0, LEN as u64, access, device).unwrap();
        let lent = Lent { mount, path, below, map, device };
        lent.evict();
        if linux::cachestat(lent.below.as_raw_fd(), 0, 0).is_ok_and(|stat| stat.cached > 0) {
            eprintln!("skipped: the file system keeps all files in memory");
            return None;
        }
        lent.map.acquire(0, LEN as u64, access).unwrap();
        lent.map.advise(0, LEN as u64, Advice::Lend).unwrap();
        Some(lent)
    }

    /// No page of the file is in host memory.
    fn evict(&self) {
        let above = open(&self.path);
        for file in [&above, &self.below] {
            file.sync_all().unwrap();
            linux::fadvise(file.as_raw_fd(), 0, 0, FileAdvice::DontNeed).unwrap();
        }
    }

    /// A page, as a CPU program reads it from a file that is not in host memory; no byte of it differs from the others.
    fn read(&self, page: usize) -> u8 {
        self.evict();
        let (mut bytes, file) = (vec![0; PAGE], File::open(&self.path).unwrap());
        // Not what else the Linux kernel would read ahead.
        linux::fadvise(file.as_raw_fd(), 0, 0, FileAdvice::Random).unwrap();
        let got = file.read_at(&mut bytes, (page * PAGE) as u64).unwrap();
        assert!(got > 0 && bytes[..got].iter().all(|byte| *byte == bytes[0]), "page {page} is mixed");
        bytes[0]
    }

    fn device_pages(&self) -> u64 {
        spinio_gaiad::status(&self.mount.dir).unwrap().server.totals.from_devices
    }

    /// Changes a page of the file in a way that the server does not see.
    fn hide_below(&self, page: usize) {
        self.below.write_all_at(&[255; PAGE], (page * PAGE) as u64).unwrap();
    }

    /// The device process ends when it is idle, and then the file is read.
    fn eventually_reads(&self, page: usize, wanted: u8) {
        eventually("a read from the device", || self.read(page) == wanted);
    }

    fn store(&self, page: usize, byte: u8) {
        let bytes = [byte; PAGE];
        let to = DeviceAddr(self.map.address() + (page * PAGE) as u64);
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { self.device.copy_in(StreamId(0), to, bytes.as_ptr(), PAGE) }.unwrap();
        self.device.synchronize(StreamId(0), WaitMode::Block).unwrap();
    }
}

#[test]
fn reads_of_a_file_that_is_not_in_host_memory_come_from_the_device() {
    let Some(lent) = Lent::new(Access::Read) else { return };
    for page in [0, 7, LENT - 1, LENT, LEN / PAGE] {
        lent.hide_below(page);
        lent.eventually_reads(page, byte(page));
    }
    assert!(lent.device_pages() >= 5);
    // A file that is in host memory is read there.
    let (mut bytes, before) = (vec![0; PAGE], lent.device_pages());
    lent.below.read_at(&mut bytes, 0).unwrap();
    let above = open(&lent.path);
    linux::fadvise(above.as_raw_fd(), 0, 0, FileAdvice::DontNeed).unwrap();
    above.read_at(&mut bytes, 0).unwrap();
    assert_eq!((bytes[0], lent.device_pages()), (255, before));
    // What was lent is taken back.
    lent.map.advise(0, LEN as u64, Advice::DontNeed).unwrap();
    assert_eq!((lent.read(7), lent.map.info().device_bytes), (255, 0));
}

#[test]
fn end_of_a_map_ends_what_it_has_lent() {
    let Some(lent) = Lent::new(Access::Read) else { return };
    lent.hide_below(3);
    lent.eventually_reads(3, byte(3));
    let Lent { mount, path, below, map, device } = lent;
    drop(map);
    let file = File::open(&path).unwrap();
    let map = Map::new(file.as_raw_fd(), 0, PAGE as u64, Access::Read, device).unwrap();
    drop(file);
    let lent = Lent { mount, path, below, map, device };
    // The server learns of it when the connection ends.
    lent.eventually_reads(3, 255);
    assert_eq!(lent.read(3), 255);
}

#[test]
fn what_the_memory_has_instead_of_the_files_bytes_is_not_read() {
    let Some(lent) = Lent::new(Access::Write) else { return };
    lent.eventually_reads(2, byte(2));
    eventually("a read from the device", || lent.read(5) == byte(5) && lent.device_pages() > 0);
    // A store that is not released.
    lent.store(2, 201);
    assert_eq!(lent.read(2), byte(2));
    // A released one, whose page is written to the file, and of which the memory has the bytes.
    lent.map.release(0, LEN as u64).unwrap();
    assert_eq!(lent.read(2), 201);
    lent.map.sync(0, LEN as u64).unwrap();
    assert_eq!(lent.read(2), 201);
    // The memory has older bytes than the file: a program has written, and the page was lent again, or not.
    for lends in [false, true] {
        let byte = 210 + u8::from(lends);
        open(&lent.path).write_all_at(&[byte; PAGE], (9 * PAGE) as u64).unwrap();
        if lends {
            lent.map.advise(0, LEN as u64, Advice::Lend).unwrap();
        }
        assert_eq!(lent.read(9), byte);
    }
    // Pages that were cut off and came back.
    let file = open(&lent.path);
    file.set_len((100 * PAGE) as u64).unwrap();
    file.set_len(LEN as u64).unwrap();
    assert_eq!((lent.read(100), lent.read(99)), (0, byte(99)));
    // Zeros instead of a hole's old bytes.
    let len = (4 * PAGE) as u64;
    rustix::fs::fallocate(
        &file,
        rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
        0,
        len,
    )
    .unwrap();
    assert_eq!((lent.read(0), lent.read(3), lent.read(4)), (0, 0, byte(4)));
    assert_eq!(lent.mount.servers(), 1);
}

/// The children of a process.
fn children(pid: u32) -> Vec<i32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>()).collect()
}

#[test]
fn device_process_that_dies_and_a_new_server_leave_reads_right() {
    let Some(lent) = Lent::new(Access::Read) else { return };
    lent.hide_below(3);
    lent.eventually_reads(3, byte(3));
    // It may have ended because it was idle.
    for pid in children(lent.mount.server()) {
        let _ = kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL);
    }
    lent.eventually_reads(3, byte(3));
    lent.mount.kill_server();
    // The new one has no chunk until the map lends again.
    assert_eq!(lent.read(3), 255);
    lent.below.write_all_at(&[byte(3); PAGE], (3 * PAGE) as u64).unwrap();
    lent.map.advise(0, LEN as u64, Advice::Lend).unwrap();
    lent.hide_below(3);
    lent.eventually_reads(3, byte(3));
}
