//! md arrays: created, degraded, rebuilt and checked.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::case::{CaseError, fail};

/// Time for a resynchronisation under software emulation on a busy machine. Only turns a hang into a failure.
const PATIENCE: Duration = Duration::from_secs(120);

/// An array.
pub(crate) struct Array {
    device: PathBuf,
    /// The members, if a case created the array.
    members: Vec<PathBuf>,
}

impl Array {
    /// An existing array.
    pub(crate) fn at(device: PathBuf) -> Array {
        Array { device, members: Vec::new() }
    }

    /// A new array, stopped and removed when dropped. The members' bytes are synchronised.
    pub(crate) fn make(number: u32, level: u32, members: Vec<PathBuf>) -> Result<Array, CaseError> {
        let device = PathBuf::from(format!("/dev/md{number}"));
        let mut command = Command::new("mdadm");
        command.arg("--create").arg(&device).args(["--quiet", "--run", "--bitmap=none"]);
        command.arg(format!("--level={level}")).arg(format!("--raid-devices={}", members.len()));
        if level != 1 {
            command.arg("--chunk=64");
        }
        run(command.args(&members))?;
        let array = Array { device, members };
        array.synchronised()?;
        Ok(array)
    }

    /// Waits until all members are synchronised for the first time.
    fn synchronised(&self) -> Result<(), CaseError> {
        let begun = Instant::now();
        while self.ask("resync_start")? != "none" || self.degraded()? > 0 || self.ask("sync_action")? != "idle" {
            if begun.elapsed() > PATIENCE {
                return fail(format!("{} is never synchronised", self.device.display()));
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    pub(crate) fn device(&self) -> &Path {
        &self.device
    }

    /// Removes a member, as if it had failed.
    pub(crate) fn fail(&self, member: &Path) -> Result<(), CaseError> {
        run(Command::new("mdadm").arg(&self.device).arg("--fail").arg(member))?;
        // It is busy until the last request is done.
        retry(|| run(Command::new("mdadm").arg(&self.device).arg("--remove").arg(member)))
    }

    /// Adds a blank member: all of it has to be rebuilt.
    pub(crate) fn add(&self, member: &Path) -> Result<(), CaseError> {
        run(Command::new("mdadm").arg("--zero-superblock").arg(member))?;
        run(Command::new("mdadm").arg(&self.device).arg("--add").arg(member))
    }

    /// The number of missing members.
    pub(crate) fn degraded(&self) -> Result<u32, CaseError> {
        Ok(self.ask("degraded")?.parse().unwrap_or(0))
    }

    /// Waits until no rebuild or check is running.
    pub(crate) fn idle(&self) -> Result<(), CaseError> {
        let begun = Instant::now();
        while self.ask("sync_action")? != "idle" {
            if begun.elapsed() > PATIENCE {
                return fail(format!("{} is still busy: {}", self.device.display(), self.ask("sync_completed")?));
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Waits until all members are present and rebuilt.
    pub(crate) fn whole(&self) -> Result<(), CaseError> {
        let begun = Instant::now();
        loop {
            // Between `--add` and the start of the rebuild it is idle too.
            self.idle()?;
            if self.degraded()? == 0 {
                return Ok(());
            }
            if begun.elapsed() > PATIENCE {
                return fail(format!("{} still lacks a member", self.device.display()));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Reads everything and counts the sectors where copies or parity do not match.
    pub(crate) fn mismatches(&self) -> Result<u64, CaseError> {
        self.go("check")?;
        self.ask("mismatch_cnt")?.parse().map_err(|_| CaseError::Failed("mismatch_cnt is no number".to_owned()))
    }

    /// Makes copies and parity match again.
    pub(crate) fn repair(&self) -> Result<(), CaseError> {
        self.go("repair")
    }

    /// Empties the stripe cache of a parity array.
    pub(crate) fn forget_stripes(&self) -> Result<(), CaseError> {
        // Waits for requests in flight.
        for entries in ["17", "256"] {
            fs::write(self.file("stripe_cache_size"), entries)?;
        }
        Ok(())
    }

    fn go(&self, action: &str) -> Result<(), CaseError> {
        self.idle()?;
        fs::write(self.file("sync_action"), action)?;
        // It begins in another thread.
        let begun = Instant::now();
        while self.ask("last_sync_action")? != action {
            if begun.elapsed() > PATIENCE {
                return fail(format!("{} begins no {action}", self.device.display()));
            }
            thread::sleep(Duration::from_millis(20));
        }
        self.idle()
    }

    fn file(&self, name: &str) -> PathBuf {
        let number = self.device.file_name().unwrap_or_default();
        Path::new("/sys/block").join(number).join("md").join(name)
    }

    fn ask(&self, name: &str) -> Result<String, CaseError> {
        let path = self.file(name);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(text.trim().to_owned()),
            Err(e) => fail(format!("{}: {e}", path.display())),
        }
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        if self.members.is_empty() {
            return;
        }
        let _ = retry(|| run(Command::new("mdadm").arg("--stop").arg(&self.device)));
        let _ = run(Command::new("mdadm").arg("--zero-superblock").args(&self.members));
    }
}

/// Runs a command; its output, if it fails.
pub(crate) fn run(command: &mut Command) -> Result<(), CaseError> {
    let ran = command.output()?;
    if ran.status.success() {
        return Ok(());
    }
    let said = [ran.stdout, ran.stderr].concat();
    fail(format!("{command:?}: {}: {}", ran.status, String::from_utf8_lossy(&said).trim()))
}

/// Retries for five seconds: the last user may not have released it yet.
pub(crate) fn retry(mut what: impl FnMut() -> Result<(), CaseError>) -> Result<(), CaseError> {
    let mut last = Ok(());
    for _ in 0..100 {
        last = what();
        if last.is_ok() {
            break;
        }
        thread::sleep(Duration::from_millis(50));
    }
    last
}
