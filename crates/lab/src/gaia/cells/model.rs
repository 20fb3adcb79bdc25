//! Several processes use one model on one GPU: leased files against a copy in each process.
//!
//! The first process is alone, since the others would each read a part for it; then all others start at once. Each adds up
//! the whole model.

use super::group::{Group, Work, add};
use super::leased::Daemon;
use crate::gaia::experiment::{Cell, Method, Setting};
use crate::gaia::stage::Stage;
use crate::gaia::worker::Figures;

struct Model {
    first: Group,
    others: Group,
    /// Ends with this value.
    daemon: Option<Daemon>,
}

/// The file is beside the mount for all methods.
pub fn model(stage: &Stage, method: &Method, setting: &Setting) -> anyhow::Result<Box<dyn Cell>> {
    let file = stage.constant_words(false, "model", setting.get("size")?)?;
    let daemon = (method.name == "map").then(|| Daemon::start(stage)).transpose()?;
    let work = Work::new("streaming", method, &file).with("fresh", 1);
    let mut first = Group::ready((0..setting.get("processes")?).map(|_| work.spawn(stage, 0)).collect())?;
    let others = Group { workers: first.workers.split_off(1) };
    Ok(Box::new(Model { first, others, daemon }))
}

impl Cell for Model {
    fn prepare(&mut self, run: usize) -> anyhow::Result<()> {
        self.first.prepare(run)?;
        self.others.prepare(run)?;
        self.daemon.as_ref().map_or(Ok(()), |daemon| daemon.drop_unmapped(0))
    }

    fn run(&mut self) -> anyhow::Result<Figures> {
        let mut all = self.first.run()?;
        let first = all.get("seconds").copied().unwrap_or_default();
        let others = self.others.run()?;
        let further = others.get("seconds").copied().unwrap_or_default();
        let bring = others.get("bring").copied().unwrap_or_default();
        add(&mut all, others);
        all.insert("seconds".to_owned(), first + further);
        all.insert("first".to_owned(), first);
        all.insert("further".to_owned(), further);
        all.insert("bring".to_owned(), bring);
        // Each process counts what it has mapped.
        let shared = all.get("shared").copied().unwrap_or_default();
        all.entry("gpu".to_owned()).and_modify(|bytes| *bytes -= shared);
        Ok(all)
    }

    fn wrong(&mut self) -> anyhow::Result<u64> {
        Ok(self.first.wrong()? + self.others.wrong()?)
    }
}
