//! `spinio gaia explain`: what it says while this process has a map of the file.

#![expect(unsafe_code, reason = "device memory")]

mod common;

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use common::PROGRAM;
use common::mount::Mount;
use spinio_device::emulated::{Config, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::{Access, Map};

const PAGE: usize = 4096;
const PAGES: usize = 8;
/// The server writes released pages to the file after this time.
const WRITTEN_AFTER: Duration = Duration::from_secs(5);

fn explain(path: &Path, options: &[&str]) -> Output {
    let mut command = Command::new("timeout");
    command.args(["60", PROGRAM, "gaia", "explain"]).args(options).arg(path).output().unwrap()
}

fn json(path: &Path) -> serde_json::Value {
    let said = explain(path, &["--json"]);
    assert!(said.status.success(), "{said:?}");
    serde_json::from_slice(&said.stdout).unwrap()
}

fn maps(range: &serde_json::Value) -> [u64; 3] {
    ["maps_current", "maps_stale", "maps_in_epoch"].map(|name| range[name].as_u64().unwrap())
}

#[test]
fn released_page_and_copies_are_named() {
    let Some(mount) = Mount::new() else { return };
    let path = mount.dir().join("file");
    std::fs::write(&path, [1; PAGES * PAGE - 100]).unwrap();
    let before = json(&path);
    assert_eq!(before["ranges"].as_array().unwrap().len(), 1);
    assert_eq!((&before["ranges"][0]["bytes"], &before["ranges"][0]["head"]), (&(32668.into()), &("file".into())));
    assert_eq!(before["maps"].as_array().unwrap().len(), 0);

    let device = Emulated::start(Config::parse("size=64M").unwrap()).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let new = || Map::new(file.as_raw_fd(), 0, (PAGES * PAGE) as u64, Access::Write, device).unwrap();
    let (writer, reader) = (new(), new());
    let release = |byte| {
        reader.acquire(0, 4 * PAGE as u64, Access::Read).unwrap();
        writer.acquire(0, (PAGES * PAGE) as u64, Access::Write).unwrap();
        let to = DeviceAddr(writer.address() + PAGE as u64);
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { device.copy_in(StreamId(0), to, [byte; 8].as_ptr(), 8) }.unwrap();
        device.synchronize(StreamId(0), WaitMode::Block).unwrap();
        let released = Instant::now();
        writer.release(0, 4 * PAGE as u64).unwrap();
        let (after, text) = (json(&path), String::from_utf8(explain(&path, &[]).stdout).unwrap());
        (released.elapsed() < WRITTEN_AFTER).then_some((after, text))
    };
    // Again on a machine that is so slow that the page was written to the file meanwhile.
    let (after, text) = (2..).find_map(release).unwrap();
    let ranges = after["ranges"].as_array().unwrap();
    let seen: Vec<_> = ranges
        .iter()
        .map(|range| (range["offset"].as_u64().unwrap() as usize / PAGE, range["head"].as_str().unwrap(), maps(range)))
        .collect();
    let expected = [
        (0, "file", [2, 0, 0]),
        // What the other map has is older.
        (1, "memory", [1, 1, 0]),
        (2, "file", [2, 0, 0]),
        (4, "file", [0, 0, 1]),
    ];
    assert_eq!(seen, expected, "{after:#}");
    let holders = after["maps"].as_array().unwrap();
    assert_eq!(holders.len(), 2);
    for holder in holders {
        assert_eq!(holder["pid"].as_u64(), Some(std::process::id().into()));
    }
    let total = |name: &str| holders.iter().map(|holder| holder[name].as_u64().unwrap()).sum::<u64>() as usize;
    assert_eq!((total("current_bytes"), total("stale_bytes"), total("epoch_bytes")), (7 * PAGE, PAGE, 4 * PAGE));

    assert!(text.contains("4 KiB of released bytes that are not in the file yet"), "{text}");
    file.sync_all().unwrap();
    assert!(json(&path)["ranges"].as_array().unwrap().iter().all(|range| range["head"] == "file"));
    drop((writer, reader, file));
}

#[test]
fn file_without_a_mount_is_an_error_that_says_so() {
    let dir = common::folder();
    let path = common::file(dir.path(), "file", 5000);
    let said = explain(&path, &[]);
    assert_eq!(said.status.code(), Some(1));
    let complaint = String::from_utf8(said.stderr).unwrap();
    assert!(complaint.contains("is not below a mount of GAIA"), "{complaint}");
    let missing = explain(&dir.path().join("missing"), &[]);
    assert!(String::from_utf8(missing.stderr).unwrap().contains("missing: No such file"), "{:?}", missing.status);
}
