//! The `spinio` command.
//!
//! ```text
//!   demo      the main job on a real file, with proof
//!   run       a program under libspinio.so
//!   read      a file into device memory, in this process
//!   explain   what would happen to each part of a file, and why
//!   doctor    what this machine offers, and the cure for what it lacks
//!   calibrate measures what each route costs here, and keeps it for every program
//!   bench     the paper's figures, on this machine's devices
//!   stat      what the processes that use SPIN have done; for people, JSON, Prometheus
//!   top       the same, live
//!   trace     request by request, with the pieces of each
//!   simulate  how near to the best schedule each planner comes, on random residency
//! ```
//!
//! One file a subcommand. Results go to standard output, errors and tables about somebody
//! else's program to standard error. Exit codes are a contract: see [`exit`].
#![forbid(unsafe_code)]
#![expect(unreachable_pub, reason = "a command has no users to hide from: `pub` here reads as `for other files`")]

mod bench;
mod calibrate;
mod chart;
mod demo;
mod device;
mod doctor;
mod exit;
mod explain;
mod holders;
mod input;
mod library;
mod names;
mod out;
mod paint;
mod processes;
mod progress;
mod random;
mod read;
mod run;
mod scratch;
mod simulate;
mod stack;
mod stat;
mod strip;
mod subject;
mod table;
mod top;
mod trace;
mod units;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};

/// Plain pread on GPU memory in unmodified programs, every byte on the fastest correct route
#[derive(Debug, Parser)]
#[command(name = "spinio", version, after_help = exit::HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the main job: a C program preads a file into device memory, cold, half-cached and cached
    #[command(after_help = exit::CODES)]
    Demo(demo::Demo),
    /// Run a program under SPIN
    #[command(after_help = exit::RUN)]
    Run(run::Run),
    /// Read a file into device memory, here, and say how fast and by which routes
    #[command(after_help = exit::CODES)]
    Read(read::Read),
    /// Draw what a read of a file would do now, part by part, and why
    #[command(after_help = exit::CODES)]
    Explain(explain::Explain),
    /// List every facility of this machine that SPIN can use: found or not, cause and cure
    #[command(after_help = exit::CODES)]
    Doctor(doctor::Doctor),
    /// Reproduce the paper's figures on this machine: five ways to read a file into device memory
    #[command(after_help = exit::CODES)]
    Bench(bench::Bench),
    /// Measure what each route costs here, and keep it for every program under SPIN
    #[command(after_help = exit::CALIBRATE)]
    Calibrate(calibrate::Calibrate),
    /// Show what the processes that use SPIN have done: calls, routes, reasons, latencies
    #[command(after_help = exit::CODES)]
    Stat(stat::Stat),
    /// Watch the processes that use SPIN
    #[command(after_help = exit::CODES)]
    Top(top::Top),
    /// Record device requests one by one, of a process or of a program to start
    #[command(after_help = exit::TRACE)]
    Trace(trace::Trace),
    /// Compare the planners on random residency, as the paper did
    #[command(after_help = exit::CODES)]
    Simulate(simulate::Simulate),
}

fn main() -> ExitCode {
    progress::start_clock();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(told) => return end(told_by_clap(&told)),
    };
    let done = match cli.command {
        Command::Demo(demo) => demo::run(&demo).map(|exit| exit as u8),
        Command::Run(run) => run::run(&run),
        Command::Explain(explain) => explain::run(&explain).map(|exit| exit as u8),
        Command::Doctor(doctor) => doctor::run(&doctor).map(|exit| exit as u8),
        Command::Bench(bench) => bench::run(&bench).map(|exit| exit as u8),
        Command::Calibrate(calibrate) => calibrate::run(&calibrate).map(|exit| exit as u8),
        Command::Stat(stat) => stat::run(&stat).map(|exit| exit as u8),
        Command::Top(top) => top::run(&top).map(|exit| exit as u8),
        Command::Trace(trace) => trace::run(&trace),
        Command::Simulate(simulate) => simulate::run(&simulate).map(|exit| exit as u8),
        Command::Read(read) => read::run(&read).map(|exit| exit as u8),
    };
    end(done)
}

/// Prints help, a version, or what is wrong with the command line. Text that does not arrive is a failure.
fn told_by_clap(told: &clap::Error) -> anyhow::Result<u8> {
    told.print().and_then(|()| std::io::stdout().flush()).context("Cannot write to standard output")?;
    Ok(told.exit_code() as u8)
}

/// The status to end with; says why where it is a failure.
fn end(done: anyhow::Result<u8>) -> ExitCode {
    match done {
        Ok(code) => ExitCode::from(code),
        Err(error) if exit::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("spinio: {error:#}");
            ExitCode::from(exit::code(&error) as u8)
        }
    }
}
