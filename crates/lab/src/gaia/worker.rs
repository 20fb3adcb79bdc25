//! A program that does the work of a cell: a line to its stdin, one line of figures back.
//!
//! ```text
//!   prepare ──>                    run ──>
//!           <── done                   <── done seconds=0.0021 cpu=0.0019 gpu=8388608
//! ```
//!
//! It ends with its stdin, so that it does not outlive this process. An answer that does not come before the time limit
//! of the experiment is an error, and the program is killed.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::deadline::Deadline;

/// What a run has measured, by name. All have `seconds`, `cpu` (seconds of processors) and `gpu` (bytes).
pub type Figures = BTreeMap<String, f64>;

/// How long a program may take to end.
const ENDING: Duration = Duration::from_secs(5);

/// The time limit was reached.
#[derive(Debug)]
pub struct TimeUp;

impl fmt::Display for TimeUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the time limit was reached")
    }
}

impl std::error::Error for TimeUp {}

/// Programs that run, for a signal that ends this process.
static RUNNING: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// Kills all of them. Only a process that is ending calls this.
pub fn kill_all() {
    let running = RUNNING.lock().map(|running| running.clone()).unwrap_or_default();
    for pid in running.into_iter().filter_map(|pid| Pid::from_raw(pid as i32)) {
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// A running program.
pub struct Worker {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    deadline: Deadline,
}

impl Worker {
    /// Starts a program, and waits until it is ready.
    pub fn start(name: &str, command: &mut Command, deadline: &Deadline) -> anyhow::Result<Worker> {
        let mut worker = Worker::spawn(name, command, deadline)?;
        worker.ready()?;
        Ok(worker)
    }

    /// Starts a program; the next answer is that it is ready.
    pub fn spawn(name: &str, command: &mut Command, deadline: &Deadline) -> anyhow::Result<Worker> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("Cannot start {name}"))?;
        if let Ok(mut running) = RUNNING.lock() {
            running.push(child.id());
        }
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().context("no output")?);
        let (sender, lines) = channel();
        let read = move || stdout.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok());
        std::thread::Builder::new().name("answers".to_owned()).spawn(read)?;
        Ok(Worker { name: name.to_owned(), child, stdin, lines, deadline: deadline.clone() })
    }

    /// Waits until it is ready.
    pub fn ready(&mut self) -> anyhow::Result<()> {
        let line = self.line()?;
        if line != "ready" {
            bail!("{} has answered `{line}` instead of `ready`", self.name);
        }
        Ok(())
    }

    /// A command, and its figures.
    pub fn ask(&mut self, what: &str) -> anyhow::Result<Figures> {
        self.tell(what)?;
        self.hear()
    }

    /// A command.
    pub fn tell(&mut self, what: &str) -> anyhow::Result<()> {
        // If it has ended, the missing answer says so.
        let _ = self.stdin.as_mut().context("no input")?.write_all(format!("{what}\n").as_bytes());
        Ok(())
    }

    /// The figures of the command before.
    pub fn hear(&mut self) -> anyhow::Result<Figures> {
        let line = self.line()?;
        parse(&line).with_context(|| format!("{} has answered `{line}`", self.name))
    }

    /// The same, if it is there already.
    pub fn poll(&mut self) -> anyhow::Result<Option<Figures>> {
        match self.lines.try_recv() {
            Ok(line) => parse(&line).map(Some).with_context(|| format!("{} has answered `{line}`", self.name)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(self.failure()),
        }
    }

    /// A line of its output.
    pub fn line(&mut self) -> anyhow::Result<String> {
        match self.lines.recv_timeout(self.deadline.left()) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => {
                let _ = self.child.kill();
                Err(TimeUp.into())
            }
            Err(RecvTimeoutError::Disconnected) => Err(self.failure()),
        }
    }

    fn failure(&mut self) -> anyhow::Error {
        let _ = self.child.kill();
        let mut text = String::new();
        if let Some(mut errors) = self.child.stderr.take() {
            let _ = errors.read_to_string(&mut text);
        }
        anyhow::anyhow!("{} has failed: {}", self.name, text.trim())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stdin = None;
        let (begun, most) = (Instant::now(), ENDING.min(self.deadline.left()));
        while begun.elapsed() < most && !matches!(self.child.try_wait(), Ok(Some(_))) {
            std::thread::sleep(Duration::from_millis(2));
        }
        // Its number may soon be another program's.
        if let Ok(mut running) = RUNNING.lock() {
            running.retain(|pid| *pid != self.child.id());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `done name=value name=value`.
fn parse(line: &str) -> anyhow::Result<Figures> {
    let mut words = line.split_whitespace();
    if words.next() != Some("done") {
        bail!("expected `done` and figures");
    }
    words
        .map(|word| {
            let (name, value) = word.split_once('=').context("expected name=value")?;
            Ok((name.to_owned(), value.parse()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_names_and_numbers() {
        let figures = parse("done seconds=0.5 wrong=3").unwrap();
        assert_eq!((figures["seconds"], figures["wrong"]), (0.5, 3.0));
        assert!(parse("done").unwrap().is_empty());
        for line in ["", "ready", "done seconds", "done seconds=fast"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn program_that_fails_is_quoted_and_silent_one_is_killed() {
        let deadline = Deadline::after(Duration::from_secs(600));
        let mut failing =
            Worker::spawn("sh", Command::new("sh").args(["-c", "echo no device >&2; exit 1"]), &deadline).unwrap();
        let error = failing.ready().unwrap_err().to_string();
        assert_eq!(error, "sh has failed: no device");

        let deadline = Deadline::after(Duration::from_millis(100));
        let mut silent = Worker::spawn("sleep", Command::new("sleep").arg("600"), &deadline).unwrap();
        let begun = Instant::now();
        assert!(silent.ready().unwrap_err().is::<TimeUp>());
        drop(silent);
        assert!(begun.elapsed() < Duration::from_secs(300));
    }
}
