//! Kernels that read a file, or parts of it: fig6a, fig6b, table 2, and a file that a CPU program changes.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::group::{Group, Work, alone};
use crate::gaia::experiment::{Cell, Method, Setting};
use crate::gaia::stage::{Stage, cache, evict, mix};
use crate::gaia::worker::Figures;
use crate::random::SplitMix64;

const PAGE: u64 = 4096;

/// A group, after something is done to its file before each run.
struct After<F> {
    group: Group,
    before: F,
}

impl<F: FnMut(usize) -> anyhow::Result<()>> Cell for After<F> {
    fn prepare(&mut self, run: usize) -> anyhow::Result<()> {
        self.group.prepare(run)?;
        (self.before)(run)
    }

    fn run(&mut self) -> anyhow::Result<Figures> {
        self.group.run()
    }

    fn wrong(&mut self) -> anyhow::Result<u64> {
        self.group.wrong()
    }
}

/// Whether a method uses the mount.
fn has_maps(method: &Method) -> bool {
    matches!(method.name, "map" | "windows" | "in place")
}

/// How the file is before a run.
fn leave_cached(
    stage: &Stage,
    file: &Path,
    cold: bool,
) -> anyhow::Result<impl FnMut(usize) -> anyhow::Result<()> + use<>> {
    let files = stage.opened(file)?;
    Ok(move |_| if cold { evict(&files) } else { cache(&files) })
}

/// fig6a.
pub fn streaming(stage: &Stage, method: &Method, setting: &Setting) -> anyhow::Result<Box<dyn Cell>> {
    let size = setting.get("size")?;
    let file = stage.constant_words(has_maps(method), "words", size)?;
    let mut work = Work::new("streaming", method, &file).with("fresh", 1);
    if method.name == "windows" {
        work = work.with("window", size / 8).memory(size / 2);
    }
    let group = alone(stage, &work)?;
    Ok(Box::new(After { group, before: leave_cached(stage, &file, setting.get("cold")? == 1)? }))
}

/// fig6b.
pub fn lud(stage: &Stage, method: &Method, setting: &Setting) -> anyhow::Result<Box<dyn Cell>> {
    let n = setting.get("n")?;
    let file = stage.made(has_maps(method), &format!("matrix-{n}"), |out| {
        for i in 0..n * n {
            // From 0 to 1; the diagonal is larger than the sum of its row.
            let value = (mix(i) >> 40) as f32 / (1 << 24) as f32 + if i % (n + 1) == 0 { n as f32 } else { 0.0 };
            out.write_all(&value.to_le_bytes())?;
        }
        Ok(())
    })?;
    Ok(Box::new(alone(stage, &Work::new("lud", method, &file))?))
}

/// Table 2.
pub fn collage(stage: &Stage, method: &Method, setting: &Setting) -> anyhow::Result<Box<dyn Cell>> {
    let (size, limit) = (setting.get("size")?, setting.get("limit")?);
    let file = stage.constant_words(has_maps(method), "images", size)?;
    let work = Work::new("collage", method, &file).with("blocks", setting.get("blocks")?).with("window", limit / 4);
    let work = work.with("limit", limit);
    let group = alone(stage, &work.memory(limit))?;
    Ok(Box::new(After { group, before: leave_cached(stage, &file, setting.get("cold")? == 1)? }))
}

/// An ordinary CPU program changes a word in some of the pages; then kernels add up all words.
pub fn changes(stage: &Stage, method: &Method, setting: &Setting) -> anyhow::Result<Box<dyn Cell>> {
    let size = setting.get("size")?;
    let file = stage.words(has_maps(method), "changing", size)?;
    let group = alone(stage, &Work::new("streaming", method, &file).with("fresh", 0))?;
    let pages = size / PAGE;
    let changed = (pages * setting.get("changed")?).div_ceil(10_000);
    let out = File::options().write(true).open(&file)?;
    let before = move |run| {
        let mut random = SplitMix64::new(run as u64, 7);
        for i in 0..changed {
            // One in each of as many equal parts of the file.
            let (from, past) = (i * pages / changed, (i + 1) * pages / changed);
            let page = from + random.below(past - from);
            out.write_all_at(&random.next_u64().to_le_bytes(), page * PAGE + random.below(PAGE / 8) * 8)?;
        }
        Ok(())
    };
    Ok(Box::new(After { group, before }))
}
