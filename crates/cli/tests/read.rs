//! `spinio read`: files into the emulated device, and files that cannot be read.

mod common;

use std::os::unix::fs::PermissionsExt;

use common::{as_ordinary_user, file, folder, spinio, stderr, stdout};

#[test]
fn read_verifies_every_byte() {
    let dir = folder();
    let path = file(dir.path(), "data", 5_000_003);
    let assert = spinio().args(["read", "--verify", "--block", "1M"]).arg(&path).assert().success();
    let text = stdout(&assert);
    assert!(text.contains("✓ every byte equals a plain pread: 5000003 bytes"), "{text}");
    assert!(text.contains("GB/s") && text.contains("route"), "{text}");
}

#[test]
fn range_is_truncated_at_end_of_file() {
    let dir = folder();
    let path = file(dir.path(), "data", 100_000);
    let read = |args: &[&str]| stdout(&spinio().args(["read", "--verify"]).args(args).arg(&path).assert().success());
    assert!(read(&["--offset", "12345"]).contains("pread: 87655 bytes"));
    assert!(read(&["--offset", "1", "--length", "77"]).contains("pread: 77 bytes"));
    assert!(read(&["--offset", "99999", "--length", "1M"]).contains("pread: 1 bytes"));
    assert!(read(&["--offset", "100000"]).contains("pread: 0 bytes"));
    let assert = spinio().args(["read", "--offset", "100001"]).arg(&path).assert().code(2);
    assert!(stderr(&assert).contains("past the end of"));
}

#[test]
fn empty_file_is_read() {
    let dir = folder();
    let path = file(dir.path(), "data", 0);
    spinio().args(["read", "--verify"]).arg(&path).assert().success();
}

#[test]
fn unreadable_files_are_named() {
    let dir = folder();
    let missing = dir.path().join("missing");
    let assert = spinio().arg("read").arg(&missing).assert().code(1);
    assert!(stderr(&assert).contains(&format!("Cannot open {}", missing.display())), "{}", stderr(&assert));
    let assert = spinio().arg("read").arg(dir.path()).assert().code(1);
    assert!(stderr(&assert).contains("is a directory"));
    let assert = spinio().args(["read", "/dev/null"]).assert().code(1);
    assert!(stderr(&assert).contains("no file with offsets"));
}

#[test]
fn named_pipe_is_refused_without_waiting() {
    let dir = folder();
    let pipe = dir.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    for command in ["read", "explain", "doctor"] {
        let assert = spinio().arg(command).arg(&pipe).timeout(std::time::Duration::from_secs(300)).assert().code(1);
        assert!(stderr(&assert).contains(&format!("{}: it is no file with offsets", pipe.display())), "{command}");
    }
}

#[test]
fn proc_file_of_size_zero_is_not_called_empty() {
    for command in ["read", "explain"] {
        let assert = spinio().args([command, "/proc/version"]).assert().code(1);
        assert!(stderr(&assert).contains("Cannot read /proc/version: it has bytes"), "{}", stderr(&assert));
    }
}

#[test]
fn failed_write_to_stdout_is_reported() {
    let dir = folder();
    let path = file(dir.path(), "data", 10);
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let out = std::process::Command::new(env!("CARGO_BIN_EXE_spinio")).arg("read").arg(&path).stdout(full).output();
    let out = out.unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains("Cannot write to standard output: No space left"));
}

#[test]
fn second_emulated_device_exists_if_the_settings_say_so() {
    let dir = folder();
    let path = file(dir.path(), "data", 10);
    let assert = spinio().args(["read", "--device", "emulated:1"]).arg(&path).assert().code(4);
    assert!(stderr(&assert).contains("emulated:0 is the only emulated device"), "{}", stderr(&assert));
    let with_two = |device: &str| {
        let mut command = spinio();
        command.env("SPINIO_EMULATED", "devices=2,size=16M").args(["read", "--device", device]).arg(&path);
        command.assert()
    };
    assert!(stdout(&with_two("emulated:1").success()).contains("emulated:1"));
    let assert = with_two("emulated:2").code(4);
    assert!(stderr(&assert).contains("SPINIO_EMULATED has fewer"), "{}", stderr(&assert));
}

#[test]
fn file_without_read_permission_is_an_error() {
    let place = tempfile::tempdir().unwrap();
    let closed = file(place.path(), "closed", 10);
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o000)).unwrap();
    let assert = as_ordinary_user(place.path()).arg("read").arg(&closed).assert().code(1);
    let text = stderr(&assert);
    assert!(text.contains("Permission denied") && text.contains("closed"), "{text}");
}

#[test]
fn file_of_other_owner_is_read_completely() {
    let place = tempfile::tempdir().unwrap();
    let path = file(place.path(), "theirs", 5_000_003);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444)).unwrap();
    let args = ["read", "--verify", "--block", "2M", "--device", "emulated"];
    let assert = as_ordinary_user(place.path()).args(args).arg(&path).assert().success();
    assert!(stdout(&assert).contains("pread: 5000003 bytes"), "{}", stdout(&assert));
}

#[test]
fn missing_devices_are_refused() {
    let dir = folder();
    let path = file(dir.path(), "data", 10);
    let assert = spinio().args(["read", "--device", "p2pmem:97"]).arg(&path).assert().code(4);
    assert!(stderr(&assert).contains("p2pmem:97"), "{}", stderr(&assert));
    spinio().args(["read", "--device", "toaster"]).arg(&path).assert().code(2);
    spinio()
        .env("SPINIO_EMULATED", "size=1M")
        .args(["read", "--device", "emulated", "--block", "64M"])
        .arg(&path)
        .assert()
        .success();
}
