//! `spinio explain`: its output for a real file.

mod common;

use std::os::unix::fs::FileExt;

use common::{file, folder, spinio, stderr, stdout};
use serde_json::Value;

fn json(command: &mut assert_cmd::Command) -> Value {
    serde_json::from_str(&stdout(&command.arg("--json").assert().success())).unwrap()
}

fn sum(list: &Value) -> u64 {
    list.as_array().unwrap().iter().map(|v| v["length"].as_u64().unwrap()).sum()
}

#[test]
fn extents_and_segments_cover_the_range_exactly() {
    let dir = folder();
    let path = file(dir.path(), "data", 3_000_001);
    let explained = json(spinio().args(["explain", "--device", "emulated", "--offset", "5000"]).arg(&path));
    assert_eq!(explained["length"], 2_995_001);
    assert_eq!(sum(&explained["extents"]), 2_995_001);
    assert_eq!(sum(&explained["segments"]), 2_995_001);
    let mut at = 5000;
    for segment in explained["segments"].as_array().unwrap() {
        assert_eq!(segment["offset"].as_u64().unwrap(), at);
        at += segment["length"].as_u64().unwrap();
        assert!(!segment["reason"].as_str().unwrap().is_empty());
    }
}

#[test]
fn half_cached_file_shows_both_halves() {
    const MIB: u64 = 1 << 20;
    let dir = folder();
    let path = file(dir.path(), "data", (16 * MIB) as usize);
    let open = std::fs::File::open(&path).unwrap();
    open.sync_all().unwrap();
    let advise = |advice| spinio_sys::linux::fadvise(std::os::fd::AsRawFd::as_raw_fd(&open), 0, 0, advice).unwrap();
    advise(spinio_sys::linux::Advice::DontNeed);
    advise(spinio_sys::linux::Advice::Random);
    open.read_exact_at(&mut vec![0; (8 * MIB) as usize], 0).unwrap();
    let cached = || spinio_sys::linux::cachestat(std::os::fd::AsRawFd::as_raw_fd(&open), 0, 0).ok().map(|c| c.cached);
    let before = cached();
    let explained = json(spinio().args(["explain", "--device", "emulated"]).arg(&path));
    let bytes = |residency: &str| {
        let extents = explained["extents"].as_array().unwrap();
        extents.iter().filter(|e| e["residency"] == residency).map(|e| e["length"].as_u64().unwrap()).sum::<u64>()
    };
    if bytes("absent") == 0 {
        eprintln!("skipped: {} is on a file system that drops no pages", path.display());
        return;
    }
    let text = stdout(&spinio().args(["explain", "--device", "emulated"]).arg(&path).assert().success());
    let after = cached();
    if after < before {
        return eprintln!("skipped: this machine drops pages by itself: {after:?} after {before:?}");
    }
    assert_eq!((bytes("clean"), bytes("absent")), (8 * MIB, 8 * MIB), "{explained}");
    let pages = text.lines().find(|l| l.starts_with("pages")).unwrap();
    let count = |c: char| pages.matches(c).count();
    assert!(count('█').abs_diff(count('░')) <= 1 && count('█') > 5, "{text}");
    assert!(text.contains("What would make it faster") && text.contains("must come from storage"), "{text}");
}

#[test]
fn file_pinned_by_another_process_is_reported() {
    let dir = folder();
    let path = file(dir.path(), "data", 3_000_000);
    let open = std::fs::File::open(&path).unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&open);
    let explained = || json(spinio().args(["explain", "--device", "emulated"]).arg(&path));
    assert_eq!(explained()["pinned_by"], serde_json::json!([]));
    // A child of another test may have it open for writing until it executes something.
    let begun = std::time::Instant::now();
    while let Err(why) = spinio_io::runtime().pin_file(fd, None) {
        match why {
            spinio_io::PinError::NoLeases | spinio_io::PinError::NotMappable => return eprintln!("skipped: {why}"),
            _ => assert!(begun.elapsed() < std::time::Duration::from_secs(600), "{why}"),
        }
        std::thread::yield_now();
    }
    let pinned_by = &explained()["pinned_by"];
    assert_eq!(
        (pinned_by[0]["pid"].as_u64(), pinned_by.as_array().unwrap().len()),
        (Some(std::process::id().into()), 1)
    );
    let text = stdout(&spinio().args(["explain", "--device", "emulated"]).arg(&path).assert().success());
    assert!(text.contains(&format!("({}): large reads of that process come out of", std::process::id())), "{text}");
    let text = stdout(&spinio().args(["explain", "--device", "emulated", "--write"]).arg(&path).assert().success());
    assert!(text.contains("waits until it is unpinned"), "{text}");
    spinio_io::runtime().unpin_file(fd).unwrap();
    assert_eq!(explained()["pinned_by"], serde_json::json!([]));
}

