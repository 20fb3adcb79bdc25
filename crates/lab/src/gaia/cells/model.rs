//! Several processes use one model on one GPU: leased files against a copy in each process.
//!
//! The first process is alone, since the others would each read a part for it; then all others start at once. Each adds up
//! the whole model.

use std::process::Command;

use anyhow::ensure;

use super::group::{Group, Work, add};
use crate::gaia::experiment::{Cell, Method, Setting};
use crate::gaia::stage::Stage;
use crate::gaia::worker::{Figures, Worker};

struct Model {
    first: Group,
    others: Group,
    drop_chunks: Box<dyn Fn() -> std::io::Result<std::process::Output>>,
    /// The daemon of leased files; ends with this value.
    _daemon: Option<Worker>,
}

/// The file is beside the mount for all methods.
pub fn model(stage: &Stage, method: &Method, setting: &Setting) -> anyhow::Result<Box<dyn Cell>> {
    let file = stage.words(false, "model", setting.get("size")?)?;
    let socket = stage.path("gaia.sock");
    let daemon = (method.name == "map").then(|| {
        let mut command = Command::new("/proc/self/exe");
        command.args(["gaia", "serve", "--foreground", "--until-stdin-ends", "--socket"]).arg(&socket);
        let mut daemon = Worker::spawn("the daemon of leased files", &mut command, &stage.deadline)?;
        let line = daemon.line()?;
        ensure!(line.starts_with("serving"), "the daemon of leased files has answered `{line}`");
        Ok(daemon)
    });
    let daemon = daemon.transpose()?;
    let work = Work::new("streaming", method, &file).with("fresh", 1);
    let mut workers =
        (0..setting.get("processes")?).map(|_| work.start(stage, 0)).collect::<anyhow::Result<Vec<_>>>()?;
    let others = workers.split_off(1);
    let drop_chunks =
        Box::new(move || Command::new("/proc/self/exe").args(["gaia", "drop", "--socket"]).arg(&socket).output());
    Ok(Box::new(Model { first: Group { workers }, others: Group { workers: others }, drop_chunks, _daemon: daemon }))
}

impl Cell for Model {
    fn prepare(&mut self, run: usize) -> anyhow::Result<()> {
        self.first.prepare(run)?;
        self.others.prepare(run)?;
        if self._daemon.is_some() {
            let done = (self.drop_chunks)()?;
            ensure!(done.status.success(), "gaia drop: {}", String::from_utf8_lossy(&done.stderr).trim());
        }
        Ok(())
    }

    fn run(&mut self) -> anyhow::Result<Figures> {
        let mut all = self.first.run()?;
        let first = all.get("seconds").copied().unwrap_or_default();
        let others = self.others.run()?;
        let further = others.get("seconds").copied().unwrap_or_default();
        add(&mut all, others);
        all.insert("seconds".to_owned(), first + further);
        all.insert("first".to_owned(), first);
        all.insert("further".to_owned(), further);
        // Each process counts what it has mapped.
        let shared = all.get("shared").copied().unwrap_or_default();
        all.entry("gpu".to_owned()).and_modify(|bytes| *bytes -= shared);
        Ok(all)
    }

    fn wrong(&mut self) -> anyhow::Result<u64> {
        Ok(self.first.wrong()? + self.others.wrong()?)
    }
}
