//! Load on the machine concurrently with the reads: stress-ng, as in the paper, while a value lives.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::experiment::Load;

/// A running load; ends when dropped.
pub struct Stress(Child);

impl Stress {
    /// Starts it, and waits until it has an effect; the reason if it cannot run.
    pub fn start(load: Load, folder: &Path) -> Result<Option<Stress>, String> {
        let mut command = Command::new("stress-ng");
        match load {
            Load::None => return Ok(None),
            Load::Cpu => command.args(["--cpu", "0"]),
            Load::Io => command.args(["--hdd", "2", "--hdd-bytes", "64M", "--temp-path"]).arg(folder),
        };
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err("stress-ng is not installed".to_owned()),
            Err(e) => return Err(format!("stress-ng cannot be started: {e}")),
        };
        std::thread::sleep(Duration::from_secs(1));
        match child.try_wait() {
            Ok(None) => Ok(Some(Stress(child))),
            _ => Err(format!("stress-ng ended at once for {}", load.name())),
        }
    }
}

impl Drop for Stress {
    fn drop(&mut self) {
        // SIGTERM ends its workers too; SIGKILL would leave them.
        if let Some(pid) = Pid::from_raw(self.0.id() as i32) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = self.0.wait();
    }
}
