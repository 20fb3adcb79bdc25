//! What the daemon's memory beside the pages of a map is.

#![expect(unsafe_code, reason = "device memory")]

mod common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use spinio_device::emulated::{Config, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::{Access, Map};

use crate::common::TestMount;
use crate::common::gpu::{PAGE, open};

const PAGES: usize = 32 << 10;
const LEN: u64 = (PAGES * PAGE) as u64;

/// From then on the daemon may write the released pages out, which takes memory for a time.
const WRITTEN_OUT_AFTER: Duration = Duration::from_secs(5);
/// For machines that are too slow now and then.
const ROUNDS: usize = 5;

#[test]
fn server_role() {
    common::server_role();
}

/// Bytes of host memory of the daemon.
fn memory(mount: &TestMount) -> u64 {
    let of = |pid| {
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
        let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024
    };
    of(mount.server()) + of(mount.supervisor())
}

/// Of a file that another map has just released, before it is written out: its pages are in the daemon's memory already.
#[test]
fn map_of_released_pages_takes_one_percent_of_them_at_most() {
    let mount = TestMount::with_supervisor(
        |dir| File::create(dir.join("file")).unwrap().set_len(LEN).unwrap(),
        |command| {
            // Few enough are used that nothing is written out early.
            command.env(common::MEMORY, (LEN * 12).to_string());
        },
    );
    let Some(mount) = mount else { return };
    let file = open(&mount.dir.join("file"));
    let device = Emulated::start(Config::parse("size=512M").unwrap()).unwrap();
    let map = || Map::new(file.as_raw_fd(), 0, LEN, Access::Write, device).unwrap();
    let first = map();
    for round in 1..=ROUNDS {
        // What the last round has left.
        file.sync_all().unwrap();
        let (begun, bytes) = (Instant::now(), vec![round as u8; PAGES * PAGE]);
        first.acquire(0, LEN, Access::Write).unwrap();
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { device.copy_in(StreamId(0), DeviceAddr(first.address()), bytes.as_ptr(), bytes.len()) }.unwrap();
        device.synchronize(StreamId(0), WaitMode::Block).unwrap();
        assert_eq!(first.release(0, LEN).unwrap(), LEN);
        let (second, before) = (map(), memory(&mount));
        second.acquire(0, LEN, Access::Write).unwrap();
        let more = memory(&mount).saturating_sub(before);
        second.release(0, LEN).unwrap();
        if begun.elapsed() < WRITTEN_OUT_AFTER {
            let share = more as f64 / LEN as f64;
            assert!(share <= 0.01, "{:.2} % of the pages", share * 100.0);
            return;
        }
    }
    println!("skipped: this machine takes longer than {WRITTEN_OUT_AFTER:?} to release and acquire {LEN} bytes");
}
