//! `spinio doctor`: every fact is complete, on any machine.

mod common;

use std::path::Path;

use common::mount::Mount;
use common::{spinio, stdout};
use serde_json::Value;

fn facts(text: &str) -> Vec<Value> {
    let value: Value = serde_json::from_str(text).unwrap();
    value.as_array().unwrap().clone()
}

#[test]
fn json_facts_are_complete() {
    let facts = facts(&stdout(&spinio().args(["doctor", "--json"]).assert().success()));
    let name = |f: &Value| f["name"].as_str().unwrap().to_owned();
    for wanted in ["libspinio.so", "emulated device", "cachestat", "RWF_NOWAIT", "io_uring", "RLIMIT_MEMLOCK", "driver"]
    {
        assert!(facts.iter().any(|f| name(f) == wanted), "no fact `{wanted}`");
    }
    for fact in &facts {
        let state = fact["state"].as_str().unwrap();
        assert!(["found", "limited", "absent", "broken"].contains(&state));
        assert!(!fact["detail"].as_str().unwrap().is_empty());
        // A report that something is missing has the cause, or what to do.
        let explained =
            fact["cause"].is_string() || fact["cure"].is_string() || fact["detail"].as_str().unwrap().len() > 8;
        assert!(state == "found" || explained, "{fact}");
    }
}

#[test]
fn text_and_json_have_the_same_facts() {
    let text = stdout(&spinio().arg("doctor").assert().success());
    for fact in facts(&stdout(&spinio().args(["doctor", "--json"]).assert().success())) {
        assert!(text.contains(fact["name"].as_str().unwrap()), "{fact} is not in\n{text}");
    }
    assert!(!text.contains('\x1b'), "colour without a terminal");
}

#[test]
fn each_emulated_device_is_a_fact() {
    let asked = spinio().args(["doctor", "--json"]).env("SPINIO_EMULATED", "devices=3,size=4M").assert().success();
    let all = facts(&stdout(&asked));
    let devices = all.iter().filter(|f| f["name"] == "emulated device").map(|f| f["detail"].as_str().unwrap());
    for (n, detail) in devices.clone().enumerate() {
        assert!(detail.starts_with(&format!("emulated:{n}: emulated GPU, 4 MiB")), "{detail}");
    }
    assert_eq!(devices.count(), 3);
}

#[test]
fn colour_follows_environment() {
    let forced = spinio().arg("doctor").env("CLICOLOR_FORCE", "1").env_remove("NO_COLOR").assert().success();
    assert!(stdout(&forced).contains("\x1b[32m"));
    let refused = spinio().arg("doctor").env("CLICOLOR_FORCE", "1").env("NO_COLOR", "1").assert().success();
    assert!(!stdout(&refused).contains('\x1b'));
}

#[test]
fn missing_library_is_broken_and_has_a_cure() {
    let assert = spinio().args(["doctor", "--json"]).env("SPINIO_LIBRARY", "/nowhere/x.so").assert().code(4);
    let facts = facts(&stdout(&assert));
    let library = facts.iter().find(|f| f["name"] == "libspinio.so").unwrap();
    assert_eq!(library["state"], "broken");
    assert!(library["cause"].as_str().unwrap().contains("/nowhere/x.so") && library["cure"].is_string());
}

#[test]
fn invalid_library_is_broken() {
    let dir = common::folder();
    let path = common::file(dir.path(), "libspinio.so", 100);
    let assert = spinio().args(["doctor", "--json"]).env("SPINIO_LIBRARY", &path).assert().code(4);
    let facts = facts(&stdout(&assert));
    assert_eq!(facts[0]["state"], "broken");
    assert!(facts[0]["detail"].as_str().unwrap().contains("does not load"), "{}", facts[0]);
}

#[test]
fn invalid_setting_is_reported() {
    let text = stdout(&spinio().arg("doctor").env("SPINIO_THREADS", "many").assert().success());
    assert!(text.contains("SPINIO_THREADS=many is not understood"), "{text}");
    let text = stdout(&spinio().arg("doctor").env("SPINIO_THREAD", "8").assert().success());
    assert!(text.contains("there is no setting SPINIO_THREAD:"), "{text}");
    let text = stdout(&spinio().arg("doctor").env("SPINIO_THREADS", "8").env("SPINIO_TEST_X", "1").assert().success());
    assert!(!text.contains("there is no setting") && !text.contains("deprecated"), "{text}");
}

#[test]
fn old_setting_name_is_deprecated_not_unknown() {
    let text =
        stdout(&spinio().arg("doctor").env("SPINIO_HOLD", "1G").env("SPINIO_CORRECTION", "off").assert().success());
    assert!(text.contains("SPINIO_HOLD is deprecated: use SPINIO_PIN_LIMIT"), "{text}");
    assert!(text.contains("SPINIO_CORRECTION is deprecated: unset it: it has no effect"), "{text}");
    assert!(!text.contains("there is no setting"), "{text}");
    let both = spinio().arg("doctor").env("SPINIO_HOLD", "1G").env("SPINIO_PIN_LIMIT", "2G").assert().success();
    assert!(stdout(&both).contains("SPINIO_HOLD=1G is ignored"), "{}", stdout(&both));
}

