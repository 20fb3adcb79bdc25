//! Starts workers and the mutator, kills workers, restarts them, and checks the results.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use spinio_testkit::Rng;

use crate::counts::EventCounts;
use crate::{Args, LAST_PROTECTED, files};

/// Time for a worker to end after its run time, on a slow machine.
const EXIT_TIMEOUT: Duration = Duration::from_secs(120);

struct Worker {
    number: u64,
    child: Child,
    /// The log records it had acknowledged when it ended by itself; set by the reader thread.
    logged: Arc<AtomicU64>,
    listener: Option<std::thread::JoinHandle<()>>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let made;
    let folder = match &args.folder {
        Some(folder) => folder.as_path(),
        None => {
            made = tempfile::Builder::new().prefix("soak").tempdir()?;
            made.path()
        }
    };
    files::make(folder)?;
    let begun = Instant::now();
    let end = begun + Duration::from_secs(args.seconds);
    let tally = Arc::new(EventCounts::default());
    let mut rng = Rng::new(args.seed);
    let mut mutator = Worker::spawn(program(args, folder, end)?.arg("--mutator"), 0, &tally)?;
    let mut number = 0;
    let mut start = || {
        number += 1;
        Worker::start(args, folder, end, number, &tally)
    };
    let mut workers = (0..args.processes).map(|_| start()).collect::<Result<Vec<_>>>()?;
    let (mut killed, mut reported_at, mut next_kill) = (0, begun, begun + Duration::from_secs(args.kill_every));
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(100));
        for worker in &mut workers {
            if let Some(status) = worker.child.try_wait()?
                && Instant::now() + Duration::from_secs(1) < end
            {
                bail!("worker {} ended before its time: {status}", worker.number);
            }
        }
        ensure!(mutator.child.try_wait()?.is_none_or(|s| s.success()), "the mutator failed");
        if args.kill_every > 0 && Instant::now() >= next_kill && end - Instant::now() > Duration::from_secs(2) {
            next_kill += Duration::from_secs(args.kill_every);
            let killable: Vec<usize> = (0..workers.len()).filter(|&i| workers[i].number > LAST_PROTECTED).collect();
            if killable.is_empty() {
                continue;
            }
            let mut victim = workers.swap_remove(*rng.choose(&killable));
            victim.child.kill()?;
            victim.child.wait()?;
            killed += 1;
            workers.push(start()?);
        }
        if reported_at.elapsed() > Duration::from_secs(30) {
            reported_at = Instant::now();
            println!("{:5} s  {} workers started, {killed} killed", begun.elapsed().as_secs(), killed + args.processes);
        }
    }
    let mut logged = Vec::new();
    for mut worker in workers {
        let status = worker.wait()?;
        ensure!(status.success(), "worker {} failed: {status}", worker.number);
        worker.wait_listener();
        logged.push((worker.number, worker.logged.load(Relaxed)));
    }
    ensure!(mutator.wait()?.success(), "the mutator failed");
    mutator.wait_listener();
    let records = files::read_log(&files::log(folder))?;
    for (number, count) in logged {
        // One writer a thread: numbers are worker x 1000 + thread.
        let found: u64 = records.iter().filter(|(w, _)| **w / 1000 == number).map(|(_, n)| n).sum();
        ensure!(found == count, "worker {number} logged {count} records, the log has {found}");
    }
    println!("{}", tally.line());
    println!(
        "{} log records whole, {killed} workers killed, nothing wrong, nothing left over",
        records.values().sum::<u64>()
    );
    Ok(())
}

fn program(args: &Args, folder: &Path, end: Instant) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    let left = end.saturating_duration_since(Instant::now()).as_secs();
    command.arg("--folder").arg(folder).args(["--seconds", &left.to_string(), "--seed", &args.seed.to_string()]);
    command.args(["--threads", &args.threads.to_string()]);
    Ok(command)
}

impl Drop for Worker {
    /// Kills the remaining processes when the test has failed.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Worker {
    fn start(args: &Args, folder: &Path, end: Instant, number: u64, tally: &Arc<EventCounts>) -> Result<Worker> {
        Worker::spawn(program(args, folder, end)?.args(["--worker", &number.to_string()]), number, tally)
    }

    /// Starts the program, and a thread that reads its output.
    fn spawn(command: &mut Command, number: u64, tally: &Arc<EventCounts>) -> Result<Worker> {
        let mut child = command.stdout(Stdio::piped()).spawn().context("cannot start a worker")?;
        let output = child.stdout.take().context("a worker without output")?;
        let (logged, tally) = (Arc::new(AtomicU64::new(0)), Arc::clone(tally));
        let acknowledged = Arc::clone(&logged);
        let listener = std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                match line.strip_prefix("logged ").and_then(|n| n.parse().ok()) {
                    Some(n) => acknowledged.store(n, Relaxed),
                    None => tally.parse_line(&line),
                }
            }
        });
        Ok(Worker { number, child, logged, listener: Some(listener) })
    }

    /// Waits until all of its output was read.
    fn wait_listener(&mut self) {
        if let Some(listener) = self.listener.take() {
            listener.join().expect("a listener");
        }
    }

    /// Waits for its end; kills a hung process.
    fn wait(&mut self) -> Result<std::process::ExitStatus> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if begun.elapsed() > EXIT_TIMEOUT {
                // A core dump or a debugger shows more than a silent end.
                let _ = Command::new("cat").arg(format!("/proc/{}/stack", self.child.id())).status();
                self.child.kill()?;
                bail!("worker {} hangs", self.number);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
