//! fig7: shortest paths in a graph whose weights an ordinary CPU program changes. The programs are examples/gaia/graph's.

use anyhow::{Context, ensure};

use super::group::{Group, Work, alone};
use crate::gaia::experiment::{Cell, Method, Setting};
use crate::gaia::stage::Stage;
use crate::gaia::worker::{Figures, Worker};

struct Graph {
    group: Group,
    change: Worker,
    percent: String,
}

/// By maps in the mount, by the others beside it.
pub fn graph(stage: &Stage, method: &Method, setting: &Setting) -> anyhow::Result<Box<dyn Cell>> {
    let file = stage.place(method.name == "map", "graph");
    if !file.exists() {
        let mut generate = stage.program("generate");
        generate.arg(&file).args([setting.get("scale")?.to_string(), "16".to_owned(), "1".to_owned()]);
        let done = generate.output()?;
        ensure!(done.status.success(), "generate has failed: {}", String::from_utf8_lossy(&done.stderr).trim());
    }
    let group = alone(stage, &Work::new("shortest", method, &file))?;
    let mut command = stage.program("change");
    let change = Worker::spawn("change", command.arg("pwrite").arg(&file).arg("1"), &stage.deadline)?;
    Ok(Box::new(Graph { group, change, percent: (setting.get("changed")? as f64 / 100.0).to_string() }))
}

impl Cell for Graph {
    fn prepare(&mut self, _: usize) -> anyhow::Result<()> {
        self.change.tell(&self.percent)?;
        let pages = self.change.line()?;
        pages.parse::<u64>().with_context(|| format!("change has answered `{pages}`")).map(drop)
    }

    fn run(&mut self) -> anyhow::Result<Figures> {
        self.group.run()
    }

    fn wrong(&mut self) -> anyhow::Result<u64> {
        self.group.wrong()
    }
}
