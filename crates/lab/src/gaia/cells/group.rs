//! One or several programs with kernels that work at the same time; and false sharing, which is just that.

use std::path::Path;

use crate::gaia::experiment::{Cell, Method, Setting};
use crate::gaia::programs::WORKER;
use crate::gaia::stage::Stage;
use crate::gaia::worker::{Figures, Worker};

/// Programs that get the same commands, each before any has answered.
pub struct Group {
    /// The programs.
    pub workers: Vec<Worker>,
}

/// The arguments of a program with kernels.
pub struct Work<'a> {
    kind: &'static str,
    method: &'static str,
    file: &'a Path,
    more: Vec<(&'static str, String)>,
    memory: Option<u64>,
    all_devices: bool,
}

impl<'a> Work<'a> {
    /// A kind of work, by a method, on a file.
    pub fn new(kind: &'static str, method: &Method, file: &'a Path) -> Work<'a> {
        Work { kind, method: method.name, file, more: Vec::new(), memory: None, all_devices: false }
    }

    /// An argument more.
    pub fn with(mut self, name: &'static str, value: impl ToString) -> Work<'a> {
        self.more.push((name, value.to_string()));
        self
    }

    /// A limit of device memory for maps.
    pub fn memory(mut self, bytes: u64) -> Work<'a> {
        self.memory = Some(bytes);
        self
    }

    /// The program has all devices instead of one.
    pub fn with_all_devices(mut self) -> Work<'a> {
        self.all_devices = true;
        self
    }

    /// Starts the program, on one of the devices, and waits until it is ready.
    pub fn start(&self, stage: &Stage, number: u32) -> anyhow::Result<Worker> {
        let mut worker = self.spawn(stage, number)?;
        worker.ready()?;
        Ok(worker)
    }

    /// Starts the program; its next answer is that it is ready.
    pub fn spawn(&self, stage: &Stage, number: u32) -> anyhow::Result<Worker> {
        let mut command = stage.program(WORKER);
        command.arg(self.kind).arg(format!("method={}", self.method)).arg(format!("file={}", self.file.display()));
        command.args(self.more.iter().map(|(name, value)| format!("{name}={value}")));
        if let Some(bytes) = self.memory {
            command.env("SPINIO_GAIA_MEMORY", bytes.to_string());
        }
        if self.all_devices && !stage.is_cuda() {
            command.env("SPINIO_EMULATED", format!("devices={}", stage.devices));
        }
        if stage.is_cuda() && stage.devices > 1 && !self.all_devices {
            command.env("CUDA_VISIBLE_DEVICES", (number % stage.devices).to_string());
        }
        command.env("SPINIO_GAIA_SOCKET", stage.path("gaia.sock"));
        Worker::spawn(&format!("the program of {}", self.kind), &mut command, &stage.deadline)
    }
}

impl Group {
    /// Waits until all are ready: a process takes up to a second to start a GPU, so they are started before.
    pub fn ready(workers: anyhow::Result<Vec<Worker>>) -> anyhow::Result<Group> {
        let mut workers = workers?;
        workers.iter_mut().try_for_each(Worker::ready)?;
        Ok(Group { workers })
    }

    /// All get the command; their figures together.
    pub fn ask(&mut self, what: &str) -> anyhow::Result<Figures> {
        self.workers.iter_mut().try_for_each(|worker| worker.tell(what))?;
        let mut all = Figures::new();
        for worker in &mut self.workers {
            add(&mut all, worker.hear()?);
        }
        Ok(all)
    }
}

/// Times of programs that ran side by side are those of the slowest; everything else is added.
pub fn add(all: &mut Figures, one: Figures) {
    for (name, value) in one {
        let slowest = matches!(name.as_str(), "seconds" | "kernel" | "release" | "bring" | "other" | "durable");
        let sum = all.entry(name).or_default();
        *sum = if slowest { sum.max(value) } else { *sum + value };
    }
}

impl Cell for Group {
    fn prepare(&mut self, _: usize) -> anyhow::Result<()> {
        self.ask("prepare").map(drop)
    }

    fn run(&mut self) -> anyhow::Result<Figures> {
        self.ask("run")
    }

    fn wrong(&mut self) -> anyhow::Result<u64> {
        Ok(self.ask("check")?.get("wrong").map_or(0, |wrong| *wrong as u64))
    }
}

/// A group of one.
pub fn alone(stage: &Stage, work: &Work<'_>) -> anyhow::Result<Group> {
    Ok(Group { workers: vec![work.start(stage, 0)?] })
}

/// False sharing: `sides` GPU processes, or one and a thread of the CPU.
pub fn sharing(stage: &Stage, method: &Method, setting: &Setting, with_cpu: bool) -> anyhow::Result<Group> {
    let size = setting.get("size")?;
    // Each cell begins with the words as they are made.
    let name = format!("shared-{}-{}", method.name, setting.label);
    let path = stage.place(method.name == "map", &name);
    if path.exists() {
        std::fs::remove_file(&path)?;
    }
    let file = stage.words(method.name == "map", &name, size)?;
    let start = |side: u32| {
        let work = Work::new("sharing", method, &file).with("side", side).with("sides", 2).with("grain", 2048);
        work.with("iterations", setting.get("iterations")?).with("cpu", u8::from(with_cpu)).spawn(stage, side)
    };
    Group::ready((0..if with_cpu { 1 } else { 2 }).map(start).collect())
}

/// fig1b.
pub fn both_processors(stage: &Stage, method: &Method, setting: &Setting) -> anyhow::Result<Box<dyn Cell>> {
    Ok(Box::new(sharing(stage, method, setting, true)?))
}

/// fig1a, and two GPUs that write one file.
pub fn two_devices(stage: &Stage, method: &Method, setting: &Setting) -> anyhow::Result<Box<dyn Cell>> {
    Ok(Box::new(sharing(stage, method, setting, false)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slowest_time_and_sums_of_the_rest() {
        let of =
            |pairs: &[(&str, f64)]| pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect::<Figures>();
        let mut all = Figures::new();
        add(&mut all, of(&[("seconds", 1.0), ("cpu", 0.5), ("merged", 3.0)]));
        add(&mut all, of(&[("seconds", 0.5), ("cpu", 0.25), ("merged", 4.0)]));
        assert_eq!(all, of(&[("seconds", 1.0), ("cpu", 0.75), ("merged", 7.0)]));
    }
}
