//! The server of the demo, examples/net/http: compiled from the sources that this command contains, and run as a process.
//!
//! nvcc compiles it for the first CUDA GPU, if there are both; else the C++ compiler with the headers of the emulated GPU.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, ensure};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::compiler::Gpu;
use crate::exit::{self, Exit};
use crate::{compiler, device_headers};

macro_rules! sources {
    ($($name:literal),*) => {
        &[$((concat!("examples/", $name), include_str!(concat!("../../../../../examples/", $name)))),*]
    };
}

/// In the directories that they have in the repository, by which one includes the other.
const SOURCES: &[(&str, &str)] = sources!("net/http/http.cu", "net/server.h");
const PROGRAM: &str = "http";

/// What the server counted.
pub(super) type Counters = HashMap<String, u64>;

/// Compiles it in `dir`; returns in words where its kernel runs.
pub(super) fn compile(dir: &Path, library: &Path) -> anyhow::Result<String> {
    device_headers::write_files(dir, SOURCES)?;
    Ok(match compiler::gpu(dir, PROGRAM, SOURCES[0].0, library)? {
        Gpu::Cuda => "the first CUDA GPU".to_owned(),
        Gpu::Emulated(why) => format!("the emulated GPU ({why})"),
    })
}

/// The running server. It ends when its standard input does, so also when this process is killed.
pub(super) struct Server {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    address: String,
}

impl Server {
    pub(super) fn start(dir: &Path, files: &Path, listen: &str, blocks: u32) -> anyhow::Result<Server> {
        let mut child = Command::new(dir.join(PROGRAM))
            .args([&format!("tcp://{listen}"), &blocks.to_string(), "--until-stdin-ends", "--files"])
            .arg(files)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("Cannot start the server")?;
        let stdin = child.stdin.take();
        let mut stdout = BufReader::new(child.stdout.take().context("The server has no output")?);
        let mut line = String::new();
        stdout.read_line(&mut line)?;
        let address = line.strip_prefix("listening on tcp://").and_then(|rest| rest.split(',').next());
        let Some(address) = address.map(str::to_owned) else {
            return Err(failure(&mut child));
        };
        Ok(Server { child, stdin, stdout, address })
    }

    /// Where it listens.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Until it ends by itself, which it does when it fails, or with Ctrl-C.
    pub(super) fn wait(mut self) -> anyhow::Result<()> {
        let status = self.child.wait()?;
        let stopped = matches!(status.signal(), Some(SIGHUP | SIGINT | SIGTERM));
        if stopped || status.success() { Ok(()) } else { Err(failure(&mut self.child)) }
    }

    /// Ends it; returns what it counted.
    pub(super) fn stop(mut self) -> anyhow::Result<Counters> {
        self.stdin = None;
        let mut text = String::new();
        self.stdout.read_to_string(&mut text)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "The server of the demo failed ({status})");
        let pair = |line: &str| line.split_once(' ').and_then(|(name, n)| Some((name.to_owned(), n.parse().ok()?)));
        Ok(text.lines().filter_map(pair).collect())
    }
}

/// What it printed, and how it ended.
fn failure(child: &mut Child) -> anyhow::Error {
    let mut why = String::new();
    if let Some(mut errors) = child.stderr.take() {
        let _ = errors.read_to_string(&mut why);
    }
    let status = child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
    exit::error(Exit::Failed, format!("The server of the demo failed ({status}): {}", why.trim()))
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stdin = None;
        let _ = self.child.wait();
    }
}
