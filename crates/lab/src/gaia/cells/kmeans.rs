//! fig1c: k-means on four threads of the CPU, beside false sharing.

use super::group::{Group, sharing};
use crate::gaia::experiment::{Cell, Method, Setting};
use crate::gaia::stage::Stage;
use crate::gaia::worker::{Figures, Worker};

struct KMeans {
    kmeans: Worker,
    /// None: alone.
    other: Option<Group>,
    rounds: f64,
}

/// Its time is that of k-means.
pub fn kmeans(stage: &Stage, method: &Method, setting: &Setting) -> anyhow::Result<Box<dyn Cell>> {
    let mut command = stage.program("kmeans");
    command.args([setting.get("points")?.to_string(), setting.get("rounds")?.to_string()]);
    let kmeans = Worker::start("kmeans", &mut command, &stage.deadline)?;
    // With managed memory, both writers are in one process.
    let with_cpu = method.name == "managed";
    let other = (method.name != "alone").then(|| sharing(stage, method, setting, with_cpu)).transpose()?;
    Ok(Box::new(KMeans { kmeans, other, rounds: 0.0 }))
}

impl Cell for KMeans {
    fn prepare(&mut self, _: usize) -> anyhow::Result<()> {
        Ok(())
    }

    fn run(&mut self) -> anyhow::Result<Figures> {
        self.kmeans.tell("run")?;
        let Some(other) = &mut self.other else { return self.kmeans.hear() };
        self.rounds = 0.0;
        let mut memory = 0f64;
        let mut figures = loop {
            other.ask("prepare")?;
            let shared = other.ask("run")?;
            memory = memory.max(shared.get("gpu").copied().unwrap_or_default());
            self.rounds += 1.0;
            if let Some(figures) = self.kmeans.poll()? {
                break figures;
            }
        };
        figures.insert("gpu".to_owned(), memory);
        figures.insert("beside".to_owned(), self.rounds);
        Ok(figures)
    }

    fn wrong(&mut self) -> anyhow::Result<u64> {
        let mut wrong = self.kmeans.ask("check")?.get("wrong").copied().unwrap_or_default() as u64;
        if let Some(other) = &mut self.other {
            wrong += other.wrong()?;
        }
        Ok(wrong)
    }
}
