//! The same tests once more, as an ordinary user.
//!
//! Root may ask anything about any file; most users may not. A test program that calls [`rerun`] in one of its tests
//! runs all its others again in a child with no privilege.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

const AGAIN: &str = "SPINIO_TEST_AS_ORDINARY_USER";
const NOBODY: u32 = 65534;

/// Whether this process is root.
pub fn is_root() -> bool {
    // SAFETY: the call has no argument and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Runs this test program once more as an ordinary user, without the test `me` that calls this; fails if that fails.
/// Prints why where it does nothing.
pub fn rerun(me: &str) {
    if std::env::var_os(AGAIN).is_some() {
        return;
    }
    if !is_root() {
        println!("skipped: the tests already run as an ordinary user");
        return;
    }
    // A copy, where an ordinary user can reach it.
    let folder = tempfile::tempdir().expect("a folder");
    open_to_all(folder.path());
    let copy = folder.path().join("tests");
    // Not by this process: a child that another test forks meanwhile would hold the copy open for writing, and what is
    // open for writing cannot be run.
    let copied = Command::new("cp").arg(std::env::current_exe().expect("own path")).arg(&copy).status();
    assert!(copied.is_ok_and(|s| s.success()), "cannot copy the test program");
    open_to_all(&copy);
    let output = Command::new(&copy)
        .args(["--skip", me, "--test-threads", "2"])
        .env(AGAIN, "1")
        .env_remove("CARGO_TARGET_TMPDIR")
        .env("TMPDIR", std::env::temp_dir())
        .current_dir("/")
        .stdin(Stdio::null())
        .groups_to_nobody()
        .output()
        .expect("run");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "as uid {NOBODY}:\n{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(!text.contains(" 0 passed"), "no test ran as uid {NOBODY}:\n{text}");
}

fn open_to_all(path: &Path) {
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(path, mode).expect("permissions");
}

trait Nobody {
    fn groups_to_nobody(&mut self) -> &mut Self;
}

impl Nobody for Command {
    fn groups_to_nobody(&mut self) -> &mut Self {
        // SAFETY: between fork and exec only system calls are made.
        unsafe {
            self.pre_exec(|| {
                let failed = libc::setgroups(0, core::ptr::null()) != 0
                    || libc::setgid(NOBODY) != 0
                    || libc::setuid(NOBODY) != 0;
                if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
            })
        }
    }
}
