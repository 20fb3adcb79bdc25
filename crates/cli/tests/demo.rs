//! `spinio demo`, on small files.

mod common;

use common::{folder, spinio, stderr, stdout};

#[test]
fn kernel_of_demo_net_answers_http() {
    if std::process::Command::new("c++").arg("--version").output().is_err() {
        return eprintln!("skipped: no c++ here");
    }
    let assert = spinio().args(["demo", "net", "--clients", "3", "--requests", "4"]).assert().success();
    let text = stdout(&assert);
    // Three clients and four requests that are refused, each with a connection; 3 * 4 * 3 + 4 requests.
    for word in ["✓ every answer is right", "got 400, 404 and 431", "connections 7, requests 40", "12 answers"] {
        assert!(text.contains(word), "no `{word}` in\n{text}");
    }
}

#[test]
fn demo_reads_three_states_and_verifies_every_byte() {
    let dir = folder();
    let file = dir.path().join("data");
    let assert =
        spinio().args(["demo", "--size", "24M", "--device", "emulated", "--path"]).arg(&file).assert().success();
    let text = stdout(&assert);
    for word in ["cold", "half-cached", "cached", "emulated:0", "not of any GPU", "EFAULT", "✓ every byte"] {
        assert!(text.contains(word), "no `{word}` in\n{text}\n{}", stderr(&assert));
    }
    assert!(text.contains(&format!("3 x {} bytes", 24 << 20)), "{text}");
    assert!(!text.contains("left no counters"), "{text}");
    if !text.contains("could not be produced") {
        let row = |state: &str| text.lines().find(|l| l.trim_start().starts_with(state)).unwrap().to_owned();
        assert!(row("cold").contains("not in the page cache"), "{text}");
        assert!(row("cached").contains("in the page cache"), "{text}");
    }
    let last: Vec<&str> = text.lines().rev().take(3).collect();
    assert!(last[2].contains("run --stats -- CMD") && last[1].contains("explain FILE") && last[0].contains("doctor"));
    assert!(!file.exists(), "the demo leaves its file");
}

#[test]
fn interrupt_while_a_demo_compiles_leaves_no_files() {
    use std::os::unix::fs::PermissionsExt;
    let bin = folder();
    let (compiler, compiling) = (bin.path().join("cc"), bin.path().join("compiling"));
    std::fs::write(&compiler, "#!/bin/sh\necho >$(dirname $0)/compiling\nexec sleep 2\n").unwrap();
    std::fs::set_permissions(&compiler, std::fs::Permissions::from_mode(0o755)).unwrap();
    for arguments in [&["demo", "--size", "1M"][..], &["demo", "net"], &["gaia", "demo"]] {
        let (dir, _) = (folder(), std::fs::remove_file(&compiling));
        let mut child = std::process::Command::new(common::PROGRAM)
            .args(arguments)
            .env("TMPDIR", dir.path())
            .envs([("CC", &compiler), ("CXX", &compiler), ("NVCC", &compiler)])
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        while !compiling.exists() {
            assert_eq!(child.try_wait().unwrap(), None, "{arguments:?}");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let sent = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        assert!(sent.success() && !child.wait().unwrap().success());
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.is_empty(), "{arguments:?}: {left:?}");
    }
}

#[test]
fn temporary_directory_that_cannot_be_made_is_named() {
    let dir = folder();
    let mut command = spinio();
    command.env("TMPDIR", "/nowhere/at/all").args(["demo", "--size", "1M", "--path"]).arg(dir.path().join("data"));
    let text = stderr(&command.assert().code(1));
    assert!(text.contains("temporary directory in /nowhere/at/all"), "{text}");
}

#[test]
fn demo_uses_cuda_memory_on_gpu_machine() {
    // The stand-in for the driver of the tests of `sys` and `device`.
    let fake = concat!(env!("CARGO_MANIFEST_DIR"), "/../sys/tests/fake/libcuda.c");
    let source = std::fs::read_to_string(fake).unwrap();
    let dir = folder();
    if common::compile(dir.path(), "libcuda.so.1", &source, &["-shared", "-fPIC", "-pthread"]).is_none() {
        return;
    }
    let run = |args: &[&str]| {
        let mut command = spinio();
        command.env("LD_LIBRARY_PATH", dir.path()).args(["demo", "--size", "9M"]).args(args).assert().success()
    };
    let text = stdout(&run(&[]));
    // By cudaMalloc where the machine has the CUDA runtime.
    let allocated = ["cuMemAlloc", "cudaMalloc"].map(|by| format!("Fake GPU 0 ({by})"));
    assert!(allocated.iter().any(|by| text.contains(by)) && text.contains("EFAULT"), "{text}");
    assert!(text.contains("✓ every byte") && !text.contains("software"), "{text}");
    assert!(stdout(&run(&["--device", "cuda:1"])).contains("Fake GPU 1"));
    assert!(stdout(&run(&["--device", "emulated"])).contains("emulated:0"));
}

