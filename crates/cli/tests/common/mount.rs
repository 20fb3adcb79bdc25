//! A mount by `spinio gaia mount`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::PROGRAM;

/// It is gone when this is dropped.
#[derive(Debug)]
pub struct Mount(tempfile::TempDir);

impl Mount {
    /// Over an empty directory; `None` if that is not possible here.
    pub fn new() -> Option<Mount> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
            eprintln!("skipped: not root, or no /dev/fuse");
            return None;
        }
        let mount = Mount(tempfile::Builder::new().prefix("spinio-gaia-c-").tempdir().unwrap());
        std::fs::create_dir(mount.dir()).unwrap();
        let mut command = Command::new("timeout");
        // With pipes: the command must end, and its daemon must not keep them open.
        let done = command.args(["60", PROGRAM, "gaia", "mount"]).arg(mount.dir()).output().unwrap();
        assert!(done.status.success() && done.stderr.is_empty(), "{done:?}");
        Some(mount)
    }

    /// Where.
    pub fn dir(&self) -> PathBuf {
        self.0.path().join("mount")
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("timeout").args(["20", PROGRAM, "gaia", "umount"]).arg(self.dir()).status();
        let _ = Command::new("umount").arg("-l").arg(self.dir()).stderr(Stdio::null()).status();
    }
}
