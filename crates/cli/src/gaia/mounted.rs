//! A mount for the demo and for the laboratory: a supervisor process that lives as long as this one.
//!
//! The program that runs this must be a program with the arguments of `spinio gaia`, as the laboratory is.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal};

use crate::exit::{self, Exit};

/// A mount over a directory.
pub struct Mounted {
    directory: PathBuf,
    supervisor: Child,
    /// The supervisor unmounts when this is closed.
    stdin: Option<ChildStdin>,
    server: Arc<Mutex<Option<Pid>>>,
}

impl Mounted {
    /// Mounts GAIA over `directory`.
    pub fn new(directory: &Path) -> anyhow::Result<Mounted> {
        let mut supervisor = Command::new("/proc/self/exe")
            .args(["gaia", "mount", "--foreground", "--until-stdin-ends"])
            .arg(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("Cannot start the supervisor of the mount")?;
        let stdin = supervisor.stdin.take();
        let mut lines = BufReader::new(supervisor.stdout.take().context("no output of the supervisor")?).lines();
        let mut mounted =
            Mounted { directory: directory.to_owned(), supervisor, stdin, server: Arc::new(Mutex::default()) };
        let first = lines.next().transpose()?.unwrap_or_default();
        if !first.starts_with("mounted") {
            let mut why = String::new();
            if let Some(mut errors) = mounted.supervisor.stderr.take() {
                errors.read_to_string(&mut why)?;
            }
            let why = why.trim().trim_start_matches("spinio: ");
            return Err(exit::error(Exit::Failed, format!("Cannot mount GAIA: {why}")));
        }
        let server = mounted.server.clone();
        let watch = move || {
            for line in lines.map_while(Result::ok) {
                let pid = line.strip_prefix("server ").and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw);
                if pid.is_some() {
                    *server.lock().unwrap_or_else(PoisonError::into_inner) = pid;
                }
            }
        };
        std::thread::Builder::new().name("servers".to_owned()).spawn(watch)?;
        Ok(mounted)
    }

    /// Kills the server (SIGKILL); returns how long until another one answered a request.
    pub fn kill_server(&self) -> anyhow::Result<Duration> {
        let pid = self.server.lock().unwrap_or_else(PoisonError::into_inner).take();
        let pid = pid.context("the supervisor has not named its server")?;
        let killed = Instant::now();
        rustix::process::kill_process(pid, Signal::KILL)?;
        // The kernel answers this call from no cache.
        rustix::fs::statvfs(&self.directory).context("the mount does not answer")?;
        Ok(killed.elapsed())
    }

    /// Supervisor and server, as far as they are there.
    pub fn processes(&self) -> Vec<u32> {
        let server = *self.server.lock().unwrap_or_else(PoisonError::into_inner);
        let server = server.map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
        std::iter::once(self.supervisor.id()).chain(server).collect()
    }

    /// Unmounts, and waits until all is written.
    pub fn unmount(mut self) -> anyhow::Result<()> {
        self.stdin = None;
        let status = self.supervisor.wait()?;
        if !status.success() {
            bail!("The supervisor of the mount failed ({status})");
        }
        Ok(())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.stdin = None;
        let _ = self.supervisor.wait();
    }
}