#[test]
fn missing_device_is_reported() {
    let dir = folder();
    let path = dir.path().join("data");
    let assert = spinio()
        .env("LD_LIBRARY_PATH", dir.path())
        .args(["demo", "--size", "1M", "--device", "cuda", "--path"])
        .arg(&path)
        .assert();
    let output = assert.get_output();
    if output.status.success() {
        eprintln!("skipped: this machine has a CUDA GPU");
        return;
    }
    assert_eq!(output.status.code(), Some(4));
    assert!(stderr(&assert).contains("No device to read into"), "{}", stderr(&assert));
    assert!(!path.exists());
    spinio().args(["demo", "--size", "1M", "--device", "p2pmem:97"]).assert().code(4);
}

#[test]
fn odd_size_is_read() {
    let dir = folder();
    let assert = spinio()
        .args(["demo", "--size", "9437189", "--device", "emulated", "--path"])
        .arg(dir.path().join("data"))
        .assert()
        .success();
    assert!(stdout(&assert).contains("3 x 9437189 bytes"));
}

#[test]
fn library_path_that_ld_preload_cannot_name_is_linked() {
    let Ok(library) = std::fs::canonicalize(
        std::path::Path::new(env!("CARGO_BIN_EXE_spinio")).parent().unwrap().join("deps/libspinio.so"),
    ) else {
        panic!("cargo did not build libspinio.so next to the command");
    };
    let dir = folder();
    let spaced = dir.path().join("my library");
    std::fs::create_dir(&spaced).unwrap();
    std::fs::copy(library, spaced.join("libspinio.so")).unwrap();
    let assert = spinio()
        .env("SPINIO_LIBRARY", spaced.join("libspinio.so"))
        .args(["demo", "--size", "1M", "--device", "emulated", "--path"])
        .arg(dir.path().join("data"))
        .assert()
        .success();
    assert!(stdout(&assert).contains("✓ every byte"));
}

#[test]
fn interrupted_demo_removes_its_files() {
    use std::os::unix::process::ExitStatusExt;
    let dir = folder();
    let (file, temporary) = (dir.path().join("data"), dir.path().join("tmp"));
    std::fs::create_dir(&temporary).unwrap();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_spinio"))
        .args(["demo", "--size", "2G", "--device", "emulated", "--path"])
        .arg(&file)
        .env("TMPDIR", &temporary)
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    while std::fs::metadata(&file).map_or(0, |m| m.len()) < 4 << 20 {
        assert_eq!(child.try_wait().unwrap(), None, "ended before it was interrupted");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(std::process::Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    assert_eq!(child.wait().unwrap().signal(), Some(15));
    assert!(!file.exists());
    assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 0);
}

#[test]
fn existing_file_is_not_overwritten() {
    let dir = folder();
    let file = common::file(dir.path(), "precious", 100);
    let assert = spinio().args(["demo", "--size", "1M", "--path"]).arg(&file).assert().code(1);
    assert!(stderr(&assert).contains(&format!("Cannot create {}", file.display())), "{}", stderr(&assert));
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 100);
}

#[test]
fn missing_compiler_is_named() {
    let dir = folder();
    let path = dir.path().join("data");
    let assert = spinio().env("PATH", dir.path()).env_remove("CC").args(["demo", "--path"]).arg(&path).assert().code(4);
    let text = stderr(&assert);
    assert!(text.contains("no C compiler `cc`") && text.contains("apt install gcc"), "{text}");
    assert!(!path.exists());
}

#[test]
fn missing_library_is_reported_with_its_path() {
    let assert = spinio().env("SPINIO_LIBRARY", "/nowhere/libspinio.so").arg("demo").assert().code(4);
    assert!(stderr(&assert).contains("/nowhere/libspinio.so"));
}

#[test]
fn invalid_sizes_are_refused() {
    for (size, code) in [("0", 2), ("many", 2), ("8000000T", 1)] {
        let dir = folder();
        let path = dir.path().join("data");
        let assert = spinio().args(["demo", "--size", size, "--path"]).arg(&path).assert().code(code);
        assert!(!stderr(&assert).is_empty());
        assert!(!path.exists());
    }
}
