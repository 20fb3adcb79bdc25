//! The four programs that write one file, and their turns.
//!
//! ```text
//!   demo ── one line on stdin: go ──> every writer at once ── `round=N` on stdout ──> demo
//! ```
//!
//! No writer begins a round before all others have begun it too, so that each round has all four in the same pages at
//! the same time. Nothing else is ordered.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal};

use super::programs;

/// A writer of the demo: its number is that of its cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// The legacy program with `pread` and `pwrite`.
    Pwrite = 0,
    /// The legacy program with a shared mapping.
    Mmap = 1,
    /// Kernels of one process.
    Gpu0 = 2,
    /// Kernels of another process.
    Gpu1 = 3,
}

impl Writer {
    /// All, in the order of their cells.
    pub const ALL: [Writer; 4] = [Writer::Pwrite, Writer::Mmap, Writer::Gpu0, Writer::Gpu1];

    /// The name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Writer::Pwrite => "CPU, pwrite",
            Writer::Mmap => "CPU, mmap",
            Writer::Gpu0 => "GPU process 0",
            Writer::Gpu1 => "GPU process 1",
        }
    }

    fn command(self, work: &Path, file: &Path, rounds: u32) -> Command {
        let gpu = matches!(self, Writer::Gpu0 | Writer::Gpu1);
        let mut command = Command::new(work.join(if gpu { programs::GPU } else { programs::LEGACY }));
        match self {
            Writer::Pwrite => drop(command.arg("pwrite")),
            Writer::Mmap => drop(command.arg("mmap")),
            Writer::Gpu0 | Writer::Gpu1 => {}
        }
        command.arg(file).args([(self as u32).to_string(), rounds.to_string()]);
        command
    }
}

/// What a writer printed at its end: counters by name.
pub type Counters = BTreeMap<String, u64>;

/// A line of a writer's output, as a name and a number.
struct Printed(Writer, String, u64);

/// Writers that this process has not waited for: only these PIDs are no other program's.
#[derive(Clone, Default)]
pub struct Running(Arc<Mutex<Vec<Pid>>>);

impl Running {
    /// Kills them, from another thread.
    pub fn kill_all(&self) {
        for pid in self.pids().drain(..) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
    }

    fn pids(&self) -> MutexGuard<'_, Vec<Pid>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The running writers.
pub struct Writers {
    running: Running,
    children: Vec<(Writer, Child)>,
    turns: Vec<ChildStdin>,
    printed: Receiver<Printed>,
}

impl Writers {
    /// Starts all on `file`.
    pub fn start(work: &Path, file: &Path, rounds: u32, running: Running) -> anyhow::Result<Writers> {
        let (sender, printed) = mpsc::channel();
        let mut writers = Writers { running, children: Vec::new(), turns: Vec::new(), printed };
        for writer in Writer::ALL {
            let mut command = writer.command(work, file, rounds);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut child = command.spawn().with_context(|| format!("Cannot start the {} writer", writer.name()))?;
            writers.running.pids().push(Pid::from_child(&child));
            writers.turns.extend(child.stdin.take());
            if let Some(out) = child.stdout.take() {
                let sender = sender.clone();
                std::thread::Builder::new().spawn(move || forward(writer, out, &sender))?;
            }
            writers.children.push((writer, child));
        }
        Ok(writers)
    }

    /// One round of all. `first_done` is called when the first writer has ended it.
    pub fn round(&mut self, first_done: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
        for turn in &mut self.turns {
            // A writer that has failed is reported below.
            let _ = turn.write_all(b"go\n");
        }
        let mut first_done = Some(first_done);
        let mut left = self.children.len();
        while left > 0 {
            match self.printed.recv() {
                Ok(Printed(_, name, _)) if name == "round" => left -= 1,
                Ok(Printed(writer, ..)) => return self.failed(writer),
                Err(_) => return self.failed(Writer::Pwrite),
            }
            if let Some(call) = first_done.take() {
                call()?;
            }
        }
        Ok(())
    }

    /// Lets all end; returns their counters.
    pub fn finish(&mut self) -> anyhow::Result<[Counters; 4]> {
        self.turns.clear();
        let mut counters: [Counters; 4] = Default::default();
        let mut running = self.children.len();
        while running > 0 {
            match self.printed.recv() {
                Ok(Printed(_, name, _)) if name == ENDED => running -= 1,
                Ok(Printed(writer, name, value)) => drop(counters[writer as usize].insert(name, value)),
                Err(_) => break,
            }
        }
        self.running.pids().clear();
        for (writer, child) in &mut self.children {
            if !child.wait()?.success() {
                return Err(failure(*writer, child));
            }
        }
        Ok(counters)
    }

    fn failed(&mut self, writer: Writer) -> anyhow::Result<()> {
        // It is waited for; the others are killed when this is dropped.
        self.running.pids().clear();
        match self.children.iter_mut().find(|(found, _)| *found == writer) {
            Some((_, child)) => Err(failure(writer, child)),
            None => bail!("A writer is missing"),
        }
    }
}

/// Stands for the end of a writer's output.
const ENDED: &str = "";

fn forward(writer: Writer, out: impl Read, sender: &Sender<Printed>) {
    for line in BufReader::new(out).lines().map_while(Result::ok) {
        if let Some((name, value)) = line.split_once('=')
            && let Ok(value) = value.parse()
        {
            let _ = sender.send(Printed(writer, name.to_owned(), value));
        }
    }
    let _ = sender.send(Printed(writer, ENDED.to_owned(), 0));
}

fn failure(writer: Writer, child: &mut Child) -> anyhow::Error {
    let mut why = String::new();
    if let Some(errors) = &mut child.stderr {
        let _ = errors.read_to_string(&mut why);
    }
    let status = child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
    anyhow::anyhow!("The writer `{}` failed ({status}): {}", writer.name(), why.trim())
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.running.pids().clear();
        for (_, child) in &mut self.children {
            // Those that have ended are not there any more.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_writers_that_were_not_waited_for_are_killed() {
        let sleeper = || Command::new("sleep").arg("600").spawn().unwrap();
        let (mut running, mut ended) = (sleeper(), sleeper());
        let (_sender, printed) = mpsc::channel();
        let list = Running::default();
        let writers = |child| {
            let children = vec![(Writer::Pwrite, child)];
            Writers { running: list.clone(), children, turns: Vec::new(), printed }
        };
        list.pids().push(Pid::from_child(&running));
        list.kill_all();
        assert!(!running.wait().unwrap().success());
        // As a PID that another program has by now.
        list.pids().push(Pid::from_child(&ended));
        drop(writers(sleeper()));
        list.kill_all();
        assert_eq!(ended.try_wait().unwrap(), None, "a program was killed that is no writer");
        ended.kill().unwrap();
        ended.wait().unwrap();
    }
}
