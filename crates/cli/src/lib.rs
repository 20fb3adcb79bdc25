//! The `spinio` command.
//!
//! ```text
//!   demo      reads a real file into a device, and verifies every byte
//!   run       a program under libspinio.so
//!   read      a file into device memory, in this process
//!   explain   which route each part of a file would take, and why
//!   doctor    what this machine offers, and the cure for each missing facility
//!   calibrate measures what each route costs here, and stores it for every program
//!   stat      what the processes that use SPIN have done; for people, JSON, Prometheus
//!   top       the same, live
//!   net       the sockets that GPU kernels hold, and which blocks wait
//!   trace     each request, with its pieces
//!   gaia      a mount that GPU kernels and CPU programs share
//! ```
//!
//! One file per subcommand. Results go to standard output, errors and tables about another
//! program to standard error. Exit codes are a contract: see [`exit`].
//!
//! It is a library so that the laboratory (`spinio-lab`) shares its tables, units, devices, measurements, compilers and
//! mounts. Only these are public.
#![forbid(unsafe_code)]
#![expect(unreachable_pub, reason = "a command has no library users: `pub` here means `for other files`")]

mod block_stack;
pub mod calibrate;
pub mod cleanup;
pub mod color;
pub mod compiler;
mod demo;
pub mod device;
pub mod device_headers;
mod doctor;
pub mod exit;
mod explain;
pub mod format;
pub mod gaia;
mod input;
pub mod library;
mod net;
pub mod output;
mod pin_holders;
mod processes;
pub mod progress;
pub mod quantile;
pub mod random;
mod range_strip;
mod read;
mod renamed_keys;
mod run;
pub mod scratch;
mod screen;
mod screen_state;
mod stat;
pub mod table;
mod table_dirs;
pub mod test_file;
mod top;
mod trace;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::exit::Exit;

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
    /// Read a file into device memory, here, and print how fast and by which routes
    #[command(after_help = exit::CODES)]
    Read(read::Read),
    /// Draw what a read of a file would do now, part by part, and why
    #[command(after_help = exit::CODES)]
    Explain(explain::Explain),
    /// List every facility of this machine that SPIN can use: found or not, cause and cure
    #[command(after_help = exit::CODES)]
    Doctor(doctor::Doctor),
    /// Measure what each route costs here, and store it for every program under SPIN
    #[command(after_help = exit::CALIBRATE)]
    Calibrate(calibrate::Calibrate),
    /// Show what the processes that use SPIN have done: calls, routes, reasons, latencies
    #[command(after_help = exit::CODES)]
    Stat(stat::Stat),
    /// Watch the processes that use SPIN
    #[command(after_help = exit::CODES)]
    Top(top::Top),
    /// Show the sockets that GPU kernels hold, as `ss` does, and which blocks wait for what
    #[command(after_help = exit::CODES)]
    Net(net::Net),
    /// Record device requests one by one, of a process or of a program to start
    #[command(after_help = exit::TRACE)]
    Trace(trace::Trace),
    /// Mount a directory so that CPU programs and GPU kernels share its files
    Gaia(gaia::Gaia),
    /// Moved to `spinio-lab bench`
    #[command(hide = true, disable_help_flag = true)]
    Bench(Moved),
    /// Moved to `spinio-lab simulate`
    #[command(hide = true, disable_help_flag = true)]
    Simulate(Moved),
}

/// A subcommand that has moved to another program. All arguments after it are accepted and ignored.
#[derive(Debug, Args)]
struct Moved {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

impl Moved {
    fn refuse(&self, name: &str) -> anyhow::Result<u8> {
        Err(exit::error(Exit::Usage, format!("`spinio {name}` has moved: run `spinio-lab {name}` (docs/lab.md)")))
    }
}

/// The command.
pub fn main() -> ExitCode {
    progress::start_clock();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return exit::report("spinio", exit::of_clap(&error)),
    };
    let done = match cli.command {
        Command::Demo(demo) => demo::run(&demo).map(|exit| exit as u8),
        Command::Run(run) => run::run(&run),
        Command::Explain(explain) => explain::run(&explain).map(|exit| exit as u8),
        Command::Doctor(doctor) => doctor::run(&doctor).map(|exit| exit as u8),
        Command::Bench(moved) => moved.refuse("bench"),
        Command::Calibrate(calibrate) => calibrate::run(&calibrate).map(|exit| exit as u8),
        Command::Stat(stat) => stat::run(&stat).map(|exit| exit as u8),
        Command::Top(top) => top::run(&top).map(|exit| exit as u8),
        Command::Net(net) => net::run(&net).map(|exit| exit as u8),
        Command::Trace(trace) => trace::run(&trace),
        Command::Gaia(gaia) => gaia::run(&gaia),
        Command::Simulate(moved) => moved.refuse("simulate"),
        Command::Read(read) => read::run(&read).map(|exit| exit as u8),
    };
    exit::report("spinio", done)
}
