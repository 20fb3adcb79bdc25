//! Load on the machine concurrently with the reads: stress-ng, as in the paper, while a value lives.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::experiment::Load;
use crate::cleanup::{self, Cleanup};

/// A running load; ends when dropped, and when a signal ends this process.
pub struct Stress {
    child: Child,
    cleanup: Option<Cleanup>,
}

impl Stress {
    /// Starts it for files of `path`, and waits until it has an effect; the reason if it cannot run. It ends by itself after
    /// `limit`, so that it does not stay if this process is killed.
    pub fn start(load: Load, path: &Path, limit: Duration) -> Result<Option<Stress>, String> {
        let mut command = Command::new("stress-ng");
        match load {
            Load::None => return Ok(None),
            Load::Cpu => command.args(["--cpu", "0"]),
            Load::Io => command.args(["--hdd", "2", "--hdd-bytes", "64M", "--temp-path"]).arg(dir_on_disk_of(path)?),
        };
        command.arg("--timeout").arg(format!("{}s", limit.as_secs() + 1));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = match command.spawn() {
            Ok(child) => child,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err("stress-ng is not installed".to_owned()),
            Err(e) => return Err(format!("stress-ng cannot be started: {e}")),
        };
        let pid = child.id();
        let cleanup = cleanup::on_signal_after(Vec::new(), move || end(pid));
        let mut stress = Stress { child, cleanup: Some(cleanup) };
        std::thread::sleep(Duration::from_secs(1));
        match stress.is_running() {
            true => Ok(Some(stress)),
            false => Err(format!("stress-ng ended at once for {}", load.name())),
        }
    }

    /// Whether it has run until now.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

/// SIGTERM ends its workers too; SIGKILL would leave them.
fn end(pid: u32) {
    if let Some(pid) = Pid::from_raw(pid as i32) {
        let _ = kill_process(pid, Signal::TERM);
    }
}

impl Drop for Stress {
    fn drop(&mut self) {
        // Once it is reaped, another process may have the number.
        if self.is_running() {
            end(self.child.id());
        }
        self.cleanup = None;
        let _ = self.child.wait();
    }
}

/// A directory on the disk that is measured: the path, or the one that has the file.
fn dir_on_disk_of(path: &Path) -> Result<PathBuf, String> {
    if path.is_dir() {
        return Ok(path.to_owned());
    }
    let file = path.canonicalize().map_err(|e| format!("Cannot find {}: {e}", path.display()))?;
    match file.parent() {
        Some(parent) if file.is_file() => Ok(parent.to_owned()),
        _ => Err("an I/O load needs a directory on the disk, and --path names a block device".to_owned()),
    }
}
