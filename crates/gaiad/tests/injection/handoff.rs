//! Releases that hand device memory over, while the server or the device process is killed at a step.
//!
//! A release that returned success is there, whatever is killed before its bytes have arrived; one that failed with ESTALE
//! is not.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, prlimit};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode, emulated};
use spinio_gaia::{Access, Map};

use crate::Step;
use crate::common::{TestMount, device_process};

/// A chunk, and a part of a page in a second one.
pub(crate) const FILE: usize = (2 << 20) + 100;

/// The server is killed before the commit, or after it.
const UNCOMMITTED: [&str; 3] = ["server: chunks imported", "server: chunks promised memory", "server: chunks kept"];
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

    fn release(&self, byte: u8) -> Result<u64, spinio_gaia::Error> {
        let (device, bytes) = (emulated::device(0).unwrap(), vec![byte; FILE]);
        self.map.overwrite(0, FILE as u64).unwrap();
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { device.copy_in(StreamId(0), DeviceAddr(self.map.address()), bytes.as_ptr(), FILE) }.unwrap();
        device.synchronize(StreamId(0), WaitMode::Block).unwrap();
        self.map.release_handing_over(0, FILE as u64)
    }

    /// A release whose bytes are lost, since the device process may write nothing: one fsync says so, also where the server
    /// is killed just before its answer.
    pub(crate) fn lose(&mut self, mount: &TestMount, step: &Step<'_>) {
        self.run(step);
        self.file.sync_all().unwrap();
        let before = self.map.info().releases_handed_over;
        let process = device_process(mount.server()).expect("it has copied");
        prlimit(Some(process), Resource::Fsize, Rlimit { current: Some(0), ..getrlimit(Resource::Fsize) }).unwrap();
        self.release(251).unwrap();
        assert!(self.map.info().releases_handed_over > before, "{step}");
        let told = self.file.sync_all().unwrap_err();
        assert_eq!(told.raw_os_error(), Some(Errno::IO.raw_os_error()), "{step}");
        self.file.sync_all().unwrap();
        // It has ended with its server, if that was killed.
        let _ = prlimit(Some(process), Resource::Fsize, getrlimit(Resource::Fsize));
    }

    pub(crate) fn run(&mut self, step: &Step<'_>) {
        let byte = (step.round % 250 + 1) as u8;
        let fired = step.control.fired();
        let released = self.release(byte);
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
