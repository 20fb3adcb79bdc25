//! Releases that come in parts: of more pages than the stage has, and of more runs than a message has.

#![expect(unsafe_code, reason = "device memory")]

mod common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use spinio_device::emulated::{Config, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::{Access, Map};
use spinio_sys::Errno;

use crate::common::TestMount;
use crate::common::both::Random;
use crate::common::gpu::{PAGE, open};

/// Ten times the part of a release, and a part of a page.
const LEN: usize = 10 * 1024 * PAGE + 100;

#[test]
fn server_role() {
    common::server_role();
}

struct Test {
    map: Map,
    device: &'static Emulated,
    file: File,
    /// Dropped last: a daemon serves a mount that is in use.
    mount: TestMount,
}

impl Test {
    fn new() -> Option<Test> {
        // Not enough for two versions of the file: a release that needs twins of all pages has no room.
        let mount = TestMount::with_supervisor(
            |dir| File::create(dir.join("file")).unwrap().set_len(LEN as u64).unwrap(),
            |command| {
                command.env(common::MEMORY, (LEN * 3 / 2).to_string());
            },
        )?;
        let file = open(&mount.dir.join("file"));
        let device = Emulated::start(Config::parse("size=64M").unwrap()).unwrap();
        let map = Map::new(file.as_raw_fd(), 0, LEN as u64, Access::Write, device).unwrap();
        Some(Test { map, device, file, mount })
    }

    fn acquire(&self) {
        self.map.acquire(0, LEN as u64, Access::Write).unwrap();
    }

    fn release(&self) -> Result<u64, spinio_gaia::Error> {
        self.map.release(0, LEN as u64)
    }

    /// Replaces the replica of the whole file.
    fn store(&self, bytes: &[u8]) {
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { self.device.copy_in(StreamId(0), DeviceAddr(self.map.address()), bytes.as_ptr(), bytes.len()) }
            .unwrap();
        self.device.synchronize(StreamId(0), WaitMode::Block).unwrap();
    }

    fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }
}

#[test]
fn every_byte_of_a_release_in_many_parts_arrives() {
    let Some(test) = Test::new() else { return };
    let mut random = Random::new(7);
    let mut now: Vec<u8> = (0..LEN).map(|_| random.next() as u8).collect();
    test.acquire();
    test.store(&now);
    assert_eq!(test.release().unwrap(), LEN as u64);
    assert!(test.content() == now, "all pages");
    assert_eq!(test.device.resources_in_use().registered, 1, "the stage");

    // Every other page: more runs than a message has. A CPU program changes other bytes of some of them meanwhile.
    test.acquire();
    for page in (0..LEN / PAGE).step_by(2) {
        now[page * PAGE + 10] ^= 255;
    }
    test.store(&now);
    for page in (0..LEN / PAGE).step_by(500) {
        test.file.write_all_at(b"cpu", (page * PAGE + 20) as u64).unwrap();
        now[page * PAGE + 20..][..3].copy_from_slice(b"cpu");
    }
    test.release().unwrap();
    assert!(test.map.info().pages_merged > 10, "{:?}", test.map.info());
    assert!(test.content() == now, "every other page");
    test.map.sync(0, LEN as u64).unwrap();
    assert_eq!(test.device.resources_in_use().registered, 1, "once for the life of the map");
    drop(test.map);
    assert_eq!(test.device.resources_in_use().registered, 0, "unmapped");
    assert!(std::fs::read(test.mount.dir.join("file")).unwrap() == now, "on storage");
}

#[test]
fn release_in_many_parts_is_all_or_nothing_when_the_server_is_killed() {
    let Some(test) = Test::new() else { return };
    let mut random = Random::new(11);
    test.acquire();
    test.store(&vec![1; LEN]);
    let began = Instant::now();
    test.release().unwrap();
    let most = began.elapsed().as_micros() as u64 * 3 / 2;
    let (mut committed, mut lost, mut before) = (0, 0, 1_u8);
    for round in 2..18_u8 {
        test.acquire();
        test.store(&vec![round; LEN]);
        let delay = Duration::from_micros(random.range(0, most));
        let released = std::thread::scope(|threads| {
            threads.spawn(|| {
                std::thread::sleep(delay);
                test.mount.kill_server();
            });
            test.release()
        });
        match released {
            Ok(bytes) => {
                assert_eq!(bytes, LEN as u64);
                (committed, before) = (committed + 1, round);
            }
            Err(e) if e.errno == Errno::STALE => lost += 1,
            Err(e) => panic!("{e}"),
        }
        let content = test.content();
        let wrong = content.iter().position(|byte| *byte != before);
        assert_eq!(wrong, None, "round {round}: {committed} committed, {lost} lost");
    }
    eprintln!("{committed} releases were committed, {lost} lost");
    assert_eq!(committed + lost, 16);
    // Stages of servers that have ended are given back too.
    assert!(test.device.resources_in_use().registered > 1);
    drop(test.map);
    assert_eq!(test.device.resources_in_use().registered, 0);
}
