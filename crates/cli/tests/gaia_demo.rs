//! `spinio gaia demo`: small, interrupted, and where it cannot run.

mod common;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::mount::unavailable;
use common::{as_ordinary_user, folder, is_root, spinio, stderr, stdout};

/// Whether GAIA can be mounted here; says why not.
fn can_mount() -> bool {
    let why = unavailable();
    if let Some(why) = why {
        eprintln!("skipped: {why}");
    }
    why.is_none()
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
        assert!(begun.elapsed() < Duration::from_secs(300), "no mount");
        std::thread::sleep(Duration::from_millis(10));
    }
    // Into the rounds.
    std::thread::sleep(Duration::from_millis(300));
    let pid = rustix::process::Pid::from_child(&demo);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    demo.wait().unwrap();
    let begun = Instant::now();
    while !is_clean(dir.path()) {
        assert!(begun.elapsed() < Duration::from_secs(300), "the demo leaves something");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Root's test program starts the demo as another user, so that it runs at least once as one.
#[test]
fn demo_runs_as_an_ordinary_user() {
    if !is_root() {
        return eprintln!("skipped: all tests of the demo run as an ordinary user");
    }
    if !can_mount() {
        return;
    }
    if !Path::new("/usr/bin/fusermount3").exists() {
        return eprintln!("skipped: no fusermount3");
    }
    // Not below the build, which may be in root's home.
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("work");
    std::fs::create_dir(&dir).unwrap();
    std::os::unix::fs::chown(&dir, Some(65534), Some(65534)).unwrap();
    let mut command = as_ordinary_user(place.path());
    let library = place.path().join("libspinio.so");
    // Next to this test: the one beside the program may be of an earlier build.
    std::fs::copy(std::env::current_exe().unwrap().with_file_name("libspinio.so"), &library).unwrap();
    // Programs that are linked with it look for this name.
    std::os::unix::fs::symlink("libspinio.so", place.path().join("libspinio.so.0")).unwrap();
    command.env("SPINIO_LIBRARY", library).env("TMPDIR", &dir);
    let demo = ["gaia", "demo", "--size", "256K", "--rounds", "12", "--kills", "3", "--path"];
    let assert = command.args(demo).arg(&dir).assert().success();
    let text = stdout(&assert);
    assert_eq!(text.matches("✓ every byte is right").count(), 4, "{text}\n{}", stderr(&assert));
    assert!(text.contains("all 393216 updates"), "{text}");
    assert!(is_clean(&dir), "the demo leaves something");
}

#[test]
fn demo_refuses_sizes_without_whole_pages() {
    for size in ["0", "1000"] {
        let assert = spinio().args(["gaia", "demo", "--size", size]).assert().code(2);
        assert!(stderr(&assert).contains("4 KiB"), "{}", stderr(&assert));
    }
}
