//! Maps of a mounted file on two devices of one process, and on the same two of another process.

#![expect(unsafe_code, reason = "device memory")]

mod common;

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use spinio_device::emulated::{self, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::{Access, Map, StreamRelease};

use crate::common::TestMount;

const PAGE: usize = 4096;
const LEN: usize = 4 * PAGE;
/// Set in the other process, to the file.
const OTHER: &str = "SPINIO_TWO_DEVICES_TEST_FILE";

#[test]
fn server_role() {
    common::server_role();
}

/// A map for writing on `emulated:0` or `emulated:1`.
struct Gpu(&'static Emulated, Arc<Map>);

impl Gpu {
    fn new(file: &File, ordinal: u32) -> Gpu {
        emulated::configure("devices=2,size=64M").unwrap();
        let device = emulated::device(ordinal).unwrap();
        Gpu(device, Arc::new(Map::new(file.as_raw_fd(), 0, LEN as u64, Access::Write, device).unwrap()))
    }

    fn acquire(&self) {
        self.1.acquire(0, LEN as u64, Access::Write).unwrap();
    }

    fn release(&self) {
        self.1.release(0, LEN as u64).unwrap();
    }

    fn load(&self, at: usize) -> u8 {
        let mut byte = 0;
        // SAFETY: the byte lives until the device was synchronized.
        unsafe { self.0.copy_out(StreamId(0), &mut byte, DeviceAddr(self.1.address() + at as u64), 1) }.unwrap();
        self.0.synchronize(StreamId(0), WaitMode::Block).unwrap();
        byte
    }

    fn store(&self, at: usize, byte: u8) {
        // SAFETY: as above.
        unsafe { self.0.copy_in(StreamId(0), DeviceAddr(self.1.address() + at as u64), &byte, 1) }.unwrap();
        self.0.synchronize(StreamId(0), WaitMode::Block).unwrap();
    }
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn mount() -> Option<TestMount> {
    TestMount::new(|dir| std::fs::write(dir.join("file"), vec![1; LEN]).unwrap())
}

#[test]
fn release_on_one_device_is_seen_by_an_acquire_on_the_other() {
    let Some(mount) = mount() else { return };
    let file = open(&mount.dir.join("file"));
    let gpus = [0, 1].map(|ordinal| Gpu::new(&file, ordinal));
    for round in 2..20 {
        let (one, other) = (&gpus[round % 2], &gpus[(round + 1) % 2]);
        one.acquire();
        one.store(round * 700, round as u8);
        one.release();
        other.acquire();
        assert_eq!(other.load(round * 700), round as u8, "round {round}");
        other.release();
    }
}

#[test]
fn stores_of_both_devices_to_one_page_are_merged() {
    let Some(mount) = mount() else { return };
    let path = mount.dir.join("file");
    let file = open(&path);
    let gpus = [0, 1].map(|ordinal| Gpu::new(&file, ordinal));
    for (n, gpu) in gpus.iter().enumerate() {
        gpu.acquire();
        gpu.store(10 + n, 100 + n as u8);
        gpu.store(3 * PAGE + n, 110 + n as u8);
    }
    gpus.iter().for_each(Gpu::release);
    assert_eq!(gpus[1].1.info().pages_merged, 2);
    gpus.iter().for_each(Gpu::acquire);
    let bytes = std::fs::read(&path).unwrap();
    for at in [9, 10, 11, 12, 3 * PAGE, 3 * PAGE + 1] {
        assert_eq!([gpus[0].load(at), gpus[1].load(at)], [bytes[at]; 2], "byte {at}");
    }
    assert_eq!(bytes[9..13], [1, 100, 101, 1]);
    assert_eq!(bytes[3 * PAGE..3 * PAGE + 3], [110, 111, 1]);
}

#[test]
fn each_device_has_its_own_stream_order() {
    let Some(mount) = mount() else { return };
    let file = open(&mount.dir.join("file"));
    let gpus = [0, 1].map(|ordinal| Gpu::new(&file, ordinal));
    // The first device does not run: the calls of the second are not held up by it.
    let streams = gpus.each_ref().map(|gpu| gpu.0.new_stream().unwrap());
    gpus[0].0.pause();
    let queue = |n: usize| {
        gpus[n].1.acquire_async(0, LEN as u64, Access::Write, streams[n]).unwrap();
        let to = DeviceAddr(gpus[n].1.address() + 20 + n as u64);
        static BYTE: u8 = 50;
        // SAFETY: the byte is static.
        unsafe { gpus[n].0.copy_in(streams[n], to, &raw const BYTE, 1) }.unwrap();
        gpus[n]
            .1
            .release_async(0, LEN as u64, StreamRelease::new(streams[n], |published| assert!(published.is_ok())))
            .unwrap();
    };
    queue(1);
    gpus[1].0.synchronize(streams[1], WaitMode::Block).unwrap();
    gpus[0].0.resume();
    queue(0);
    gpus[0].0.synchronize(streams[0], WaitMode::Block).unwrap();
    gpus.iter().for_each(Gpu::acquire);
    for gpu in &gpus {
        assert_eq!([20, 21].map(|at| gpu.load(at)), [50, 50]);
    }
}

/// The other process: adds 1 to a byte on each of its devices.
#[test]
fn other_process() {
    let Some(path) = std::env::var_os(OTHER) else { return };
    let file = open(Path::new(&path));
    for ordinal in [0, 1] {
        let gpu = Gpu::new(&file, ordinal);
        gpu.acquire();
        gpu.store(30, gpu.load(30) + 1);
        gpu.release();
    }
    println!("done");
    std::process::exit(0);
}

#[test]
fn two_processes_map_on_both_devices() {
    let Some(mount) = mount() else { return };
    let path = mount.dir.join("file");
    let file = open(&path);
    let gpus = [0, 1].map(|ordinal| Gpu::new(&file, ordinal));
    for (n, gpu) in gpus.iter().enumerate() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "other_process", "--nocapture", "-q"]).env(OTHER, &path).stdout(Stdio::piped());
        let mut other = command.spawn().unwrap();
        let lines = BufReader::new(other.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line.ends_with("done")));
        assert!(other.wait().unwrap().success());
        gpu.acquire();
        assert_eq!(gpu.load(30), 1 + 3 * n as u8 + 2);
        gpu.store(30, gpu.load(30) + 1);
        gpu.release();
    }
}
