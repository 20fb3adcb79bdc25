//! The stress test: everything at once, for as long as one likes.
//!
//! ```text
//!   overseer ──starts, kills, starts again──> workers   threads that read and write device memory, and check
//!       │                                        │
//!       └──────────────────────────> vandal      │      rewrites, truncates, evicts, opens for writing
//!                                       └─ files ┘      some constant, some changing, one log, some of a thread's own
//! ```
//!
//! `cargo x soak` runs it for 30 minutes. It fails if a byte is wrong or of the past, a record of the log is torn or
//! missing, a byte that a session of NVMMU and its rivals wrote is
//! not there, somebody who wants to write a held file or a session's output is not let through, a worker dies that nobody killed, nothing moves
//! for two minutes, or a worker that ends has descriptors, pins, fences, queues or memory left over, or grew.
//!
//! Known limits: the kernel ends a write of a killed process in the middle, as it would a host's; so the first two workers
//! are never killed, and only they write the log. The emulated device stands for all.

mod editions;
mod files;
mod held;
mod moves;
mod overseer;
mod tally;
mod vandal;
mod worker;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

/// Workers up to this number are never killed.
pub(crate) const LAST_PROTECTED: u64 = 2;

/// How the test is run; workers and the vandal are the same program with a role.
#[derive(Clone, Debug, Parser)]
#[command(name = "soak", about = "SPIN's stress test")]
pub(crate) struct Args {
    /// How long
    #[arg(long, default_value_t = 1800)]
    seconds: u64,
    /// Workers at a time
    #[arg(long, default_value_t = 3)]
    processes: usize,
    /// Threads of each
    #[arg(long, default_value_t = 4)]
    threads: usize,
    /// Seconds between one SIGKILL and the next; 0: nobody is killed
    #[arg(long, default_value_t = 5)]
    kill_every: u64,
    /// Another seed, another run
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where the files go; a temporary folder without it
    #[arg(long)]
    folder: Option<PathBuf>,
    #[arg(long, hide = true)]
    worker: Option<u64>,
    #[arg(long, hide = true)]
    vandal: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match (&args.folder, args.worker, args.vandal) {
        (Some(folder), Some(number), _) => worker::run(&args, folder, number),
        (Some(folder), None, true) => vandal::run(&args, folder),
        _ => overseer::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("soak: {error:#}");
            ExitCode::FAILURE
        }
    }
}
