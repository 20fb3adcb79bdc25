//! The cells of the experiments: which programs run, on which files, and what a CPU program does meanwhile.

mod checkpoint;
mod cpu_io;
mod graph;
mod group;
mod kmeans;
mod leased;
mod model;
mod second;
mod stitching;
mod streams;

pub use checkpoint::checkpoint;
pub use cpu_io::cpu_io;
pub use graph::graph;
pub use group::{both_processors, two_devices};
pub use kmeans::kmeans;
pub use model::model;
pub use second::second;
pub use stitching::stitching;
pub use streams::{changes, collage, lud, streaming};

use super::experiment::{Cell, Method, Setting};
use super::stage::Stage;

/// For experiments without a method that can run.
pub fn none(_: &Stage, _: &Method, _: &Setting) -> anyhow::Result<Box<dyn Cell>> {
    anyhow::bail!("nothing of this is in this version")
}
