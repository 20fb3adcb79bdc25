//! Maps of files of a mount, in CUDA memory, by the fake driver: it dies where the real one would crash, as in a thread
//! that does not share the program's descriptors.
//!
//! Maps on a GPU are tested there: crates/python/tests/test_gaia.py, and the demo.

#![expect(unsafe_code, reason = "device memory")]

mod common;
#[path = "../../sys/tests/fake/mod.rs"]
mod fake;

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use rustix::io::Errno;
use spinio_device::{Device, DeviceAddr, DeviceKind, StreamId, WaitMode, registry};
use spinio_gaia::{Access, Map};
use spinio_sys::cuda::Driver;

use crate::common::TestMount;

const PAGE: usize = 4096;

#[test]
fn server_role() {
    common::server_role();
}

/// The device of the context that is now current on this thread.
fn gpu() -> Option<&'static dyn Device> {
    let _fake = fake::open()?;
    registry::hint_open(b"/dev/nvidiactl");
    let driver = Driver::loaded().unwrap();
    driver.init().unwrap();
    let context = driver.primary_retain(0).unwrap();
    // SAFETY: the fake driver frees no context.
    unsafe { driver.set_current(context) }.unwrap();
    registry::current_device()
}

fn load(device: &dyn Device, map: &Map, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let from = DeviceAddr(map.address() + offset as u64);
    // SAFETY: the fake driver copies at once.
    unsafe { device.copy_out(StreamId(0), bytes.as_mut_ptr(), from, len) }.unwrap();
    device.synchronize(StreamId(0), WaitMode::Block).unwrap();
    bytes
}

fn store(device: &dyn Device, map: &Map, offset: usize, bytes: &[u8]) {
    let to = DeviceAddr(map.address() + offset as u64);
    // SAFETY: as above.
    unsafe { device.copy_in(StreamId(0), to, bytes.as_ptr(), bytes.len()) }.unwrap();
    device.synchronize(StreamId(0), WaitMode::Block).unwrap();
}

#[test]
fn cuda_memory_and_cpu_programs_see_each_other() {
    let Some(device) = gpu() else { return };
    assert_eq!(device.id().kind, DeviceKind::Cuda);
    let before: Vec<u8> = (0..10 * PAGE + 100).map(|i| (i * 7) as u8).collect();
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), &before).unwrap()) else { return };
    let file = OpenOptions::new().read(true).write(true).open(mount.dir.join("file")).unwrap();
    let map = |access| Map::new(file.as_raw_fd(), 0, 11 * PAGE as u64, access, device).unwrap();
    let (writer, reader) = (map(Access::Write), map(Access::Read));
    let whole = writer.len();
    let mut now = before;
    assert_eq!(writer.acquire(0, whole, Access::Write).unwrap(), now.len() as u64);
    assert_eq!(load(device, &writer, 0, now.len()), now);
    for round in 0..20_u8 {
        // Different bytes of one page: by a kernel, and by a CPU program that the kernel does not see yet.
        let page = usize::from(round) % 10 * PAGE;
        store(device, &writer, page + 3, &[round, 250]);
        file.write_all_at(&[round, 249], (page + 9) as u64).unwrap();
        now[page + 3..page + 5].copy_from_slice(&[round, 250]);
        now[page + 9..page + 11].copy_from_slice(&[round, 249]);
        if round % 5 == 4 {
            writer.release(0, whole).unwrap();
            reader.acquire(0, whole, Access::Read).unwrap();
            assert_eq!(load(device, &reader, 0, now.len()), now, "round {round}");
            let mut read = vec![0; now.len()];
            file.read_exact_at(&mut read, 0).unwrap();
            assert_eq!(read, now, "round {round}");
            if round == 9 {
                mount.kill_server();
            }
            writer.acquire(0, whole, Access::Write).unwrap();
        }
    }
    let info = writer.info();
    assert_eq!((info.releases, info.reattached, info.pages_committed), (4, 1, 20));
    assert_eq!(writer.release(0, whole).unwrap(), 0, "no store changed a byte");
}

/// The context of a map may be destroyed: its calls then fail, and the map can be dropped.
#[test]
fn map_of_a_destroyed_context_fails_and_can_be_unmapped() {
    // In a process of its own: the other test uses the context.
    const CHILD: &str = "SPINIO_GAIAD_TEST_RESET";
    if std::env::var_os(CHILD).is_none() {
        let test = std::env::current_exe().unwrap();
        let name = "map_of_a_destroyed_context_fails_and_can_be_unmapped";
        let status = std::process::Command::new(test).args(["--exact", name, "--nocapture"]).env(CHILD, "1").status();
        assert!(status.unwrap().success());
        return;
    }
    let Some(device) = gpu() else { return };
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), [1; PAGE]).unwrap()) else { return };
    let file = OpenOptions::new().read(true).write(true).open(mount.dir.join("file")).unwrap();
    let map = Map::new(file.as_raw_fd(), 0, PAGE as u64, Access::Write, device).unwrap();
    map.acquire(0, PAGE as u64, Access::Write).unwrap();
    fake::open().unwrap().reset(0);
    assert_eq!(map.release(0, PAGE as u64).unwrap_err().errno, Errno::IO);
    drop(map);
    let mut byte = [0];
    file.read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [1]);
}
