//! Releases that hand device memory over, while the server or the device process is killed at a step.
//!
//! A release that returned success is there, whatever is killed before its bytes have arrived; one that failed with ESTALE
//! is not.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use rustix::io::Errno;
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode, emulated};
use spinio_gaia::{Access, Map};

use crate::Step;

/// A chunk, and a part of a page in a second one.
pub(crate) const FILE: usize = (2 << 20) + 100;

/// The server is killed before the commit, or after it.
const UNCOMMITTED: [&str; 2] = ["server: chunks imported", "server: chunks kept"];
const COMMITTED: [&str; 3] = ["server: chunks committed", "server: bytes begin to arrive", "server: bytes arrived"];

pub(crate) struct Program {
    file: File,
    map: Map,
    released: u8,
}

impl Program {
    pub(crate) fn new(file: File) -> Program {
        let device = emulated::device(0).unwrap();
        let map = Map::new(file.as_raw_fd(), 0, FILE as u64, Access::Write, device).unwrap();
        Program { file, map, released: 0 }
    }

    pub(crate) fn run(&mut self, step: &Step<'_>) {
        let byte = (step.round % 250 + 1) as u8;
        let (device, fired, bytes) = (emulated::device(0).unwrap(), step.control.fired(), vec![byte; FILE]);
        self.map.overwrite(0, FILE as u64).unwrap();
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { device.copy_in(StreamId(0), DeviceAddr(self.map.address()), bytes.as_ptr(), FILE) }.unwrap();
        device.synchronize(StreamId(0), WaitMode::Block).unwrap();
        let released = self.map.release_handing_over(0, FILE as u64);
        let hit = step.control.fired() > fired;
        match &released {
            Ok(_) => self.released = byte,
            Err(error) => assert_eq!(error.errno, Errno::STALE, "{error}, {step}"),
        }
        assert!(released.is_ok() || hit, "an epoch is lost, {step}");
        if hit && UNCOMMITTED.contains(&step.point()) {
            assert!(released.is_err(), "it was not committed, {step}");
        }
        if hit && COMMITTED.contains(&step.point()) {
            assert!(released.is_ok(), "it was committed, {step}");
        }
        let mut seen = vec![0; FILE];
        self.file.read_exact_at(&mut seen, 0).unwrap();
        let wrong = seen.iter().position(|byte| *byte != self.released);
        assert_eq!(wrong, None, "{step}");
        if step.round.is_multiple_of(2) {
            self.file.sync_all().unwrap();
        }
    }
}
