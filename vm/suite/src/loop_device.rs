//! Loop devices: block devices whose kernel driver refuses peer-to-peer memory.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::case::CaseError;

/// A loop device over a file; detached when dropped.
pub(crate) struct LoopDevice(PathBuf);

impl LoopDevice {
    pub(crate) fn over(file: &Path) -> Result<LoopDevice, CaseError> {
        let made = Command::new("losetup").args(["--find", "--show", "--direct-io=on"]).arg(file).output()?;
        if !made.status.success() {
            return Err(CaseError::Skipped(String::from_utf8_lossy(&made.stderr).trim().to_owned()));
        }
        Ok(LoopDevice(PathBuf::from(String::from_utf8_lossy(&made.stdout).trim())))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}
