//! Loop devices: block devices whose kernel driver refuses peer-to-peer memory.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::case::Miss;

/// A loop device over a file; detached when dropped.
pub(crate) struct Loop(PathBuf);

impl Loop {
    pub(crate) fn over(file: &Path) -> Result<Loop, Miss> {
        let made = Command::new("losetup").args(["--find", "--show", "--direct-io=on"]).arg(file).output()?;
        if !made.status.success() {
            return Err(Miss::Skipped(String::from_utf8_lossy(&made.stderr).trim().to_owned()));
        }
        Ok(Loop(PathBuf::from(String::from_utf8_lossy(&made.stdout).trim())))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}
