//! fig8: an ordinary CPU program and GPU processes paste tiles into one picture. The programs are
//! examples/gaia/stitching's.
//!
//! The picture is as blank before each run: a kernel that stores what is there already stores nothing.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, ensure};

use super::group::{Group, Work};
use crate::gaia::deadline::Deadline;
use crate::gaia::experiment::{Cell, Method, Setting};
use crate::gaia::stage::{Stage, differing_bytes};
use crate::gaia::worker::{Figures, Worker};

struct Stitching {
    group: Group,
    cpu: Option<Worker>,
    start_cpu: Box<dyn Fn() -> std::process::Command>,
    deadline: Deadline,
    picture: PathBuf,
    blank: PathBuf,
    scene: PathBuf,
}

/// With as many GPU processes as the setting says.
pub fn stitching(stage: &Stage, method: &Method, setting: &Setting) -> anyhow::Result<Box<dyn Cell>> {
    let picture = stage.place(method.name == "map", "picture");
    let [tiles, blank, scene] = ["tiles", "blank", "scene"].map(|name| stage.path(name));
    if !tiles.exists() {
        let mut camera = stage.program("camera");
        camera.args([setting.get("columns")?.to_string(), setting.get("rows")?.to_string(), "1".to_owned()]);
        let done = camera.args([&tiles, &blank, &scene]).output()?;
        ensure!(done.status.success(), "camera has failed: {}", String::from_utf8_lossy(&done.stderr).trim());
    }
    std::fs::copy(&blank, &picture).context("Cannot make the picture")?;
    let gpus = setting.get("gpus")? as u32;
    let start = |number: u32| {
        let work = Work::new("pasting", method, &picture).with("tiles", tiles.display());
        work.with("writer", number + 1).with("writers", gpus + 1).spawn(stage, number)
    };
    let group = Group::ready((0..gpus).map(start).collect())?;
    let program = stage.path("stitch");
    let arguments = (tiles, picture.clone());
    let start_cpu = Box::new(move || {
        let mut command = std::process::Command::new(&program);
        command.arg("pwrite").arg(&arguments.0).arg(&arguments.1).args(["0".to_owned(), (gpus + 1).to_string()]);
        command
    });
    Ok(Box::new(Stitching { group, cpu: None, start_cpu, deadline: stage.deadline.clone(), picture, blank, scene }))
}

impl Cell for Stitching {
    fn prepare(&mut self, run: usize) -> anyhow::Result<()> {
        File::options().write(true).open(&self.picture)?.write_all_at(&std::fs::read(&self.blank)?, 0)?;
        self.group.prepare(run)?;
        self.cpu = Some(Worker::start("stitch", &mut (self.start_cpu)(), &self.deadline)?);
        Ok(())
    }

    fn run(&mut self) -> anyhow::Result<Figures> {
        let cpu = self.cpu.as_mut().context("the CPU program was not started")?;
        let begun = Instant::now();
        cpu.tell("go")?;
        let mut figures = self.group.run()?;
        // Number of tiles, and microseconds.
        let line = cpu.line()?;
        let took = line.split_once(' ').and_then(|(_, took)| took.parse::<f64>().ok());
        figures.insert("other".to_owned(), took.with_context(|| format!("stitch has answered `{line}`"))? * 1e-6);
        // Until all have written.
        figures.insert("seconds".to_owned(), begun.elapsed().as_secs_f64());
        self.cpu = None;
        Ok(figures)
    }

    fn wrong(&mut self) -> anyhow::Result<u64> {
        differing_bytes(&self.picture, &self.scene)
    }
}
