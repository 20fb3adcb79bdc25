//! 6.1: reads and writes of a CPU program, of 256 or 4 KiB each, on a file that maps have copies of; and what the daemon's
//! memory for these copies is.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

use super::group::{Group, Work, alone};
use crate::gaia::experiment::{Cell, Method, Setting};
use crate::gaia::stage::{Stage, mix};
use crate::gaia::usage;
use crate::gaia::worker::Figures;
use crate::random::SplitMix64;

struct CpuIo {
    /// The maps, if there are any.
    _owners: Option<Group>,
    file: File,
    path: PathBuf,
    size: u64,
    block: usize,
    passes: u64,
    writes: bool,
    random: bool,
    round: u64,
    gpu: f64,
    /// Bytes of the daemon for each page of each map.
    metadata: f64,
}

/// `method.number` maps; of the method `no mount`, none.
pub fn cpu_io(stage: &Stage, method: &Method, setting: &Setting) -> anyhow::Result<Box<dyn Cell>> {
    let (size, owners) = (setting.get("size")?, method.number);
    let mounted = method.name != "no mount";
    let path = stage.words(mounted, "file", size)?;
    let file = File::options().read(true).write(true).open(&path)?;
    let before = usage::memory_bytes(&stage.daemon());
    let mut group = match owners {
        0 => None,
        _ => Some(alone(stage, &Work::new("owners", method, &path).with("count", owners))?),
    };
    let after = usage::memory_bytes(&stage.daemon());
    let gpu = group.as_mut().map(Cell::run).transpose()?.and_then(|figures| figures.get("gpu").copied()).unwrap_or(0.0);
    let copies = (size / 4096 * owners) as f64;
    let metadata = if owners > 0 { (after - before).max(0.0) / copies } else { 0.0 };
    let (writes, random) = (setting.get("writes")? == 1, setting.get("random")? == 1);
    let (passes, block) = (setting.get("passes")?, (setting.get("kib")? << 10) as usize);
    Ok(Box::new(CpuIo { _owners: group, file, path, size, block, passes, writes, random, round: 0, gpu, metadata }))
}

impl CpuIo {
    fn blocks(&self) -> u64 {
        self.size / self.block as u64
    }

    fn content(&self, number: u64) -> Vec<u8> {
        let round = if self.writes { self.round } else { 0 };
        let first = number * (self.block as u64 / 8);
        (first..first + self.block as u64 / 8).flat_map(|i| (mix(i) ^ round).to_le_bytes()).collect()
    }
}

impl Cell for CpuIo {
    fn prepare(&mut self, _: usize) -> anyhow::Result<()> {
        // What was written before must not be written back meanwhile.
        self.file.sync_all()?;
        std::io::copy(&mut File::open(&self.path)?, &mut std::io::sink())?;
        self.round += 1;
        Ok(())
    }

    fn run(&mut self) -> anyhow::Result<Figures> {
        let blocks = self.blocks();
        let mut random = SplitMix64::new(self.round, 3);
        let content: Vec<_> = (0..blocks).map(|number| self.content(number)).collect();
        let mut buffer = vec![0u8; self.block];
        let this = std::process::id();
        let (cpu, begun) = (usage::cpu_seconds(&[this]), Instant::now());
        for pass in 0..self.passes {
            for i in 0..blocks {
                // Every block is written at least once.
                let number = if self.random && pass > 0 { random.below(blocks) } else { i };
                match self.writes {
                    true => self.file.write_all_at(&content[number as usize], number * self.block as u64)?,
                    false => self.file.read_exact_at(&mut buffer, number * self.block as u64)?,
                }
            }
        }
        let seconds = begun.elapsed().as_secs_f64();
        let bytes = (self.passes * self.size) as f64;
        let figures = [
            ("seconds", seconds),
            ("cpu", usage::cpu_seconds(&[this]) - cpu),
            ("gpu", self.gpu),
            ("rate", bytes / seconds.max(1e-9)),
            ("metadata", self.metadata),
        ];
        Ok(figures.map(|(name, value)| (name.to_owned(), value)).into())
    }

    fn wrong(&mut self) -> anyhow::Result<u64> {
        if !self.writes {
            return Ok(0);
        }
        let mut wrong = 0;
        let mut buffer = vec![0u8; self.block];
        for number in 0..self.blocks() {
            self.file.read_exact_at(&mut buffer, number * self.block as u64)?;
            wrong += self.content(number).iter().zip(&buffer).filter(|(a, b)| a != b).count() as u64;
        }
        Ok(wrong)
    }
}
