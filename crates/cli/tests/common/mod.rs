//! Shared by the tests of the command.
#![allow(clippy::allow_attributes, dead_code, missing_docs, unreachable_pub, reason = "each test file uses a part")]

pub mod mount;
pub mod net_example;

use std::path::{Path, PathBuf};

use assert_cmd::Command;

/// The program under test: the command, or the laboratory, whose tests share this file.
pub const PROGRAM: &str = match (option_env!("CARGO_BIN_EXE_spinio"), option_env!("CARGO_BIN_EXE_spinio-lab")) {
    (Some(command), _) => command,
    (None, Some(lab)) => lab,
    (None, None) => panic!("cargo names no program"),
};

/// The program, without the settings of the caller's environment.
pub fn spinio() -> Command {
    let mut command = Command::new(PROGRAM);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("SPINIO_") || text == "LD_PRELOAD" || text == "DEMO_DEVICE" || text == "CLICOLOR_FORCE" {
            command.env_remove(&name);
        }
    }
    // Models that this machine's user has measured must not affect tests.
    command.env("XDG_STATE_HOME", "/nonexistent");
    command.timeout(std::time::Duration::from_secs(300));
    command
}

/// Standard output as text.
pub fn stdout(assert: &assert_cmd::assert::Assert) -> String {
    String::from_utf8_lossy(&assert.get_output().stdout).into_owned()
}

/// Standard error as text.
pub fn stderr(assert: &assert_cmd::assert::Assert) -> String {
    String::from_utf8_lossy(&assert.get_output().stderr).into_owned()
}

/// A directory on a real disk.
pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A file whose bytes depend on their offset.
pub fn file(dir: &Path, name: &str, len: usize) -> PathBuf {
    let path = dir.join(name);
    let bytes: Vec<u8> = (0..len).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Compiles a C program; `None`, with a message, if there is no compiler or it does not support the flags.
pub fn compile(dir: &Path, name: &str, source: &str, flags: &[&str]) -> Option<PathBuf> {
    let (text, program) = (dir.join(format!("{name}.c")), dir.join(name));
    std::fs::write(&text, source).unwrap();
    let done = std::process::Command::new("cc").arg("-o").arg(&program).arg(&text).args(flags).output();
    match done {
        Ok(out) if out.status.success() => Some(program),
        Ok(out) => {
            eprintln!("skipped: cc {flags:?} failed: {}", String::from_utf8_lossy(&out.stderr));
            None
        }
        Err(e) => {
            eprintln!("skipped: no cc: {e}");
            None
        }
    }
}

/// Whether this process is root.
pub fn is_root() -> bool {
    std::fs::read_to_string("/proc/self/status")
        .unwrap_or_default()
        .lines()
        .any(|l| l.starts_with("Uid:") && l.split_whitespace().nth(2) == Some("0"))
}

/// The command as an ordinary user that owns no file here, from a directory that every user may read: user 65534 if
/// root runs this test, else the user of the test. The directory must outlive the command.
pub fn as_ordinary_user(place: &Path) -> Command {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    if !is_root() {
        return spinio();
    }
    let copy = place.join("spinio");
    // By another process: a child that another test starts meanwhile would inherit the descriptor of the copy, open for
    // writing, for a moment, and a file that is open for writing cannot be executed.
    let copied = std::process::Command::new("cp").arg(PROGRAM).arg(&copy).status().unwrap();
    assert!(copied.success());
    std::fs::set_permissions(place, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = std::process::Command::new(copy);
    command.uid(65534).gid(65534).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.current_dir("/");
    let mut command = Command::from_std(command);
    command.timeout(std::time::Duration::from_secs(300));
    command
}
