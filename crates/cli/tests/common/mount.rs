//! A mount by `spinio gaia mount`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::PROGRAM;

/// Why GAIA cannot be mounted here. Users who are not root have their own mounts.
pub fn unavailable() -> Option<&'static str> {
    if !Path::new("/dev/fuse").exists() {
        return Some("no /dev/fuse");
    }
    (!super::is_root() && !Path::new("/usr/bin/fusermount3").exists()).then_some("not root, and no fusermount3")
}

/// It is gone when this is dropped.
#[derive(Debug)]
pub struct Mount(tempfile::TempDir);

impl Mount {
    /// Over an empty directory; `None` if that is not possible here.
    pub fn new() -> Option<Mount> {
        Mount::with(&[])
    }

    /// With more arguments of the command.
    pub fn with(arguments: &[&str]) -> Option<Mount> {
        if let Some(why) = unavailable() {
            eprintln!("skipped: {why}");
            return None;
        }
        let mount = Mount(tempfile::Builder::new().prefix("spinio-gaia-c-").tempdir().unwrap());
        std::fs::create_dir(mount.dir()).unwrap();
        let mut command = Command::new("timeout");
        // With pipes: the command must end, and its daemon must not keep them open.
        let done = command.args(["60", PROGRAM, "gaia", "mount"]).args(arguments).arg(mount.dir()).output().unwrap();
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
        let lazy: (&str, &[&str]) = if super::is_root() { ("umount", &["-l"]) } else { ("fusermount3", &["-uzq"]) };
        let _ = Command::new(lazy.0).args(lazy.1).arg(self.dir()).stderr(Stdio::null()).status();
    }
}
