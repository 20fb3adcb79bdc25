//! `spinio gaia demo`: small, interrupted, and where it cannot run.

mod common;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{folder, spinio, stderr, stdout};

/// Whether GAIA can be mounted here; says why not.
fn can_mount() -> bool {
    let why = if !rustix::process::geteuid().is_root() {
        "not root"
    } else if !Path::new("/dev/fuse").exists() {
        "no /dev/fuse"
    } else {
        return true;
    };
    eprintln!("skipped: {why}");
    false
}

/// Whether a mount or a file is left below the directory.
fn is_clean(dir: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    !mounts.contains(dir.to_str().unwrap()) && std::fs::read_dir(dir).unwrap().next().is_none()
}

#[test]
fn demo_keeps_every_update_while_servers_die() {
    if !can_mount() {
        return;
    }
    let dir = folder();
    let demo = ["gaia", "demo", "--size", "256K", "--rounds", "12", "--kills", "3", "--path"];
    let assert = spinio().args(demo).arg(dir.path()).assert().success();
    let text = stdout(&assert);
    assert_eq!(text.matches("✓ every byte is right").count(), 4, "{text}\n{}", stderr(&assert));
    // 256 KiB are 32768 cells, a quarter of which each writer updates 12 times.
    for word in ["all 393216 updates", "CPU, pwrite", "CPU, mmap", "GPU process 1", "killed (SIGKILL) 3 times"] {
        assert!(text.contains(word), "no `{word}` in\n{text}");
    }
    let last: Vec<&str> = text.lines().rev().take(3).collect();
    assert!(last.iter().all(|line| line.contains(" gaia ")), "{text}");
    assert!(is_clean(dir.path()), "the demo leaves something");
}

#[test]
fn interrupted_demo_leaves_no_mount_and_no_file() {
    if !can_mount() {
        return;
    }
    let dir = folder();
    let mut demo = Command::new(env!("CARGO_BIN_EXE_spinio"))
        .args(["gaia", "demo", "--rounds", "1000000", "--path"])
        .arg(dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    let mounted = || std::fs::read_to_string("/proc/self/mounts").unwrap().contains(dir.path().to_str().unwrap());
    while !mounted() {
        assert!(demo.try_wait().unwrap().is_none(), "the demo ended without a mount");
        assert!(begun.elapsed() < Duration::from_secs(120), "no mount");
        std::thread::sleep(Duration::from_millis(10));
    }
    // Into the rounds.
    std::thread::sleep(Duration::from_millis(300));
    let pid = rustix::process::Pid::from_child(&demo);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    demo.wait().unwrap();
    let begun = Instant::now();
    while !is_clean(dir.path()) {
        assert!(begun.elapsed() < Duration::from_secs(60), "the demo leaves something");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn demo_without_root_names_the_cause_and_leaves_nothing() {
    if rustix::process::geteuid().is_root() {
        return eprintln!("skipped: this is root");
    }
    let dir = folder();
    let assert = spinio().args(["gaia", "demo", "--path"]).arg(dir.path()).assert().failure();
    assert!(stderr(&assert).contains("root"), "{}", stderr(&assert));
    assert!(is_clean(dir.path()));
}

#[test]
fn demo_refuses_sizes_without_whole_pages() {
    for size in ["0", "1000"] {
        let assert = spinio().args(["gaia", "demo", "--size", size]).assert().code(2);
        assert!(stderr(&assert).contains("4 KiB"), "{}", stderr(&assert));
    }
}
