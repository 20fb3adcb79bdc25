//! `spinio gaia demo`: the purpose of GAIA, on a real file, for a new user.
//!
//! ```text
//!   make file ──> compile examples/gaia ──> mount ──> four writers, at the same time, in every page:
//!                                             │         legacy C program: pread and pwrite
//!               SIGKILL of the server, half-way         legacy C program: stores to a shared mapping
//!                                             │         kernels of two processes, each on a device of its own
//!                                             v
//!   every byte compared: by kernels of both GPU processes, by a read through the mount, in the directory after unmount
//! ```
//!
//! Each writer adds to its own cells of every page, so an update that is lost, done twice or invented is seen. All
//! figures are measured: rounds and bytes by the programs and the library's counters, the time without a server by a
//! call that only a server can answer.
//!
//! GPU kernels run on the first CUDA GPU, if there are one and nvcc, else on the emulated device: the report says which.

mod programs;
mod report;
mod writers;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;

use self::report::Report;
use self::writers::{Running, Writers};
use crate::exit::{self, Exit};
use crate::gaia::mounted::Mounted;
use crate::progress::Progress;
use crate::{cleanup, format, library, output, scratch};

const PAGE: u64 = 4096;

/// What `spinio gaia demo` takes.
#[derive(Debug, Args)]
pub struct Demo {
    /// Size of the file: 1M, 64M; a multiple of 4 KiB
    #[arg(long, value_name = "BYTES", default_value = "1M", value_parser = format::parse)]
    size: u64,
    /// Rounds of each writer: one round updates all its bytes once
    #[arg(long, value_name = "N", default_value = "32", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// How many times the server is killed meanwhile
    #[arg(long, value_name = "N", default_value = "1")]
    kills: u32,
    /// Make the directory to mount over in this one, instead of in a temporary directory
    #[arg(long, value_name = "DIR")]
    path: Option<PathBuf>,
}

/// Runs it.
pub fn run(demo: &Demo) -> anyhow::Result<Exit> {
    if demo.size == 0 || !demo.size.is_multiple_of(PAGE) {
        return Err(exit::error(Exit::Usage, "--size needs a multiple of 4 KiB above 0"));
    }
    let library = library::find()?;
    let (directory, _) = demo.path.clone().map_or_else(scratch::disk_dir, |path| (path, None));
    let work = tempfile::Builder::new()
        .prefix("spinio-gaia-demo-")
        .tempdir_in(&directory)
        .with_context(|| format!("Cannot make a temporary directory in {}", directory.display()))?;
    let (directory, running) = (work.path().join("mount"), Running::default());
    let _watch = cleanup::on_signal_after(vec![work.path().to_owned()], {
        let (running, directory) = (running.clone(), directory.clone());
        move || {
            running.kill_all();
            unmount_soon(&directory);
        }
    });
    let gpu = programs::compile(work.path(), &library)?;

    std::fs::create_dir(&directory).with_context(|| format!("Cannot make {}", directory.display()))?;
    let path = directory.join("cells");
    make(&path, demo.size)?;

    let mounted = Mounted::new(&directory)?;
    let mut writers = Writers::start(work.path(), &path, demo.rounds, running)?;
    let begun = Instant::now();
    let mut kills = Vec::new();
    let mut progress = Progress::count(demo.rounds.into(), "Updating the file");
    for round in 1..=demo.rounds {
        let now = kills_before(demo, round) - kills_before(demo, round - 1);
        writers.round(|| {
            for _ in 0..now {
                kills.push(mounted.kill_server()?);
            }
            Ok(())
        })?;
        progress.set(round.into());
    }
    drop(progress);
    let seconds = begun.elapsed().as_secs_f64();
    let through_mount = || wrong_cells(&path, demo);
    // While the GPU processes have it mapped, so that what they released is not written out yet.
    let mut wrong = vec![("read through the mount", through_mount()?)];
    let counters = writers.finish()?;
    drop(writers);
    for (who, gpu) in
        [("seen by kernels of GPU process 0", &counters[2]), ("seen by kernels of GPU process 1", &counters[3])]
    {
        let count = gpu.get("wrong_cells").context("a GPU process has not compared the file")?;
        wrong.push((who, *count));
    }
    mounted.unmount()?;
    wrong.push(("in the directory, after unmount", wrong_cells(&path, demo)?));

    let report =
        Report { size: demo.size, rounds: demo.rounds, gpu, directory: &directory, seconds, kills, counters, wrong };
    output::print(&report.render(&crate::color::OutputStyle::stdout()))?;
    Ok(if report.is_right() { Exit::Ok } else { Exit::Different })
}

/// Kills up to and including this round, spread over all rounds: one is half-way.
fn kills_before(demo: &Demo, round: u32) -> u32 {
    let (round, kills, rounds) = (u64::from(round), u64::from(demo.kills), u64::from(demo.rounds));
    // Kill k is in round k * rounds / (kills + 1), rounded up.
    let due = (round * (kills + 1)) / rounds;
    u32::try_from(due.min(kills)).unwrap_or(u32::MAX)
}

/// Unmounts it, if it is mounted already.
fn unmount_soon(directory: &Path) {
    let is_mounted = || spinio_gaiad::mounts().is_ok_and(|all| all.iter().any(|mount| mount.point == directory));
    for _ in 0..50 {
        if !is_mounted() || spinio_gaiad::unmount(directory).is_ok() {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Cell `i` of the file after this many rounds of all writers; `cells.h` has the same.
fn cell_after(i: u64, rounds: u32) -> u64 {
    let increment = 0x0123_4567_89ab_cdef_u64.wrapping_add((i % 4) * 0x1111_1111_1111_1111);
    i.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(increment.wrapping_mul(rounds.into()))
}

fn make(path: &Path, size: u64) -> anyhow::Result<()> {
    let write = || {
        let mut out = std::io::BufWriter::new(File::create_new(path)?);
        (0..size / 8).try_for_each(|i| out.write_all(&cell_after(i, 0).to_le_bytes()))?;
        out.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()
    };
    write().with_context(|| format!("Cannot write {}", path.display()))
}

/// How many cells of the file are not as all writers should have left them.
fn wrong_cells(path: &Path, demo: &Demo) -> anyhow::Result<u64> {
    let bytes = std::fs::read(path).with_context(|| format!("Cannot read {}", path.display()))?;
    ensure!(bytes.len() as u64 == demo.size, "{} has {} bytes instead of {}", path.display(), bytes.len(), demo.size);
    let cells = bytes.as_chunks::<8>().0.iter().zip(0..);
    Ok(cells.filter(|(cell, i)| u64::from_le_bytes(**cell) != cell_after(*i, demo.rounds)).count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_spread_over_the_rounds() {
        let demo = |rounds, kills| Demo { size: PAGE, rounds, kills, path: None };
        let rounds_of = |demo: Demo| -> Vec<u32> {
            let kills = |round| kills_before(&demo, round) - kills_before(&demo, round - 1);
            (1..=demo.rounds).flat_map(|round| std::iter::repeat_n(round, kills(round) as usize)).collect()
        };
        assert_eq!(rounds_of(demo(32, 1)), [16]);
        assert_eq!(rounds_of(demo(9, 2)), [3, 6]);
        assert!(rounds_of(demo(4, 0)).is_empty());
        assert_eq!(rounds_of(demo(1, 2)), [1, 1]);
    }
}
