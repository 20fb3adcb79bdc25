//! What an experiment is: data. The runner and the report know nothing else about it.
//!
//! ```text
//!   experiment ── settings (along the chart) x methods (one line each) ── open() ──> cell: prepare, run, count what is wrong
//! ```

use anyhow::Context;

use super::stage::Stage;
use super::worker::Figures;
use crate::svg::Scale;

/// What a method needs beyond a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Nothing.
    Nothing,
    /// A CUDA GPU.
    Cuda,
    /// It is not in this version, for this reason.
    Absent(&'static str),
}

/// One way to do the work.
#[derive(Debug)]
pub struct Method {
    /// In tables, and what the worker is told.
    pub name: &'static str,
    /// In one line.
    pub what: &'static str,
    /// What it needs.
    pub needs: Needs,
    /// A number that the cell understands: owners.
    pub number: u64,
}

impl Method {
    /// One that runs everywhere.
    pub const fn new(name: &'static str, what: &'static str) -> Method {
        Method { name, what, needs: Needs::Nothing, number: 0 }
    }

    /// The same, with a need.
    pub const fn needs(self, needs: Needs) -> Method {
        Method { name: self.name, what: self.what, needs, number: self.number }
    }

    /// The same, with a number.
    pub const fn number(self, number: u64) -> Method {
        Method { name: self.name, what: self.what, needs: self.needs, number }
    }
}

/// Values with which all methods are measured.
#[derive(Debug)]
pub struct Setting {
    /// In the first column of the table.
    pub label: &'static str,
    /// Along the chart.
    pub x: f64,
    /// What the cell understands.
    pub values: &'static [(&'static str, u64)],
}

impl Setting {
    /// A value.
    pub fn get(&self, name: &str) -> anyhow::Result<u64> {
        let found = self.values.iter().find(|(key, _)| *key == name);
        found.map(|(_, value)| *value).with_context(|| format!("the setting {} has no {name}", self.label))
    }
}

/// How a figure is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Of time.
    Seconds,
    /// Of memory.
    Bytes,
    /// A count.
    Number,
}

/// A figure that is printed beside time, processors and memory.
#[derive(Debug)]
pub struct Column {
    /// Its name in figures.
    pub key: &'static str,
    /// Its head.
    pub label: &'static str,
    /// Its unit.
    pub unit: Unit,
}

/// Starts the programs of one method at one setting.
pub type Open = fn(&Stage, &Method, &Setting) -> anyhow::Result<Box<dyn Cell>>;

/// One row of the paper's evaluation, or a use of today.
pub struct Experiment {
    /// On the command line.
    pub name: &'static str,
    /// In one line.
    pub title: &'static str,
    /// What the paper says; of uses of today, what is expected.
    pub claim: &'static str,
    /// The first one that can run is what others are compared with.
    pub methods: &'static [Method],
    /// On emulated devices.
    pub small: &'static [Setting],
    /// On GPUs.
    pub full: &'static [Setting],
    /// On GPUs, files of many GB; none: as `full`.
    pub large: &'static [Setting],
    /// Beside time, processors and memory.
    pub columns: &'static [Column],
    /// The chart's horizontal axis.
    pub axis: (&'static str, Along),
    /// Starts a cell.
    pub open: Open,
}

/// The scale of the horizontal axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Along {
    /// Powers of 10.
    Log,
    /// The labels of the settings.
    Labels,
}

impl Along {
    /// For the chart.
    pub fn scale(self, settings: &[Setting]) -> Scale {
        match self {
            Along::Log => Scale::Log,
            Along::Labels => Scale::Names(settings.iter().map(|s| s.label.to_owned()).collect()),
        }
    }
}

/// One method at one setting, ready to run. It ends its programs when dropped.
pub trait Cell {
    /// Not timed. `run`: 0 for the first one, which is dropped.
    fn prepare(&mut self, run: usize) -> anyhow::Result<()>;
    /// The work. The figures have `seconds`.
    fn run(&mut self) -> anyhow::Result<Figures>;
    /// How many results of the last run are wrong.
    fn wrong(&mut self) -> anyhow::Result<u64>;
}
