//! The daemon of leased files, for cells with maps of files beside the mount.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;

use crate::gaia::stage::Stage;
use crate::gaia::worker::Worker;

/// The daemon sees a moment later that a program has unmapped something.
const SEEN_WITHIN: Duration = Duration::from_secs(5);

/// A daemon, until it is dropped.
pub struct Daemon {
    _running: Worker,
    socket: PathBuf,
}

impl Daemon {
    /// Starts it, at the socket that programs with kernels are told.
    pub fn start(stage: &Stage) -> anyhow::Result<Daemon> {
        let socket = stage.path("gaia.sock");
        let mut command = Command::new("/proc/self/exe");
        command.args(["gaia", "serve", "--foreground", "--until-stdin-ends", "--socket"]).arg(&socket);
        let mut running = Worker::spawn("the daemon of leased files", &mut command, &stage.deadline)?;
        let line = running.line()?;
        ensure!(line.starts_with("serving"), "the daemon of leased files has answered `{line}`");
        Ok(Daemon { _running: running, socket })
    }

    /// Drops what no program has mapped, once at most so many maps are left.
    pub fn drop_unmapped(&self, kept: u64) -> anyhow::Result<()> {
        let begun = Instant::now();
        while self.maps()? > kept && begun.elapsed() < SEEN_WITHIN {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.ask(&["drop"]).map(drop)
    }

    fn maps(&self) -> anyhow::Result<u64> {
        let status: serde_json::Value = serde_json::from_slice(&self.ask(&["status", "--json"])?)?;
        Ok(status[0]["maps"].as_u64().unwrap_or(0))
    }

    fn ask(&self, question: &[&str]) -> anyhow::Result<Vec<u8>> {
        let done =
            Command::new("/proc/self/exe").arg("gaia").args(question).arg("--socket").arg(&self.socket).output()?;
        ensure!(done.status.success(), "gaia {}: {}", question[0], String::from_utf8_lossy(&done.stderr).trim());
        Ok(done.stdout)
    }
}
