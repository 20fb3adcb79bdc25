//! Checkpoints from the GPU: readable at once, as `sha256sum` shows, and durable later.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};

use super::group::{Group, Work, alone};
use crate::gaia::experiment::{Cell, Method, Setting};
use crate::gaia::stage::{Stage, mix};
use crate::gaia::worker::Figures;

struct Checkpoint {
    group: Group,
    file: PathBuf,
    size: u64,
    round: u64,
    seen: String,
}

/// By maps in the mount, by the others beside it.
pub fn checkpoint(stage: &Stage, method: &Method, setting: &Setting) -> anyhow::Result<Box<dyn Cell>> {
    let size = setting.get("size")?;
    let file = stage.words(method.name == "map", "checkpoint", size)?;
    let group = alone(stage, &Work::new("checkpoint", method, &file))?;
    Ok(Box::new(Checkpoint { group, file, size, round: 0, seen: String::new() }))
}

/// The sum of a file, or of bytes, by the program that everyone has.
fn sha256sum(file: Option<&Path>, write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> anyhow::Result<String> {
    let mut command = Command::new("sha256sum");
    command.args(file).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("Cannot start sha256sum")?;
    if let Some(stdin) = child.stdin.take() {
        let mut out = std::io::BufWriter::with_capacity(1 << 20, stdin);
        write(&mut out)?;
    }
    let done = child.wait_with_output()?;
    ensure!(done.status.success(), "sha256sum: {}", String::from_utf8_lossy(&done.stderr).trim());
    Ok(String::from_utf8_lossy(&done.stdout).split_whitespace().next().unwrap_or_default().to_owned())
}

impl Cell for Checkpoint {
    fn prepare(&mut self, run: usize) -> anyhow::Result<()> {
        self.round += 1;
        self.group.prepare(run)
    }

    fn run(&mut self) -> anyhow::Result<Figures> {
        let mut figures = self.group.run()?;
        let visible = figures.get("seconds").copied().unwrap_or_default();
        let begun = std::time::Instant::now();
        self.seen = sha256sum(Some(&self.file), |_| Ok(()))?;
        figures.insert("sum".to_owned(), begun.elapsed().as_secs_f64());
        let later = self.group.ask("sync")?.get("durable").copied().unwrap_or_default();
        figures.insert("sync".to_owned(), later);
        figures.insert("seconds".to_owned(), visible);
        Ok(figures)
    }

    fn wrong(&mut self) -> anyhow::Result<u64> {
        let (round, words) = (self.round, self.size / 8);
        let right =
            sha256sum(None, |out| (0..words).try_for_each(|i| out.write_all(&mix(round << 40 | i).to_le_bytes())))?;
        Ok(u64::from(right != self.seen) + self.group.wrong()?)
    }
}