#[test]
fn deprecated_json_keys_equal_new_keys() {
    let dir = folder();
    let value = json(spinio().args(["explain", "--device", "emulated"]).arg(file(dir.path(), "data", 100_000)));
    assert!(value["residency_source"].is_string() && value["pinned_by"].is_array(), "{value:#}");
    assert_eq!(value["residency_asked"], value["residency_source"]);
    assert_eq!(value["held_by"], value["pinned_by"]);
}

#[test]
fn write_that_extends_a_file_is_explained() {
    let dir = folder();
    let path = file(dir.path(), "data", 100_000);
    let explain = |args: &[&str]| {
        let mut command = spinio();
        command.args(["explain", "--device", "emulated", "--write"]).args(args).arg(&path);
        command
    };
    for (offset, length) in [(98_304, 1 << 20), (100_000, 1 << 20), (1 << 30, 4096)] {
        let range = ["--offset", &offset.to_string(), "--length", &length.to_string()];
        let value = json(&mut explain(&range));
        assert_eq!((&value["offset"], &value["length"]), (&offset.into(), &length.into()), "{value:#}");
        let segments = value["segments"].as_array().unwrap();
        assert_eq!(segments.iter().map(|s| s["length"].as_u64().unwrap()).sum::<u64>(), length, "{value:#}");
    }
    assert_eq!(json(&mut explain(&[]))["length"], 100_000);
    let assert = explain(&["--offset", "100000"]).assert().code(2);
    assert!(stderr(&assert).contains("give --length"), "{}", stderr(&assert));
    for (offset, length) in [("10", "18446744073709551615"), ("0", "9223372036854775808"), ("9223372036854775807", "1")]
    {
        let assert = explain(&["--offset", offset, "--length", length]).assert().code(2);
        assert!(stderr(&assert).contains("after the last byte"), "{}", stderr(&assert));
    }
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 100_000);
}

#[test]
fn explain_reads_no_page() {
    let dir = folder();
    let path = file(dir.path(), "data", 4 << 20);
    let open = std::fs::File::open(&path).unwrap();
    open.sync_all().unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&open);
    spinio_sys::linux::fadvise(fd, 0, 0, spinio_sys::linux::Advice::DontNeed).unwrap();
    let Ok(before) = spinio_sys::linux::cachestat(fd, 0, 4 << 20) else {
        eprintln!("skipped: no cachestat");
        return;
    };
    spinio().args(["explain", "--device", "emulated"]).arg(&path).assert().success();
    assert!(spinio_sys::linux::cachestat(fd, 0, 4 << 20).unwrap().cached <= before.cached);
}

#[test]
fn impossible_advice_is_not_given() {
    let dir = folder();
    let path = file(dir.path(), "data", 16 << 10);
    let explain = |length: &str| {
        stdout(&spinio().args(["explain", "--device", "emulated", "--length", length]).arg(&path).assert().success())
    };
    assert!(explain("4K").contains("read more at once"));
    let all = explain("16K");
    assert!(!all.contains("read more at once"), "{all}");
    assert!(all.lines().all(|l| l == l.trim_end()), "blanks at the end of a line in\n{all}");
}

#[test]
fn empty_file_and_range_past_the_end() {
    let dir = folder();
    let path = file(dir.path(), "data", 0);
    let assert = spinio().args(["explain", "--device", "emulated"]).arg(&path).assert().success();
    assert!(stdout(&assert).contains("nothing is there to read"));
    let assert = spinio().args(["explain", "--offset", "1"]).arg(&path).assert().code(2);
    assert!(stderr(&assert).contains("past the end"));
}

#[test]
fn files_that_cannot_be_explained_are_named() {
    let dir = folder();
    let missing = dir.path().join("missing");
    assert!(stderr(&spinio().arg("explain").arg(&missing).assert().code(1)).contains(missing.to_str().unwrap()));
    assert!(stderr(&spinio().arg("explain").arg(dir.path()).assert().code(1)).contains("directory"));
    let assert = spinio().args(["explain", "--device", "p2pmem:97"]).arg(file(dir.path(), "f", 9)).assert().code(4);
    assert!(stderr(&assert).contains("p2pmem:97"));
}
