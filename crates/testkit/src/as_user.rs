//! The same tests once more, as an ordinary user.
//!
//! Root may query anything about any file; most users may not. A test program that calls [`rerun_as_nobody`] in one of
//! its tests runs all its other tests again in a child without privileges.

#![expect(unsafe_code, reason = "C calls of tests")]

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

const RERUN_ENV: &str = "SPINIO_TEST_AS_ORDINARY_USER";
const NOBODY_UID: u32 = 65534;

/// Whether this process is root.
pub fn is_root() -> bool {
    // SAFETY: the call has no argument and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Runs this test program once more as an ordinary user, without the test `caller`; fails if a test fails.
/// Prints why if it does nothing.
pub fn rerun_as_nobody(caller: &str) {
    if std::env::var_os(RERUN_ENV).is_some() {
        return;
    }
    if !is_root() {
        println!("skipped: the tests already run as an ordinary user");
        return;
    }
    // A copy, where an ordinary user can reach it.
    let directory = tempfile::tempdir().expect("a directory");
    make_world_readable(directory.path());
    let copy = directory.path().join("tests");
    // Not copied by this process: a child that another test forks meanwhile would have the copy open for writing, and
    // a file open for writing cannot be executed.
    let copied = Command::new("cp").arg(std::env::current_exe().expect("own path")).arg(&copy).status();
    assert!(copied.is_ok_and(|s| s.success()), "cannot copy the test program");
    make_world_readable(&copy);
    let output = Command::new(&copy)
        .args(["--skip", caller, "--test-threads", "2"])
        .env(RERUN_ENV, "1")
        .env_remove("CARGO_TARGET_TMPDIR")
        .env("TMPDIR", std::env::temp_dir())
        .current_dir("/")
        .stdin(Stdio::null())
        .drop_privileges()
        .output()
        .expect("run");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "as uid {NOBODY_UID}:\n{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(!text.contains(" 0 passed"), "no test ran as uid {NOBODY_UID}:\n{text}");
}

fn make_world_readable(path: &Path) {
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(path, mode).expect("permissions");
}

trait DropPrivileges {
    fn drop_privileges(&mut self) -> &mut Self;
}

impl DropPrivileges for Command {
    fn drop_privileges(&mut self) -> &mut Self {
        // SAFETY: between fork and exec only system calls are made.
        unsafe {
            self.pre_exec(|| {
                let failed = libc::setgroups(0, core::ptr::null()) != 0
                    || libc::setgid(NOBODY_UID) != 0
                    || libc::setuid(NOBODY_UID) != 0;
                if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
            })
        }
    }
}
