//! Load on the machine concurrently with the reads: stress-ng, as in the paper, while a value lives.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::experiment::Load;
use crate::cleanup::{self, Cleanup};

/// The load that a signal ends with this process.
///
/// One for a whole command: after the first `Cleanup` is dropped, no signal has its default effect again.
pub struct LoadGuard {
    running: Arc<Mutex<Option<Pid>>>,
    _cleanup: Cleanup,
}

impl LoadGuard {
    /// Watches for signals until dropped.
    pub fn new() -> LoadGuard {
        let running = Arc::new(Mutex::new(None));
        let watched = Arc::clone(&running);
        LoadGuard { running, _cleanup: cleanup::on_signal_after(Vec::new(), move || end(&watched)) }
    }
}

/// A running load; ends when dropped, and when a signal ends this process.
pub struct Stress {
    child: Child,
    running: Arc<Mutex<Option<Pid>>>,
}

impl Stress {
    /// Starts it for files of `path`, and waits until it has an effect; the reason if it cannot run. It ends by itself after
    /// `limit`, so that it does not stay if this process is killed.
    pub fn start(load: Load, path: &Path, limit: Duration, guard: &LoadGuard) -> Result<Option<Stress>, String> {
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
        let running = Arc::clone(&guard.running);
        *lock(&running) = Some(Pid::from_child(&child));
        let mut stress = Stress { child, running };
        std::thread::sleep(Duration::from_secs(1));
        match stress.is_running() {
            true => Ok(Some(stress)),
            false => Err(format!("stress-ng ended at once for {}", load.name())),
        }
    }

    /// Whether it has run until now.
    pub fn is_running(&mut self) -> bool {
        // Locked, so that no signal is sent to a process that is reaped here.
        let mut running = lock(&self.running);
        let is_running = matches!(self.child.try_wait(), Ok(None));
        if !is_running {
            *running = None;
        }
        is_running
    }
}

/// SIGTERM ends its workers too; SIGKILL would leave them. It is not ended twice.
fn end(running: &Mutex<Option<Pid>>) {
    if let Some(pid) = lock(running).take() {
        let _ = kill_process(pid, Signal::TERM);
    }
}

fn lock(running: &Mutex<Option<Pid>>) -> MutexGuard<'_, Option<Pid>> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Stress {
    fn drop(&mut self) {
        // Before it is reaped: after that another process may have the number.
        end(&self.running);
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
