//! The examples in the README run.

mod common;

use std::path::Path;

use common::{file, folder, spinio, stderr, stdout};

fn examples() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples")
}

#[test]
fn python_example_runs() {
    if std::process::Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: no python3");
        return;
    }
    let dir = folder();
    let data = file(dir.path(), "data", 3_000_001);
    let script = examples().join("python/read.py");
    let assert = spinio().args(["run", "--stats", "--", "python3"]).arg(&script).arg(&data).assert().success();
    assert_eq!(stdout(&assert), "3000001 bytes are on the device; equal to the file: True\n", "{}", stderr(&assert));
    let table = stderr(&assert);
    assert!(table.contains("device read") && table.contains("2.9 MiB") && table.contains("route"), "{table}");
    let assert = spinio().args(["run", "--", "python3"]).arg(&script).arg("/nowhere/x").assert().failure();
    assert!(stderr(&assert).contains("No such file"));
}

#[test]
fn readme_contains_tested_examples() {
    let readme = std::fs::read_to_string(examples().join("../README.md")).unwrap();
    let cuda = std::fs::read_to_string(examples().join("cuda/read.c")).unwrap();
    let body = cuda.split("*/\n").nth(1).map(|_| &cuda[cuda.find("#include").unwrap()..]).unwrap();
    assert!(readme.contains(body), "README.md shows another examples/cuda/read.c");
    let python = std::fs::read_to_string(examples().join("python/read.py")).unwrap();
    for line in ["libc = ctypes.CDLL(None, use_errno=True)", "got = libc.pread(fd, address, size, 0)"] {
        assert!(python.contains(line) && readme.contains(line), "README.md and read.py disagree on `{line}`");
    }
}
