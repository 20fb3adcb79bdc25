//! Processes that become another user, and programs that have more privileges than the user who starts them.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::build::{assert_passes, compile, library, program, run_preloaded, source};

#[test]
fn worker_threads_follow_setuid() {
    let done = assert_passes(run_preloaded(&program("users"), &[]));
    print!("{}", String::from_utf8_lossy(&done.stdout));
}

#[test]
fn secure_exec_program_ignores_settings() {
    const NOBODY: u32 = 65534;
    // SAFETY: queries this process.
    if unsafe { libc::geteuid() } != 0 {
        return eprintln!("skipped: only root can run a program as another user");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mode = |path, bits| fs::set_permissions(path, Permissions::from_mode(bits)).expect("a mode");
    mode(folder.path(), 0o755);
    let copy = folder.path().join("libspinio.so.0");
    fs::copy(library(), &copy).expect("a copy");
    mode(&copy, 0o755);
    let program = folder.path().join("rights");
    let (rpath, text) = (format!("-Wl,-rpath,{}", folder.path().display()), source("tests/c/rights.c"));
    let (copy, text) = (copy.to_str().expect("UTF-8"), text.to_str().expect("UTF-8"));
    compile("cc", &program, &[text, copy, &rpath]);
    let says = || {
        let mut command = Command::new(&program);
        command.uid(NOBODY).gid(NOBODY).current_dir("/").env("SPINIO_EMULATED", "size=64K");
        let done = command.output().expect("it runs");
        assert!(done.status.success(), "{done:?}");
        String::from_utf8(done.stdout).expect("ASCII")
    };
    mode(&program, 0o755);
    assert_eq!(says(), "no more rights, no room\n");
    mode(&program, 0o4755);
    let said = says();
    if said.starts_with("no more rights") {
        return eprintln!("skipped: programs here get no rights from their mode");
    }
    assert_eq!(said, "more rights, room\n");
}
