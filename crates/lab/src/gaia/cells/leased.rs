//! The daemon of leased files, for cells with maps of files beside the mount.

use std::process::Command;

use anyhow::ensure;

use crate::gaia::stage::Stage;
use crate::gaia::worker::Worker;

/// A daemon, until it is dropped.
pub struct Daemon {
    _running: Worker,
    drop_chunks: Box<dyn Fn() -> std::io::Result<std::process::Output>>,
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
        let drop_chunks =
            Box::new(move || Command::new("/proc/self/exe").args(["gaia", "drop", "--socket"]).arg(&socket).output());
        Ok(Daemon { _running: running, drop_chunks })
    }

    /// Drops what no program has mapped.
    pub fn drop_unmapped(&self) -> anyhow::Result<()> {
        let done = (self.drop_chunks)()?;
        ensure!(done.status.success(), "gaia drop: {}", String::from_utf8_lossy(&done.stderr).trim());
        Ok(())
    }
}
