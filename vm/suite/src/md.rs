//! md arrays: made, broken, rebuilt and checked.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::case::{CaseError, fail};

/// A resynchronisation under software emulation, with others on the machine. Only there to turn a hang into a failure.
const PATIENCE: Duration = Duration::from_secs(120);

/// An array.
pub(crate) struct Array {
    device: PathBuf,
    /// Of one that a case made: what it is made of.
    members: Vec<PathBuf>,
}

impl Array {
    /// One that is there.
    pub(crate) fn at(device: PathBuf) -> Array {
        Array { device, members: Vec::new() }
    }

    /// A new one, stopped and forgotten when dropped. The members' bytes are synchronised.
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

    /// Waits until all members hold what they must, for the first time.
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

    /// Takes a member away, as if it had died.
    pub(crate) fn fail(&self, member: &Path) -> Result<(), CaseError> {
        run(Command::new("mdadm").arg(&self.device).arg("--fail").arg(member))?;
        // It is busy until the last request has left it.
        retry(|| run(Command::new("mdadm").arg(&self.device).arg("--remove").arg(member)))
    }

    /// Gives it a member that knows nothing: all of it has to be rebuilt.
    pub(crate) fn add(&self, member: &Path) -> Result<(), CaseError> {
        run(Command::new("mdadm").arg("--zero-superblock").arg(member))?;
        run(Command::new("mdadm").arg(&self.device).arg("--add").arg(member))
    }

    /// Members that are missing.
    pub(crate) fn degraded(&self) -> Result<u32, CaseError> {
        Ok(self.ask("degraded")?.parse().unwrap_or(0))
    }

    /// Waits until nothing is rebuilt or checked.
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

    /// Waits until all members are there and rebuilt.
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

    /// Empties the cache of stripes that parity arrays keep.
    pub(crate) fn forget_stripes(&self) -> Result<(), CaseError> {
        // Waits for those that are under way.
        for entries in ["17", "256"] {
            fs::write(self.file("stripe_cache_size"), entries)?;
        }
        Ok(())
    }

    fn go(&self, action: &str) -> Result<(), CaseError> {
        self.idle()?;
        fs::write(self.file("sync_action"), action)?;
        // It begins in a thread of its own.
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

/// Runs a command; what it said, if it fails.
pub(crate) fn run(command: &mut Command) -> Result<(), CaseError> {
    let ran = command.output()?;
    if ran.status.success() {
        return Ok(());
    }
    let said = [ran.stdout, ran.stderr].concat();
    fail(format!("{command:?}: {}: {}", ran.status, String::from_utf8_lossy(&said).trim()))
}

/// Tries again for five seconds: who used it last may not have let go yet.
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