#[test]
fn closed_pipe_is_no_error() {
    let me = env!("CARGO_BIN_EXE_spinio");
    // What reads the pipe has ended when the command begins to write.
    for command in ["doctor", "--help"] {
        let script = format!("{{ sleep 0.3; exec '{me}' {command}; }} | true; exit ${{PIPESTATUS[0]}}");
        let out = std::process::Command::new("bash").args(["-c", &script]).output().unwrap();
        let errors = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && errors.is_empty(), "{command}: {errors}");
    }
}

#[test]
fn disks_under_a_file_are_drawn() {
    let dir = common::folder();
    let path = common::file(dir.path(), "f", 100_000);
    for path in [path.as_path(), dir.path()] {
        let text = stdout(&spinio().arg("doctor").arg(path).assert().success());
        assert!(text.contains("Storage") && text.contains(&path.display().to_string()), "{text}");
        let facts = facts(&stdout(&spinio().args(["doctor", "--json"]).arg(path).assert().success()));
        let disks = facts.iter().find(|f| f["name"] == "disks").expect("a fact");
        let stack = &disks["stack"];
        assert!(!stack["file_system"].as_str().unwrap().is_empty());
        if stack["layers"].is_null() {
            println!("skipped: no block device under {}", path.display());
            continue;
        }
        let top = stack["layers"]["name"].as_str().unwrap();
        assert!(text.contains(&format!("└─ {top}  ")), "{text}");
        assert!(facts.iter().any(|f| f["name"] == "peer-to-peer"));
    }
    let failed = spinio().args(["doctor", "/no/such/file"]).assert().code(1);
    assert!(common::stderr(&failed).contains("/no/such/file"));
}

/// What `doctor` says of the engine that reads the storage of a file, and of its file system.
fn storage_engine(path: &Path, setting: &str) -> (Value, String) {
    let asked = spinio().args(["doctor", "--json"]).arg(path).env("SPINIO_STORAGE_ENGINE", setting).assert().success();
    let facts = facts(&stdout(&asked));
    let engines: Vec<_> = facts.iter().filter(|f| f["name"] == "storage engine").collect();
    assert_eq!(engines.len(), 1, "{}: {facts:?}", path.display());
    let disks = facts.iter().find(|f| f["name"] == "disks").expect("a fact");
    (engines[0].clone(), disks["stack"]["file_system"].as_str().unwrap().to_owned())
}

fn assert_workers_since(engine: &Value, cause: &str, cure: &str) {
    assert_eq!(engine["state"], "limited", "{engine}");
    assert!(engine["detail"].as_str().unwrap().starts_with("worker threads, up to 8 for one file system"), "{engine}");
    assert!(engine["cause"].as_str().unwrap().contains(cause), "{engine}");
    assert!(engine["cure"].as_str().unwrap().contains(cure), "{engine}");
}

#[test]
fn storage_engine_follows_the_setting() {
    let dir = common::folder();
    let path = common::file(dir.path(), "f", 100_000);
    let (engine, file_system) = storage_engine(&path, "workers");
    if !["ext4", "xfs"].contains(&file_system.as_str()) {
        eprintln!("not seen: a disk; {} is on {file_system}", path.display());
        return assert_workers_since(&engine, "not ext4, XFS or a block device", "ext4 or XFS");
    }
    assert_workers_since(&engine, "SPINIO_STORAGE_ENGINE=workers", "unset SPINIO_STORAGE_ENGINE");
    let (engine, _) = storage_engine(&path, "ring");
    // Containers refuse io_uring.
    if engine["state"] == "limited" {
        return assert_workers_since(&engine, "the kernel refuses io_uring with SQPOLL", "io_uring");
    }
    assert_eq!((&engine["state"], &engine["cause"]), (&"found".into(), &Value::Null), "{engine}");
    assert!(engine["detail"].as_str().unwrap().starts_with("io_uring with SQPOLL"), "{engine}");
}

#[test]
fn storage_engine_is_named_without_a_block_device() {
    if let Ok(dir) = tempfile::tempdir_in("/dev/shm") {
        let path = common::file(dir.path(), "f", 100_000);
        for setting in ["ring", "workers"] {
            let (engine, file_system) = storage_engine(&path, setting);
            if file_system != "tmpfs" {
                eprintln!("skipped: /dev/shm is {file_system}");
                break;
            }
            assert_eq!(engine["state"], "absent", "{engine}");
            assert_eq!(engine["detail"], "none: nothing is read around the page cache");
            assert_eq!(engine["cause"], "this file system keeps its files in memory");
        }
    }
    if let Some(mount) = Mount::new() {
        let path = common::file(&mount.dir(), "f", 100_000);
        let (engine, file_system) = storage_engine(&path, "ring");
        assert!(file_system.contains("fuse"), "{file_system}");
        assert_workers_since(&engine, "not ext4, XFS or a block device", "ext4 or XFS");
    }
}
