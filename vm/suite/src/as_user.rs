//! SPIN's cases once more, as an ordinary user: root may query any file, most users may not.
//!
//! A child process without privilege, with permission to use the p2pmem device, runs them on its own files; the
//! `preload` cases make it read files owned by another user.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::case::{CaseCounts, CaseError};
use crate::memory::allocator;

/// The directory of programs that every user may run.
pub(crate) const PROGRAMS: &str = "/var/tmp/spinio-vm-programs";

/// The environment variable of a child of this suite.
const CHILD: &str = "SPINIO_VM_USER";

/// Whether this process is that child.
pub(crate) fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// A command that runs `program` as the user `nobody`.
pub(crate) fn ordinary(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(program);
    command
}

/// The setup by an administrator that gives users the device, undone when dropped.
pub(crate) struct DevicePermission(PathBuf);

impl DevicePermission {
    pub(crate) fn give() -> Result<DevicePermission, CaseError> {
        let path = allocator()?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666))?;
        Ok(DevicePermission(path))
    }
}

impl Drop for DevicePermission {
    fn drop(&mut self) {
        let _ = fs::set_permissions(&self.0, fs::Permissions::from_mode(0o660));
    }
}

/// Copies a program to a directory where every user may run it.
pub(crate) fn publish(from: &Path, name: &str) -> Result<PathBuf, CaseError> {
    let folder = Path::new(PROGRAMS);
    fs::create_dir_all(folder)?;
    let to = folder.join(name);
    fs::copy(from, &to).map_err(|e| CaseError::Failed(format!("{}: {e}", from.display())))?;
    fs::set_permissions(&to, fs::Permissions::from_mode(0o755))?;
    Ok(to)
}

/// Runs the suite in a child, prints its lines with `user: ` before the name, and adds up the results.
pub(crate) fn rerun(folder: &str, only: &[String], tally: &mut CaseCounts) -> Result<(), CaseError> {
    let suite = publish(&std::env::current_exe()?, "suite")?;
    let _leave = DevicePermission::give()?;
    let ran = ordinary(&suite)
        .arg(folder)
        .args(only.iter().map(|part| part.trim_start_matches("user: ")))
        .env(CHILD, "1")
        .output()?;
    let said = String::from_utf8_lossy(&ran.stdout);
    let mut closed = false;
    for line in said.lines() {
        let (verdict, rest) = line.split_at_checked(9).unwrap_or((line, ""));
        match verdict.trim_end() {
            "ok" => tally.passed += 1,
            "FAILED" => tally.failed += 1,
            "skipped" => tally.skipped += 1,
            _ => {
                closed = line.contains(" passed, ");
                continue;
            }
        }
        println!("{verdict}user: {rest}");
    }
    if closed {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(&ran.stderr);
    Err(CaseError::Failed(format!("the suite as an ordinary user ended early ({}): {}", ran.status, complaint.trim())))
}
