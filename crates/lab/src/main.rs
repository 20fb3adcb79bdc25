//! The `spinio-lab` command: measurements of SPIN and of the ideas that it is based on. Users of SPIN do not need it.
//!
//! ```text
//!   bench     the SPIN paper's figures, on this machine's devices
//!   gaia      the evaluation of the GAIA paper, and uses of today
//!   simulate  the distance of each planner from the best schedule, on random residency
//!   chart     points and fit of `spinio calibrate --json`, as SVG
//! ```
//!
//! Devices, tables, units, scratch files and exit codes are those of the `spinio` command (`spinio_cli`). Only this
//! command draws charts, and only it needs the library for that.
#![forbid(unsafe_code)]
#![expect(unreachable_pub, reason = "a command has no library users: `pub` here means `for other files`")]

mod bench;
mod chart;
mod gaia;
mod limit;
mod machine;
mod simulate;
mod svg;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use spinio_cli::{
    calibrate, cleanup, color, device, exit, format, output, progress, quantile, random, scratch, table, test_file,
};

/// The laboratory of SPIN: the figures of the SPIN and GAIA papers, uses of today, the planners' study, charts
#[derive(Debug, Parser)]
#[command(name = "spinio-lab", version, after_help = exit::CODES)]
struct Lab {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Reproduce the paper's figures on this machine: five ways to read a file into device memory
    #[command(after_help = exit::CODES)]
    Bench(bench::Bench),
    /// Reproduce the evaluation of the GAIA paper, and measure uses of today, on a mount of this machine
    #[command(after_help = exit::CODES)]
    Gaia(gaia::Gaia),
    /// Compare the planners on random residency, as the paper did
    #[command(after_help = exit::CODES)]
    Simulate(simulate::Simulate),
    /// Draw what `spinio calibrate --json` measured: points and fit
    #[command(after_help = exit::CODES)]
    Chart(chart::Draw),
}

fn main() -> ExitCode {
    if gaia::is_daemon() {
        return spinio_cli::main();
    }
    progress::start_clock();
    let lab = match Lab::try_parse() {
        Ok(lab) => lab,
        Err(error) => return exit::report("spinio-lab", exit::of_clap(&error)),
    };
    let done = match lab.command {
        Command::Bench(bench) => bench::run(&bench),
        Command::Gaia(gaia) => gaia::run(&gaia),
        Command::Simulate(simulate) => simulate::run(&simulate),
        Command::Chart(draw) => chart::run(&draw),
    };
    exit::report("spinio-lab", done.map(|exit| exit as u8))
}
